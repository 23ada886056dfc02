package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"natsflow/bus"
	"natsflow/control"
)

// drainPlan is what a drain would do.
type drainPlan struct {
	Flow  string        `json:"flow"`
	State control.State `json:"state"`
	// Epoch is that of the drain.
	Epoch uint64       `json:"epoch"`
	Mode  control.Mode `json:"mode"`
	At    control.At   `json:"at"`
	// Outcome is what would come of the command: applied, joined, nothing or
	// refused.
	Outcome control.OutcomeKind `json:"outcome"`
	Text    string              `json:"text"`
	Sources []sourcePlan        `json:"sources,omitempty"`
	// Records are left to the cut, in all sources.
	Records uint64 `json:"records"`
	// Seconds is how long they take at the current rate; nil if that is unknown.
	Seconds *float64 `json:"seconds"`
	Workers int      `json:"workers"`
	Tasks   int      `json:"tasks"`
	// SnapshotBytes is the size of the snapshots as they are.
	SnapshotBytes uint64   `json:"snapshot_bytes"`
	Notes         []string `json:"notes,omitempty"`
	Error         string   `json:"error,omitempty"`
}

// sourcePlan is what a drain would do with a source.
type sourcePlan struct {
	Stream string `json:"stream"`
	// Cut may be higher when it is fixed, if Rises.
	Cut       uint64 `json:"cut"`
	Rises     bool   `json:"may_rise"`
	Head      uint64 `json:"head"`
	Committed uint64 `json:"committed"`
	// Records are left to the cut, Missing of them not in the stream yet.
	Records uint64   `json:"records"`
	Missing uint64   `json:"missing"`
	Rate    float64  `json:"rate"`
	Seconds *float64 `json:"seconds"`
}

// dryRun says what the drain would do, from what is known of the flow now. It
// goes the way of the command through the flow record, without storing anything.
func (cmd *DrainCmd) dryRun(ctx context.Context, c *Console, conn *bus.Conn, rec control.Record, at control.At) error {
	if cmd.ControlPrefix != "" && cmd.ControlPrefix != rec.Control.Prefix {
		return fmt.Errorf("%w: flow %s listens on %s.>, not on %s.>", control.ErrPrefix, rec.Flow, rec.Control.Prefix, cmd.ControlPrefix)
	}
	st, err := collectFlow(ctx, conn, rec)
	if err != nil {
		return err
	}
	var failed error
	for _, s := range st.Sources {
		if s.Error != "" {
			failed = errors.Join(failed, fmt.Errorf("source %s: %s", s.Stream, s.Error))
		}
	}
	if failed != nil {
		return failed
	}
	now := time.Now()
	after, out := rec.Apply(control.Command{
		Seq: rec.LastCommand + 1, Time: now, Kind: control.KindDrain, Flow: rec.Flow, Mode: control.Mode(cmd.Mode), At: at, Reason: cmd.Reason,
	})
	plan := newDrainPlan(st, after, out)
	if out.Kind == control.OutcomeApplied || out.Kind == control.OutcomeJoined {
		cut, err := plannedCut(st, after, func(source string) (uint64, error) { return conn.SeqAt(ctx, source, at.Time) })
		if err != nil {
			return err
		}
		_, err = after.FixCut(after.Epoch, cut, furthest(st))
		if err != nil {
			plan.refuse(err)
		} else if err := plan.fill(st, after, cut, now, func(source string, from, through uint64) (uint64, error) {
			return conn.Count(ctx, source, rec.Sources[source].Subjects, from, through)
		}); err != nil {
			return err
		}
	}
	return cmd.printPlan(c, plan)
}

func newDrainPlan(st flowStatus, after control.Record, out control.Outcome) *drainPlan {
	p := &drainPlan{
		Flow: st.Flow, State: st.State, Epoch: after.Epoch, Outcome: out.Kind, Text: out.Text,
		Workers: len(st.crew.working()), Tasks: len(st.Tasks), SnapshotBytes: st.StateBytes,
	}
	if after.Drain != nil {
		p.Mode, p.At = after.Drain.Command.Mode, after.Drain.Command.At
	}
	if out.Kind == control.OutcomeRefused {
		p.refuse(errors.New(out.Text))
	}
	return p
}

func (p *drainPlan) refuse(err error) {
	p.Outcome, p.Text, p.Error = control.OutcomeRefused, err.Error(), err.Error()
}

// furthest is how far each source has been read.
func furthest(st flowStatus) map[string]uint64 {
	at := map[string]uint64{}
	for _, s := range st.Sources {
		at[s.Stream] = s.Read
	}
	return at
}

// plannedCut is the cut that the drain of rec would get if it was fixed now. seqAt
// returns the last sequence of a source before the time of the command.
func plannedCut(st flowStatus, rec control.Record, seqAt func(source string) (uint64, error)) (map[string]uint64, error) {
	if rec.Drain.Cut != nil {
		return rec.Drain.Cut, nil
	}
	at := rec.Drain.Command.At
	cut := map[string]uint64{}
	for _, s := range st.Sources {
		seq := s.Read
		switch at.Kind {
		case control.AtHead:
			seq = max(seq, s.Head+s.Waiting) // each of them will have one
		case control.AtTime:
			var err error
			if seq, err = seqAt(s.Stream); err != nil {
				return nil, err
			}
		case control.AtSeq:
			if want, ok := at.Seq[s.Stream]; ok {
				seq = want
			}
		}
		cut[s.Stream] = seq
	}
	return cut, nil
}

