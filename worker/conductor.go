package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// Waits between two looks at what others have to do first.
const (
	// waitTask is for a task that its former owner has not released yet,
	// maxWaitTask the longest one.
	waitTask, maxWaitTask = 10 * time.Millisecond, 250 * time.Millisecond
	// waitDrain is for the other workers in a drain.
	waitDrain = 50 * time.Millisecond
	// yieldTimeout bounds what a leaving worker spends on telling the others.
	yieldTimeout = time.Second
)

// errIdle ends a session that has no tasks any more.
var errIdle = errors.New("no tasks")

// conductor is the goroutine that decides what a session does: which tasks it
// has, whether it reads, and where it stops.
type conductor struct {
	w      *worker
	s      *session
	member *control.Member

	// held are the tasks that the lanes have. Those in ending are on their way out.
	held, ending map[string]*task
	// opening is where the tasks come that are being loaded, nil if none are;
	// stopOpening gives up.
	opening     chan opened
	stopOpening context.CancelFunc
	// acquireIn is the wait before the next try to get a task, acquireAt its end.
	acquireIn time.Duration
	acquireAt time.Time
	// reading: the readers have been started and not halted since.
	reading bool

	// limits, if there are any, hold the last sequences to read: the session ends
	// there, and does not read any other source.
	limits map[string]uint64

	drain drain
	// resumed: it was said that the flow goes on behind an end of its input.
	resumed bool
}

// opened are tasks that have been loaded.
type opened struct {
	names []string
	tasks []*task
	err   error
}

func newConductor(w *worker, s *session, member *control.Member, limits map[string]uint64) *conductor {
	return &conductor{
		w: w, s: s, member: member, limits: limits, acquireIn: waitTask,
		held: map[string]*task{}, ending: map[string]*task{},
	}
}

// run returns nil when the worker left, came to its limits, or the flow was
// drained; errIdle when it has no tasks any more.
func (c *conductor) run(ctx context.Context) error {
	defer c.giveUpOpening()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		rec, changed := c.w.records.get()
		if err := c.w.records.failure(); err != nil {
			return err
		}
		wanted, moved := c.member.Wanted()
		if done, err := c.step(rec, wanted); done || err != nil {
			return err
		}
		c.setTimer(timer)
		select {
		case <-ctx.Done():
			return c.leave()
		case <-c.s.ctx.Done():
			return context.Cause(c.s.ctx)
		case <-changed:
		case <-moved:
			c.acquireIn, c.acquireAt = waitTask, time.Time{}
		case <-c.s.woken:
		case <-timer.C:
		case t := <-c.s.released:
			if err := c.handOver(t); err != nil {
				return err
			}
		case o := <-c.opening:
			if err := c.adopt(o); err != nil {
				return err
			}
		}
	}
}

// setTimer sets it to the first thing that is to be tried again.
func (c *conductor) setTimer(timer *time.Timer) {
	next := time.Time{}
	for _, at := range []time.Time{c.acquireAt, c.drain.retryAt, c.drain.stageAt} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	timer.Stop()
	if !next.IsZero() {
		timer.Reset(max(0, time.Until(next)))
	}
}

// step does what can be done now. It reports done at the end of the session.
func (c *conductor) step(rec control.Record, wanted []string) (done bool, err error) {
	if err := c.s.halted(); err != nil {
		// Short of a limit or a cut.
		c.w.status.phase("leaving")
		return true, errors.Join(c.giveAll(), err)
	}
	if rec.State.Stopped() {
		return true, c.stopped(rec)
	}
	if len(c.limits) > 0 {
		if done, err := c.toLimits(); done || err != nil {
			return done, err
		}
	} else if done, err := c.follow(rec); done || err != nil {
		return done, err
	}
	// A drain that waits for its time does not keep the tasks where they are; one
	// that looks for its cut has spoken for them.
	if rec.State == control.StateRunning || rec.State == control.StateDraining && rec.Drain.Cut == nil && !c.drain.undecided {
		if err := c.drop(c.unwanted(wanted)); err != nil {
			return false, err
		}
	}
	if err := c.acquire(rec, wanted); err != nil {
		return false, err
	}
	if len(wanted) == 0 && len(c.held) == 0 && c.opening == nil && rec.State == control.StateRunning {
		return true, errIdle
	}
	if c.mayRead() {
		return false, c.read()
	}
	return false, nil
}

