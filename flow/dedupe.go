package flow

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"
)

// MaxDedupe is the longest time of a [Dedupe] of records that do not come in the order of
// their times: 7300 days.
const MaxDedupe = maxWindow

// Dedupe drops a record whose value repeats one of the same key that was accepted less
// than `within` before. id is the identity of the state.
//
// Where the records come from one source and have their first key, the time is the
// timestamp that the source stream gave them. Elsewhere, behind a [Merge] of sources, a
// [Rekey] or a join, records do not come in the order of their times: there the time is
// that of [Meta.EventTime], a repeat is a record less than `within` before or after one
// that was accepted, and a value is forgotten when the watermark of the task says that no
// record can repeat it any more. A record that comes later than that is accepted.
func Dedupe[T any](s Stream[T], id string, within time.Duration, by func(m *Meta, v T) (string, error), opts ...StepOption) Stream[T] {
	step, out := stateful(s, "dedupe", id, 0, opts), then[T, T](s)
	s.b.need(step, "function", by != nil)
	inOrder := s.source > 0 && s.stage == 0
	switch {
	case within <= 0:
		s.b.errorf("step %q: dedupe within %v: a positive time is needed", id, within)
	case !inOrder && within > MaxDedupe:
		s.b.errorf("step %q: dedupe within %v: at most %d days are possible for records of several sources, and behind a change of key", id, within, int(MaxDedupe/day))
	}
	if !inOrder {
		s.b.waits(s.stage)
	}
	s.hub.subscribe(func(in *instance) emit[T] {
		next := out.hub.bind(in)
		d := deduper[T]{in: in, step: step, by: by}
		if inOrder {
			seen := newSeenValues(in.task, in.f.stepID(step), within)
			return func(m *Meta, v T) {
				if d.value(m, v) && seen.accept(d.composite, m.nanos) {
					next(m, v)
				}
			}
		}
		seen := newSeenTimes(in.task, in.f.stepID(step), within, s.delay)
		return func(m *Meta, v T) {
			if m.ahead {
				in.fail(step, m, m.tooFarAhead())
				return
			}
			if d.value(m, v) && seen.accept(d.composite, m.at) {
				next(m, v)
			}
		}
	})
	return out
}

type deduper[T any] struct {
	in   *instance
	step int
	by   func(m *Meta, v T) (string, error)
	// composite is key and value of the record at hand.
	composite []byte
}

// value makes the composite. It reports false for a record that has failed.
func (d *deduper[T]) value(m *Meta, v T) bool {
	d.in.step = d.step
	value, err := d.by(m, v)
	if err != nil {
		d.in.fail(d.step, m, err)
		return false
	}
	d.composite = binary.AppendUvarint(d.composite[:0], uint64(len(m.Key)))
	d.composite = append(d.composite, m.Key...)
	d.composite = append(d.composite, value...)
	return true
}

// nanosCodec stores a time in nanoseconds. Of several, as timesCodec stores them, it
// reads the last one.
var nanosCodec = StateCodec[int64]{
	Append: func(dst []byte, s *int64) ([]byte, error) { return binary.AppendVarint(dst, *s), nil },
	Decode: func(data []byte, s *int64) error {
		times, err := decodeTimes(data)
		if err == nil {
			*s = times[len(times)-1]
		}
		return err
	},
}

// timesCodec stores times in their order.
var timesCodec = StateCodec[[]int64]{
	Append: func(dst []byte, s *[]int64) ([]byte, error) {
		for _, t := range *s {
			dst = binary.AppendVarint(dst, t)
		}
		return dst, nil
	},
	Decode: func(data []byte, s *[]int64) (err error) {
		*s, err = decodeTimes(data)
		return err
	},
}

