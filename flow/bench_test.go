package flow_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"natsflow/flow"
)

// benchFlow is the hot path: the payload stays bytes, the key is a slice of it,
// the state is a number and the result is written by hand.
func benchFlow(tb testing.TB, key func(m *flow.Meta, v []byte) (string, error)) *flow.Flow {
	tb.Helper()
	type result struct {
		key string
		n   int64
	}
	b := flow.New("bench", flow.Options{})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeBytes())
	counts := flow.Stateful(flow.KeyBy(src, key), "count", decimalState,
		func(m *flow.Meta, n *int64, _ []byte, emit func(result)) error {
			*n++
			emit(result{m.Key, *n})
			return nil
		})
	flow.To(counts, flow.Sink[result]{
		Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[result]("out."),
		Encode: func(dst []byte, _ *flow.Meta, r result) ([]byte, error) {
			dst = append(append(append(dst, `{"key":"`...), r.key...), `","n":`...)
			return append(strconv.AppendInt(dst, r.n, 10), '}'), nil
		},
	})
	return build(tb, b)
}

// benchRecords makes payloads of 200 bytes that go through all keys.
func benchRecords(keys int) (subjects []string, payloads [][]byte) {
	const pad = "................................................................................................................................................................"
	for i := range keys {
		// A step that hits the keys in no order that the memory would like.
		n := i * 7919 % keys
		subjects = append(subjects, fmt.Sprintf("in.k%06d", n))
		payloads = append(payloads, fmt.Appendf(nil, `{"key":"k%06d","pad":"%s"}`, n, pad))
	}
	return subjects, payloads
}

// BenchmarkRecord measures router and task together, with a seal for each batch:
// ns/op and allocs/op are those of one record.
func BenchmarkRecord(b *testing.B) {
	fromPayload := func(_ *flow.Meta, v []byte) (string, error) { return string(v[8:15]), nil }
	fromSubject := func(m *flow.Meta, _ []byte) (string, error) { return m.Subject[3:], nil }
	b.Run("key=payload", func(b *testing.B) { benchmarkRecord(b, benchFlow(b, fromPayload)) })
	b.Run("key=subject", func(b *testing.B) { benchmarkRecord(b, benchFlow(b, fromSubject)) })
}

func benchmarkRecord(b *testing.B, f *flow.Flow) {
	const batch = 1000
	subjects, payloads := benchRecords(10_000)
	r := f.Router(0)
	tasks := make([]*flow.Task, f.Options().Partitions)
	for p := range tasks {
		tasks[p] = f.Task(p)
	}
	take := func(bt *flow.Batch) {
		t := tasks[bt.Partition]
		if err := t.Play(bt); err != nil {
			b.Fatal(err)
		}
		bt.Release()
		if _, err := t.Seal(); err != nil {
			b.Fatal(err)
		}
	}
	seq := uint64(0)
	round := func(n int) {
		for range n {
			i := seq % uint64(len(subjects))
			seq++
			if err := r.Route(subjects[i], seq, int64(seq), payloads[i]); err != nil {
				b.Fatal(err)
			}
		}
		r.Take(take)
	}
	// All keys have state before the clock starts.
	for range len(subjects) / batch {
		round(batch)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for left := b.N; left > 0; left -= batch {
		round(min(left, batch))
	}
}

// BenchmarkTask_Seal seals 10,000 changed keys, in tables of that many and of a
// hundred times as many. seal-ns/key is the median time of the seal alone; stopping
// the clock of the benchmark around it would stop the world too. ns/op has the
// routing and the playing of the records in it.
func BenchmarkTask_Seal(b *testing.B) {
	const changed = 10_000
	for _, keys := range []int{changed, 100 * changed} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) { benchmarkSeal(b, keys, changed) })
	}
}

func benchmarkSeal(b *testing.B, keys, changed int) {
	bld := flow.New("seal", flow.Options{Partitions: 1})
	src := flow.From(bld, flow.Source{Stream: "IN"}, flow.DecodeBytes())
	keyed := flow.KeyBy(src, func(m *flow.Meta, _ []byte) (string, error) { return m.Subject, nil })
	flow.To(flow.Stateful(keyed, "count", decimalState, func(_ *flow.Meta, n *int64, _ []byte, _ func([]byte)) error {
		*n++
		return nil
	}), bytesTo("OUT", "out."))
	f := build(b, bld)
	r, t := f.Router(0), f.Task(0)
	seq := uint64(0)
	play := func(names []string) {
		for _, name := range names {
			seq++
			if err := r.Route(name, seq, int64(seq), nil); err != nil {
				b.Fatal(err)
			}
		}
		r.Take(func(bt *flow.Batch) {
			if err := t.Play(bt); err != nil {
				b.Fatal(err)
			}
			bt.Release()
		})
	}
	seal := func() time.Duration {
		start := time.Now()
		if _, err := t.Seal(); err != nil {
			b.Fatal(err)
		}
		return time.Since(start)
	}
	names := make([]string, keys)
	for i := range names {
		names[i] = fmt.Sprintf("key-%08d", i)
	}
	for part := range slices.Chunk(names, changed) {
		play(part)
		seal()
	}
	// The keys change in another order than that of their making, or the memory
	// would like it.
	rand.New(rand.NewPCG(1, 2)).Shuffle(keys, func(i, j int) { names[i], names[j] = names[j], names[i] })
	var pauses []time.Duration
	for from := 0; b.Loop(); from = (from + changed) % keys {
		play(names[from : from+changed])
		pauses = append(pauses, seal())
	}
	slices.Sort(pauses)
	b.ReportMetric(float64(pauses[len(pauses)/2].Nanoseconds())/float64(changed), "seal-ns/key")
}
