package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"natsflow/flow"
	"natsflow/kvsnap"
)

// Bounds of a lane.
const (
	// laneQueue is how many inputs wait for a lane at the most.
	laneQueue = 4
	// sealBytes is the size of an outbox at which a busy lane commits a task
	// before its interval is over.
	sealBytes = 384 << 10
	// imageKeys is how many keys of a base are encoded between two batches.
	imageKeys = 1024
	// baseRetry is how long a task goes on without a base for which there was no
	// room.
	baseRetry = 10 * time.Second
	// idleCheck is how often a lane looks for positions that moved without a
	// commit.
	idleCheck = time.Second
)

// chunk is what a reader gives to a lane at once: the batches of the lane's
// tasks, and how far the source has been read.
type chunk struct {
	source  int
	through uint64
	batches []*flow.Batch
	// highest time of the records up to through, and the watermark there.
	highest, mark int64
	// stream is the time of the source there, ticks how both have moved; see
	// flow.Ticks.
	stream int64
	ticks  flow.Ticks
}

// laneInput is a chunk, or a change of what the lane has to do. All that came
// before it has been processed when the lane takes it.
type laneInput struct {
	chunk chunk
	adopt *adoption
	end   *ending
}

// adoption gives tasks to a lane. Nothing is being read meanwhile.
type adoption struct {
	tasks []*task
	// positions of the sources, by index, behind which reading goes on. They may
	// be before what the lane's other tasks have processed.
	positions []uint64
	// highest times of the sources up to there.
	highest []int64
}

// ending takes tasks from a lane, which commits and releases them. Nothing more
// comes for them.
type ending struct {
	tasks []*task
	// drain that they end in, nil when they are given away.
	drain *flow.Drain
	// positions of the sources, by index: the cut of a drain.
	positions []uint64
}

// task is a partition's task with its log.
type task struct {
	id   kvsnap.TaskID
	flow *flow.Task
	log  *kvsnap.Log
	jobs chan job
	// head is what the log says, as of the last commit that was handed over.
	head kvsnap.Head
	// floor holds, by source, positions up to which records are part of the state
	// though the lane has not come so far: it may have gone back for another task.
	floor []uint64
	// highest are the highest times of the records up to floor.
	highest []int64
	// fences are the last sequences of the task's fence subject in each target.
	fences []uint64
	// inFlight: a job is on its way; the next has to wait.
	inFlight bool
	// dirtySince is when the first change after the last seal was made.
	dirtySince time.Time
	// lastCommit is when the last job was handed over.
	lastCommit time.Time
	// toldAt is when the next stage was told the watermark.
	toldAt time.Time
	// confirmed are the positions of the last entry whose results are all
	// published.
	confirmed []uint64
	// unconfirmed: the last entry had results, and no entry says yet that they
	// have been published.
	unconfirmed bool
	// base is a base under way, complete when all its parts are taken. It may
	// then hold changes that no entry has yet: baseUncovered says that a commit
	// has to come before it.
	base          *kvsnap.Base
	baseComplete  bool
	baseUncovered bool
	// baseHanded: the committer has it.
	baseHanded bool
	// baseUnhook keeps the end of the session from giving the base up.
	baseUnhook func() bool
	// baseAfter is when the next base may be begun, after one was refused.
	baseAfter time.Time
	// end says that the task is to be committed and released, drained that it has done
	// what a drain wants at its end, ended that its last job was handed over.
	end     *ending
	drained bool
	ended   bool
	// last are the positions at which it ends, lastHighest the highest times up to
	// there.
	last        []uint64
	lastHighest []int64
	// keys is the number of keys with state, stateBytes what they take in the bucket,
	// as they were measured last.
	keys       int
	stateBytes uint64
	// seen are the positions up to which the readers have passed it records. They
	// are the conductor's.
	seen []uint64
}

