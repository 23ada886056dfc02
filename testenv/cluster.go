package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv/internal/clock"
)

const (
	clusterHealthy = 90 * time.Second       // until all servers and streams are well
	clusterPoll    = 100 * time.Millisecond // between looks at them
	clusterAsk     = 2 * time.Second        // for one look
	clusterStarts  = 5                      // how often ports are chosen when some were taken
)

// Cluster is a cluster of nats-server child processes with JetStream. A client
// learns no other addresses from a server than the ones that it was given, so that a
// [Link] can stand before each server. The methods fail the test when they cannot do
// what they say. They must not be called concurrently with each other.
type Cluster struct {
	tb    testing.TB
	nodes []*Process
	nc    *nats.Conn
	js    jetstream.JetStream
}

// StartCluster starts size servers, named n1, n2 and so on, on free loopback ports, and
// returns when they have a leader. config are lines of the configuration file of each.
// They are killed as a server of [StartProcess] is.
func StartCluster(tb testing.TB, size int, config ...string) *Cluster {
	tb.Helper()
	release, err := clock.Shared(sharePatience)
	if err != nil {
		tb.Fatalf("testenv: starting a cluster: %v", err)
	}
	tb.Cleanup(release)
	c := &Cluster{tb: tb}
	for try := 1; ; try++ {
		err := c.start(size, config)
		if err == nil {
			break
		}
		// A server must know the routes of all when it starts. Until then nothing
		// reserves their ports.
		if !errors.Is(err, errPortTaken) || try == clusterStarts {
			tb.Fatalf("testenv: %v", err)
		}
	}
	c.connect()
	c.AwaitHealthy()
	return c
}

func (c *Cluster) start(size int, config []string) error {
	routes, err := freeAddrs(size)
	if err != nil {
		return err
	}
	for _, p := range c.nodes {
		p.Kill()
	}
	c.nodes = nil
	for i, addr := range routes {
		// no_advertise: see the type. The lame duck's duration has this minimum, but a
		// server with few clients takes a second for each.
		lines := append(slices.Clone(config),
			"http: 127.0.0.1:-1", "lame_duck_duration: 30s", "lame_duck_grace_period: 1s",
			fmt.Sprintf("cluster {\n  name: testenv\n  listen: %s\n  no_advertise: true\n  routes: [nats://%s]\n}", addr, strings.Join(routes, ", nats://")))
		p := newProcess(c.tb, fmt.Sprintf("n%d", i+1), lines)
		c.nodes = append(c.nodes, p)
		if err := p.start(); err != nil {
			return fmt.Errorf("server %s: %w", p.name, err)
		}
	}
	return nil
}

// freeAddrs returns so many different loopback addresses that were free a moment ago.
func freeAddrs(n int) (addrs []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("choosing a port: %w", err)
		}
		defer l.Close() //nolint:errcheck // nothing came in
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}

// connect makes the connection that the cluster is looked at with.
func (c *Cluster) connect() {
	c.tb.Helper()
	closed := make(chan struct{})
	nc, err := nats.Connect(c.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(clusterPoll), nats.Timeout(clusterAsk),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}), // instead of printing it
		nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		c.tb.Fatalf("testenv: connecting to the cluster: %v", err)
	}
	c.tb.Cleanup(func() {
		nc.Close()
		<-closed
	})
	c.nc = nc
	if c.js, err = jetstream.New(nc); err != nil {
		c.tb.Fatalf("testenv: connecting to the cluster: %v", err)
	}
}

// URL is where clients connect: all servers, comma separated. It outlives restarts.
func (c *Cluster) URL() string {
	var urls []string
	for _, p := range c.nodes {
		urls = append(urls, p.URL())
	}
	return strings.Join(urls, ",")
}

// Nodes are the servers, in the order of their names.
func (c *Cluster) Nodes() []*Process { return slices.Clone(c.nodes) }

// Node returns a server by its name.
func (c *Cluster) Node(name string) *Process {
	c.tb.Helper()
	i := slices.IndexFunc(c.nodes, func(p *Process) bool { return p.name == name })
	if i < 0 {
		c.tb.Fatalf("testenv: the cluster has no server %q", name)
	}
	return c.nodes[i]
}

// Leader waits until a stream has a leader and returns its name.
func (c *Cluster) Leader(stream string) (name string) {
	c.tb.Helper()
	c.await("a leader of "+stream, func(ctx context.Context) error {
		s, err := c.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		if info := s.CachedInfo(); info.Cluster == nil || info.Cluster.Leader == "" {
			return errors.New("it has none")
		}
		name = s.CachedInfo().Cluster.Leader
		return nil
	})
	return name
}

// AwaitHealthy waits until every server says that it has what the others have, and
// every stream has a leader and all its replicas.
func (c *Cluster) AwaitHealthy() {
	c.tb.Helper()
	for _, p := range c.nodes {
		c.await("server "+p.name+" to be healthy", p.healthy)
	}
	c.await("the replicas of the streams", func(ctx context.Context) error {
		names := c.js.StreamNames(ctx)
		for name := range names.Name() {
			s, err := c.js.Stream(ctx, name)
			if err != nil {
				return fmt.Errorf("stream %s: %w", name, err)
			}
			if err := complete(s.CachedInfo()); err != nil {
				return fmt.Errorf("stream %s: %w", name, err)
			}
		}
		return names.Err()
	})
}

// complete returns an error that says which replica a stream lacks.
func complete(info *jetstream.StreamInfo) error {
	if info.Cluster == nil || info.Cluster.Leader == "" {
		return errors.New("no leader")
	}
	if n := 1 + len(info.Cluster.Replicas); n != info.Config.Replicas {
		return fmt.Errorf("%d replicas of %d", n, info.Config.Replicas)
	}
	for _, r := range info.Cluster.Replicas {
		if r.Offline || !r.Current {
			return fmt.Errorf("replica %s is not current", r.Name)
		}
	}
	return nil
}

// await repeats a look until it succeeds.
func (c *Cluster) await(what string, look func(ctx context.Context) error) {
	c.tb.Helper()
	deadline := time.Now().Add(clusterHealthy)
	for {
		ctx, cancel := context.WithTimeout(c.tb.Context(), clusterAsk)
		err := look(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.tb.Fatalf("testenv: waited %v for %s: %v", clusterHealthy, what, err)
		}
		time.Sleep(clusterPoll)
	}
}

// healthy asks the server's monitoring, which compares with the leaders.
func (p *Process) healthy(ctx context.Context) error {
	p.mu.Lock()
	url, run := p.monitor+"/healthz", p.run
	p.mu.Unlock()
	if run == nil {
		return errors.New("it does not run")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	// Nothing of it may stay: a server that is killed would leave a connection.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // it was only read
	body, err := io.ReadAll(io.LimitReader(resp.Body, tailSize))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return err
}
