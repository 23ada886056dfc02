package flow

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Bounds of timers.
const (
	// MaxTimers is how many timers a key of a step can have at a time.
	MaxTimers = 1000
	// maxTimerName bounds the bytes of a timer's name, which is stored with it.
	maxTimerName = 256
)

// SetTimer sets the timer of that name for the key at hand, in a function of
// [StatefulWith]: OnTimer is called when the watermark reaches at, so that every record
// with an earlier time has come, or is late. A timer for a time that has passed fires
// before the next record. Of one name a key has one timer: setting it again, also by
// [Meta.SetStreamTimer], replaces it.
//
// In OnTimer the time has to be later than that of the timer that fires (or, where
// that is one of the stream's time and the flow has both times, later than the
// watermark), or the timers of a key could fire for ever.
//
// A call that is not possible makes the record fail: outside of the functions of a
// StatefulWith that has an OnTimer, for a time that is not between the years 1750 and
// 2200, or with a name of more than 256 bytes; a key has at most [MaxTimers] timers.
func (m *Meta) SetTimer(name string, at time.Time) { m.setTimer("SetTimer", eventTimer, name, at) }

// SetStreamTimer is [Meta.SetTimer] for the time of the streams: OnTimer is called
// when the timestamps of the sources have reached at, or a source is quiet and the clock
// of its server has. Where no source has an [EventTime] that is the same.
func (m *Meta) SetStreamTimer(name string, at time.Time) {
	m.setTimer("SetStreamTimer", streamTimer, name, at)
}

// CancelTimer removes the timer of that name from the key at hand, if it is set. It
// is possible where SetTimer is.
func (m *Meta) CancelTimer(name string) { m.timersOf("CancelTimer").cancel(name) }

func (m *Meta) setTimer(call string, kind timerKind, name string, at time.Time) {
	switch {
	case at.Before(minTime) || !at.Before(maxTime):
		panic(misuse{fmt.Errorf("%s(%q): the time %s is not between %d and %d", call, name, at.Format(time.RFC3339), minTime.Year(), maxTime.Year())})
	case len(name) > maxTimerName:
		panic(misuse{fmt.Errorf("%s: a name of %d bytes, at most %d are possible", call, len(name), maxTimerName)})
	}
	if err := m.timersOf(call).set(kind, name, at.UnixNano()); err != nil {
		panic(misuse{fmt.Errorf("%s(%q): %w", call, name, err)})
	}
}

func (m *Meta) timersOf(call string) timerSetter {
	if m.timers == nil {
		panic(misuse{fmt.Errorf("%s: %w", call, errNoTimers)})
	}
	return m.timers
}

var errNoTimers = errors.New("timers are set and cancelled in On and OnTimer of a StatefulWith that has an OnTimer, and nowhere else")

// misuse is a call of the record's Meta that is not possible where it was made. It
// unwinds the record, which fails with the error.
type misuse struct{ err error }

// timerSetter is the step with timers whose function runs.
type timerSetter interface {
	set(kind timerKind, name string, at int64) error
	cancel(name string)
}

// timerQueue has the keys of a step that wait for one of the two times.
type timerQueue[S any] struct {
	t    *Task
	kind timerKind
	step int
	// delay is how far behind the watermark the records of the step may come.
	delay int64
	heap  heap[dueEntry[keyState[S]]]
	// call runs OnTimer.
	call func(c *cell[keyState[S]], kind timerKind, tm timer)
}

// queue makes sure that the heap has an entry for the first timer of a key that is not
// too late.
func (q *timerQueue[S]) queue(c *cell[keyState[S]]) {
	k := c.state.timers
	if due := q.first(k); due < math.MaxInt64 && (!k.isIn[q.kind] || due < k.queued[q.kind]) {
		k.queued[q.kind], k.isIn[q.kind] = due, true
		q.heap.push(dueEntry[keyState[S]]{due, c})
	}
}

// rebuild makes the heap anew of what there is.
func (q *timerQueue[S]) rebuild(tab *table[keyState[S]]) {
	q.heap = q.heap[:0]
	for _, c := range tab.slots {
		if c != nil && c.state.timers != nil {
			c.state.timers.isIn[q.kind] = false
			q.queue(c)
		}
	}
}

func (q *timerQueue[S]) first(k *keyTimers) int64 {
	if len(k.list[q.kind]) == 0 {
		return math.MaxInt64
	}
	return k.list[q.kind][0].at + q.delay
}

// index, next and fire are those of a timedStep.
func (q *timerQueue[S]) index() int { return q.step }

func (q *timerQueue[S]) next() int64 {
	if q.t.finishing {
		return math.MaxInt64 // it is done key by key, see statefulStep.fireAll
	}
	for len(q.heap) > 0 {
		top := q.heap[0]
		k := top.cell.state.timers
		if top.cell.gone || k == nil || !k.isIn[q.kind] || k.queued[q.kind] != top.due {
			q.heap.pop()
			continue
		}
		if q.first(k) == top.due {
			return top.due
		}
		q.heap.pop()
		k.isIn[q.kind] = false
		q.queue(top.cell)
	}
	return math.MaxInt64
}

// fire runs the first timer, which is gone before that; next has been called.
func (q *timerQueue[S]) fire() {
	c := q.heap.pop().cell
	k := c.state.timers
	k.isIn[q.kind] = false
	tm := k.list[q.kind][0]
	k.remove(place{q.kind, 0})
	if k.empty() {
		c.state.timers = nil
	} else {
		q.queue(c)
	}
	q.call(c, q.kind, tm)
}
