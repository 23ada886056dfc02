package flowspec

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"natsflow/flow"
)

// Plan describes what a flow will do: for people by String, for scripts as JSON.
type Plan struct {
	Flow       string `json:"flow"`
	Partitions int    `json:"partitions"`
	// Delivery is exactly-once or at-least-once; OnError dead-letter or stop.
	Delivery       string `json:"delivery"`
	OnError        string `json:"on_error"`
	CommitInterval string `json:"commit_interval"`

	Sources []PlanSource `json:"sources"`
	Tables  []PlanTable  `json:"tables,omitempty"`
	Stages  []PlanStage  `json:"stages"`
	Sinks   []PlanSink   `json:"sinks"`
}

// PlanSource is a stream, or a bucket, that the flow reads.
type PlanSource struct {
	// Name by which lists of steps read it; empty where none does.
	Name   string `json:"name,omitempty"`
	Stream string `json:"stream"`
	// Subjects is empty where all of the stream is read.
	Subjects []string `json:"subjects,omitempty"`
	// Bucket is the KV bucket that the stream holds, Keys its filter; empty for a
	// stream, and where all keys are read.
	Bucket string   `json:"kv,omitempty"`
	Keys   []string `json:"keys,omitempty"`
	Format Format   `json:"format"`
	// PartitionBy are the tokens of the subject by which the server sorts the
	// records, in a mirror of the stream; empty where it does not.
	PartitionBy []int `json:"partition_by,omitempty"`
	// Time says where the records have their time; empty where it is the stream's
	// timestamp.
	Time string `json:"time,omitempty"`
}

// PlanStage is a number of steps between two changes of key.
type PlanStage struct {
	Stage int `json:"stage"`
	// Reads names the streams of the stage, with commas between them.
	Reads string `json:"reads"`
	// Key of the records after the key steps, with semicolons between them; empty
	// if the stage has none.
	Key string `json:"key,omitempty"`
	// Lists are the named lists of steps, each behind those that it reads; empty
	// where the steps are one list.
	Lists []PlanList `json:"lists,omitempty"`
	Steps []PlanStep `json:"steps"`
}

// PlanList is a named list of steps.
type PlanList struct {
	Name string `json:"name"`
	Line int    `json:"line"`
	// From are the sources and the lists that it reads. Several are merged.
	From []string `json:"from"`
	// To are the lists that read it. Each gets all records.
	To []string `json:"to,omitempty"`
	// Key of the records at its end; empty if they have none.
	Key string `json:"key,omitempty"`
}

// PlanStep is a step.
type PlanStep struct {
	ID   string `json:"id"`
	Kind string `json:"kind"`
	// List that the step belongs to; empty where the steps are one list.
	List string `json:"list,omitempty"`
	Line int    `json:"line"`
	// Does says what the step does, in the words of the file.
	Does string `json:"does"`
	// State says what a stateful step keeps; empty for the others.
	State string `json:"state,omitempty"`
	// StateVersion is the version of its encoding.
	StateVersion int `json:"state_version,omitempty"`
}

// PlanSink is a stream or a bucket that the flow publishes to.
type PlanSink struct {
	// Steps that publish to it; empty for the dead letters.
	Steps []string `json:"steps,omitempty"`
	// Kind is stream, kv or dead-letter.
	Kind flow.SinkKind `json:"kind"`
	Name string        `json:"name"`
	// Subjects that the stream gets when it does not exist and is created.
	Subjects []string `json:"created_with_subjects,omitempty"`
}

// DeadLetterStream is the stream that takes the dead letters of all flows.
const DeadLetterStream = "NATSFLOW_DLQ"

