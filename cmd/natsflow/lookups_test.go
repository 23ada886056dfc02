package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/worker"
)

func TestCrew_tables(t *testing.T) {
	who := crew{members: []member{
		{Status: &worker.Status{Tables: map[string]worker.TableStatus{"A": {Keys: 3, Bytes: 5000, Behind: 7.4}, "B": {Keys: 1000, Bytes: 1}}}},
		{},
		{Status: &worker.Status{Tables: map[string]worker.TableStatus{"A": {Keys: 4, Bytes: 4000}}}},
	}}
	got := who.tables()
	want := map[string]worker.TableStatus{"A": {Keys: 4, Bytes: 5000, Behind: 7.4}, "B": {Keys: 1000, Bytes: 1}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	lines := []string{"BUCKET   KEYS     SIZE  BEHIND", "A           4  4.9 KiB      7s", "B       1,000      1 B       -"}
	if diff := cmp.Diff(lines, flowStatus{Tables: got}.tableLines()); diff != "" {
		t.Error(diff)
	}
	if got := (crew{members: []member{{}}}).tables(); got != nil || (flowStatus{}).tableLines() != nil {
		t.Errorf("without tables: %v", got)
	}
}
