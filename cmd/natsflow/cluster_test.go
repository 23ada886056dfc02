package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/testenv"
)

const (
	// clusterPatience bounds the wait for a cluster to go on after a disturbance.
	clusterPatience = 90 * time.Second
	clusterPoll     = 50 * time.Millisecond
)

// TestCluster feeds the flights into a cluster of three server processes, with three
// replicas of everything, while three workers count delays. Meanwhile, one after the
// other, the server that leads each of the streams is killed, one is sent into lame
// duck mode, and one worker loses its connections to one server. It says how long the
// results paused each time. In the end all drain, and the judge is that of TestKill.
func TestCluster(t *testing.T) {
	c := newClusterTest(t)
	fd := c.feed(150)
	for _, name := range []string{"a", "b"} {
		c.workers = append(c.workers, c.start(name, "--replicas", "3"))
	}
	c.workers = append(c.workers, c.startAt(c.linked, "c", "--replicas", "3"))

	for _, stream := range []string{"FLIGHTS", "KV_natsflow_flights", "DELAYS", "NATSFLOW_CONTROL"} {
		c.disturb("SIGKILL of the leader of "+stream, func() (mend func()) {
			node := c.cluster.Node(c.cluster.Leader(stream))
			node.Kill()
			return node.Restart
		})
	}
	c.disturb("lame duck mode of the leader of DELAYS", func() (mend func()) {
		node := c.cluster.Node(c.cluster.Leader("DELAYS"))
		node.LameDuck()
		return node.Restart
	})
	c.disturb("a worker cut off from one server", c.cutOff)

	fd.finish()
	c.drain(c.workers...)
	judge(t, c.conn, naive(t, c.storedLines()))
}

// clusterTest has three workers on a cluster; one of them reaches the servers over links.
type clusterTest struct {
	*killer
	cluster *testenv.Cluster
	links   []*testenv.Link // one for each server
	linked  string          // URL of the servers behind the links
	workers []*workerProc
}

func newClusterTest(t *testing.T) *clusterTest {
	t.Helper()
	c := &clusterTest{killer: &killer{t: t, bin: testenv.Build(t, "./cmd/natsflow"), flow: flightsDir(t)}, cluster: testenv.StartCluster(t, 3)}
	c.connect(c.cluster.URL())
	for i, node := range c.cluster.Nodes() {
		link := testenv.NewLink(t)
		c.links = append(c.links, link)
		if i > 0 {
			c.linked += ","
		}
		c.linked += link.Proxy(node.URL())
	}
	await(t, "the source", clusterPatience, func() error {
		_, err := c.conn.CreateStream(t.Context(), bus.StreamConfig{Name: "FLIGHTS", Subjects: []string{"flights.>"}, Replicas: 3})
		return err
	})
	return c
}

// disturb does harm, waits until all tasks go on, undoes the harm,
// and says how long there were no results. Before that it waits until the cluster and
// all workers are well.
func (c *clusterTest) disturb(what string, harm func() (mend func())) {
	c.t.Helper()
	c.goesOn("all workers to have tasks that go on", len(c.workers))
	c.cluster.AwaitHealthy()
	begin := time.Now()
	mend := harm()
	c.goesOn(what+": all tasks to go on", 1)
	took := time.Since(begin)
	results, records := c.pause("DELAYS", begin), c.pause("FLIGHTS", begin)
	c.t.Logf("%s: results paused for %v (the source took nothing for %v); all went on after %v", what,
		results.Round(time.Millisecond), records.Round(time.Millisecond), took.Round(time.Millisecond))
	mend()
}

// goesOn waits until so many workers have the tasks, each of which has committed
// something that came to the source after the call.
func (c *clusterTest) goesOn(what string, workers int) {
	c.t.Helper()
	target := uint64(0)
	await(c.t, what, clusterPatience, func() error {
		for _, w := range c.workers {
			if w.ended() {
				c.t.Fatalf("%s: worker %s has ended: %v", what, w.name, w.wait())
			}
		}
		ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
		defer cancel()
		if target == 0 {
			info, err := c.conn.Stream(ctx, "FLIGHTS")
			if err != nil {
				return err
			}
			target = info.LastSeq + 1
		}
		flows, err := (&StatusCmd{Flow: "flights"}).collect(ctx, c.conn)
		if err != nil {
			return err
		}
		st := flows[0]
		if n := st.TasksOwnerless; n > 0 {
			return fmt.Errorf("%d tasks have no owner", n)
		}
		if n := len(st.crew.working()); n < workers {
			return fmt.Errorf("%d workers have tasks, not %d", n, workers)
		}
		if at := st.Sources[0].Committed; at < target {
			return fmt.Errorf("all tasks have committed up to %d, not %d", at, target)
		}
		return nil
	})
}

// pause is the longest time without a message in a stream since a moment shortly before
// the given one, by the timestamps of the messages.
func (c *clusterTest) pause(stream string, since time.Time) (longest time.Duration) {
	c.t.Helper()
	var times []int64
	err := readStream(c.t.Context(), c.conn, bus.CursorConfig{Stream: stream}, func(m *bus.Msg) { times = append(times, m.Time) })
	if err != nil {
		c.t.Fatal(err)
	}
	from, _ := slices.BinarySearch(times, since.UnixNano())
	for i := max(from, 1); i < len(times); i++ {
		longest = max(longest, time.Duration(times[i]-times[i-1]))
	}
	if longest == 0 {
		c.t.Errorf("%s has no messages since %v", stream, since)
	}
	return longest
}

// cutOff cuts the link between worker c and the server that it has most connections to,
// and waits until it has as many elsewhere.
func (c *clusterTest) cutOff() (mend func()) {
	c.t.Helper()
	conns := func() (all int) {
		for _, l := range c.links {
			all += l.Conns()
		}
		return all
	}
	most := slices.MaxFunc(c.links, func(a, b *testenv.Link) int { return a.Conns() - b.Conns() })
	before, lost := conns(), most.Conns()
	if lost == 0 {
		c.t.Fatal("worker c has no connections")
	}
	most.Cut()
	await(c.t, "worker c to connect to other servers", clusterPatience, func() error {
		if n := conns(); n < before {
			return fmt.Errorf("it has %d connections, and had %d", n, before)
		}
		return nil
	})
	c.t.Logf("worker c lost %d of its %d connections", lost, before)
	if n := most.Conns(); n != 0 {
		c.t.Errorf("%d connections go over a link that is cut", n)
	}
	return most.Heal
}

// storedLines are the flights in the source, in its order, which is not that of the
// file where a server was away. It checks that none is missing.
func (c *clusterTest) storedLines() [][]byte {
	c.t.Helper()
	info, err := c.conn.Stream(c.t.Context(), "FLIGHTS")
	if err != nil {
		c.t.Fatal(err)
	}
	lines := storedLines(c.t, c.conn, info.LastSeq)
	missing := map[string]int{}
	for _, line := range fileLines(c.t, c.flow) {
		missing[string(line)]++
	}
	for _, line := range lines {
		missing[string(line)]--
	}
	for line, n := range missing {
		if n != 0 {
			c.t.Errorf("the source lacks (or, if negative, has too often) %d of %s", n, line)
		}
	}
	return lines
}

// await repeats a look until it succeeds.
func await(t *testing.T, what string, patience time.Duration, look func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(clusterPoll)
	defer tick.Stop()
	for {
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %s: %v", patience, what, err)
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal(errors.Join(err, context.Cause(t.Context())))
		}
	}
}
