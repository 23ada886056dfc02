package flow

import "math"

// due returns when something is to be done for a key: a window closes, or emits an early
// result before that. It is the highest number if nothing is.
func (op *windowed[T, S, U]) due(k *keyWindows[S]) int64 {
	if len(k.open) == 0 {
		return math.MaxInt64
	}
	due := op.closes(k, 0)
	if op.w.Early == 0 || op.in.task.finishing {
		return due
	}
	for i := range k.open {
		if early := k.open[i].early; early != 0 && early < due && early < op.closes(k, i) {
			due = early
		}
	}
	return due
}

// changed notes that a record at a time has changed a window, which is to emit an early
// result for that: when the watermark comes to the next multiple of [Windows.Early].
func (op *windowed[T, S, U]) changed(c *cell[keyWindows[S]], i int, at int64) {
	w := &c.state.open[i]
	if op.w.Early == 0 || w.early != 0 {
		return
	}
	if now := op.in.task.now; now != noTime {
		at = now
	}
	every := int64(op.w.Early)
	w.early = floorTo(at, every) + every
	if w.early == 0 {
		w.early = 1 // 0 is none; the watermark passes both at once, but for a nanosecond in 1970
	}
	k := &c.state
	if w.early < op.closes(k, i) && (!k.isIn || w.early < k.queued) {
		op.push(c, w.early)
	}
}

// fireEarly emits the early results of a key that are due.
func (op *windowed[T, S, U]) fireEarly(c *cell[keyWindows[S]], due int64) {
	k := &c.state
	op.table.mark(c)
	for i := 0; i < len(k.open) && op.in.halted == nil; i++ {
		if w := &k.open[i]; w.early != 0 && w.early <= due && w.early < op.closes(k, i) {
			w.early = 0
			op.emitOpen(c, i, PaneEarly)
		}
	}
	op.queue(c)
}

// emitOpen emits the result so far of a window. A panic costs that result only.
func (op *windowed[T, S, U]) emitOpen(c *cell[keyWindows[S]], i int, pane Pane) {
	t, k := op.in.task, &c.state
	defer func() { t.ended(recover()) }()
	at := op.spanOf(k, i)
	m := t.endMeta(c.key, pane, noTime)
	m.at = op.lastOf(at)
	op.emit(m, at, &k.open[i].state)
}

// spanOf returns the bounds of a window as its result has them.
func (op *windowed[T, S, U]) spanOf(k *keyWindows[S], i int) span {
	return span{k.open[i].start, op.endOf(k, i)}
}

// lastOf returns the time of what a window emits though no record has made it: its last
// moment, if that is known already.
func (op *windowed[T, S, U]) lastOf(at span) int64 {
	if op.kind >= kindCount {
		return max(at.end, op.in.task.now)
	}
	return at.end - 1
}

// emit makes the result of a window.
func (op *windowed[T, S, U]) emit(m *Meta, at span, state *S) {
	op.in.step = op.step
	var times Span
	if !op.w.Global {
		times = at.times()
	}
	u, err := op.a.Result(m, times, state)
	if err != nil {
		op.in.fail(op.step, m, err)
		return
	}
	if m.pane >= PanePartial {
		op.in.task.made()
	}
	op.out(m, u)
	op.in.step = op.step
}

// update emits the result that a record has made. It is an ordinary one, also where that
// record is itself the early result, say, of another window.
func (op *windowed[T, S, U]) update(m *Meta, at span, state *S) {
	pane := m.pane
	m.pane = PaneNone
	op.emit(m, at, state)
	m.pane = pane
}

// endsIn reports whether a drain in a mode has something to do for each key: partial
// results, and final ones of windows that do not wait for a time.
func (op *windowed[T, S, U]) endsIn(mode DrainMode) bool {
	if mode == Finish {
		return op.kind >= kindCount
	}
	return op.w.OnDrain == EmitPartial
}

// endKey emits what a drain wants of the windows of a key.
func (op *windowed[T, S, U]) endKey(d *Drain, c *cell[keyWindows[S]]) {
	t, k := op.in.task, &c.state
	if d.Mode == Finish {
		op.table.remove(c)
		for i := range k.open { // there is one
			w := &k.open[i]
			op.emit(t.endMeta(c.key, PaneFinal, w.end), w.span, &w.state)
		}
		return
	}
	// Result may change the state.
	op.table.mark(c)
	for i := 0; i < len(k.open) && t.in.halted == nil; i++ {
		op.emitOpen(c, i, PanePartial)
	}
}

// countOpen returns the number of open windows.
func (op *windowed[T, S, U]) countOpen() (n int) {
	for _, c := range op.table.cells {
		n += len(c.state.open)
	}
	return n
}
