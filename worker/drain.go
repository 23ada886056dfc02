package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"natsflow/bus"
	"natsflow/control"
)

// drainRetry is the wait before a step of a drain that did not reach the server
// is tried again.
const drainRetry = 200 * time.Millisecond

// drainer watches a session: it lets it run, leave, or drain.
type drainer struct {
	w *worker
	s *session
	// limited: the session ends by itself at a limit that is not a cut.
	limited bool
	// epoch of the drain that was begun, cut when it is fixed.
	epoch uint64
	cut   map[string]uint64
	// proposed is a cut that was decided here and is not yet in the record.
	proposed map[string]uint64
	retry    <-chan time.Time
	// undecided: a drain is to begin whose cut is not known, and may be anywhere
	// from where the flow is now. Readers that have not begun wait for it: a drain
	// that was asked for while nobody ran would else come too late.
	undecided bool
}

func (d *drainer) run(ctx context.Context) error {
	s := d.s
	for {
		rec, changed := d.w.records.get()
		if err := d.w.records.failure(); err != nil {
			return err
		}
		if restart, err := d.follow(rec); err != nil || restart {
			if err == nil {
				err = d.restart()
			}
			return err
		}
		if !d.undecided {
			s.letRead()
		}
		done := s.readersDone
		if d.cut == nil && !d.limited {
			// Readers that stopped for a cut wait here until it is in the record.
			done = nil
		}
		select {
		case <-ctx.Done():
			return d.leave()
		case <-done:
			if d.cut == nil {
				_, err := s.finish(0)
				return s.cause(err)
			}
			return d.finish()
		case <-changed:
		case <-d.retry:
			d.retry = nil
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
	}
}

// follow does what the record asks for.
func (d *drainer) follow(rec control.Record) (restart bool, err error) {
	switch {
	case rec.State.Stopped():
		// Somebody else ended the drain, which only a process can that took the
		// tasks over.
		return false, errStopped
	case d.limited:
		// The session is for what comes before a record that failed.
		return false, nil
	case rec.State != control.StateDraining:
		if d.epoch == 0 {
			return false, nil
		}
		d.s.log.Info("the drain was cancelled; going on", "epoch", rec.Epoch)
		return true, nil
	case d.epoch != 0 && d.epoch != rec.Epoch:
		// Cancelled, and another one begun meanwhile.
		return true, nil
	case rec.Drain.Cut != nil:
		if d.cut == nil && !d.begin(rec) {
			return false, d.refuse(rec)
		}
		return false, nil
	case d.retry != nil:
		return false, nil
	}
	return d.fixCut(rec)
}

// begin drains to the cut of the record. It reports false when the flow is beyond
// it already.
func (d *drainer) begin(rec control.Record) bool {
	d.epoch, d.cut = rec.Epoch, rec.Drain.Cut
	d.w.status.phase("draining")
	for stream, at := range d.limit(d.cut) {
		if cut, ok := d.cut[stream]; ok && at > cut {
			return false
		}
	}
	d.s.log.Info("draining", "epoch", rec.Epoch, "cut", control.FormatCut(d.cut), "mode", rec.Drain.Command.Mode)
	return true
}

// refuse cancels a drain whose cut cannot be kept: a process that had lost the
// flow fixed it late, when this one had read on.
func (d *drainer) refuse(rec control.Record) error {
	why := fmt.Sprintf("epoch %d: the cut %s was fixed by a process that was not active any more, the flow is beyond it: drain again",
		rec.Epoch, control.FormatCut(rec.Drain.Cut))
	d.s.log.Warn("the drain was cancelled", "epoch", rec.Epoch, "err", why)
	next, err := d.s.ctl.Resume(d.s.ctx, why)
	if err == nil {
		_, err = d.s.ctl.SetError(d.s.ctx, why)
	}
	if err != nil {
		return err
	}
	d.w.records.put(next)
	return d.restart()
}

// fixCut decides where the drain cuts and writes it into the record.
func (d *drainer) fixCut(rec control.Record) (restart bool, err error) {
	if d.epoch == 0 {
		d.epoch = rec.Epoch
		d.w.status.phase("draining")
	}
	d.undecided = true
	if d.proposed == nil {
		if wait := notYet(rec.Drain.Command.At); wait > 0 {
			// A resume may come before.
			d.undecided = false
			d.retry = time.After(wait)
			return false, nil
		}
		cut, err := d.choose(rec.Drain.Command.At)
		if err != nil {
			return false, d.later(err)
		}
		d.proposed = cut
	}
	d.undecided = false
	read := d.limit(d.proposed)
	if err := d.s.cfg.reached(d.s.ctx, "cut-chosen", ""); err != nil {
		return false, err
	}
	next, err := d.s.ctl.FixCut(d.s.ctx, rec.Epoch, d.proposed, read)
	switch {
	case errors.Is(err, control.ErrCutBehind), errors.Is(err, control.ErrNotDraining):
		// The record says what came of it.
		d.s.log.Warn("the drain was refused", "epoch", rec.Epoch, "err", err)
		fresh, err := d.s.ctl.Record(d.s.ctx)
		if err != nil {
			return false, d.later(err)
		}
		d.epoch, d.proposed = 0, nil
		d.w.records.put(fresh)
		d.w.status.phase("running")
		// A reader that has come to its limit needs a new session.
		return !d.unlimit(), nil
	case err != nil:
		return false, d.later(err)
	}
	if err := d.s.cfg.reached(d.s.ctx, "cut-fixed", ""); err != nil {
		return false, err
	}
	d.w.records.put(next)
	return false, nil
}

// notYet returns how long a time that a drain waits for is away.
func notYet(at control.At) time.Duration {
	if at.Kind != control.AtTime {
		return 0
	}
	return time.Until(at.Time)
}

// later tries again in a moment what failed because the server is away.
func (d *drainer) later(err error) error {
	if !bus.Retryable(err) {
		return err
	}
	d.s.log.Warn("the drain waits for the server", "err", err)
	d.retry = time.After(drainRetry)
	return nil
}

// choose returns the cut that a command asks for. For "now" the readers stop
// where they are.
func (d *drainer) choose(at control.At) (map[string]uint64, error) {
	ctx := d.s.ctx
	if at.Kind == control.AtNow {
		cut := make(map[string]uint64, len(d.s.readers))
		for _, r := range d.s.readers {
			cut[r.stream] = r.stopForCut()
		}
		return cut, nil
	}
	cut := make(map[string]uint64, len(d.s.readers))
	for _, r := range d.s.readers {
		switch at.Kind {
		case control.AtHead:
			info, err := d.s.conn.Stream(ctx, r.stream)
			if err != nil {
				return nil, err
			}
			read, _ := r.position()
			cut[r.stream] = max(info.LastSeq, read, r.ahead)
		case control.AtTime:
			seq, err := d.s.conn.SeqAt(ctx, r.stream, at.Time)
			if err != nil {
				return nil, err
			}
			cut[r.stream] = seq
		case control.AtSeq:
			seq, ok := at.Seq[r.stream]
			if !ok {
				// A source that the command does not name stops where it is.
				seq = r.stopForCut()
			}
			cut[r.stream] = seq
		}
	}
	for stream, seq := range at.Seq {
		if _, ok := cut[stream]; !ok {
			// FixCut refuses it: the flow has no such source.
			cut[stream] = seq
		}
	}
	return cut, nil
}

// limit makes the readers stop at the cut and returns where the flow is in each
// source. A reader that is beyond the cut is left as it is.
func (d *drainer) limit(cut map[string]uint64) map[string]uint64 {
	read := make(map[string]uint64, len(d.s.readers))
	for _, r := range d.s.readers {
		if at, ok := cut[r.stream]; ok {
			read[r.stream], _ = r.setLimit(at)
		} else {
			read[r.stream] = r.stopForCut()
		}
	}
	return read
}

// unlimit lets the readers go on. It reports false if one cannot.
func (d *drainer) unlimit() bool {
	all := true
	for _, r := range d.s.readers {
		all = r.unlimit() && all
	}
	return all
}

// leave ends the session where it is.
func (d *drainer) leave() error {
	d.w.status.phase("leaving")
	began := time.Now()
	d.s.stopReaders()
	at, err := d.s.finish(0)
	if err != nil {
		return d.s.cause(err)
	}
	d.s.log.Info("left; everything read is committed and published", "positions", control.FormatCut(at), "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// restart leaves and asks for a new session: a reader that has ended does not
// read on.
func (d *drainer) restart() error {
	d.s.stopReaders()
	if _, err := d.s.finish(0); err != nil {
		return d.s.cause(err)
	}
	return errRestart
}

// finish completes the drain: every task has applied exactly the records up to
// the cut.
func (d *drainer) finish() error {
	s := d.s
	if _, err := s.finish(d.epoch); err != nil {
		return s.cause(err)
	}
	if err := s.cfg.reached(s.ctx, "drained-unrecorded", ""); err != nil {
		return err
	}
	report := control.Report{
		Epoch: d.epoch, Cut: maps.Clone(d.cut), Records: map[string]uint64{}, Tasks: len(s.tasks), Worker: s.cfg.Name,
	}
	rec := d.w.records.latest()
	if rec.Drain != nil {
		report.Mode, report.Reason = rec.Drain.Command.Mode, rec.Drain.Command.Reason
		report.Duration = max(0, time.Since(rec.Drain.Since))
	}
	for _, r := range s.readers {
		_, report.Records[r.stream] = r.position()
	}
	for _, t := range s.tasks {
		report.Results += t.head.Results
		report.DeadLetters += t.head.DeadLetters
	}
	wait := newPatience(s, "record the end of the drain")
	for {
		var err error
		if report.SnapshotBytes, err = s.bucket.Bytes(s.ctx); err == nil {
			_, err = s.ctl.Drained(s.ctx, d.epoch, report)
		}
		switch {
		case err == nil:
			wait.over()
			s.log.Info("drained", "epoch", d.epoch, "cut", control.FormatCut(d.cut), "results", report.Results,
				"dead_letters", report.DeadLetters, "took", report.Duration.Round(time.Millisecond))
			return nil
		case errors.Is(err, control.ErrNotDraining):
			// It was cancelled in the last moment.
			return errRestart
		case !bus.Retryable(err):
			return err
		}
		if err := wait.next(s.ctx, err); err != nil {
			return err
		}
	}
}
