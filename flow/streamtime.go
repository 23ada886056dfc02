package flow

import (
	"math"
	"slices"
)

// Besides the watermark, which goes by the times of the records, there is the time of
// the streams: the timestamps that they gave. Without an EventTime both are the same,
// and a task has one clock. With one, and with steps that go by the time of the streams
// (a TTL, timers), a task has a second clock: streamClock.
//
// Where both move at once, what is due by the one and by the other has to be done in an
// order that is the same in every replay, however the records are put into batches and
// whichever of them are the task's own. So a router notes how the two have moved
// together, at each record that moved the watermark: Ticks. A task goes by these.

// Ticks say how the watermark and the time of a source have moved together. They are
// empty unless the flow has both, see [Flow.TwoTimes].
type Ticks []tick

// tick is a move of the watermark, to event, when the time of the source was stream,
// before the record with that sequence.
type tick struct {
	seq           uint64
	event, stream int64
}

// Join puts later ticks behind these. Neither is changed.
func (ts Ticks) Join(later Ticks) Ticks {
	if len(ts) == 0 {
		return later
	}
	return append(ts[:len(ts):len(ts)], later...)
}

// Behind puts ticks before those of a batch: those of batches before it, which wait for
// the same lane.
func (b *Batch) Behind(earlier Ticks) { b.ticks = earlier.Join(b.ticks) }

// moves are the ticks of a router.
type moves struct {
	ticks Ticks
	// stream is the time of the source behind the last record, event the watermark of
	// the last tick.
	stream, event int64
}

// noteMove is called before a record.
func (r *Router) noteMove(seq uint64, nanos int64) {
	m := r.moves
	event := r.Watermark()
	if event > m.event {
		m.ticks = append(m.ticks, tick{seq, event, m.stream})
		m.event = event
	}
	m.stream = max(m.stream, nanos)
}

// TakeTicks returns the ticks of the records that were routed since the last call, for
// [Task.AdvanceStream], and the time of the source behind the last record so far; the
// lowest number if that is not known. Without [Flow.TwoTimes] there is neither.
func (r *Router) TakeTicks() (ticks Ticks, stream int64) {
	m := r.moves
	if m == nil {
		return nil, noTime
	}
	if event := r.Watermark(); event > m.event {
		m.ticks = append(m.ticks, tick{math.MaxUint64, event, m.stream})
		m.event = event
	}
	ticks, m.ticks = m.ticks, nil
	return ticks, m.stream
}

// StreamTime is the time of the source behind the last record that was routed; see
// [Router.TakeTicks].
func (r *Router) StreamTime() int64 {
	if r.moves == nil {
		return noTime
	}
	return r.moves.stream
}

// TwoTimes reports whether the tasks of the flow have to be told the time of the
// streams besides the watermarks, by [Task.AdvanceStream].
func (f *Flow) TwoTimes() bool { return f.twoTimes }

// eventTimed reports whether a source has an EventTime.
func (b *Builder) eventTimed() bool {
	return slices.ContainsFunc(b.sources, func(s sourceNode) bool { return s.info().Clock != nil })
}

// needStreamTime says that a step of a stage goes by the time of the streams.
func (b *Builder) needStreamTime(stage int) {
	b.waits(stage)
	b.streamTimed = true
}

// streamClock is the second clock of a task.
type streamClock struct {
	// marks, low, now and atLow are as those of the task, for the times of the inputs.
	marks    []int64
	low, now int64
	atLow    int
	// timers are the steps that wait for it, in their order.
	timers []timedStep
}

func newStreamClock(inputs int) *streamClock {
	return &streamClock{marks: slices.Repeat([]int64{noTime}, inputs), low: noTime, now: noTime, atLow: inputs}
}

// waitForStream makes a step wait for the time of the streams.
func (t *Task) waitForStream(s timedStep) {
	if t.second != nil {
		t.second.timers = append(t.second.timers, s)
		return
	}
	t.timers = append(t.timers, s)
}

// streamTime is the time of the streams up to which the task has come; the lowest
// number if it is not known.
func (t *Task) streamTime() int64 {
	if t.second != nil {
		return t.second.now
	}
	// At the end of the input now is ahead.
	return min(t.now, t.low)
}

// AdvanceStream moves the time of a source and does all that is due then, as
// [Task.Advance] does for its watermark. ticks are those of the router since the last
// call; they move both. Without [Flow.TwoTimes] it does nothing.
func (t *Task) AdvanceStream(source int, time int64, ticks Ticks) error {
	if t.second != nil {
		t.follow(source, time, math.MinInt64, ticks)
		t.raiseStream(source, time)
	}
	return t.haltedErr()
}

