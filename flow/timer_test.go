package flow_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// timerCall is what a script of timers can do: the Meta of a flow, or of a model.
type timerCall interface {
	SetTimer(name string, at time.Time)
	SetStreamTimer(name string, at time.Time)
	CancelTimer(name string)
	DropState()
	Unchanged()
	EventTime() time.Time
	Time() time.Time
}

// timerScript is what the record "10:05 a add x=10:30 y~11:00 -x" says, word by word:
// x=10:30 sets a timer, y~11:00 one of the stream's time, -x cancels it.
func timerScript(m timerCall, n *int64, v string, emit func(string)) error {
	for _, w := range strings.Fields(v) {
		switch w {
		case "add":
			*n++
		case "emit":
			emit(fmt.Sprintf("record %d", *n))
		case "drop":
			m.DropState()
		case "unchanged":
			m.Unchanged()
		case "error":
			return errors.New("as told")
		case "panic":
			panic("as told")
		default:
			if err := setByWord(m, w); err != nil {
				return err
			}
		}
	}
	return nil
}

func setByWord(m timerCall, w string) error {
	if name, ok := strings.CutPrefix(w, "-"); ok {
		m.CancelTimer(name)
		return nil
	}
	set := m.SetTimer
	name, when, ok := strings.Cut(w, "=")
	if !ok {
		set = m.SetStreamTimer
		name, when, ok = strings.Cut(w, "~")
	}
	if !ok {
		return fmt.Errorf("what is %q", w)
	}
	at, err := clockTime(when)
	if err == nil {
		set(name, at)
	}
	return err
}

// timerFired is the OnTimer of the scripts. The name of the timer says what it does
// besides emitting: r sets itself again in 20 minutes, three times of four, and s by the
// stream's time; c sets x by the other time; d drops the state; back sets itself for
// the same time.
func timerFired(m timerCall, n *int64, name string, emit func(string)) error {
	*n++
	emit(fmt.Sprintf("%s %s/%s %d", name, clockText(m.EventTime()), clockText(m.Time()), *n))
	switch name {
	case "r":
		if *n%4 != 0 {
			m.SetTimer(name, m.EventTime().Add(20*time.Minute))
		}
	case "s":
		if *n%4 != 0 {
			m.SetStreamTimer(name, m.Time().Add(20*time.Minute))
		}
	case "c":
		if *n%2 == 0 {
			m.SetStreamTimer("x", m.Time().Add(10*time.Minute))
		} else {
			m.SetTimer("x", m.EventTime().Add(10*time.Minute))
		}
	case "d":
		m.DropState()
	case "back":
		m.SetTimer("back", m.EventTime())
	case "bad":
		return errors.New("as told")
	case "panic":
		panic("as told")
	}
	return nil
}

// timerFlow runs the scripts of records "a add x=10:30". With a clock, each record has
// its time in front; in any case a test says the timestamp of the stream.
type timerFlow struct {
	clock      *flow.EventTime[string]
	ttl        time.Duration
	partitions int
	onError    flow.OnError
	behind     func(flow.Stream[string]) flow.Stream[string]
}

