package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/testenv"
)

// lookupFlow adds to each record of IN what the bucket CUST has for its key, and
// publishes "seq key value".
func lookupFlow(tb testing.TB, opts flow.Options, step func(m *flow.Meta) error) *flow.Flow {
	tb.Helper()
	if opts.Partitions == 0 {
		opts.Partitions = 4
	}
	b := flow.New("count", opts)
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	found := flow.Lookup(keyed, "look", "CUST", func(m *flow.Meta, _ string) (string, error) { return m.Key, nil },
		func(m *flow.Meta, _ string, value []byte, ok bool) (string, error) {
			if step != nil {
				if err := step(m); err != nil {
					return "", err
				}
			}
			if !ok {
				value = []byte("none")
			}
			return fmt.Sprintf("%d %s %s", m.Seq, m.Key, value), nil
		})
	flow.To(found, flow.Sink[string]{Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText()})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// ask puts a record into the source and returns the result that it gets.
func ask(l *lab, p *process, key string) string {
	l.tb.Helper()
	seq := l.put(key)
	prefix, got := fmt.Sprintf("%d %s ", seq, key), ""
	l.await("the result of "+key, func() bool {
		if p.ended() {
			l.tb.Fatalf("the worker ended: %v", p.err)
		}
		for _, m := range l.read("OUT") {
			if value, ok := strings.CutPrefix(string(m.data), prefix); ok {
				got = value
				return true
			}
		}
		return false
	})
	return got
}

// judgeOnce says that each record has one result.
func judgeOnce(l *lab) map[string]int {
	l.tb.Helper()
	seen, values := map[string]bool{}, map[string]int{}
	for _, m := range l.read("OUT") {
		words := strings.Fields(string(m.data))
		if seen[words[0]] {
			l.tb.Fatalf("record %s has two results", words[0])
		}
		seen[words[0]] = true
		values[words[2]]++
	}
	if len(seen) != len(l.keys) {
		l.tb.Fatalf("%d results of %d records", len(seen), len(l.keys))
	}
	return values
}

// All of the bucket is there before the first record is looked up.
func TestRun_tableLoadedFirst(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := cust(l)
		var items []bus.Item
		for i := range 20_000 {
			items = append(items, bus.Item{Key: fmt.Sprintf("k%d", i), Value: fmt.Append(nil, "v")})
		}
		if err := b.PutMany(l.ctx, items); err != nil {
			t.Fatal(err)
		}
		l.feed(l.rng, 1000, 20_000)
		early := -1
		f := lookupFlow(t, flow.Options{}, nil)
		p := l.start(f, Config{}, func(p *process, _ context.Context, point, _ string) error {
			if point == "tables-loaded" {
				early = l.count("OUT")
			}
			return nil
		})
		l.awaitResults(p, 1000)
		if got := judgeOnce(l); got["v"] != 1000 || early != 0 {
			t.Errorf("values %v; %d results before the bucket was loaded", got, early)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if got := consumersOf(l, "KV_CUST"); len(got) > 0 {
			t.Errorf("consumers that are left: %v", got)
		}
	})
}

func consumersOf(l *lab, stream string) (names []string) {
	for _, c := range l.srv.Admin().Consumers(stream) {
		names = append(names, c.Name)
	}
	return names
}

// Changes are seen later, over a restart of the server and the loss of the consumer, too;
// and deletions that happened while it was away.
func TestRun_tableFollows(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := cust(l)
		change(l, b, "a=1", "b=1")
		reg := prometheus.NewRegistry()
		p := l.start(lookupFlow(t, flow.Options{}, nil), Config{Registerer: reg}, nil)
		l.awaitPhase(p, "running")
		want := func(want string) {
			t.Helper()
			var got []string
			for _, key := range []string{"a", "b", "c"} {
				got = append(got, ask(l, p, key))
			}
			if s := strings.Join(got, " "); s != want {
				t.Errorf("got %s, want %s", s, want)
			}
		}
		want("1 1 none")
		change(l, b, "a=2", "b", "c=1")
		l.pass(time.Second)
		want("2 none 1")
		for _, name := range consumersOf(l, "KV_CUST") {
			l.srv.Admin().DeleteConsumer("KV_CUST", name)
		}
		change(l, b, "a", "b=3")
		l.pass(10 * time.Second)
		want("none 3 1")
		l.srv.Restart()
		l.await("the server", func() bool {
			_, err := b.Put(l.ctx, "a", []byte("4"), 0)
			return err == nil
		})
		if err := b.Purge(l.ctx, "c", 0); err != nil {
			t.Fatal(err)
		}
		l.pass(20 * time.Second)
		want("4 3 none")
		is := p.at().Tables["CUST"]
		if is.Keys != 2 || is.Bytes != 4 || is.Behind != 0 {
			t.Errorf("status %+v", is)
		}
		for name, want := range map[string]float64{"natsflow_table_keys": 2, "natsflow_table_bytes": 4, "natsflow_table_behind_seconds": 0} {
			if got, ok := gauge(t, reg, name, "CUST"); !ok || got != want {
				t.Errorf("%s is %v, %v, want %v", name, got, ok, want)
			}
		}
		judgeOnce(l)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if _, ok := gauge(t, reg, "natsflow_table_keys", "CUST"); ok {
			t.Error("the metric of a table outlives its session")
		}
	})
}

