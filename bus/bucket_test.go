package bus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

func bucket(tb testing.TB, c *Conn, cfg BucketConfig) *Bucket {
	tb.Helper()
	cfg.Name = "b"
	b, err := c.EnsureBucket(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func TestBucket_Append(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{})
	ctx := limited(t)
	const log = "log.0.3.>"
	s1, err := b.Append(ctx, "log.0.3.1", []byte("one"), log, 0)
	if err != nil {
		t.Fatal(err)
	}
	// Another log does not count.
	if _, err := b.Append(ctx, "log.0.4.1", []byte("other"), "log.0.4.>", 0); err != nil {
		t.Fatal(err)
	}
	s2, err := b.Append(ctx, "log.0.3.2", []byte("two"), log, s1)
	if err != nil {
		t.Fatal(err)
	}
	for _, last := range []uint64{0, s1, s2 + 1} {
		_, err = b.Append(ctx, "log.0.3.3", []byte("late"), log, last)
		var api *APIError
		if !errors.Is(err, ErrFenced) || !errors.As(err, &api) || api.ErrorCode != 10071 || Retryable(err) {
			t.Fatalf("append after %d: %v", last, err)
		}
	}
	last, err := b.Last(ctx, log)
	if err != nil || last.Key != "log.0.3.2" || string(last.Value) != "two" || last.Seq != s2 || last.Deleted || time.Since(last.Time) > time.Minute {
		t.Fatalf("Last: %+v, %v", last, err)
	}
	if _, err := b.Last(ctx, "log.9.9.>"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("Last of nothing: %v", err)
	}
	if _, err := b.Append(ctx, "log.0.3.3", make([]byte, 2<<20), log, s2); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("too large: %v", err)
	}
	if _, err := b.Append(ctx, "bad key", nil, log, s2); err == nil {
		t.Fatal("a key with a blank was taken")
	}
}

func TestBucket_Settings(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{MarkerTTL: 1500 * time.Millisecond, Description: "d"})
	ctx := limited(t)
	info := must(c.streamInfo(ctx, "KV_b"))
	if info.Config.AllowDirect || !info.Config.AllowMsgTTL || info.Config.SubjectDeleteMarkerTTL != 2*time.Second || info.Config.MaxMsgsPerSubject != 1 {
		t.Errorf("settings: %+v", info.Config)
	}
	// It is a KV bucket to others.
	kv, err := c.js.KeyValue(ctx, "b")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(ctx, "x", []byte("y")); err != nil {
		t.Fatal(err)
	}
	if it, err := b.Get(ctx, "x"); err != nil || string(it.Value) != "y" {
		t.Errorf("Get: %+v, %v", it, err)
	}
	if n, err := b.Bytes(ctx); err != nil || n == 0 {
		t.Errorf("Bytes: %d, %v", n, err)
	}
	if b2, err := c.OpenBucket(ctx, "b"); err != nil || b2.Name() != "b" {
		t.Errorf("OpenBucket: %v", err)
	}
	if _, err := c.OpenBucket(ctx, "none"); !errors.Is(err, ErrNotFound) {
		t.Errorf("OpenBucket of none: %v", err)
	}
	if _, err := c.EnsureBucket(ctx, BucketConfig{Name: "no.name"}); err == nil {
		t.Error("a bad name was taken")
	}
	if _, err := c.EnsureBucket(ctx, BucketConfig{Name: "plain"}); err != nil {
		t.Error(err)
	}
	if _, err := c.EnsureBucket(ctx, BucketConfig{Name: "plain", MarkerTTL: time.Second}); err == nil {
		t.Error("a bucket without TTLs was taken for one with")
	}
}

