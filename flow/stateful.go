package flow

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"
)

// stateful registers a step with state.
func stateful[T any](s Stream[T], kind, id string, version int, opts []StepOption) int {
	info := StepInfo{ID: id, Kind: kind, Stateful: true, Version: version, Keyed: s.keyed, Stage: s.stage}
	for _, o := range opts {
		o(&info)
	}
	switch {
	case s.spread:
		s.b.errorf("step %q: %s keeps state for each key, and the stream was redistributed: put a Rekey before it", info.ID, info.Kind)
	case !s.keyed:
		s.b.errorf("step %q: %s keeps state for each key: put a KeyBy before it", info.ID, info.Kind)
	}
	return s.b.step(info)
}

// Stateful runs fn on each record with the state of its key. The first record of
// a key finds the zero value. fn may emit any number of results, may change
// *state, and may drop it by [Meta.DropState]. Changes made before an error stay.
//
// id is the identity of the state: keep it when the flow changes.
func Stateful[T, S, U any](s Stream[T], id string, codec StateCodec[S],
	fn func(m *Meta, state *S, v T, emit func(U)) error, opts ...StepOption,
) Stream[U] {
	step, out := stateful(s, "stateful", id, codec.Version, opts), then[T, U](s)
	s.b.need(step, "function", fn != nil)
	s.b.need(step, "state codec with Append and Decode", codec.usable())
	s.hub.subscribe(func(in *instance) emit[T] {
		tab := newTable(in.task, in.f.stepID(step), codec)
		next := out.hub.bind(in)
		var current *Meta
		each := func(u U) {
			// A stateful step behind this one has its own.
			drop, unchanged := current.drop, current.unchanged
			next(current, u)
			current.drop, current.unchanged = drop, unchanged
			in.step = step
		}
		return func(m *Meta, v T) {
			in.step, current = step, m
			c, fresh := tab.getOrAdd(m.Key)
			m.drop, m.unchanged = false, false
			// Marked before the call: a panic may leave the state changed.
			marked := tab.mark(c)
			err := fn(m, &c.state, v, each)
			switch {
			case m.drop && fresh:
				tab.takeBack(c, marked, fresh)
			case m.drop:
				tab.remove(c)
			case m.unchanged && err == nil:
				tab.takeBack(c, marked, fresh)
			}
			if err != nil {
				in.fail(step, m, err)
			}
		}
	})
	return out
}

// EmitMode says when an aggregate emits.
type EmitMode int

// The ways to emit.
const (
	// EmitUpdate emits one result for each record.
	EmitUpdate EmitMode = iota
	// EmitCommit emits the latest result of each changed key with a commit.
	EmitCommit
)

// Aggregator folds the records of a key into a state.
type Aggregator[T, S, U any] struct {
	// State says how the state is stored.
	State StateCodec[S]
	// Add folds a record into *s, which starts as the zero value. After an
	// error *s must be as before.
	Add func(m *Meta, s *S, v T) error
	// Result makes the result of the key's state.
	Result func(m *Meta, s *S) (U, error)
	// Emit defaults to [EmitUpdate].
	Emit EmitMode
}

// Aggregate folds the records of each key. id is the identity of the state.
func Aggregate[T, S, U any](s Stream[T], id string, a Aggregator[T, S, U], opts ...StepOption) Stream[U] {
	step, out := stateful(s, "aggregate", id, a.State.Version, opts), then[T, U](s)
	s.b.need(step, "Add", a.Add != nil)
	s.b.need(step, "Result", a.Result != nil)
	s.b.need(step, "state codec with Append and Decode", a.State.usable())
	if a.Emit != EmitUpdate && a.Emit != EmitCommit {
		s.b.errorf("step %q: there is no EmitMode %d", id, a.Emit)
	}
	s.hub.subscribe(func(in *instance) emit[T] {
		tab := newTable(in.task, in.f.stepID(step), a.State)
		next := out.hub.bind(in)
		result := func(m *Meta, c *cell[S]) {
			u, err := a.Result(m, &c.state)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			next(m, u)
		}
		if a.Emit == EmitCommit {
			latest := &latestResults[S]{in: in, step: step, result: result, table: tab}
			in.task.flushers = append(in.task.flushers, flusher{step, latest.flush})
			return func(m *Meta, v T) {
				in.step = step
				if c := addTo(in, step, tab, a.Add, m, v); c != nil {
					latest.changed(c, m)
				}
			}
		}
		return func(m *Meta, v T) {
			in.step = step
			if c := addTo(in, step, tab, a.Add, m, v); c != nil {
				result(m, c)
			}
		}
	})
	return out
}

func addTo[T, S any](in *instance, step int, tab *table[S], add func(*Meta, *S, T) error, m *Meta, v T) *cell[S] {
	c, fresh := tab.getOrAdd(m.Key)
	// Marked before the call: a panic may leave the state changed.
	marked := tab.mark(c)
	if err := add(m, &c.state, v); err != nil {
		// A key whose only record failed has no state.
		tab.takeBack(c, marked, fresh)
		in.fail(step, m, err)
		return nil
	}
	return c
}

