package flow

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrLate is wrapped by the error of a record that came after its windows were
// closed.
var ErrLate = errors.New("late")

// ErrAhead is wrapped by the error of a record whose time is further ahead of the
// timestamp of the stream than its clock allows.
var ErrAhead = errors.New("ahead")

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
	// Result makes the result of a window. With [Windows.Early] and [Windows.OnDrain] it
	// is called for windows that stay open, too; see [Meta.Pane]. Of a [GlobalWindow] w is
	// the zero Span.
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
	// Results do not come in the order of their records.
	results.source = 0
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
			in: in, step: step, w: w, kind: w.kind(), a: a, out: results.hub.bind(in), assigner: newAssigner(w),
			delay: int64(w.AllowedLateness) + int64(s.delay),
		}
		if len(late.hub.outs) > 0 {
			op.late = late.hub.bind(in)
		}
		op.table = newTable(in.task, in.f.stepID(step), windowCodec(w.kind(), w.Early > 0, a.State))
		op.table.onLoaded = op.loaded
		in.task.timers = append(in.task.timers, op)
		in.task.open = append(in.task.open, op.countOpen)
		atDrain(in.task, step, op.table, op.endsIn, op.endKey)
		switch w.kind() {
		case kindSession:
			return op.addSession
		case kindCount:
			return op.addCount
		case kindGlobal:
			return op.addGlobal
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
	kind     windowKind
	a        WindowAggregator[T, S, U]
	table    *table[keyWindows[S]]
	out      emit[U]
	late     emit[T]
	assigner *assigner
	// delay is how far the watermark has to be behind the end of a window.
	delay int64
	heap  heap[dueEntry[keyWindows[S]]]
}

// keyWindows is the state of a key: its open windows, in the order of their ends.
type keyWindows[S any] struct {
	open []openWindow[S]
	// queued is the time of the key's valid entry in the heap. Others are stale.
	queued int64
	isIn   bool
}

// openWindow is one of them. start and end are its bounds; of a session, of a number of
// records and of all records, the lowest and the highest time in it.
type openWindow[S any] struct {
	span
	records uint64 // of a number of records
	// early is the watermark at which the window emits the next early result, 0 if it
	// has not changed since the last one.
	early int64
	state S
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
	if m.ahead || op.in.task.closed(op.step, spans[len(spans)-1].end+op.delay) {
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
		op.changed(c, i, m.at)
		if op.w.Emit == EmitEach {
			op.update(m, s, &k.open[i].state)
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
	c := op.addOnly(m, v)
	if c == nil {
		return
	}
	w := &c.state.open[0]
	w.records++
	full := w.records >= uint64(op.w.Count)
	if !full {
		op.changed(c, 0, m.at)
		if op.w.Emit != EmitEach {
			return
		}
	}
	at, state := w.span, &w.state
	if full {
		// Before the result, which may panic.
		kept := w.state
		state = &kept
		op.table.remove(c)
	}
	op.update(m, at, state)
}

// addGlobal folds a record into the window of its key, which does not close.
func (op *windowed[T, S, U]) addGlobal(m *Meta, v T) {
	c := op.addOnly(m, v)
	if c == nil {
		return
	}
	op.changed(c, 0, m.at)
	if op.w.Emit == EmitEach {
		w := &c.state.open[0]
		op.update(m, w.span, &w.state)
	}
}

// addOnly folds a record into the only window of its key. It returns nil after an error.
func (op *windowed[T, S, U]) addOnly(m *Meta, v T) *cell[keyWindows[S]] {
	op.in.step = op.step
	c, fresh := op.table.getOrAdd(m.Key)
	marked := op.table.mark(c)
	k := &c.state
	opened := len(k.open) == 0
	if opened {
		at := m.at
		if m.ahead {
			at = m.nanos
		}
		k.open = append(k.open, openWindow[S]{span: span{at, at}})
	}
	w := &k.open[0]
	if err := op.a.Add(m, &w.state, v); err != nil {
		if opened {
			k.open = k.open[:0]
		}
		op.failed(m, c, marked, fresh, err)
		return nil
	}
	if !m.ahead {
		w.start, w.end = min(w.start, m.at), max(w.end, m.at)
	}
	return c
}

// tooLate ends a record that no window is open for; end is that of the last one. So it
// ends one that is too far ahead.
func (op *windowed[T, S, U]) tooLate(m *Meta, v T, end int64) {
	t := op.in.task
	t.late++
	if op.late != nil {
		op.late(m, v)
		return
	}
	if m.ahead {
		op.in.fail(op.step, m, m.tooFarAhead())
		return
	}
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

// closes returns the watermark at which a window of a key closes, the highest number for
// one that does not wait for a time.
func (op *windowed[T, S, U]) closes(k *keyWindows[S], i int) int64 {
	if op.kind >= kindCount {
		return math.MaxInt64
	}
	return op.endOf(k, i) + op.delay
}

// index, next and fire are those of a timedStep.
func (op *windowed[T, S, U]) index() int { return op.step }

// next returns when the first thing is to be done. Entries of the heap may be stale, and
// never too late: what they say is checked when they come to the top.
func (op *windowed[T, S, U]) next() int64 {
	for len(op.heap) > 0 {
		top := op.heap[0]
		k := &top.cell.state
		if top.cell.gone || !k.isIn || k.queued != top.due {
			op.heap.pop()
			continue
		}
		due := op.due(k)
		if due == top.due {
			return due
		}
		op.heap.pop()
		k.isIn = false
		op.queue(top.cell)
	}
	return math.MaxInt64
}

// fire does what is due first; next has been called.
func (op *windowed[T, S, U]) fire() {
	top := op.heap.pop()
	c, k := top.cell, &top.cell.state
	k.isIn = false
	due := op.closes(k, 0)
	if due > top.due {
		op.fireEarly(c, top.due)
		return
	}
	at, state := span{k.open[0].start, op.endOf(k, 0)}, k.open[0].state
	k.open = slices.Delete(k.open, 0, 1)
	// The window is gone before its result is made, which may panic.
	if len(k.open) == 0 {
		op.table.remove(c)
	} else {
		op.table.mark(c)
		op.queue(c)
	}
	t := op.in.task
	if op.w.Emit != EmitClose && !t.finishing {
		return
	}
	m := &t.meta
	*m = Meta{Key: c.key, nanos: due, at: at.end - 1, mark: t.now, pane: t.firedPane()}
	op.emit(m, at, &state)
}

// queue makes sure that the heap has an entry for a key that is not too late.
func (op *windowed[T, S, U]) queue(c *cell[keyWindows[S]]) {
	due := op.due(&c.state)
	if due < math.MaxInt64 && (!c.state.isIn || due < c.state.queued) {
		op.push(c, due)
	}
}

func (op *windowed[T, S, U]) push(c *cell[keyWindows[S]], due int64) {
	c.state.queued, c.state.isIn = due, true
	op.heap.push(dueEntry[keyWindows[S]]{due, c})
}

// loaded makes the heap of what was loaded.
func (op *windowed[T, S, U]) loaded() {
	op.heap = op.heap[:0]
	for _, c := range op.table.slots {
		if c != nil {
			c.state.isIn = false
			op.queue(c)
		}
	}
}