func TestBucket_CreateUpdateDelete(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	for _, cfg := range []BucketConfig{{}, {MarkerTTL: time.Second}} {
		t.Run(fmt.Sprint(cfg.MarkerTTL), func(t *testing.T) {
			ctx := limited(t)
			b := bucket(t, c, cfg)
			defer c.DeleteStream(ctx, "KV_b")
			rev, err := b.Create(ctx, "k", []byte("1"), 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.Create(ctx, "k", []byte("2"), 0); !errors.Is(err, ErrExists) {
				t.Fatalf("Create again: %v", err)
			}
			rev2, err := b.Update(ctx, "k", []byte("2"), rev, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.Update(ctx, "k", []byte("3"), rev, 0); !errors.Is(err, ErrFenced) {
				t.Fatalf("Update of an old revision: %v", err)
			}
			if err := b.Delete(ctx, "k", rev); !errors.Is(err, ErrFenced) {
				t.Fatalf("Delete of an old revision: %v", err)
			}
			if err := b.Delete(ctx, "k", rev2); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Get(ctx, "k"); !errors.Is(err, ErrNotFound) {
				t.Fatalf("Get of a deleted key: %v", err)
			}
			if it, err := b.Last(ctx, "k"); err != nil || !it.Deleted {
				t.Fatalf("Last of a deleted key: %+v, %v", it, err)
			}
			if _, err := b.Create(ctx, "k", []byte("4"), 0); err != nil {
				t.Fatalf("Create of a deleted key: %v", err)
			}
			if _, err := b.Put(ctx, "k", []byte("5"), 0); err != nil {
				t.Fatal(err)
			}
			if it, err := b.Get(ctx, "k"); err != nil || string(it.Value) != "5" {
				t.Fatalf("Get: %+v, %v", it, err)
			}
		})
	}
}

func TestBucket_PutMany(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{MaxBytes: 12 << 20})
	ctx := limited(t)
	items := make([]Item, 5000)
	for i := range items {
		items[i] = Item{Key: fmt.Sprintf("k.%d", i), Value: []byte(fmt.Sprint(i))}
	}
	if err := b.PutMany(ctx, items); err != nil {
		t.Fatal(err)
	}
	got, err := b.List(ctx, "k.>")
	if err != nil || len(got) != len(items) {
		t.Fatalf("List: %d items, %v", len(got), err)
	}
	for i, it := range got {
		if it.Key != items[i].Key || !bytes.Equal(it.Value, items[i].Value) {
			t.Fatalf("item %d is %+v", i, it)
		}
	}
	large := make([]Item, 30)
	for i := range large {
		large[i] = Item{Key: fmt.Sprintf("l.%d", i), Value: make([]byte, 512<<10)}
	}
	var api *APIError
	if err := b.PutMany(ctx, large); !errors.Is(err, ErrNoSpace) || !errors.As(err, &api) {
		t.Fatalf("PutMany into a full bucket: %v", err)
	}
	if err := b.PutMany(ctx, []Item{{Key: "a b"}}); err == nil {
		t.Fatal("a bad key was taken")
	}
	if err := b.PutMany(ctx, nil); err != nil {
		t.Fatal(err)
	}
}

func TestBucket_Read(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{})
	ctx := limited(t)
	read := func(filters []string, from, through uint64) []string {
		t.Helper()
		var keys []string
		if err := b.Read(ctx, filters, from, through, func(it Item) error {
			keys = append(keys, it.Key)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return keys
	}
	if got := read(nil, 0, 0); len(got) != 0 {
		t.Fatalf("empty bucket: %v", got)
	}
	if got := read([]string{"log.>"}, 0, 99); len(got) != 0 {
		t.Fatalf("a sequence that is not there: %v", got)
	}
	var seqs []uint64
	for i := range 6 {
		seqs = append(seqs, must(b.Put(ctx, fmt.Sprintf("log.%d.%d", i%2, i), nil, 0)))
	}
	for _, tc := range []struct {
		filters       []string
		from, through uint64
		want          []string
	}{
		{nil, 0, seqs[2], []string{"log.0.0", "log.1.1", "log.0.2"}},
		{[]string{"log.0.>"}, 0, seqs[4], []string{"log.0.0", "log.0.2", "log.0.4"}},
		{[]string{"log.0.>"}, seqs[1], seqs[2], []string{"log.0.2"}},
		{[]string{"log.0.>"}, 0, 1 << 40, []string{"log.0.0", "log.0.2", "log.0.4"}},
		{[]string{"log.0.>", "log.1.>"}, seqs[3], 0, []string{"log.1.3", "log.0.4", "log.1.5"}},
		{[]string{"log.7.>"}, 0, seqs[5], nil},
		{nil, 1 << 40, 0, nil},
	} {
		if d := cmp.Diff(tc.want, read(tc.filters, tc.from, tc.through)); d != "" {
			t.Errorf("Read(%v, %d, %d): %s", tc.filters, tc.from, tc.through, d)
		}
	}
	stop := fmt.Errorf("stop: %w", ErrUnknownOutcome) // a class that the reader itself would retry
	if err := b.Read(ctx, nil, 0, 0, func(Item) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the callback's error became %v", err)
	}
	if n := consumers(t, c, "KV_b"); n != 0 {
		t.Errorf("%d consumers are left", n)
	}
}

func consumers(tb testing.TB, c *Conn, stream string) int {
	tb.Helper()
	return must(c.streamInfo(tb.Context(), stream)).State.Consumers
}

func TestBucket_Stats(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{})
	ctx := limited(t)
	stats := func(filters ...string) (got []Stat) {
		t.Helper()
		if err := b.Stats(ctx, filters, func(s Stat) error {
			got = append(got, s)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := stats(); len(got) != 0 {
		t.Errorf("an empty bucket has %v", got)
	}
	var seqs []uint64
	for _, it := range []Item{{Key: "a.2", Value: make([]byte, 100_000)}, {Key: "b.1", Value: []byte("seven 7")}, {Key: "a.1", Value: []byte("x")}} {
		seq, err := b.Put(ctx, it.Key, it.Value, 0)
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, seq)
	}
	empty, err := b.Put(ctx, "c", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Delete(ctx, "b.1", seqs[1]); err != nil {
		t.Fatal(err)
	}
	all := []Stat{{"a.2", seqs[0], 100_000}, {"a.1", seqs[2], 1}, {"c", empty, 0}, {"b.1", empty + 1, 0}}
	if diff := cmp.Diff(all, stats()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(all[:3], stats("a.>", "c")); diff != "" {
		t.Error(diff)
	}
	stop := errors.New("enough")
	if err := b.Stats(ctx, nil, func(Stat) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the error of fn came back as %v", err)
	}
}

func TestBucket_Purge(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{})
	ctx := limited(t)
	for i := range 5 {
		must(b.Put(ctx, fmt.Sprintf("log.0.%d", i), nil, 0))
	}
	last := must(b.Put(ctx, "log.1.0", nil, 0))
	keys := func() (out []string) {
		for _, it := range must(b.List(ctx, "")) {
			out = append(out, it.Key)
		}
		return out
	}
	if err := b.Purge(ctx, "log.0.>", 4); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"log.0.3", "log.0.4", "log.1.0"}, keys()); d != "" {
		t.Error(d)
	}
	if err := b.Purge(ctx, "log.0.>", 0); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"log.1.0"}, keys()); d != "" {
		t.Error(d)
	}
	// No marker was left, and the compare-and-set sees an empty log.
	if _, err := b.Append(ctx, "log.0.9", nil, "log.0.>", 0); err != nil {
		t.Error(err)
	}
	if info := must(c.Stream(ctx, "KV_b")); info.LastSeq != last+1 || info.Msgs != 2 {
		t.Errorf("stream: %+v", info)
	}
}

