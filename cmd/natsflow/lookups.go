package main

import (
	"time"

	"natsflow/worker"
)

// tables are the buckets that the flow looks keys up in, as the workers have them: of
// each the largest copy, and the one that has not followed it for the longest.
func (w crew) tables() map[string]worker.TableStatus {
	var all map[string]worker.TableStatus
	for _, m := range w.members {
		if m.Status == nil {
			continue
		}
		for name, is := range m.Status.Tables {
			if all == nil {
				all = map[string]worker.TableStatus{}
			}
			was := all[name]
			all[name] = worker.TableStatus{Keys: max(was.Keys, is.Keys), Bytes: max(was.Bytes, is.Bytes), Behind: max(was.Behind, is.Behind)}
		}
	}
	return all
}

func (f flowStatus) tableLines() []string {
	if len(f.Tables) == 0 {
		return nil
	}
	t := table{head: []string{"BUCKET", "KEYS", "SIZE", "BEHIND"}, right: []bool{false, true, true, true}}
	for _, name := range sortedKeys(f.Tables) {
		is := f.Tables[name]
		behind := "-"
		if is.Behind > 0 {
			behind = time.Duration(is.Behind * float64(time.Second)).Round(time.Second).String()
		}
		t.add(name, count(is.Keys), size(is.Bytes), behind)
	}
	return t.lines()
}