func (f timerFlow) build(tb fataler) *flow.Flow {
	tb.Helper()
	b := flow.New("test", flow.Options{Partitions: max(f.partitions, 1), OnError: f.onError})
	src := flow.Source{Stream: "IN"}
	if f.clock != nil {
		clock := *f.clock
		clock.Of = func(_ *flow.Meta, v string) (time.Time, error) { return clockTime(v) }
		src.Time = clock
	}
	in := flow.From(b, src, flow.DecodeText())
	if f.clock != nil {
		in = flow.Map(in, func(_ *flow.Meta, v string) (string, error) {
			_, v, _ = strings.Cut(v, " ")
			return v, nil
		})
	}
	keyed := flow.KeyBy(in, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	out := flow.StatefulWith(keyed, "timers", flow.StatefulConfig[string, int64, string]{
		State: decimalState,
		On: func(m *flow.Meta, n *int64, v string, emit func(string)) error {
			_, v, _ = strings.Cut(v, " ")
			return timerScript(m, n, v, func(s string) { emit(m.Key + " " + s) })
		},
		OnTimer: func(m *flow.Meta, n *int64, name string, emit func(string)) error {
			if m.Seq != 0 || m.Stream != "" || m.Subject != "" || len(m.Raw()) > 0 {
				return fmt.Errorf("a timer has the position of a record: %+v", m)
			}
			return timerFired(m, n, name, func(s string) { emit(m.Key + " " + s) })
		},
		TTL: f.ttl,
	})
	if f.behind != nil {
		out = f.behind(out)
	}
	flow.To(out, textSink("OUT"))
	return build(tb, b)
}

// playTimers plays lines such as "10:05 a add" at that timestamp of the stream,
// "12:00 @ 10:05 a add" of a record that brings another time along, and "pause 1h",
// "crash", "drain" and "commit".
func playTimers(tb flowtest.TB, f *flow.Flow, lines ...string) *flowtest.Runner {
	tb.Helper()
	r := flowtest.New(tb, f)
	for _, line := range lines {
		at, err := clockTime(line)
		if err != nil {
			playLine(tb, r, line, false)
			continue
		}
		_, data, _ := strings.Cut(line, " ")
		if own, ok := strings.CutPrefix(data, "@ "); ok {
			data = own
		}
		r.Push(flowtest.Record{Time: at, Data: data})
	}
	return r
}

// disturbed plays the lines as they are, and with a stop or a crash behind each of them,
// and in several partitions.
func (f timerFlow) disturbed(t *testing.T, lines []string, want ...string) {
	t.Helper()
	calm := playTimers(t, f.build(t), lines...)
	wantData(t, calm, "OUT", want...)
	failed := calm.Errors()
	for i := range lines {
		for _, disturbance := range [][]string{{"crash"}, {"drain"}, {"commit", "crash"}, {"drain", "drain", "crash"}} {
			r := playTimers(t, f.build(t), slices.Concat(lines[:i+1], disturbance, lines[i+1:])...)
			wantData(t, r, "OUT", want...)
			wantErrors(t, r, failed...)
			if t.Failed() {
				t.Fatalf("%v behind %q", disturbance, lines[i])
			}
		}
	}
	f.partitions = 5
	got, wanted := playTimers(t, f.build(t), lines...).Data("OUT"), slices.Clone(want)
	slices.SortStableFunc(got, byKey)
	slices.SortStableFunc(wanted, byKey)
	if diff := cmp.Diff(wanted, got); diff != "" {
		t.Errorf("in 5 partitions (-want +got):\n%s", diff)
	}
}

func TestTimer_Fires(t *testing.T) {
	timerFlow{}.disturbed(t, []string{
		"10:00 a add x=10:30",
		"10:29:59 b x=10:30 w=10:30",
		"10:30 c emit", // the timers come before it
		"10:31 a emit y=10:40 y~10:45",
		"10:50 a x=12:00",
		"pause 2h", // no record
		"13:00 a emit",
	},
		"a x 10:30/10:30 2", "b w 10:30/10:30 1", "b x 10:30/10:30 2", "c record 0", "a record 2",
		"a y 10:45/10:45 3", "a x 12:00/12:00 4", "a record 4")
}

func TestTimer_ReplaceAndCancel(t *testing.T) {
	timerFlow{}.disturbed(t, []string{
		"10:00 a x=10:30 y=10:20 z=10:10",
		"10:05 a x=10:15 -y -none",
		"10:11 a z=10:40",
		"10:20 a z=10:50 emit",
		"11:00 a emit",
		"11:01 a x=11:10 -x", "11:02 b x=11:10", "11:03 b drop", "11:04 c x=11:10 drop", // the state goes with its timers
		"12:00 a emit", "12:01 b emit",
	},
		"a z 10:10/10:10 1", "a x 10:15/10:15 2", "a record 2", "a z 10:50/10:50 3", "a record 3", "a record 3", "b record 0")
}

// A timer for a time that has passed fires before the next record, also of another key,
// and never while its record is being processed.
func TestTimer_Past(t *testing.T) {
	f := timerFlow{}
	f.disturbed(t, []string{"10:00 a x=9:00 emit y~9:30 z=10:00 add emit", "10:00 b emit"},
		"a record 0", "a record 1", "a x 09:00/09:00 2", "a y 09:30/09:30 3", "a z 10:00/10:00 4", "b record 0")
	r := flowtest.New(t, f.build(t))
	at := flowtest.Start.Add(10 * time.Hour)
	r.Push(flowtest.Record{Time: at, Data: "a x=9:00"}, flowtest.Record{Time: at, Data: "a emit panic"}, flowtest.Record{Time: at, Data: "a y=9:00 panic"}, flowtest.Record{Time: at, Data: "a emit"})
	wantData(t, r, "OUT", "a x 09:00/09:00 1", "a record 1", "a y 09:00/09:00 2", "a record 2")
}

// What fires may set itself again, and catches up.
func TestTimer_Again(t *testing.T) {
	timerFlow{}.disturbed(t, []string{"10:00 a r=10:10", "10:35 b emit", "15:00 b s~9:00", "pause 1h"},
		"a r 10:10/10:10 1", "a r 10:30/10:30 2", "b record 0", "a r 10:50/10:50 3", "a r 11:10/11:10 4",
		"b s 09:00/09:00 1", "b s 09:20/09:20 2", "b s 09:40/09:40 3", "b s 10:00/10:00 4")
}

// Without progress it would fire for ever.
func TestTimer_NoProgress(t *testing.T) {
	r := playTimers(t, timerFlow{}.build(t), "10:00 a back=10:10", "10:20 a emit", "pause 1h")
	wantData(t, r, "OUT", "a back 10:10/10:10 1", "a record 1")
	wantErrors(t, r, `timers: SetTimer("back"): the time 2026-01-01T10:10:00Z is not later than 2026-01-01T10:10:00Z, that of the timer that fires: it could fire for ever`)
	if got := r.DeadLetters()[0].Headers[flow.HeaderDeadKey]; got != "a" {
		t.Errorf("the dead letter has the key %q", got)
	}
}

func TestTimer_Failures(t *testing.T) {
	r := playTimers(t, timerFlow{}.build(t), "10:00 a bad=10:10 panic=10:10 x=10:10", "10:20 a emit", "drain", "pause 1h")
	wantData(t, r, "OUT", "a bad 10:10/10:10 1", "a panic 10:10/10:10 2", "a x 10:10/10:10 3", "a record 3")
	got := r.Errors()
	if len(got) != 2 || got[0] != `timers: timer "bad": as told` || !strings.HasPrefix(got[1], "timers: step panicked: as told") {
		t.Errorf("dead letters %q", got)
	}
	for _, d := range r.DeadLetters() {
		if d.Headers[flow.HeaderDeadKey] != "a" || d.Headers[flow.HeaderDeadSeq] != "" {
			t.Errorf("headers %v", d.Headers)
		}
	}
	stopped := flowtest.New(t, timerFlow{onError: flow.Stop}.build(t))
	err := stopped.Try(flowtest.Record{Data: "a bad=0:10"}, flowtest.Record{Data: "a emit", Time: flowtest.Start.Add(time.Hour)})
	var se *flow.StepError
	if !errors.As(err, &se) || se.Error() != `step "timers", key "a", of no single record: timer "bad": as told` {
		t.Errorf("stopped with %v", err)
	}
}

// Timers are set where they can be, in a way that can be kept.
func TestTimer_Misuse(t *testing.T) {
	many := ""
	for i := range flow.MaxTimers {
		many += fmt.Sprintf(" t%d=11:00", i)
	}
	r := playTimers(t, timerFlow{}.build(t), "10:00 a "+strings.Repeat("n", 257)+"=11:00", "10:01 b"+many+" t0=11:01", "10:02 b more=11:00", "10:03 b emit")
	wantErrors(t, r,
		"timers: SetTimer: a name of 257 bytes, at most 256 are possible",
		`timers: SetTimer("more"): the key has 1000 timers already, the most that are possible`)
	wantData(t, r, "OUT", "b record 0")

	const nowhere = "timers are set and cancelled in On and OnTimer of a StatefulWith that has an OnTimer, and nowhere else"
	soon := flowtest.Start.Add(time.Hour)
	misused := func(fn func(m *flow.Meta, v string)) *flowtest.Runner {
		b := newFlow()
		flow.To(flow.Map(keyed(b), func(m *flow.Meta, v string) (string, error) {
			fn(m, v)
			return v, nil
		}, flow.ID("map")), textSink("OUT"))
		return playTimers(t, build(t, b), "10:00 a x")
	}
	wantErrors(t, misused(func(m *flow.Meta, _ string) { m.SetTimer("x", soon) }), "map: SetTimer: "+nowhere)
	wantErrors(t, misused(func(m *flow.Meta, _ string) { m.SetStreamTimer("x", soon) }), "map: SetStreamTimer: "+nowhere)
	wantErrors(t, misused(func(m *flow.Meta, _ string) { m.CancelTimer("x") }), "map: CancelTimer: "+nowhere)
	wantErrors(t, misused(func(m *flow.Meta, _ string) { m.SetTimer("x", time.Time{}) }), `map: SetTimer("x"): the time 0001-01-01T00:00:00Z is not between 1750 and 2200`)

	behind := timerFlow{behind: func(s flow.Stream[string]) flow.Stream[string] {
		return flow.Map(s, func(m *flow.Meta, v string) (string, error) {
			m.SetTimer("x", soon)
			return v, nil
		}, flow.ID("behind"))
	}}
	r = playTimers(t, behind.build(t), "10:00 a x=10:30", "10:01 a emit add", "10:31 b emit")
	wantErrors(t, r, "behind: SetTimer: "+nowhere, "behind: SetTimer: "+nowhere, "behind: SetTimer: "+nowhere)

	b := newFlow()
	textTo(flow.StatefulWith(keyed(b), "no-timers", flow.StatefulConfig[string, int64, string]{
		State: decimalState,
		On:    func(m *flow.Meta, _ *int64, _ string, _ func(string)) error { m.SetTimer("x", soon); return nil },
	}))
	wantErrors(t, playTimers(t, build(t, b), "10:00 a x"), "no-timers: SetTimer: "+nowhere)
}

// A step that panics leaves nothing to the next one.
func TestTimer_PanicLeavesNothing(t *testing.T) {
	b := newFlow()
	all := keyed(b)
	textTo(flow.StatefulWith(all, "panics", flow.StatefulConfig[string, int64, string]{
		State:   decimalState,
		On:      func(*flow.Meta, *int64, string, func(string)) error { panic("as told") },
		OnTimer: func(*flow.Meta, *int64, string, func(string)) error { return nil },
	}))
	errs := 0
	flow.To(flow.Map(keyedAs(b, "TOO"), func(m *flow.Meta, v string) (string, error) {
		defer func() {
			if recover() != nil {
				errs++
			}
		}()
		m.SetTimer("x", flowtest.Start.Add(time.Hour))
		return v, nil
	}), textSink("OTHER"))
	r := flowtest.New(t, build(t, b))
	r.Push(flowtest.Record{Stream: "IN", Data: "a x"}, flowtest.Record{Stream: "TOO", Data: "a x"})
	r.Commit()
	if errs != 1 {
		t.Error("a step without timers has set one of the step that had panicked")
	}
}

// keyedAs reads another stream as keyed reads IN.
func keyedAs(b *flow.Builder, stream string) flow.Stream[string] {
	return flow.KeyBy(flow.From(b, flow.Source{Stream: stream}, flow.DecodeText()), firstWord)
}

// With an EventTime a timer waits for the watermark, one of the stream's time does not.
func TestTimer_TwoTimes(t *testing.T) {
	f := timerFlow{clock: &flow.EventTime[string]{Lateness: 10 * time.Minute}}
	f.disturbed(t, []string{
		"12:00 @ 10:00 a x=10:30 y~12:30",
		"12:10 @ 10:40 a emit",
		"12:20 @ 10:41 b emit",        // the watermark is 10:30 before it
		"12:30 @ 10:00 b emit",        // and the stream's time 12:30 as of it
		"12:31 @ 10:50 a c=10:50 add", // sets x by the stream's time, ten minutes behind the firing
		"12:40 @ 11:00 b emit",
		"12:41 @ 11:00 b emit", // the watermark is 10:50, and fires c when the stream's time is 12:40
		"pause 8m", "pause 1m",
		"12:55 @ 12:00 a x=11:55 y~12:20",
		"pause 10h", // the watermark does not move
		"23:00 @ 12:05 b emit", "23:00 @ 12:05:01 b emit",
	},
		"a record 0", "a x 10:30/12:10 1", "b record 0", "a y 10:31/12:30 2", "b record 0",
		"b record 0", "a c 10:50/12:40 4", "b record 0", "a x 10:50/12:50 5", "a y 10:50/12:20 6",
		"b record 0", "a x 11:55/23:00 7", "b record 0")
}
