package flow_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"natsflow/flow"
)

// countWindows counts the records of each key and window; the state has a version.
func countWindows(tb fataler, w flow.Windows, version int, migrate func(int, []byte, *int64) error) *flow.Flow {
	tb.Helper()
	codec := decimalState
	codec.Version, codec.Migrate = version, migrate
	b := newFlow()
	results, _ := flow.Window(keyed(b), "window", w, flow.WindowAggregator[string, int64, string]{
		State: codec,
		Add:   func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
		Merge: func(into, from *int64) error { *into += *from; return nil },
		Result: func(m *flow.Meta, w flow.Span, n *int64) (string, error) {
			return fmt.Sprintf("%s %s-%s %d", m.Key, clockText(w.Start), clockText(w.End), *n), nil
		},
	})
	flow.To(results, textSink("OUT"))
	return build(tb, b)
}

// The state of a window step can be read by a later version of it, and not by one
// of other windows.
func TestWindow_State(t *testing.T) {
	hour := flow.Tumbling(time.Hour)
	r := start(t, countWindows(t, hour, 1, nil))
	r.feed("a x", "b x", "a x")
	r.seal()
	delta := r.deltas[0][0]
	migrate := func(version int, data []byte, n *int64) error {
		if version != 1 {
			return errors.New("what is this")
		}
		if err := decimalState.Decode(data, n); err != nil {
			return err
		}
		*n += 100
		return nil
	}
	for _, tc := range []struct {
		f    *flow.Flow
		data []byte
		want string
	}{
		{countWindows(t, hour, 1, nil), delta, ""},
		{countWindows(t, flow.Sliding(2*time.Hour, time.Hour), 1, nil), delta, ""},
		{countWindows(t, hour, 2, migrate), delta, ""},
		{countWindows(t, hour, 2, nil), delta, "state of version 1, the step has version 2 and no Migrate"},
		{countWindows(t, flow.Sessions(time.Hour, 0), 1, nil), delta, "what is stored are tumbling or sliding windows where the step has session ones; give the changed step another id"},
		{countWindows(t, flow.CountWindows(3), 1, nil), delta, "where the step has count ones"},
		{countWindows(t, hour, 1, nil), delta[:len(delta)-1], "not an image"},
	} {
		got := ""
		if err := tc.f.Task(0).Load(tc.data); err != nil {
			got = err.Error()
		}
		if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s, want %s", got, tc.want)
		}
	}
	task := countWindows(t, hour, 2, migrate).Task(0)
	if err := task.Load(delta); err != nil {
		t.Fatal(err)
	}
	task.Loaded()
	if err := task.Advance(0, int64(time.Hour)); err != nil {
		t.Fatal(err)
	}
	s, err := task.Seal()
	if err != nil {
		t.Fatal(err)
	}
	if got := r.outputs(s.Outbox); len(got) != 2 || got[0].Data != "a "+clockText(time.Unix(0, 0))+"-"+clockText(time.Unix(3600, 0))+" 102" {
		t.Errorf("outputs %+v", got)
	}
}

// Bytes that are not windows are an error, never a panic.
func FuzzWindow_Load(f *testing.F) {
	for _, w := range []flow.Windows{flow.Tumbling(time.Hour), flow.Sessions(time.Hour, 0), flow.CountWindows(5), flow.GlobalWindow(), {Count: 2, Early: time.Hour}} {
		r := start(f, countWindows(f, w, 1, nil))
		r.feed("a x", "b x", "a x")
		r.seal()
		f.Add(r.deltas[0][0])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, w := range []flow.Windows{flow.Tumbling(time.Hour), flow.Sessions(time.Hour, 0), flow.CountWindows(5), flow.GlobalWindow(), {Count: 2, Early: time.Hour}} {
			task := countWindows(t, w, 1, nil).Task(0)
			if err := task.Load(data); err != nil {
				if !errors.Is(err, flow.ErrState) {
					t.Fatal(err)
				}
				continue
			}
			task.Loaded()
			if err := task.Advance(0, 1<<62); err != nil {
				t.Fatal(err)
			}
			if more, err := task.Drain(flow.Drain{Mode: flow.Finish, Epoch: 1}, 1<<20); more || err != nil || task.OpenWindows() > 0 {
				t.Fatalf("%d windows are left, more %v, %v", task.OpenWindows(), more, err)
			}
		}
	})
}

