package flow_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// A key that no record has touched for the TTL begins anew, and its timers are gone.
func TestTTL_Stateful(t *testing.T) {
	f := timerFlow{ttl: time.Hour}
	f.disturbed(t, []string{
		"10:00 a add emit", "10:30 b add emit",
		"10:59:59 a add emit", // touched
		"11:30 b emit",        // an hour is over
		"11:31 b unchanged",   // touched, too
		"11:59:59 a emit",
		"12:00 c add x=12:30 y=14:00", // touched by records, not by timers
		"12:30:30 b emit add", "12:31 b add emit",
		"pause 1h", "13:31 c emit",
		"14:30 b emit",
	},
		"a record 1", "b record 1", "a record 2", "b record 0", "a record 0", "c x 12:30/12:30 2",
		"b record 0", "b record 2", "c record 0", "b record 0")
	r := playTimers(t, f.build(t), "10:00 a add", "10:00 b add", "10:00 c add y=12:00", "10:30 b emit")
	r.Pause(29 * time.Minute)
	if r.Keys() != 3 {
		t.Errorf("%d keys have state before the TTL is over", r.Keys())
	}
	r.Pause(time.Minute)
	if r.Keys() != 1 {
		t.Errorf("%d keys have state, one is younger than the TTL", r.Keys())
	}
	r.Drain()
	if r.Keys() != 1 {
		t.Errorf("%d keys have state after a stop", r.Keys())
	}
	r.Pause(3 * time.Hour)
	wantData(t, r, "OUT", "b record 1")
	if r.Keys() != 0 {
		t.Errorf("%d keys have state", r.Keys())
	}
}

// A timer for the end of the TTL comes before it.
func TestTTL_TimerAtTheEnd(t *testing.T) {
	timerFlow{ttl: time.Hour}.disturbed(t, []string{"10:00 a add x=11:00 y=11:00:01", "12:00 a emit"}, "a x 11:00/11:00 2", "a record 0")
}

// With an EventTime the TTL goes by the time of the streams.
func TestTTL_EventTime(t *testing.T) {
	f := timerFlow{ttl: time.Hour, clock: &flow.EventTime[string]{}}
	f.disturbed(t, []string{"10:00 @ 5:00 a add", "10:30 @ 9:00 a add emit", "11:29 @ 9:00 a emit", "pause 1h", "12:29 @ 9:00:01 a emit"},
		"a record 2", "a record 2", "a record 0")
}

// sumTTL sums numbers per key.
func sumTTL(b *flow.Builder, ttl time.Duration, emit flow.EmitMode, version int) {
	codec := decimalState
	codec.Version = version
	flow.To(flow.Aggregate(keyed(b), "sum", flow.Aggregator[string, int64, string]{
		State: codec, Emit: emit, TTL: ttl,
		Add: func(_ *flow.Meta, n *int64, v string) error {
			var x int64
			_, err := fmt.Sscan(strings.Fields(v)[1], &x)
			*n += x
			return err
		},
		Result: func(m *flow.Meta, n *int64) (string, error) { return fmt.Sprintf("%s %d at %d", m.Key, *n, m.Seq), nil },
	}), textSink("OUT"))
}

func sumFlow(tb fataler, ttl time.Duration, emit flow.EmitMode) *flow.Flow {
	b := newFlow()
	sumTTL(b, ttl, emit, 1)
	return build(tb, b)
}

func TestTTL_Aggregate(t *testing.T) {
	lines := []string{"10:00 a 1", "10:30 a 2", "10:59 b x", "11:29 a 4", "12:29 a 8", "pause 2h", "14:30 a 16"}
	for i := range lines {
		for _, disturbance := range [][]string{nil, {"crash"}, {"drain"}} {
			r := playTimers(t, sumFlow(t, time.Hour, flow.EmitUpdate), slices.Concat(lines[:i+1], disturbance, lines[i+1:])...)
			wantData(t, r, "OUT", "a 1 at 1", "a 3 at 2", "a 7 at 4", "a 8 at 5", "a 16 at 6")
			if r.Keys() != 1 {
				t.Errorf("%d keys have state", r.Keys())
			}
		}
	}
}

// The result of a key that expires before the commit is not lost, and comes before that
// of its next record.
func TestTTL_EmitCommit(t *testing.T) {
	f := sumFlow(t, time.Hour, flow.EmitCommit)
	r := flowtest.New(t, f)
	at := func(hours float64) time.Time { return flowtest.Start.Add(time.Duration(hours * float64(time.Hour))) }
	r.Push(flowtest.Record{Time: at(1), Data: "a 1"}, flowtest.Record{Time: at(1.5), Data: "a 2"}, flowtest.Record{Time: at(1.5), Data: "b 4"})
	r.Pause(2 * time.Hour)
	r.Push(flowtest.Record{Time: at(4), Data: "a 8"}, flowtest.Record{Time: at(4), Data: "a 16"})
	wantData(t, r, "OUT", "a 3 at 2", "b 4 at 3", "a 24 at 5")
	r.Crash()
	if r.Keys() != 1 {
		t.Errorf("%d keys have state", r.Keys())
	}
	r.Pause(time.Hour)
	r.Push(flowtest.Record{Data: "a 32"})
	wantData(t, r, "OUT", "a 3 at 2", "b 4 at 3", "a 24 at 5", "a 32 at 6")
}

