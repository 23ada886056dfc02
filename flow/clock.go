package flow

import (
	"fmt"
	"math"
	"time"
)

// noTime is the time of a clock that has not been set: before every other one.
const noTime = math.MinInt64

// The times that records may have. Beyond them nanoseconds since 1970, with the
// size of a window added, do not fit 64 bits.
var (
	minTime = time.Date(1750, 1, 1, 0, 0, 0, 0, time.UTC)
	maxTime = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)
)

// DefaultMaxAhead is how far the time of a record may be ahead of the stream's
// timestamp unless its clock says another.
const DefaultMaxAhead = 24 * time.Hour

// Clock says what the time of a source's records is: nil for the timestamps of
// the stream, or an [EventTime].
type Clock interface{ clockInfo() ClockInfo }

// ClockInfo describes a clock that reads times from the records.
type ClockInfo struct {
	// Lateness, Idle and MaxAhead are those of [EventTime].
	Lateness, Idle, MaxAhead time.Duration
}

// EventTime is the clock of a source whose records bring their time along.
//
// The watermark of the source at a position is the highest time of the records up
// to there, less Lateness: what is earlier has come, or is late. So it is a
// function of the stream's prefix, the same on every worker and in every replay.
// Each router must see all records of the source for that, so that
// [Source.PartitionBy] cannot be used with it.
type EventTime[T any] struct {
	// Of returns the time of a record, between the years 1750 and 2200. A record
	// without a time fails. Required.
	Of func(m *Meta, v T) (time.Time, error)
	// Lateness is how much earlier than the latest one before it a record may be
	// without being late.
	Lateness time.Duration
	// Idle, if it is not 0, lets the watermark go on with the clock of the server
	// when that long no record has come. What comes then with an earlier time is
	// late. With 0 the watermark waits for records.
	Idle time.Duration
	// MaxAhead bounds how far a time may be ahead of the timestamp that the stream
	// gave the record. One beyond it does not move the watermark, which could never go
	// back. Steps that go by times treat it like a late one; where late ones go nowhere,
	// it fails with [ErrAhead]. Other steps take it. Defaults to [DefaultMaxAhead].
	MaxAhead time.Duration
}

func (c EventTime[T]) clockInfo() ClockInfo {
	if c.MaxAhead == 0 {
		c.MaxAhead = DefaultMaxAhead
	}
	return ClockInfo{Lateness: c.Lateness, Idle: c.Idle, MaxAhead: c.MaxAhead}
}

// useClock gives the source its clock.
func (s *source[T]) useClock(b *Builder, c Clock) {
	if c == nil {
		return
	}
	et, ok := c.(EventTime[T])
	if !ok {
		b.errorf("source %q: its time is an %T, its decoder makes %T", s.inf.Stream, c, *new(T))
		return
	}
	inf := et.clockInfo()
	s.at, s.inf.Clock, b.timed = et.Of, &inf, true
	switch {
	case et.Of == nil:
		b.errorf("source %q: its time has no function Of", s.inf.Stream)
	case inf.Lateness < 0 || inf.Idle < 0 || inf.MaxAhead < 0:
		b.errorf("source %q: Lateness, Idle and MaxAhead of its time are not negative", s.inf.Stream)
	case inf.Lateness > maxWindow:
		b.errorf("source %q: a lateness of %v, at most %v is possible", s.inf.Stream, inf.Lateness, maxWindow)
	case len(s.inf.PartitionBy) > 0:
		b.errorf("source %q: with PartitionBy a worker does not see the times of all records, which its watermark is made of: leave out PartitionBy, or Time to go by the timestamps of the stream", s.inf.Stream)
	}
}

// observe takes the time of the record at hand, and moves the clock of the source.
func (r *Router) observe(m *Meta, at time.Time) error {
	if at.Before(minTime) || !at.Before(maxTime) {
		return fmt.Errorf("%w: %s is not between %d and %d", errTime, at.Format(time.RFC3339), minTime.Year(), maxTime.Year())
	}
	nanos := at.UnixNano()
	if ahead := nanos - m.nanos; ahead > int64(r.clock.MaxAhead) {
		// The watermark stays: it could never go back.
		m.at, m.mark, m.ahead = nanos, r.Watermark(), true
		return nil
	}
	m.at, m.mark = nanos, r.Watermark()
	r.highest = max(r.highest, nanos)
	return nil
}

var errTime = fmt.Errorf("time of the record")

// tooFarAhead is the error of a record whose time is beyond the MaxAhead of its clock,
// in a step that goes by times.
func (m *Meta) tooFarAhead() error {
	return fmt.Errorf("%w: its time is %s, %v ahead of the timestamp that the stream gave the record, more than its source allows (max_ahead)",
		ErrAhead, stamp(m.at), time.Duration(m.at-m.nanos).Round(time.Second))
}

// HighestTime returns the highest time of the records that the router has seen,
// or was told of by Restart; the lowest number if there was none. It is what a
// clock has to be restarted with to go on from here.
func (r *Router) HighestTime() int64 { return r.highest }

// Watermark returns the watermark behind the last record that was routed: the
// highest time of all so far less the lateness of the source, in nanoseconds since
// 1970; the lowest number if there was no record yet.
func (r *Router) Watermark() int64 { return r.WatermarkOf(r.highest) }

// WatermarkOf returns the watermark of the source when that is the highest time.
func (r *Router) WatermarkOf(highest int64) int64 {
	if highest == noTime || r.clock == nil {
		return highest
	}
	return highest - int64(r.clock.Lateness)
}

