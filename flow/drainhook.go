package flow

import (
	"cmp"
	"slices"
)

// endsIn reports whether a drain of that mode has something to do at its end.
func (op *statefulStep[T, S, U]) endsIn(mode DrainMode) bool {
	return op.cfg.OnDrain != nil || mode == Finish && op.cfg.OnTimer != nil
}

// atEnd does what a drain has to do for a key at its end.
func (op *statefulStep[T, S, U]) atEnd(d *Drain, c *cell[keyState[S]]) {
	if d.Mode == Finish {
		op.fireAll(c)
	}
	if op.cfg.OnDrain != nil && !c.gone {
		op.onDrain(d, c)
	}
}

// fireAll fires the timers of a key that are set, in the order of their times; of one time
// in that of the kinds and the names. What they set stays set: that is for the resume.
func (op *statefulStep[T, S, U]) fireAll(c *cell[keyState[S]]) {
	if c.state.timers == nil {
		return
	}
	type waiting struct {
		kind timerKind
		timer
	}
	var all []waiting
	for kind, list := range c.state.timers.list {
		for _, tm := range list {
			all = append(all, waiting{timerKind(kind), tm})
		}
	}
	slices.SortStableFunc(all, func(a, b waiting) int { return cmp.Compare(a.at, b.at) })
	for _, w := range all {
		k := c.state.timers
		if k == nil || op.in.halted != nil {
			return // dropped or cancelled, if not stopped
		}
		p, there := k.find(w.name)
		if !there || p.kind != w.kind || k.list[p.kind][p.i].at != w.at {
			continue // cancelled, or set anew
		}
		k.remove(p)
		if k.empty() {
			c.state.timers = nil
		}
		op.fireAtEnd(c, w.kind, w.timer)
	}
}

// fireAtEnd fires a timer for the end of the input. A panic costs that one, not the others
// of its key.
func (op *statefulStep[T, S, U]) fireAtEnd(c *cell[keyState[S]], kind timerKind, tm timer) {
	op.ending = true
	defer func() {
		op.ending = false
		op.in.task.ended(recover())
	}()
	op.onTimer(c, kind, tm)
}

// onDrain runs the function of the user for a key at the end of a drain.
func (op *statefulStep[T, S, U]) onDrain(d *Drain, c *cell[keyState[S]]) {
	pane := PanePartial
	if d.Mode == Finish {
		pane = PaneFinal
	}
	// Marked before the call: a panic may leave the state changed.
	marked := op.table.mark(c)
	m := op.in.task.endMeta(c.key, pane, noTime)
	op.begin(m, c)
	op.firing = -1
	err := op.cfg.OnDrain(m, *d, &c.state.state, op.counted)
	m.timers = nil
	switch {
	case m.drop:
		op.drop(c, marked, false)
	case m.unchanged && err == nil && !op.moved:
		op.table.takeBack(c, marked, false)
	}
	if err != nil {
		op.in.fail(op.step, m, err)
	}
}

// counted is each for what a drain makes.
func (op *statefulStep[T, S, U]) counted(u U) {
	op.in.task.made()
	op.each(u)
}