// Plan describes the flow.
func (s *Spec) Plan() Plan {
	p := Plan{
		Flow: s.Name, Partitions: s.Partitions, Delivery: "exactly-once", OnError: "dead-letter",
		CommitInterval: formatDuration(s.CommitInterval),
	}
	if s.Delivery == flow.AtLeastOnce {
		p.Delivery = "at-least-once"
	}
	if s.OnError == flow.Stop {
		p.OnError = "stop"
	}
	var streams []string
	for _, src := range s.Sources {
		planned := PlanSource{Name: src.Name, Stream: src.Stream, Subjects: src.Subjects, Bucket: src.Bucket, Keys: src.Keys, Format: src.Format, PartitionBy: src.PartitionBy}
		if src.Time != nil {
			planned.Time = src.Time.String()
		}
		p.Sources = append(p.Sources, planned)
		streams = append(streams, src.Stream)
	}
	p.Stages = []PlanStage{{Reads: strings.Join(streams, ", "), Steps: []PlanStep{}}}
	planner := planner{Plan: &p, keys: map[string][]string{}, stageKeys: [][]string{nil}}
	for _, l := range s.lists {
		planner.list(l, s.readers(l.name))
	}
	for i, keys := range planner.stageKeys {
		p.Stages[i].Key = strings.Join(keys, "; ")
	}
	if len(p.Stages) > 1 {
		p.Sinks = append(p.Sinks, PlanSink{Kind: flow.SinkExchange, Name: flow.ExchangeStream(s.Name), Subjects: []string{flow.ExchangeAll(s.Name)}})
	}
	if s.OnError == flow.DeadLetter {
		p.Sinks = append(p.Sinks, PlanSink{Kind: flow.SinkDead, Name: DeadLetterStream, Subjects: []string{"natsflow.dlq." + s.Name}})
	}
	return p
}

// planStep describes a step of the list.
func (l *stepList) planStep(st step, key string) PlanStep {
	h := st.head()
	planned := PlanStep{ID: h.id, Kind: h.kind, List: l.name, Line: h.at.line, Does: st.text()}
	switch st := st.(type) {
	case *keyStep:
		if st.change {
			planned.Does += fmt.Sprintf("; the records go on to stage %d", h.stage+1)
		}
	case *aggregateStep:
		planned.State, planned.StateVersion = "one entry for each key ("+key+")", stateVersion
		if st.windows != nil {
			planned.Kind = kindWindow
			planned.State += ", with its open windows"
			planned.StateVersion += windowVersion
		}
		if st.ttl > 0 {
			planned.State += fmt.Sprintf(", kept for %s after its last record", formatDuration(st.ttl))
		}
	case *joinStep:
		planned.State, planned.StateVersion = st.state(key), joinVersion
		if st.table {
			planned.Kind = kindTable
		}
	case *dedupeStep:
		planned.State = fmt.Sprintf("one entry for each key (%s) and value (%s), kept for %s", key, st.by.text, formatDuration(st.within))
	}
	return planned
}

// planner puts the steps of the lists into the stages of a plan.
type planner struct {
	*Plan
	// keys are those of the records at the end of the lists so far, stageKeys those of
	// the records in each stage.
	keys      map[string][]string
	stageKeys [][]string
}

// list adds a list, which may have steps in several stages.
func (p *planner) list(l *stepList, readers []string) {
	var key []string
	for _, name := range l.from {
		key = union(key, p.keys[name])
	}
	first := true
	for i, st := range l.steps {
		stage, change := st.head().stage, false
		if st, ok := st.(*keyStep); ok && !st.change {
			key = union(key, []string{st.text()})
			p.stageKeys[stage] = union(p.stageKeys[stage], key)
		} else if ok {
			change = true
		}
		at := &p.Stages[stage]
		at.Steps = append(at.Steps, l.planStep(st, strings.Join(key, "; ")))
		for _, to := range sinksOf(st) {
			p.addSink(to)
		}
		if look, ok := st.(*lookupStep); ok {
			p.addTable(look)
		}
		end := i == len(l.steps)-1
		if l.name != "" && (end || change) {
			part := PlanList{Name: l.name, Line: l.at.line, From: l.from, Key: strings.Join(key, "; ")}
			if !first {
				part.From = []string{l.name}
			}
			if end {
				part.To = readers
			}
			at.Lists = append(at.Lists, part)
			first = false
		}
		if change {
			key = []string{st.text()}
			p.enter(stage+1, key)
		}
	}
	p.keys[l.name] = key
}

