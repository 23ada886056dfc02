package bus

import (
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

// A stream that somebody else creates at the same moment may be known to one server of a cluster, which refuses to
// create another, and not yet to the next that is asked. A server is played here that is in such a cluster.
func TestConn_createdElsewhere(t *testing.T) {
	s := testenv.StartServer(t, testenv.NoJetStream())
	c, elsewhere := connect(t, s), connect(t, s)
	var asked atomic.Int64
	cfg := jetstream.StreamConfig{AllowMsgTTL: true, Subjects: []string{"out.>"}}
	answer := func(v any) func(*nats.Msg) {
		return func(m *nats.Msg) {
			known := asked.Add(1) > 4 // before the creation and three times behind it
			if strings.Contains(m.Subject, "STREAM.INFO.") && !known {
				v := APIError{Code: 404, ErrorCode: codeStreamNotFound, Description: "stream not found"}
				_ = m.Respond(must(json.Marshal(map[string]any{"error": v})))
				return
			}
			_ = m.Respond(must(json.Marshal(v)))
		}
	}
	for subject, v := range map[string]any{
		"$JS.API.STREAM.CREATE.*": map[string]any{"error": APIError{Code: 400, ErrorCode: codeStreamExists, Description: "in use"}},
		"$JS.API.STREAM.INFO.*":   jetstream.StreamInfo{Config: cfg},
	} {
		must(elsewhere.nc.Subscribe(subject, answer(v)))
	}
	if err := elsewhere.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.EnsureBucket(limited(t), BucketConfig{Name: "b", MarkerTTL: time.Second}); err != nil {
		t.Errorf("a bucket: %v", err)
	}
	asked.Store(0)
	if _, created, err := c.EnsureSink(limited(t), SinkConfig{Stream: "OUT", Subjects: []string{"out.>"}}); created || err != nil {
		t.Errorf("a sink: %v, %v", created, err)
	}
}

func TestConn_Stream(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	if _, err := c.Stream(ctx, "S"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("Stream of none: %v", err)
	}
	if _, err := c.Stream(ctx, "bad.name"); err == nil {
		t.Fatal("a bad name was taken")
	}
	cfg := StreamConfig{Name: "S", Subjects: []string{"s.>"}, Duplicates: time.Minute, Metadata: map[string]string{"k": "v"}}
	for range 2 {
		if _, err := c.CreateStream(ctx, cfg); err != nil {
			t.Fatal(err)
		}
	}
	cfg.MaxMsgs = 10
	if _, err := c.CreateStream(ctx, cfg); !errors.Is(err, ErrExists) {
		t.Fatalf("other settings: %v", err)
	}
	feed(t, c, 0, 3)
	info, err := c.Stream(ctx, "S")
	if err != nil {
		t.Fatal(err)
	}
	if info.FirstSeq != 1 || info.LastSeq != 3 || info.Msgs != 3 || info.Retention != "limits" || info.Fence || info.AllowBatch || info.Mirror ||
		info.Duplicates != time.Minute || info.Metadata["k"] != "v" || info.MaxMsgs != -1 || info.LastTime.Before(info.FirstTime) || info.Replicas != 1 {
		t.Errorf("%+v", info)
	}
	if err := c.DeleteStream(ctx, "S"); err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteStream(ctx, "S"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
}

func TestConn_EnsureSink(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	cfg := SinkConfig{Stream: "OUT", Subjects: []string{"out.>"}, Flow: "f"}
	info, created, err := c.EnsureSink(ctx, cfg)
	if err != nil || !created || !info.Fence || !info.AllowBatch {
		t.Fatalf("%+v %v %v", info, created, err)
	}
	if info, created, err = c.EnsureSink(ctx, SinkConfig{Stream: "OUT", Subjects: []string{"out.a.*"}}); err != nil || created || !info.Fence {
		t.Fatalf("again: %v %v", created, err)
	}
	if _, _, err = c.EnsureSink(ctx, SinkConfig{Stream: "OUT", Subjects: []string{"other.a"}}); err == nil {
		t.Fatal("subjects that are not covered")
	}
	if _, _, err = c.EnsureSink(ctx, SinkConfig{Stream: "OUT2", Subjects: []string{"out.b"}}); err == nil {
		t.Fatal("overlapping subjects")
	}
	if _, _, err = c.EnsureSink(ctx, SinkConfig{}); err == nil {
		t.Fatal("nothing named")
	}
	if info, created, err = c.EnsureSink(ctx, SinkConfig{Bucket: "table"}); err != nil || !created || !info.Fence || !info.AllowBatch || info.Name != "KV_table" {
		t.Fatalf("bucket: %+v %v %v", info, created, err)
	}
	kv, err := c.js.KeyValue(ctx, "table")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(ctx, "k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	// What somebody else has created is used as it is.
	if _, err := c.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "theirs"}); err != nil {
		t.Fatal(err)
	}
	if info, created, err = c.EnsureSink(ctx, SinkConfig{Bucket: "theirs"}); err != nil || created || info.Fence || info.AllowBatch {
		t.Fatalf("their bucket: %+v %v %v", info, created, err)
	}
	if _, err := c.js.CreateStream(ctx, jetstream.StreamConfig{Name: "M", Mirror: &jetstream.StreamSource{Name: "OUT"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.OpenSink(ctx, "M"); err == nil {
		t.Fatal("a mirror as sink")
	}
	if _, err := c.OpenSink(ctx, "none"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("OpenSink of none: %v", err)
	}
}

func TestConn_SeqAt(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		stream(t, c)
		ctx := t.Context()
		if got, err := c.SeqAt(ctx, "S", time.Now()); err != nil || got != 0 {
			t.Fatalf("empty stream: %d, %v", got, err)
		}
		start := time.Now()
		for range 5 {
			time.Sleep(time.Minute)
			must(c.Publish(ctx, "s.x", nil, nil))
		}
		time.Sleep(time.Minute)
		var times []time.Time
		cu := must(c.OpenCursor(ctx, CursorConfig{Stream: "S"}))
		stop := errors.New("stop")
		if err := cu.Run(ctx, func(m *Msg) error {
			if times = append(times, time.Unix(0, m.Time)); len(times) == 5 {
				return stop
			}
			return nil
		}); !errors.Is(err, stop) {
			t.Fatal(err)
		}
		if err := cu.Close(ctx); err != nil {
			t.Fatal(err)
		}
		want := map[time.Time]uint64{start: 0, times[0].Add(-1): 0, times[4].Add(time.Hour): 5, time.Now().Add(time.Hour): 5}
		for i, at := range times {
			want[at] = uint64(i + 1)
			want[at.Add(time.Second)] = uint64(i + 1)
			want[at.Add(-time.Nanosecond)] = uint64(i)
		}
		got := make(map[time.Time]uint64)
		for at := range want {
			got[at] = must(c.SeqAt(ctx, "S", at))
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
		if n := consumers(t, c, "S"); n != 0 {
			t.Errorf("%d consumers are left", n)
		}
		if _, err := c.SeqAt(ctx, "none", start); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
	})
}

func TestConn_FirstFrom(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		stream(t, c)
		if _, _, err := c.FirstFrom(t.Context(), "S", nil, 0); !errors.Is(err, ErrNotFound) {
			t.Errorf("in an empty stream: %v", err)
		}
		began := time.Now()
		feed(t, c, 0, 8) // message i is sequence i+1, subject s.<i mod 4>
		for _, tc := range []struct {
			subjects []string
			from     uint64
			want     uint64
		}{
			{nil, 0, 1},
			{nil, 5, 5},
			{[]string{"s.1"}, 1, 2},
			{[]string{"s.1"}, 3, 6},
			{[]string{"s.3", "s.2"}, 5, 7},
			{[]string{"none", "s.0"}, 2, 5},
			{[]string{"s.0"}, 6, 0},
			{[]string{"s.>"}, 9, 0},
		} {
			seq, at, err := c.FirstFrom(t.Context(), "S", tc.subjects, tc.from)
			switch {
			case tc.want == 0:
				if !errors.Is(err, ErrNotFound) {
					t.Errorf("%v from %d: sequence %d, %v", tc.subjects, tc.from, seq, err)
				}
			case err != nil || seq != tc.want || at.Before(began) || at.Sub(began) > time.Minute:
				t.Errorf("%v from %d: sequence %d of %v, %v; want %d", tc.subjects, tc.from, seq, at, err, tc.want)
			}
		}
		if _, _, err := c.FirstFrom(t.Context(), "NONE", nil, 0); !errors.Is(err, ErrNotFound) {
			t.Errorf("of no stream: %v", err)
		}
		info, err := c.Stream(t.Context(), "S")
		if err != nil || info.DiscardNew || info.AsOf.Before(began) || info.AsOf.Sub(began) > time.Minute {
			t.Errorf("%+v, %v", info, err)
		}
	})
}
