package flow

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Forever is the bound of a join that has none: records are kept for as long as the flow
// is there.
const Forever time.Duration = math.MaxInt64

// JoinKind says what becomes of records that meet no other.
type JoinKind int

// The kinds of joins.
const (
	// InnerJoin gives pairs only.
	InnerJoin JoinKind = iota
	// LeftJoin gives the records of the left stream that met none, too.
	LeftJoin
	// OuterJoin gives those of both streams. A [JoinTable] has no such kind.
	OuterJoin
)

// String returns inner, left or outer.
func (k JoinKind) String() string {
	switch k {
	case InnerJoin:
		return "inner"
	case LeftJoin:
		return "left"
	case OuterJoin:
		return "outer"
	}
	return fmt.Sprintf("kind %d", int(k))
}

// JoinConfig says which records of two streams meet, and what comes of them.
type JoinConfig[L, R, U any] struct {
	// Kind defaults to [InnerJoin].
	Kind JoinKind
	// Before and After say which records of one key meet: a left one of time t meets
	// the right ones from t - Before to t + After, both included. 0, the default of
	// both, is the same time; [Forever] is no bound. The side that waits for others,
	// and of which those that met none are wanted, needs a bound: a left record waits
	// for After, a right one for Before.
	Before, After time.Duration
	// Windows, if set, stand in place of Before and After: records meet that are in
	// the same window. They are of [Tumbling] or [TumblingDays].
	Windows Windows
	// AllowedLateness is how much longer records are kept for those that come late.
	AllowedLateness time.Duration
	// Left and Right say how the records are kept. What a record is, is fixed by its
	// bytes when it comes.
	Left  Codec[L]
	Right Codec[R]
	// Version of these bytes, 0 and up. Raise it when their meaning changes: records
	// of another version are not read, and the task does not start with them.
	Version int
	// Join makes the result of a pair. ok is false where the two do not belong
	// together after all: nothing is emitted, and neither has met the other. With a
	// [LeftJoin] or an [OuterJoin] it makes that of a record which has met none, too:
	// the other one is nil then. What the pointers lead to must not be changed.
	// Required.
	Join func(m *Meta, left *L, right *R) (result U, ok bool, err error)
}

