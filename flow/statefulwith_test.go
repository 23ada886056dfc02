package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// statefulFlow runs scripts as a Stateful, or a StatefulWith with or without timers and a
// TTL, all with the same id.
func statefulFlow(tb fataler, kind string, version int, migrate func(int, []byte, *int64) error) *flow.Flow {
	tb.Helper()
	codec := decimalState
	codec.Version, codec.Migrate = version, migrate
	b := newFlow()
	on := func(m *flow.Meta, n *int64, v string, emit func(string)) error {
		_, v, _ = strings.Cut(v, " ")
		return timerScript(m, n, v, emit)
	}
	if kind == "Stateful" {
		textTo(flow.Stateful(keyed(b), "script", codec, on))
		return build(tb, b)
	}
	cfg := flow.StatefulConfig[string, int64, string]{State: codec, On: on}
	if strings.Contains(kind, "timers") {
		cfg.OnTimer = func(m *flow.Meta, n *int64, name string, emit func(string)) error {
			return timerFired(m, n, name, emit)
		}
	}
	if strings.Contains(kind, "TTL") {
		cfg.TTL = time.Hour
	}
	textTo(flow.StatefulWith(keyed(b), "script", cfg))
	return build(tb, b)
}

// What one kind of stateful step has stored is read by the others.
func TestStatefulWith_ReadsOthers(t *testing.T) {
	kinds := []string{"Stateful", "with", "with timers", "with TTL", "with timers and TTL"}
	for _, was := range kinds {
		for _, is := range kinds {
			for _, image := range []bool{false, true} {
				r := start(t, statefulFlow(t, was, 1, nil))
				r.want([]string{"a add", "a add emit", "b add emit", "b drop"}, out("a", "record 2"), out("b", "record 1"))
				if image {
					r.tasks[0].BeginImage()
					part, more, err := r.tasks[0].NextImage(10)
					if err != nil || more {
						t.Fatal(err, more)
					}
					r.deltas[0] = [][]byte{part}
				}
				r.become(statefulFlow(t, is, 1, nil))
				r.want([]string{"a add emit", "b emit"}, out("a", "record 3"), out("b", "record 0"))
				r.become(statefulFlow(t, was, 1, nil))
				r.want([]string{"a emit"}, out("a", "record 3"))
				r.become(statefulFlow(t, is, 2, func(version int, data []byte, n *int64) error {
					if version != 1 {
						return fmt.Errorf("version %d", version)
					}
					err := decimalState.Decode(data, n)
					*n += 100
					return err
				}))
				r.want([]string{"a emit"}, out("a", "record 103"))
				if err := statefulFlow(t, was, 3, nil).Task(0).Load(r.deltas[0][0]); !errors.Is(err, flow.ErrState) || !strings.Contains(err.Error(), "state of version 1, the step has version 3 and no Migrate") {
					t.Errorf("%s by another version: %v", was, err)
				}
				if t.Failed() {
					t.Fatalf("%s, then %s", was, is)
				}
			}
		}
	}
}

// Timers that are set are not lost when the step has none any more.
func TestStatefulWith_TimersNeedOnTimer(t *testing.T) {
	r := start(t, statefulFlow(t, "with timers", 1, nil))
	r.feed("a add x=10:30", "b add")
	r.seal()
	for _, kind := range []string{"Stateful", "with", "with TTL"} {
		err := statefulFlow(t, kind, 1, nil).Task(0).Load(r.deltas[0][0])
		if !errors.Is(err, flow.ErrState) || !strings.Contains(err.Error(), `step "script": key "a": the key has timers, and the step has no OnTimer: let them fire or cancel them before it goes`) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	r.feed("a -x")
	r.seal()
	task := statefulFlow(t, "Stateful", 1, nil).Task(0)
	if err := task.Load(r.deltas[0][1]); err != nil {
		t.Errorf("without timers: %v", err)
	}
}

// Unchanged spares the storing of a state whose timers are as they were.
func TestStatefulWith_Unchanged(t *testing.T) {
	r := start(t, statefulFlow(t, "with timers", 1, nil))
	delta := func(data string) int {
		r.feed(data)
		r.seal()
		return len(r.sealed.Delta)
	}
	if delta("a add unchanged") != 0 || r.keys() != 0 {
		t.Error("a new key whose state did not change has state")
	}
	delta("a add")
	delta("b unchanged x=10:30")
	for _, tc := range []struct {
		data   string
		stored bool
	}{
		{"a unchanged", false},
		{"b unchanged", false},
		{"b unchanged x=10:30", false},
		{"b unchanged x=10:31", true},
		{"b unchanged x~10:31", true},
		{"b unchanged -y", false},
		{"b unchanged -x", true},
		{"a unchanged y=10:30", true},
		{"a add", true},
		{"c unchanged x=10:30 -x", false},
	} {
		if got := delta(tc.data) > 0; got != tc.stored {
			t.Errorf("%s: stored %v", tc.data, got)
		}
	}
	r.crash()
	r.want([]string{"a emit"}, out("a", "record 2"))
}

func TestStatefulWith_Mistakes(t *testing.T) {
	b := newFlow()
	textTo(flow.StatefulWith(keyed(b), "empty", flow.StatefulConfig[string, int64, string]{}))
	textTo(flow.StatefulWith(text(b), "unkeyed", flow.StatefulConfig[string, int64, string]{State: decimalState, On: script}))
	_, err := b.Build()
	for _, want := range []string{
		`step "empty": there is no function On`, `step "empty": there is no state codec with Append and Decode`,
		`step "unkeyed": stateful keeps state for each key: put a KeyBy before it`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no error %q in %v", want, err)
		}
	}
}

