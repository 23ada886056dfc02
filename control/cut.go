package control

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Errors of FixCut and Drained.
var (
	// ErrNotDraining: the drain of that epoch is not under way, or not any more
	// (a resume cancelled it, a later one was begun).
	ErrNotDraining = errors.New("that drain is not under way")
	// ErrCutBehind is in the chain of a [CutBehindError].
	ErrCutBehind = errors.New("the cut is behind what has been processed")
)

// CutBehindError refuses a cut, and with it the drain: records after it have
// been processed, and a snapshot cannot go back.
type CutBehindError struct {
	Source string
	// Cut is what was asked for and Lowest the lowest possible now.
	Cut, Lowest uint64
}

// Error names the source, the cut and the lowest possible one.
func (e *CutBehindError) Error() string {
	return fmt.Sprintf("the cut %s:%d is behind what has been processed: the lowest possible is %s:%d", e.Source, e.Cut, e.Source, e.Lowest)
}

// Is makes errors.Is(err, ErrCutBehind) true.
func (e *CutBehindError) Is(target error) bool { return target == ErrCutBehind }

// FixCut is the record with the cut of epoch fixed. read is how far each source
// has been read. When the cut was fixed before, the record is returned as it is,
// whatever cut says: the caller goes on with the record's. A cut behind read is
// refused with a *CutBehindError and the record returned is then the next one,
// too: the flow runs again and the error is noted. With any other error the
// record is unchanged.
func (r Record) FixCut(epoch uint64, cut, read map[string]uint64) (Record, error) {
	if err := r.inDrain(epoch); err != nil {
		return r, fmt.Errorf("fix the cut: %w", err)
	}
	if r.Drain.Cut != nil {
		return r, nil
	}
	if len(cut) == 0 {
		return r, errors.New("fix the cut: it names no source")
	}
	if err := r.knowsSources(cut); err != nil {
		return r, fmt.Errorf("fix the cut: %w", err)
	}
	for source := range r.Sources {
		if _, ok := cut[source]; !ok {
			return r, fmt.Errorf("fix the cut: it lacks source %q", source)
		}
	}
	for _, source := range slices.Sorted(maps.Keys(cut)) {
		if cut[source] < read[source] {
			err := &CutBehindError{Source: source, Cut: cut[source], Lowest: read[source]}
			return r.refuseCut(err), err
		}
	}
	next := r.clone()
	next.Drain.Cut = maps.Clone(cut)
	next.renote(next.Drain.Command.Seq, fmt.Sprintf("draining, epoch %d, to %s", r.Epoch, FormatCut(cut)))
	return next, nil
}

// RefuseCut is the record after the drain of epoch was given up, though its cut was
// fixed: the flow is beyond it, for the reason that cause tells.
func (r Record) RefuseCut(epoch uint64, cause error) (Record, error) {
	if err := r.inDrain(epoch); err != nil || r.State != StateDraining {
		return r, errors.Join(err, ErrNotDraining)
	}
	return r.refuseCut(cause), nil
}

// refuseCut gives the drain up. The epoch stays opened: a task may have heard of
// it already, and an epoch must not mean two things.
func (r Record) refuseCut(cause error) Record {
	next := r.clone()
	cmd := next.Drain.Command
	next.State, next.Drain = StateRunning, nil
	next.setError(cmd.Time, cmd.Seq, fmt.Sprintf("command %d (%s): %v", cmd.Seq, cmd.Kind, cause))
	next.renote(cmd.Seq, "refused: "+cause.Error())
	return next
}

// Drained is the record after the drain of epoch ended; every task has its final
// entry. Epoch, Mode, Reason and Cut of the report are filled in from the record.
// It changes nothing when the end of that epoch was recorded before.
func (r Record) Drained(epoch uint64, report Report) (Record, error) {
	if err := r.inDrain(epoch); err != nil {
		return r, fmt.Errorf("end the drain: %w", err)
	}
	if r.State.Stopped() {
		return r, nil
	}
	if r.Drain.Cut == nil {
		return r, fmt.Errorf("end the drain: the cut of epoch %d is not fixed", epoch)
	}
	next := r.clone()
	cmd := next.Drain.Command
	report.Epoch, report.Mode, report.Reason = epoch, cmd.Mode, cmd.Reason
	report.Cut = maps.Clone(next.Drain.Cut)
	report.Records = maps.Clone(report.Records)
	if report.Duration == 0 {
		// The two times are of two clocks; a difference below zero says nothing.
		report.Duration = max(0, report.Time.Sub(next.Drain.Since))
	}
	next.Report = &report
	next.State = StateDrained
	if cmd.Mode == ModeFinish {
		next.State = StateFinished
	}
	next.renote(cmd.Seq, fmt.Sprintf("%s, epoch %d, at %s", next.State, epoch, FormatCut(report.Cut)))
	return next, nil
}

func (r Record) inDrain(epoch uint64) error {
	if r.Drain == nil || r.Epoch != epoch {
		return fmt.Errorf("%w: flow %s is %s in epoch %d, not draining in epoch %d", ErrNotDraining, r.Flow, r.State, r.Epoch, epoch)
	}
	return nil
}
