package flowtest_test

import (
	"fmt"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// A test of a flow that counts records by hour. The windows are the same whatever
// stops or dies in between.
func Example() {
	type count struct{ N int }
	b := flow.New("visits", flow.Options{})
	visits := flow.From(b, flow.Source{Stream: "VISITS"}, flow.DecodeText())
	pages := flow.KeyBy(visits, func(_ *flow.Meta, page string) (string, error) { return page, nil })
	hours, _ := flow.Window(pages, "by-hour", flow.Tumbling(time.Hour), flow.WindowAggregator[string, count, string]{
		State: flow.JSONState[count](1, nil),
		Add:   func(_ *flow.Meta, c *count, _ string) error { c.N++; return nil },
		Result: func(m *flow.Meta, w flow.Span, c *count) (string, error) {
			return fmt.Sprintf("%s from %s: %d", m.Key, w.Start.Format("15:04"), c.N), nil
		},
	})
	flow.To(hours, flow.Sink[string]{Stream: "HOURS", Subjects: []string{"hours.*"}, Subject: flow.KeySubject[string]("hours."), Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		panic(err)
	}

	r := flowtest.New(nil, f) // in a test: New(t, f)
	r.Push(flowtest.Record{Data: "home"}, flowtest.Record{Data: "home"})
	r.Drain() // a stop and a start: the window stays open
	r.Pause(59 * time.Minute)
	r.Push(flowtest.Record{Data: "home"})
	r.Crash() // that record is read again
	fmt.Println("before the end of the hour:", r.Data("HOURS"))
	r.Pause(time.Minute)
	fmt.Println("after it:", r.Data("HOURS"))
	// Output:
	// before the end of the hour: []
	// after it: [home from 00:00: 3]
}