// Steps that wait for one time do it in their order, those of one step by key and name.
func TestTimer_OrderOfSteps(t *testing.T) {
	f := timerFlow{behind: func(s flow.Stream[string]) flow.Stream[string] {
		windows, late := flow.Window(s, "window", flow.Tumbling(time.Hour), listing)
		return flow.Merge(windows, flow.Map(late, func(_ *flow.Meta, v string) (string, error) { return v + " late", nil }))
	}}
	r := playTimers(t, f.build(t), "10:00 b x=11:00 w=10:59:59", "10:01 a z=11:00 x=11:00 y~11:00", "11:30 c add", "11:31 a x=10:15 y=11:10", "12:00 c add")
	wantData(t, r, "OUT",
		"b 10:00-11:00 b w 10:59:59/10:59:59 1",
		"a x 10:15/10:15 4 late",
		"a 11:00-12:00 a x 11:00/11:00 1a z 11:00/11:00 2a y 11:00/11:00 3a y 11:10/11:10 5",
		"b 11:00-12:00 b x 11:00/11:00 2")
}

// What a window emits may come as late as its allowed lateness: a timer behind it waits
// for that, too.
func TestTimer_BehindALateWindow(t *testing.T) {
	b := newFlow()
	w := flow.Tumbling(time.Hour)
	w.AllowedLateness = 30 * time.Minute
	windows, _ := flow.Window(keyed(b), "window", w, listing)
	timers := flow.StatefulWith(windows, "timers", flow.StatefulConfig[string, int64, string]{
		State: decimalState,
		On: func(m *flow.Meta, n *int64, v string, emit func(string)) error {
			*n++
			m.SetTimer("x", m.EventTime().Add(time.Hour))
			emit(v)
			return nil
		},
		OnTimer: func(m *flow.Meta, n *int64, name string, emit func(string)) error {
			return timerFired(m, n, name, func(s string) { emit(m.Key + " " + s) })
		},
	})
	flow.To(timers, textSink("OUT"))
	r := playTimers(t, build(t, b), "10:00 a 1", "11:29 b 2", "11:30 b 3", "12:29 c 4", "12:30 c 5")
	// The windows of a at 12:00 would have come by 12:30.
	wantData(t, r, "OUT", "a 10:00-11:00 a 1", "a x 11:59:59/11:59:59 2", "b 11:00-12:00 b 2b 3")
}

// A timer for a time that has passed which is set while a commit is made fires with it:
// nothing else may come.
func TestTimer_SetByACommit(t *testing.T) {
	b := newFlow()
	sums := flow.Aggregate(keyed(b), "sum", flow.Aggregator[string, int64, int64]{
		State: decimalState, Emit: flow.EmitCommit,
		Add:    func(_ *flow.Meta, n *int64, _ string) error { *n++; return nil },
		Result: func(_ *flow.Meta, n *int64) (int64, error) { return *n, nil },
	})
	timers := flow.StatefulWith(sums, "timers", flow.StatefulConfig[int64, int64, string]{
		State: decimalState,
		On: func(m *flow.Meta, n *int64, v int64, emit func(string)) error {
			*n = v
			emit("on")
			m.SetTimer("x", flowtest.Start)
			return nil
		},
		OnTimer: func(_ *flow.Meta, n *int64, name string, emit func(string)) error {
			emit(fmt.Sprint(name, *n))
			return nil
		},
	})
	again := flow.Aggregate(timers, "list", flow.Aggregator[string, []string, string]{
		State: flow.JSONState[[]string](1, nil), Emit: flow.EmitCommit,
		Add:    func(_ *flow.Meta, s *[]string, v string) error { *s = append(*s, v); return nil },
		Result: func(_ *flow.Meta, s *[]string) (string, error) { return strings.Join(*s, " "), nil },
	})
	flow.To(again, textSink("OUT"))
	r := flowtest.New(t, build(t, b))
	r.Push(flowtest.Record{Data: "a 1"}, flowtest.Record{Data: "a 2"})
	wantData(t, r, "OUT", "on", "on x2")
}

// Bytes that are not states with timers are an error, never a panic.
func FuzzStatefulWith_Load(f *testing.F) {
	kinds := []string{"Stateful", "with timers", "with TTL", "with timers and TTL"}
	for _, kind := range kinds {
		r := start(f, statefulFlow(f, kind, 1, nil))
		r.feed("a add", "b add emit", "b add")
		if strings.Contains(kind, "timers") {
			r.feed("a x=10:30 y~11:30 z=10:30", "c unchanged x=10:30")
		}
		r.seal()
		f.Add(r.deltas[0][0])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, kind := range kinds {
			task := statefulFlow(t, kind, 1, nil).Task(0)
			if err := task.Load(data); err != nil {
				if !errors.Is(err, flow.ErrState) {
					t.Fatal(err)
				}
				continue
			}
			task.Loaded()
			if err := task.Advance(0, flowtest.Start.Add(24*time.Hour).UnixNano()); err != nil {
				t.Fatal(err)
			}
			if _, err := task.Seal(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