// stopped ends the session when the drain has been recorded. Whoever recorded it has seen
// the final entry of every task, so that a task that is still here is somebody
// else's by now.
func (c *conductor) stopped(rec control.Record) error {
	if len(c.held) > 0 {
		return errStopped
	}
	c.s.log.Info("drained", "epoch", rec.Epoch, "cut", control.FormatCut(cutOf(rec)))
	return nil
}

// mayRead reports whether there is something to read for, and no cut is being
// looked for.
func (c *conductor) mayRead() bool {
	return !c.reading && len(c.held) > len(c.ending) && !c.drain.undecided
}

// read starts the readers where they stand, those that have tasks.
func (c *conductor) read() error {
	for _, r := range c.s.readers {
		if !r.idle() && r.outdated() {
			at, _ := r.position()
			if err := r.seek(c.s.ctx, at); err != nil {
				return err
			}
		}
	}
	for _, r := range c.s.readers {
		if !r.idle() {
			r.start()
		}
	}
	c.reading = true
	return nil
}

// halt stops the readers where they are. All that they have read is with the
// lanes then.
func (c *conductor) halt() error {
	for _, r := range c.s.readers {
		r.halt()
	}
	c.reading = false
	if err := context.Cause(c.s.ctx); err != nil {
		return err
	}
	return nil
}

