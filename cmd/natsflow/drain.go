package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"natsflow/bus"
	"natsflow/control"
)

const (
	// drainPoll is how often a drain looks at the flow.
	drainPoll = 100 * time.Millisecond
	// drainLook is how often at most it looks at the workers, which costs more.
	drainLook = 300 * time.Millisecond
)

// errNotInTime ends the wait for a drain.
var errNotInTime = errors.New("not drained in time")

// DrainCmd stops a flow at a cut and waits for it.
type DrainCmd struct {
	FlowArg
	Mode   string        `enum:"suspend,finish" default:"suspend" help:"suspend keeps windows and all else that is open for the resume; finish ends the input: they close, and each aggregate emits its results once more."`
	At     string        `default:"now" help:"Where to cut: now, head, STREAM:SEQ (several with commas), a sequence, an RFC 3339 time, or the JSON of a command's at."`
	Reason string        `help:"Text for the report and the history."`
	DryRun bool          `help:"Only say what the drain would do: its cut, how much is left to it, how long that may take."`
	Wait   time.Duration `default:"60s" help:"Patience until the flow is drained; exit code 1 after it, while the drain goes on. 0 only sends the command."`
	JSON   bool          `name:"json" help:"Print the outcome as JSON."`
	ConnectionFlags
	PrefixFlag
}

// Validate checks the flags.
func (cmd *DrainCmd) Validate() error {
	errs := []error{cmd.FlowArg.Validate(), cmd.ConnectionFlags.Validate(), cmd.PrefixFlag.Validate()}
	if _, err := parseAt(cmd.At); err != nil {
		errs = append(errs, err)
	}
	if cmd.Wait < 0 {
		errs = append(errs, fmt.Errorf("--wait=%v is negative", cmd.Wait))
	}
	return errors.Join(errs...)
}

// parseAt reads the flag --at. A bare sequence has the empty name as its source
// until the flow's only source is known.
func parseAt(s string) (control.At, error) {
	var at control.At
	bad := fmt.Errorf(`--at=%s: must be now, head, STREAM:SEQ, a sequence, a time such as 2026-01-02T03:04:05Z, or {"seq":{STREAM:N}} or {"time":TIME}`, s)
	switch {
	case s == control.AtNow || s == control.AtHead:
		return control.At{Kind: s}, nil
	case strings.HasPrefix(s, "{"):
		if err := at.UnmarshalJSON([]byte(s)); err != nil {
			return at, fmt.Errorf("--at=%s: %w", s, err)
		}
		return at, nil
	}
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return control.At{Kind: control.AtTime, Time: t.UTC()}, nil
	}
	at = control.At{Kind: control.AtSeq, Seq: map[string]uint64{}}
	for part := range strings.SplitSeq(s, ",") {
		i := strings.LastIndexByte(part, ':')
		seq, err := strconv.ParseUint(part[i+1:], 10, 64)
		name := part[:max(i, 0)]
		if _, twice := at.Seq[name]; err != nil || i == 0 || twice {
			return at, bad
		}
		at.Seq[name] = seq
	}
	if _, bare := at.Seq[""]; bare && len(at.Seq) > 1 {
		return at, bad
	}
	return at, nil
}

// resolveAt gives a bare sequence the name of the flow's only source.
func resolveAt(at control.At, rec control.Record) (control.At, error) {
	seq, bare := at.Seq[""]
	if !bare {
		return at, nil
	}
	if len(rec.Sources) != 1 {
		return at, fmt.Errorf("--at=%d: the flow has %d sources; say which, as STREAM:%d", seq, len(rec.Sources), seq)
	}
	for name := range rec.Sources {
		at.Seq = map[string]uint64{name: seq}
	}
	return at, nil
}

// drainOutcome is what --json prints.
type drainOutcome struct {
	Flow    string          `json:"flow"`
	State   control.State   `json:"state"`
	Epoch   uint64          `json:"epoch"`
	Command uint64          `json:"command"`
	Drained bool            `json:"drained"`
	Error   string          `json:"error,omitempty"`
	Report  *control.Report `json:"report,omitempty"`
}