// RestoreStream is [Task.Restore] for the time of a source. Without [Flow.TwoTimes] it
// does nothing.
func (t *Task) RestoreStream(source int, time int64) {
	if t.second != nil {
		c := t.second
		c.marks[source] = time
		c.low, c.atLow = lowest(c.marks)
		c.now = c.low
	}
}

// StreamTime returns the time that the task has of a source; the lowest number if it
// does not know any, or the flow does not have [Flow.TwoTimes].
func (t *Task) StreamTime(source int) int64 {
	if t.second == nil {
		return noTime
	}
	return t.second.marks[source]
}

// StreamNow is [Task.Now] for the time of the streams; the lowest number also without
// [Flow.TwoTimes].
func (t *Task) StreamNow() int64 {
	if t.second == nil {
		return noTime
	}
	return t.second.low
}

// StreamDue is [Task.Due] for the time of the streams. Without [Flow.TwoTimes] it is the
// highest number, and Due is for both.
func (t *Task) StreamDue() int64 {
	if t.second == nil {
		return math.MaxInt64
	}
	return dueFirst(t.second.timers)
}

// lazyStep is a timedStep that need not be done at once, see expiry.slack.
type lazyStep interface{ slack() int64 }

// dueFirst is when the first of the steps has something to do.
func dueFirst(steps []timedStep) int64 {
	due := int64(math.MaxInt64)
	for _, s := range steps {
		next := s.next()
		if lazy, ok := s.(lazyStep); ok && next < math.MaxInt64 {
			next += lazy.slack()
		}
		due = min(due, next)
	}
	return due
}

// follow goes by ticks, as far as something is due on the way to these times.
func (t *Task) follow(source int, stream, event int64, ticks Ticks) {
	if len(ticks) == 0 {
		return
	}
	event = max(event, ticks[len(ticks)-1].event)
	if !t.overdue && !dueBy(t.timers, event) && !dueBy(t.second.timers, stream) {
		return
	}
	for _, tk := range ticks {
		t.raiseStream(source, tk.stream)
		t.raise(source, tk.event)
	}
}

// followTo moves both clocks to where they are before a record of the batch.
func (t *Task) followTo(seq uint64, event, stream int64) {
	n := 0
	for n < len(t.ticks) && t.ticks[n].seq <= seq {
		n++
	}
	if n > 0 {
		t.follow(t.source, stream, event, t.ticks[:n])
		t.ticks = t.ticks[n:]
	}
	t.raise(t.source, event)
	t.raiseStream(t.source, stream)
}

func dueBy(steps []timedStep, at int64) bool {
	for _, s := range steps {
		if s.next() <= at {
			return true
		}
	}
	return false
}

// raiseStream is raise for the second clock.
func (t *Task) raiseStream(source int, mark int64) {
	if t.overdue {
		t.settle()
	}
	c := t.second
	was := c.marks[source]
	if mark <= was {
		return
	}
	c.marks[source] = mark
	if was > c.low {
		return
	}
	if c.atLow--; c.atLow > 0 {
		return
	}
	c.low, c.atLow = lowest(c.marks)
	for t.in.halted == nil && t.fireStreamUntilPanic(c.low) {
	}
	c.now = c.low
	t.streamMoved()
}

// streamMoved ends a move of the time of the streams.
func (t *Task) streamMoved() {
	if len(t.unknown) > 0 {
		begin := t.unknown
		t.unknown = nil
		for _, fn := range begin {
			fn(t.streamTime())
		}
	}
	if t.overdue {
		t.settle()
	}
}

// fireStreamUntilPanic is fireUntilPanic for the second clock. For the watermark,
// nothing is being fired meanwhile.
func (t *Task) fireStreamUntilPanic(now int64) (more bool) {
	defer t.recovered(&more)
	for t.in.halted == nil {
		first, due := firstDue(t.second.timers, now)
		if first == nil {
			return false
		}
		t.second.now = max(t.second.now, due)
		first.fire()
	}
	return false
}

// settle fires the timers that were set for a time that has passed.
func (t *Task) settle() {
	for t.overdue && t.in.halted == nil {
		t.overdue = false
		for t.in.halted == nil && t.fireOverdueUntilPanic() {
		}
	}
}

// fireOverdueUntilPanic fires what is overdue. All that waited for the times up to now
// is done, so that nothing is being fired for a step that looks.
func (t *Task) fireOverdueUntilPanic() (more bool) {
	defer t.recovered(&more)
	for t.in.halted == nil {
		first, _ := firstDue(t.timers, t.now)
		if first == nil && t.second != nil {
			first, _ = firstDue(t.second.timers, t.second.now)
		}
		if first == nil {
			return false
		}
		first.fire()
	}
	return false
}

// noteOverdue is called for a timer that is set.
func (t *Task) noteOverdue(kind timerKind, due int64) {
	now := t.now
	if kind == streamTimer {
		now = t.streamTime()
	}
	if due <= now {
		t.overdue = true
	}
}
