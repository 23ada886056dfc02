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

func TestWindow_Session(t *testing.T) {
	undisturbed(t, windowFlow{windows: flow.Sessions(30*time.Minute, 0)}, streamTimed, []string{
		"10:00 a 1", "10:29:59 a 2", "10:40 b 3", "10:50 a bad",
		"10:59:59 a 4", // the gap is over: a session of its own
		"12:00 a 5", "pause 29m", "12:29 a 6", "pause 31m",
	},
		"a 10:00-10:59:59 12", "b 10:40-11:10 3", "a 10:59:59-11:29:59 4", "a 12:00-12:59 56")
}

// A record can come before the session that it belongs to, or join two.
func TestWindow_SessionJoins(t *testing.T) {
	w := windowFlow{windows: flow.Sessions(30*time.Minute, 0), clock: &flow.EventTime[string]{Lateness: 2 * time.Hour}}
	undisturbed(t, w, eventTimed, []string{
		"10:00 a 1", "10:40 a 2", "11:20 a 3",
		"10:20 a 4",              // joins the first two
		"09:45 a 5", "09:00 a 6", // in front, and too far in front
		"11:05 a 7",  // joins with the third
		"13:30 b 8",  // the watermark is 11:30
		"10:05 a 9",  // the session of 09:45 is open, it is still a part of it
		"11:00 c 10", // the window of a record that begins a session now would be closed
		"11:01 c 11",
		"20:00 d 12",
	},
		"a 09:00-09:30 6", "c 11:01-11:31 11", "a 09:45-11:50 1425739", "b 13:30-14:00 8")
}

func TestWindow_SessionMax(t *testing.T) {
	w := windowFlow{windows: flow.Sessions(30*time.Minute, time.Hour)}
	undisturbed(t, w, streamTimed, []string{
		"10:00 a 1", "10:20 a 2", "10:40 a 3", "10:59 a 4",
		"11:00 a 5", // an hour is over
		"11:20 a 6", "pause 2h",
	},
		"a 10:00-11:00 1234", "a 11:00-11:50 56")
	// Sessions that are not joined because of it do not overlap.
	w.clock = &flow.EventTime[string]{Lateness: 5 * time.Hour}
	undisturbed(t, w, eventTimed, []string{"10:00 a 1", "10:50 a 2", "10:25 a 3", "11:05 a 4", "11:40 a 5", "11:15 a 6", "20:00 b 7"},
		"a 10:00-11:00 132", "a 11:05-12:05 465")
}

// A merge that fails leaves two sessions, and costs the record that joined them.
func TestWindow_SessionMergeFails(t *testing.T) {
	w := windowFlow{windows: flow.Sessions(30*time.Minute, 0), clock: &flow.EventTime[string]{Lateness: 5 * time.Hour}}
	undisturbed(t, w, eventTimed, []string{"10:00 a 1", "10:40 a apart", "10:20 a 3", "20:00 b 7"},
		"a 10:00-10:40 13", "a 10:40-11:10 apart")
	wantErrors(t, eventTimed(t, w.build(t), "10:00 a 1", "10:40 a apart", "10:20 a 3"), "window: stay apart")
}

func TestWindow_SessionEmitEach(t *testing.T) {
	w := flow.Sessions(30*time.Minute, 0)
	w.Emit = flow.EmitEach
	undisturbed(t, windowFlow{windows: w, clock: &flow.EventTime[string]{Lateness: time.Hour}}, eventTimed, []string{"10:00 a 1", "10:40 a 2", "10:20 a 3", "20:00 a 4"},
		"a 10:00-10:30 1", "a 10:40-11:10 2", "a 10:00-11:10 132", "a 20:00-20:30 4")
}

// TestWindow_SessionProperty compares with sessions that are found by sorting:
// whatever the order of the records within the lateness, whatever crashes and stops
// in between, the sessions are those, and each record is in one of them.
func TestWindow_SessionProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gap := time.Duration(rapid.IntRange(1, 20).Draw(t, "gap")) * time.Minute
		minutes := rapid.SliceOfN(rapid.IntRange(0, 200), 1, 60).Draw(t, "minutes")
		w := windowFlow{windows: flow.Sessions(gap, 0), clock: &flow.EventTime[string]{Lateness: 200 * time.Minute}, partitions: rapid.IntRange(1, 3).Draw(t, "partitions")}
		r := flowtest.New(t, w.build(t))
		times := map[string][]time.Duration{}
		for i, n := range minutes {
			key := string(rune('a' + i%3))
			at := 10*time.Hour + time.Duration(n)*time.Minute
			times[key] = append(times[key], at)
			r.Push(flowtest.Record{Time: flowtest.Start.Add(20 * time.Hour), Data: fmt.Sprintf("%s %s .", flowtest.Start.Add(at).Format("15:04"), key)})
			switch rapid.IntRange(0, 6).Draw(t, "then") {
			case 0:
				r.Crash()
			case 1:
				r.Commit()
			case 2:
				r.Drain()
			}
		}
		r.Push(flowtest.Record{Time: flowtest.Start.Add(30 * time.Hour), Data: "2T06:00 z ."})
		var want []string
		for key, all := range times {
			slices.Sort(all)
			for from := 0; from < len(all); {
				to := from + 1
				for to < len(all) && all[to]-all[to-1] < gap {
					to++
				}
				start, end := flowtest.Start.Add(all[from]), flowtest.Start.Add(all[to-1]+gap)
				want = append(want, fmt.Sprintf("%s %s-%s %s", key, clockText(start), clockText(end), strings.Repeat(".", to-from)))
				from = to
			}
		}
		got := r.Data("OUT")
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("sessions (-want +got):\n%s", diff)
		}
	})
}
