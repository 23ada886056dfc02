package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/worker"
)

// comparison is what a flow file changes in a flow.
type comparison struct {
	Flow  string        `json:"flow"`
	State control.State `json:"state"`
	Epoch uint64        `json:"epoch"`
	// StoredHash identifies the definition that the flow had last, Hash that of the
	// file.
	StoredHash       string `json:"stored_definition"`
	Hash             string `json:"definition"`
	StoredPartitions int    `json:"stored_partitions"`
	Partitions       int    `json:"partitions"`
	StoredStages     int    `json:"stored_stages"`
	Stages           int    `json:"stages"`
	control.Change
	// Workers run another definition than that of the file.
	Workers []string `json:"workers_of_another_definition"`
	// DrainFirst: the flow must be drained before the file can be started. That ends
	// the workers, too.
	DrainFirst bool `json:"drain_first"`
	// Needs are the flags that the worker needs.
	Needs []string `json:"needs"`
	// Problem is why the file cannot be started, whatever the flags; empty if it
	// can.
	Problem string `json:"problem,omitempty"`

	file string
	// origins of the streams that are the flow's own.
	origins map[string]string
}

// compare prints what the flow file changes in the flow.
func (cmd *ValidateCmd) compare(ctx context.Context, c *Console, f *flow.Flow) error {
	if f.Name() != cmd.Against {
		return fmt.Errorf("%s defines the flow %s, which has nothing in common with the flow %s", cmd.File, f.Name(), cmd.Against)
	}
	conn, err := cmd.connect(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctl, rec, err := (&FlowArg{Flow: cmd.Against}).open(ctx, conn, c, "")
	if err != nil {
		return err
	}
	def, problem := worker.Definition(ctx, conn, f)
	if problem != nil && !errors.Is(problem, worker.ErrSource) {
		return problem
	}
	members, _, err := ctl.Members(ctx)
	if err != nil {
		return err
	}
	is := newComparison(rec, def, members, problem)
	is.file = cmd.File
	if cmd.JSON {
		if err := c.json(is); err != nil {
			return err
		}
	} else {
		is.print(c)
	}
	return is.err()
}

// newComparison compares a definition with the record of its flow. problem is what
// is wrong with the sources of the definition, nil if nothing is.
func newComparison(rec control.Record, def control.Definition, members []control.MemberInfo, problem error) comparison {
	for name, src := range def.Sources {
		if src.Created.IsZero() && problem != nil {
			// Not looked at, or not there: that it was created anew is not known.
			src.Created = rec.Sources[name].Created
			if former, ok := rec.FormerSources[name]; ok {
				src.Created = former.Created
			}
			def.Sources[name] = src
		}
	}
	is := comparison{
		Flow: rec.Flow, State: rec.State, Epoch: rec.Epoch, StoredHash: rec.Hash, Hash: def.Hash,
		StoredPartitions: rec.Partitions, Partitions: def.Partitions, StoredStages: max(rec.Stages, 1), Stages: max(def.Stages, 1), Change: rec.Compare(def), Workers: []string{}, Needs: []string{},
	}
	is.origins = map[string]string{}
	for _, sources := range []map[string]control.SourceRecord{rec.FormerSources, rec.Sources, def.Sources} {
		for name, src := range sources {
			if src.Origin != "" {
				is.origins[name] = "from " + src.Origin
			}
		}
	}
	for _, m := range members {
		if m.Hash != def.Hash {
			is.Workers = append(is.Workers, m.Name)
		}
	}
	def.AcceptChanges, def.AcceptRecreated = true, true
	if problem == nil {
		problem = rec.Fits(def)
	}
	if problem != nil {
		is.Problem = problem.Error()
		return is
	}
	if len(is.LeftOver) > 0 {
		is.Needs = append(is.Needs, "--accept-changes")
	}
	if len(is.SourcesRecreated) > 0 {
		is.Needs = append(is.Needs, "--accept-gap")
	}
	is.DrainFirst = !rec.State.Stopped() &&
		(len(is.LeftOver) > 0 || len(is.Workers) > 0 || rec.Exchanging(def) || rec.State == control.StateDraining && rec.Hash != def.Hash)
	return is
}

// err is nil if the flow can go on as the file says without a flag that gives
// something up.
func (is comparison) err() error {
	switch {
	case is.Problem != "":
		return fmt.Errorf("%s cannot go on as flow %s: %s", is.file, is.Flow, is.Problem)
	case len(is.Needs) > 0:
		return fmt.Errorf("%s as flow %s needs %s: %s", is.file, is.Flow, strings.Join(is.Needs, " "), strings.Join(is.losses(), "; "))
	}
	return nil
}

// losses say what the flags give up.
func (is comparison) losses() []string {
	var texts []string
	for _, s := range is.LeftOver {
		texts = append(texts, fmt.Sprintf("the state of step %q (%s) is lost", s.ID, s.Kind))
	}
	for _, name := range is.SourcesRecreated {
		texts = append(texts, fmt.Sprintf("stream %s is not the one that the flow has read", name))
	}
	return texts
}

// print prints the comparison for people.
func (is comparison) print(c *Console) {
	c.printf("flow %s, %s in epoch %d: definition %s, and %s in %s\n", is.Flow, is.State, is.Epoch, is.StoredHash, is.same(), is.file)
	for _, line := range is.table().lines() {
		c.printf("  %s\n", line)
	}
	if is.Problem != "" {
		return
	}
	if is.DrainFirst {
		running := "it is " + string(is.State)
		if n := len(is.Workers); n > 0 {
			running = plural(n, "worker") + " of another definition: " + strings.Join(is.Workers, ", ")
		}
		c.printf("first   natsflow drain %s (%s)\n", is.Flow, running)
	}
	if is.State.Stopped() && len(is.Workers) > 0 {
		c.printf("first   stop %s of another definition: %s\n", plural(len(is.Workers), "worker"), strings.Join(is.Workers, ", "))
	}
	flags := is.Needs
	if is.DrainFirst || is.State.Stopped() {
		flags = append([]string{"--resume"}, flags...)
	}
	c.printf("start   natsflow worker %s\n", strings.Join(append([]string{is.file}, flags...), " "))
}

func (is comparison) same() string {
	if is.Hash == is.StoredHash {
		return "the same"
	}
	return is.Hash
}

func (is comparison) table() *table {
	t := &table{}
	partitions := "as they are"
	if is.Partitions != is.StoredPartitions {
		partitions = fmt.Sprintf("cannot change, the flow has %d", is.StoredPartitions)
	}
	t.add("partitions", strconv.Itoa(is.Partitions), "", partitions)
	switch {
	case is.Stages > is.StoredStages:
		t.add("stages", strconv.Itoa(is.Stages), "", fmt.Sprintf("the flow has %d, the tasks of the others begin without state", is.StoredStages))
	case is.Stages < is.StoredStages:
		t.add("stages", strconv.Itoa(is.Stages), "", fmt.Sprintf("the flow has %d, the tasks of the others are left behind", is.StoredStages))
	case is.Stages > 1:
		t.add("stages", strconv.Itoa(is.Stages), "", "as they are")
	}
	for _, s := range is.Kept {
		text := "keeps its state"
		if s.Stored != s.Version {
			text += fmt.Sprintf(", of version %d, in version %d", s.Stored, s.Version)
		}
		t.add("step", s.ID, s.Kind, text)
	}
	taken := map[string]bool{}
	for _, id := range is.Taken {
		taken[id] = true
	}
	for _, s := range is.New {
		text := "is new and begins without state"
		if taken[s.ID] {
			text = "is new and needs another id: there is state of another step under this one"
		}
		t.add("step", s.ID, s.Kind, text)
	}
	for _, s := range is.LeftOver {
		t.add("step", s.ID, s.Kind, "is gone: its state is left over")
	}
	for _, sources := range []struct {
		names []string
		text  string
	}{
		{is.SourcesKept, "goes on from its position"},
		{is.SourcesBack, "is back and goes on from where it was left"},
		{is.SourcesNew, "is new and read from its first message"},
		{is.SourcesRecreated, "is another stream than the one that was read"},
		{is.SourcesGone, "is not read any more"},
	} {
		for _, name := range sources.names {
			t.add("source", name, is.origins[name], sources.text)
		}
	}
	return t
}
