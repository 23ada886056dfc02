package flow_test

import (
	"fmt"
	"os"
	"strings"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// Orders get the name of their customer out of a bucket.
func ExampleLookup() {
	b := flow.New("orders", flow.Options{Partitions: 1})
	orders := flow.From(b, flow.Source{Stream: "ORDERS"}, flow.DecodeText())
	customers := flow.KeyBy(orders, func(_ *flow.Meta, order string) (string, error) {
		customer, _, _ := strings.Cut(order, " ")
		return customer, nil
	})
	named := flow.Lookup(customers, "name", "CUSTOMERS",
		func(m *flow.Meta, _ string) (string, error) { return m.Key, nil },
		func(_ *flow.Meta, order string, name []byte, ok bool) (string, error) {
			if !ok {
				return order + " (unknown)", nil
			}
			return fmt.Sprintf("%s (%s)", order, name), nil
		})
	flow.To(named, textSink("NAMED"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	r.Set("CUSTOMERS", "c1", "Ann")
	r.Push(flowtest.Record{Data: "c1 tea"}, flowtest.Record{Data: "c2 milk"})
	fmt.Println(strings.Join(r.Data("NAMED"), "\n"))
	// Output:
	// c1 tea (Ann)
	// c2 milk (unknown)
}

// The customers of a region, as the bucket CUSTOMERS has them.
func ExampleDecodeKV() {
	b := flow.New("customers", flow.Options{Partitions: 1})
	changes := flow.From(b, flow.Source{Bucket: "CUSTOMERS", Keys: []string{"eu.>"}}, flow.DecodeKV(flow.DecodeText()))
	region := flow.KeyBy(changes, func(_ *flow.Meta, _ flow.KVUpdate[string]) (string, error) { return "eu", nil })
	customers := flow.Stateful(region, "customers", flow.JSONState[map[string]string](1, nil),
		func(_ *flow.Meta, have *map[string]string, u flow.KVUpdate[string], emit func(string)) error {
			if *have == nil {
				*have = map[string]string{}
			}
			if u.Deleted {
				delete(*have, u.Key)
			} else {
				(*have)[u.Key] = u.Value
			}
			emit(fmt.Sprint(*have))
			return nil
		})
	flow.To(customers, textSink("REGION"))
	f, err := b.Build()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	r := flowtest.New(nil, f)
	r.Set("CUSTOMERS", "eu.1", "Ann")
	r.Set("CUSTOMERS", "us.7", "Joe")
	r.Set("CUSTOMERS", "eu.2", "Bob")
	r.Unset("CUSTOMERS", "eu.1")
	fmt.Println(strings.Join(r.Data("REGION"), "\n"))
	// Output:
	// map[eu.1:Ann]
	// map[eu.1:Ann eu.2:Bob]
	// map[eu.2:Bob]
}