func decodeTimes(data []byte) ([]int64, error) {
	r := reader{data: data}
	times := []int64{r.varint()}
	for len(r.data) > 0 && !r.bad {
		times = append(times, r.varint())
	}
	if r.bad || !slices.IsSorted(times) {
		return nil, errNotATime
	}
	return times, nil
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

func newSeenValues(t *Task, id string, within time.Duration) *seenValues {
	s := &seenValues{within: int64(within), table: newTable(t, id, nanosCodec)}
	s.table.onLoaded = s.loaded
	return s
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

// seenTimes remembers the times at which a (key, value) was accepted, of records that do
// not come in the order of their times, until the watermark says that no record can be
// near one any more. What counts is the watermark and not whether a time is still
// stored, so that the results do not depend on how fast it is forgotten.
type seenTimes struct {
	t      *Task
	table  *table[[]int64]
	within int64
	// after is how far the watermark has to be behind a time: within, and the delay of
	// the records.
	after int64
	heap  heap[seenTime]
	// sweepAt is a watermark before which nothing is swept.
	sweepAt int64
}

type seenTime struct {
	at   int64
	cell *cell[[]int64]
}

func (e seenTime) before(o seenTime) bool { return e.at < o.at }

// sweepMost bounds how many times are forgotten at once.
const sweepMost = 1024

func newSeenTimes(t *Task, id string, within, delay time.Duration) *seenTimes {
	s := &seenTimes{t: t, within: int64(within), after: int64(within + delay), table: newTable(t, id, timesCodec), sweepAt: noTime}
	s.table.onLoaded = s.loaded
	t.sweepers = append(t.sweepers, s)
	return s
}

// forgotten reports that no record can be near a time any more. While something is done
// that was due, or waits and is done at the end of a drain, the time for which it was due
// counts, but nothing behind the watermark, which does not move when the input ends.
func (s *seenTimes) forgotten(at int64) bool { return at+s.after <= min(s.t.now, s.t.low) }

func (s *seenTimes) accept(composite []byte, at int64) bool {
	s.expire(2)
	c := s.table.cells[string(composite)]
	if c != nil {
		for _, was := range c.state {
			if at < was+s.within && was < at+s.within && !s.forgotten(was) {
				return false
			}
		}
	}
	if s.forgotten(at) {
		return true
	}
	if c == nil {
		c = s.table.add(string(composite))
	}
	i, _ := slices.BinarySearch(c.state, at)
	c.state = slices.Insert(c.state, i, at)
	s.table.mark(c)
	s.heap.push(seenTime{at, c})
	return true
}

// expire forgets a number of times at the most.
func (s *seenTimes) expire(most int) {
	for range most {
		if len(s.heap) == 0 || !s.forgotten(s.heap[0].at) {
			return
		}
		e := s.heap.pop()
		i, there := slices.BinarySearch(e.cell.state, e.at)
		switch {
		case !there:
		case len(e.cell.state) == 1:
			s.table.remove(e.cell)
		default:
			e.cell.state = slices.Delete(e.cell.state, i, i+1)
			s.table.mark(e.cell)
		}
	}
}

// due and sweep are those of a sweeper. Records do most of the work; without any, what
// is forgotten at about one time goes at once, so that a flow at rest has little to
// commit.
func (s *seenTimes) due() int64 {
	if len(s.heap) == 0 {
		return noDue
	}
	return max(s.sweepAt, ceilTo(s.heap[0].at+s.after, s.grain()))
}

func (s *seenTimes) sweep() {
	if s.t.low < s.due() {
		return
	}
	s.expire(sweepMost)
	s.sweepAt = floorTo(s.t.low, s.grain()) + s.grain()
}

// grain is the time between two sweeps.
func (s *seenTimes) grain() int64 { return max(s.within/8, int64(time.Second)) }

func (s *seenTimes) loaded() {
	s.heap = s.heap[:0]
	for _, c := range s.table.slots {
		if c == nil {
			continue
		}
		for _, at := range c.state {
			s.heap.push(seenTime{at, c})
		}
	}
}