// enter notes that records with keys come to a later stage.
func (p *planner) enter(stage int, keys []string) {
	if stage == len(p.Stages) {
		p.Stages = append(p.Stages, PlanStage{Stage: stage, Reads: flow.ExchangeStream(p.Flow), Steps: []PlanStep{}})
		p.stageKeys = append(p.stageKeys, nil)
	}
	p.stageKeys[stage] = union(p.stageKeys[stage], keys)
}

// union appends to a what of b it does not have.
func union[T comparable](a, b []T) []T {
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}

// readers returns the lists that read what has that name.
func (s *Spec) readers(name string) []string {
	var names []string
	for _, l := range s.lists {
		if l.reads(name) {
			names = append(names, l.name)
		}
	}
	return names
}

// addSink adds a sink, or the step to one that is there already.
func (p *Plan) addSink(st *toStep) {
	var subject []string
	if st.sink == flow.SinkStream {
		subject = []string{st.template.wildcard}
	}
	for i := range p.Sinks {
		sink := &p.Sinks[i]
		if sink.Kind != st.sink || sink.Name != st.name {
			continue
		}
		sink.Steps = append(sink.Steps, st.id)
		for _, s := range subject {
			if !slices.Contains(sink.Subjects, s) {
				sink.Subjects = append(sink.Subjects, s)
			}
		}
		return
	}
	p.Sinks = append(p.Sinks, PlanSink{Steps: []string{st.id}, Kind: st.sink, Name: st.name, Subjects: subject})
}

// String prints the plan for people.
func (p Plan) String() string {
	var b strings.Builder
	failures := "records that fail go to the dead-letter stream"
	if p.OnError == "stop" {
		failures = "a record that fails stops the flow"
	}
	fmt.Fprintf(&b, "flow %s: %d partitions, %s, a commit every %s at most, %s\n", p.Flow, p.Partitions, p.Delivery, p.CommitInterval, failures)
	b.WriteString("\nsources\n")
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, s := range p.Sources {
		line := []string{s.Stream, s.filters(), string(s.Format)}
		if s.Name != "" {
			line = append([]string{s.Name}, line...)
		}
		if len(s.PartitionBy) > 0 {
			line = append(line, "through a mirror, partitioned by "+tokensOf(s.PartitionBy))
		}
		if s.Time != "" {
			line = append(line, s.Time)
		}
		_, _ = fmt.Fprintf(w, "  %s\n", strings.Join(line, "\t"))
	}
	_ = w.Flush() // into a strings.Builder, which cannot fail
	p.printTables(&b, w)
	for _, s := range p.Stages {
		fmt.Fprintf(&b, "\nstage %d, reads %s\n", s.Stage, s.Reads)
		for _, step := range s.Steps {
			if len(s.Lists) == 0 {
				printStep(w, step, "  ")
			}
		}
		_ = w.Flush() // into a strings.Builder, which cannot fail
		for _, l := range s.Lists {
			fmt.Fprintf(&b, "\n  %s\n", l)
			for _, step := range s.Steps {
				if step.List == l.Name {
					printStep(w, step, "    ")
				}
			}
			_ = w.Flush() // into a strings.Builder, which cannot fail
		}
	}
	b.WriteString("\nsinks\n")
	for _, s := range p.Sinks {
		created := "created if it is not there"
		if len(s.Subjects) > 0 {
			created += ", with " + strings.Join(s.Subjects, ", ")
		}
		_, _ = fmt.Fprintf(w, "  %s\t%s\t%s\n", s.Name, s.Kind, created)
	}
	_ = w.Flush() // into a strings.Builder, which cannot fail
	return b.String()
}

func printStep(w io.Writer, step PlanStep, indent string) {
	_, _ = fmt.Fprintf(w, "%s%s\t%s\t%s\n", indent, step.ID, step.Kind, step.Does)
	if step.State != "" {
		_, _ = fmt.Fprintf(w, "\t\tstate: %s\n", step.State)
	}
}

// String says what the list reads and where its records go.
func (l PlanList) String() string {
	s := l.Name + ": reads " + strings.Join(l.From, ", ")
	if len(l.From) > 1 {
		s += ", merged"
	}
	if len(l.To) > 0 {
		s += "; read by " + strings.Join(l.To, ", ")
	}
	return s
}