// QuietWatermark returns the watermark of a source of which every record has been
// routed, by the clock of its server, in nanoseconds since 1970: no later record can
// have a timestamp before now. last is the timestamp of the last record, or of the
// making of the stream if it has none.
//
// That of the stream's timestamps is now. An [EventTime] goes on for as long as
// nothing has come, once that is its Idle.
func (r *Router) QuietWatermark(now, last int64) int64 {
	switch {
	case r.clock == nil:
		return now
	case r.clock.Idle == 0 || now-last < int64(r.clock.Idle):
		return r.Watermark()
	case r.highest == noTime:
		return r.WatermarkOf(now)
	}
	return r.WatermarkOf(r.highest + now - last)
}

// Restart sets the clock for reading on from another position. highest is that of
// the records up to there, see [Router.HighestTime].
func (r *Router) Restart(highest int64) {
	r.highest = highest
	if r.moves != nil {
		*r.moves = moves{stream: noTime, event: noTime}
	}
}

// Timed reports whether the flow has clocks: there are steps that wait for a
// time, or sources with an [EventTime]. Otherwise watermarks mean nothing.
func (f *Flow) Timed() bool { return f.timed }

// timedStep is a step that waits for times, seen from the task.
type timedStep interface {
	// index of the step.
	index() int
	// next is the watermark at which something is due, the highest number if
	// nothing waits. While [Task.finishing] the input has ended: then it is the time
	// for which something waits, once each.
	next() int64
	// fire does what is due first.
	fire()
}

// sweeper is a step that forgets what the watermark has made useless: nothing comes of
// that, but memory would grow where the watermark waits for something to be due.
type sweeper interface {
	// due is the watermark at which it has enough to forget, noDue if there is nothing.
	due() int64
	// sweep forgets a bounded number of things, if that is reached.
	sweep()
}

// noDue is the watermark of what is never due.
const noDue = int64(math.MaxInt64)

// Advance moves the watermark of a source, by its index in [Flow.Sources], and
// does all that is due then: windows close. It never goes back. That the watermark
// is w says that later records of the source with a time before w are late. The
// watermark of the task is the lowest of its sources'. In a later stage it is the lowest
// of the tasks of the stage before, which comes by the exchange.
//
// With [Stop] it returns the *StepError of a step that fails.
func (t *Task) Advance(source int, watermark int64) error {
	t.raise(source, watermark)
	return t.haltedErr()
}

// Restore sets the watermark of a source to one that the task had, after a crash
// or a stop. Nothing is done yet that is due.
func (t *Task) Restore(source int, watermark int64) {
	t.marks[source] = watermark
	t.low, t.atLow = lowest(t.marks)
	t.now = t.low
}

// Watermark returns the watermark that the task has of a source; the lowest number
// if it does not know any.
func (t *Task) Watermark(source int) int64 { return t.marks[source] }

// Now returns the watermark of the task: the lowest of its inputs; the lowest number
// if one of them is not known yet.
func (t *Task) Now() int64 { return t.low }

// Due returns the watermark at which the task has something to do, the highest
// number if nothing waits.
func (t *Task) Due() int64 {
	due := dueFirst(t.timers)
	for _, s := range t.sweepers {
		due = min(due, s.due())
	}
	return due
}

func (t *Task) haltedErr() error {
	if t.in.halted == nil {
		return nil
	}
	return t.in.halted
}

func (t *Task) raise(source int, mark int64) {
	if t.overdue {
		t.settle()
	}
	was := t.marks[source]
	if mark <= was {
		return
	}
	t.marks[source] = mark
	if was > t.low {
		return
	}
	if t.atLow--; t.atLow > 0 {
		return
	}
	t.low, t.atLow = lowest(t.marks)
	for t.in.halted == nil && t.fireUntilPanic(t.low) {
	}
	t.now = t.low
	for _, s := range t.sweepers {
		s.sweep()
	}
	if t.second == nil {
		t.streamMoved()
	} else if t.overdue {
		t.settle()
	}
}

// fireUntilPanic fires what is due, in the order of the times; of one time in the
// order of the steps, so that what a step emits at a time is there when the steps
// behind it come to that time. While something is fired, the watermark is the time
// at which it was due. more is true after a panic.
func (t *Task) fireUntilPanic(now int64) (more bool) {
	defer t.recovered(&more)
	for t.in.halted == nil {
		first, due := firstDue(t.timers, now)
		if first == nil {
			return false
		}
		t.now, t.firing = max(t.now, due), first.index()
		first.fire()
	}
	return false
}

// firstDue returns the step that is due first at a time, nil if none is, and when it
// was due.
func firstDue(steps []timedStep, now int64) (first timedStep, due int64) {
	due = now
	for _, s := range steps {
		if next := s.next(); next < due || next == due && first == nil {
			first, due = s, next
		}
	}
	return first, due
}

// recovered is deferred by what fires steps. more is true after a panic.
func (t *Task) recovered(more *bool) {
	if r := recover(); r != nil {
		t.in.panicked(&t.meta, r)
		*more = true
	}
	t.firing = -1
	t.meta.pane = PaneNone
}

// stamp prints a time for an error.
func stamp(nanos int64) string { return time.Unix(0, nanos).UTC().Format(time.RFC3339Nano) }

// closed reports whether what a step had to do at a time is done.
func (t *Task) closed(step int, due int64) bool {
	if due != t.now || t.firing < 0 {
		return due <= t.now
	}
	return step <= t.firing
}

// lowest returns the lowest of the marks, and how many are that.
func lowest(marks []int64) (low int64, n int) {
	low = math.MaxInt64
	for _, m := range marks {
		if m < low {
			low, n = m, 0
		}
		if m == low {
			n++
		}
	}
	return low, n
}