// fill says what is left to the cut. count returns the number of records of a
// source between two sequences, both included.
func (p *drainPlan) fill(st flowStatus, rec control.Record, cut map[string]uint64, now time.Time, count func(source string, from, through uint64) (uint64, error)) error {
	at := rec.Drain.Command.At
	fixed := rec.Drain.Cut != nil
	later := !fixed && at.Kind == control.AtTime && at.Time.After(now)
	known, longest := true, 0.0
	for _, s := range st.Sources {
		_, asked := at.Seq[s.Stream]
		src := sourcePlan{
			Stream: s.Stream, Cut: cut[s.Stream], Head: s.Head, Committed: s.Committed, Rate: s.Rate, Missing: above(cut[s.Stream], s.Head),
			Rises: !fixed && (later || at.Kind != control.AtTime && !asked),
		}
		if src.Cut > src.Committed {
			n, err := count(s.Stream, src.Committed+1, src.Cut)
			if err != nil {
				return err
			}
			src.Records = n + src.Missing
		}
		switch {
		case p.Workers == 0: // nobody would do it
		case src.Records == 0:
			src.Seconds = new(float64)
		case src.Rate > 0:
			seconds := float64(src.Records) / src.Rate
			src.Seconds = &seconds
		}
		known = known && src.Seconds != nil
		if known {
			longest = max(longest, *src.Seconds)
		}
		if src.Missing > 0 {
			from := ""
			if s.Origin != "" {
				from = " from " + s.Origin
			}
			p.Notes = append(p.Notes, fmt.Sprintf("%s has %d messages, so the drain waits for the ones up to %d%s", s.Stream, s.Head, src.Cut, from))
		}
		p.Records += src.Records
		p.Sources = append(p.Sources, src)
	}
	if later {
		p.Notes = append(p.Notes, "the cut is fixed at "+at.String()+"; the flow reads on until then")
		longest = max(longest, at.Time.Sub(now).Seconds())
	}
	if known {
		p.Seconds = &longest
	}
	if p.Workers == 0 {
		p.Notes = append(p.Notes, "no worker has tasks; the drain is done when one starts")
	} else if n := st.TasksOwnerless; n > 0 {
		p.Notes = append(p.Notes, plural(n, "task")+" without an owner; the drain waits for a worker that takes them")
	}
	return nil
}

// printPlan prints the plan. One that would be refused is an error, as the drain
// would be.
func (cmd *DrainCmd) printPlan(c *Console, p *drainPlan) error {
	var refused error
	if p.Outcome == control.OutcomeRefused {
		refused = fmt.Errorf("drain %s: it would be refused: %s", p.Flow, p.Text)
	}
	if cmd.JSON {
		return errors.Join(refused, c.json(p))
	}
	if refused != nil {
		return refused
	}
	for _, line := range p.lines() {
		c.printf("%s\n", line)
	}
	return nil
}

// lines is the plan for people.
func (p *drainPlan) lines() []string {
	lines := []string{fmt.Sprintf("%s: a drain would be epoch %d, %s at %s; nothing was sent", p.Flow, p.Epoch, p.Mode, p.At)}
	switch p.Outcome {
	case control.OutcomeNothing:
		return []string{fmt.Sprintf("%s: %s", p.Flow, p.Text)}
	case control.OutcomeJoined:
		lines[0] = fmt.Sprintf("%s: the drain of epoch %d, %s at %s, is under way, and the command would join it; nothing was sent", p.Flow, p.Epoch, p.Mode, p.At)
	}
	t := table{
		head:  []string{"STREAM", "CUT", "HEAD", "COMMITTED", "LEFT", "RATE", "TIME"},
		right: []bool{false, true, true, true, true, true, true},
	}
	for _, s := range p.Sources {
		cut := count(s.Cut)
		if s.Rises {
			cut = ">=" + cut
		}
		t.add(s.Stream, cut, count(s.Head), count(s.Committed), count(s.Records), perSecond(s.Rate), seconds(s.Seconds))
	}
	for _, l := range t.lines() {
		lines = append(lines, "  "+l)
	}
	end := table{}
	end.add("left", plural(p.Records, "record"))
	end.add("estimated", seconds(p.Seconds))
	end.add("snapshot", fmt.Sprintf("%s, %s", plural(p.Tasks, "task"), size(p.SnapshotBytes)))
	for _, note := range p.Notes {
		end.add("note", plain(note))
	}
	for _, l := range end.lines() {
		lines = append(lines, "  "+l)
	}
	return lines
}

// seconds is a number of seconds for people, "unknown" without one.
func seconds(s *float64) string {
	if s == nil {
		return "unknown"
	}
	const most = 100 * 365 * 24 * 3600
	return span(time.Duration(min(*s, most) * float64(time.Second)))
}
