package flow_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// stagedTimers runs the scripts of timerFlow behind a change of key: a record "k7 a add"
// has the key k7 first, and then a.
func stagedTimers(tb fataler, clock *flow.EventTime[string], ttl time.Duration, partitions int) *flow.Flow {
	tb.Helper()
	b := flow.New("test", flow.Options{Partitions: partitions})
	src := flow.Source{Stream: "IN"}
	if clock != nil {
		c := *clock
		c.Of = func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }
		src.Time = c
	}
	in := flow.From(b, src, flow.DecodeText())
	if clock != nil {
		in = flow.Map(in, func(_ *flow.Meta, v string) (string, error) {
			_, v, _ = strings.Cut(v, " ")
			return v, nil
		})
	}
	rest := func(s flow.Stream[string]) flow.Stream[string] {
		return flow.Map(s, func(_ *flow.Meta, v string) (string, error) {
			_, v, _ = strings.Cut(v, " ")
			return v, nil
		})
	}
	again := flow.Rekey(rest(flow.KeyBy(in, firstWord)), firstWord, flow.TextCodec())
	flow.To(flow.StatefulWith(rest(again), "timers", flow.StatefulConfig[string, int64, string]{
		State: decimalState, TTL: ttl,
		On: func(m *flow.Meta, n *int64, v string, emit func(string)) error {
			return timerScript(m, n, v, func(s string) { emit(m.Key + " " + s) })
		},
		OnTimer: func(m *flow.Meta, n *int64, name string, emit func(string)) error {
			return timerFired(m, n, name, func(s string) { emit(m.Key + " " + s) })
		},
	}), textSink("OUT"))
	return build(tb, b)
}

// Timers and TTLs behind a change of key go by the lowest of the times that cross, also
// of tasks that have no records.
func TestTimer_LaterStage(t *testing.T) {
	for _, tc := range []struct {
		name  string
		clock *flow.EventTime[string]
		lines []string
		want  []string
	}{
		{
			"stream time", nil,
			[]string{
				"10:00 k1 a add x=10:30 y~10:40", "commit", "10:05 k2 b add", "commit",
				"10:31 k3 b emit", "commit", // in one commit, records come before timers
				"10:41 k1 a emit", "commit",
				"pause 25m", "commit", "11:30 k1 b emit", "commit", // b was touched at 10:31
				"11:32 k2 c x=11:40", "commit", "pause 1h", "commit", "13:00 k2 a emit", "commit", "13:00 k2 b emit", "commit",
			},
			[]string{
				"b record 1", "a x 10:30/10:30 2", "a record 2", "a y 10:40/10:40 3",
				"b record 1", "c x 11:40/11:40 1", "a record 0", "b record 0",
			},
		},
		{
			"event time", &flow.EventTime[string]{},
			[]string{
				"10:00 @ 1:00 k1 a add x=1:30 y~10:30", "commit",
				"10:10 @ 1:20 k2 b add", "commit",
				"10:20 @ 1:40 k3 b emit", "commit",
				"pause 10m", "commit", // the stream's time alone
				"10:50 @ 2:00 k1 a s~10:40 r=1:00", "commit",
				"pause 3h", "commit", "14:00 @ 2:01 k1 a emit", "commit",
			},
			[]string{
				"b record 1", "a x 01:30/10:20 2", "a y 01:40/10:30 3",
				"a r 01:00/10:30 4", "a s 01:40/10:40 5", "a s 02:00/11:00 6", "a s 02:00/11:20 7", "a s 02:00/11:40 8", "a record 0",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lines := tc.lines
			for _, partitions := range []int{1, 4} {
				calm := playTimers(t, stagedTimers(t, tc.clock, time.Hour, partitions), lines...)
				got := calm.Data("OUT")
				if partitions > 1 {
					slices.SortStableFunc(got, byKey)
					slices.SortStableFunc(tc.want, byKey)
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Fatalf("%d partitions (-want +got):\n%s", partitions, diff)
				}
				wantErrors(t, calm)
				for i := range lines {
					r := playTimers(t, stagedTimers(t, tc.clock, time.Hour, partitions), slices.Concat(lines[:i+1], []string{"crash"}, lines[i+1:])...)
					again := r.Data("OUT")
					if partitions > 1 {
						slices.SortStableFunc(again, byKey)
					}
					if diff := cmp.Diff(tc.want, again); diff != "" {
						t.Fatalf("%d partitions, a crash behind %q (-want +got):\n%s", partitions, lines[i], diff)
					}
				}
			}
		})
	}
}

// cross plays what a task of the first stage seals in one of the second.
func cross(t *testing.T, f *flow.Flow, from, to *flow.Task) {
	t.Helper()
	s, err := from.Seal()
	if err != nil {
		t.Fatal(err)
	}
	router := f.ExchangeRouter(to.Stage())
	err = flow.Outputs(s.Outbox, func(_ int, o flow.Output) error {
		p, err := flow.ExchangePartition(string(o.Subject))
		return errors.Join(err, router.RouteFrame(p, 1, o.Data))
	})
	router.Take(func(b *flow.Batch) {
		if b.Partition == to.Partition() && err == nil {
			err = to.Play(b)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

func loaded(t *testing.T, f *flow.Flow, stage int, image []byte) *flow.Task {
	t.Helper()
	task := f.StageTask(stage, 0)
	if err := task.Load(image); err != nil {
		t.Fatal(err)
	}
	task.Loaded()
	return task
}

// The time of the streams crosses though no record has brought a time of its own yet, and
// is kept.
func TestTimer_LaterStageWithoutWatermark(t *testing.T) {
	f := stagedTimers(t, &flow.EventTime[string]{}, time.Hour, 2)
	first, later := f.Task(0), f.StageTask(1, 0)
	at := flowtest.Start.Add(time.Hour).UnixNano()
	if err := first.AdvanceStream(0, at, nil); err != nil {
		t.Fatal(err)
	}
	if !first.Untold() {
		t.Fatal("the next stage is not to be told the time of the streams")
	}
	cross(t, f, first, later)
	if later.StreamTime(0) != at || later.Dirty() || !later.Unsealed() {
		t.Fatalf("the time is %d, want %d", later.StreamTime(0), at)
	}
	s, err := later.Seal()
	if err != nil {
		t.Fatal(err)
	}
	again := loaded(t, f, 1, s.Delta)
	if again.StreamTime(0) != at || again.Watermark(0) != first.Watermark(0) || again.StreamNow() != first.Watermark(0) {
		t.Errorf("loaded: %d, want %d", again.StreamTime(0), at)
	}
}
