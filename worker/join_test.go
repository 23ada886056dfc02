package worker

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/testenv"
)

// joinedFlow joins the records of IN and IN2, and gives those of IN the newest record of
// IN2 at their time. Records are such as "k1 v17".
type joinedFlow struct {
	kind    flow.JoinKind
	within  time.Duration
	clock   *flow.EventTime[string]
	options flow.Options
	// crossed lets both sources cross to another stage before.
	crossed bool
}

func (j joinedFlow) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	b := flow.New("count", j.options)
	read := func(stream string) flow.Stream[string] {
		src := flow.Source{Stream: stream}
		if j.clock != nil {
			clock := *j.clock
			clock.Of = func(_ *flow.Meta, v string) (time.Time, error) { return timeIn(v) }
			src.Time = clock
		}
		key := func(_ *flow.Meta, v string) (string, error) {
			key, _, _ := strings.Cut(v, " ")
			return key, nil
		}
		s := flow.From(b, src, flow.DecodeText())
		if j.crossed {
			return flow.Rekey(flow.KeyBy(s, func(m *flow.Meta, v string) (string, error) { return key(m, "x"+v) }), key, flow.TextCodec())
		}
		return flow.KeyBy(s, key)
	}
	left, right := read("IN"), read("IN2")
	text := func(v *string) string {
		if v == nil {
			return "-"
		}
		return *v
	}
	both := func(_ *flow.Meta, l, r *string) (string, bool, error) { return text(l) + " + " + text(r), true, nil }
	sink := func(stream string) flow.Sink[string] {
		prefix := strings.ToLower(stream) + "."
		return flow.Sink[string]{Stream: stream, Subjects: []string{prefix + "*"}, Subject: flow.KeySubject[string](prefix), Encode: flow.EncodeText()}
	}
	pairs, _, _ := flow.Join(left, right, "join", flow.JoinConfig[string, string, string]{
		Kind: j.kind, Before: j.within, After: j.within, Left: flow.TextCodec(), Right: flow.TextCodec(), Join: both,
	})
	flow.To(pairs, sink("OUT"))
	entries, _ := flow.JoinTable(left, right, "table", flow.TableConfig[string, string, string]{
		Kind: flow.LeftJoin, Stream: flow.TextCodec(), Table: flow.TextCodec(), Join: both,
	})
	flow.To(entries, sink("ENTRIES"))
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// fedRecord is a record of a source.
type fedRecord struct {
	text, key string
	at        int64
}

// records returns what a source has.
func (l *lab) records(j joinedFlow, stream string) []fedRecord {
	l.tb.Helper()
	info, err := l.conn.Stream(l.ctx, stream)
	if err != nil {
		l.tb.Fatal(err)
	}
	var all []fedRecord
	l.each(stream, info.LastSeq, func(m *bus.Msg) {
		r := fedRecord{text: string(m.Data), at: m.Time}
		r.key, _, _ = strings.Cut(r.text, " ")
		if j.clock != nil {
			at, err := timeIn(r.text)
			if err != nil {
				l.tb.Fatal(err)
			}
			r.at = at.UnixNano()
		}
		all = append(all, r)
	})
	return all
}

// judgeJoins says that every result of the naive model is there, once.
func (l *lab) judgeJoins(j joinedFlow) {
	l.tb.Helper()
	left, right := l.records(j, "IN"), l.records(j, "IN2")
	var pairs, entries []string
	met := map[string]bool{}
	for _, a := range left {
		entry := fedRecord{text: "-"}
		for _, b := range right {
			if a.key != b.key {
				continue
			}
			if d := time.Duration(a.at - b.at).Abs(); d <= j.within {
				met[a.text], met[b.text] = true, true
				pairs = append(pairs, a.text+" + "+b.text)
			}
			if b.at <= a.at && b.at >= entry.at {
				entry = b
			}
		}
		entries = append(entries, a.text+" + "+entry.text)
	}
	for _, a := range left {
		if !met[a.text] && j.kind != flow.InnerJoin {
			pairs = append(pairs, a.text+" + -")
		}
	}
	for _, b := range right {
		if !met[b.text] && j.kind == flow.OuterJoin {
			pairs = append(pairs, "- + "+b.text)
		}
	}
	for stream, want := range map[string][]string{"OUT": pairs, "ENTRIES": entries} {
		var got []string
		for _, m := range l.read(stream) {
			got = append(got, string(m.data))
		}
		notEnd := func(all []string) []string {
			all = slices.DeleteFunc(all, func(s string) bool { return strings.Contains(s, "end ") })
			slices.Sort(all)
			return all
		}
		want, got = notEnd(want), notEnd(got)
		if diff := cmp.Diff(want, got); diff != "" {
			l.tb.Fatalf("%s: %d results, want %d (-want +got):\n%.3000s", stream, len(got), len(want), diff)
		}
		if len(want) == 0 {
			l.tb.Fatalf("%s: no result", stream)
		}
	}
}

// secondSource makes the source IN2.
func (l *lab) secondSource() {
	l.tb.Helper()
	if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN2", Subjects: []string{"two.>"}}); err != nil {
		l.tb.Fatal(err)
	}
}

// What waits for a time comes out by the server's clock, and waits over a stop.
func TestJoin_withoutRecords(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.secondSource()
		j := joinedFlow{kind: flow.OuterJoin, within: 10 * time.Second, options: flow.Options{Partitions: 4}}
		f := j.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.feedTo("two.", l.rng, 5, 4)
		l.pass(time.Second)
		l.feedTo("in.", l.rng, 5, 8)
		l.pass(time.Second)
		if n := l.count("ENTRIES"); n != 5 {
			t.Errorf("%d entries a second after the records, want 5", n)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.drain(f, Config{})
		for _, m := range l.read("OUT") {
			if s := string(m.data); strings.HasPrefix(s, "- ") || strings.HasSuffix(s, " -") {
				t.Errorf("a stop has ended the waiting: %s", s)
			}
		}
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitPhase(p, "running")
		l.pass(15 * time.Second)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeJoins(j)
	})
}

// TestRun_joinHistories is TestRun_manyWorkers with joins of two sources: workers come,
// leave, die and freeze, the flow is drained and resumed, and each result is there once.
func TestRun_joinHistories(t *testing.T) {
	runHistories(t, sinkKinds[:2], 2, 12, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 17))
		l := newLab(t, srv)
		l.secondSource()
		kind.make(l)
		j := joinedFlow{kind: flow.JoinKind(seed % 3), within: 400 * time.Millisecond, options: flow.Options{Partitions: 8, CommitInterval: 20 * time.Millisecond}}
		if seed%4 > 1 {
			j.clock = &flow.EventTime[string]{Lateness: 5 * time.Second}
		}
		j.crossed = seed%5 == 4
		f := j.build(t)
		l.throughDrains(rng, f, func() { l.feedTo("two.", rng, rng.IntN(60), 8) })
		last := l.start(f, Config{Name: "last"}, nil)
		l.awaitPhase(last, "running")
		for _, after := range []time.Duration{0, time.Minute} {
			for _, subject := range []string{"in.end", "two.end"} {
				if _, err := l.conn.Publish(l.ctx, subject, nil, fmt.Appendf(nil, "end %d", time.Now().Add(after).UnixMilli())); err != nil {
					t.Fatal(err)
				}
			}
		}
		l.pass(10 * time.Second)
		if err := last.leave(); err != nil {
			t.Fatal(err)
		}
		l.judgeJoins(j)
	})
}
