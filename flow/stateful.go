package flow

import "time"

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
	// Result makes the result of the key's state. At the end of a drain with [Finish] it
	// is called once more for each key, with [PaneFinal]; the state stays.
	Result func(m *Meta, s *S) (U, error)
	// Emit defaults to [EmitUpdate].
	Emit EmitMode
	// TTL, if it is not 0, drops the state of a key that no record was added to for that
	// long, as that of [StatefulConfig] does. The next record of the key starts anew.
	TTL time.Duration
}

// Aggregate folds the records of each key. id is the identity of the state. A drain with
// [Finish] emits the result of each key once more, in the order of the keys.
func Aggregate[T, S, U any](s Stream[T], id string, a Aggregator[T, S, U], opts ...StepOption) Stream[U] {
	opts = append([]StepOption{func(info *StepInfo) { info.TTL = a.TTL }}, opts...)
	step, out := stateful(s, "aggregate", id, a.State.Version, opts), then[T, U](s)
	needTTL(s, id, a.TTL)
	s.b.need(step, "Add", a.Add != nil)
	s.b.need(step, "Result", a.Result != nil)
	s.b.need(step, "state codec with Append and Decode", a.State.usable())
	if a.Emit != EmitUpdate && a.Emit != EmitCommit {
		s.b.errorf("step %q: there is no EmitMode %d", id, a.Emit)
	}
	s.hub.subscribe(func(in *instance) emit[T] {
		next := out.hub.bind(in)
		if a.TTL > 0 {
			a := expiring(a)
			tab := newTable(in.task, in.f.stepID(step), a.State)
			e := newExpiry(in, step, a.TTL, tab)
			tab.onLoaded = e.loaded
			return bindAggregate(in, step, a, tab, e.touch, next)
		}
		return bindAggregate(in, step, a, newTable(in.task, in.f.stepID(step), a.State), nil, next)
	})
	return out
}

// bindAggregate makes the closure of an aggregate; touch, if it is there, is told of each
// record that was added.
func bindAggregate[T, S, U any](in *instance, step int, a Aggregator[T, S, U], tab *table[S],
	touch func(*cell[S], *Meta), next emit[U],
) emit[T] {
	result := func(m *Meta, c *cell[S]) {
		u, err := a.Result(m, &c.state)
		if err != nil {
			in.fail(step, m, err)
			return
		}
		if m.pane == PaneFinal {
			in.task.made()
		}
		next(m, u)
	}
	atDrain(in.task, step, tab, func(mode DrainMode) bool { return mode == Finish }, func(_ *Drain, c *cell[S]) {
		// Result may change the state.
		tab.mark(c)
		result(in.task.endMeta(c.key, PaneFinal, noTime), c)
	})
	var latest *latestResults[S]
	if a.Emit == EmitCommit {
		latest = &latestResults[S]{in: in, step: step, result: result, table: tab}
		in.task.flushers = append(in.task.flushers, flusher{step, latest.flush})
	}
	return func(m *Meta, v T) {
		in.step = step
		c := addTo(in, step, tab, a.Add, m, v)
		if c == nil {
			return
		}
		if touch != nil {
			touch(c, m)
		}
		if latest != nil {
			latest.changed(c, m)
			return
		}
		// Its results are its own, whatever the record is a result of.
		pane := m.pane
		m.pane = PaneNone
		result(m, c)
		m.pane = pane
	}
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
		t.meta.pane = PaneNone
		l.in.step = l.step
		// Result may change the state, say, to begin a new sum.
		l.table.mark(w.cell)
		l.result(&t.meta, w.cell)
	}
	return i
}
