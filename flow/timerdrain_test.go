package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// paned puts what kind of result each is before it.
func paned(s flow.Stream[string]) flow.Stream[string] {
	return flow.Map(s, func(m *flow.Meta, v string) (string, error) {
		if m.Pane() != flow.PaneNone {
			v += " " + fmt.Sprint(m.Pane())
		}
		return v, nil
	})
}

// A finish fires each timer that is set, once; those that are set by it stay, and fire
// when their time comes. A suspend fires none.
func TestTimer_Finish(t *testing.T) {
	lines := []string{
		"10:00 b x=11:00 r=10:30 add", "10:00 a y~10:40 r=12:00 x=10:50 d~13:00", "10:01 c r=10:02",
		"drain", "finish", "10:10 b emit", "10:10 a emit", "finish", "11:00 c emit", "11:00:01 c emit",
	}
	timerFlow{behind: paned}.disturbed(t, lines,
		"a y 10:40/10:40 1 final", "a x 10:50/10:50 2 final", "a r 12:00/12:00 3 final",
		"a d 13:00/13:00 4 final", // which drops r, that has set itself again
		"b r 10:30/10:30 2 final", "b x 11:00/11:00 3 final", "c r 10:02/10:02 1 final",
		"b record 3", "a record 0", "b r 10:50/10:50 4 final", "c r 10:22/10:22 2 final",
		"c r 10:42/10:42 3", "c record 3", "c record 3")

	for i, line := range lines {
		if at, _, ok := strings.Cut(line, " "); ok {
			lines[i] = at + " @ " + line
		}
	}
	timerFlow{behind: paned, clock: &flow.EventTime[string]{}}.disturbed(t, lines,
		"a y 10:01/10:40 1 final", "a x 10:50/10:01 2 final", "a r 12:00/10:01 3 final", "a d 10:01/13:00 4 final",
		"b r 10:30/10:01 2 final", "b x 11:00/10:01 3 final", "c r 10:02/10:01 1 final",
		"b record 3", "a record 0", "b r 10:50/10:10 4 final", "c r 10:22/10:10 2 final",
		"c record 2", "c r 10:42/11:00 3", "c record 3")
}

// A timer that fails at the end of the input costs the others of its key nothing.
func TestTimer_FinishFailures(t *testing.T) {
	r := playTimers(t, timerFlow{behind: paned}.build(t), "10:00 a x=10:30 panic=10:20 bad=10:10 back=10:25", "10:00 b y=10:10", "finish", "pause 5h")
	wantData(t, r, "OUT", "a bad 10:10/10:10 1 final", "a panic 10:20/10:20 2 final", "a back 10:25/10:25 3 final", "a x 10:30/10:30 4 final", "b y 10:10/10:10 1 final")
	got := r.Errors()
	if len(got) != 3 || got[0] != `timers: timer "bad": as told` || !strings.HasPrefix(got[1], "timers: step panicked: as told") || !strings.Contains(got[2], "it could fire for ever") {
		t.Errorf("dead letters %q", got)
	}
	stops := start(t, timerFlow{onError: flow.Stop}.build(t))
	stops.feed("a x=10:30 bad=10:10 y=10:20")
	_, err := stops.tasks[0].Drain(flow.Drain{Mode: flow.Finish, Epoch: 1}, 1<<20)
	var se *flow.StepError
	if !errors.As(err, &se) || se.Step != "timers" || se.Key != "a" || se.Err.Error() != `timer "bad": as told` {
		t.Errorf("stopped with %v", err)
	}
}