// A copy that does not follow its bucket is warned of: the lookups find what was there.
func TestRun_tableBehind(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := cust(l)
		change(l, b, "a=1")
		var cut atomic.Bool
		link := testenv.NewLink(t)
		// Nothing that has to do with the stream of the bucket comes through.
		link.Sift(testenv.ToServer, func(subject string) bool { return !cut.Load() || !strings.Contains(subject, "KV_CUST") })
		p := l.startOver(link, lookupFlow(t, flow.Options{}, nil), Config{}, nil)
		l.awaitPhase(p, "running")
		cut.Store(true)
		for _, name := range consumersOf(l, "KV_CUST") {
			l.srv.Admin().DeleteConsumer("KV_CUST", name)
		}
		change(l, b, "a=2")
		l.await("a warning", func() bool { return len(p.at().Warnings) > 0 })
		if w := p.at().Warnings[0]; !strings.Contains(w, "lookups in bucket CUST find what was there") {
			t.Errorf("warning %q", w)
		}
		if got := ask(l, p, "a"); got != "1" {
			t.Errorf("a is %s", got)
		}
		if behind := p.at().Tables["CUST"].Behind; behind < 5 {
			t.Errorf("behind for %v s", behind)
		}
		cut.Store(false)
		l.await("the end of the warning", func() bool { return len(p.at().Warnings) == 0 })
		if got := ask(l, p, "a"); got != "2" {
			t.Errorf("a is %s", got)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// A bucket changes all the time, workers crash, come and go: each record has one result.
func TestRun_tableOnce(t *testing.T) {
	for _, point := range []string{"read", "processed", "committed", "published", "noted"} {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				b := cust(l)
				f := lookupFlow(t, flow.Options{}, nil)
				steady := l.start(f, Config{Name: "w2"}, nil)
				n := 0
				more := func() {
					n++
					change(l, b, fmt.Sprintf("k%d=%d", n%8, n), fmt.Sprintf("k%d", (n+3)%8))
					l.more(20)
				}
				for round := range 3 {
					c := &crasher{point: point, left: 5 + 7*round}
					p := l.start(f, Config{}, c.probe)
					l.await("the crash", func() bool {
						more()
						l.pass(50 * time.Millisecond)
						return p.ended() || n > 300*(round+1)
					})
					if !p.ended() {
						if err := p.leave(); err != nil && !errors.Is(err, errCrash) {
							t.Fatal(err)
						}
					}
				}
				l.awaitResults(steady, len(l.keys))
				judgeOnce(l)
			})
		})
	}
}

func TestRun_tableErrors(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := lookupFlow(t, flow.Options{}, nil)
		const missing = "there is no bucket CUST, in which the flow looks keys up (look); create it first, for example: nats kv add CUST"
		if err := l.start(f, Config{}, nil).wait(); !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), missing) {
			t.Fatalf("without the bucket: %v", err)
		}
		change(l, cust(l), "a=1")
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		if got := ask(l, p, "a"); got != "1" {
			t.Errorf("a is %s", got)
		}
		if err := l.conn.DeleteStream(l.ctx, "KV_CUST"); err != nil {
			t.Fatal(err)
		}
		if err := p.wait(); !errors.Is(err, ErrSource) || !errors.Is(err, bus.ErrNotFound) && !strings.Contains(err.Error(), missing) {
			t.Fatalf("deleted: %v", err)
		}
		judgeOnce(l)
	})
}

// A drain at the head and its resume, with a lookup in a later stage: it has what the
// bucket has then.
func TestRun_tableDrain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := cust(l)
		change(l, b, "k0=1", "k1=1")
		f := lookupFlow(t, flow.Options{}, nil)
		l.feed(l.rng, 100, 2)
		l.drain(f, Config{})
		change(l, b, "k0=2", "k1=2")
		l.feed(l.rng, 50, 2)
		p := l.start(f, Config{Resume: true}, nil)
		l.awaitResults(p, 150)
		if got := judgeOnce(l); got["1"] != 100 || got["2"] != 50 {
			t.Errorf("values %v", got)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}