// Run sends the command and waits.
func (cmd *DrainCmd) Run(ctx context.Context, c *Console) error {
	at, err := parseAt(cmd.At)
	if err != nil {
		return err
	}
	conn, err := cmd.connect(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctl, rec, err := cmd.open(ctx, conn, c, cmd.ControlPrefix)
	if err != nil {
		return err
	}
	if at, err = resolveAt(at, rec); err != nil {
		return err
	}
	if cmd.DryRun {
		return cmd.dryRun(ctx, c, conn, rec, at)
	}
	seq, err := ctl.Send(ctx, control.Command{Kind: control.KindDrain, Flow: cmd.Flow, Mode: control.Mode(cmd.Mode), At: at, Reason: cmd.Reason})
	if err != nil {
		return err
	}
	// Any process may apply a command: what is refused is known at once, and what
	// is not is on its way though no worker may be running.
	if rec, err = ctl.CatchUp(ctx); err != nil {
		return fmt.Errorf("the command was sent (%d), but: %w", seq, err)
	}
	w := &drainWait{c: c, conn: conn, ctl: ctl, flow: cmd.Flow, seq: seq, epoch: rec.Epoch, quiet: cmd.JSON}
	rec, err = w.wait(ctx, rec, cmd.Wait)
	return cmd.report(c, rec, seq, err)
}

func (cmd *DrainCmd) report(c *Console, rec control.Record, seq uint64, err error) error {
	sent := cmd.Wait == 0 && errors.Is(err, errNotInTime)
	if sent {
		err = nil
	}
	drained := err == nil && !sent
	if cmd.JSON {
		out := drainOutcome{Flow: cmd.Flow, State: rec.State, Epoch: rec.Epoch, Command: seq, Drained: drained}
		if err != nil {
			out.Error = err.Error()
		}
		if drained {
			out.Report = rec.Report
		}
		return errors.Join(err, c.json(out))
	}
	switch {
	case drained:
		printReport(c, rec)
	case sent:
		c.printf("%s: the drain was begun (command %d, epoch %d); not waiting for it\n", cmd.Flow, seq, rec.Epoch)
	}
	return err
}

// drainVerdict says what a record means for the drain that command seq asked for
// and that has the given epoch: done, an error, or neither, which is to wait.
func drainVerdict(rec control.Record, seq, epoch uint64) (done bool, err error) {
	i := slices.IndexFunc(rec.History, func(h control.HistoryEntry) bool { return h.Seq == seq })
	outcome := ""
	if i >= 0 {
		outcome = rec.History[i].Outcome
	}
	switch {
	case strings.HasPrefix(outcome, "refused: "):
		return false, fmt.Errorf("drain %s: %s", rec.Flow, outcome)
	case rec.Report != nil && rec.Report.Epoch >= epoch:
		return true, nil
	case rec.State == control.StateRunning:
		if outcome == "" {
			outcome = "cancelled"
		}
		return false, fmt.Errorf("drain %s: not drained, it is running: %s", rec.Flow, outcome)
	case rec.Epoch != epoch:
		return false, fmt.Errorf("drain %s: the drain of epoch %d was cancelled; epoch %d is %s", rec.Flow, epoch, rec.Epoch, rec.State)
	}
	return false, nil
}

// drainWait waits for a drain and shows how far it is.
type drainWait struct {
	c     *Console
	conn  *bus.Conn
	ctl   *control.Control
	flow  string
	seq   uint64
	epoch uint64
	quiet bool

	region *region
	said   string
	saidAt time.Time
	// lookedAt is when the workers were looked at.
	lookedAt time.Time
}

// wait returns the last record that was seen, with errNotInTime in the chain of
// the error when the patience ran out.
func (w *drainWait) wait(ctx context.Context, rec control.Record, patience time.Duration) (control.Record, error) {
	if w.c.ErrTerminal && !w.quiet {
		w.region = newRegion(w.c, w.c.Err)
		defer w.region.done()
		defer w.region.clear()
	}
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	poll := time.NewTicker(drainPoll)
	defer poll.Stop()
	for {
		if done, err := drainVerdict(rec, w.seq, w.epoch); done || err != nil {
			return rec, err
		}
		if patience == 0 {
			return rec, errNotInTime
		}
		w.show(ctx, rec)
		select {
		case <-poll.C:
		case <-deadline.C:
			return rec, fmt.Errorf("drain %s: %w (%v); the drain goes on: natsflow status %s", w.flow, errNotInTime, patience, w.flow)
		case <-ctx.Done():
			return rec, fmt.Errorf("drain %s: interrupted; the drain goes on: natsflow resume %s cancels it", w.flow, w.flow)
		}
		next, err := w.ctl.Record(ctx)
		switch {
		case err == nil:
			rec = next
		case ctx.Err() == nil && !bus.Retryable(err):
			return rec, err
		}
	}
}

// show prints the progress: in place on a terminal, or else a line at most each
// second, when it has changed.
func (w *drainWait) show(ctx context.Context, rec control.Record) {
	if w.quiet {
		return
	}
	if time.Since(w.lookedAt) < drainLook {
		return
	}
	w.lookedAt = time.Now()
	who, err := listCrew(ctx, w.ctl, rec)
	if err != nil {
		return // the server is away for a moment; the next look will tell
	}
	line := drainProgress(rec, who, w.lookedAt)
	if w.region != nil {
		w.region.draw([]string{line})
		return
	}
	if line != w.said && time.Since(w.saidAt) >= time.Second {
		w.said, w.saidAt = line, time.Now()
		w.c.notef("%s\n", line)
	}
}
