package bus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"

	"natsflow/testenv"
)

// cluster starts three servers and waits until they can hold a stream with three replicas.
func cluster(t *testing.T) []*testenv.Server {
	t.Helper()
	// Each must know a route to the others before it starts, so the ports are chosen here.
	var routes []*url.URL
	var ports []int
	for range 3 {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		routes = append(routes, must(url.Parse("nats://"+l.Addr().String())))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var servers []*testenv.Server
	for i, port := range ports {
		servers = append(servers, testenv.StartServer(t, testenv.Configure(func(o *server.Options) {
			o.ServerName = fmt.Sprintf("n%d", i)
			o.Cluster = server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: port}
			o.Routes = routes
		})))
	}
	return servers
}

// eventually repeats do until it succeeds.
func eventually(t *testing.T, ctx context.Context, do func() error) {
	t.Helper()
	for {
		err := do()
		if err == nil {
			return
		}
		if sleep(ctx, 20*time.Millisecond) != nil {
			t.Fatal(err)
		}
	}
}

// TestCluster runs what differs between one replica and three: proposals in flight, and leaders that change.
func TestCluster(t *testing.T) {
	servers := cluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c := connect(t, servers[0], func(cfg *Config) { cfg.RequestTimeout = 3 * time.Second })
	var b *Bucket
	eventually(t, ctx, func() (err error) {
		b, err = c.EnsureBucket(ctx, BucketConfig{Name: "b", Replicas: 3})
		return err
	})
	eventually(t, ctx, func() error {
		_, _, err := c.EnsureSink(ctx, SinkConfig{Stream: "OUT", Subjects: []string{"out.>"}, Replicas: 3})
		return err
	})
	t.Run("log", func(t *testing.T) { clusterLog(t, ctx, b) })
	t.Run("groups", func(t *testing.T) { clusterGroups(t, ctx, c) })
}

// clusterLog writes a log whose leader changes: the writer reads the head after every doubt, and goes on.
func clusterLog(t *testing.T, ctx context.Context, b *Bucket) {
	const entries = 60
	last := uint64(0)
	for n := range entries {
		key := fmt.Sprintf("log.0.%d", n)
		for {
			seq, err := b.Append(ctx, key, nil, "log.0.>", last)
			if err == nil {
				last = seq
				break
			}
			if !Retryable(err) {
				t.Fatalf("append %d: %v", n, err)
			}
			if head, err := b.Last(ctx, "log.0.>"); err == nil && head.Key == key {
				last = head.Seq
				break
			}
		}
		if n%20 == 10 {
			eventually(t, ctx, func() error { return b.c.ask(ctx, "STREAM.LEADER.STEPDOWN.KV_b", struct{}{}, nil) })
		}
	}
	if items := must(b.List(ctx, "log.0.>")); len(items) != entries {
		t.Errorf("%d entries, want %d", len(items), entries)
	}
	if _, err := b.Append(ctx, "log.0.late", nil, "log.0.>", 1); !errors.Is(err, ErrFenced) {
		t.Errorf("stale append: %v", err)
	}
}

// clusterGroups publishes groups while the leader changes in the middle of some.
func clusterGroups(t *testing.T, ctx context.Context, c *Conn) {
	s := must(c.OpenSink(ctx, "OUT"))
	var fence uint64
	writeFence := func() (err error) {
		fence, err = s.WriteFence(ctx, "f", "0.3")
		return err
	}
	eventually(t, ctx, writeFence)
	old := fence
	var positions []string
	for n := range uint64(12) {
		const size = 1500
		g := group(n, fence, size)
		for i := range g.Outs {
			positions = append(positions, FormatPosition("f", "0.3", n, i))
		}
		asked := make(chan error, 1)
		if n%4 == 2 {
			go func() { asked <- c.ask(ctx, "STREAM.LEADER.STEPDOWN.OUT", struct{}{}, nil) }()
		} else {
			asked <- nil
		}
		for {
			_, err := s.Publish(ctx, g)
			if err == nil {
				break
			}
			if !Retryable(err) {
				t.Fatalf("group %d: %v", n, err)
			}
			t.Logf("group %d: %v", n, err)
			if g, err = recoverGroup(ctx, s, g, 0, size); err != nil {
				t.Fatal(err)
			}
			fence = g.Fence
		}
		if err := <-asked; err != nil {
			t.Logf("stepping down: %v", err)
		}
	}
	if d := cmp.Diff(positions, firsts(stored(t, c, PositionHeader))); d != "" {
		t.Error(d)
	}
	eventually(t, ctx, writeFence)
	// A new leader may still have the former owner's batch, which a stale group then runs into; stored it is never.
	before := settled(t, ctx, c)
	eventually(t, ctx, func() error {
		switch _, err := s.Publish(ctx, group(99, old, 10)); {
		case errors.Is(err, ErrFenced):
			return nil
		case !Retryable(err):
			t.Fatalf("stale fence: %v", err)
			return nil
		default:
			return err
		}
	})
	if after := settled(t, ctx, c); after != before {
		t.Errorf("%d messages of a stale group were stored", after-before)
	}
	if _, err := s.Publish(ctx, group(99, fence, 10)); err != nil {
		t.Error(err)
	}
}
