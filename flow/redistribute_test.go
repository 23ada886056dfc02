package flow_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// costly stands for a step that takes long: it takes a value apart.
func costly(s flow.Stream[string]) flow.Stream[string] {
	return flow.FlatMap(s, func(_ *flow.Meta, v string, emit func(string)) error {
		for word := range strings.FieldsSeq(v) {
			emit(word)
		}
		return nil
	})
}

// TestRedistribute_Partition: the sequence says which task has a record, whatever its
// subject; a record that its task has applied is dropped.
func TestRedistribute_Partition(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 4})
	seen := map[int][]string{}
	textTo(flow.Redistribute(text(b)))
	f := build(t, b)
	router := f.Router(0)
	router.Seen(2, 6)
	for seq := range uint64(11) {
		if err := router.Route("in.same", seq+1, 0, fmt.Appendf(nil, "%d", seq+1)); err != nil {
			t.Fatal(err)
		}
	}
	router.Take(func(batch *flow.Batch) {
		task := f.Task(batch.Partition)
		if err := task.Play(batch); err != nil {
			t.Fatal(err)
		}
		sealed, err := task.Seal()
		if err != nil {
			t.Fatal(err)
		}
		err = flow.Outputs(sealed.Outbox, func(_ int, o flow.Output) error {
			seen[batch.Partition] = append(seen[batch.Partition], string(o.Subject)+" "+string(o.Data))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		batch.Release()
	})
	want := map[int][]string{
		0: {"out.in=2Esame 4", "out.in=2Esame 8"},
		1: {"out.in=2Esame 1", "out.in=2Esame 5", "out.in=2Esame 9"},
		2: {"out.in=2Esame 10"},
		3: {"out.in=2Esame 3", "out.in=2Esame 7", "out.in=2Esame 11"},
	}
	if diff := cmp.Diff(want, seen); diff != "" {
		t.Error(diff)
	}
}

// TestRedistribute_Mirrored: what the server has partitioned stays there, since another
// worker does not read it.
func TestRedistribute_Mirrored(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 4})
	textTo(flow.Redistribute(flow.From(b, flow.Source{Stream: "IN", Subjects: []string{"in.*"}, PartitionBy: []int{2}}, flow.DecodeText())))
	router := build(t, b).Router(0)
	for seq := range uint64(8) {
		if err := router.RouteMirrored("3.in.x", seq+1, 0, []byte("v")); err != nil {
			t.Fatal(err)
		}
	}
	router.Take(func(batch *flow.Batch) {
		if batch.Partition != 3 || batch.Len() != 8 {
			t.Errorf("%d records for partition %d", batch.Len(), batch.Partition)
		}
	})
}

// TestRedistribute_Rekey counts words behind a step that runs in all tasks, with crashes and
// stops: each record counts once.
func TestRedistribute_Rekey(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := flow.New("test", flow.Options{Partitions: rapid.IntRange(1, 5).Draw(t, "partitions")})
		all := costly(flow.Redistribute(text(b)))
		byWord := flow.Rekey(all, func(_ *flow.Meta, v string) (string, error) { return v, nil }, flow.TextCodec())
		textTo(flow.Aggregate(byWord, "count", flow.Aggregator[string, int64, string]{
			State:  decimalState,
			Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
			Result: func(_ *flow.Meta, n *int64) (string, error) { return fmt.Sprint(*n), nil },
		}))
		r := flowtest.New(t, build(t, b))
		count := map[string]int{}
		var want []string
		lines := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "a b", "b c a", "", "d"}), 1, 30).Draw(t, "lines")
		for _, line := range lines {
			r.Push(flowtest.Record{Data: line, Subject: "in.x"})
			for word := range strings.FieldsSeq(line) {
				count[word]++
				want = append(want, fmt.Sprintf("out.%s %d", word, count[word]))
			}
			switch rapid.IntRange(0, 5).Draw(t, "then") {
			case 0:
				r.Crash()
			case 1:
				r.Drain()
			case 2:
				r.Commit()
			}
		}
		var got []string
		for _, res := range r.Results("OUT") {
			got = append(got, res.Subject+" "+res.Data)
		}
		slices.Sort(want)
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

