package main

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"natsflow/bus"
	"natsflow/testenv"
	"natsflow/worker"
)

// TestFlow runs the example as its users do, drains it at the head and looks at
// what came out.
func TestFlow(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		ctx := t.Context()
		cfg := bus.Config{InProcess: srv.InProcess}
		conn, err := bus.Connect(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(conn.Close)
		if _, err := conn.CreateStream(ctx, bus.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}}); err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			order := fmt.Appendf(nil, `{"id":"o%d","customer":"c%d","amount":%d}`, i, i%2, 100*i)
			if _, err := conn.Publish(ctx, "orders.new", nil, order); err != nil {
				t.Fatal(err)
			}
		}
		run(ctx, t, cfg, conn)
		bucket, err := conn.OpenBucket(ctx, "totals")
		if err != nil {
			t.Fatal(err)
		}
		item, err := bucket.Get(ctx, "c1")
		if err != nil {
			t.Fatal(err)
		}
		var got Total
		if err := json.Unmarshal(item.Value, &got); err != nil {
			t.Fatal(err)
		}
		if want := (Total{Customer: "c1", Orders: 10, Amount: 10000, Largest: 1900}); got != want {
			t.Errorf("total of c1 is %+v, want %+v", got, want)
		}
		large, err := conn.Stream(ctx, "LARGE_ORDERS")
		if err != nil {
			t.Fatal(err)
		}
		if large.Msgs != 10 {
			t.Errorf("%d large orders, want 10", large.Msgs)
		}
	})
}

// run runs the flow until it has drained at the head of its source.
func run(ctx context.Context, t *testing.T, cfg bus.Config, conn *bus.Conn) {
	t.Helper()
	f, err := Flow()
	if err != nil {
		t.Fatal(err)
	}
	asked := false
	err = worker.Run(ctx, f, worker.Config{Bus: cfg, OnStatus: func(s worker.Status) {
		if asked || s.Phase != "running" {
			return
		}
		asked = true
		if _, err := conn.Publish(ctx, "control.drain.orders", nil, []byte(`{"at":"head"}`)); err != nil {
			t.Error(err)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
}