// lane runs the tasks of some partitions.
type lane struct {
	s     *session
	index int
	in    chan laneInput
	done  chan result
	tasks []*task
	byID  map[kvsnap.TaskID]*task
	// kept are the tasks that left with results that a sink refuses.
	kept map[kvsnap.TaskID]bool
	// pos is how far the lane has processed each input, highest the highest times
	// up to there.
	pos     []uint64
	highest []int64
	// due is when one of the tasks of the first stage has something to do, by either
	// clock, dueBehind that for later stages.
	due, dueBehind [clockKinds]atomic.Int64
}

// run processes what comes until ctx ends.
func (l *lane) run(ctx context.Context) error {
	commit := time.NewTicker(l.s.interval)
	defer commit.Stop()
	idle := time.NewTicker(idleCheck)
	defer idle.Stop()
	for {
		in := l.in
		if l.congested() {
			in = nil
		}
		if l.imaging() {
			// A base is under way: take a part of it, then look for work without
			// waiting for it.
			if err := l.takeImages(); err != nil {
				return err
			}
			select {
			case msg := <-in:
				if err := l.take(ctx, msg); err != nil {
					return err
				}
			case r := <-l.done:
				l.jobDone(r)
			case <-ctx.Done():
				return context.Cause(ctx)
			default:
			}
		} else {
			select {
			case msg := <-in:
				if err := l.take(ctx, msg); err != nil {
					return err
				}
			case r := <-l.done:
				l.jobDone(r)
			case <-commit.C:
			case <-idle.C:
				if err := l.commitIdle(); err != nil {
					return err
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if err := l.sealDue(); err != nil {
			return err
		}
	}
}

// congested reports whether a task has so much waiting for its commit that the
// lane must not take more.
func (l *lane) congested() bool {
	for _, t := range l.tasks {
		if t.inFlight && !t.ended && t.flow.Pending() > l.s.cfg.MaxPending {
			return true
		}
	}
	return false
}

func (l *lane) take(ctx context.Context, msg laneInput) error {
	switch {
	case msg.adopt != nil:
		l.adopt(msg.adopt)
		return nil
	case msg.end != nil:
		l.begin(msg.end)
		return nil
	}
	stage := l.s.inputs[msg.chunk.source].stage
	for _, b := range msg.chunk.batches {
		id := kvsnap.TaskID{Stage: stage, Partition: b.Partition}
		t := l.byID[id]
		if t == nil && l.kept[id] {
			b.Release() // it is read again by whoever publishes what was kept
			continue
		}
		if !t.flow.Dirty() {
			t.dirtySince = time.Now()
		}
		err := t.flow.Play(b)
		b.Release()
		if errors.Is(err, flow.ErrLostFrames) {
			err = fmt.Errorf("%w: stream %s: %w; start with --accept-gap to go on without them", ErrGap, l.s.exchange.name, err)
		}
		if err != nil {
			return err
		}
		if err := l.s.cfg.reached(ctx, "processed", t.id.String()); err != nil {
			return err
		}
	}
	l.pos[msg.chunk.source] = max(l.pos[msg.chunk.source], msg.chunk.through)
	return l.advance(msg.chunk)
}

// adopt takes tasks over, and goes back for them to where they are. What the
// lane's other tasks have processed since then is part of their state.
func (l *lane) adopt(a *adoption) {
	for _, t := range l.tasks {
		t.floor, t.highest = l.positions(t), l.highestOf(t)
	}
	copy(l.pos, a.positions)
	copy(l.highest, a.highest)
	for _, t := range a.tasks {
		l.tasks = append(l.tasks, t)
		l.byID[t.id] = t
	}
	l.showDue()
	l.s.progress(l)
}

// begin begins to end tasks.
func (l *lane) begin(e *ending) {
	for i, p := range e.positions {
		l.pos[i] = max(l.pos[i], p)
	}
	for _, t := range e.tasks {
		// From here on the lane goes on without it, while a commit may be in flight.
		t.last, t.lastHighest = l.positions(t), l.highestOf(t)
		t.end = e
		if !t.baseHanded {
			t.dropBase()
		}
	}
}

// drop forgets a task that was released.
func (l *lane) drop(t *task) {
	l.tasks = slices.DeleteFunc(l.tasks, func(o *task) bool { return o == t })
	delete(l.byID, t.id)
}

// sealDue seals the tasks that should commit now: all that have changed when the
// lane has nothing else to do, those that waited long or hold much otherwise.
func (l *lane) sealDue() error {
	idle := len(l.in) == 0
	for _, t := range l.tasks {
		if t.inFlight || t.ended {
			continue
		}
		dirty := t.flow.Dirty()
		switch {
		case t.end != nil:
			if err := l.sealLast(t); err != nil {
				return err
			}
		case t.baseComplete && !t.baseUncovered && !t.baseHanded:
			l.hand(t, job{base: t.base, head: t.head})
			t.baseHanded = true
		case dirty && (idle || time.Since(t.dirtySince) >= l.s.interval || t.flow.Pending() >= sealBytes),
			t.baseUncovered && t.flow.Unsealed(), l.tellNow(t):
			if err := l.seal(t, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// sealLast hands over what a task still has to commit, which at the end of a drain may
// be several commits, then its release.
func (l *lane) sealLast(t *task) error {
	d := t.end.drain
	if d != nil && !t.drained {
		more, err := t.flow.Drain(*d, min(sealBytes, l.s.cfg.MaxPending))
		if err != nil {
			return fmt.Errorf("task %v, at the end of the drain: %w", t.id, err)
		}
		t.drained = !more
		if more {
			if err := l.seal(t, true); err != nil {
				return err
			}
			return l.s.cfg.reached(l.s.ctx, "drained-in-part", t.id.String())
		}
	}
	if t.flow.Unsealed() {
		return l.seal(t, true)
	}
	t.ended = true
	h := l.nextHead(t, flow.Sealed{})
	h.Epoch, h.Final = max(h.Epoch, t.end.epoch()), d != nil
	l.hand(t, job{release: true, head: h, positions: l.positions(t)})
	return nil
}

// epoch of the drain, 0 without one.
func (e *ending) epoch() uint64 {
	if e.drain == nil {
		return 0
	}
	return e.drain.Epoch
}

// seal takes what has changed and hands it to the committer.
func (l *lane) seal(t *task, last bool) error {
	t.flow.TellLater(!last && !l.tellNow(t))
	untold := t.flow.Untold()
	sealed, err := t.flow.Seal()
	if err != nil {
		return fmt.Errorf("task %v: %w", t.id, err)
	}
	if sealed.Repeats > 0 {
		l.s.log.Warn("frames of the exchange came again and were dropped", "task", t.id, "frames", sealed.Repeats)
		if err := l.s.cfg.reached(l.s.ctx, "frames-repeated", t.id.String()); err != nil {
			return err
		}
	}
	if untold && !t.flow.Untold() {
		t.toldAt = time.Now()
	}
	h := l.nextHead(t, sealed)
	if last {
		h.Epoch = max(h.Epoch, t.end.epoch())
	}
	l.hand(t, job{sealed: sealed, head: h, positions: l.positions(t)})
	t.unconfirmed = sealed.Outputs > 0
	t.baseUncovered = false
	return nil
}

func (l *lane) hand(t *task, j job) {
	t.inFlight = true
	t.head = j.head
	t.lastCommit = time.Now()
	t.jobs <- j
}

// positions returns how far the task has processed each input; what is there for the
// inputs of other stages means nothing.
func (l *lane) positions(t *task) []uint64 {
	if t.end != nil {
		return slices.Clone(t.last)
	}
	p := make([]uint64, len(l.pos))
	for i := range p {
		p[i] = max(l.pos[i], t.floor[i])
	}
	return p
}

// nextHead is the head of the task's next entry. The committer adds what has
// been published.
func (l *lane) nextHead(t *task, sealed flow.Sealed) kvsnap.Head {
	h := t.head
	h.Offsets = maps.Clone(h.Offsets)
	if h.Offsets == nil {
		h.Offsets = map[string]uint64{}
	}
	for i, p := range l.positions(t) {
		if in := &l.s.inputs[i]; in.stage == t.id.Stage {
			h.Offsets[in.stream] = p
		}
	}
	l.putClocks(t, &h)
	h.Epoch, h.Final = l.s.epoch.Load(), false
	h.Records += uint64(sealed.Records)
	h.Results += uint64(results(sealed))
	h.DeadLetters += uint64(sealed.DeadLetters)
	h.Late += uint64(sealed.Late)
	return h
}

// jobDone takes back a task whose job is done.
func (l *lane) jobDone(r result) {
	t := r.task
	if r.kept {
		// Its committer has gone and nothing can be handed to it any more. It
		// stays in flight: what it has in hand is not published.
		t.ended = true
		l.kept[t.id] = true
		l.drop(t)
		l.s.released <- t
		return
	}
	t.inFlight = false
	l.s.measure(t)
	if r.positions != nil {
		t.confirmed = r.positions
	}
	if t.baseHanded {
		t.dropBase()
		if r.refused {
			t.baseAfter = time.Now().Add(baseRetry)
		}
	}
	if r.released {
		l.drop(t)
		l.s.released <- t
	}
	l.s.progress(l)
	if t.end == nil && t.base == nil && !time.Now().Before(t.baseAfter) && t.log.BaseDue() {
		// No append is on its way, so that every change so far is in the log and
		// every later one will be in an entry after it.
		t.base = t.log.BeginBase()
		// Its upload waits for a server that is away, and the lane for the upload.
		t.baseUnhook = context.AfterFunc(l.s.ctx, t.base.Abort)
		t.flow.BeginImage()
	}
}

// dropBase forgets the base, and gives it up if it is not finished.
func (t *task) dropBase() {
	if t.base == nil {
		return
	}
	t.baseUnhook()
	t.base.Abort()
	t.base, t.baseComplete, t.baseUncovered, t.baseHanded = nil, false, false, false
}

func (l *lane) imaging() bool {
	for _, t := range l.tasks {
		if t.base != nil && !t.baseComplete {
			return true
		}
	}
	return false
}

// takeImages encodes one part of the base of each task that has one under way.
// The parts may hold values newer than the entry that the base starts from; the
// base is appended only when every change that it may hold is in the log, so
// that the deltas after it lead to the same state.
func (l *lane) takeImages() error {
	for _, t := range l.tasks {
		if t.base == nil || t.baseComplete {
			continue
		}
		part, more, err := t.flow.NextImage(imageKeys)
		if err != nil {
			return fmt.Errorf("task %v: %w", t.id, err)
		}
		if len(part) > 0 {
			t.base.Add(part)
		}
		t.baseComplete, t.baseUncovered = !more, !more && t.flow.Unsealed()
	}
	return nil
}

// commitIdle records positions that moved without a change of state, and that
// the results of the last entry have been published, so that a restart has
// little to read again and to look for.
func (l *lane) commitIdle() error {
	for _, t := range l.tasks {
		if t.inFlight || t.ended || t.flow.Dirty() || time.Since(t.lastCommit) < l.s.cfg.idleCommit {
			continue
		}
		moved := false
		for i, p := range l.positions(t) {
			in := &l.s.inputs[i]
			moved = moved || in.stage == t.id.Stage && p > t.head.Offsets[in.stream]
		}
		switch {
		case !moved && !t.unconfirmed:
		case t.flow.Unsealed():
			// Watermarks that came by the exchange go with the positions behind them.
			if err := l.seal(t, false); err != nil {
				return err
			}
		default:
			t.unconfirmed = false
			l.hand(t, job{head: l.nextHead(t, flow.Sealed{}), positions: l.positions(t)})
		}
	}
	return nil
}

// lowest returns, for an input, a position that every task of the lane which reads it
// has committed and published, counting a task that had nothing to commit; the
// highest number if the lane has no such tasks.
func (l *lane) lowest(source int) uint64 {
	low, some := l.pos[source], false
	for _, t := range l.tasks {
		if t.id.Stage != l.s.inputs[source].stage {
			continue
		}
		some = true
		if t.inFlight || t.flow.Dirty() {
			low = min(low, t.confirmed[source])
		}
	}
	if !some {
		return math.MaxUint64
	}
	return low
}
