package flow_test

import (
	"fmt"
	"os"
	"strings"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// All votes for a name: what there is each minute, at a stop, and in the end.
func ExampleGlobalWindow() {
	votes := flow.GlobalWindow()
	votes.Early = time.Minute
	votes.OnDrain = flow.EmitPartial

	b := flow.New("votes", flow.Options{Partitions: 1})
	names := flow.From(b, flow.Source{Stream: "VOTES"}, flow.DecodeText())
	keyed := flow.KeyBy(names, func(_ *flow.Meta, name string) (string, error) { return name, nil })
	counts, _ := flow.Window(keyed, "votes", votes, flow.WindowAggregator[string, int, string]{
		State: flow.JSONState[int](1, nil),
		Add:   func(_ *flow.Meta, n *int, _ string) error { *n++; return nil },
		Result: func(m *flow.Meta, _ flow.Span, n *int) (string, error) {
			return fmt.Sprintf("%s %d (%v)", m.Key, *n, m.Pane()), nil
		},
	})
	flow.To(counts, textSink("COUNTS"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	r.Push(flowtest.Record{Data: "ann"}, flowtest.Record{Data: "bob"}, flowtest.Record{Data: "ann"})
	r.Pause(time.Minute)
	r.Push(flowtest.Record{Data: "bob"})
	r.Drain()
	r.Push(flowtest.Record{Data: "bob"})
	r.Finish()
	fmt.Println(strings.Join(r.Data("COUNTS"), "\n"))
	// Output:
	// ann 2 (early)
	// bob 1 (early)
	// ann 2 (partial)
	// bob 2 (partial)
	// ann 2 (final)
	// bob 3 (final)
}
