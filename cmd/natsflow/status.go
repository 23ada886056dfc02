package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
	"natsflow/worker"
)

// watchEvery is how often --watch looks.
const watchEvery = time.Second

// StatusCmd shows flows.
type StatusCmd struct {
	Flow  string `arg:"" optional:"" help:"Name of the flow (default: all flows)."`
	JSON  bool   `name:"json" help:"Print JSON; with --watch, a line each second."`
	Watch bool   `short:"w" help:"Look again each second until interrupted."`
	ConnectionFlags
}

// Validate checks the flags.
func (cmd *StatusCmd) Validate() error {
	if cmd.Flow == "" {
		return cmd.ConnectionFlags.Validate()
	}
	return errors.Join(control.ValidFlow(cmd.Flow), cmd.ConnectionFlags.Validate())
}

// flowStatus is what is known of a flow.
type flowStatus struct {
	Flow       string         `json:"flow"`
	State      control.State  `json:"state"`
	Epoch      uint64         `json:"epoch"`
	Partitions int            `json:"partitions"`
	Drain      *control.Drain `json:"drain,omitempty"`
	Sources    []sourceStatus `json:"sources"`
	// Exchange is what is on its way from one stage to another; nil with one stage.
	Exchange *exchangeStatus `json:"exchange,omitempty"`
	Workers  []member        `json:"workers"`
	Tasks    []taskStatus    `json:"tasks"`
	// TasksDone is how many have come to the end of the drain of this epoch,
	// TasksOwnerless how many of the others no worker has.
	TasksDone      int    `json:"tasks_done"`
	TasksOwnerless int    `json:"tasks_without_owner"`
	Results        uint64 `json:"results"`
	Dead           uint64 `json:"dead_letters"`
	Late           uint64 `json:"late,omitempty"`
	// StateKeys is what the workers say, StateBytes the size of the snapshots.
	StateKeys  int             `json:"state_keys"`
	StateBytes uint64          `json:"state_bytes"`
	Trouble    string          `json:"trouble,omitempty"`
	Warnings   []string        `json:"warnings,omitempty"`
	LastError  string          `json:"last_error,omitempty"`
	ErrorTime  time.Time       `json:"last_error_time,omitzero"`
	Report     *control.Report `json:"report,omitempty"`
	History    []historyEntry  `json:"history,omitempty"`
	Created    time.Time       `json:"created"`
	Updated    time.Time       `json:"updated"`
	Prefix     string          `json:"control_prefix"`

	crew      crew
	ownerless []string
}

type historyEntry = control.HistoryEntry

// sourceStatus is how far a source has been processed.
type sourceStatus struct {
	Stream string `json:"stream"`
	// Origin is the stream that the flow was told to read, if Stream is one of the
	// flow's own that takes over what is there; Waiting is how many messages are still
	// to come from it, about.
	Origin  string `json:"origin,omitempty"`
	Waiting uint64 `json:"waiting,omitempty"`
	// Head is the last sequence of the stream.
	Head uint64 `json:"head"`
	// Read is the furthest that any task has come, Committed what all of them have
	// committed and published.
	Read      uint64 `json:"read"`
	Committed uint64 `json:"committed"`
	// Lag is the number of sequences behind Committed; some of them may be of
	// subjects that the flow does not read.
	Lag uint64 `json:"lag"`
	// Rate is in records per second, of the fastest worker: each reads all of it.
	Rate float64 `json:"rate"`
	// Cut is where a drain that is under way ends, if that is known.
	Cut   *uint64 `json:"cut,omitempty"`
	Error string  `json:"error,omitempty"`
}

