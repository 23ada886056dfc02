package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"natsflow/bus"
	"natsflow/control"
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
	Flow       string          `json:"flow"`
	State      control.State   `json:"state"`
	Epoch      uint64          `json:"epoch"`
	Partitions int             `json:"partitions"`
	Drain      *control.Drain  `json:"drain,omitempty"`
	Sources    []sourceStatus  `json:"sources"`
	Workers    []member        `json:"workers"`
	Results    uint64          `json:"results"`
	Dead       uint64          `json:"dead_letters"`
	Trouble    string          `json:"trouble,omitempty"`
	LastError  string          `json:"last_error,omitempty"`
	ErrorTime  time.Time       `json:"last_error_time,omitzero"`
	Report     *control.Report `json:"report,omitempty"`
	History    []historyEntry  `json:"history,omitempty"`
	Created    time.Time       `json:"created"`
	Updated    time.Time       `json:"updated"`
	Prefix     string          `json:"control_prefix"`
}

type historyEntry = control.HistoryEntry

// sourceStatus is how far a source has been processed.
type sourceStatus struct {
	Stream string `json:"stream"`
	// Head is the last sequence of the stream.
	Head      uint64 `json:"head"`
	Read      uint64 `json:"read"`
	Committed uint64 `json:"committed"`
	// Lag is the number of sequences behind Committed; some of them may be of
	// subjects that the flow does not read.
	Lag uint64 `json:"lag"`
	// Rate is in records per second.
	Rate  float64 `json:"rate"`
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
	if st.Workers, err = listMembers(ctx, ctl); err != nil {
		return st, err
	}
	active := activeStatus(st.Workers)
	if active != nil {
		st.Results, st.Dead, st.Trouble = active.Results, active.DeadLetters, active.Trouble
	} else {
		// Nobody works on it: what is stored tells.
		p, err := storedProgress(ctx, conn, rec.Flow, rec.Partitions)
		if err != nil {
			return st, err
		}
		st.Results, st.Dead = p.Results, p.Dead
		active = &worker.Status{Sources: map[string]worker.SourceStatus{}}
		for name := range rec.Sources {
			active.Sources[name] = worker.SourceStatus{Read: p.Offsets[name], Committed: p.Offsets[name]}
		}
	}
	for _, name := range sortedKeys(rec.Sources) {
		st.Sources = append(st.Sources, collectSource(ctx, conn, name, active.Sources[name]))
	}
	return st, nil
}

// activeStatus is what the member says that has tasks; nil if there is none.
func activeStatus(members []member) *worker.Status {
	i := slices.IndexFunc(members, func(m member) bool { return m.Active && m.Status != nil && len(m.Status.Sources) > 0 })
	if i < 0 {
		return nil
	}
	return members[i].Status
}

func collectSource(ctx context.Context, conn *bus.Conn, name string, at worker.SourceStatus) sourceStatus {
	s := sourceStatus{Stream: name, Read: at.Read, Committed: at.Committed, Rate: at.Rate}
	info, err := conn.Stream(ctx, name)
	if err != nil {
		s.Error = err.Error()
		return s
	}
	s.Head = info.LastSeq
	if s.Head > s.Committed {
		s.Lag = s.Head - s.Committed
	}
	return s
}

// stored is what the task logs say of a flow.
type stored struct {
	Tasks         int
	Offsets       map[string]uint64
	Results, Dead uint64
	Records       uint64
	Bytes         int64
}

// storedProgress reads the heads of the task logs. The position of a source is
// the lowest of all tasks; a task without a log is at the beginning.
func storedProgress(ctx context.Context, conn *bus.Conn, flow string, partitions int) (stored, error) {
	p := stored{Offsets: map[string]uint64{}}
	store, err := openStore(ctx, conn, flow)
	if errors.Is(err, bus.ErrNotFound) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	tasks, err := store.Tasks(ctx)
	if err != nil {
		return p, err
	}
	for i, t := range tasks {
		p.Tasks++
		p.Results += t.Head.Results
		p.Dead += t.Head.DeadLetters
		p.Records += t.Head.Records
		p.Bytes += t.Bytes
		for source, seq := range t.Head.Offsets {
			if low, ok := p.Offsets[source]; i == 0 || (ok && seq < low) {
				p.Offsets[source] = seq
			}
		}
		for source := range p.Offsets {
			if _, ok := t.Head.Offsets[source]; !ok {
				p.Offsets[source] = 0
			}
		}
	}
	if len(tasks) < partitions {
		clear(p.Offsets)
	}
	return p, nil
}
