package control

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// OutcomeKind classifies what a command did.
type OutcomeKind string

// What a command can do to a flow.
const (
	// OutcomeIgnored: of another flow, or looked at before. The record did not
	// change at all. With every other outcome at least LastCommand did.
	OutcomeIgnored OutcomeKind = "ignored"
	// OutcomeApplied: the state of the flow changed.
	OutcomeApplied OutcomeKind = "applied"
	// OutcomeJoined: a drain that asks for what the drain under way does.
	OutcomeJoined OutcomeKind = "joined"
	// OutcomeNothing: the flow is already as the command wants it.
	OutcomeNothing OutcomeKind = "nothing"
	// OutcomeRefused: not carried out; LastError says why.
	OutcomeRefused OutcomeKind = "refused"
)

// Outcome is what came of a command.
type Outcome struct {
	Kind OutcomeKind
	// Text says it in words, as the history has it.
	Text string
}

// Apply is the record after cmd. Commands must come in the order of their
// sequences; one that is not later than LastCommand changes nothing, so that a
// command takes effect once however often and by whomever it is applied.
func (r Record) Apply(cmd Command) (Record, Outcome) {
	if cmd.Seq <= r.LastCommand || (cmd.Flow != "" && cmd.Flow != r.Flow) {
		return r, Outcome{Kind: OutcomeIgnored}
	}
	cmd = cmd.withDefaults()
	next := r.clone()
	next.LastCommand = cmd.Seq
	var out Outcome
	switch cmd.Kind {
	case KindDrain:
		out = next.applyDrain(cmd)
	case KindResume:
		out = next.applyResume(cmd)
	default:
		out = Outcome{OutcomeRefused, fmt.Sprintf("unknown command %q", cmd.Kind)}
	}
	text := out.Text
	if out.Kind == OutcomeRefused {
		text = "refused: " + text
		next.setError(cmd.Time, cmd.Seq, fmt.Sprintf("command %d (%s): %s", cmd.Seq, cmd.Kind, out.Text))
	}
	next.note(cmd, text)
	return next, out
}

// Refuse is the record after a message of the control stream that could not be
// parsed: it counts as looked at and is the last error, nothing else.
func (r Record) Refuse(cmd Command, cause error) (Record, Outcome) {
	if cmd.Seq <= r.LastCommand || (cmd.Flow != "" && cmd.Flow != r.Flow) {
		return r, Outcome{Kind: OutcomeIgnored}
	}
	next := r.clone()
	next.LastCommand = cmd.Seq
	next.setError(cmd.Time, cmd.Seq, fmt.Sprintf("command %d: %v", cmd.Seq, cause))
	next.note(Command{Seq: cmd.Seq, Time: cmd.Time, Kind: cmd.Kind}, "refused: "+cause.Error())
	return next, Outcome{OutcomeRefused, cause.Error()}
}

func (r *Record) applyDrain(cmd Command) Outcome {
	switch r.State {
	case StateDraining:
		under := r.Drain.Command
		if under.Mode == cmd.Mode && under.At.equal(cmd.At) {
			return Outcome{OutcomeJoined, fmt.Sprintf("joined the drain of epoch %d", r.Epoch)}
		}
		return Outcome{OutcomeRefused, fmt.Sprintf(
			"already draining (%s at %s, by command %d), which %s at %s contradicts: resume first to cancel that drain",
			under.Mode, under.At, under.Seq, cmd.Mode, cmd.At)}
	case StateDrained, StateFinished:
		if cmd.Mode == ModeFinish && r.State == StateDrained {
			return Outcome{OutcomeRefused, fmt.Sprintf("already drained at epoch %d, with all that was open kept for a resume: resume first, then finish", r.Epoch)}
		}
		return Outcome{OutcomeNothing, fmt.Sprintf("nothing to do: already %s at epoch %d", r.State, r.Epoch)}
	}
	if err := r.knowsSources(cmd.At.Seq); err != nil {
		return Outcome{OutcomeRefused, err.Error()}
	}
	r.Epoch++
	r.State = StateDraining
	r.Drain = &Drain{Command: cmd, Since: cmd.Time}
	return Outcome{OutcomeApplied, fmt.Sprintf("draining, epoch %d", r.Epoch)}
}

func (r *Record) applyResume(cmd Command) Outcome {
	switch r.State {
	case StateRunning:
		return Outcome{OutcomeNothing, "nothing to do: running"}
	case StateDraining:
		r.renote(r.Drain.Command.Seq, fmt.Sprintf("cancelled by command %d", cmd.Seq))
		r.State, r.Drain = StateRunning, nil
		return Outcome{OutcomeApplied, fmt.Sprintf("cancelled the drain of epoch %d", r.Epoch)}
	}
	was := r.State
	r.State, r.Drain = StateRunning, nil
	return Outcome{OutcomeApplied, fmt.Sprintf("resumed, was %s at epoch %d", was, r.Epoch)}
}

// knowsSources refuses a cut that names a stream the flow does not read: it is a
// misspelling, and the drain would never end.
func (r *Record) knowsSources(cut map[string]uint64) error {
	if len(r.Sources) == 0 {
		return nil
	}
	known := slices.Sorted(maps.Keys(r.Sources))
	for _, source := range slices.Sorted(maps.Keys(cut)) {
		if !slices.Contains(known, source) {
			if own, ok := r.through(source); ok {
				return fmt.Errorf("flow %s reads %q through its own stream %q, and the sequences of that one count", r.Flow, source, own)
			}
			hint := didYouMean(source, known)
			if hint == "" {
				hint = " (its sources: " + quoted(known) + ")"
			}
			return fmt.Errorf("flow %s does not read a stream %q%s", r.Flow, source, hint)
		}
	}
	return nil
}

// through returns the stream of the flow's own through which it reads a stream.
func (r *Record) through(origin string) (own string, ok bool) {
	for name, src := range r.Sources {
		if src.Origin == origin {
			return name, true
		}
	}
	return "", false
}

// WithError is the record with another last error.
func (r Record) WithError(at time.Time, text string) Record {
	next := r.clone()
	next.setError(at, 0, text)
	return next
}
