package kvsnap

import (
	"fmt"
	"strconv"
	"strings"
)

// TaskID names a task of the flow: the unit of ownership, state and commits.
type TaskID struct {
	// Stage, from 0: the steps between two changes of key.
	Stage int
	// Partition, from 0: the key group.
	Partition int
}

// String is "<stage>.<partition>", e.g. "0.3".
func (t TaskID) String() string {
	return strconv.Itoa(t.Stage) + "." + strconv.Itoa(t.Partition)
}

// ParseTaskID reads what String writes.
func ParseTaskID(s string) (TaskID, error) {
	stage, partition, _ := strings.Cut(s, ".")
	var t TaskID
	var err error
	if t.Stage, err = strconv.Atoi(stage); err == nil {
		t.Partition, err = strconv.Atoi(partition)
	}
	if err != nil || t.String() != s {
		return TaskID{}, fmt.Errorf("task %q: must be <stage>.<partition>, for example 0.3", s)
	}
	return t, t.validate()
}

// validate keeps a negative number from becoming a strange key.
func (t TaskID) validate() error {
	if t.Stage < 0 || t.Partition < 0 {
		return fmt.Errorf("task %s: negative stage or partition", t)
	}
	return nil
}

const (
	logPrefix   = "log."
	chunkPrefix = "chunk."
)

func (t TaskID) logFilter() string   { return logPrefix + t.String() + ".>" }
func (t TaskID) chunkFilter() string { return chunkPrefix + t.String() + ".>" }

func (t TaskID) setFilter(set string) string {
	return chunkPrefix + t.String() + "." + set + ".>"
}

func (t TaskID) entryKey(n uint64) string {
	return logPrefix + t.String() + "." + strconv.FormatUint(n, 10)
}

func (t TaskID) chunkKey(set string, i int) string {
	return chunkPrefix + t.String() + "." + set + "." + strconv.Itoa(i)
}

// setName is the name of a chunk set. n is the number of the entry that was next
// when the set was begun, for a reader's eye; generation and counter make it
// unique over the life of the log.
func setName(n, generation, counter uint64) string {
	return strconv.FormatUint(n, 10) + "-" + strconv.FormatUint(generation, 10) + "-" + strconv.FormatUint(counter, 10)
}

// parseEntryKey takes the key of an entry apart. It accepts exactly what
// entryKey makes: no signs, no leading zeros.
func parseEntryKey(key string) (t TaskID, n uint64, ok bool) {
	parts := strings.Split(key, ".")
	if len(parts) != 4 || parts[0]+"." != logPrefix {
		return TaskID{}, 0, false
	}
	var errs [3]error
	t.Stage, errs[0] = strconv.Atoi(parts[1])
	t.Partition, errs[1] = strconv.Atoi(parts[2])
	n, errs[2] = strconv.ParseUint(parts[3], 10, 64)
	for _, err := range errs {
		if err != nil {
			return TaskID{}, 0, false
		}
	}
	return t, n, t.validate() == nil && t.entryKey(n) == key
}

// parseChunkKey takes the key of a chunk apart, as parseEntryKey does.
func parseChunkKey(key string) (t TaskID, set string, i int, ok bool) {
	parts := strings.Split(key, ".")
	if len(parts) != 5 || parts[0]+"." != chunkPrefix {
		return TaskID{}, "", 0, false
	}
	var errs [3]error
	t.Stage, errs[0] = strconv.Atoi(parts[1])
	t.Partition, errs[1] = strconv.Atoi(parts[2])
	i, errs[2] = strconv.Atoi(parts[4])
	for _, err := range errs {
		if err != nil {
			return TaskID{}, "", 0, false
		}
	}
	set = parts[3]
	return t, set, i, t.validate() == nil && i >= 0 && t.chunkKey(set, i) == key
}