// Join brings together the records of two streams that have the same key and times
// that are close. Both streams are keyed, and of one stage.
//
// A pair is emitted at once, when the second of the two comes: with those that are
// kept, in the order of their times, and of one time in that of their coming. So the
// order of the results of a key depends on the order in which the records come; which
// results there are does not, as long as no record is late. The time of a pair is the
// later one of the two; its position, which is what [Meta] has besides, is that of
// the left record.
//
// A record is kept as long as another that is not late may meet it: a left one of time
// t until the watermark of the task is behind t + After + AllowedLateness, a right one
// until it is behind t + Before + AllowedLateness. One that is then to be emitted
// because it met none is emitted at that moment, once, with its own time and position.
// With windows both are kept until the watermark reaches the end of the window, and
// the lateness. At the end of the input, a drain with [Finish], none is kept any more but
// what has no bound: what has met none is emitted, with [PaneFinal].
//
// A record that comes when it would not be kept any more is late: it goes to the
// stream of the late ones of its side, or fails with [ErrLate] if no step follows
// that. One that comes after the watermark, but before that, meets those that are
// still there; later than AllowedLateness these may not be all.
//
// A pair whose function fails is lost: the record that came is a dead letter, the two
// have met each other, and both stay for others. Meta.Raw of a result has the bytes
// that were kept.
//
// id is the identity of the state. Other bounds hold for what is kept, too; records
// that an inner join has kept are not emitted as such that met none by another kind.
func Join[L, R, U any](left Stream[L], right Stream[R], id string, cfg JoinConfig[L, R, U], opts ...StepOption) (results Stream[U], lateLeft Stream[L], lateRight Stream[R]) {
	opts = append([]StepOption{func(info *StepInfo) { info.Windows = cfg.describe() }}, opts...)
	step := stateful(left, "join", id, cfg.Version, opts)
	delay := max(left.delay, right.delay) + cfg.AllowedLateness
	results, lateLeft, lateRight = then[L, U](left), then[L, L](left), then[R, R](right)
	// Their times go back, and their positions are of several sources.
	results.source, results.delay = 0, cfg.resultsDelay(delay)
	checkInputs(step, left, right)
	left.b.need(step, "function Join", cfg.Join != nil)
	left.b.need(step, "codec with Encode and Decode for the left records", cfg.Left.usable())
	left.b.need(step, "codec with Encode and Decode for the right records", cfg.Right.usable())
	if err := cfg.validate(); err != nil {
		left.b.errorf("step %q: %w", id, err)
	}
	if cfg.Windows != (Windows{}) || cfg.Before != Forever || cfg.After != Forever {
		left.b.waits(left.stage)
	}
	node := new(joinNode)
	bind := func(in *instance) *joined[L, R, U] {
		if op, ok := in.memo[node]; ok {
			return op.(*joined[L, R, U])
		}
		op := &joined[L, R, U]{in: in, step: step, cfg: cfg, out: results.hub.bind(in), span: cfg.span(delay)}
		in.memo[node] = op
		if len(lateLeft.hub.outs) > 0 {
			op.lateLeft = lateLeft.hub.bind(in)
		}
		if len(lateRight.hub.outs) > 0 {
			op.lateRight = lateRight.hub.bind(in)
		}
		op.kept = newKept(in.task, in.f.stepID(step), cfg.Version, []joinSide{sideLeft, sideRight}, op.check)
		op.kept.due = op.due
		in.task.timers = append(in.task.timers, op)
		return op
	}
	left.hub.subscribe(func(in *instance) emit[L] { return bind(in).addLeft })
	right.hub.subscribe(func(in *instance) emit[R] { return bind(in).addRight })
	return results, lateLeft, lateRight
}

// joinNode is the identity of a join in the memo of an instance, where both of its
// inputs find it.
type joinNode struct{ _ byte }

// checkInputs reports streams that cannot be joined.
func checkInputs[L, R any](step int, left Stream[L], right Stream[R]) {
	b := left.b
	id := b.steps[step].ID
	switch {
	case right.b != b:
		b.errorf("step %q: the streams belong to different flows", id)
	case right.spread:
		b.errorf("step %q: the second stream was redistributed: records with the same key meet, put a Rekey before it", id)
	case !right.keyed:
		b.errorf("step %q: the second stream has no key: records with the same key meet, put a KeyBy before it", id)
	case left.keyed && left.stage != right.stage:
		b.errorf("step %q: a stream of stage %d with one of stage %d: change the key of the first by Rekey, so that both are of one stage", id, min(left.stage, right.stage), max(left.stage, right.stage))
	}
}

// usable reports whether the codec has both its functions.
func (c Codec[T]) usable() bool { return c.Encode != nil && c.Decode != nil }

func (cfg *JoinConfig[L, R, U]) validate() error {
	bad := func(d time.Duration) bool { return d < 0 || d > maxWindow }
	w := cfg.Windows
	const days = int(maxWindow / day)
	switch {
	case cfg.Kind < InnerJoin || cfg.Kind > OuterJoin:
		return fmt.Errorf("there is no JoinKind %d", cfg.Kind)
	case bad(cfg.AllowedLateness):
		return fmt.Errorf("an allowed lateness is not negative and at most %d days", days)
	case w == (Windows{}):
		if cfg.Before != Forever && bad(cfg.Before) || cfg.After != Forever && bad(cfg.After) {
			return fmt.Errorf("the bounds Before and After are not negative, and at most %d days or Forever", days)
		}
		if cfg.After == Forever && cfg.Kind != InnerJoin {
			return fmt.Errorf("with After Forever it is never known that a left record met none: a %v join needs a bound", cfg.Kind)
		}
		if cfg.Before == Forever && cfg.Kind == OuterJoin {
			return errors.New("with Before Forever it is never known that a right record met none: an outer join needs a bound")
		}
		return nil
	case cfg.Before != 0 || cfg.After != 0:
		return errors.New("a join has Windows, or Before and After, not both")
	case w.kind() != kindFixed || w.Size != w.Every || w.Days != w.EveryDays:
		return errors.New("the windows of a join are tumbling")
	case w.AllowedLateness != 0 || w.Emit != EmitClose:
		return errors.New("the windows of a join have no AllowedLateness and no Emit of their own: the lateness is that of the join")
	}
	return w.Validate()
}

