package flowtest

import (
	"slices"

	"natsflow/flow"
)

// tables are the buckets that the flow looks keys up in, by name.
type tables map[string]map[string][]byte

// Get implements [flow.Tables].
func (t tables) Get(bucket, key string) ([]byte, bool) {
	value, ok := t[bucket][key]
	return value, ok
}

func newTables(f *flow.Flow) tables {
	t := tables{}
	for _, l := range f.Lookups() {
		t[l.Bucket] = map[string][]byte{}
	}
	return t
}

// newTask makes a task of the flow that can look keys up.
func (r *Runner) newTask(stage, partition int) *flow.Task {
	t := r.f.StageTask(stage, partition)
	t.UseTables(r.tables)
	return t
}

// Set puts a value under a key of a bucket that the flow looks keys up in, or reads as
// a source. As a source it drops the value that it replaces, as a bucket without a
// history does, so that a replay after a [Runner.Crash] does not see that.
func (r *Runner) Set(bucket, key, value string) {
	r.tb.Helper()
	r.change(bucket, key, []byte(value))
}

// Unset deletes a key of a bucket, see [Runner.Set].
func (r *Runner) Unset(bucket, key string) {
	r.tb.Helper()
	r.change(bucket, key, nil)
}

// change is Set, and with nil Unset.
func (r *Runner) change(bucket, key string, value []byte) {
	r.tb.Helper()
	known := false
	if table, ok := r.tables[bucket]; ok {
		known = true
		if value == nil {
			delete(table, key)
		} else {
			table[key] = value
		}
	}
	i := slices.IndexFunc(r.sources, func(s *source) bool { return s.info.Bucket == bucket })
	if i < 0 {
		if !known {
			r.tb.Fatalf("set: the flow has no bucket %q that it reads or looks keys up in", bucket)
		}
		return
	}
	src, subject := r.sources[i], flow.BucketSubject(bucket, key)
	if !src.info.Takes(subject) {
		return
	}
	for k := range src.records {
		src.records[k].gone = src.records[k].gone || src.records[k].subject == subject
	}
	r.Push(Record{Stream: src.info.Stream, Subject: subject, Data: string(value)})
}