// unwanted are the tasks that the assignment gives to others.
func (c *conductor) unwanted(wanted []string) []string {
	if wanted == nil {
		return nil // not known yet
	}
	var names []string
	for name := range c.held {
		if c.ending[name] == nil && !slices.Contains(wanted, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// drop makes the lanes commit and release tasks, for which nothing is read any
// more from here on.
func (c *conductor) drop(names []string) error {
	if len(names) == 0 {
		return nil
	}
	c.s.log.Info("giving tasks away", "tasks", strings.Join(names, " "))
	if err := c.halt(); err != nil {
		return err
	}
	return c.end(names, nil, nil)
}

// end tells the lanes to commit and release tasks, for a drain or for others. The
// readers stand.
func (c *conductor) end(names []string, d *flow.Drain, positions []uint64) error {
	tasks := make([]*task, 0, len(names))
	if slices.Contains(names, c.w.taskNames[0]) {
		c.s.trimmer.Store(false)
	}
	for _, name := range names {
		t := c.held[name]
		c.ending[name] = t
		tasks = append(tasks, t)
		for _, r := range c.s.readers {
			if r.stage == t.id.Stage {
				r.disown(t.id.Partition)
			}
		}
	}
	return c.s.tell(tasks, func(own []*task) laneInput {
		return laneInput{end: &ending{tasks: own, drain: d, positions: positions}}
	})
}

// handOver lets the next owner have a task that was released here.
func (c *conductor) handOver(t *task) error {
	name := t.id.String()
	delete(c.held, name)
	delete(c.ending, name)
	c.s.gave(t)
	var final *control.Final
	if t.head.Final {
		final = &control.Final{
			Epoch: t.head.Epoch, Results: t.head.Results, DeadLetters: t.head.DeadLetters, Late: t.head.Late,
			Worker: c.s.cfg.Name, Time: time.Now().UTC(), AtEnd: t.flow.Drained(t.head.Epoch), Open: uint64(t.flow.OpenWindows()),
		}
	}
	if final != nil && c.s.exchange != nil {
		final.Exchange = c.s.exchange.seq.Load()
		c.drain.stageAt, c.drain.stageWait = time.Time{}, 0
	}
	if final != nil && c.drain.epoch == t.head.Epoch {
		c.s.done.Add(1)
	} else {
		c.s.owned.Add(-1)
	}
	if err := c.member.Release(c.s.ctx, name, final); err != nil {
		return fmt.Errorf("hand task %s over: %w", name, err)
	}
	return c.s.cfg.reached(c.s.ctx, "handed-over", name)
}

// acquire tries to get the tasks that the assignment gives to this worker, and
// loads those that it gets.
func (c *conductor) acquire(rec control.Record, wanted []string) error {
	if c.opening != nil {
		c.acquireAt = time.Time{} // when these have come
		return nil
	}
	if time.Now().Before(c.acquireAt) {
		return nil
	}
	c.acquireAt = time.Time{}
	var names []string
	for _, name := range wanted {
		if c.held[name] == nil {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		c.acquireIn = waitTask
		return nil
	}
	got, missing, err := c.take(rec, names)
	switch {
	case err != nil && !c.w.temporary(err):
		return err
	case err != nil || missing:
		c.acquireAt = time.Now().Add(c.acquireIn)
		c.acquireIn = min(2*c.acquireIn, maxWaitTask)
	}
	if len(got) == 0 {
		return nil
	}
	if err := c.s.cfg.reached(c.s.ctx, "acquired", ""); err != nil {
		return err
	}
	return c.open(got)
}

// take makes one try to get each of the tasks. missing reports that one is still
// another's.
func (c *conductor) take(rec control.Record, names []string) (got []string, missing bool, err error) {
	if rec.State == control.StateDraining {
		// What has its final entry is done.
		tasks, err := c.s.ctl.Tasks(c.s.ctx)
		if err != nil {
			return nil, true, err
		}
		names = slices.DeleteFunc(slices.Clone(names), func(name string) bool { return isFinal(tasks[name], rec.Epoch) })
	}
	held := make([]bool, len(names))
	err = each(c.s.ctx, len(names), 8, func(ctx context.Context, i int) (err error) {
		_, held[i], err = c.member.Acquire(ctx, names[i])
		return err
	})
	for i, name := range names {
		if held[i] {
			got = append(got, name)
		}
	}
	return got, len(got) < len(names), err
}

// isFinal reports that a task has its final entry of an epoch.
func isFinal(rec control.TaskRecord, epoch uint64) bool {
	return rec.Owner == "" && rec.Final != nil && rec.Final.Epoch == epoch
}

// open loads tasks beside what the session does.
func (c *conductor) open(names []string) error {
	ids := make([]kvsnap.TaskID, len(names))
	for i, name := range names {
		var err error
		if ids[i], err = kvsnap.ParseTaskID(name); err != nil {
			return fmt.Errorf("assignment: %w", err)
		}
	}
	ctx, cancel := context.WithCancel(c.s.ctx)
	// The channel has room, so that nobody has to wait for what is given up.
	result := make(chan opened, 1)
	c.opening, c.stopOpening = result, cancel
	c.s.wg.Go(func() {
		defer cancel()
		tasks, err := c.s.openTasks(ctx, ids)
		result <- opened{names: names, tasks: tasks, err: err}
	})
	return nil
}

// giveUpOpening stops the loading of tasks.
func (c *conductor) giveUpOpening() {
	if c.opening == nil {
		return
	}
	c.stopOpening()
	<-c.opening
	c.opening = nil
}

// adopt gives loaded tasks to the lanes, and makes the readers go back to where
// they are.
func (c *conductor) adopt(o opened) error {
	c.opening = nil
	if o.err != nil {
		return o.err
	}
	if err := c.halt(); err != nil {
		return err
	}
	positions, highest := make([]uint64, len(c.s.readers)), make([]int64, len(c.s.readers))
	for i, r := range c.s.readers {
		at, some := r.routed, false
		for _, t := range c.held {
			if t.id.Stage != r.stage {
				continue
			}
			t.seen[i] = max(t.seen[i], r.routed)
			if c.ending[t.id.String()] == nil {
				r.own(t.id.Partition, t.seen[i])
				some = true
			}
		}
		highest[i] = r.router.HighestTime()
		for _, t := range o.tasks {
			if t.id.Stage != r.stage {
				continue
			}
			if !some || t.floor[i] < at {
				// Its log knows the clock of the source there.
				at, highest[i], some = t.floor[i], t.highest[i], true
			}
			r.own(t.id.Partition, t.floor[i])
			r.reach(t.floor[i])
		}
		positions[i] = at
		if r.idle() {
			continue
		}
		if err := r.seek(c.s.ctx, at); err != nil {
			return err
		}
		r.restart(highest[i])
	}
	if slices.Contains(o.names, c.w.taskNames[0]) {
		c.s.trimmer.Store(true)
	}
	c.sayResumed(o.tasks)
	for k, name := range o.names {
		t := o.tasks[k]
		c.held[name] = t
		c.s.took(t)
		c.s.wg.Go(func() {
			if err := c.s.commitJobs(c.s.ctx, t, c.s.lanes[c.s.laneOf(t.id)].done); err != nil {
				c.s.cancel(err)
			}
		})
	}
	err := c.s.tell(o.tasks, func(own []*task) laneInput {
		return laneInput{adopt: &adoption{tasks: own, positions: positions, highest: highest}}
	})
	if err != nil {
		return err
	}
	if err := c.s.cfg.reached(c.s.ctx, "adopted", ""); err != nil {
		return err
	}
	// What is known of a drain may be another thing with these tasks.
	c.drain.told, c.drain.retryAt = false, time.Time{}
	c.drain.stageAt, c.drain.stageWait = time.Time{}, 0
	for _, r := range c.sourceReaders() {
		if c.drain.cut != nil && r.furthest() > c.drain.cut[r.stream] {
			c.drain.cut = nil // it cannot be kept: begin sees that
		}
	}
	if c.drain.epoch == 0 {
		c.w.status.phase("running")
	}
	c.s.log.Info("running", c.s.about(len(c.held))...)
	// A drain that the former owner of a task knew of must be known before a record
	// is read for it: a cut may count on it.
	rec, err := c.s.ctl.Record(c.s.ctx)
	if err != nil {
		return err
	}
	c.w.records.put(rec)
	return nil
}

// sayResumed says once that the flow goes on behind an end of its input: nobody is to wait
// for what was closed then.
func (c *conductor) sayResumed(tasks []*task) {
	rec, _ := c.w.records.get()
	if c.resumed || rec.Report == nil || rec.Report.Mode != control.ModeFinish {
		return
	}
	for _, t := range tasks {
		if t.head.Final && t.head.Epoch == rec.Report.Epoch {
			c.resumed = true
			c.s.log.Info("resumed after finish: what was closed stays closed, new records open new windows; aggregates go on with their state", "finished", rec.Report.Epoch)
			return
		}
	}
}

// leave commits, publishes and releases what was read, and lets the others have
// the tasks.
func (c *conductor) leave() error {
	c.w.status.phase("leaving")
	began := time.Now()
	// The others learn first what they will get, so that they are waiting for it.
	bounded, cancel := context.WithTimeout(c.s.ctx, yieldTimeout)
	if err := c.member.Yield(bounded); err != nil {
		c.s.log.Debug("the others find out by themselves", "err", err)
	}
	cancel()
	if err := c.giveAll(); err != nil {
		return c.s.cause(err)
	}
	if n := c.s.kept.Load(); n > 0 {
		c.s.log.Warn("left", "tasks", n, "err", errKept)
		return nil
	}
	c.s.log.Info("left; everything read is committed and published", "positions", control.FormatCut(c.s.positions()), "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// giveAll gives all tasks away.
func (c *conductor) giveAll() error {
	c.giveUpOpening()
	if err := c.halt(); err != nil {
		return err
	}
	if err := c.end(c.staying(), nil, nil); err != nil {
		return err
	}
	return c.awaitReleases()
}

// sourceReaders are the readers of the sources.
func (c *conductor) sourceReaders() []*reader { return c.s.readers[:len(c.s.sources)] }

// staying are the tasks that are not on their way out.
func (c *conductor) staying() []string { return c.stayingOf(-1) }

// stayingOf are those of a stage; of all for -1.
func (c *conductor) stayingOf(stage int) []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(c.held)) {
		if c.ending[name] == nil && (stage < 0 || stage == c.held[name].id.Stage) {
			names = append(names, name)
		}
	}
	return names
}

// awaitReleases waits until the lanes have released all tasks, and hands them
// over.
func (c *conductor) awaitReleases() error {
	for len(c.held) > 0 {
		select {
		case t := <-c.s.released:
			if err := c.handOver(t); err != nil {
				return err
			}
		case <-c.s.ctx.Done():
			return context.Cause(c.s.ctx)
		}
	}
	return nil
}

// toLimits ends the session when all before the limits has been read. Sources
// without one are not read.
func (c *conductor) toLimits() (done bool, err error) {
	if len(c.held) == 0 || c.opening != nil {
		return false, nil
	}
	for _, r := range c.s.readers {
		r.stopAt(c.limits[r.stream])
	}
	if !c.reading || !c.atLimits(-1) {
		return false, nil
	}
	return true, c.giveAll()
}

// atLimits reports that the readers of a stage, or all for -1, have read all that they
// shall.
func (c *conductor) atLimits(stage int) bool {
	for _, r := range c.s.readers {
		if (stage < 0 || stage == r.stage) && !r.idle() && !r.atLimit() {
			return false
		}
	}
	return true
}
