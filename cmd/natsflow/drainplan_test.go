package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/control"
)

func TestPlannedCut(t *testing.T) {
	st := flowStatus{Sources: []sourceStatus{{Stream: "A", Head: 100, Read: 60}, {Stream: "B", Head: 7, Read: 7, Origin: "O", Waiting: 5}}}
	at := func(seq map[string]uint64, kind string) control.Record {
		return control.Record{Drain: &control.Drain{Command: control.Command{At: control.At{Kind: kind, Seq: seq, Time: time.Unix(1, 0)}}}}
	}
	fixed := at(nil, control.AtNow)
	fixed.Drain.Cut = map[string]uint64{"A": 70, "B": 8}
	seqAt := func(source string) (uint64, error) { return map[string]uint64{"A": 50, "B": 6}[source], nil }
	for name, tc := range map[string]struct {
		rec  control.Record
		want map[string]uint64
	}{
		"now":   {at(nil, control.AtNow), map[string]uint64{"A": 60, "B": 7}},
		"head":  {at(nil, control.AtHead), map[string]uint64{"A": 100, "B": 12}},
		"seq":   {at(map[string]uint64{"A": 90}, control.AtSeq), map[string]uint64{"A": 90, "B": 7}},
		"time":  {at(nil, control.AtTime), map[string]uint64{"A": 50, "B": 6}},
		"fixed": {fixed, map[string]uint64{"A": 70, "B": 8}},
	} {
		got, err := plannedCut(st, tc.rec, seqAt)
		if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
	away := errors.New("away")
	if _, err := plannedCut(st, at(nil, control.AtTime), func(string) (uint64, error) { return 0, away }); !errors.Is(err, away) {
		t.Errorf("got %v", err)
	}
}

// all counts every sequence as a record, up to the head.
func all(head uint64) func(string, uint64, uint64) (uint64, error) {
	return func(_ string, from, through uint64) (uint64, error) { return above(min(through, head)+1, from), nil }
}

func TestDrainPlan_fill(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	worker := []member{{Name: "a", Tasks: []string{"0.0"}}}
	plan := func(workers []member, rate float64, at control.At, cut uint64) *drainPlan {
		st := flowStatus{
			Flow: "f", crew: crew{members: workers, tasks: []taskStatus{{Task: "0.0"}}}, Tasks: make([]taskStatus, 1), StateBytes: 2048,
			Sources: []sourceStatus{{Stream: "A", Head: 100, Read: 60, Committed: 50, Rate: rate}},
		}
		rec := control.Record{Flow: "f", State: control.StateRunning, Epoch: 1, Partitions: 1}
		after, out := rec.Apply(control.Command{Seq: 1, Kind: control.KindDrain, Mode: control.ModeSuspend, At: at})
		p := newDrainPlan(st, after, out)
		if err := p.fill(st, after, map[string]uint64{"A": cut}, now, all(100)); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, tc := range map[string]struct {
		plan *drainPlan
		want []string
	}{
		"now": {plan(worker, 5, control.At{Kind: control.AtNow}, 60), []string{
			"f: a drain would be epoch 2, suspend at now; nothing was sent",
			"  STREAM   CUT  HEAD  COMMITTED  LEFT  RATE  TIME",
			"  A       >=60   100         50    10   5/s    2s",
			"  left       10 records",
			"  estimated  2s",
			"  snapshot   1 task, 2.0 KiB",
		}},
		"caught up": {plan(worker, 0, control.At{Kind: control.AtHead}, 50), []string{
			"f: a drain would be epoch 2, suspend at head; nothing was sent",
			"  STREAM   CUT  HEAD  COMMITTED  LEFT  RATE  TIME",
			"  A       >=50   100         50     0   0/s    0s",
			"  left       0 records",
			"  estimated  0s",
			"  snapshot   1 task, 2.0 KiB",
		}},
		"beyond the head": {plan(worker, 0, control.At{Kind: control.AtSeq, Seq: map[string]uint64{"A": 120}}, 120), []string{
			"f: a drain would be epoch 2, suspend at A:120; nothing was sent",
			"  STREAM  CUT  HEAD  COMMITTED  LEFT  RATE     TIME",
			"  A       120   100         50    70   0/s  unknown",
			"  left       70 records",
			"  estimated  unknown",
			"  snapshot   1 task, 2.0 KiB",
			"  note       A has 100 messages, so the drain waits for the ones up to 120",
		}},
		"nobody": {plan(nil, 5, control.At{Kind: control.AtNow}, 60), []string{
			"f: a drain would be epoch 2, suspend at now; nothing was sent",
			"  STREAM   CUT  HEAD  COMMITTED  LEFT  RATE     TIME",
			"  A       >=60   100         50    10   5/s  unknown",
			"  left       10 records",
			"  estimated  unknown",
			"  snapshot   1 task, 2.0 KiB",
			"  note       no worker has tasks; the drain is done when one starts",
		}},
		"later": {plan(worker, 10, control.At{Kind: control.AtTime, Time: now.Add(time.Minute)}, 100), []string{
			"f: a drain would be epoch 2, suspend at 2026-01-02T12:01:00Z; nothing was sent",
			"  STREAM    CUT  HEAD  COMMITTED  LEFT  RATE  TIME",
			"  A       >=100   100         50    50  10/s    5s",
			"  left       50 records",
			"  estimated  1m00s",
			"  snapshot   1 task, 2.0 KiB",
			"  note       the cut is fixed at 2026-01-02T12:01:00Z; the flow reads on until then",
		}},
	} {
		if diff := cmp.Diff(strings.Join(tc.want, "\n"), strings.Join(tc.plan.lines(), "\n")); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
