package flow_test

import (
	"testing"
	"time"

	"natsflow/flow"
	"natsflow/flow/flowtest"
)

// early is a window with early results every so often.
func early(w flow.Windows, every time.Duration) flow.Windows {
	w.Early = every
	return w
}

func TestWindow_Early(t *testing.T) {
	undisturbed(t, windowFlow{windows: early(flow.Tumbling(time.Hour), 10*time.Minute)}, streamTimed, []string{
		"10:05 a 1", "10:06 b 2", "10:07 a 3",
		"10:10 a 4",                           // 10:10 has come
		"10:35 b 5",                           // of a nothing has changed since 10:20
		"10:55 a 6", "11:05 c 7", "pause 10m", // the window closes before 11:00 has an early result
		"12:00 a 8",
	},
		"early a 10:00-11:00 13", "early b 10:00-11:00 2", "early a 10:00-11:00 134",
		"early b 10:00-11:00 25",
		"a 10:00-11:00 1346", "b 10:00-11:00 25", "early c 11:00-12:00 7", "c 11:00-12:00 7")
}

// The clock of the server brings early results, too.
func TestWindow_EarlyWithoutRecords(t *testing.T) {
	w := windowFlow{windows: early(flow.Tumbling(time.Hour), 10*time.Minute)}
	undisturbed(t, w, streamTimed, []string{"10:05 a 1", "pause 4m", "pause 2m", "10:12 a 2", "pause 20m", "pause 10m", "pause 1h"},
		"early a 10:00-11:00 1", "early a 10:00-11:00 12", "a 10:00-11:00 12")
	r := streamTimed(t, w.build(t), "10:05 a 1", "pause 4m")
	wantData(t, r, "OUT")
	r.Pause(time.Minute)
	wantData(t, r, "OUT", "early a 10:00-11:00 1")
}

func TestWindow_EarlySliding(t *testing.T) {
	undisturbed(t, windowFlow{windows: early(flow.Sliding(time.Hour, 20*time.Minute), 15*time.Minute)}, streamTimed, []string{
		"10:05 a 1", "10:25 a 2", "10:31 b 3", "12:00 a 4",
	},
		"early a 09:20-10:20 1", "early a 09:40-10:40 1", "early a 10:00-11:00 1", "a 09:20-10:20 1",
		"early a 09:40-10:40 12", "early a 10:00-11:00 12", "early a 10:20-11:20 2", "a 09:40-10:40 12",
		"b 09:40-10:40 3", "early b 10:00-11:00 3", "early b 10:20-11:20 3",
		"a 10:00-11:00 12", "b 10:00-11:00 3", "a 10:20-11:20 2", "b 10:20-11:20 3")
}

// Late records change a window that is kept open for them.
func TestWindow_EarlyLateness(t *testing.T) {
	w := early(flow.Tumbling(time.Hour), time.Hour)
	w.AllowedLateness = 90 * time.Minute
	undisturbed(t, windowFlow{windows: w, clock: &flow.EventTime[string]{}}, eventTimed, []string{
		"10:05 a 1", "11:10 b 2", "10:59 a 3", "12:05 b 4", "10:20 a 5", "14:00 b 6",
	},
		"early a 10:00-11:00 1", "early b 11:00-12:00 2", // the watermark comes to 11:10
		"early a 10:00-11:00 13", "early b 12:00-13:00 4",
		"a 10:00-11:00 135", "early b 14:00-15:00 6", "b 11:00-12:00 2")
}

func TestWindow_EarlySessions(t *testing.T) {
	undisturbed(t, windowFlow{windows: early(flow.Sessions(30*time.Minute, 0), 10*time.Minute), clock: &flow.EventTime[string]{Lateness: time.Hour}}, eventTimed, []string{
		"10:05 a 1", "10:45 a 2", "11:15 b 3",
		"10:25 a 4", // joins the two
		"12:05 b 5", "13:30 b 6",
	},
		"early a 10:45-11:15 2",                          // the watermark comes to 9:45
		"early b 11:15-11:45 3", "early a 10:05-10:35 1", // to 10:15
		"early a 10:05-11:15 142", "early b 12:05-12:35 5", // to 11:05
		"early b 13:30-14:00 6", "a 10:05-11:15 142", "b 11:15-11:45 3")
}

func TestWindow_EarlyCount(t *testing.T) {
	undisturbed(t, windowFlow{windows: early(flow.CountWindows(3), 10*time.Minute)}, streamTimed, []string{
		"10:05 a 1", "10:06 b 2", "10:12 a 3", "10:13 a 4", "10:20 a 5", "11:00 c 6", "pause 1h",
	},
		"early a 10:05-10:05 1", "early b 10:06-10:06 2", "a 10:05-10:13 134", "early a 10:20-10:20 5", "early c 11:00-11:00 6")
}

// The watermark of two sources is not known before both have records.
func TestWindow_EarlyBeforeTheWatermark(t *testing.T) {
	w := windowFlow{windows: early(flow.Tumbling(time.Hour), 10*time.Minute), sources: []string{"IN", "TOO"}}
	r := flowtest.New(t, w.build(t))
	at := func(clock string) time.Time {
		at, err := clockTime(clock)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	r.Push(flowtest.Record{Stream: "IN", Time: at("10:05"), Data: "a 1"})
	r.Commit()
	r.Crash()
	r.Push(flowtest.Record{Stream: "IN", Time: at("10:45"), Data: "a 2"})
	wantData(t, r, "OUT")
	r.Push(flowtest.Record{Stream: "TOO", Time: at("10:46"), Data: "a 3"})
	wantData(t, r, "OUT", "early a 10:00-11:00 12")
}

// A step may get early results, or lose them, with the state that it has.
func TestWindow_EarlyState(t *testing.T) {
	without := windowFlow{windows: flow.Tumbling(time.Hour)}
	with := windowFlow{windows: early(without.windows, 10*time.Minute)}
	seal := func(f *flow.Flow, load ...[]byte) []byte {
		t.Helper()
		r := start(t, f)
		r.deltas[0] = load
		r.crash()
		if err := r.play(record{data: "a x", nanos: int64(time.Minute), seq: uint64(len(load) + 1)}); err != nil {
			t.Fatal(err)
		}
		r.seal()
		return r.deltas[0][len(load)]
	}
	for _, tc := range []struct {
		name  string
		flows []windowFlow
		want  []string
	}{
		{"with", []windowFlow{with, with}, []string{"early a 00:00-01:00 x", "a 00:00-01:00 x"}},
		{"gets them", []windowFlow{without, with}, []string{"a 00:00-01:00 x"}},
		{"gets them and a record", []windowFlow{without, with, with}, []string{"early a 00:00-01:00 xx", "a 00:00-01:00 xx"}},
		{"loses them", []windowFlow{with, without}, []string{"a 00:00-01:00 x"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var deltas [][]byte
			last := len(tc.flows) - 1
			for _, w := range tc.flows[:last] {
				deltas = append(deltas, seal(w.build(t), deltas...))
			}
			task := tc.flows[last].build(t).Task(0)
			for _, d := range deltas {
				if err := task.Load(d); err != nil {
					t.Fatal(err)
				}
			}
			task.Loaded()
			if err := task.Advance(0, int64(2*time.Hour)); err != nil {
				t.Fatal(err)
			}
			wantSealed(t, task, tc.want...)
		})
	}
}
