package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"natsflow/flow"
)

func TestKeyBy_Errors(t *testing.T) {
	b := newFlow()
	textTo(keyed(b))
	r := run(t, b)
	r.feed("k a", "nokey", "panic-key", "k b")
	got := r.seal()
	if len(got) != 4 {
		t.Fatalf("outputs %+v", got)
	}
	panicked := got[2].Headers[flow.HeaderDeadError]
	if !strings.HasPrefix(panicked, "step panicked: no key at all") {
		t.Errorf("error %q", panicked)
	}
	diffOutputs(t, got, out("k", "k a"), dead("key", "no key", 2, "nokey"),
		dead("key", panicked, 3, "panic-key"), out("k", "k b"))
}

func TestKeyBy_Partitions(t *testing.T) {
	const partitions = 7
	b := flow.New("test", flow.Options{Partitions: partitions})
	textTo(keyed(b))
	f := build(t, b)
	r := f.Router(0)
	for seq := uint64(1); seq <= 500; seq++ {
		if err := r.Route("in", seq, 1, fmt.Appendf(nil, "k%d x", seq%50)); err != nil {
			t.Fatal(err)
		}
	}
	records, batches := 0, 0
	r.Take(func(b *flow.Batch) {
		records, batches = records+b.Len(), batches+1
		task := f.Task(b.Partition)
		if task.Partition() != b.Partition {
			t.Errorf("task %d for partition %d", task.Partition(), b.Partition)
		}
		if err := task.Play(b); err != nil {
			t.Fatal(err)
		}
		b.Release()
		s, err := task.Seal()
		if err != nil {
			t.Fatal(err)
		}
		err = flow.Outputs(s.Outbox, func(_ int, o flow.Output) error {
			key, _, _ := strings.Cut(string(o.Data), " ")
			if want := flow.Partition(key, partitions); want != b.Partition {
				t.Errorf("key %q in partition %d, want %d", key, b.Partition, want)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	if records != 500 || batches != partitions {
		t.Errorf("%d records in %d batches", records, batches)
	}
	r.Take(func(*flow.Batch) { t.Error("a batch is taken twice") })
}

// What a task has applied is not played again when the source is read from an
// earlier position; other tasks still get their records.
func TestRouter_Seen(t *testing.T) {
	b := flow.New("test", flow.Options{Partitions: 2})
	textTo(flow.Stateful(keyed(b), "count", decimalState, func(_ *flow.Meta, n *int64, v string, emit func(string)) error {
		*n++
		emit(fmt.Sprintf("%s %d", v, *n))
		return nil
	}))
	r := run(t, b)
	var a, c string // keys of the two partitions
	for i := 0; a == "" || c == ""; i++ {
		if key := fmt.Sprintf("k%d", i); flow.Partition(key, 2) == 0 {
			a = key
		} else {
			c = key
		}
	}
	// Sequences 3 and 4 have no key: task 3%2 and 4%2 publish them.
	records := []record{{seq: 1, data: a + " x"}, {seq: 2, data: c + " x"}, {seq: 3, data: "bad3"}, {seq: 4, data: "bad4"}, {seq: 5, data: c + " y"}}
	r.routers["IN"].Seen(0, 3)
	r.routers["IN"].Seen(1, 2)
	if err := r.play(records...); err != nil {
		t.Fatal(err)
	}
	diffOutputs(t, r.seal(), dead("key", "no key", 4, "bad4"), dead("key", "no key", 3, "bad3"), out(c, c+" y 1"))
}

// Two keys of one source: a task plays the records that come to it in the order
// of the source, and each record along its branches in the order of the flow.
func TestKeyBy_TwoKeysKeepTheOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		partitions := rapid.IntRange(1, 3).Draw(t, "partitions")
		b := flow.New("test", flow.Options{Partitions: partitions})
		src := text(b)
		field := func(i int) func(*flow.Meta, string) (string, error) {
			return func(_ *flow.Meta, v string) (string, error) {
				f := strings.Fields(v)[i]
				if f == "-" {
					return "", errors.New("none")
				}
				return f, nil
			}
		}
		type mark struct {
			seq    uint64
			branch int
		}
		played := map[int][]mark{}
		current := 0
		note := func(branch int) func(m *flow.Meta, v string) {
			return func(m *flow.Meta, _ string) { played[current] = append(played[current], mark{m.Seq, branch}) }
		}
		one := flow.Inspect(flow.KeyBy(src, field(0)), note(0))
		two := flow.Inspect(flow.KeyBy(src, field(1)), note(1))
		textTo(flow.Merge(one, two))
		f := build(t, b)
		router := f.Router(0)
		tasks := make([]*flow.Task, partitions)
		for p := range tasks {
			tasks[p] = f.Task(p)
		}
		want := map[int][]mark{}
		keys := rapid.SampledFrom([]string{"a", "b", "c", "d", "-"})
		records := rapid.Uint64Range(1, 40).Draw(t, "records")
		for seq := uint64(1); seq <= records; seq++ {
			k0, k1 := keys.Draw(t, "first"), keys.Draw(t, "second")
			if err := router.Route("in", seq, 1, []byte(k0+" "+k1)); err != nil {
				t.Fatal(err)
			}
			for i, key := range []string{k0, k1} {
				if key != "-" {
					p := flow.Partition(key, partitions)
					want[p] = append(want[p], mark{seq, i})
				}
			}
			if rapid.IntRange(0, 5).Draw(t, "take") == 0 {
				router.Take(func(b *flow.Batch) {
					current = b.Partition
					if err := tasks[current].Play(b); err != nil {
						t.Fatal(err)
					}
					b.Release()
				})
			}
		}
		router.Take(func(b *flow.Batch) {
			current = b.Partition
			if err := tasks[current].Play(b); err != nil {
				t.Fatal(err)
			}
		})
		if diff := cmp.Diff(want, played, cmp.AllowUnexported(mark{})); diff != "" {
			t.Fatalf("played (-want +got):\n%s", diff)
		}
	})
}

// More keys than the array has that Play keeps on the stack.
func TestKeyBy_ManyKeys(t *testing.T) {
	b := newFlow()
	src := text(b)
	var want []published
	for i := range 12 {
		s := flow.KeyBy(src, func(_ *flow.Meta, v string) (string, error) { return fmt.Sprintf("%s%d", v, i), nil })
		flow.ToKV(s, flow.KVSink[string]{Bucket: fmt.Sprintf("B%d", i), Encode: flow.EncodeText()})
	}
	for _, v := range []string{"x", "y"} {
		for i := range 12 {
			want = append(want, published{Sink: fmt.Sprintf("kv B%d", i), Subject: fmt.Sprintf("$KV.B%d.%s%d", i, v, i), Data: v})
		}
	}
	run(t, b).want([]string{"x", "y"}, want...)
}

func TestFrom_DecodeFails(t *testing.T) {
	b := newFlow()
	src := flow.From(b, flow.Source{Stream: "IN"}, func(_ *flow.Meta, data []byte) (string, error) {
		switch string(data) {
		case "bad":
			return "", errors.New("is bad")
		case "panic":
			return string(data[len(data)]), nil
		}
		return string(data), nil
	}, flow.ID("in"))
	textTo(flow.KeyBy(src, firstWord))
	r := run(t, b)
	r.feed("bad", "panic", "k a")
	got := r.seal()
	if len(got) != 3 || got[1].Headers[flow.HeaderDeadStep] != "in" ||
		!strings.Contains(got[1].Headers[flow.HeaderDeadError], "index out of range [5] with length 5") {
		t.Fatalf("outputs %+v", got)
	}
	diffOutputs(t, []published{got[0], got[2]}, dead("in", "decode: is bad", 1, "bad"), out("k", "k a"))
	if r.sealed.DeadLetters != 2 || r.sealed.Records != 3 {
		t.Errorf("sealed %+v", r.sealed)
	}
}