// TestRedistribute_DeadLetter: a record that fails behind it is one of its task.
func TestRedistribute_DeadLetter(t *testing.T) {
	b := newFlow()
	textTo(flow.Filter(flow.Redistribute(text(b), flow.ID("spread")), func(_ *flow.Meta, v string) (bool, error) {
		if v == "bad" {
			return false, errNotCombined
		}
		return true, nil
	}, flow.ID("keep")))
	r := run(t, b)
	r.want([]string{"x", "bad", "y"}, out("in", "x"), dead("keep", "not combined", 2, "bad"), out("in", "y"))
}

// TestRedistribute_Lookup: exactly one task has a record, so that it may look something up,
// also the key.
func TestRedistribute_Lookup(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 3})
	rated := rate(flow.Redistribute(text(b)))
	textTo(flow.Rekey(rated, func(_ *flow.Meta, v string) (string, error) { return v[strings.LastIndexByte(v, ' ')+1:], nil }, flow.TextCodec()))
	r := flowtest.New(t, build(t, b))
	r.Set("RATES", "EUR", "2")
	r.Push(flowtest.Record{Data: "a EUR"}, flowtest.Record{Data: "b USD"}, flowtest.Record{Data: "c EUR"})
	var got []string
	for _, res := range r.Results("OUT") {
		got = append(got, res.Subject+" "+res.Data)
	}
	slices.Sort(got)
	if diff := cmp.Diff([]string{"out.2 a EUR 2", "out.2 c EUR 2", "out.none b USD none"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestRedistribute_Errors(t *testing.T) {
	by := func(_ *flow.Meta, v string) (string, error) { return v, nil }
	// spread is a second source, redistributed.
	spread := func(b *flow.Builder) flow.Stream[string] {
		return flow.Redistribute(flow.From(b, flow.Source{Stream: "IN2"}, flow.DecodeText()), flow.ID("spread"))
	}
	const state = "keeps state for each key, and the stream was redistributed: put a Rekey before it"
	for name, test := range map[string]mistake{
		"with a key":   {func(_ *flow.Builder, s flow.Stream[string]) { flow.Redistribute(s, flow.ID("x")) }, `step "x": the stream has a key`},
		"twice":        {func(b *flow.Builder, _ flow.Stream[string]) { flow.Redistribute(spread(b), flow.ID("x")) }, `step "x": the stream is redistributed already`},
		"before a key": {func(b *flow.Builder, _ flow.Stream[string]) { flow.KeyBy(spread(b), by, flow.ID("x")) }, `step "x": the stream is redistributed: give it a key by Rekey`},
		"before state": {func(b *flow.Builder, _ flow.Stream[string]) {
			flow.Aggregate(spread(b), "x", counting(flow.EmitUpdate))
		}, `step "x": aggregate ` + state},
		"before a window, behind a filter": {func(b *flow.Builder, _ flow.Stream[string]) {
			kept := flow.Filter(spread(b), func(*flow.Meta, string) (bool, error) { return true, nil })
			flow.Window(kept, "x", flow.Tumbling(time.Hour), flow.Reduce(textState, joinWords))
		}, `step "x": window ` + state},
		"before dedupe": {func(b *flow.Builder, _ flow.Stream[string]) { flow.Dedupe(spread(b), "x", time.Hour, by) }, `step "x": dedupe ` + state},
		"joined as the second one": {func(b *flow.Builder, s flow.Stream[string]) {
			flow.Join(s, spread(b), "x", flow.JoinConfig[string, string, string]{Windows: flow.Tumbling(time.Hour), Left: flow.TextCodec(), Right: flow.TextCodec(), Join: joinValues})
		}, `step "x": the second stream was redistributed`},
		"merged with a key": {func(b *flow.Builder, s flow.Stream[string]) { flow.Merge(s, spread(b)) }, "some of the streams are redistributed and some are not"},
	} {
		t.Run(name, test.check)
	}
}
