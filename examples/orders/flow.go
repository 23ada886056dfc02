package main

import (
	"encoding/json"
	"errors"
	"fmt"

	"natsflow/flow"
)

// Order is a record of the stream ORDERS.
type Order struct {
	ID       string  `json:"id"`
	Customer string  `json:"customer"`
	Amount   float64 `json:"amount"`
}

// Total is what the flow keeps, and says, of a customer.
type Total struct {
	Customer string  `json:"customer"`
	Orders   int     `json:"orders"`
	Amount   float64 `json:"amount"`
	Largest  float64 `json:"largest"`
}

// largeOrder is the amount from which an order is of interest by itself.
const largeOrder = 1000

// totalState stores totals as JSON, in their second version.
var totalState = flow.JSONState(2, migrateTotal)

// migrateTotal reads what an earlier version of this program has stored. Version 1
// knew no largest order: of a customer from then it is the largest from now on.
// Any other version is refused, and then the flow does not start and its state
// stays as it is: better than to misread what a later version has stored.
func migrateTotal(version int, data []byte, t *Total) error {
	if version != 1 {
		return fmt.Errorf("totals of version %d are not known here", version)
	}
	return json.Unmarshal(data, t)
}

// errNoCustomer makes an order a dead letter: without it, all of them would add up
// to the total of a customer without a name.
var errNoCustomer = errors.New("the order has no customer")

func customer(_ *flow.Meta, o Order) (string, error) {
	if o.Customer == "" {
		return "", errNoCustomer
	}
	return o.Customer, nil
}

// Flow keeps a running total for each customer, in a stream with every change and
// in a bucket with the latest, and sorts out the large orders.
func Flow() (*flow.Flow, error) {
	b := flow.New("orders", flow.Options{})
	orders := flow.From(b, flow.Source{Stream: "ORDERS"}, flow.DecodeJSON[Order]())
	byCustomer := flow.KeyBy(orders, customer)

	large, _ := flow.Branch(byCustomer, func(_ *flow.Meta, o Order) (bool, error) { return o.Amount >= largeOrder, nil })
	flow.To(large, flow.Sink[Order]{
		Stream: "LARGE_ORDERS", Subjects: []string{"large.*"}, Subject: flow.KeySubject[Order]("large."), Encode: flow.EncodeJSON[Order](),
	})

	totals := flow.Stateful(byCustomer, "total", totalState, func(_ *flow.Meta, t *Total, o Order, emit func(Total)) error {
		t.Customer = o.Customer
		t.Orders++
		t.Amount += o.Amount
		t.Largest = max(t.Largest, o.Amount)
		emit(*t)
		return nil
	})
	flow.To(totals, flow.Sink[Total]{
		Stream: "TOTALS", Subjects: []string{"totals.*"}, Subject: flow.KeySubject[Total]("totals."), Encode: flow.EncodeJSON[Total](),
	})
	flow.ToKV(totals, flow.KVSink[Total]{Bucket: "totals", Encode: flow.EncodeJSON[Total]()})
	return b.Build()
}
