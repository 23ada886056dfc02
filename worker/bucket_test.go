package worker

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
)

// changesFlow publishes, for each key of the bucket CUST, all values that it has seen.
func changesFlow(tb testing.TB, step func(m *flow.Meta) error, keys ...string) *flow.Flow {
	tb.Helper()
	b := flow.New("count", flow.Options{Partitions: 4})
	changes := flow.From(b, flow.Source{Bucket: "CUST", Keys: keys}, flow.DecodeKV(flow.DecodeText()))
	byKey := flow.KeyBy(changes, func(_ *flow.Meta, u flow.KVUpdate[string]) (string, error) { return u.Key, nil })
	seen := flow.Stateful(byKey, "seen", flow.JSONState[string](1, nil),
		func(m *flow.Meta, s *string, u flow.KVUpdate[string], emit func(string)) error {
			if step != nil {
				if err := step(m); err != nil {
					return err
				}
			}
			if u.Deleted {
				u.Value = "-"
			}
			*s += " " + u.Value
			emit(u.Key + *s)
			return nil
		})
	flow.To(seen, flow.Sink[string]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// cust is the bucket CUST as people make one, with direct gets and a history of one.
func cust(l *lab) *bus.Bucket {
	l.tb.Helper()
	b, err := l.conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "CUST"})
	if err != nil {
		l.tb.Fatal(err)
	}
	l.srv.Admin().Edit("KV_CUST", map[string]any{"allow_direct": true})
	return b
}

// change puts "key=value" into a bucket, and deletes "key".
func change(l *lab, b *bus.Bucket, pairs ...string) {
	l.tb.Helper()
	for _, pair := range pairs {
		key, value, put := strings.Cut(pair, "=")
		var err error
		if put {
			_, err = b.Put(l.ctx, key, []byte(value), 0)
		} else {
			err = b.Delete(l.ctx, key, 0)
		}
		if err != nil {
			l.tb.Fatal(err)
		}
	}
}

// last are the last results by subject.
func last(l *lab) map[string]string {
	got := map[string]string{}
	for _, m := range l.read("OUT") {
		got[m.subject] = string(m.data)
	}
	return got
}

// A bucket drops the values that are replaced while the flow is away: that is no gap. The
// flow goes on with those that are there, and the deletions.
func TestRun_bucketCompacted(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := cust(l)
		change(l, b, "a=1", "b.x=1", "c=1", "d=1", "a=2")
		f := changesFlow(t, nil)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 4)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		for i := range 50 {
			change(l, b, fmt.Sprintf("a=%d", i+3), fmt.Sprintf("c=%d", i+3))
		}
		change(l, b, "b.x", "e=1", "d=2")
		info, err := l.conn.Stream(l.ctx, "KV_CUST")
		if err != nil || info.FirstSeq < 100 {
			t.Fatalf("the bucket begins at %d, %v", info.FirstSeq, err)
		}
		l.drain(f, Config{})
		if rec := l.record(); rec.Drain.Cut["KV_CUST"] != info.LastSeq {
			t.Errorf("cut %v, the bucket ends at %d", rec.Drain.Cut, info.LastSeq)
		}
		want := map[string]string{"out.a": "a 2 52", "out.b=2Ex": "b.x 1 -", "out.c": "c 1 52", "out.d": "d 1 2", "out.e": "e 1"}
		if diff := cmp.Diff(want, last(l)); diff != "" {
			t.Errorf("results (-want +got):\n%s", diff)
		}
		// It was drained, and drops even what the position is behind: only the last one stays.
		change(l, b, "f=1")
		l.srv.Admin().Purge("KV_CUST", info.LastSeq+1)
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitResults(p, 10)
		if got := last(l)["out.f"]; got != "f 1" {
			t.Errorf("f has %q", got)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// Keys of the bucket that the flow does not read are not its own: neither those behind its
// last one at a drain at the head, nor the fences of a bucket that is a sink of others.
func TestRun_bucketKeys(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, _, err := l.conn.EnsureSink(l.ctx, bus.SinkConfig{Bucket: "CUST"}); err != nil {
			t.Fatal(err)
		}
		change(l, cust(l), "eu.a=1", "us.a=1", "eu.b=1", "us.b=1")
		if _, err := l.conn.Publish(l.ctx, bus.FencePrefix+"KV_CUST.other.0.0", nil, nil); err != nil {
			t.Fatal(err)
		}
		f := changesFlow(t, nil, "eu.>", "asia.*")
		l.drain(f, Config{})
		if rec := l.record(); rec.Drain.Cut["KV_CUST"] != 5 || rec.Report.Records["KV_CUST"] != 2 {
			t.Errorf("cut %v, records %v", rec.Drain.Cut, rec.Report.Records)
		}
		want := map[string]string{"out.eu=2Ea": "eu.a 1", "out.eu=2Eb": "eu.b 1"}
		if diff := cmp.Diff(want, last(l)); diff != "" {
			t.Errorf("results (-want +got):\n%s", diff)
		}
	})
}

