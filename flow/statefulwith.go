package flow

// StatefulConfig is what [StatefulWith] runs for the records of a key, and at the end of
// a drain.
type StatefulConfig[T, S, U any] struct {
	// State says how the state is stored. Required.
	State StateCodec[S]
	// On is run for each record with the state of its key. The first record of a key
	// finds the zero value. It may emit any number of results, may change *state, and
	// may drop it by [Meta.DropState]. Changes made before an error stay. Required.
	On func(m *Meta, state *S, v T, emit func(U)) error
	// OnDrain, if it is not nil, is run for each key that has state, in the order of the
	// keys, when a drain has come to its cut. It may do what On may. Of the record, m has
	// the key only; what it emits is [PanePartial] or, with [Finish], [PaneFinal]. It is
	// run once for a key and a drain, whatever crashes; for a drain that is
	// cancelled it may have been run already for some keys.
	OnDrain func(m *Meta, d Drain, state *S, emit func(U)) error
}

// StatefulWith is [Stateful] with more than one function. id is the identity of the
// state, which may belong to a Stateful before or later.
func StatefulWith[T, S, U any](s Stream[T], id string, cfg StatefulConfig[T, S, U], opts ...StepOption) Stream[U] {
	step, out := stateful(s, "stateful", id, cfg.State.Version, opts), then[T, U](s)
	s.b.need(step, "function On", cfg.On != nil)
	s.b.need(step, "state codec with Append and Decode", cfg.State.usable())
	s.hub.subscribe(func(in *instance) emit[T] {
		op := &statefulStep[T, S, U]{in: in, step: step, cfg: cfg, next: out.hub.bind(in)}
		op.table = newTable(in.task, in.f.stepID(step), cfg.State)
		op.emit = op.each
		if cfg.OnDrain != nil {
			atDrain(in.task, step, op.table, func(DrainMode) bool { return true }, op.onDrain)
		}
		return op.on
	})
	return out
}

// statefulStep is a StatefulWith step in one task.
type statefulStep[T, S, U any] struct {
	in    *instance
	step  int
	cfg   StatefulConfig[T, S, U]
	table *table[S]
	next  emit[U]
	emit  func(U)
	// meta is that of the call that runs.
	meta *Meta
}

// each hands a result on. The steps behind this one have calls of their own.
func (op *statefulStep[T, S, U]) each(u U) {
	m := op.meta
	drop, unchanged := m.drop, m.unchanged
	op.next(m, u)
	m.drop, m.unchanged = drop, unchanged
	op.in.step = op.step
}

func (op *statefulStep[T, S, U]) on(m *Meta, v T) {
	c, fresh := op.table.getOrAdd(m.Key)
	// Marked before the call: a panic may leave the state changed.
	marked := op.table.mark(c)
	op.begin(m)
	err := op.cfg.On(m, &c.state, v, op.emit)
	switch {
	case m.drop && !fresh:
		op.table.remove(c)
	case m.drop || m.unchanged && err == nil:
		op.table.takeBack(c, marked, fresh)
	}
	if err != nil {
		op.in.fail(op.step, m, err)
	}
}

// begin begins a call.
func (op *statefulStep[T, S, U]) begin(m *Meta) {
	op.in.step, op.meta = op.step, m
	m.drop, m.unchanged = false, false
}