// latestResults emits, at a seal, the result of each key that has changed since
// the last one, with the position of its last record.
type latestResults[S any] struct {
	in     *instance
	step   int
	result func(*Meta, *cell[S])
	table  *table[S]
	// waiting has the changed keys in the order of their first change; a cell
	// knows its place.
	waiting []waitingResult[S]
}

type waitingResult[S any] struct {
	cell *cell[S]
	last Meta
}

func (l *latestResults[S]) changed(c *cell[S], m *Meta) {
	if c.waiting > 0 {
		l.waiting[c.waiting-1].last = *m
		return
	}
	l.waiting = append(l.waiting, waitingResult[S]{c, *m})
	c.waiting = int32(len(l.waiting))
}

func (l *latestResults[S]) flush() {
	for i := 0; i < len(l.waiting) && l.in.halted == nil; {
		i = l.flushUntilPanic(i)
	}
	for _, w := range l.waiting {
		w.cell.waiting = 0
	}
	clear(l.waiting)
	l.waiting = l.waiting[:0]
}

func (l *latestResults[S]) flushUntilPanic(from int) (done int) {
	t := l.in.task
	i := from
	defer func() {
		if r := recover(); r != nil {
			l.in.panicked(&t.meta, r)
			done = i + 1
		}
	}()
	for ; i < len(l.waiting); i++ {
		w := &l.waiting[i]
		t.meta = w.last
		l.in.step = l.step
		// Result may change the state, say, to begin a new sum.
		l.table.mark(w.cell)
		l.result(&t.meta, w.cell)
	}
	return i
}

// Dedupe drops a record whose value repeats one that the same key had accepted
// less than `within` before, by the timestamps of the source stream. id is the
// identity of the state.
func Dedupe[T any](s Stream[T], id string, within time.Duration, by func(m *Meta, v T) (string, error), opts ...StepOption) Stream[T] {
	step, out := stateful(s, "dedupe", id, 0, opts), then[T, T](s)
	s.b.need(step, "function", by != nil)
	if s.stage > 0 {
		s.b.errorf("step %q: dedupe in stage %d: behind a change of key the times of the records do not run together: put it before the Rekey", id, s.stage)
	}
	if within <= 0 {
		s.b.errorf("step %q: dedupe within %v: a positive time is needed", id, within)
	}
	s.hub.subscribe(func(in *instance) emit[T] {
		seen := &seenValues{within: int64(within)}
		seen.table = newTable(in.task, in.f.stepID(step), nanosCodec)
		seen.table.onLoaded = seen.loaded
		next := out.hub.bind(in)
		var scratch []byte
		return func(m *Meta, v T) {
			in.step = step
			value, err := by(m, v)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			scratch = binary.AppendUvarint(scratch[:0], uint64(len(m.Key)))
			scratch = append(scratch, m.Key...)
			scratch = append(scratch, value...)
			if seen.accept(scratch, m.nanos) {
				next(m, v)
			}
		}
	})
	return out
}

// nanosCodec stores a time in nanoseconds.
var nanosCodec = StateCodec[int64]{
	Append: func(dst []byte, s *int64) ([]byte, error) { return binary.AppendVarint(dst, *s), nil },
	Decode: func(data []byte, s *int64) error {
		v, n := binary.Varint(data)
		if n != len(data) || n <= 0 {
			return errNotATime
		}
		*s = v
		return nil
	},
}

var errNotATime = errors.New("not a time")

// seenValues remembers when a (key, value) was last accepted. A queue in the
// order of acceptance lets the expired ones go without a search.
type seenValues struct {
	table  *table[int64]
	within int64
	queue  []seenAt
	head   int
}

type seenAt struct {
	cell  *cell[int64]
	nanos int64
}

func (s *seenValues) accept(composite []byte, now int64) bool {
	s.expire(now)
	c := s.table.cells[string(composite)]
	if c != nil && now-c.state < s.within {
		return false
	}
	if c == nil {
		c = s.table.add(string(composite))
	}
	c.state = now
	s.table.mark(c)
	s.queue = append(s.queue, seenAt{c, now})
	return true
}

// expire forgets a bounded number of expired values; two for each accepted one,
// so that it keeps up.
func (s *seenValues) expire(now int64) {
	for range 2 {
		if s.head == len(s.queue) {
			return
		}
		e := s.queue[s.head]
		if now-e.nanos < s.within {
			return
		}
		s.queue[s.head] = seenAt{}
		s.head++
		// The value may have been accepted again: it has a later place then.
		if !e.cell.gone && e.cell.state == e.nanos {
			s.table.remove(e.cell)
		}
		if s.head > 1024 && s.head > len(s.queue)/2 {
			s.queue = slices.Delete(s.queue, 0, s.head)
			s.head = 0
		}
	}
}

func (s *seenValues) loaded() {
	s.queue, s.head = s.queue[:0], 0
	for _, c := range s.table.slots {
		if c != nil {
			s.queue = append(s.queue, seenAt{c, c.state})
		}
	}
	slices.SortFunc(s.queue, func(a, b seenAt) int {
		switch {
		case a.nanos < b.nanos:
			return -1
		case a.nanos > b.nanos:
			return 1
		}
		return 0
	})
}
