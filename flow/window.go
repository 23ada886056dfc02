package flow

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// ErrLate is wrapped by the error of a record that came after its windows were
// closed.
var ErrLate = errors.New("late")

// WindowAggregator folds the records of a key and a window into a state.
type WindowAggregator[T, S, U any] struct {
	// State says how the state of one window is stored.
	State StateCodec[S]
	// Add folds a record into *s, which starts as the zero value. After an error
	// *s must be as before.
	Add func(m *Meta, s *S, v T) error
	// Merge folds *from, the state of a later session, into *into: a record has
	// joined the two. Required for sessions, else not used.
	Merge func(into, from *S) error
	// Result makes the result of a window.
	Result func(m *Meta, w Span, s *S) (U, error)
}

// Window folds the records of each key by windows. The open windows of a key are
// its state; they stay open when the flow stops and go on when it is resumed.
//
// A window closes when the watermark of the task reaches its end, and the allowed
// lateness. Windows that are due close in the order of their ends, those of one end
// in the order of the keys, before the record that moved the watermark is folded in.
// A record of which all windows are closed is late: it goes to the second stream, or
// fails with [ErrLate] if no step follows that.
//
// id is the identity of the state.
func Window[T, S, U any](s Stream[T], id string, w Windows, a WindowAggregator[T, S, U], opts ...StepOption) (results Stream[U], late Stream[T]) {
	opts = append([]StepOption{func(info *StepInfo) { info.Windows = w.String() }}, opts...)
	step := stateful(s, "window", id, a.State.Version, opts)
	results, late = then[T, U](s), then[T, T](s)
	results.delay += w.AllowedLateness
	s.b.waits(s.stage)
	s.b.need(step, "Add", a.Add != nil)
	s.b.need(step, "Result", a.Result != nil)
	s.b.need(step, "Merge, which sessions need", a.Merge != nil || w.kind() != kindSession)
	s.b.need(step, "state codec with Append and Decode", a.State.usable())
	if err := w.Validate(); err != nil {
		s.b.errorf("step %q: %w", id, err)
	}
	s.hub.subscribe(func(in *instance) emit[T] {
		op := &windowed[T, S, U]{
			in: in, step: step, w: w, a: a, out: results.hub.bind(in), assigner: newAssigner(w),
			delay: int64(w.AllowedLateness) + int64(s.delay),
		}
		if len(late.hub.outs) > 0 {
			op.late = late.hub.bind(in)
		}
		op.table = newTable(in.task, in.f.stepID(step), windowCodec(w.kind(), a.State))
		op.table.onLoaded = op.loaded
		in.task.timers = append(in.task.timers, op)
		switch w.kind() {
		case kindSession:
			return op.addSession
		case kindCount:
			return op.addCount
		}
		return op.addFixed
	})
	return results, late
}

// windowed is a window step in one task.
type windowed[T, S, U any] struct {
	in       *instance
	step     int
	w        Windows
	a        WindowAggregator[T, S, U]
	table    *table[keyWindows[S]]
	out      emit[U]
	late     emit[T]
	assigner *assigner
	// delay is how far the watermark has to be behind the end of a window.
	delay int64
	heap  heap[dueEntry[S]]
}

// keyWindows is the state of a key: its open windows, in the order of their ends.
type keyWindows[S any] struct {
	open []openWindow[S]
	// queued is the time of the key's valid entry in the heap. Others are stale.
	queued int64
	isIn   bool
}

// openWindow is one of them. start and end are its bounds; of a session, and of a
// number of records, the lowest and the highest time in it.
type openWindow[S any] struct {
	span
	records uint64 // of a number of records
	state   S
}

// find returns the place of a window, or where it belongs.
func (k *keyWindows[S]) find(s span) (int, bool) {
	return slices.BinarySearchFunc(k.open, s, func(w openWindow[S], s span) int {
		switch {
		case w.end != s.end:
			return cmp.Compare(w.end, s.end)
		default:
			return cmp.Compare(w.start, s.start)
		}
	})
}

// addFixed folds a record into its tumbling or sliding windows.
func (op *windowed[T, S, U]) addFixed(m *Meta, v T) {
	op.in.step = op.step
	spans := op.assigner.assign(m.at)
	if op.in.task.closed(op.step, spans[len(spans)-1].end+op.delay) {
		op.tooLate(m, v, spans[len(spans)-1].end)
		return
	}
	c, fresh := op.table.getOrAdd(m.Key)
	marked := op.table.mark(c)
	for _, s := range spans {
		if op.in.task.closed(op.step, s.end+op.delay) {
			continue
		}
		k := &c.state
		i, there := k.find(s)
		if !there {
			k.open = slices.Insert(k.open, i, openWindow[S]{span: s})
			op.queue(c)
		}
		if err := op.a.Add(m, &k.open[i].state, v); err != nil {
			if !there {
				k.open = slices.Delete(k.open, i, i+1)
			}
			op.failed(m, c, marked, fresh, err)
			return
		}
		if op.w.Emit == EmitEach {
			op.emit(m, s, &k.open[i].state)
		}
	}
}

// failed ends a record whose Add failed. Of a key that has no windows nothing is
// kept.
func (op *windowed[T, S, U]) failed(m *Meta, c *cell[keyWindows[S]], marked, fresh bool, err error) {
	if fresh && len(c.state.open) == 0 {
		op.table.takeBack(c, marked, fresh)
	}
	op.in.fail(op.step, m, err)
}

