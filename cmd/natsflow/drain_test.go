package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/control"
	"natsflow/worker"
)

func TestParseAt(t *testing.T) {
	noon := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	for in, want := range map[string]control.At{
		"now":                             {Kind: control.AtNow},
		"head":                            {Kind: control.AtHead},
		"A:12":                            {Kind: control.AtSeq, Seq: map[string]uint64{"A": 12}},
		"A:12,B:3":                        {Kind: control.AtSeq, Seq: map[string]uint64{"A": 12, "B": 3}},
		"12":                              {Kind: control.AtSeq, Seq: map[string]uint64{"": 12}},
		`{"seq":{"A":7}}`:                 {Kind: control.AtSeq, Seq: map[string]uint64{"A": 7}},
		"2026-01-02T13:00:00+01:00":       {Kind: control.AtTime, Time: noon},
		`{"time":"2026-01-02T12:00:00Z"}`: {Kind: control.AtTime, Time: noon},
	} {
		got, err := parseAt(in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
		} else if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", in, diff)
		}
	}
	for _, in := range []string{"", "soon", "A:", "A:-1", ":5", "A:1,2", "1,2", `{"sec":{"A":1}}`, "2026-01-02"} {
		if got, err := parseAt(in); err == nil {
			t.Errorf("%q: got %v, want an error", in, got)
		}
	}
}

func TestResolveAt(t *testing.T) {
	bare := control.At{Kind: control.AtSeq, Seq: map[string]uint64{"": 5}}
	one := control.Record{Sources: map[string]control.SourceRecord{"A": {}}}
	got, err := resolveAt(bare, one)
	if err != nil || got.Seq["A"] != 5 || len(got.Seq) != 1 {
		t.Errorf("got %v, %v", got, err)
	}
	two := control.Record{Sources: map[string]control.SourceRecord{"A": {}, "B": {}}}
	if _, err := resolveAt(control.At{Kind: control.AtSeq, Seq: map[string]uint64{"": 5}}, two); err == nil {
		t.Error("a bare sequence was taken for two sources")
	}
}

func TestDrainVerdict(t *testing.T) {
	base := control.Record{Flow: "f", State: control.StateRunning, Sources: map[string]control.SourceRecord{"A": {}}}
	drain := func(r control.Record, seq uint64, at control.At) control.Record {
		next, _ := r.Apply(control.Command{Seq: seq, Kind: control.KindDrain, Mode: control.ModeSuspend, At: at})
		return next
	}
	draining := drain(base, 1, control.At{Kind: control.AtNow})
	cut, err := draining.FixCut(1, map[string]uint64{"A": 9}, nil)
	if err != nil {
		t.Fatal(err)
	}
	drained, err := cut.Drained(1, control.Report{})
	if err != nil {
		t.Fatal(err)
	}
	resumed, _ := drained.Apply(control.Command{Seq: 2, Kind: control.KindResume})
	cancelled, _ := draining.Apply(control.Command{Seq: 2, Kind: control.KindResume})
	behind, _ := draining.FixCut(1, map[string]uint64{"A": 3}, map[string]uint64{"A": 5})
	for name, tc := range map[string]struct {
		rec        control.Record
		seq, epoch uint64
		done, fail bool
	}{
		"draining":                    {draining, 1, 1, false, false},
		"cut fixed":                   {cut, 1, 1, false, false},
		"drained":                     {drained, 1, 1, true, false},
		"drained and resumed":         {resumed, 1, 1, true, false},
		"drained before":              {drain(drained, 3, control.At{Kind: control.AtNow}), 3, 1, true, false},
		"joined":                      {drain(draining, 3, control.At{Kind: control.AtNow}), 3, 1, false, false},
		"contradicts":                 {drain(draining, 3, control.At{Kind: control.AtHead}), 3, 1, false, true},
		"cancelled":                   {cancelled, 1, 1, false, true},
		"cancelled and drained again": {drain(cancelled, 3, control.At{Kind: control.AtNow}), 1, 1, false, true},
		"refused":                     {behind, 1, 1, false, true},
		"unknown source":              {drain(base, 1, control.At{Kind: control.AtSeq, Seq: map[string]uint64{"B": 1}}), 1, 0, false, true},
	} {
		done, err := drainVerdict(tc.rec, tc.seq, tc.epoch)
		if done != tc.done || (err != nil) != tc.fail {
			t.Errorf("%s: got %v, %v", name, done, err)
		}
	}
}

