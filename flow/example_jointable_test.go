package flow_test

import (
	"fmt"
	"os"
	"strings"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// Orders in the currency rate of their time.
func ExampleJoinTable() {
	b := flow.New("rated", flow.Options{Partitions: 1})
	byCurrency := func(stream string) flow.Stream[string] {
		s := flow.From(b, flow.Source{Stream: stream}, flow.DecodeText())
		return flow.KeyBy(s, func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[0], nil })
	}
	rated, _ := flow.JoinTable(byCurrency("ORDERS"), byCurrency("RATES"), "rated", flow.TableConfig[string, string, string]{
		Kind:   flow.LeftJoin,
		Stream: flow.TextCodec(), Table: flow.TextCodec(),
		Join: func(m *flow.Meta, order, rate *string) (string, bool, error) {
			if rate == nil {
				return fmt.Sprintf("%s: no rate at %s", *order, m.EventTime().Format("15:04")), true, nil
			}
			return fmt.Sprintf("%s at %s", *order, strings.Fields(*rate)[1]), true, nil
		},
	})
	flow.To(rated, textSink("OUT"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	push := func(stream, data string) {
		r.Push(flowtest.Record{Stream: stream, Data: data})
		r.Pause(time.Minute)
	}
	push("ORDERS", "USD 10")
	push("RATES", "USD 1.10")
	push("ORDERS", "USD 20")
	push("RATES", "USD 1.20")
	push("ORDERS", "USD 30")
	fmt.Println(strings.Join(r.Data("OUT"), "\n"))
	// Output:
	// USD 10: no rate at 00:00
	// USD 20 at 1.10
	// USD 30 at 1.20
}
