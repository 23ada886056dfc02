package main

import (
	"context"
	"errors"

	"natsflow/control"
)

// ResumeCmd lets a drained flow go on.
type ResumeCmd struct {
	FlowArg
	Reason string `help:"Text for the history."`
	JSON   bool   `name:"json" help:"Print the outcome as JSON."`
	ConnectionFlags
	PrefixFlag
}

// Validate checks the flags.
func (cmd *ResumeCmd) Validate() error {
	return errors.Join(cmd.FlowArg.Validate(), cmd.ConnectionFlags.Validate(), cmd.PrefixFlag.Validate())
}

// resumeOutcome is what --json prints.
type resumeOutcome struct {
	Flow    string        `json:"flow"`
	Was     control.State `json:"was"`
	State   control.State `json:"state"`
	Epoch   uint64        `json:"epoch"`
	Workers int           `json:"workers"`
}

// Run resumes the flow, which is done when its record says so; a worker that is
// there goes on at once.
func (cmd *ResumeCmd) Run(ctx context.Context, c *Console) error {
	conn, err := cmd.connect(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctl, _, err := cmd.open(ctx, conn, c, cmd.ControlPrefix)
	if err != nil {
		return err
	}
	// A drain that nobody has looked at yet comes before this resume.
	was, err := ctl.CatchUp(ctx)
	if err != nil {
		return err
	}
	rec, err := ctl.Resume(ctx, cmd.Reason)
	if err != nil {
		return err
	}
	who, err := listCrew(ctx, ctl, rec)
	if err != nil {
		return err
	}
	if cmd.JSON {
		return c.json(resumeOutcome{Flow: cmd.Flow, Was: was.State, State: rec.State, Epoch: rec.Epoch, Workers: len(who.members)})
	}
	switch was.State {
	case control.StateRunning:
		c.printf("%s: nothing to do, it is running (epoch %d)\n", cmd.Flow, rec.Epoch)
	case control.StateDraining:
		c.printf("%s: the drain of epoch %d is cancelled, the flow goes on\n", cmd.Flow, was.Epoch)
	default:
		c.printf("%s: resumed, was %s at epoch %d (%s)\n", cmd.Flow, was.State, was.Epoch, control.FormatCut(cutOf(was)))
	}
	if was.State == control.StateFinished {
		c.printf("resumed after finish: %s\n", afterFinish)
	}
	if len(who.members) == 0 {
		c.printf("no worker is running: natsflow worker FLOW.yaml starts one\n")
	}
	return nil
}

func cutOf(rec control.Record) map[string]uint64 {
	if rec.Drain == nil {
		return nil
	}
	return rec.Drain.Cut
}