// While the steps hold the reader up the bucket drops what it has not read, by its age
// and because it was replaced. The flow runs on.
func TestRun_bucketDropsWhileRunning(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := cust(l)
		l.srv.Admin().Edit("KV_CUST", map[string]any{"max_age": time.Minute})
		open, reached := make(chan struct{}), make(chan struct{})
		var once sync.Once
		p := l.start(changesFlow(t, func(*flow.Meta) error {
			once.Do(func() { close(reached) })
			<-open
			return nil
		}), Config{}, nil)
		l.awaitPhase(p, "running")
		change(l, b, "a=1")
		<-reached
		items := make([]bus.Item, 60_000)
		for i := range items {
			items[i] = bus.Item{Key: fmt.Sprintf("k%d", i%40_000), Value: fmt.Append(nil, i)}
		}
		if err := b.PutMany(l.ctx, items); err != nil {
			t.Fatal(err)
		}
		l.pass(2 * time.Minute)
		change(l, b, "z=1")
		close(open)
		l.await("the last key", func() bool {
			if p.ended() {
				t.Fatalf("the worker ended: %v", p.err)
			}
			return p.at().Sources["KV_CUST"].Committed == 60_002
		})
		if results := l.count("OUT"); results >= 60_002 {
			t.Fatalf("%d results: nothing was dropped unread", results)
		}
		if got := last(l)["out.z"]; got != "z 1" {
			t.Errorf("z has %q", got)
		}
		if w := p.at().Warnings; len(w) > 0 {
			t.Errorf("warnings %v", w)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// A crash at any point of the protocol, with a bucket that goes on to change: no value that
// is seen counts twice, and the last one of each key is seen.
func TestRun_bucketCrash(t *testing.T) {
	for _, point := range []string{"read", "committed", "published", "noted"} {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				b := cust(l)
				f := changesFlow(t, nil)
				n := map[string]int{}
				more := func() {
					for range 20 {
						key := fmt.Sprintf("k%d", l.rng.IntN(5))
						n[key]++
						change(l, b, fmt.Sprintf("%s=%d", key, n[key]))
					}
				}
				for round := range 4 {
					more()
					c := &crasher{point: point, left: 3 + 5*round}
					p := l.start(f, Config{}, c.probe)
					l.await("the crash", func() bool { more(); l.pass(20 * time.Millisecond); return p.ended() })
				}
				l.drain(f, Config{})
				for subject, result := range last(l) {
					key, values, _ := strings.Cut(result, " ")
					before := 0
					for word := range strings.FieldsSeq(values) {
						var v int
						if _, err := fmt.Sscan(word, &v); err != nil || v <= before {
							t.Fatalf("%s: %s", subject, result)
						}
						before = v
					}
					if before != n[key] {
						t.Errorf("%s: %s, want it to end with %d", subject, result, n[key])
					}
					delete(n, key)
				}
				if len(n) > 0 {
					t.Errorf("without a result: %v", n)
				}
			})
		})
	}
}

// What still is an error: a bucket that is not there, another one of its name, one that has
// lost its end, and one that goes away.
func TestRun_bucketErrors(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := changesFlow(t, nil)
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "there is no bucket CUST; create it first, for example: nats kv add CUST") {
			t.Fatalf("without the bucket: %v", err)
		}
		change(l, cust(l), "a=1", "b=1")
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 2)
		if err := l.conn.DeleteStream(l.ctx, "KV_CUST"); err != nil {
			t.Fatal(err)
		}
		if err := p.wait(); !errors.Is(err, bus.ErrNotFound) {
			t.Fatalf("deleted: %v", err)
		}
		change(l, cust(l), "a=1", "b=2", "c=3")
		if err := l.start(f, Config{}, nil).wait(); !errors.Is(err, control.ErrSourceRecreated) {
			t.Fatalf("created anew: %v", err)
		}
	})
}
