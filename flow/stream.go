package flow

import "time"

// emit hands a value to the steps that follow.
type emit[T any] func(m *Meta, v T)

// Stream is a flow of values of one type between two steps.
type Stream[T any] struct {
	b     *Builder
	hub   *hub[T]
	keyed bool
	// source is the one, from 1, that all the values come from; 0 for several, whose times
	// do not run together.
	source int
	// spread: it was redistributed, so that its records are with the tasks of their
	// sequences, and their keys stand for nothing.
	spread bool
	// stage is how often the key was changed on the way here.
	stage int
	// delay is how far behind the watermark the values may be: windows before have
	// an allowed lateness.
	delay time.Duration
}

// hub is where a step's results come out: the steps that follow subscribe to
// it. A flow is a graph of hubs; an instance (of a router or a task) binds it to
// closures that call each other, so that no value is boxed on its way.
type hub[T any] struct {
	b    *Builder
	outs []func(in *instance) emit[T]
}

// subscribe adds a step. After Build it does not: routers and tasks of the flow
// may be bound at the same time, and the flow knows nothing of the step.
func (h *hub[T]) subscribe(bind func(in *instance) emit[T]) {
	if !h.b.built {
		h.outs = append(h.outs, bind)
	}
}

// bind makes the closure of an instance; once, however many steps lead here, so
// that merged streams share what follows.
func (h *hub[T]) bind(in *instance) emit[T] {
	if e, ok := in.memo[h]; ok {
		return e.(emit[T])
	}
	outs := make([]emit[T], len(h.outs))
	for i, bind := range h.outs {
		outs[i] = bind(in)
	}
	var e emit[T]
	switch len(outs) {
	case 0:
		e = func(*Meta, T) {}
	case 1:
		e = outs[0]
	default:
		e = func(m *Meta, v T) {
			for _, out := range outs {
				out(m, v)
			}
		}
	}
	in.memo[h] = e
	return e
}

// instance is one binding of the graph. A router binds the steps before the
// first key, a task those of its stage after it.
type instance struct {
	f    *Flow
	memo map[any]any
	// step is the index of the step that runs, for the report of a panic.
	step   int
	task   *Task
	router *Router
	// halted is the failure that stops the flow.
	halted *StepError
}

// fail reports that the record at hand failed in a step. With [Stop] it does
// not return: it unwinds to the place that plays records.
func (in *instance) fail(step int, m *Meta, err error) {
	e := in.stepError(step, m, err)
	if in.f.opts.OnError == Stop {
		// Noted before it unwinds: a step between here and there may recover.
		in.halt(e)
		panic(halt{e})
	}
	if in.router != nil {
		in.router.deadLetter(m, e)
		return
	}
	in.task.deadLetter(m, e)
}

// stepError is the failure of a step. With [Stop] its position is that of the record that
// is played, before which the flow stops: a value that a join has kept, and which a later
// record or a watermark has made go on, has one that is long committed.
func (in *instance) stepError(step int, m *Meta, err error) *StepError {
	e := &StepError{Step: in.f.stepID(step), Stream: m.Stream, Subject: m.Subject, Seq: m.Seq, Key: m.Key, Frame: m.frame, Err: err}
	if in.f.opts.OnError != Stop || in.task == nil {
		return e
	}
	at := &in.task.meta
	if in.task.firing >= 0 {
		at = &Meta{}
	}
	e.Stream, e.Subject, e.Seq, e.Frame = at.Stream, at.Subject, at.Seq, at.frame
	return e
}

// halt unwinds a record whose failure stops the flow.
type halt struct{ err *StepError }

// halt notes the first failure, which is the one to report.
func (in *instance) halt(e *StepError) {
	if in.halted == nil {
		in.halted = e
	}
}

// panicked deals with what was recovered while the record at hand was in a step:
// a halt, or a panic of a function of the user.
func (in *instance) panicked(m *Meta, p any) {
	// The next record is none of the step that has panicked.
	m.timers = nil
	if _, ok := p.(halt); ok {
		return
	}
	err := panicError(p)
	if wrong, ok := p.(misuse); ok {
		err = wrong.err
	}
	e := in.stepError(in.step, m, err)
	switch {
	case in.f.opts.OnError == Stop:
		in.halt(e)
	case in.router != nil:
		in.router.deadLetter(m, e)
	default:
		in.task.deadLetter(m, e)
	}
}

func (f *Flow) stepID(i int) string {
	if i < 0 || i >= len(f.steps) {
		return ""
	}
	return f.steps[i].ID
}

// StepOption adjusts a step.
type StepOption func(*StepInfo)

// ID names a step. Steps without state get a name of their own if none is
// given.
func ID(id string) StepOption { return func(s *StepInfo) { s.ID = id } }

// Kind gives a step another kind than its function's, for a plan or a report:
// a language on top of this package has words of its own.
func Kind(kind string) StepOption { return func(s *StepInfo) { s.Kind = kind } }

