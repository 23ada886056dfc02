package control

import (
	"encoding/json"
	"fmt"
	"time"
)

// TaskRecord says who holds a task. It is the permission to run it: only the
// instance that it names may, and only while it trusts its lease. It is changed
// by compare-and-set.
type TaskRecord struct {
	// Owner is the name of the member and Instance the process of that name. Both
	// are empty when the task is free.
	Owner    string `json:"owner,omitempty"`
	Instance string `json:"instance,omitempty"`
	// Final is what the last owner said when it released the task at the end of a
	// drain. It stays until the task is taken again.
	Final *Final `json:"final,omitempty"`
	// Since is when the task was taken or released, by the clock of who did.
	Since time.Time `json:"since,omitzero"`
	// Revision is the sequence of this record in its bucket, 0 when there is none.
	Revision uint64 `json:"-"`
}

// Free reports whether nobody holds the task.
func (r TaskRecord) Free() bool { return r.Owner == "" && r.Instance == "" }

// Final says that a task has its final entry of a drain.
type Final struct {
	Epoch uint64 `json:"epoch"`
	// Results and DeadLetters count since the flow's creation.
	Results     uint64 `json:"results"`
	DeadLetters uint64 `json:"dead_letters"`
	// Late counts the records that came after their window was closed.
	Late uint64 `json:"late,omitempty"`
	// AtEnd counts the results that the end of the drain made, Open the windows that
	// stay open.
	AtEnd uint64 `json:"at_end,omitempty"`
	Open  uint64 `json:"open,omitempty"`
	// Exchange is a sequence of the exchange of the flow that all which the task has
	// published there is at or before.
	Exchange uint64 `json:"exchange,omitempty"`
	// Bytes is the size of the snapshot, 0 if unknown.
	Bytes  uint64    `json:"bytes,omitempty"`
	Worker string    `json:"worker,omitempty"`
	Time   time.Time `json:"time,omitzero"`
}

// Stopped is what a member says when it has stopped reading for the cut of a
// drain.
type Stopped struct {
	Epoch uint64 `json:"epoch"`
	// Positions is how far it has read, by source.
	Positions map[string]uint64 `json:"positions,omitempty"`
	// Tasks are the tasks that it speaks for: they stand still.
	Tasks []string `json:"tasks,omitempty"`
}

// CutOf is the cut of a drain of which the command says "now": the highest
// position per source over all stops of that epoch. It is ok when every task is
// spoken for in one of them. Before that somebody may still be reading, and the
// cut could turn out to be behind what has been processed.
func CutOf(stops []Stopped, tasks []string, epoch uint64) (cut map[string]uint64, ok bool) {
	cut = make(map[string]uint64)
	stands := make(map[string]bool, len(tasks))
	for _, s := range stops {
		if s.Epoch != epoch {
			continue
		}
		for source, at := range s.Positions {
			cut[source] = max(cut[source], at)
		}
		for _, task := range s.Tasks {
			stands[task] = true
		}
	}
	for _, task := range tasks {
		if !stands[task] {
			return cut, false
		}
	}
	return cut, true
}

// holder is who has the lease of a name now.
type holder struct {
	present  bool
	instance string // "" when it cannot be read or nobody has it
	// settled: no earlier process of that name can trust its lease any more.
	settled bool
}

// claim is what a member sees when it wants a task: the task's record, and, read
// AFTER it, the lease of its owner. The order matters. A lease that is gone after
// the record was read was gone while that record was current, and if it has
// changed since, the compare-and-set on its revision fails. Read the other way
// round, an owner that rejoined in between would be robbed.
type claim struct {
	task  TaskRecord
	owner holder
	// heldUntil is when the former process under our own name cannot trust its
	// lease any more; zero when there was none or the caller vouches for it.
	heldUntil time.Time
}

type verdict string

const (
	claimTake  verdict = "take" // write the record by compare-and-set
	claimOurs  verdict = "ours"
	claimOther verdict = "other's"
	claimWait  verdict = "wait" // until heldUntil, for the former process of our name
	claimLost  verdict = "lost" // our own lease is not ours any more
)

// mayTake is what the member (name, instance) may do about a task.
func mayTake(name, instance string, c claim, now time.Time) verdict {
	switch {
	case c.task.Free():
		return claimTake
	case c.task.Owner == name && c.task.Instance == instance:
		return claimOurs
	case c.task.Owner == name && c.owner.instance != instance:
		// We have been replaced and did not know: without this the older process
		// would take a task from the younger one of its name.
		return claimLost
	case c.task.Owner == name && now.Before(c.heldUntil):
		// A process of our name had the task and we hold its lease now. It may not
		// have noticed yet.
		return claimWait
	case c.task.Owner == name, !c.owner.present:
		return claimTake
	case c.owner.instance != c.task.Instance && c.owner.settled:
		// Another process lives under that name, and the one that held the task
		// cannot trust its lease any more. Without this, a task that the younger
		// process is not assigned would be held by a dead one for ever.
		return claimTake
	}
	return claimOther
}

// disowned is what to write about a task that (name, instance) tried to take, by a
// write at revision rev of which the end is unknown, and does not want: the task is
// given back if it was taken. If it was not, the write may still be on its way, and
// the record is written again as it is: at another revision the write is refused.
// As its owner lives, nobody else could ever take a task that was taken unknowingly.
func disowned(name, instance string, rec TaskRecord, rev uint64) (next TaskRecord, write bool) {
	if rec.Owner == name && rec.Instance == instance {
		return TaskRecord{Revision: rec.Revision}, true
	}
	return rec, rec.Revision == rev
}

func encodeTask(r TaskRecord) ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode the record of a task: %w", err)
	}
	return b, nil
}

func decodeTask(b []byte) (TaskRecord, error) {
	var r TaskRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return TaskRecord{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	if (r.Owner == "") != (r.Instance == "") {
		return TaskRecord{}, fmt.Errorf("%w: owner %q, instance %q", ErrRecord, r.Owner, r.Instance)
	}
	return r, nil
}
