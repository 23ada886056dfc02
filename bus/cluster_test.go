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

// TestCluster runs what differs between one replica and three: proposals in flight, leaders that change.
func TestCluster(t *testing.T) {
	servers := cluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	c := connect(t, servers[0], func(cfg *Config) { cfg.RequestTimeout = 3 * time.Second })
	eventually := func(do func() error) {
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
	var b *Bucket
	eventually(func() (err error) {
		b, err = c.EnsureBucket(ctx, BucketConfig{Name: "b", Replicas: 3})
		return err
	})
	eventually(func() error {
		_, _, err := c.EnsureSink(ctx, SinkConfig{Stream: "OUT", Subjects: []string{"out.>"}, Replicas: 3})
		return err
	})
	stepDown := func(stream string) {
		t.Helper()
		eventually(func() error { return c.ask(ctx, "STREAM.LEADER.STEPDOWN."+stream, struct{}{}, nil) })
	}

	// A log whose leader changes: the writer reads the head after every doubt, and goes on.
	last, want := uint64(0), 0
	for n := range 60 {
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
			head, err := b.Last(ctx, "log.0.>")
			if err == nil && head.Key == key {
				last = head.Seq
				break
			}
		}
		if want++; n%20 == 10 {
			stepDown("KV_b")
		}
	}
	if items := must(b.List(ctx, "log.0.>")); len(items) != want {
		t.Errorf("%d entries, want %d", len(items), want)
	}
	if _, err := b.Append(ctx, "log.0.late", nil, "log.0.>", 1); !errors.Is(err, ErrFenced) {
		t.Errorf("stale append: %v", err)
	}

	// Groups, with a leader that changes in the middle of some.
	s := must(c.OpenSink(ctx, "OUT"))
	fence := must(s.WriteFence(ctx, "f", "0.3"))
	old := fence
	var positions []string
	for n := range uint64(12) {
		const size = 1500
		g := group(n, fence, size)
		for i := range g.Outs {
			positions = append(positions, FormatPosition("f", "0.3", n, i))
		}
		if n%4 == 2 {
			go func() { _ = c.ask(ctx, "STREAM.LEADER.STEPDOWN.OUT", struct{}{}, nil) }()
		}
		for {
			_, err := s.Publish(ctx, g)
			if err == nil {
				break
			}
			if !Retryable(err) && !errors.Is(err, ErrFenced) {
				t.Fatalf("group %d: %v", n, err)
			}
			t.Logf("group %d: %v", n, err)
			if g, err = recoverGroup(ctx, s, g, 0, size); err != nil {
				t.Fatal(err)
			}
			fence = g.Fence
		}
	}
	if d := cmp.Diff(positions, firsts(stored(t, c, PositionHeader))); d != "" {
		t.Error(d)
	}
	fence = must(s.WriteFence(ctx, "f", "0.3"))
	if _, err := s.Publish(ctx, group(99, old, 10)); !errors.Is(err, ErrFenced) {
		t.Errorf("stale fence: %v", err)
	}
	if _, err := s.Publish(ctx, group(99, fence, 10)); err != nil {
		t.Error(err)
	}
}
