package flow_test

import (
	"fmt"
	"strings"

	"natsflow/flow"
)

// A stream can be split, and streams of one type can be joined.
func ExampleBranch() {
	b := flow.New("levels", flow.Options{})
	lines := flow.From(b, flow.Source{Stream: "LOGS"}, flow.DecodeText())
	byHost := flow.KeyBy(lines, func(m *flow.Meta, _ string) (string, error) { return m.Subject, nil })
	errs, rest := flow.Branch(byHost, func(_ *flow.Meta, v string) (bool, error) {
		return strings.HasPrefix(v, "error"), nil
	})
	loud := flow.Map(errs, func(_ *flow.Meta, v string) (string, error) { return strings.ToUpper(v), nil })
	flow.To(flow.Merge(loud, rest), flow.Sink[string]{
		Stream: "ALL", Subjects: []string{"all.*"}, Subject: flow.KeySubject[string]("all."), Encode: flow.EncodeText(),
	})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	printResults(f, "info: started", "error: no disk")
	// Output:
	// all.lines=2Ex info: started
	// all.lines=2Ex ERROR: NO DISK
}
