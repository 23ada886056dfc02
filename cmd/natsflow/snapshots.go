package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/kvsnap"
)

// SnapshotsCmd looks at the stored state of a flow.
type SnapshotsCmd struct {
	Ls   SnapshotsLsCmd   `cmd:"" help:"List the tasks of a flow with the size of their state and their positions."`
	Show SnapshotsShowCmd `cmd:"" help:"List the entries of a task's log, or of all tasks."`
}

// SnapshotsLsCmd lists tasks.
type SnapshotsLsCmd struct {
	FlowArg
	JSON bool `name:"json" help:"Print JSON."`
	ConnectionFlags
}

// Validate checks the flags.
func (cmd *SnapshotsLsCmd) Validate() error {
	return errors.Join(cmd.FlowArg.Validate(), cmd.ConnectionFlags.Validate())
}

// SnapshotsShowCmd lists entries.
type SnapshotsShowCmd struct {
	FlowArg
	Task string `arg:"" optional:"" help:"Task, as STAGE.PARTITION or the number of a partition (default: all)."`
	JSON bool   `name:"json" help:"Print JSON."`
	ConnectionFlags
}

// Validate checks the flags.
func (cmd *SnapshotsShowCmd) Validate() error {
	_, err := parseTask(cmd.Task)
	return errors.Join(cmd.FlowArg.Validate(), cmd.ConnectionFlags.Validate(), err)
}

// parseTask reads "0.3" or "3".
func parseTask(s string) (kvsnap.TaskID, error) {
	if s == "" {
		return kvsnap.TaskID{}, nil
	}
	stage, partition, ok := strings.Cut(s, ".")
	if !ok {
		stage, partition = "0", s
	}
	a, err1 := strconv.ParseUint(stage, 10, 31)
	b, err2 := strconv.ParseUint(partition, 10, 31)
	if err1 != nil || err2 != nil {
		return kvsnap.TaskID{}, fmt.Errorf("task %q: must be STAGE.PARTITION, such as 0.3", s)
	}
	return kvsnap.TaskID{Stage: int(a), Partition: int(b)}, nil
}

// openStore opens the snapshots of a flow, without creating anything.
func openStore(ctx context.Context, conn *bus.Conn, flow string) (*kvsnap.Store, error) {
	bucket, err := conn.OpenBucket(ctx, "natsflow_"+flow)
	if err != nil {
		return nil, err
	}
	return kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: flow}), nil
}

// findStore opens the snapshots of a flow that is known, or says why there are
// none.
func (a *FlowArg) findStore(ctx context.Context, conn *bus.Conn) (*kvsnap.Store, error) {
	if _, err := a.find(ctx, conn); err != nil {
		return nil, err
	}
	store, err := openStore(ctx, conn, a.Flow)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, fmt.Errorf("flow %s has no snapshots yet: it has never run", a.Flow)
	}
	return store, err
}

// taskJSON is what --json prints of a task.
type taskJSON struct {
	Task       string            `json:"task"`
	Kind       string            `json:"kind"`
	Entry      uint64            `json:"entry"`
	Generation uint64            `json:"generation"`
	Owner      string            `json:"owner"`
	Time       time.Time         `json:"time"`
	Epoch      uint64            `json:"epoch"`
	Final      bool              `json:"final"`
	Offsets    map[string]uint64 `json:"offsets"`
	Published  uint64            `json:"published"`
	Records    uint64            `json:"records"`
	Results    uint64            `json:"results"`
	Dead       uint64            `json:"dead_letters"`
	Entries    int               `json:"entries"`
	Base       uint64            `json:"base"`
	BaseBytes  int64             `json:"base_bytes"`
	Chunks     int               `json:"chunks"`
	Bytes      int64             `json:"bytes"`
	Problem    string            `json:"problem,omitempty"`
}