// A TTL can be given to a step that runs, and be taken away; and timers, as long as none
// is set.
func TestTTL_Change(t *testing.T) {
	sum := func(ttl time.Duration) *flow.Flow { return sumFlow(t, ttl, flow.EmitUpdate) }
	hour := int64(time.Hour)
	r := start(t, sum(0))
	r.wantAt([]record{{nanos: 1 * hour, data: "a 1"}, {nanos: 2 * hour, data: "b 2"}}, out("a", "a 1 at 1"), out("b", "b 2 at 2"))

	// What was there before counts as touched at the start.
	r.become(sum(time.Hour))
	r.wantAt([]record{{nanos: 10 * hour, data: "c 4"}}, out("c", "c 4 at 3"))
	r.crash()
	r.wantAt([]record{{nanos: 11*hour - 1, data: "a 1"}}, out("a", "a 2 at 4"))
	r.wantAt([]record{{nanos: 11 * hour, data: "b 2"}}, out("b", "b 2 at 5"))
	r.wantAt([]record{{nanos: 12*hour - 1, data: "b 2"}}, out("b", "b 4 at 6"))
	if r.keys() != 1 {
		t.Errorf("%d keys have state", r.keys())
	}

	r.become(sum(0))
	r.wantAt([]record{{nanos: 20 * hour, data: "b 2"}}, out("b", "b 6 at 7"))
	r.become(sum(time.Hour))
	r.wantAt([]record{{nanos: 30 * hour, data: "b 2"}}, out("b", "b 8 at 8")) // known to be there as of now
	r.wantAt([]record{{nanos: 31 * hour, data: "b 2"}}, out("b", "b 2 at 9"))
}

// become goes on as another flow from what was sealed.
func (r *runner) become(f *flow.Flow) {
	r.f = f
	r.crash()
}

// A result of a window is of no record; it touches a key by the time of the streams, not
// by the time in the records.
func TestTTL_BehindAWindow(t *testing.T) {
	b := newFlow()
	src := flow.Source{Stream: "IN", Time: flow.EventTime[string]{Of: func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }}}
	in := flow.KeyBy(flow.From(b, src, flow.DecodeText()), func(_ *flow.Meta, v string) (string, error) { return strings.Fields(v)[1], nil })
	windows, _ := flow.Window(in, "window", flow.Tumbling(time.Hour), listing)
	flow.To(flow.StatefulWith(windows, "count", flow.StatefulConfig[string, int64, string]{
		State: decimalState, TTL: 3 * time.Hour,
		On: func(m *flow.Meta, n *int64, _ string, emit func(string)) error {
			*n++
			emit(fmt.Sprintf("%s %s %d", m.Key, clockText(m.EventTime()), *n))
			return nil
		},
	}), textSink("OUT"))
	f := build(t, b)
	r := playTimers(t, f, "20:00 @ 1:00 a", "20:01 @ 2:00 a", "20:02 @ 3:00 a", "drain", "pause 2h", "23:00 @ 4:00 a", "23:01 @ 5:00 a", "23:02 @ 5:00:01 b", "pause 3h")
	wantData(t, r, "OUT", "a 01:59:59 1", "a 02:59:59 2", "a 03:59:59 3", "a 04:59:59 4")
	r = playTimers(t, f, "20:00 @ 1:00 a", "20:01 @ 2:00 a", "20:02 @ 2:00:01 a", "23:02 @ 3:00 a", "23:03 @ 3:00:01 a")
	wantData(t, r, "OUT", "a 01:59:59 1", "a 02:59:59 1")
}

func TestTTL_Mistakes(t *testing.T) {
	for _, ttl := range []time.Duration{-1, 1 << 62} {
		b := newFlow()
		sumTTL(b, ttl, flow.EmitUpdate, 1)
		_, err := b.Build()
		if want := fmt.Sprintf(`step "sum": a TTL of %v: it is positive and at most 7300 days, or 0 for none`, ttl); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v", err)
		}
	}
	b := newFlow()
	sumTTL(b, 0, flow.EmitUpdate, 1<<30)
	if _, err := b.Build(); err == nil || !strings.Contains(err.Error(), `step "sum": version 1073741824 of the state, at most 1073741823 is possible`) {
		t.Errorf("%v", err)
	}
	if a, b := sumFlow(t, 0, flow.EmitUpdate).Hash(), sumFlow(t, 1, flow.EmitUpdate).Hash(); a == b {
		t.Error("the TTL is not a part of the definition")
	}
}