func TestDrainProgress(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	at := func(source string, committed uint64) *worker.Status {
		return &worker.Status{Tasks: 2, Sources: map[string]worker.SourceStatus{source: {Committed: committed}}}
	}
	cut := &control.Drain{Cut: map[string]uint64{"A": 1500}}
	final := &control.Final{Epoch: 2}
	done := taskStatus{Task: "0.0", final: final}
	for name, tc := range map[string]struct {
		want  string
		drain *control.Drain
		who   crew
	}{
		"nobody": {
			"f: draining, epoch 2, cut A:1500: 1 of 2 tasks done, no worker is running; the drain is done when one starts",
			cut,
			crew{tasks: []taskStatus{done, {Task: "0.1"}}},
		},
		"nobody, no cut": {
			"f: draining, epoch 2: no worker is running; the drain is done when one starts",
			&control.Drain{},
			crew{tasks: []taskStatus{{Task: "0.0"}}},
		},
		"no tasks yet": {
			"f: draining, epoch 2, cut A:1500: 0 of 1 tasks done, waiting for a worker to take the tasks",
			cut,
			crew{members: []member{{Name: "a"}}, tasks: []taskStatus{{Task: "0.0"}}},
		},
		"final of another epoch": {
			"f: draining, epoch 2, cut A:1500: 0 of 1 tasks done, waiting for a worker to take the tasks",
			cut,
			crew{members: []member{{Name: "a"}}, tasks: []taskStatus{{Task: "0.0", final: &control.Final{Epoch: 1}}}},
		},
		"one worker": {
			"f: draining, epoch 2, cut A:1500: 1 of 3 tasks done, A 1,400 to go; a: the bucket is full",
			cut,
			crew{
				members: []member{{Name: "a", Tasks: []string{"0.1", "0.2"}, Status: &worker.Status{
					Tasks: 3, Sources: map[string]worker.SourceStatus{"A": {Committed: 100}}, Trouble: "the bucket is full",
				}}},
				tasks: []taskStatus{done, {Task: "0.1", Owner: "a"}, {Task: "0.2", Owner: "a"}},
			},
		},
		"the slowest": {
			"f: draining, epoch 2, cut A:1500: 0 of 4 tasks done, A 700 to go for b, busy: b (2) a (1), 1 task without an owner",
			cut,
			crew{
				members: []member{
					{Name: "a", Tasks: []string{"0.0"}, Status: at("A", 1500)},
					{Name: "b", Tasks: []string{"0.1", "0.2"}, Status: at("A", 800)},
					{Name: "c", Status: &worker.Status{Phase: "standing by"}},
				},
				tasks: []taskStatus{{Task: "0.0", Owner: "a"}, {Task: "0.1", Owner: "b"}, {Task: "0.2", Owner: "b"}, {Task: "0.3", Former: "d"}},
			},
		},
		"all done": {
			"f: draining, epoch 2, cut A:1500: 1 of 1 tasks done",
			cut,
			crew{members: []member{{Name: "a", Status: at("A", 1500)}}, tasks: []taskStatus{done}},
		},
		"looking for the cut": {
			"f: draining, epoch 2: 1 of 2 workers stand still for the cut",
			&control.Drain{},
			crew{
				members: []member{
					{Name: "a", Tasks: []string{"0.0"}, Stopped: &control.Stopped{Epoch: 2}},
					{Name: "b", Tasks: []string{"0.1"}, Stopped: &control.Stopped{Epoch: 1}},
				},
				tasks: []taskStatus{{Task: "0.0", Owner: "a"}, {Task: "0.1", Owner: "b"}},
			},
		},
		"waiting for a time": {
			"f: draining, epoch 2: waiting until 2026-01-02T12:00:01Z",
			&control.Drain{Command: control.Command{At: control.At{Kind: control.AtTime, Time: now.Add(time.Second)}}},
			crew{members: []member{{Name: "a", Tasks: []string{"0.0"}}}, tasks: []taskStatus{{Task: "0.0", Owner: "a"}}},
		},
	} {
		rec := control.Record{Flow: "f", Epoch: 2, Drain: tc.drain}
		if got := drainProgress(rec, tc.who, now); got != tc.want {
			t.Errorf("%s:\ngot  %q\nwant %q", name, got, tc.want)
		}
	}
}
