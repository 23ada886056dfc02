package flow

import (
	"encoding/binary"
	"errors"
	"maps"
	"math"
	"slices"
)

// DrainMode says what a drain does with what is open.
type DrainMode string

// The modes of a drain.
const (
	// Suspend keeps windows, timers and all other state for the resume.
	Suspend DrainMode = "suspend"
	// Finish ends the input at the cut: what waits for a time happens, once.
	Finish DrainMode = "finish"
)

// Drain is a drain of the flow as a step sees it that has something to do at its end.
type Drain struct {
	Mode DrainMode
	// Epoch is the number of the drain. It rises with each one, also when one is
	// cancelled.
	Epoch uint64
	// Cut has the last sequence of each source that is processed. It must not be
	// modified.
	Cut map[string]uint64
}

// drainKeys bounds how many keys one call of [Task.Drain] deals with, and with that the
// state that one commit has to store.
const drainKeys = 16 << 10

// ending is what one step has to do at the end of a drain: first emit what it keeps
// back for the commit, then what waits for times, then what is done for each key.
type ending struct {
	step  int
	flush func()
	timed timedStep
	keyed *keyedEnding
}

// keyedEnding is what a step does for each key at the end of a drain.
type keyedEnding struct {
	step int
	// in reports whether there is something to do in that mode.
	in   func(mode DrainMode) bool
	keys func() []string
	// each does it for a key that has state. It counts what it emits by [Task.made].
	each func(d *Drain, key string)
}

// atDrain makes fn run for each key that the table has at the end of a drain, in the
// order of the keys, when the steps before have come to their end. It may change the
// state, and marks it then.
//
// It is also for a step that waits for times and sets new ones when it fires: in [Finish]
// such a step does what waits for a key here, and has nothing due while [Task.finishing].
// After a crash the mark of the keys tells what has been set meanwhile, and so stays.
func atDrain[S any](t *Task, step int, tab *table[S], in func(DrainMode) bool, fn func(d *Drain, c *cell[S])) {
	t.endings = append(t.endings, &keyedEnding{
		step: step, in: in,
		keys: func() []string { return slices.Collect(maps.Keys(tab.cells)) },
		each: func(d *Drain, key string) {
			if c := tab.cells[key]; c != nil {
				fn(d, c)
			}
		},
	})
}

// draining is how far a task is with the end of a drain.
type draining struct {
	drain Drain
	// left are the steps that are not at their end, in their order.
	left []ending
	// keys are those of the first of them, in order, from the one that is next on; nil
	// before it has begun.
	keys  []string
	begun bool
	// handled counts keys and times of this call, results what was emitted of that step
	// since its mark was written.
	handled int
	results uint64
}

// Drain does what is to be done at the end of a drain, when everything up to its cut has
// been played. With [Finish] the input ends: windows close, what waits for times
// happens, aggregates emit the result of each key; with [Suspend] windows emit what
// they have so far where [Windows.OnDrain] says so. Steps come to their end in their
// order, so that what one emits is a part of what those behind it have then. The
// watermark stays where it is.
//
// It stops when about so many bytes of output wait for a commit and returns more: the
// task is to be sealed, and Drain called again, of this task or of one that was loaded
// with the same state. How far it has come is a part of the state, by the epoch of the
// drain: after all of it was sealed, another call of the same epoch does nothing. Records
// that are played in between are not foreseen.
//
// With [Stop] it returns the *StepError of a step that fails.
func (t *Task) Drain(d Drain, most int) (more bool, err error) {
	if t.draining == nil || t.draining.drain.Epoch != d.Epoch {
		t.draining = &draining{drain: d, left: t.endingsOf(d.Mode)}
	}
	g := t.draining
	g.handled = 0
	for len(g.left) > 0 && t.in.halted == nil {
		if t.endStep(g, &g.left[0], most) {
			return true, t.haltedErr()
		}
		g.left, g.keys, g.begun = g.left[1:], nil, false
	}
	return false, t.haltedErr()
}

// Drained returns how many results the end of that drain has made.
func (t *Task) Drained(epoch uint64) (results uint64) {
	for _, c := range t.drained.cells {
		if c.state.epoch == epoch {
			results += c.state.results
		}
	}
	return results
}

// OpenWindows returns how many windows are open. It looks at all of them.
func (t *Task) OpenWindows() (n int) {
	for _, open := range t.open {
		n += open()
	}
	return n
}

// endingsOf lists what is to be done in that mode, in the order of the steps; of one
// step in the order of the fields of an ending.
func (t *Task) endingsOf(mode DrainMode) []ending {
	var own []ending
	if mode == Finish {
		for _, s := range t.timers {
			own = append(own, ending{step: s.index(), timed: s})
		}
	}
	for _, k := range t.endings {
		if k.in(mode) {
			own = append(own, ending{step: k.step, keyed: k})
		}
	}
	if len(own) == 0 {
		return nil
	}
	var all []ending
	for _, f := range t.flushers {
		all = append(all, ending{step: f.step, flush: f.flush})
	}
	all = append(all, own...)
	slices.SortStableFunc(all, func(a, b ending) int { return a.step - b.step })
	return all
}