// The end of the input is not the end of the state.
func TestTTL_Finish(t *testing.T) {
	r := playTimers(t, timerFlow{ttl: time.Hour, behind: paned}.build(t), "10:00 a add", "10:30 b add x=10:40", "finish")
	if r.Keys() != 2 {
		t.Errorf("%d keys have state", r.Keys())
	}
	playLine(t, r, "pause 30m", false)
	if r.Keys() != 1 {
		t.Errorf("%d keys have state, the TTL of one is over", r.Keys())
	}
	wantData(t, r, "OUT", "b x 10:40/10:40 2 final")

	r = playTimers(t, sumFlow(t, time.Hour, flow.EmitCommit), "10:00 a 1", "10:10 a 2", "10:20 b 4", "finish", "11:19 b 8", "11:20 a 16")
	wantData(t, r, "OUT", "a 3 at 2", "b 4 at 3", "a 3 at 0", "b 4 at 0", "b 12 at 4", "a 16 at 5")
}

// However small the parts are in which the end of the input is committed, and wherever it
// crashes in between, each timer fires once.
func TestTimer_FinishInParts(t *testing.T) {
	f := timerFlow{behind: paned}.build(t)
	var records []string
	for i := range 9 {
		records = append(records, fmt.Sprintf("k%d x=10:%02d r=10:%02d s~11:%02d", i, 50-i, i, i))
	}
	finish := func(crashAt int) (all []string, parts int) {
		r := start(t, f)
		r.feed(records...)
		take := func() {
			for _, o := range r.seal() {
				all = append(all, o.Data)
			}
		}
		take()
		for more := true; more; parts++ {
			var err error
			if more, err = r.tasks[0].Drain(flow.Drain{Mode: flow.Finish, Epoch: 7}, 1); err != nil {
				t.Fatal(err)
			}
			if parts == crashAt {
				r.crash() // what was done since the last seal is lost
				more = true
				continue
			}
			take()
		}
		if more, err := r.tasks[0].Drain(flow.Drain{Mode: flow.Finish, Epoch: 7}, 1); more || err != nil || len(r.seal()) != 0 {
			t.Fatalf("a second end of the same drain: %v, %v", more, err)
		}
		if n := r.tasks[0].Drained(7); n != 27 {
			t.Fatalf("%d results are counted", n)
		}
		return all, parts
	}
	want, parts := finish(-1)
	if len(want) != 27 || parts < 9 {
		t.Fatalf("%d results in %d parts", len(want), parts)
	}
	for crashAt := range parts {
		got, _ := finish(crashAt)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("a crash in part %d (-want +got):\n%s", crashAt, diff)
		}
	}
}

// OnDrain comes behind the timers of its key, and may set timers.
func TestTimer_OnDrain(t *testing.T) {
	build := func() *flow.Flow {
		b := newFlow()
		flow.To(paned(flow.StatefulWith(keyed(b), "timers", flow.StatefulConfig[string, int64, string]{
			State: decimalState,
			On: func(m *flow.Meta, n *int64, v string, emit func(string)) error {
				_, v, _ = strings.Cut(v, " ")
				return timerScript(m, n, v, func(s string) { emit(m.Key + " " + s) })
			},
			OnTimer: func(m *flow.Meta, n *int64, name string, emit func(string)) error {
				return timerFired(m, n, name, func(s string) { emit(m.Key + " " + s) })
			},
			OnDrain: func(m *flow.Meta, d flow.Drain, n *int64, emit func(string)) error {
				emit(fmt.Sprintf("%s %s %d", m.Key, d.Mode, *n))
				m.SetTimer("z", flowtest.Start.Add(20*time.Hour))
				if m.Key == "b" {
					m.CancelTimer("z")
					m.Unchanged()
				}
				return nil
			},
		})), textSink("OUT"))
		return build(t, b)
	}
	r := playTimers(t, build(), "10:00 a x=11:00 add", "10:00 b add", "10:00 c d=11:00", "drain", "finish", "crash", "21:00 b emit")
	wantData(t, r, "OUT",
		"a suspend 1 partial", "b suspend 1 partial", "c suspend 0 partial",
		"a x 11:00/11:00 2 final", "a z 20:00/20:00 3 final", "a finish 3 final", "b finish 1 final",
		"c d 11:00/11:00 1 final", // which drops the key
		"a z 20:00/20:00 4", "b record 1")
}