// addCount folds a record into the window of its key.
func (op *windowed[T, S, U]) addCount(m *Meta, v T) {
	op.in.step = op.step
	c, fresh := op.table.getOrAdd(m.Key)
	marked := op.table.mark(c)
	k := &c.state
	if len(k.open) == 0 {
		k.open = append(k.open, openWindow[S]{span: span{m.at, m.at}})
	}
	w := &k.open[0]
	if err := op.a.Add(m, &w.state, v); err != nil {
		if w.records == 0 {
			k.open = k.open[:0]
		}
		op.failed(m, c, marked, fresh, err)
		return
	}
	w.start, w.end = min(w.start, m.at), max(w.end, m.at)
	w.records++
	full := w.records >= uint64(op.w.Count)
	if !full && op.w.Emit != EmitEach {
		return
	}
	at, state := w.span, &w.state
	if full {
		// Before the result, which may panic.
		kept := w.state
		state = &kept
		op.table.remove(c)
	}
	op.emit(m, at, state)
}

// emit makes the result of a window.
func (op *windowed[T, S, U]) emit(m *Meta, at span, state *S) {
	u, err := op.a.Result(m, at.times(), state)
	if err != nil {
		op.in.fail(op.step, m, err)
		return
	}
	op.out(m, u)
	op.in.step = op.step
}

// tooLate ends a record that no window is open for; end is that of the last one.
func (op *windowed[T, S, U]) tooLate(m *Meta, v T, end int64) {
	t := op.in.task
	t.late++
	if op.late != nil {
		op.late(m, v)
		return
	}
	stamp := func(nanos int64) string { return time.Unix(0, nanos).UTC().Format(time.RFC3339Nano) }
	op.in.fail(op.step, m, fmt.Errorf("%w: its time is %s, its last window ended at %s and is closed, the watermark is %s",
		ErrLate, stamp(m.at), stamp(end), stamp(t.now)))
}

// endOf returns the end of a window of a key.
func (op *windowed[T, S, U]) endOf(k *keyWindows[S], i int) int64 {
	if op.w.Gap == 0 {
		return k.open[i].end
	}
	w := &k.open[i]
	end := w.end + int64(op.w.Gap)
	if op.w.Max > 0 {
		end = min(end, w.start+int64(op.w.Max))
	}
	if i+1 < len(k.open) {
		end = min(end, k.open[i+1].start)
	}
	return end
}

// first returns when the first window of a key closes.
func (op *windowed[T, S, U]) first(k *keyWindows[S]) int64 {
	if len(k.open) == 0 {
		return math.MaxInt64
	}
	return op.endOf(k, 0) + op.delay
}

// index, next and fire are those of a timedStep.
func (op *windowed[T, S, U]) index() int { return op.step }

// next returns when the first window closes. Entries of the heap may be stale, and
// never too late: what they say is checked when they come to the top.
func (op *windowed[T, S, U]) next() int64 {
	for len(op.heap) > 0 {
		top := op.heap[0]
		k := &top.cell.state
		if top.cell.gone || !k.isIn || k.queued != top.due {
			op.heap.pop()
			continue
		}
		due := op.first(k)
		if due == top.due {
			return due
		}
		op.heap.pop()
		k.isIn = false
		if len(k.open) > 0 {
			op.push(top.cell, due)
		}
	}
	return math.MaxInt64
}

// fire closes the first window; next has been called.
func (op *windowed[T, S, U]) fire() {
	c := op.heap.pop().cell
	k := &c.state
	k.isIn = false
	due := op.first(k)
	at, state := span{k.open[0].start, op.endOf(k, 0)}, k.open[0].state
	k.open = slices.Delete(k.open, 0, 1)
	// The window is gone before its result is made, which may panic.
	if len(k.open) == 0 {
		op.table.remove(c)
	} else {
		op.table.mark(c)
		op.queue(c)
	}
	if op.w.Emit != EmitClose {
		return
	}
	t := op.in.task
	m := &t.meta
	*m = Meta{Key: c.key, nanos: due, at: at.end - 1, mark: t.now}
	op.in.step = op.step
	op.emit(m, at, &state)
}

// queue makes sure that the heap has an entry for the first window of a key that is
// not too late.
func (op *windowed[T, S, U]) queue(c *cell[keyWindows[S]]) {
	if due := op.first(&c.state); !c.state.isIn || due < c.state.queued {
		op.push(c, due)
	}
}

func (op *windowed[T, S, U]) push(c *cell[keyWindows[S]], due int64) {
	c.state.queued, c.state.isIn = due, true
	op.heap.push(dueEntry[S]{due, c})
}

// loaded makes the heap of what was loaded.
func (op *windowed[T, S, U]) loaded() {
	op.heap = op.heap[:0]
	if op.w.kind() == kindCount {
		return
	}
	for _, c := range op.table.slots {
		if c != nil && len(c.state.open) > 0 {
			op.push(c, op.first(&c.state))
		}
	}
}

// dueEntry is a key with the time at which its first window closes. The order is by
// that, and by the key.
type dueEntry[S any] struct {
	due  int64
	cell *cell[keyWindows[S]]
}

func (e dueEntry[S]) before(o dueEntry[S]) bool {
	if e.due != o.due {
		return e.due < o.due
	}
	return strings.Compare(e.cell.key, o.cell.key) < 0
}