// describe says all that is data of the join: it goes into [Flow.Hash].
func (cfg *JoinConfig[L, R, U]) describe() string {
	s := "join " + cfg.Kind.String()
	if cfg.Windows != (Windows{}) {
		s += " in windows " + cfg.Windows.String()
	} else {
		s += " before " + boundText(cfg.Before) + " after " + boundText(cfg.After)
	}
	if cfg.AllowedLateness != 0 {
		s += fmt.Sprintf(" allowed lateness %v", cfg.AllowedLateness)
	}
	return s
}

func boundText(d time.Duration) string {
	if d == Forever {
		return "forever"
	}
	return d.String()
}

// resultsDelay is how far results may be behind the watermark: a record that met none
// is emitted when it goes.
func (cfg *JoinConfig[L, R, U]) resultsDelay(delay time.Duration) time.Duration {
	var waits time.Duration
	switch {
	case cfg.Kind == InnerJoin:
	case cfg.Windows.Days > 0:
		// With an hour for the change of the clocks.
		waits = time.Duration(cfg.Windows.Days)*day + time.Hour
	case cfg.Windows != (Windows{}):
		waits = cfg.Windows.Size
	case cfg.Kind == LeftJoin:
		waits = cfg.After
	default:
		waits = max(cfg.After, cfg.Before)
	}
	return min(delay+min(waits, maxWindow), 4*maxWindow)
}

// joinSpan says which records meet and how long they are kept.
type joinSpan struct {
	// before and after are those of the config, the highest number for ever.
	before, after int64
	// windows is nil if there are none.
	windows *assigner
	// delay is how far behind the watermark a record may be.
	delay int64
}

func (cfg *JoinConfig[L, R, U]) span(delay time.Duration) joinSpan {
	s := joinSpan{before: int64(cfg.Before), after: int64(cfg.After), delay: int64(delay)}
	if cfg.Windows != (Windows{}) {
		s.windows = newAssigner(cfg.Windows)
	}
	return s
}

// partners returns the first and the last time of the records of the other side that
// one meets.
func (s *joinSpan) partners(side joinSide, at int64) (first, last int64) {
	if s.windows != nil {
		w := s.windows.assign(at)[0]
		return w.start, w.end - 1
	}
	before, after := s.before, s.after
	if side == sideRight {
		before, after = after, before
	}
	first, last = noTime, math.MaxInt64
	if before < math.MaxInt64 {
		first = at - before
	}
	if after < math.MaxInt64 {
		last = at + after
	}
	return first, last
}

// due returns the watermark at which a record goes; the highest number for never.
func (s *joinSpan) due(side joinSide, at int64) int64 {
	_, last := s.partners(side, at)
	if last > math.MaxInt64-1-s.delay {
		return noDue
	}
	return last + 1 + s.delay
}

// joined is a join in one task.
type joined[L, R, U any] struct {
	in        *instance
	step      int
	cfg       JoinConfig[L, R, U]
	span      joinSpan
	kept      *keptRecords
	out       emit[U]
	lateLeft  emit[L]
	lateRight emit[R]
	// left and right are the record at hand, pair is what is known of a pair.
	left  L
	right R
	pair  Meta
	// failed and pairs count those of the record at hand, err is the first failure.
	failed, pairs int
	err           error
	scratch       []byte
}

// waitsFor tells whether those of a side that met none are wanted.
func (op *joined[L, R, U]) waitsFor(side joinSide) bool {
	return op.cfg.Kind == OuterJoin || op.cfg.Kind == LeftJoin && side == sideLeft
}

