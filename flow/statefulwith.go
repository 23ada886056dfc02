package flow

import (
	"fmt"
	"math"
	"time"
)

// StatefulConfig is what [StatefulWith] runs for the records and the timers of a key, and
// at the end of a drain.
type StatefulConfig[T, S, U any] struct {
	// State says how the state is stored. Required.
	State StateCodec[S]
	// On is run for each record with the state of its key. The first record of a key
	// finds the zero value. It may emit any number of results, change *state, drop it by
	// [Meta.DropState], and set timers by [Meta.SetTimer] and [Meta.SetStreamTimer].
	// Changes made before an error stay. Required.
	On func(m *Meta, state *S, v T, emit func(U)) error
	// OnTimer is run for each timer that fires. It may do what On may. The timer is gone
	// when it runs. Of the record, m has the key only. m.EventTime is the time that the
	// timer was set for; of a timer of the stream's time m.Time is that, and m.EventTime
	// the watermark, where the two differ. Timers fire in the order of their times, then
	// of the steps, the keys and the names. A drain with [Finish] fires all that are set, key
	// by key, and what they emit is [PaneFinal]; those that are set by it stay. An
	// error, or a panic, is a dead letter with the key. Without it the step has no timers.
	OnTimer func(m *Meta, state *S, name string, emit func(U)) error
	// OnDrain, if it is not nil, is run for each key that has state, in the order of the
	// keys, when a drain has come to its cut, and with [Finish] has fired the timers of the
	// key. It may do what On may. Of the record, m has the key only; what it emits is
	// [PanePartial] or, with [Finish], [PaneFinal]. It is run once for a key and a drain,
	// whatever crashes; for a drain that is cancelled it may have been run already for
	// some keys.
	OnDrain func(m *Meta, d Drain, state *S, emit func(U)) error
	// TTL, if it is not 0, drops the state of a key, and its timers, when On has not
	// been called for it for that long by the time of the streams: the timestamps that
	// they gave, and the clock of their server when no record comes. With several inputs
	// it is the time that all of them have reached. Then Meta.Unchanged does not spare
	// the storing of the record's time. State from before the step had a TTL
	// counts as touched when the flow first runs with it.
	TTL time.Duration
}

// StatefulWith is [Stateful] with timers, a TTL and a function for the end of a drain.
//
// The timers of a key are a part of its state: they are in the snapshot, and stay set
// when the flow stops. One whose time has passed meanwhile fires once, soon after the
// start. The key has state for as long as it has timers; [Meta.DropState] drops both, also
// the timers that the same call has set. A timer fires when the task knows that its time
// has come, whether there are records or not.
//
// id is the identity of the state. It may belong to a Stateful before or later: what
// that has stored is read, and the other way round for as long as no timers are set.
func StatefulWith[T, S, U any](s Stream[T], id string, cfg StatefulConfig[T, S, U], opts ...StepOption) Stream[U] {
	opts = append([]StepOption{func(info *StepInfo) { info.TTL = cfg.TTL }}, opts...)
	step, out := stateful(s, "stateful", id, cfg.State.Version, opts), then[T, U](s)
	if cfg.OnTimer != nil {
		// What timers emit does not come in the order of the records.
		out.source = 0
	}
	s.b.need(step, "function On", cfg.On != nil)
	s.b.need(step, "state codec with Append and Decode", cfg.State.usable())
	needTTL(s, id, cfg.TTL)
	if cfg.OnTimer != nil {
		s.b.needStreamTime(s.stage)
	}
	s.hub.subscribe(func(in *instance) emit[T] {
		op := &statefulStep[T, S, U]{in: in, step: step, cfg: cfg, next: out.hub.bind(in)}
		op.table = newTable(in.task, in.f.stepID(step), keyStateCodec(cfg.State, cfg.OnTimer != nil, cfg.TTL > 0))
		op.table.onLoaded = op.loaded
		op.emit = op.each
		if cfg.OnTimer != nil {
			op.makeTimers(int64(s.delay))
		}
		if cfg.OnTimer != nil || cfg.OnDrain != nil {
			atDrain(in.task, step, op.table, op.endsIn, op.atEnd)
		}
		op.expiry = newExpiry(in, step, cfg.TTL, op.table)
		return op.on
	})
	return out
}

// statefulStep is a StatefulWith step in one task.
type statefulStep[T, S, U any] struct {
	in    *instance
	step  int
	cfg   StatefulConfig[T, S, U]
	table *table[keyState[S]]
	next  emit[U]
	emit  func(U)
	// queues are nil without OnTimer, expiry is without a TTL.
	queues [timerKinds]*timerQueue[S]
	expiry *expiry[S]

	// Of the call that runs: what it has of the record, the state of its key, and
	// whether it has changed the timers.
	meta   *Meta
	cell   *cell[keyState[S]]
	timers timerSetter
	moved  bool
	// firing is the kind of the timer that is fired, at its time; -1 for a record.
	firing timerKind
	at     int64
	// ending: the timers of a key are fired for the end of the input.
	ending bool
}

