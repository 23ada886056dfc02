package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
)

// drainRetry is the wait before a step of a drain that did not reach the server
// is tried again.
const drainRetry = 200 * time.Millisecond

// waitStage is the wait before another look whether a stage has ended, maxWaitStage the
// longest one.
const waitStage, maxWaitStage = 20 * time.Millisecond, 250 * time.Millisecond

// trimTimeout bounds what the end of a drain spends on trimming.
const trimTimeout = 2 * time.Second

// drain is where a session is in a drain.
type drain struct {
	// epoch of the drain that was begun, 0 if none was, and its cut when that is
	// known.
	epoch uint64
	cut   map[string]uint64
	// undecided: the readers stand until the cut is known. It may be anywhere from
	// where the flow is now.
	undecided bool
	// told: the others can see where the readers stand, for all tasks here.
	told bool
	// ends are the sequences of the exchange at which later stages end, by stage, as far
	// as they are known.
	ends map[int]uint64
	// stageAt is when to look whether the stage before one has ended, stageWait the time
	// to the look after that.
	stageAt   time.Time
	stageWait time.Duration
	// over is what a drain at the head waits for.
	over broughtOver
	// retryAt is when to look again, wait the time to the look after that.
	retryAt time.Time
	wait    time.Duration
}

// again makes the conductor look again, later each time: what others do first is
// seen in the flow record as a rule.
func (d *drain) again(first, most time.Duration) {
	if d.wait < first {
		d.wait = first
	}
	d.retryAt = time.Now().Add(d.wait)
	d.wait = min(2*d.wait, most)
}

// follow does what the record asks for. It reports done when there is nothing
// left to do.
func (c *conductor) follow(rec control.Record) (done bool, err error) {
	if c.drain.epoch != 0 && (rec.State != control.StateDraining || rec.Epoch != c.drain.epoch) {
		if err := c.cancelled(rec); err != nil {
			return false, err
		}
	}
	if rec.State != control.StateDraining {
		c.s.epoch.Store(rec.Epoch)
		return false, nil
	}
	if time.Now().Before(c.drain.retryAt) && (rec.Drain.Cut == nil || c.drain.cut != nil) {
		return false, nil
	}
	c.drain.retryAt = time.Time{}
	if rec.Drain.Cut == nil {
		return false, c.seekCut(rec)
	}
	if c.drain.cut == nil {
		if ok, err := c.begin(rec); err != nil || !ok {
			return false, err
		}
	}
	return false, c.toCut(rec)
}

// cancelled lets the readers go on after a drain that is not under way any more.
func (c *conductor) cancelled(rec control.Record) error {
	c.s.log.Info("the drain was cancelled; going on", "epoch", c.drain.epoch, "now", rec.State)
	if err := c.halt(); err != nil {
		return err
	}
	for _, r := range c.s.readers {
		r.unlimit()
	}
	c.drain = drain{}
	c.s.owned.Add(-c.s.done.Swap(0))
	c.w.status.phase("running")
	return nil
}

// begin drains to the cut of the record. It reports false when it cannot.
func (c *conductor) begin(rec control.Record) (ok bool, err error) {
	// Those that stand before a time have to go on.
	if err := c.halt(); err != nil {
		return false, err
	}
	c.drain = drain{epoch: rec.Epoch, cut: rec.Drain.Cut}
	c.w.status.phase("draining")
	for _, r := range c.sourceReaders() {
		if _, ok := r.setLimit(c.drain.cut[r.stream]); !ok {
			return false, c.refuse(rec)
		}
	}
	c.s.log.Info("draining", "epoch", rec.Epoch, "cut", control.FormatCut(c.drain.cut), "mode", rec.Drain.Command.Mode)
	return true, nil
}

// refuse gives a drain up whose cut cannot be kept: a process that had lost its
// tasks fixed it late, when this one had read on.
func (c *conductor) refuse(rec control.Record) error {
	cause := fmt.Errorf("the cut %s was fixed by a process that was not active any more, the flow is beyond it: drain again", control.FormatCut(rec.Drain.Cut))
	c.s.log.Warn("the drain was refused", "epoch", rec.Epoch, "err", cause)
	next, err := c.s.ctl.RefuseCut(c.s.ctx, rec.Epoch, cause)
	if errors.Is(err, control.ErrNotDraining) {
		next, err = c.s.ctl.Record(c.s.ctx)
	}
	if err != nil {
		return err
	}
	c.w.records.put(next)
	c.s.wake()
	return nil
}