// Run shows the status once, or again and again.
func (cmd *StatusCmd) Run(ctx context.Context, c *Console) error {
	conn, err := cmd.connect(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	if !cmd.Watch {
		flows, err := cmd.collect(ctx, conn)
		if err != nil {
			return err
		}
		if cmd.JSON {
			return c.json(cmd.value(flows))
		}
		for _, line := range cmd.lines(c, flows) {
			c.printf("%s\n", line)
		}
		return nil
	}
	return cmd.watch(ctx, c, conn)
}

func (cmd *StatusCmd) watch(ctx context.Context, c *Console, conn *bus.Conn) error {
	var r *region
	if c.OutTerminal && !cmd.JSON {
		r = newRegion(c, c.Out)
		defer r.done()
	}
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for first := true; ; first = false {
		flows, err := cmd.collect(ctx, conn)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && (first || !bus.Retryable(err)):
			return err
		case err != nil:
			c.notef("natsflow: %v\n", err)
		case cmd.JSON:
			line, err := json.Marshal(cmd.value(flows))
			if err != nil {
				return err
			}
			c.printf("%s\n", line)
		case r != nil:
			r.draw(cmd.lines(c, flows))
		default:
			for _, line := range append(cmd.lines(c, flows), "") {
				c.printf("%s\n", line)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// value is what is printed as JSON: one flow if one was asked for, or a list.
func (cmd *StatusCmd) value(flows []flowStatus) any {
	if cmd.Flow != "" && len(flows) == 1 {
		return flows[0]
	}
	return flows
}

// collect asks for everything.
func (cmd *StatusCmd) collect(ctx context.Context, conn *bus.Conn) ([]flowStatus, error) {
	var recs []control.Record
	if cmd.Flow != "" {
		rec, err := (&FlowArg{Flow: cmd.Flow}).find(ctx, conn)
		if err != nil {
			return nil, err
		}
		recs = []control.Record{rec}
	} else {
		var err error
		if recs, err = control.Flows(ctx, conn); err != nil {
			return nil, err
		}
	}
	flows := make([]flowStatus, 0, len(recs))
	for _, rec := range recs {
		st, err := collectFlow(ctx, conn, rec)
		if err != nil {
			return nil, err
		}
		flows = append(flows, st)
	}
	return flows, nil
}

func collectFlow(ctx context.Context, conn *bus.Conn, rec control.Record) (flowStatus, error) {
	st := flowStatus{
		Flow: rec.Flow, State: rec.State, Epoch: rec.Epoch, Partitions: rec.Partitions, Drain: rec.Drain, Report: rec.Report,
		LastError: rec.LastError, ErrorTime: rec.LastErrorTime, History: rec.History, Created: rec.Created, Updated: rec.Updated,
		Prefix: rec.Control.Prefix, Sources: []sourceStatus{},
	}
	ctl, err := control.Open(ctx, control.Config{Conn: conn, Flow: rec.Flow, Prefix: rec.Control.Prefix})
	if err != nil {
		return st, err
	}
	if st.crew, err = listCrew(ctx, ctl, rec); err != nil {
		return st, err
	}
	st.Workers, st.Tasks = st.crew.members, st.crew.tasks
	st.TasksDone, st.ownerless = st.crew.count(rec)
	st.TasksOwnerless = len(st.ownerless)
	var heads map[string]kvsnap.Head
	if len(st.crew.silent(rec)) > 0 {
		// All logs have to be read for that, so not while the workers tell it.
		if heads, err = storedHeads(ctx, conn, rec.Flow); err != nil {
			return st, err
		}
	}
	p := st.crew.progress(rec, heads)
	st.Late = p.Late
	st.Results, st.Dead, st.StateKeys, st.Trouble, st.Warnings = p.Results, p.Dead, p.Keys, p.Trouble, p.Warnings
	if st.StateBytes, err = snapshotBytes(ctx, conn, rec.Flow); err != nil {
		return st, err
	}
	for _, name := range sortedKeys(rec.Sources) {
		st.Sources = append(st.Sources, collectSource(ctx, conn, rec, name, p.Sources[name]))
	}
	if name, ok := exchange(rec); ok {
		st.Exchange = collectExchange(ctx, conn, rec, name, p.Sources[name])
	}
	return st, nil
}

// exchangeStatus is how much a flow has on its way from one stage to another.
type exchangeStatus struct {
	Stream string `json:"stream"`
	// Frames that some task has still to commit, of those that are Stored: a frame is
	// removed some time after that.
	Frames uint64 `json:"frames"`
	Stored uint64 `json:"stored"`
	Bytes  uint64 `json:"bytes"`
	Error  string `json:"error,omitempty"`
}

func collectExchange(ctx context.Context, conn *bus.Conn, rec control.Record, name string, at worker.SourceStatus) *exchangeStatus {
	x := &exchangeStatus{Stream: name}
	info, err := conn.Stream(ctx, name)
	if err == nil {
		x.Bytes = info.Bytes
		x.Stored, err = countFrames(ctx, conn, rec.Flow, 0, info.LastSeq)
	}
	if err == nil && !rec.State.Stopped() {
		x.Frames, err = countFrames(ctx, conn, rec.Flow, at.Committed+1, info.LastSeq)
	}
	if err != nil {
		x.Error = err.Error()
	}
	return x
}

// countFrames counts the frames in the exchange of a flow: what is there besides are
// watermarks.
func countFrames(ctx context.Context, conn *bus.Conn, name string, from, through uint64) (uint64, error) {
	marks, err := conn.Count(ctx, flow.ExchangeStream(name), []string{flow.ExchangeMarksAll(name)}, from, through)
	if err != nil {
		return 0, err
	}
	all, err := conn.Count(ctx, flow.ExchangeStream(name), []string{flow.ExchangeAll(name)}, from, through)
	return above(all, marks), err
}

// snapshotBytes is the size of the snapshots of a flow, as a drain reports it.
func snapshotBytes(ctx context.Context, conn *bus.Conn, flow string) (uint64, error) {
	info, err := conn.Stream(ctx, "KV_natsflow_"+flow)
	if errors.Is(err, bus.ErrNotFound) {
		return 0, nil
	}
	return info.Bytes, err
}

func collectSource(ctx context.Context, conn *bus.Conn, rec control.Record, name string, at worker.SourceStatus) sourceStatus {
	s := sourceStatus{Stream: name, Read: at.Read, Committed: at.Committed, Rate: at.Rate}
	if rec.State == control.StateDraining {
		if cut, ok := rec.Drain.Cut[name]; ok {
			s.Cut = &cut
		}
	}
	s.Origin = rec.Sources[name].Origin
	if s.Origin != "" {
		s.fromIntake(ctx, conn)
		return s
	}
	info, err := conn.Stream(ctx, name)
	if err != nil {
		s.Error = err.Error()
		return s
	}
	s.Head = info.LastSeq
	s.Lag = above(s.Head, s.Committed)
	return s
}

// fromIntake looks at a stream of the flow's own and at what is still to come from its
// origin, which counts as lag.
func (s *sourceStatus) fromIntake(ctx context.Context, conn *bus.Conn) {
	in, err := conn.Intake(ctx, s.Stream)
	if err == nil {
		s.Waiting, err = conn.Waiting(ctx, in)
		s.Head = in.LastSeq
		s.Lag = above(s.Head, s.Committed) + s.Waiting
	}
	switch {
	case err != nil:
		s.Error = err.Error()
	case in.Problem != "":
		s.Error = fmt.Sprintf("nothing comes over from stream %s: %s", s.Origin, in.Problem)
	}
}

// above is how much a is higher than b.
func above(a, b uint64) uint64 { return a - min(a, b) }
