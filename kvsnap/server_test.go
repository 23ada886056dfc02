package kvsnap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/testenv"
)

// startBus starts a server in the process and connects to it.
func startBus(tb testing.TB, opts ...testenv.Option) *bus.Conn {
	tb.Helper()
	srv := testenv.StartServer(tb, append([]testenv.Option{testenv.DontListen()}, opts...)...)
	conn, err := bus.Connect(tb.Context(), bus.Config{InProcess: srv.InProcess})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(conn.Close)
	return conn
}

func openBucket(tb testing.TB, conn *bus.Conn, maxBytes int64) *bus.Bucket {
	tb.Helper()
	b, err := conn.EnsureBucket(tb.Context(), bus.BucketConfig{Name: "natsflow_orders", MaxBytes: maxBytes})
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// serverStore is a store with the default sizes on a server of its own.
func serverStore(tb testing.TB) *Store {
	tb.Helper()
	return New(Config{Bucket: openBucket(tb, startBus(tb), 0), Flow: "orders", Owner: "w1"})
}

func TestServer_largeState(t *testing.T) {
	s := serverStore(t)
	l, _, _ := mustClaim(t, s, testTask)
	const keys = 200_000
	big := noise(1, 5<<20)
	mustAppend(t, l, Commit{Head: testHead(1), Delta: pair(nil, "big", string(big)), Outbox: noise(2, 3<<20)})
	b := l.BeginBase()
	var body []byte
	for i := range keys {
		body = pair(body[:0], fmt.Sprint("key-", i), string(noise(uint64(i), 500)))
		b.Add(body)
		if i == keys/2 {
			b.Add(pair(nil, "big", string(big)))
			mustAppend(t, l, Commit{Head: testHead(2), Delta: pair(nil, "late", "1")})
		}
	}
	if err := b.Finish(t.Context(), Head{}); err != nil {
		t.Fatal(err)
	}
	_, r, got := mustClaim(t, s, testTask)
	if len(got) != keys+2 || got["late"] != "1" || got["big"] != string(big) {
		t.Fatalf("%d keys", len(got))
	}
	for i := range keys {
		if got[fmt.Sprint("key-", i)] != string(noise(uint64(i), 500)) {
			t.Fatalf("key %d differs", i)
		}
	}
	if len(r.Unpublished) != 1 || !bytes.Equal(r.Unpublished[0].Outbox, noise(2, 3<<20)) || r.StateBytes < 100<<20 {
		t.Errorf("%d bytes, %d outboxes", r.StateBytes, len(r.Unpublished))
	}
}

// Many processes claim the same task at the same time: all of their claims are
// in order, and just one of them can write afterwards.
func TestServer_racingClaims(t *testing.T) {
	conn := startBus(t)
	bucket := openBucket(t, conn, 0)
	for round := range 10 {
		const racers = 8
		var wg sync.WaitGroup
		var mu sync.Mutex
		wrote, generations := 0, map[uint64]bool{}
		for i := range racers {
			wg.Go(func() {
				s := New(Config{Bucket: bucket, Flow: "orders", Owner: "same"})
				l, r, err := s.Claim(t.Context(), testTask, nil)
				if err == nil {
					_, err = l.Append(t.Context(), Commit{Delta: []byte{byte(i)}})
				}
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					wrote++
				case !errors.Is(err, bus.ErrFenced):
					t.Errorf("racer %d: %v", i, err)
				}
				if r.Generation != 0 {
					if generations[r.Generation] {
						t.Errorf("generation %d twice", r.Generation)
					}
					generations[r.Generation] = true
				}
			})
		}
		wg.Wait()
		if wrote == 0 {
			t.Errorf("round %d: nobody could write", round)
		}
	}
	s := New(Config{Bucket: bucket, Flow: "orders"})
	if _, r, err := s.Claim(t.Context(), testTask, nil); err != nil {
		t.Fatalf("%v, %+v", err, r)
	}
}