// TestBucket_LeaderReads: no read may be answered by a replica, so none may use the direct API.
func TestBucket_LeaderReads(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	// Also on a bucket that somebody else has created with direct gets.
	if _, err := c.js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "b"}); err != nil {
		t.Fatal(err)
	}
	b := must(c.OpenBucket(t.Context(), "b"))
	spy := connect(t, s)
	seen := make(chan string, 100)
	stop := must(spy.Subscribe("$JS.API.DIRECT.>", func(subject string, _ []byte) { seen <- subject }))
	defer stop()
	ctx := limited(t)
	must(b.Put(ctx, "k", []byte("v"), 0))
	must(b.Get(ctx, "k"))
	must(b.Last(ctx, ">"))
	must(b.List(ctx, ""))
	if err := b.c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := spy.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if len(seen) > 0 {
		t.Errorf("a direct get was made: %s", <-seen)
	}
}

func TestBucket_Watch(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{MarkerTTL: 10 * time.Second})
	ctx, cancel := context.WithCancelCause(limited(t))
	must(b.Put(ctx, "a.1", []byte("1"), 0))
	must(b.Put(ctx, "b.1", []byte("no"), 0))
	must(b.Put(ctx, "a.2", []byte("2"), 0))
	events := make(chan string, 100)
	done := make(chan error, 1)
	go func() {
		done <- b.Watch(ctx, "a.*", func(it Item) error {
			events <- fmt.Sprintf("%s=%s %v", it.Key, it.Value, it.Deleted)
			return nil
		})
	}()
	next := func(want string) {
		t.Helper()
		select {
		case got := <-events:
			if got != want {
				t.Fatalf("got %q, want %q", got, want)
			}
		case <-ctx.Done():
			t.Fatalf("no %q", want)
		}
	}
	next("a.1=1 false")
	next("a.2=2 false")
	next("= false")
	rev := must(b.Put(ctx, "a.1", []byte("3"), 0))
	next("a.1=3 false")
	if err := b.Delete(ctx, "a.1", rev); err != nil {
		t.Fatal(err)
	}
	next("a.1= true")
	must(b.Put(ctx, "a.3", []byte("ttl"), time.Second))
	next("a.3=ttl false")
	next("a.3= true") // expired
	if _, err := b.Get(ctx, "a.3"); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	if _, err := b.Create(ctx, "a.3", []byte("new"), time.Minute); err != nil {
		t.Fatalf("Create of an expired key: %v", err)
	}
	next("a.3=new false")
	bye := errors.New("bye")
	cancel(bye)
	if err := <-done; !errors.Is(err, bye) {
		t.Fatalf("Watch: %v", err)
	}
	if n := consumers(t, c, "KV_b"); n != 0 {
		t.Errorf("%d consumers are left", n)
	}
}

