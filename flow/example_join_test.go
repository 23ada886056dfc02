package flow_test

import (
	"fmt"
	"os"
	"strings"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// Each order with the payments of the hour after it, and what nobody has paid.
func ExampleJoin() {
	b := flow.New("paid", flow.Options{Partitions: 1})
	byOrder := func(stream string) flow.Stream[string] {
		s := flow.From(b, flow.Source{Stream: stream}, flow.DecodeText())
		return flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[0], nil })
	}
	paid, _, _ := flow.Join(byOrder("ORDERS"), byOrder("PAYMENTS"), "paid", flow.JoinConfig[string, string, string]{
		Kind: flow.LeftJoin, After: time.Hour,
		Left: flow.TextCodec(), Right: flow.TextCodec(),
		Join: func(m *flow.Meta, order, payment *string) (string, bool, error) {
			if payment == nil {
				return fmt.Sprintf("%s from %s: not paid", *order, m.EventTime().Format("15:04")), true, nil
			}
			return fmt.Sprintf("%s: paid by %s", *order, strings.Fields(*payment)[1]), true, nil
		},
	})
	flow.To(paid, textSink("OUT"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	r.Push(flowtest.Record{Stream: "ORDERS", Data: "o1 20€"}, flowtest.Record{Stream: "ORDERS", Data: "o2 30€"})
	r.Pause(10 * time.Minute)
	r.Push(flowtest.Record{Stream: "PAYMENTS", Data: "o1 card"})
	r.Drain() // o2 goes on waiting
	r.Pause(time.Hour)
	fmt.Println(strings.Join(r.Data("OUT"), "\n"))
	// Output:
	// o1 20€: paid by card
	// o2 30€ from 00:00: not paid
}