func (s Stream[T]) step(kind string, opts []StepOption) int {
	info := StepInfo{Kind: kind, Keyed: s.keyed, Stage: s.stage}
	for _, o := range opts {
		o(&info)
	}
	return s.b.step(info)
}

func then[T, U any](s Stream[T]) Stream[U] {
	return Stream[U]{b: s.b, hub: &hub[U]{b: s.b}, keyed: s.keyed, source: s.source, spread: s.spread, stage: s.stage, delay: s.delay}
}

// Map turns each value into another. An error makes the record a dead letter.
func Map[T, U any](s Stream[T], fn func(m *Meta, v T) (U, error), opts ...StepOption) Stream[U] {
	step, out := s.step("map", opts), then[T, U](s)
	s.b.need(step, "function", fn != nil)
	s.hub.subscribe(func(in *instance) emit[T] {
		next := out.hub.bind(in)
		return func(m *Meta, v T) {
			in.step = step
			u, err := fn(m, v)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			next(m, u)
		}
	})
	return out
}

// Filter keeps the values for which keep is true.
func Filter[T any](s Stream[T], keep func(m *Meta, v T) (bool, error), opts ...StepOption) Stream[T] {
	step, out := s.step("filter", opts), then[T, T](s)
	s.b.need(step, "function", keep != nil)
	s.hub.subscribe(func(in *instance) emit[T] {
		next := out.hub.bind(in)
		return func(m *Meta, v T) {
			in.step = step
			ok, err := keep(m, v)
			if err != nil {
				in.fail(step, m, err)
				return
			}
			if ok {
				next(m, v)
			}
		}
	})
	return out
}

// FlatMap turns each value into any number of others: those that fn emits.
// What was emitted before an error goes on.
func FlatMap[T, U any](s Stream[T], fn func(m *Meta, v T, emit func(U)) error, opts ...StepOption) Stream[U] {
	step, out := s.step("flat-map", opts), then[T, U](s)
	s.b.need(step, "function", fn != nil)
	s.hub.subscribe(func(in *instance) emit[T] {
		next := out.hub.bind(in)
		var current *Meta
		each := func(u U) {
			next(current, u)
			in.step = step
		}
		return func(m *Meta, v T) {
			in.step, current = step, m
			if err := fn(m, v, each); err != nil {
				in.fail(step, m, err)
			}
		}
	})
	return out
}

// Branch splits a stream: values for which pred is true go to the first result,
// the others to the second.
func Branch[T any](s Stream[T], pred func(m *Meta, v T) (bool, error), opts ...StepOption) (yes, no Stream[T]) {
	step := s.step("branch", opts)
	s.b.need(step, "function", pred != nil)
	yes, no = then[T, T](s), then[T, T](s)
	s.hub.subscribe(func(in *instance) emit[T] {
		nextYes, nextNo := yes.hub.bind(in), no.hub.bind(in)
		return func(m *Meta, v T) {
			in.step = step
			ok, err := pred(m, v)
			switch {
			case err != nil:
				in.fail(step, m, err)
			case ok:
				nextYes(m, v)
			default:
				nextNo(m, v)
			}
		}
	})
	return yes, no
}

// Merge joins streams of one type and of one stage. All of them are keyed, or none
// is. Records of
// one source keep their order; between sources there is none.
func Merge[T any](first Stream[T], others ...Stream[T]) Stream[T] {
	first.step("merge", nil)
	out := then[T, T](first)
	for _, s := range append([]Stream[T]{first}, others...) {
		if s.b != first.b {
			first.b.errorf("merge: the streams belong to different flows")
		}
		if s.keyed != first.keyed {
			first.b.errorf("merge: some of the streams are keyed and some are not")
		}
		if s.spread != first.spread {
			first.b.errorf("merge: some of the streams are redistributed and some are not")
		}
		if s.stage != first.stage {
			first.b.errorf("merge: a stream of stage %d and one of stage %d: change the key of the first by Rekey, so that both are of one stage", min(s.stage, first.stage), max(s.stage, first.stage))
		}
		out.delay = max(out.delay, s.delay)
		if s.source != first.source {
			out.source = 0
		}
		s.hub.subscribe(func(in *instance) emit[T] { return out.hub.bind(in) })
	}
	return out
}

// Inspect calls fn for each value and hands the value on. After a crash fn may
// be called again for records that had not been committed.
func Inspect[T any](s Stream[T], fn func(m *Meta, v T), opts ...StepOption) Stream[T] {
	step, out := s.step("inspect", opts), then[T, T](s)
	s.b.need(step, "function", fn != nil)
	s.hub.subscribe(func(in *instance) emit[T] {
		next := out.hub.bind(in)
		return func(m *Meta, v T) {
			in.step = step
			fn(m, v)
			next(m, v)
		}
	})
	return out
}
