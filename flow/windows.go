package flow

import (
	"errors"
	"fmt"
	"time"
)

// Bounds of windows.
const (
	// maxWindow bounds sizes, gaps and lateness.
	maxWindow = 20 * 365 * 24 * time.Hour
	// maxOverlap bounds how many sliding windows a record is in.
	maxOverlap = 10_000
)

const day = 24 * time.Hour

// WindowEmit says when a window emits.
type WindowEmit int

// The ways to emit.
const (
	// EmitClose emits one result when the window closes.
	EmitClose WindowEmit = iota
	// EmitEach emits a result for each record and each window that it is in, and
	// none when the window closes.
	EmitEach
)

// Windows says how the records of a key are put into windows. Use [Tumbling],
// [Sliding], [TumblingDays], [SlidingDays], [Sessions] or [CountWindows], and set
// the other fields as needed.
type Windows struct {
	// Size of tumbling and sliding windows. They begin at the multiples of Every
	// since 1970, UTC, plus Offset. Every is Size where windows do not overlap.
	Size, Every time.Duration
	// Days and EveryDays stand in place of Size and Every for windows of whole
	// days in Location, which begin at midnight there, plus Offset. A day has 23 or
	// 25 hours where the clocks change.
	Days, EveryDays int
	// Location is that of the days; nil for UTC.
	Location *time.Location
	// Offset moves the windows, as from midnight to six o'clock.
	Offset time.Duration
	// Gap of sessions: a record belongs to the session before it when it comes less
	// than Gap after that one's last record.
	Gap time.Duration
	// Max is the longest session. What would make it longer begins another one.
	// 0 for no bound.
	Max time.Duration
	// Count is the number of records in a window. Such windows know no time.
	Count int
	// AllowedLateness keeps windows open for late records: a window closes when the
	// watermark is that far behind its end.
	AllowedLateness time.Duration
	// Emit defaults to [EmitClose].
	Emit WindowEmit
}

// Tumbling windows are of one size and follow each other.
func Tumbling(size time.Duration) Windows { return Windows{Size: size, Every: size} }

// Sliding windows are of one size and overlap: one begins every so often.
func Sliding(size, every time.Duration) Windows { return Windows{Size: size, Every: every} }

// TumblingDays are windows of whole days in a location, from midnight to midnight.
func TumblingDays(days int, in *time.Location) Windows {
	return Windows{Days: days, EveryDays: days, Location: in}
}

// SlidingDays are windows of whole days in a location that overlap.
func SlidingDays(days, every int, in *time.Location) Windows {
	return Windows{Days: days, EveryDays: every, Location: in}
}

// Sessions are windows that end when no record comes for the gap. They are at most
// longest long, if that is not 0.
func Sessions(gap, longest time.Duration) Windows { return Windows{Gap: gap, Max: longest} }

// CountWindows hold a number of records each.
func CountWindows(records int) Windows { return Windows{Count: records} }

// windowKind is stored with the windows of a key.
type windowKind byte

const (
	kindFixed windowKind = 1 + iota
	kindSession
	kindCount
)

func (k windowKind) String() string {
	switch k {
	case kindFixed:
		return "tumbling or sliding"
	case kindSession:
		return "session"
	case kindCount:
		return "count"
	}
	return fmt.Sprintf("kind %d", byte(k))
}

func (w Windows) kind() windowKind {
	switch {
	case w.Gap != 0:
		return kindSession
	case w.Count != 0:
		return kindCount
	}
	return kindFixed
}

// Validate returns what is wrong.
func (w Windows) Validate() error {
	kinds := 0
	for _, is := range []bool{w.Size != 0, w.Days != 0, w.Gap != 0, w.Count != 0} {
		if is {
			kinds++
		}
	}
	tooLong := func(d time.Duration) bool { return d < 0 || d > maxWindow }
	const days = int(maxWindow / day)
	switch {
	case kinds != 1:
		return errors.New("windows have one of Size, Days, Gap and Count")
	case tooLong(w.Size) || tooLong(w.Gap) || tooLong(w.Max) || tooLong(w.AllowedLateness) || w.Days < 0 || w.Days > days:
		return fmt.Errorf("sizes, gaps and lateness are positive and at most %d days", days)
	case w.Size != 0 && (w.Every <= 0 || w.Every > w.Size) || w.Days != 0 && (w.EveryDays <= 0 || w.EveryDays > w.Days):
		return errors.New("windows begin every so often, at most their size: otherwise there are records in none of them")
	case w.Size != 0 && w.Size/w.Every > maxOverlap || w.Days != 0 && w.Days/w.EveryDays > maxOverlap:
		return fmt.Errorf("each record would be in more than %d windows", maxOverlap)
	case w.Location != nil && w.Days == 0:
		return errors.New("a time zone belongs to windows of whole days")
	case w.Offset != 0 && w.kind() != kindFixed:
		return errors.New("an offset belongs to tumbling and sliding windows")
	case w.Offset < -maxWindow || w.Offset > maxWindow:
		return fmt.Errorf("an offset is at most %d days", days)
	case w.Max != 0 && w.Max < w.Gap || w.Max != 0 && w.Gap == 0:
		return errors.New("the longest session is at least the gap of the sessions")
	case w.Count < 0:
		return errors.New("a negative number of records")
	case w.Count != 0 && w.AllowedLateness != 0:
		return errors.New("windows of a number of records know no lateness")
	case w.Emit != EmitClose && w.Emit != EmitEach:
		return fmt.Errorf("there is no WindowEmit %d", w.Emit)
	}
	return nil
}

