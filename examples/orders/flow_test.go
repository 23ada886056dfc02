package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/testenv"
	"natsflow/worker"
)

// shop is an embedded server with the stream that the flow reads.
type shop struct {
	t    *testing.T
	cfg  bus.Config
	conn *bus.Conn
}

func newShop(t *testing.T, srv *testenv.Server) *shop {
	s := &shop{t: t, cfg: bus.Config{InProcess: srv.InProcess}}
	var err error
	if s.conn, err = bus.Connect(t.Context(), s.cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.conn.Close)
	if _, err := s.conn.CreateStream(t.Context(), bus.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *shop) order(payload string) {
	s.t.Helper()
	if _, err := s.conn.Publish(s.t.Context(), "orders.new", nil, []byte(payload)); err != nil {
		s.t.Fatal(err)
	}
}

// run runs a flow, resumed if it was drained, until it has drained at the head of
// its source.
func (s *shop) run(f *flow.Flow, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
	asked := false
	err = worker.Run(s.t.Context(), f, worker.Config{
		Bus: s.cfg, Resume: true, Logger: slog.New(slog.DiscardHandler), OnStatus: func(st worker.Status) {
			if asked || st.Phase != "running" {
				return
			}
			asked = true
			if _, err := s.conn.Publish(s.t.Context(), "control.drain.orders", nil, []byte(`{"at":"head"}`)); err != nil {
				s.t.Error(err)
			}
		},
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// latest is the latest total of each of the customers.
func (s *shop) latest(customers ...string) []Total {
	s.t.Helper()
	bucket, err := s.conn.OpenBucket(s.t.Context(), "totals")
	if err != nil {
		s.t.Fatal(err)
	}
	var totals []Total
	for _, c := range customers {
		item, err := bucket.Get(s.t.Context(), c)
		if err != nil {
			s.t.Fatal(err)
		}
		var total Total
		if err := json.Unmarshal(item.Value, &total); err != nil {
			s.t.Fatal(err)
		}
		totals = append(totals, total)
	}
	return totals
}

// messages reads all that a stream holds.
func (s *shop) messages(stream string) []bus.Msg {
	s.t.Helper()
	info, err := s.conn.Stream(s.t.Context(), stream)
	if err != nil {
		s.t.Fatal(err)
	}
	cursor, err := s.conn.OpenCursor(s.t.Context(), bus.CursorConfig{Stream: stream})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, enough := context.WithCancel(s.t.Context())
	defer enough()
	var all []bus.Msg
	err = cursor.Run(ctx, func(m *bus.Msg) error {
		if all = append(all, *m); m.Seq == info.LastSeq {
			enough()
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		s.t.Fatal(err)
	}
	if err := cursor.Close(s.t.Context()); err != nil {
		s.t.Error(err)
	}
	return all
}

// TestFlow runs the example as its users do, drains it at the head and looks at
// what came out.
func TestFlow(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		s := newShop(t, srv)
		for i := range 20 {
			s.order(fmt.Sprintf(`{"id":"o%d","customer":"c%d","amount":%d}`, i, i%2, 100*i))
		}
		s.run(Flow())
		want := []Total{{Customer: "c1", Orders: 10, Amount: 10000, Largest: 1900}}
		if diff := cmp.Diff(want, s.latest("c1")); diff != "" {
			t.Error(diff)
		}
		large, err := s.conn.Stream(t.Context(), "LARGE_ORDERS")
		if err != nil {
			t.Fatal(err)
		}
		if large.Msgs != 10 {
			t.Errorf("%d large orders, want 10", large.Msgs)
		}
	})
}

// TestFlow_deadLetters checks what becomes of orders that are none.
func TestFlow_deadLetters(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		s := newShop(t, srv)
		s.order(`{"id":"1","amount":5000}`)
		s.order(`not an order`)
		s.order(`{"id":"2","customer":"ann","amount":2.5}`)
		s.run(Flow())
		want := []Total{{Customer: "ann", Orders: 1, Amount: 2.5, Largest: 2.5}}
		if diff := cmp.Diff(want, s.latest("ann")); diff != "" {
			t.Error(diff)
		}
		reasons := map[string]string{}
		for _, m := range s.messages("NATSFLOW_DLQ") {
			reasons[string(m.Data)] = strings.Join(m.Header[flow.HeaderDeadError], "|")
		}
		if len(reasons) != 2 || reasons[`{"id":"1","amount":5000}`] != "the order has no customer" ||
			!strings.HasPrefix(reasons["not an order"], "decode: ") {
			t.Errorf("dead letters %v", reasons)
		}
		if all := s.messages("TOTALS"); len(all) != 1 || all[0].Subject != "totals.ann" {
			t.Errorf("totals %+v", all)
		}
	})
}

// totalV1 is what version 1 kept of a customer.
type totalV1 struct {
	Customer string  `json:"customer"`
	Orders   int     `json:"orders"`
	Amount   float64 `json:"amount"`
}

// flowOf is another version of the flow: the part that matters for its state, which
// it keeps as version 1 did.
func flowOf(version int) (*flow.Flow, error) {
	b := flow.New("orders", flow.Options{})
	orders := flow.From(b, flow.Source{Stream: "ORDERS"}, flow.DecodeJSON[Order]())
	totals := flow.Stateful(flow.KeyBy(orders, customer), "total", flow.JSONState[totalV1](version, nil),
		func(_ *flow.Meta, t *totalV1, o Order, emit func(totalV1)) error {
			t.Customer = o.Customer
			t.Orders++
			t.Amount += o.Amount
			emit(*t)
			return nil
		})
	flow.ToKV(totals, flow.KVSink[totalV1]{Bucket: "totals", Encode: flow.EncodeJSON[totalV1]()})
	return b.Build()
}

// TestFlow_migration runs version 1 on a server, and then the present one: it goes
// on with the totals of version 1, also with those that it does not meet before
// its second run.
func TestFlow_migration(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		s := newShop(t, srv)
		for _, amount := range []int{700, 200} {
			s.order(fmt.Sprintf(`{"id":"a%d","customer":"ann","amount":%d}`, amount, amount))
			s.order(fmt.Sprintf(`{"id":"b%d","customer":"bob","amount":%d}`, amount, 2*amount))
		}
		s.run(flowOf(1))
		want := []Total{{Customer: "ann", Orders: 2, Amount: 900}, {Customer: "bob", Orders: 2, Amount: 1800}}
		if diff := cmp.Diff(want, s.latest("ann", "bob")); diff != "" {
			t.Fatalf("of version 1: %s", diff)
		}

		s.order(`{"id":"a3","customer":"ann","amount":50}`)
		s.run(Flow())
		want[0] = Total{Customer: "ann", Orders: 3, Amount: 950, Largest: 50}
		if diff := cmp.Diff(want, s.latest("ann", "bob")); diff != "" {
			t.Errorf("of version 2: %s", diff)
		}

		s.order(`{"id":"a4","customer":"ann","amount":10}`)
		s.order(`{"id":"b3","customer":"bob","amount":20}`)
		s.run(Flow())
		want = []Total{{Customer: "ann", Orders: 4, Amount: 960, Largest: 50}, {Customer: "bob", Orders: 3, Amount: 1820, Largest: 20}}
		if diff := cmp.Diff(want, s.latest("ann", "bob")); diff != "" {
			t.Errorf("of the second run of version 2: %s", diff)
		}
	})
}

// TestFlow_unknownState checks that state of an unknown version keeps the flow from
// starting, and stays as it is.
func TestFlow_unknownState(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		s := newShop(t, srv)
		s.order(`{"id":"1","customer":"ann","amount":7}`)
		s.run(flowOf(3))
		f, err := Flow()
		if err != nil {
			t.Fatal(err)
		}
		err = worker.Run(t.Context(), f, worker.Config{Bus: s.cfg, Resume: true, Logger: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), "totals of version 3 are not known here") {
			t.Fatalf("it ended with %v", err)
		}

		s.order(`{"id":"2","customer":"ann","amount":1}`)
		s.run(flowOf(3))
		want := []Total{{Customer: "ann", Orders: 2, Amount: 8}}
		if diff := cmp.Diff(want, s.latest("ann")); diff != "" {
			t.Error(diff)
		}
	})
}