// seekCut stops the readers, lets the others know where they stand, and fixes the
// cut when all workers have done so. Any of them may do it.
func (c *conductor) seekCut(rec control.Record) error {
	c.drain.epoch = rec.Epoch
	c.w.status.phase("draining")
	if wait := notYet(rec.Drain.Command.At); wait > 0 {
		// Reading goes on until then, and a resume may come before.
		for _, r := range c.sourceReaders() {
			r.setUntil(rec.Drain.Command.At.Time)
		}
		c.drain.retryAt = time.Now().Add(wait)
		return nil
	}
	c.drain.undecided = true
	if c.reading {
		if err := c.halt(); err != nil {
			return err
		}
	}
	if c.opening != nil {
		return nil // they are a part of what is to be told
	}
	err := c.fixCut(rec)
	if err != nil && bus.Retryable(err) {
		c.s.log.Warn("the drain waits for the server", "err", err)
		c.drain.retryAt = time.Now().Add(drainRetry)
		return nil
	}
	return err
}

func (c *conductor) fixCut(rec control.Record) error {
	if err := c.tellStopped(rec.Epoch); err != nil {
		return err
	}
	reached, ok, err := c.reached(rec.Epoch)
	if err != nil {
		return err
	}
	if !ok {
		c.drain.again(waitDrain, 10*waitDrain)
		return nil
	}
	if rec.Drain.Command.At.Kind == control.AtHead {
		if ok, err := c.drain.over.arrived(c.s.ctx, c.s); err != nil || !ok {
			c.drain.again(waitDrain, 4*waitDrain)
			return err
		}
	}
	cut, err := c.choose(rec.Drain.Command.At, reached)
	if err != nil {
		return err
	}
	if err := c.s.cfg.reached(c.s.ctx, "cut-chosen", ""); err != nil {
		return err
	}
	next, err := c.s.ctl.FixCut(c.s.ctx, rec.Epoch, cut, reached)
	if errors.Is(err, control.ErrCutBehind) || errors.Is(err, control.ErrNotDraining) {
		// The record says what came of it.
		c.s.log.Warn("the drain was refused", "epoch", rec.Epoch, "err", err)
		next, err = c.s.ctl.Record(c.s.ctx)
	}
	if err != nil {
		return err
	}
	if err := c.s.cfg.reached(c.s.ctx, "cut-fixed", ""); err != nil {
		return err
	}
	c.w.records.put(next)
	c.s.wake()
	return nil
}

// tellStopped lets the others know where the readers stand.
func (c *conductor) tellStopped(epoch uint64) error {
	tasks := c.staying()
	if c.drain.told || len(tasks) == 0 {
		return nil
	}
	at := make(map[string]uint64, len(c.s.sources))
	for _, r := range c.sourceReaders() {
		at[r.stream] = r.furthest()
	}
	if err := c.member.Tell(c.s.ctx, &control.Stopped{Epoch: epoch, Positions: at, Tasks: tasks}); err != nil {
		return err
	}
	c.drain.told = true
	return c.s.cfg.reached(c.s.ctx, "stop-told", "")
}

// reached returns how far the flow is in each source, when all tasks that read sources
// stand.
func (c *conductor) reached(epoch uint64) (map[string]uint64, bool, error) {
	members, _, err := c.s.ctl.Members(c.s.ctx)
	if err != nil {
		return nil, false, err
	}
	var stops []control.Stopped
	for _, m := range members {
		if m.Stopped != nil {
			stops = append(stops, *m.Stopped)
		}
	}
	at, ok := control.CutOf(stops, namesOf(c.s.flow, 0), epoch)
	return at, ok, nil
}

// notYet returns how long a time that a drain waits for is away.
func notYet(at control.At) time.Duration {
	if at.Kind != control.AtTime {
		return 0
	}
	return time.Until(at.Time)
}