func TestServer_fullBucket(t *testing.T) {
	conn := startBus(t)
	bucket := openBucket(t, conn, 300_000)
	s := New(Config{Bucket: bucket, Flow: "orders", ChunkSize: 10_000})
	l, _, _ := mustClaim(t, s, testTask)
	want := state{}
	commit := func(i, size int) error {
		m := map[string]string{fmt.Sprint(i): string(noise(uint64(i), size))}
		_, err := l.Append(t.Context(), Commit{Delta: pairs(m), Head: Head{Published: l.N()}})
		if err == nil {
			_ = want.load(pairs(m))
		}
		return err
	}
	i := 0
	var err error
	for ; err == nil && i < 1000; i++ {
		err = commit(i%5, 30_000)
	}
	if !errors.Is(err, bus.ErrNoSpace) {
		t.Fatalf("after %d commits: %v", i, err)
	}
	// A base of the whole does not fit, either; neither leaves anything behind.
	before, err := bucket.Bytes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b := l.BeginBase()
	want.addTo(b, 1000)
	if err := b.Finish(t.Context(), Head{Published: l.N()}); !errors.Is(err, bus.ErrNoSpace) {
		t.Fatalf("base in a full bucket: %v", err)
	}
	if after, err := bucket.Bytes(t.Context()); err != nil || after > before {
		t.Fatalf("%d bytes before and %d after the failed base, %v", before, after, err)
	}
	// What was acknowledged can be opened, and the log goes on, as soon as
	// something else makes room: here a small commit still fits.
	l, _, got := mustClaim(t, s, testTask)
	if !maps.Equal(want, got) {
		t.Fatal("state differs")
	}
	if err := commit(0, 1000); err != nil {
		t.Fatalf("small commit: %v", err)
	}
	if _, _, got := mustClaim(t, s, testTask); !maps.Equal(want, got) {
		t.Error("state differs at the end")
	}
}

// The whole account is full, as a full disk would be; then there is room again.
func TestServer_fullAccount(t *testing.T) {
	srv := testenv.StartServer(t, testenv.DontListen(), testenv.LimitStore(200_000))
	conn, err := bus.Connect(t.Context(), bus.Config{InProcess: srv.InProcess})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	bucket := openBucket(t, conn, 0)
	s := New(Config{Bucket: bucket, Flow: "orders", ChunkSize: 10_000})
	l, _, _ := mustClaim(t, s, testTask)
	var n uint64
	for i := 0; err == nil && i < 1000; i++ {
		if _, err = l.Append(t.Context(), Commit{Delta: pair(nil, fmt.Sprint(i), string(noise(1, 8000)))}); err == nil {
			n = l.N()
		}
	}
	if !errors.Is(err, bus.ErrNoSpace) {
		t.Fatalf("after %d entries: %v", n, err)
	}
	srv.Restart(testenv.LimitStore(10_000_000))
	last, err := l.Append(t.Context(), Commit{Delta: pair(nil, "more", string(noise(1, 8000)))})
	if err != nil || last != n+1 {
		t.Fatalf("with room again: entry %d, %v", last, err)
	}
	if _, _, got := mustClaim(t, s, testTask); len(got) != int(n) || got["more"] == "" {
		t.Errorf("%d keys of %d entries", len(got), n)
	}
}