// The definition of a flow holds its windows and clocks; that of a flow without
// them is what it was before there were any.
func TestFlow_HashOfWindows(t *testing.T) {
	seen := map[string]string{}
	for _, w := range []flow.Windows{
		flow.Tumbling(time.Hour), flow.Tumbling(2 * time.Hour), flow.Sliding(2*time.Hour, time.Hour), flow.TumblingDays(1, nil),
		flow.TumblingDays(1, time.FixedZone("Here", 3600)), flow.SlidingDays(2, 1, nil), flow.Sessions(time.Hour, 0), flow.Sessions(time.Hour, 2*time.Hour), flow.CountWindows(5),
		{Size: time.Hour, Every: time.Hour, Offset: 1},
		{Size: time.Hour, Every: time.Hour, AllowedLateness: 1},
		{Size: time.Hour, Every: time.Hour, Emit: flow.EmitEach},
		{Size: time.Hour, Every: time.Hour, Early: 1},
		{Size: time.Hour, Every: time.Hour, OnDrain: flow.EmitPartial},
		flow.GlobalWindow(),
	} {
		hash := countWindows(t, w, 1, nil).Hash()
		if other, there := seen[hash]; there {
			t.Errorf("%v and %s have one hash", w, other)
		}
		seen[hash] = w.String()
	}
	clocks := map[string]bool{}
	for _, c := range []flow.EventTime[string]{{}, {Lateness: 1}, {Idle: 1}, {MaxAhead: 1}} {
		clocks[windowFlow{windows: flow.Tumbling(time.Hour), clock: &c}.build(t).Hash()] = true
	}
	clocks[windowFlow{windows: flow.Tumbling(time.Hour)}.build(t).Hash()] = true
	if len(clocks) != 5 {
		t.Errorf("%d hashes of 5 clocks", len(clocks))
	}
}

// BenchmarkWindow folds records into windows of which a thousand, and a million, are
// open: the cost of a record is the same but for the caches. One record in ten
// belongs to a new window, and one closes.
func BenchmarkWindow(b *testing.B) {
	for _, open := range []int{1_000, 1_000_000} {
		b.Run(fmt.Sprintf("open=%d", open), func(b *testing.B) {
			bld := flow.New("bench", flow.Options{Partitions: 1})
			src := flow.From(bld, flow.Source{Stream: "IN"}, flow.DecodeBytes())
			results, _ := flow.Window(flow.KeyBy(src, func(m *flow.Meta, _ []byte) (string, error) { return m.Subject, nil }), "window",
				flow.Sessions(time.Duration(10*open), 0), flow.WindowAggregator[[]byte, int64, []byte]{
					State:  decimalState,
					Add:    func(_ *flow.Meta, n *int64, _ []byte) error { *n++; return nil },
					Merge:  func(into, from *int64) error { *into += *from; return nil },
					Result: func(_ *flow.Meta, _ flow.Span, _ *int64) ([]byte, error) { return nil, nil },
				})
			flow.To(results, bytesTo("OUT", "out."))
			f := build(b, bld)
			r, t := f.Router(0), f.Task(0)
			seq, name := 0, []byte("key-")
			play := func(n int) {
				for range n {
					seq++
					// Ten records a key, then it rests until its window has closed. A key is a
					// string of its own, as the client makes one of each message.
					name = strconv.AppendInt(name[:4], int64(100_000_000+seq/10*7919%(2*open)), 10)
					if err := r.Route(string(name), uint64(seq), int64(seq), nil); err != nil {
						b.Fatal(err)
					}
				}
				r.Take(func(bt *flow.Batch) {
					if err := t.Play(bt); err != nil {
						b.Fatal(err)
					}
					bt.Release()
				})
				if _, err := t.Seal(); err != nil {
					b.Fatal(err)
				}
			}
			for range 11 * open / 1000 {
				play(1000)
			}
			if n := t.Keys(); n < open/2 {
				b.Fatalf("%d windows are open", n)
			}
			b.ReportAllocs()
			b.ResetTimer()
			for left := b.N; left > 0; left -= 1000 {
				play(min(left, 1000))
			}
		})
	}
}