// endStep brings one step to its end, or more of it.
func (t *Task) endStep(g *draining, e *ending, most int) (more bool) {
	switch {
	case e.flush != nil:
		e.flush()
		return false
	case e.timed != nil:
		again := true
		for again && !more && t.in.halted == nil {
			again, more = t.endTimes(g, e.timed, most)
		}
		if g.results > 0 {
			t.markDrained(g, e.step, drainMark{})
		}
		return more
	case !g.begun:
		g.begun = true
		if !t.beginKeys(g, e.step, e.keyed) {
			return false
		}
	}
	for last, some := "", false; len(g.keys) > 0 && t.in.halted == nil; some = true {
		if t.full(g, most) {
			if some {
				t.markDrained(g, e.step, drainMark{progress: throughKey, key: last})
			}
			return true
		}
		last = t.endKeys(g, e.keyed, most)
	}
	t.markDrained(g, e.step, drainMark{progress: throughAll})
	return false
}

// full reports that enough waits for a commit. The first of a call is done in any case.
func (t *Task) full(g *draining, most int) bool {
	return g.handled > 0 && (t.Pending() >= most || g.handled >= drainKeys)
}

// beginKeys finds the keys that a step has to deal with. It reports false if there are
// none left.
func (t *Task) beginKeys(g *draining, step int, e *keyedEnding) bool {
	c := t.drained.cells[t.f.stepID(step)]
	before := c != nil && c.state.epoch == g.drain.Epoch
	if before && c.state.progress == throughAll {
		return false
	}
	g.keys = e.keys()
	slices.Sort(g.keys)
	if before && c.state.progress == throughKey {
		at, found := slices.BinarySearch(g.keys, c.state.key)
		if found {
			at++
		}
		g.keys = g.keys[at:]
	}
	return len(g.keys) > 0
}

// endKeys does what a step has to do for its keys until enough waits for a commit, or
// until a panic, which costs the key that it happened in. It returns the last key.
func (t *Task) endKeys(g *draining, e *keyedEnding, most int) (last string) {
	defer func() {
		t.ended(recover())
	}()
	for len(g.keys) > 0 && t.in.halted == nil && !t.full(g, most) {
		last = g.keys[0]
		g.keys = g.keys[1:]
		g.handled++
		t.in.step = e.step
		e.each(&g.drain, last)
	}
	return last
}

// endTimes fires what waits in a step, in the order of the times, until enough waits for
// a commit, or until a panic. While something is fired, the watermark is the time
// for which it waited. Behind that it is where it was, so that what the step has emitted
// is not late in those behind it.
func (t *Task) endTimes(g *draining, s timedStep, most int) (more, full bool) {
	now := t.now
	t.finishing = true
	defer func() {
		t.now, t.firing, t.finishing, t.meta.pane = now, -1, false, PaneNone
		if p := recover(); p != nil {
			t.ended(p)
			more = true
		}
	}()
	for t.in.halted == nil {
		due := s.next()
		if due == math.MaxInt64 {
			return false, false
		}
		if t.full(g, most) {
			return true, true
		}
		g.handled++
		t.now, t.firing = max(now, due), s.index()
		s.fire()
	}
	return false, false
}

// ended ends a turn of a step that may have panicked with p.
func (t *Task) ended(p any) {
	if p != nil {
		t.in.panicked(&t.meta, p)
	}
	t.meta.pane = PaneNone
}

// endMeta is the position of what a step emits for a key at the end of a drain. at is
// the time of it if the watermark is not later.
func (t *Task) endMeta(key string, pane Pane, at int64) *Meta {
	if at = max(at, t.now); at == noTime {
		at = 0
	}
	t.meta = Meta{Key: key, nanos: at, at: at, mark: t.now, pane: pane}
	return &t.meta
}

// firedPane is what kind of result it is that a step emits when what waits for a time is
// fired.
func (t *Task) firedPane() Pane {
	if t.finishing {
		return PaneFinal
	}
	return PaneNone
}

// made counts a result that the end of a drain has made.
func (t *Task) made() {
	if t.draining != nil {
		t.draining.results++
	}
}

// drainMark says how far a step is with the keys at the end of a drain.
type drainMark struct {
	epoch    uint64
	progress drainProgress
	// key is the last one that is dealt with, if it is throughKey.
	key string
	// results that were made.
	results uint64
}

type drainProgress byte

const (
	throughNone drainProgress = iota
	throughKey
	throughAll
)

// drainMarks has those of the steps, by their ids.
const drainMarks = "\x00drained"

// markDrained notes how far a step is, so that after a crash it goes on there.
func (t *Task) markDrained(g *draining, step int, m drainMark) {
	c, _ := t.drained.getOrAdd(t.f.stepID(step))
	m.epoch, m.results = g.drain.Epoch, g.results
	if c.state.epoch == m.epoch {
		m.results += c.state.results
	}
	t.drained.mark(c)
	c.state, g.results = m, 0
}

// drainMarkCodec stores a mark:
//
//	mark = 1 byte progress | uvarint epoch | uvarint results | key
var drainMarkCodec = StateCodec[drainMark]{
	Append: func(dst []byte, m *drainMark) ([]byte, error) {
		dst = binary.AppendUvarint(append(dst, byte(m.progress)), m.epoch)
		dst = binary.AppendUvarint(dst, m.results)
		return append(dst, m.key...), nil
	},
	Decode: func(data []byte, m *drainMark) error {
		r := reader{data: data}
		progress := r.take(1)
		m.epoch, m.results = r.uvarint(), r.uvarint()
		if r.bad || drainProgress(progress[0]) > throughAll {
			return errDrainMark
		}
		m.progress, m.key = drainProgress(progress[0]), string(r.data)
		return nil
	},
}

var errDrainMark = errors.New("not how far a drain has come")