// check looks at the bytes of a loaded record.
func (op *joined[L, R, U]) check(side joinSide, m *Meta, data []byte) (err error) {
	if side == sideLeft {
		_, err = op.cfg.Left.Decode(m, data)
	} else {
		_, err = op.cfg.Right.Decode(m, data)
	}
	return err
}

// keep keeps the record at hand.
func (op *joined[L, R, U]) keep(m *Meta, side joinSide) (*keptKey, *keptCell) {
	flags := byte(keptMatched)
	if op.waitsFor(side) {
		flags = 0
	}
	op.failed, op.pairs, op.err = 0, 0, nil
	return op.kept.add(m, side, flags, op.scratch)
}

func (op *joined[L, R, U]) addLeft(m *Meta, v L) {
	op.in.step = op.step
	if due := op.span.due(sideLeft, m.at); m.ahead || op.in.task.closed(op.step, due) {
		tooLate(op.in, op.step, m, v, op.lateLeft, due)
		return
	}
	var err error
	if op.scratch, err = op.cfg.Left.Encode(op.scratch[:0], m, v); err != nil {
		op.in.fail(op.step, m, err)
		return
	}
	of, c := op.keep(m, sideLeft)
	first, last := op.span.partners(sideLeft, m.at)
	partners := of.lists[1][of.from(sideRight, first):of.behind(sideRight, last)]
	if len(partners) == 0 {
		return
	}
	op.came(m, c)
	if op.left, err = op.cfg.Left.Decode(&op.pair, c.state.data); err != nil {
		op.in.fail(op.step, m, fmt.Errorf("decode what was kept: %w", err))
		return
	}
	for _, partner := range partners {
		op.meet(m, c, partner, true)
	}
	op.done(m)
}

func (op *joined[L, R, U]) addRight(m *Meta, v R) {
	op.in.step = op.step
	if due := op.span.due(sideRight, m.at); m.ahead || op.in.task.closed(op.step, due) {
		tooLate(op.in, op.step, m, v, op.lateRight, due)
		return
	}
	var err error
	if op.scratch, err = op.cfg.Right.Encode(op.scratch[:0], m, v); err != nil {
		op.in.fail(op.step, m, err)
		return
	}
	of, c := op.keep(m, sideRight)
	first, last := op.span.partners(sideRight, m.at)
	partners := of.lists[0][of.from(sideLeft, first):of.behind(sideLeft, last)]
	if len(partners) == 0 {
		return
	}
	op.came(m, c)
	if op.right, err = op.cfg.Right.Decode(&op.pair, c.state.data); err != nil {
		op.in.fail(op.step, m, fmt.Errorf("decode what was kept: %w", err))
		return
	}
	for _, partner := range partners {
		op.meet(m, partner, c, false)
	}
	op.done(m)
}

// came makes the Meta of the record at hand as others find it later. Its value is decoded
// of what is kept, so that a pair is the same whichever of the two comes first.
func (op *joined[L, R, U]) came(m *Meta, c *keptCell) {
	op.pair = Meta{Key: m.Key, mark: m.mark, frame: m.frame}
	c.state.meta(&op.pair)
}

// meet emits a pair. One of the two is the record at hand.
func (op *joined[L, R, U]) meet(m *Meta, left, right *keptCell, leftCame bool) {
	op.pairs++
	u, ok, err := op.joinGuarded(m, left, right, leftCame)
	op.in.step = op.step
	if err != nil {
		if op.in.f.opts.OnError == Stop {
			op.in.fail(op.step, m, err)
		}
		if op.failed++; op.err == nil {
			op.err = err
		}
	}
	if !ok && err == nil {
		return
	}
	// Before the result goes on, which may panic.
	op.kept.matched(left)
	op.kept.matched(right)
	if err == nil {
		op.out(&op.pair, u)
		op.in.step = op.step
	}
}

