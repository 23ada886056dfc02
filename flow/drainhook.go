package flow

// onDrain runs the function of the user for a key at the end of a drain.
func (op *statefulStep[T, S, U]) onDrain(d *Drain, c *cell[S]) {
	pane := PanePartial
	if d.Mode == Finish {
		pane = PaneFinal
	}
	// Marked before the call: a panic may leave the state changed.
	marked := op.table.mark(c)
	m := op.in.task.endMeta(c.key, pane, noTime)
	op.begin(m)
	err := op.cfg.OnDrain(m, *d, &c.state, op.counted)
	switch {
	case m.drop:
		op.table.remove(c)
	case m.unchanged && err == nil:
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