// TestBucket_UpdateKeepsTTL: a renewed lease must still expire.
func TestBucket_UpdateKeepsTTL(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		b := bucket(t, c, BucketConfig{MarkerTTL: time.Minute})
		ctx := t.Context()
		rev := must(b.Create(ctx, "lease", nil, 5*time.Second))
		for range 10 {
			time.Sleep(4 * time.Second)
			rev = must(b.Update(ctx, "lease", nil, rev, 5*time.Second))
		}
		time.Sleep(4900 * time.Millisecond)
		if _, err := b.Get(ctx, "lease"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
		if _, err := b.Get(ctx, "lease"); !errors.Is(err, ErrNotFound) {
			t.Fatalf("the lease is still there: %v", err)
		}
		if _, err := b.Update(ctx, "lease", nil, rev, 5*time.Second); !errors.Is(err, ErrFenced) {
			t.Fatalf("an expired lease was renewed: %v", err)
		}
	})
}

func TestBucket_WatchSurvivesRestart(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	b := bucket(t, c, BucketConfig{})
	ctx, cancel := context.WithCancel(limited(t))
	events := make(chan string, 100)
	done := make(chan error, 1)
	go func() {
		done <- b.Watch(ctx, "", func(it Item) error {
			events <- it.Key
			return nil
		})
	}()
	if got := <-events; got != "" {
		t.Fatalf("first event %q", got)
	}
	must(b.Put(ctx, "one", nil, 0))
	if got := <-events; got != "one" {
		t.Fatal(got)
	}
	s.Restart()
	for {
		if _, err := b.Put(ctx, "two", nil, 0); err == nil {
			break
		} else if !Retryable(err) {
			t.Fatal(err)
		}
	}
	for got := range events {
		if got == "two" {
			break
		}
		t.Errorf("unexpected %q", got)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestBucket_NoSpace(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	b := bucket(t, c, BucketConfig{MaxBytes: 1 << 20})
	ctx := limited(t)
	last, n := uint64(0), 0
	for {
		seq, err := b.Append(ctx, fmt.Sprintf("log.%d", n), make([]byte, 100<<10), "log.>", last)
		if err != nil {
			if !errors.Is(err, ErrNoSpace) || !Retryable(err) {
				t.Fatal(err)
			}
			break
		}
		last, n = seq, n+1
	}
	if n < 5 || n > 11 {
		t.Errorf("%d entries fitted", n)
	}
	if err := b.Purge(ctx, "log.>", last); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Append(ctx, "log.x", nil, "log.>", last); err != nil {
		t.Fatal(err)
	}
	if got := must(b.List(ctx, "")); !slices.ContainsFunc(got, func(it Item) bool { return it.Key == "log.x" }) {
		t.Errorf("items: %v", got)
	}
}
