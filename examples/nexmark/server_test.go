package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/examples/nexmark/gen"
	"natsflow/flow"
	"natsflow/testenv"
	"natsflow/worker"
)

// site is an embedded server with the stream of the events.
type site struct {
	t    *testing.T
	cfg  bus.Config
	conn *bus.Conn
}

func newSite(t *testing.T, srv *testenv.Server) *site {
	t.Helper()
	s := &site{t: t, cfg: bus.Config{InProcess: srv.InProcess}}
	var err error
	if s.conn, err = bus.Connect(t.Context(), s.cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.conn.Close)
	if _, err := s.conn.CreateStream(t.Context(), bus.StreamConfig{Name: stream, Subjects: []string{"nexmark.>"}}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *site) publish(events ...gen.Event) {
	s.t.Helper()
	out := s.conn.NewFeeder(0)
	for _, e := range events {
		if err := out.Publish(e.Subject(), "", e.JSON()); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := out.Flush(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

// run lets some workers run a flow, resumed if it was drained, until it has drained at
// the head of the stream. The drain is asked for when all of them have tasks.
func (s *site) run(f *flow.Flow, workers int) {
	s.t.Helper()
	var ready atomic.Int64
	done := make(chan error, workers)
	for i := range workers {
		var once sync.Once
		cfg := worker.Config{
			Bus: s.cfg, Name: fmt.Sprintf("w%d", i), Resume: true, Logger: slog.New(slog.DiscardHandler), OnStatus: func(st worker.Status) {
				if st.Phase != "running" || st.Tasks == 0 {
					return
				}
				once.Do(func() {
					if ready.Add(1) < int64(workers) {
						return
					}
					if _, err := s.conn.Publish(s.t.Context(), "control.drain."+f.Name(), nil, []byte(`{"at":"head"}`)); err != nil {
						s.t.Error(err)
					}
				})
			},
		}
		go func() { done <- worker.Run(s.t.Context(), f, cfg) }()
	}
	for range workers {
		if err := <-done; err != nil {
			s.t.Fatal(err)
		}
	}
}

// results reads all that a flow has published.
func (s *site) results(sink string) []row {
	s.t.Helper()
	info, err := s.conn.Stream(s.t.Context(), sink)
	if err != nil {
		s.t.Fatal(err)
	}
	cursor, err := s.conn.OpenCursor(s.t.Context(), bus.CursorConfig{Stream: sink})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, enough := context.WithCancel(s.t.Context())
	defer enough()
	var all []row
	err = cursor.Run(ctx, func(m *bus.Msg) error {
		if all = append(all, rowOf(s.t, m.Data)); m.Seq == info.LastSeq {
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

// TestQueries_server runs some of the queries on a server, with a drain in the middle
// and another number of workers behind it.
func TestQueries_server(t *testing.T) {
	for _, q := range queries {
		switch q.name {
		case "q5", "q6", "q11":
		default:
			continue
		}
		t.Run(q.name, func(t *testing.T) {
			cfg := standard
			cfg.Base = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) // as in a bubble
			set := newEvents(t, "server", cfg, 3000)
			want := q.counting(t, set.ask(t, q.name))
			testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
				s := newSite(t, srv)
				s.publish(set.all[:1700]...)
				s.run(q.build(t), 1)
				s.publish(set.all[1700:]...)
				s.publish(set.last(q.closed))
				s.run(q.build(t), 2)
				got := q.counting(t, s.results(q.sink()))
				if diff := gocmp.Diff(want, got); diff != "" {
					t.Errorf("%d rows of SQL, %d of the flow (-SQL +flow):\n%.3000s", len(want), len(got), diff)
				}
			})
		})
	}
}

// TestRun makes events, and says what it can do.
func TestRun(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"events", "-n", "60", "-rate", "1"}, &out); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) != 60 || !strings.Contains(out.String(), `"dateTime":"2015-07-15T00:00:59.000Z"`) {
		t.Errorf("%d lines: %.300s", len(lines), out.String())
	}
	for _, args := range [][]string{nil, {"sing"}, {"run"}, {"run", "q0"}, {"events", "5"}} {
		if err := run(t.Context(), args, &out); err == nil || !strings.HasPrefix(err.Error(), "usage:") {
			t.Errorf("%v: %v", args, err)
		}
	}
	if err := run(t.Context(), []string{"events", "-rate", "-1"}, &out); err == nil || !strings.Contains(err.Error(), "the rate is -1") {
		t.Error(err)
	}
}

// TestRun_feed publishes events twice; they are in the stream once.
func TestRun_feed(t *testing.T) {
	srv := testenv.StartServer(t)
	t.Setenv("NATS_URL", srv.URL())
	for range 2 {
		if err := run(t.Context(), []string{"feed", "-n", "100"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := bus.Connect(t.Context(), server())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	info, err := conn.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	if info.Msgs != 100 {
		t.Errorf("%d events in the stream, want 100", info.Msgs)
	}
	bucket, err := conn.OpenBucket(t.Context(), side)
	if err != nil {
		t.Fatal(err)
	}
	if item, err := bucket.Get(t.Context(), "1234"); err != nil || string(item.Value) != "1234" {
		t.Errorf("1234 in the bucket: %s, %v", item.Value, err)
	}
}