// join makes the result of a pair.
func (op *joined[L, R, U]) join(m *Meta, left, right *keptCell, leftCame bool) (u U, ok bool, err error) {
	l, r := &op.left, &op.right
	op.pair = Meta{Key: m.Key, mark: m.mark, frame: m.frame}
	if leftCame {
		right.state.meta(&op.pair)
		r, err = keptValue(&right.state, &op.pair, op.cfg.Right)
	}
	left.state.meta(&op.pair)
	if !leftCame {
		l, err = keptValue(&left.state, &op.pair, op.cfg.Left)
	}
	if err != nil {
		return u, false, err
	}
	op.pair.at = max(left.state.at, right.state.at)
	return op.cfg.Join(&op.pair, l, r)
}

// joinGuarded makes an error of a panic: it costs the pair, not the others of the
// record.
func (op *joined[L, R, U]) joinGuarded(m *Meta, left, right *keptCell, leftCame bool) (u U, ok bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			ok, err = false, panicError(p)
		}
	}()
	return op.join(m, left, right, leftCame)
}

// done ends the record at hand, of which pairs may have failed.
func (op *joined[L, R, U]) done(m *Meta) {
	var noLeft L
	var noRight R
	op.left, op.right = noLeft, noRight
	err := op.err
	if err == nil {
		return
	}
	op.err = nil
	if op.pairs > 1 {
		err = fmt.Errorf("%d of its %d pairs failed, this is the first: %w", op.failed, op.pairs, err)
	}
	op.in.fail(op.step, m, err)
}

// tooLate ends a record that would not be kept any more, since a watermark, or that is too
// far ahead.
func tooLate[T any](in *instance, step int, m *Meta, v T, late emit[T], since int64) {
	in.task.late++
	if late != nil {
		late(m, v)
		return
	}
	if m.ahead {
		in.fail(step, m, m.tooFarAhead())
		return
	}
	in.fail(step, m, fmt.Errorf("%w: its time is %s, it would have been kept until the watermark %s, the watermark is %s",
		ErrLate, stamp(m.at), stamp(since), stamp(in.task.now)))
}

// due returns when the first record of a key goes.
func (op *joined[L, R, U]) due(of *keptKey) int64 {
	left, right := op.firstDue(of)
	return min(left, right)
}

func (op *joined[L, R, U]) firstDue(of *keptKey) (left, right int64) {
	left, right = noDue, noDue
	if l := of.lists[0]; len(l) > 0 {
		left = op.span.due(sideLeft, l[0].state.at)
	}
	if r := of.lists[1]; len(r) > 0 {
		right = op.span.due(sideRight, r[0].state.at)
	}
	return left, right
}

// index, next and fire are those of a timedStep.
func (op *joined[L, R, U]) index() int  { return op.step }
func (op *joined[L, R, U]) next() int64 { return op.kept.next() }

// fire lets the record go whose time has come; next has been called.
func (op *joined[L, R, U]) fire() {
	of := op.kept.pop()
	side := sideLeft
	if left, right := op.firstDue(of); right < left {
		side = sideRight
	}
	rec := of.lists[side.list()][0].state
	// The record is gone before its result is made, which may panic.
	op.kept.removeFirst(of, side)
	if rec.flags&keptMatched != 0 || !op.waitsFor(side) {
		return
	}
	m := op.in.task.goes(of.key, &rec)
	op.in.step = op.step
	u, ok, err := op.alone(m, &rec)
	switch {
	case err != nil:
		op.in.fail(op.step, m, err)
	case ok:
		if op.in.task.finishing {
			op.in.task.made()
		}
		op.out(m, u)
	}
}

// alone makes the result of a record that met none.
func (op *joined[L, R, U]) alone(m *Meta, rec *keptRecord) (u U, ok bool, err error) {
	var l *L
	var r *R
	if rec.side == sideLeft {
		l, err = keptValue(rec, m, op.cfg.Left)
	} else {
		r, err = keptValue(rec, m, op.cfg.Right)
	}
	if err != nil {
		return u, false, err
	}
	return op.cfg.Join(m, l, r)
}
