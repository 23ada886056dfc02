package flow_test

import (
	"fmt"
	"time"

	"natsflow/flow"
)

// Repeats of a value are dropped for a time, by the timestamps of the source.
// The records of this example are a second apart.
func ExampleDedupe() {
	b := flow.New("once", flow.Options{})
	events := flow.From(b, flow.Source{Stream: "EVENTS"}, flow.DecodeText())
	byKind := flow.KeyBy(events, func(_ *flow.Meta, v string) (string, error) { return v[:1], nil })
	once := flow.Dedupe(byKind, "seen", 3*time.Second, func(_ *flow.Meta, v string) (string, error) { return v, nil })
	flow.To(once, flow.Sink[string]{
		Stream: "ONCE", Subjects: []string{"once.*"}, Subject: flow.KeySubject[string]("once."), Encode: flow.EncodeText(),
	})
	f, err := b.Build()
	if err != nil {
		fmt.Println(err)
		return
	}
	printResults(f, "a1", "a1", "a2", "a1")
	// Output:
	// once.a a1
	// once.a a2
	// once.a a1
}
