package flow

import (
	"math"
	"time"
)

// expiry forgets the keys of a step that no record has touched for its TTL, by the
// time of the streams. A key has one entry in the heap, which is looked at when it
// would have expired without later records.
type expiry[S any] struct {
	t     *Task
	step  int
	ttl   int64
	table *table[keyState[S]]
	heap  heap[dueEntry[keyState[S]]]
	// unknown are cells without a last touch: state from before the step had a TTL, and
	// of records that are of no stream before the time of the streams was known. They
	// are touched as soon as it is.
	unknown []*cell[keyState[S]]
}

// newExpiry is nil without a TTL.
func newExpiry[S any](in *instance, step int, ttl time.Duration, tab *table[keyState[S]]) *expiry[S] {
	if ttl <= 0 {
		return nil
	}
	e := &expiry[S]{t: in.task, step: step, ttl: int64(ttl), table: tab}
	in.task.waitForStream(e)
	return e
}

// needTTL checks the TTL of a step, and what follows from it.
func needTTL[T any](s Stream[T], id string, ttl time.Duration) {
	switch {
	case ttl < 0 || int64(ttl) > int64(maxWindow):
		s.b.errorf("step %q: a TTL of %v: it is positive and at most %d days, or 0 for none", id, ttl, maxWindow/day)
	case ttl > 0:
		s.b.needStreamTime(s.stage)
	}
}

// touch notes that a record has come for a key.
func (e *expiry[S]) touch(c *cell[keyState[S]], m *Meta) {
	k, at := &c.state, m.nanos
	if m.Seq == 0 {
		// It comes of no record, and has no timestamp.
		at = max(e.t.streamTime(), 0)
	}
	k.touched = max(k.touched, at)
	e.queue(c)
}

func (e *expiry[S]) queue(c *cell[keyState[S]]) {
	k := &c.state
	if k.expires {
		return
	}
	k.expires = true
	if k.touched == 0 {
		if len(e.unknown) == 0 {
			e.t.unknown = append(e.t.unknown, e.begin)
		}
		e.unknown = append(e.unknown, c)
		return
	}
	e.heap.push(dueEntry[keyState[S]]{k.touched + e.ttl, c})
	if stale(len(e.heap), e.table.size()) {
		e.loaded()
	}
}

// stale reports that a heap has many more entries than there are keys: those of keys that
// are gone would stay, with their cells, until their time comes.
func stale(entries, keys int) bool { return entries > 2*keys+1024 }

// begin touches the cells of which nothing was known.
func (e *expiry[S]) begin(now int64) {
	for _, c := range e.unknown {
		if c.gone || !c.state.expires {
			continue
		}
		c.state.touched = max(c.state.touched, now)
		e.table.mark(c)
		e.heap.push(dueEntry[keyState[S]]{c.state.touched + e.ttl, c})
	}
	e.unknown = nil
}

// index, next and fire are those of a timedStep.
func (e *expiry[S]) index() int { return e.step }

func (e *expiry[S]) next() int64 {
	if e.t.finishing {
		return math.MaxInt64 // the end of the input is not the end of the state
	}
	for len(e.heap) > 0 {
		top := e.heap[0]
		k := &top.cell.state
		if top.cell.gone || !k.expires {
			e.heap.pop()
			continue
		}
		due := k.touched + e.ttl
		if due == top.due {
			return due
		}
		e.heap.pop()
		e.heap.push(dueEntry[keyState[S]]{due, top.cell})
	}
	return math.MaxInt64
}

// fire forgets the first key, and its timers.
func (e *expiry[S]) fire() { e.table.remove(e.heap.pop().cell) }

// slack is how late a key may be forgotten where nothing but the clock of the server
// says that it is time: nobody can see it, and each look at that clock is a request.
func (e *expiry[S]) slack() int64 { return min(e.ttl/16, int64(time.Minute)) }

// loaded makes the heap of what was loaded.
func (e *expiry[S]) loaded() {
	e.heap, e.unknown = e.heap[:0], nil
	for _, c := range e.table.slots {
		if c != nil {
			c.state.expires = false
			e.queue(c)
		}
	}
}

// expiring is an Aggregator whose states are stored with their last touch.
func expiring[T, S, U any](a Aggregator[T, S, U]) Aggregator[T, keyState[S], U] {
	return Aggregator[T, keyState[S], U]{
		State:  keyStateCodec(a.State, false, true),
		Add:    func(m *Meta, k *keyState[S], v T) error { return a.Add(m, &k.state, v) },
		Result: func(m *Meta, k *keyState[S]) (U, error) { return a.Result(m, &k.state) },
		Emit:   a.Emit,
		TTL:    a.TTL,
	}
}