func (op *statefulStep[T, S, U]) makeTimers(delay int64) {
	op.timers = op
	for kind, delay := range [timerKinds]int64{eventTimer: delay, streamTimer: 0} {
		op.queues[kind] = &timerQueue[S]{t: op.in.task, kind: timerKind(kind), step: op.step, delay: delay, call: op.onTimer}
	}
	op.in.task.timers = append(op.in.task.timers, op.queues[eventTimer])
	op.in.task.waitForStream(op.queues[streamTimer])
}

// each hands a result on. The steps behind this one have calls of their own.
func (op *statefulStep[T, S, U]) each(u U) {
	m := op.meta
	drop, unchanged := m.drop, m.unchanged
	m.timers = nil
	op.next(m, u)
	m.drop, m.unchanged, m.timers = drop, unchanged, op.timers
	op.in.step = op.step
}

func (op *statefulStep[T, S, U]) on(m *Meta, v T) {
	c, fresh := op.table.getOrAdd(m.Key)
	// Marked before the call: a panic may leave the state changed.
	marked := op.table.mark(c)
	if op.expiry != nil {
		op.expiry.touch(c, m)
	}
	op.begin(m, c)
	op.firing = -1
	err := op.cfg.On(m, &c.state.state, v, op.emit)
	m.timers = nil
	switch {
	case m.drop:
		op.drop(c, marked, fresh)
	case !m.unchanged || err != nil:
	case fresh && c.state.timers == nil:
		op.drop(c, marked, fresh)
	case !fresh && !op.moved && op.expiry == nil:
		op.table.takeBack(c, marked, fresh)
	}
	if err != nil {
		op.in.fail(op.step, m, err)
	}
}

// begin begins a call for a key.
func (op *statefulStep[T, S, U]) begin(m *Meta, c *cell[keyState[S]]) {
	op.in.step, op.meta, op.cell, op.moved = op.step, m, c, false
	m.drop, m.unchanged, m.timers = false, false, op.timers
}

// drop forgets a key. Entries for it that are in a heap are stale then.
func (op *statefulStep[T, S, U]) drop(c *cell[keyState[S]], marked, fresh bool) {
	// The entries keep the cell for a while.
	c.state = keyState[S]{}
	if fresh {
		op.table.takeBack(c, marked, fresh)
		return
	}
	op.table.remove(c)
}

// onTimer runs a timer.
func (op *statefulStep[T, S, U]) onTimer(c *cell[keyState[S]], kind timerKind, tm timer) {
	op.table.mark(c)
	t := op.in.task
	m := &t.meta
	*m = Meta{Key: c.key, nanos: tm.at, at: tm.at, mark: t.now}
	switch {
	case t.second == nil:
	case kind == eventTimer && t.second.now != noTime:
		m.nanos = t.second.now
	case kind == streamTimer && t.now != noTime:
		m.at = t.now
	}
	emit := op.emit
	if op.ending {
		m.pane, emit = PaneFinal, op.counted
	}
	op.begin(m, c)
	op.firing, op.at = kind, tm.at
	err := op.cfg.OnTimer(m, &c.state.state, tm.name, emit)
	m.timers = nil
	if m.drop {
		op.drop(c, false, false)
	}
	if err != nil {
		op.in.fail(op.step, m, fmt.Errorf("timer %q: %w", tm.name, err))
	}
}

// set sets a timer for the key of the call that runs.
func (op *statefulStep[T, S, U]) set(kind timerKind, name string, at int64) error {
	if limit := op.limit(kind); at <= limit {
		return fmt.Errorf("the time %s is not later than %s, that of the timer that fires: it could fire for ever", stamp(at), stamp(limit))
	}
	c := op.cell
	k := c.state.timers
	if k == nil {
		k = &keyTimers{}
	}
	if p, there := k.find(name); there {
		if p.kind == kind && k.list[kind][p.i].at == at {
			return nil
		}
		k.remove(p)
	} else if len(k.list[eventTimer])+len(k.list[streamTimer]) >= MaxTimers {
		return fmt.Errorf("the key has %d timers already, the most that are possible", MaxTimers)
	}
	k.insert(kind, timer{at, name})
	c.state.timers, op.moved = k, true
	op.queues[kind].queue(c)
	if stale(len(op.queues[kind].heap), op.table.size()) {
		op.queues[kind].rebuild(op.table)
	}
	op.in.task.noteOverdue(kind, at+op.queues[kind].delay)
	return nil
}

// limit is the time that a timer has to be later than, so that the timers of a key make
// progress: that of the one that fires, or where the clock is the other one, that.
func (op *statefulStep[T, S, U]) limit(kind timerKind) int64 {
	t := op.in.task
	switch {
	case op.firing < 0:
		return math.MinInt64
	case kind == op.firing || t.second == nil:
		return op.at
	case kind == streamTimer:
		return t.second.now
	case t.now == noTime:
		return noTime
	}
	return t.now - op.queues[eventTimer].delay
}

func (op *statefulStep[T, S, U]) cancel(name string) {
	k := op.cell.state.timers
	if k == nil {
		return
	}
	if p, there := k.find(name); there {
		k.remove(p)
		op.moved = true
		if k.empty() {
			op.cell.state.timers = nil
		}
	}
}

// loaded makes the heaps of what was loaded.
func (op *statefulStep[T, S, U]) loaded() {
	for _, q := range op.queues {
		if q == nil {
			continue
		}
		q.rebuild(op.table)
	}
	if op.expiry != nil {
		op.expiry.loaded()
	}
}
