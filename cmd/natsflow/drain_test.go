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
	rec := control.Record{Flow: "f", Epoch: 2, Partitions: 16, Drain: &control.Drain{Cut: map[string]uint64{"A": 1500}}}
	for want, members := range map[string][]member{
		"f: draining, epoch 2, cut A:1500: no worker is running; the drain is done when one starts": nil,
		"f: draining, epoch 2, cut A:1500: waiting for a worker to become active":                   {{Name: "a"}},
		"f: draining, epoch 2, cut A:1500: 3 of 16 tasks done, A 1,400 to go; the bucket is full": {{
			Name: "a", Active: true,
			Status: &worker.Status{Done: 3, Sources: map[string]worker.SourceStatus{"A": {Committed: 100}}, Trouble: "the bucket is full"},
		}},
	} {
		if got := drainProgress(rec, members); got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
}
