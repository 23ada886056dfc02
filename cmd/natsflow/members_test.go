package main

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/control"
	"natsflow/kvsnap"
	"natsflow/worker"
)

// status is the JSON of a worker's status.
func status(t *testing.T, st worker.Status) json.RawMessage {
	t.Helper()
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// testCrew has a worker with tasks, one that has not loaded its task yet and one
// that stands by; a task is done, one is free and one had an owner that is gone.
func testCrew(t *testing.T) crew {
	t.Helper()
	list := []control.MemberInfo{
		{Name: "a", Instance: "a1", TTL: 5 * time.Second, Age: time.Second, Status: status(t, worker.Status{
			Phase: "running", Tasks: 2, Results: 10, DeadLetters: 1, StateKeys: 4, Trouble: "the bucket is full", Warnings: []string{"IN is nearly full"},
			Sources: map[string]worker.SourceStatus{"A": {Read: 100, Committed: 90, Rate: 5}, "gone": {Read: 1}},
		})},
		{Name: "b", Instance: "b2", Status: status(t, worker.Status{Phase: "starting"})},
		{Name: "c", Instance: "c1", Status: status(t, worker.Status{Phase: "standing by"})},
		// It has got a second task since it said that, or given one away.
		{Name: "e", Instance: "e1", Status: status(t, worker.Status{
			Phase: "running", Tasks: 2, Results: 500, StateKeys: 50, Sources: map[string]worker.SourceStatus{"A": {Read: 115, Committed: 1, Rate: 7}},
		})},
		{Name: "d", Instance: "d1"},
	}
	records := map[string]control.TaskRecord{
		"0.0": {Owner: "a", Instance: "a1"}, "0.10": {Owner: "a", Instance: "a1"}, "0.2": {Owner: "b", Instance: "b2"},
		"0.3": {Owner: "b", Instance: "b1"},
		"0.4": {Final: &control.Final{Epoch: 3, Results: 7, DeadLetters: 2}},
		"0.5": {Final: &control.Final{Epoch: 2, Results: 99}},
		"0.6": {Owner: "e", Instance: "e1"},
		"9.9": {Owner: "a", Instance: "a0"}, // of an older definition
	}
	assignment := control.Assignment{Owners: map[string][]string{"a": {"0.10", "0.0"}, "b": {"0.2"}}}
	return newCrew(records, list, assignment, control.Record{Partitions: 7})
}

func TestNewCrew(t *testing.T) {
	who := testCrew(t)
	var got []string
	for _, task := range who.tasks {
		got = append(got, task.Task+" "+task.Owner+"/"+task.Former)
	}
	want := []string{"0.0 a/", "0.1 /", "0.2 b/", "0.3 /b", "0.4 /", "0.5 /", "0.6 e/", "0.10 a/"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for i, want := range []bool{false, false, true, false, false} {
		if m := who.members[i]; m.StandsBy != want {
			t.Errorf("%s stands by: %v", m.Name, m.StandsBy)
		}
	}
	if m := who.members[0]; m.LeaseTTL != 5*time.Second || m.LeaseAge != time.Second {
		t.Errorf("the lease of a: %v of %v", m.LeaseAge, m.LeaseTTL)
	}
	if diff := cmp.Diff([]string{"0.0", "0.10"}, who.members[0].Tasks); diff != "" {
		t.Errorf("tasks of a: %s", diff)
	}
	if got := who.working(); len(got) != 3 || who.standingBy() != 1 {
		t.Errorf("%d work, %d stand by", len(got), who.standingBy())
	}
}

func TestCrew_progress(t *testing.T) {
	who := testCrew(t)
	draining := control.Record{
		Epoch: 3, State: control.StateDraining, Sources: map[string]control.SourceRecord{"A": {}},
		Drain: &control.Drain{Cut: map[string]uint64{"A": 120}},
	}
	done, ownerless := who.count(draining)
	if diff := cmp.Diff([]string{"0.1", "0.3", "0.5"}, ownerless); done != 1 || diff != "" {
		t.Errorf("%d done; without an owner: %s", done, diff)
	}
	if diff := cmp.Diff(map[string]bool{"0.1": true, "0.2": true, "0.3": true, "0.5": true, "0.6": true}, who.silent(draining)); diff != "" {
		t.Errorf("silent: %s", diff)
	}
	stored := map[string]kvsnap.Head{
		"0.0": {Offsets: map[string]uint64{"A": 1}, Results: 1000}, // a worker says more of it
		"0.1": {Offsets: map[string]uint64{"A": 80}, Results: 20},
		"0.2": {Offsets: map[string]uint64{"A": 70}, Results: 30, DeadLetters: 3},
		"0.3": {Offsets: map[string]uint64{"A": 85}, Results: 40},
		"0.5": {Offsets: map[string]uint64{"A": 85}, Results: 50},
		"0.6": {Offsets: map[string]uint64{"A": 85}, Results: 60},
	}
	want := progress{
		Results: 10 + 7 + 20 + 30 + 40 + 50 + 60, Dead: 1 + 2 + 3, Keys: 4, Trouble: "a: the bucket is full", Warnings: []string{"a: IN is nearly full"},
		Sources: map[string]worker.SourceStatus{"A": {Read: 120, Committed: 70, Rate: 7}},
	}
	if diff := cmp.Diff(want, who.progress(draining, stored)); diff != "" {
		t.Error(diff)
	}
	// The task that was done in the drain counts like any other when the flow runs
	// again; one that has never committed is at the beginning.
	running := draining
	running.State, running.Drain = control.StateRunning, nil
	got := who.progress(running, stored)
	if at := got.Sources["A"]; at.Committed != 0 || at.Read != 115 || got.Results != want.Results-7 {
		t.Errorf("running: %+v", got)
	}
}

func TestCompactTasks(t *testing.T) {
	for _, tc := range []struct {
		names []string
		most  int
		want  string
	}{
		{nil, 3, ""},
		{[]string{"0.3"}, 3, "0.3"},
		{[]string{"0.0", "0.1", "0.2", "0.4", "1.5", "1.6"}, 3, "0.0-2 0.4 1.5-6"},
		{[]string{"0.0", "0.2", "0.4", "0.5", "0.6"}, 2, "0.0 0.2 and 3 more (--json has all)"},
		{[]string{"0.0", "x", "0.1"}, 3, "0.0 x 0.1"},
	} {
		if got := compactTasks(tc.names, tc.most); got != tc.want {
			t.Errorf("%v: got %q, want %q", tc.names, got, tc.want)
		}
	}
}