// The server goes away in the middle of commits and comes back: no error, no
// entry lost or doubled.
func TestServer_restartUnderCommits(t *testing.T) {
	srv := testenv.StartServer(t, testenv.DontListen())
	conn, err := bus.Connect(t.Context(), bus.Config{InProcess: srv.InProcess})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	s := New(Config{Bucket: openBucket(t, conn, 0), Flow: "orders", ChunkSize: 1000})
	l, _, _ := mustClaim(t, s, testTask)
	started := make(chan struct{})
	done := make(chan error, 1)
	const commits = 300
	go func() {
		for i := range commits {
			if i == 50 {
				close(started)
			}
			if _, err := l.Append(t.Context(), Commit{Delta: pair(nil, fmt.Sprint(i), string(noise(1, 2000)))}); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	<-started
	srv.Restart()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	_, r, got := mustClaim(t, s, testTask)
	if len(got) != commits || r.Entries != commits+2 {
		t.Errorf("%d keys, %d entries", len(got), r.Entries)
	}
}

// A bucket that is deleted ends a claim and a commit with an error that says so,
// and does not make them wait.
func TestServer_bucketGone(t *testing.T) {
	conn := startBus(t)
	bucket := openBucket(t, conn, 0)
	s := New(Config{Bucket: bucket, Flow: "orders"})
	l, _, _ := mustClaim(t, s, testTask)
	if err := conn.DeleteStream(t.Context(), "KV_natsflow_orders"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(t.Context(), Commit{}); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("append: %v", err)
	}
	if _, _, err := s.Claim(t.Context(), testTask, nil); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("claim: %v", err)
	}
}

func TestServer_inspect(t *testing.T) {
	conn := startBus(t)
	bucket := openBucket(t, conn, 0)
	s := New(Config{Bucket: bucket, Flow: "orders", Owner: "w1", ChunkSize: 1000})
	if tasks, err := s.Tasks(t.Context()); err != nil || len(tasks) != 0 {
		t.Fatalf("empty bucket: %v, %v", tasks, err)
	}
	if _, err := s.Entries(t.Context(), testTask); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("entries of nothing: %v", err)
	}
	other := TaskID{Stage: 1, Partition: 0}
	mustClaim(t, s, other)
	l, _, _ := mustClaim(t, s, testTask)
	st := state{"a": string(noise(1, 2500))}
	mustAppend(t, l, Commit{Head: testHead(1), Delta: pairs(st), Outbox: []byte("out"), Outputs: 3})
	mustBase(t, l, st, Head{})
	mustAppend(t, l, Commit{Head: testHead(2), Delta: pair(nil, "b", "2")})
	tasks, err := s.Tasks(t.Context())
	if err != nil || len(tasks) != 2 {
		t.Fatalf("%v, %v", tasks, err)
	}
	got := tasks[0]
	want := TaskInfo{
		Task: testTask, Kind: KindCommit, N: 4, Generation: 1, Owner: "w1", Time: got.Time, Head: testHead(2),
		Entries: 4, Chunks: 6, Base: 3, Bytes: got.Bytes, BaseBytes: got.BaseBytes,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if tasks[1].Task != other || tasks[1].Kind != KindClaim || got.Bytes < 5000 || got.BaseBytes < 2500 || got.Time.IsZero() {
		t.Errorf("got %+v", tasks)
	}
	entries, err := s.Entries(t.Context(), testTask)
	if err != nil || len(entries) != 4 {
		t.Fatalf("%v, %v", entries, err)
	}
	if e := entries[1]; e.Key != "log.0.3.2" || e.Kind != KindCommit || e.Outputs != 3 || len(e.Sections) != 2 || e.Sections[0].Chunks != 3 {
		t.Errorf("got %+v", e)
	}
	if e := entries[2]; e.Kind != KindBase || e.From != 2 || e.Floor != 0 || e.Sections[0].Set == "" {
		t.Errorf("got %+v", e)
	}
	// Damage is listed, not fatal.
	if err := bucket.Purge(t.Context(), "log.0.3.2", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := bucket.Put(t.Context(), "log.1.0.2", []byte("rubbish"), 0); err != nil {
		t.Fatal(err)
	}
	tasks, err = s.Tasks(t.Context())
	if err != nil || !strings.Contains(tasks[0].Problem, "log.0.3.2") || !strings.Contains(tasks[1].Problem, "log.1.0.2") {
		t.Errorf("%+v, %v", tasks, err)
	}
	if entries, err := s.Entries(t.Context(), other); err != nil || entries[1].Problem == "" {
		t.Errorf("%+v, %v", entries, err)
	}
}

// The sizes, and the entries that are read by their names, on a real server: all
// that Tasks tells is also in the list of all entries.
func TestServer_tasksOfALargeLog(t *testing.T) {
	s := serverStore(t)
	mustClaim(t, s, TaskID{Stage: 1})
	l, _, _ := mustClaim(t, s, testTask)
	for i := range 15 {
		mustAppend(t, l, Commit{Head: testHead(l.N()), Delta: noise(uint64(i), 400_000)})
		if i == 4 {
			mustBase(t, l, state{"a": string(noise(9, 1_000_000))}, Head{Published: 3})
		}
		for range 20 {
			mustAppend(t, l, Commit{Head: testHead(l.N())})
		}
	}
	tasks, err := s.Tasks(t.Context())
	if err != nil || len(tasks) != 2 {
		t.Fatalf("%+v, %v", tasks, err)
	}
	entries, err := s.Entries(t.Context(), testTask)
	if err != nil {
		t.Fatal(err)
	}
	last := entries[len(entries)-1]
	want := TaskInfo{
		Task: testTask, Kind: last.Kind, N: last.N, Generation: last.Generation, Owner: "w1", Time: last.Time, Head: last.Head,
		Entries: len(entries), Bytes: tasks[0].Bytes,
	}
	var size int64
	for _, e := range entries {
		size += e.Bytes
		if e.Kind == KindBase {
			want.Base, want.BaseBytes, want.Chunks = e.N, e.Sections[0].Stored, e.Sections[0].Chunks
			size += e.Sections[0].Stored
		}
	}
	if diff := cmp.Diff(want, tasks[0]); diff != "" {
		t.Error(diff)
	}
	// Chunks have a header each.
	if over := tasks[0].Bytes - size; want.Chunks == 0 || over < 1 || over > int64(want.Chunks)*300 {
		t.Errorf("%d bytes, of which %d are entries and bodies in %d chunks", tasks[0].Bytes, size, want.Chunks)
	}
}

func BenchmarkLog_Append(b *testing.B) {
	s := serverStore(b)
	const logs = 16
	var open []*Log
	for p := range logs {
		l, _, err := s.Claim(b.Context(), TaskID{Partition: p}, nil)
		if err != nil {
			b.Fatal(err)
		}
		open = append(open, l)
	}
	bodies := benchBodies(logs)
	b.SetBytes(20_000)
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	work := make(chan int)
	for p, l := range open {
		wg.Go(func() {
			for range work {
				if err := appendAndBase(b.Context(), l, bodies[p]); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for i := range b.N {
		work <- i
	}
	close(work)
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "appends/s")
}

// benchBodies are deltas and outboxes of 20 KB in all that compress as counts
// and JSON do.
func benchBodies(n int) [][2][]byte {
	var list [][2][]byte
	for p := range n {
		var delta, outbox []byte
		for i := 0; len(delta) < 10_000; i++ {
			delta = pair(delta, fmt.Sprintf("customer-%08d", (i*7919+p*31)%1_000_000), fmt.Sprint(i*i*17+p))
		}
		for i := 0; len(outbox) < 10_000; i++ {
			outbox = fmt.Appendf(outbox, `{"customer":"customer-%08d","count":%d,"at":%d}`, (i*7919+p)%1_000_000, i*i, 1_700_000_000+i)
		}
		list = append(list, [2][]byte{delta, outbox})
	}
	return list
}

func appendAndBase(ctx context.Context, l *Log, bodies [2][]byte) error {
	_, err := l.Append(ctx, Commit{Head: Head{Offsets: map[string]uint64{"ORDERS": l.N()}, Published: l.N()}, Delta: bodies[0], Outbox: bodies[1], Outputs: 100})
	if err != nil || !l.BaseDue() {
		return err
	}
	b := l.BeginBase()
	b.Add(bodies[0])
	return b.Finish(ctx, Head{Published: l.N()})
}

func BenchmarkStore_Claim(b *testing.B) {
	s := serverStore(b)
	l, _, err := s.Claim(b.Context(), testTask, nil)
	if err != nil {
		b.Fatal(err)
	}
	base := l.BeginBase()
	var body []byte
	for i := range 60_000 {
		if body = pair(body, fmt.Sprintf("customer-%08d", i*7919%1_000_000), fmt.Sprintf(`{"count":%d,"last":%d,"sum":%d.25}`, i, i*31, i*i)); len(body) > 64<<10 {
			base.Add(body)
			body = body[:0]
		}
	}
	base.Add(body)
	if err := base.Finish(b.Context(), Head{}); err != nil {
		b.Fatal(err)
	}
	for i := range 300 { // and as much again in deltas
		if _, err := l.Append(b.Context(), Commit{Delta: noise(uint64(i), 10_000)}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	var size int64
	for b.Loop() {
		_, r, err := s.Claim(b.Context(), testTask, func([]byte) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		size = r.StateBytes
	}
	b.SetBytes(size)
}
