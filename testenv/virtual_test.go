package testenv

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv/embed"
)

// TestBubble_canary fails when a new version of nats-server no longer runs in
// virtual time, before dozens of tests fail for reasons hard to see.
func TestBubble_canary(t *testing.T) {
	for range 3 { // each bubble must find the process as the first one did
		Bubble(t, func(t *testing.T, s *Server) {
			_, js := connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
			mustStream(t, js)
			time.Sleep(time.Hour)
			if late := time.Since(time.Unix(0, ats.AccessTime())); late < 0 || late > ats.TickInterval {
				t.Fatalf("the server's coarse clock is %v behind the virtual one after an hour: "+
					"nats-server/v2/server/ats (%s) no longer starts its goroutine inside the bubble; "+
					"adapt testenv.Bubble to it", late, "v"+embed.Version)
			}
		})
	}
}

func TestBubble(t *testing.T) {
	// lease puts a key that lives for 15 s and says when it was seen to expire.
	lease := func(t *testing.T, js jetstream.JetStream) time.Duration {
		t.Helper()
		kv, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "b", LimitMarkerTTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := kv.Create(t.Context(), "lease", nil, jetstream.KeyTTL(15*time.Second)); err != nil {
			t.Fatal(err)
		}
		w, err := kv.Watch(t.Context(), "lease", jetstream.UpdatesOnly())
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := w.Stop(); err != nil {
				t.Error(err)
			}
		}()
		for u := range w.Updates() {
			if u != nil && u.Operation() != jetstream.KeyValuePut {
				return time.Since(start)
			}
		}
		t.Fatal("the watch ended")
		return 0
	}
	t.Run("a lease expires on the dot", func(t *testing.T) {
		Bubble(t, func(t *testing.T, s *Server) {
			_, js := connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
			if got := lease(t, js); got != 15*time.Second {
				t.Fatalf("expired after %v, want 15s", got)
			}
		})
	})
	t.Run("an unacked message comes back after AckWait and over a restart", func(t *testing.T) {
		Bubble(t, func(t *testing.T, s *Server) {
			_, js := connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
			str := mustStream(t, js)
			mustPublish(t, js, "1")
			cons, err := str.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "c", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 30 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			next := func() *jetstream.MsgMetadata {
				t.Helper()
				m, err := cons.Next(jetstream.FetchMaxWait(time.Minute))
				if err != nil {
					t.Fatal(err)
				}
				md, err := m.Metadata()
				if err != nil {
					t.Fatal(err)
				}
				return md
			}
			next()
			start := time.Now()
			if md := next(); md.NumDelivered != 2 {
				t.Fatalf("delivered %d times, want 2", md.NumDelivered)
			}
			// The server rounds its timer up by a millisecond now and then.
			if d := time.Since(start); d < 30*time.Second || d > 30*time.Second+10*time.Millisecond {
				t.Fatalf("came back after %v, want 30s", d)
			}
			s.Stop()
			time.Sleep(time.Minute)
			s.Restart()
			time.Sleep(time.Second) // virtual: lets the client reconnect
			if md := next(); md.NumDelivered != 3 {
				t.Fatalf("delivered %d times, want 3", md.NumDelivered)
			}
		})
	})
	t.Run("nobody waits for a server that takes its time to stop", func(t *testing.T) {
		Bubble(t, func(t *testing.T, s *Server) {
			_, js := connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
			str := mustStream(t, js)
			cons, err := str.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "c"})
			if err != nil {
				t.Fatal(err)
			}
			// The server tells those who pull that it goes, and then sleeps.
			pull, err := cons.Fetch(1, jetstream.FetchMaxWait(time.Hour))
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			began, stopped, asked := time.Now(), make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				s.Stop()
			}()
			// What others ask for meanwhile needs a lock that the server sleeps with.
			go func() {
				defer close(asked)
				for time.Since(began) < time.Second {
					ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
					_, _ = str.CreateConsumer(ctx, jetstream.ConsumerConfig{})
					cancel()
				}
			}()
			time.Sleep(20 * time.Millisecond)
			if _, err := s.InProcess(); !errors.Is(err, embed.ErrStopped) {
				t.Fatalf("connecting to a server that stops: %v, want %v", err, embed.ErrStopped)
			}
			<-stopped
			if took := time.Since(began); took < 50*time.Millisecond {
				t.Errorf("the server stopped in %v and did not take its time: the test shows nothing", took)
			}
			<-asked
			for range pull.Messages() {
				t.Error("a message without one in the stream")
			}
		})
	})
	t.Run("real time is untouched afterwards", func(t *testing.T) {
		s := StartServer(t)
		_, js := connect(t, s.URL())
		mustStream(t, js)
		before := ats.AccessTime()
		mustPublish(t, js, "1")
		// The coarse clock must tick again: wait for it, bounded by the test's own limit.
		for ats.AccessTime() == before {
			if t.Context().Err() != nil {
				t.Fatal(t.Context().Err())
			}
			mustPublish(t, js, "1")
		}
	})
}
