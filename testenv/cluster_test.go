package testenv

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestCluster(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 3)
	if n := len(strings.Split(c.URL(), ",")); n != 3 {
		t.Fatalf("%d addresses in %s", n, c.URL())
	}
	link := NewLink(t)
	nc, err := nats.Connect(link.Proxy(c.Nodes()[0].URL()))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if urls := nc.DiscoveredServers(); len(urls) != 0 {
		t.Errorf("a client is told of %v", urls)
	}
	c.await("the stream", func(ctx context.Context) error {
		_, err := c.js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Replicas: 3})
		return err
	})
	stored := uint64(0)
	store := func() {
		stored++
		c.await("a message to be stored", func(ctx context.Context) error {
			_, err := c.js.Publish(ctx, "s.a", nil, jetstream.WithMsgID(strconv.FormatUint(stored, 10)))
			return err
		})
	}
	store()
	for _, end := range []func(*Process){(*Process).Kill, (*Process).LameDuck} {
		c.AwaitHealthy()
		leader := c.Leader("S")
		end(c.Node(leader))
		if c.Node(leader).PID() != 0 {
			t.Errorf("%s runs", leader)
		}
		store()
		if now := c.Leader("S"); now == leader {
			t.Errorf("%s is gone and leads", now)
		}
		ctx, cancel := context.WithTimeout(t.Context(), clusterAsk)
		if err := c.Node(leader).healthy(ctx); err == nil {
			t.Errorf("%s is gone and healthy", leader)
		}
		cancel()
		c.Node(leader).Restart()
	}
	c.AwaitHealthy()
	s, err := c.js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if info := s.CachedInfo(); info.State.LastSeq != stored || len(info.Cluster.Replicas) != 2 {
		t.Errorf("%d messages on %d replicas", info.State.LastSeq, 1+len(info.Cluster.Replicas))
	}
}

// A stream is complete with a leader and all replicas current.
func TestComplete(t *testing.T) {
	t.Parallel()
	peer := func(current, offline bool) *jetstream.PeerInfo {
		return &jetstream.PeerInfo{Name: "n2", Current: current, Offline: offline, Active: time.Second}
	}
	for _, tc := range []struct {
		cluster *jetstream.ClusterInfo
		want    string
	}{
		{nil, "no leader"},
		{&jetstream.ClusterInfo{Replicas: []*jetstream.PeerInfo{peer(true, false)}}, "no leader"},
		{&jetstream.ClusterInfo{Leader: "n1"}, "1 replicas of 2"},
		{&jetstream.ClusterInfo{Leader: "n1", Replicas: []*jetstream.PeerInfo{peer(false, false)}}, "replica n2 is not current"},
		{&jetstream.ClusterInfo{Leader: "n1", Replicas: []*jetstream.PeerInfo{peer(true, true)}}, "replica n2 is not current"},
		{&jetstream.ClusterInfo{Leader: "n1", Replicas: []*jetstream.PeerInfo{peer(true, false)}}, ""},
	} {
		got := ""
		if err := complete(&jetstream.StreamInfo{Config: jetstream.StreamConfig{Replicas: 2}, Cluster: tc.cluster}); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%+v: %q, want %q", tc.cluster, got, tc.want)
		}
	}
}
