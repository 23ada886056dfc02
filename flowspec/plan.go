package flowspec

import (
	"fmt"
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
	Stages  []PlanStage  `json:"stages"`
	Sinks   []PlanSink   `json:"sinks"`
}

// PlanSource is a stream that the flow reads.
type PlanSource struct {
	Stream string `json:"stream"`
	// Subjects is empty where all of the stream is read.
	Subjects []string `json:"subjects,omitempty"`
	Format   Format   `json:"format"`
}

// PlanStage is a number of steps between two changes of key.
type PlanStage struct {
	Stage int `json:"stage"`
	// Reads names the source of the stage.
	Reads string `json:"reads"`
	// Key of the records after the key step; empty if the stage has none.
	Key   string     `json:"key,omitempty"`
	Steps []PlanStep `json:"steps"`
}

// PlanStep is a step.
type PlanStep struct {
	ID   string `json:"id"`
	Kind string `json:"kind"`
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
		Sources:        []PlanSource{{s.Source.Stream, s.Source.Subjects, s.Source.Format}},
	}
	if s.Delivery == flow.AtLeastOnce {
		p.Delivery = "at-least-once"
	}
	if s.OnError == flow.Stop {
		p.OnError = "stop"
	}
	stage := PlanStage{Reads: s.Source.Stream}
	for _, st := range s.steps {
		h := st.head()
		step := PlanStep{ID: h.id, Kind: h.kind, Line: h.at.line, Does: st.text()}
		switch st := st.(type) {
		case *keyStep:
			stage.Key = st.text()
		case *aggregateStep:
			step.State, step.StateVersion = "one entry for each key ("+stage.Key+")", stateVersion
		case *dedupeStep:
			step.State = fmt.Sprintf("one entry for each key (%s) and value (%s), kept for %s", stage.Key, st.by.text, formatDuration(st.within))
		case *toStep:
			p.addSink(st)
		}
		stage.Steps = append(stage.Steps, step)
	}
	p.Stages = []PlanStage{stage}
	if s.OnError == flow.DeadLetter {
		p.Sinks = append(p.Sinks, PlanSink{Kind: flow.SinkDead, Name: DeadLetterStream, Subjects: []string{"natsflow.dlq." + s.Name}})
	}
	return p
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
		subjects := "all subjects"
		if len(s.Subjects) > 0 {
			subjects = strings.Join(s.Subjects, ", ")
		}
		_, _ = fmt.Fprintf(w, "  %s\t%s\t%s\n", s.Stream, subjects, s.Format)
	}
	_ = w.Flush() // into a strings.Builder, which cannot fail
	for _, s := range p.Stages {
		fmt.Fprintf(&b, "\nstage %d, reads %s\n", s.Stage, s.Reads)
		for _, step := range s.Steps {
			_, _ = fmt.Fprintf(w, "  %s\t%s\t%s\n", step.ID, step.Kind, step.Does)
			if step.State != "" {
				_, _ = fmt.Fprintf(w, "\t\tstate: %s\n", step.State)
			}
		}
		_ = w.Flush() // into a strings.Builder, which cannot fail
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