// choose returns the cut that a command asks for, when the flow stands at the
// positions reached.
func (c *conductor) choose(at control.At, reached map[string]uint64) (map[string]uint64, error) {
	ctx := c.s.ctx
	cut := make(map[string]uint64, len(c.s.sources))
	for _, r := range c.sourceReaders() {
		// A source that the command does not name stops where it is.
		seq := reached[r.stream]
		switch at.Kind {
		case control.AtHead:
			info, err := c.s.conn.Stream(ctx, r.stream)
			if err != nil {
				return nil, err
			}
			seq = max(seq, info.LastSeq)
		case control.AtTime:
			var err error
			if seq, err = c.s.conn.SeqAt(ctx, r.stream, at.Time); err != nil {
				return nil, err
			}
		case control.AtSeq:
			if want, ok := at.Seq[r.stream]; ok {
				seq = want
			}
		}
		cut[r.stream] = seq
	}
	for stream, seq := range at.Seq {
		if _, ok := cut[stream]; !ok {
			// FixCut refuses it: the flow has no such source.
			cut[stream] = seq
		}
	}
	return cut, nil
}

// toCut ends the tasks when everything up to the cut has been read, and the drain
// when all tasks of the flow have ended.
func (c *conductor) toCut(rec control.Record) error {
	for stage := range c.s.flow.Stages() {
		if err := c.endStage(rec, stage); err != nil {
			return err
		}
	}
	if len(c.held) > 0 || c.opening != nil {
		return nil
	}
	err := c.finish(rec)
	if err != nil && bus.Retryable(err) {
		c.s.log.Warn("the drain waits for the server", "err", err)
		c.drain.retryAt = time.Now().Add(drainRetry)
		return nil
	}
	return err
}

// endStage ends the tasks of a stage when everything for them has been read: up to the
// cut in the sources; and in the exchange all there is when the tasks of the stage
// before have ended, those of all workers, since nothing more comes then.
func (c *conductor) endStage(rec control.Record, stage int) error {
	names := c.stayingOf(stage)
	if len(names) == 0 {
		return nil
	}
	if stage > 0 {
		ok, err := c.seekEnd(rec, stage)
		if err != nil && bus.Retryable(err) {
			c.s.log.Warn("the drain waits for the server", "err", err)
			c.drain.stageAt = time.Now().Add(drainRetry)
			return nil
		}
		if err != nil || !ok {
			return err
		}
	}
	if !c.reading || !c.atLimits(stage) {
		return nil
	}
	if err := c.halt(); err != nil {
		return err
	}
	positions := make([]uint64, len(c.s.readers))
	for i, r := range c.s.readers {
		switch {
		case r.stage != stage:
		case stage > 0:
			positions[i] = c.drain.ends[stage]
		default:
			positions[i] = c.drain.cut[r.stream]
		}
	}
	d := &flow.Drain{Mode: flow.DrainMode(rec.Drain.Command.Mode), Epoch: rec.Epoch, Cut: c.drain.cut}
	return c.end(names, d, positions)
}

// seekEnd makes the readers of a later stage stop where it ends. It reports false while
// that is not known.
func (c *conductor) seekEnd(rec control.Record, stage int) (bool, error) {
	end, ok := c.drain.ends[stage]
	if !ok {
		for _, t := range c.held {
			if t.id.Stage == stage-1 {
				return false, nil // its end is seen here
			}
		}
		if time.Now().Before(c.drain.stageAt) {
			return false, nil
		}
		c.drain.stageAt = time.Time{}
		var err error
		if end, ok, err = c.endOf(rec, stage); err != nil || !ok {
			c.drain.stageWait = min(max(2*c.drain.stageWait, waitStage), maxWaitStage)
			c.drain.stageAt = time.Now().Add(c.drain.stageWait)
			return false, err
		}
		if c.drain.ends == nil {
			c.drain.ends = map[int]uint64{}
		}
		c.drain.ends[stage], c.drain.stageWait = end, 0
		if err := c.s.cfg.reached(c.s.ctx, "stage-ends", ""); err != nil {
			return false, err
		}
	}
	for _, r := range c.s.readers {
		if r.stage == stage {
			r.stopAt(end)
		}
	}
	return true, nil
}