// Run lists the tasks. A damaged log is listed, and is an error in the end.
func (cmd *SnapshotsLsCmd) Run(ctx context.Context, c *Console) error {
	conn, err := cmd.connect(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	store, err := cmd.findStore(ctx, conn)
	if err != nil {
		return err
	}
	tasks, err := store.Tasks(ctx)
	if err != nil {
		return err
	}
	if cmd.JSON {
		list := make([]taskJSON, 0, len(tasks))
		for _, t := range tasks {
			list = append(list, newTaskJSON(t))
		}
		if err := c.json(list); err != nil {
			return err
		}
	} else {
		printTasks(c, cmd.Flow, tasks)
	}
	return taskProblems(c, tasks)
}

func newTaskJSON(t kvsnap.TaskInfo) taskJSON {
	return taskJSON{
		Task: t.Task.String(), Kind: t.Kind, Entry: t.N, Generation: t.Generation, Owner: t.Owner, Time: t.Time,
		Epoch: t.Head.Epoch, Final: t.Head.Final, Offsets: t.Head.Offsets, Published: t.Head.Published,
		Records: t.Head.Records, Results: t.Head.Results, Dead: t.Head.DeadLetters,
		Entries: t.Entries, Base: t.Base, BaseBytes: t.BaseBytes, Chunks: t.Chunks, Bytes: t.Bytes, Problem: t.Problem,
	}
}

func printTasks(c *Console, flow string, tasks []kvsnap.TaskInfo) {
	t := table{
		head:  []string{"TASK", "LAST", "ENTRY", "GEN", "EPOCH", "OFFSETS", "RECORDS", "RESULTS", "ENTRIES", "BASE", "BYTES", "OWNER"},
		right: []bool{false, false, true, true, true, false, true, true, true, true, true, false},
	}
	var entries int
	var bytes int64
	var results uint64
	for _, i := range tasks {
		base := "-"
		if i.Base > 0 {
			base = fmt.Sprintf("%d (%s)", i.Base, size(i.BaseBytes))
		}
		epoch := strconv.FormatUint(i.Head.Epoch, 10)
		if i.Head.Final {
			epoch += " final"
		}
		t.add(i.Task.String(), i.Kind, strconv.FormatUint(i.N, 10), strconv.FormatUint(i.Generation, 10), epoch,
			control.FormatCut(i.Head.Offsets), count(i.Head.Records), count(i.Head.Results), count(i.Entries), base, size(i.Bytes), i.Owner)
		entries, bytes, results = entries+i.Entries, bytes+i.Bytes, results+i.Head.Results
	}
	t.print(c.Out, "")
	c.printf("%s of flow %s in bucket natsflow_%s: %d entries, %s, %s results\n", plural(len(tasks), "task"), flow, flow, entries, size(bytes), count(results))
}

// taskProblems says what is wrong with the logs.
func taskProblems(c *Console, tasks []kvsnap.TaskInfo) error {
	n := 0
	for _, t := range tasks {
		if t.Problem != "" {
			n++
			c.notef("task %s: %s\n", t.Task, t.Problem)
		}
	}
	if n > 0 {
		return fmt.Errorf("the logs of %s are damaged; nothing of them was changed", plural(n, "task"))
	}
	return nil
}

// entryJSON is what --json prints of an entry.
type entryJSON struct {
	Task       string            `json:"task"`
	Key        string            `json:"key"`
	Kind       string            `json:"kind"`
	Entry      uint64            `json:"entry"`
	Generation uint64            `json:"generation"`
	Owner      string            `json:"owner"`
	Time       time.Time         `json:"time"`
	Epoch      uint64            `json:"epoch"`
	Final      bool              `json:"final"`
	Offsets    map[string]uint64 `json:"offsets"`
	Published  uint64            `json:"published"`
	Results    uint64            `json:"results"`
	Outputs    int               `json:"outputs"`
	From       uint64            `json:"base_from,omitempty"`
	Bytes      int64             `json:"bytes"`
	Sections   []sectionJSON     `json:"sections,omitempty"`
	Problem    string            `json:"problem,omitempty"`
}

type sectionJSON struct {
	Name   string `json:"name"`
	Raw    int64  `json:"raw"`
	Stored int64  `json:"stored"`
	Chunks int    `json:"chunks,omitempty"`
}

// Run lists the entries.
func (cmd *SnapshotsShowCmd) Run(ctx context.Context, c *Console) error {
	one, err := parseTask(cmd.Task)
	if err != nil {
		return err
	}
	conn, err := cmd.connect(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	store, err := cmd.findStore(ctx, conn)
	if err != nil {
		return err
	}
	tasks := []kvsnap.TaskID{one}
	if cmd.Task == "" {
		infos, err := store.Tasks(ctx)
		if err != nil {
			return err
		}
		tasks = nil
		for _, t := range infos {
			tasks = append(tasks, t.Task)
		}
	}
	list := []entryJSON{}
	damaged := 0
	for _, task := range tasks {
		entries, err := store.Entries(ctx, task)
		if errors.Is(err, bus.ErrNotFound) {
			return fmt.Errorf("flow %s has no task %s; natsflow snapshots ls %s lists them", cmd.Flow, task, cmd.Flow)
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Problem != "" {
				damaged++
			}
			list = append(list, newEntryJSON(task, e))
		}
	}
	if cmd.JSON {
		if err := c.json(list); err != nil {
			return err
		}
	} else {
		printEntries(c, list)
	}
	if damaged > 0 {
		return fmt.Errorf("%d entries are damaged; nothing of them was changed", damaged)
	}
	return nil
}

func newEntryJSON(task kvsnap.TaskID, e kvsnap.EntryInfo) entryJSON {
	j := entryJSON{
		Task: task.String(), Key: e.Key, Kind: e.Kind, Entry: e.N, Generation: e.Generation, Owner: e.Owner, Time: e.Time,
		Epoch: e.Head.Epoch, Final: e.Head.Final, Offsets: e.Head.Offsets, Published: e.Head.Published, Results: e.Head.Results,
		Outputs: e.Outputs, From: e.From, Bytes: e.Bytes, Problem: e.Problem,
	}
	for _, s := range e.Sections {
		j.Sections = append(j.Sections, sectionJSON{Name: s.Name, Raw: s.Raw, Stored: s.Stored, Chunks: s.Chunks})
	}
	return j
}

func printEntries(c *Console, list []entryJSON) {
	t := table{
		head:  []string{"TASK", "ENTRY", "KIND", "GEN", "TIME", "OFFSETS", "PUBLISHED", "OUTPUTS", "BYTES", "HOLDS", "OWNER"},
		right: []bool{false, true, false, true, false, false, true, true, true, false, false},
	}
	for _, e := range list {
		if e.Problem != "" {
			t.add(e.Task, "?", "damaged", "", "", "", "", "", size(e.Bytes), plain(e.Problem))
			continue
		}
		var holds []string
		for _, s := range e.Sections {
			h := s.Name + " " + size(s.Raw)
			if s.Chunks > 0 {
				h += " in " + plural(s.Chunks, "chunk")
			}
			holds = append(holds, h)
		}
		kind := e.Kind
		if e.Final {
			kind += " (final)"
		}
		t.add(e.Task, strconv.FormatUint(e.Entry, 10), kind, strconv.FormatUint(e.Generation, 10), e.Time.Local().Format("01-02 15:04:05.000"),
			control.FormatCut(e.Offsets), strconv.FormatUint(e.Published, 10), strconv.Itoa(e.Outputs), size(e.Bytes), strings.Join(holds, ", "), e.Owner)
	}
	t.print(c.Out, "")
}