// String describes the windows, all of them: it goes into [Flow.Hash].
func (w Windows) String() string {
	var s string
	switch {
	case w.Days != 0:
		s = fmt.Sprintf("%d days", w.Days)
		if w.EveryDays != w.Days {
			s += fmt.Sprintf(" every %d", w.EveryDays)
		}
	case w.Gap != 0:
		s = fmt.Sprintf("session gap %v", w.Gap)
		if w.Max != 0 {
			s += fmt.Sprintf(" max %v", w.Max)
		}
	case w.Count != 0:
		s = fmt.Sprintf("%d records", w.Count)
	default:
		s = fmt.Sprintf("size %v", w.Size)
		if w.Every != w.Size {
			s += fmt.Sprintf(" every %v", w.Every)
		}
	}
	if w.Offset != 0 {
		s += fmt.Sprintf(" offset %v", w.Offset)
	}
	if w.Location != nil {
		s += " in " + w.Location.String()
	}
	if w.AllowedLateness != 0 {
		s += fmt.Sprintf(" allowed lateness %v", w.AllowedLateness)
	}
	if w.Emit == EmitEach {
		s += " emit each"
	}
	return s
}

// Span is the time of a window: from Start on, before End. For a session End is
// the gap after its last record, or where the next one begins; for a number of
// records, Start and End are the first and the last of their times.
type Span struct{ Start, End time.Time }

// span is that in nanoseconds.
type span struct{ start, end int64 }

func (s span) times() Span {
	return Span{time.Unix(0, s.start).UTC(), time.Unix(0, s.end).UTC()}
}

// assigner finds the tumbling or sliding windows that a time is in.
type assigner struct {
	w    Windows
	days bool
	loc  *time.Location
	// last holds the windows of the last time, with the interval in which they are
	// those of other times too: most records are near the one before.
	last  []span
	valid span
}

func newAssigner(w Windows) *assigner {
	a := &assigner{w: w, days: w.Days != 0, loc: w.Location}
	if a.loc == nil {
		a.loc = time.UTC
	}
	return a
}

// assign returns the windows of a time in their order. It is valid until the next
// call.
func (a *assigner) assign(t int64) []span {
	if a.valid.start <= t && t < a.valid.end {
		return a.last
	}
	a.last = a.last[:0]
	if a.days {
		a.assignDays(t)
	} else {
		a.assignFixed(t)
	}
	return a.last
}

// The windows of t are those of the times around it up to where the next one
// begins or one of them ends, and back to where the last of them begins or the one
// before them ends.

func (a *assigner) assignFixed(t int64) {
	every, size, offset := int64(a.w.Every), int64(a.w.Size), int64(a.w.Offset)
	last := floorTo(t-offset, every) + offset
	first := last - (size-(t-last)-1)/every*every
	for start := first; start <= last; start += every {
		a.last = append(a.last, span{start, start + size})
	}
	a.valid = span{max(last, first-every+size), min(first+size, last+every)}
}

func (a *assigner) assignDays(t int64) {
	every := int64(a.w.EveryDays)
	last := a.dayOf(t)
	first := last
	before := a.dayEnd(first - every)
	for before > t {
		first -= every
		before = a.dayEnd(first - every)
	}
	for d := first; d <= last; d += every {
		a.last = append(a.last, span{a.dayStart(d), a.dayEnd(d)})
	}
	a.valid = span{max(a.dayStart(last), before), min(a.dayEnd(first), a.dayStart(last+every))}
}

// dayOf returns the day, counted from 1970, on which the last window that t is in
// begins.
func (a *assigner) dayOf(t int64) int64 {
	_, zone := time.Unix(0, t).In(a.loc).Zone()
	every := int64(a.w.EveryDays)
	d := floorTo(floorDiv(t+int64(zone)*int64(time.Second)-int64(a.w.Offset), int64(day)), every)
	// The clocks may have changed since the day began.
	for a.dayStart(d) > t {
		d -= every
	}
	for a.dayStart(d+every) <= t {
		d += every
	}
	return d
}

// dayEnd returns the end of the window that begins on a day.
func (a *assigner) dayEnd(d int64) int64 { return a.dayStart(d + int64(a.w.Days)) }

func (a *assigner) dayStart(d int64) int64 {
	return time.Date(1970, 1, 1+int(d), 0, 0, 0, int(a.w.Offset), a.loc).UnixNano()
}

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

func floorTo(a, b int64) int64 { return floorDiv(a, b) * b }

func ceilTo(a, b int64) int64 { return -floorTo(-a, b) }