// endOf returns a sequence of the exchange that every frame for a stage is at or before,
// when all tasks of the stage before have their final entry, and so have published all
// theirs.
func (c *conductor) endOf(rec control.Record, stage int) (end uint64, ok bool, err error) {
	tasks, err := c.s.ctl.Tasks(c.s.ctx)
	if err != nil {
		return 0, false, err
	}
	for _, name := range namesOf(c.s.flow, stage-1) {
		if !isFinal(tasks[name], rec.Epoch) {
			return 0, false, nil
		}
		end = max(end, tasks[name].Final.Exchange)
	}
	// The end of the stream says the same, if it is not older than what the tasks know.
	info, err := c.s.conn.Stream(c.s.ctx, c.s.exchange.name)
	return max(end, info.LastSeq), err == nil, err
}

// finish records the end of the drain if every task of the flow has its final
// entry. Whoever hands the last one over sees that; the others look now and then,
// since that one may die before it can say so.
func (c *conductor) finish(rec control.Record) error {
	tasks, err := c.s.ctl.Tasks(c.s.ctx)
	if err != nil {
		return err
	}
	for _, name := range c.w.taskNames {
		if !isFinal(tasks[name], rec.Epoch) {
			c.drain.again(4*waitDrain, 40*waitDrain)
			return nil
		}
	}
	if err := c.s.cfg.reached(c.s.ctx, "drained-unrecorded", ""); err != nil {
		return err
	}
	report, err := c.report(rec, tasks)
	if err != nil {
		return err
	}
	c.trimLast(rec.Drain.Cut)
	next, err := c.s.ctl.Drained(c.s.ctx, rec.Epoch, report)
	if errors.Is(err, control.ErrNotDraining) {
		// It was cancelled in the last moment.
		next, err = c.s.ctl.Record(c.s.ctx)
	}
	if err != nil {
		return err
	}
	if next.Report != nil && next.Report.Epoch == rec.Epoch && next.Report.Worker == c.s.cfg.Name {
		c.w.publishReport(next.Report)
	}
	c.w.records.put(next)
	c.s.wake()
	return nil
}

// trimLast trims what the drain has left. If it fails, whoever resumes does it.
func (c *conductor) trimLast(cut map[string]uint64) {
	ctx, cancel := context.WithTimeout(c.s.ctx, trimTimeout)
	defer cancel()
	for i, src := range c.s.sources {
		if err := c.s.trim(ctx, i, cut[src.Stream]); err != nil {
			c.s.log.Debug("an intake was not trimmed at the end", "stream", src.Stream, "err", err)
		}
	}
	if err := c.s.trimExchange(ctx); err != nil {
		c.s.log.Debug("the exchange was not trimmed at the end", "err", err)
	}
}

// report says what a drain did, from what the tasks left.
func (c *conductor) report(rec control.Record, tasks map[string]control.TaskRecord) (control.Report, error) {
	report := control.Report{
		Epoch: rec.Epoch, Cut: rec.Drain.Cut, Records: map[string]uint64{}, Tasks: len(c.w.taskNames), Worker: c.s.cfg.Name,
		Mode: rec.Drain.Command.Mode, Reason: rec.Drain.Command.Reason, Duration: max(0, time.Since(rec.Drain.Since)),
	}
	workers := map[string]bool{}
	var last time.Time
	for _, name := range c.w.taskNames {
		final := tasks[name].Final
		report.Results += final.Results
		report.DeadLetters += final.DeadLetters
		report.Late += final.Late
		report.AtEnd += final.AtEnd
		report.OpenWindows += final.Open
		workers[final.Worker] = true
		if final.Time.After(last) {
			last, report.Last = final.Time, final.Worker
		}
	}
	report.Workers = len(workers)
	former := map[string]uint64{}
	if rec.Report != nil {
		former = rec.Report.Cut
	}
	for i, src := range c.s.sources {
		if c.s.intakes[i] != nil {
			// It is trimmed, and everything that was in it was for the flow.
			report.Records[src.Stream] = report.Cut[src.Stream] - min(former[src.Stream], report.Cut[src.Stream])
			continue
		}
		n, err := c.s.conn.Count(c.s.ctx, src.Stream, src.Subjects, former[src.Stream]+1, report.Cut[src.Stream])
		if err != nil {
			return report, fmt.Errorf("count the records of the drain: %w", err)
		}
		report.Records[src.Stream] = n
	}
	var err error
	report.SnapshotBytes, err = c.s.bucket.Bytes(c.s.ctx)
	return report, err
}
