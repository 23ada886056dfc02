package control

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// assignmentVersion is the version of the assignment that this code reads and
// writes.
const assignmentVersion = 1

// Assignment says which member shall run which tasks. It is a wish: who may run a
// task, the task's record says (see [TaskRecord]).
type Assignment struct {
	Version int `json:"version"`
	// Generation rises by one with each change.
	Generation uint64 `json:"generation"`
	// Hash is of the definition whose tasks these are.
	Hash string `json:"hash,omitempty"`
	// Owners are the tasks by the name of the member. Every member that was alive is
	// there, also with no tasks: it stands by.
	Owners map[string][]string `json:"owners"`
}

// Assign distributes tasks over members. Its result has every member, with its
// tasks in order, and every task once. It is balanced (the numbers of tasks differ
// by at most one), moves as few tasks from current as that allows, and does not
// depend on the order of what it is given. Without members nothing is assigned.
//
// A member keeps what it has up to its quota. Where the tasks cannot be shared
// evenly, the larger quotas go to those that have the most now: each task above a
// small quota that its owner may keep is one that does not move.
func Assign(current map[string][]string, members, tasks []string) map[string][]string {
	members, tasks = sortedSet(members), sortedSet(tasks)
	next := make(map[string][]string, len(members))
	if len(members) == 0 {
		return next
	}
	pool := keep(next, current, members, tasks)
	quotas := quotasOf(next, members, len(tasks))
	for _, name := range members {
		kept, shed := shed(next[name], quotas[name])
		next[name] = kept
		pool = append(pool, shed...)
	}
	slices.Sort(pool)
	// In turns and not one member after the other, so that each of them gets some
	// of every stage.
	for len(pool) > 0 {
		for _, name := range members {
			if len(pool) > 0 && len(next[name]) < quotas[name] {
				next[name] = append(next[name], pool[0])
				pool = pool[1:]
			}
		}
	}
	for _, name := range members {
		slices.Sort(next[name])
	}
	return next
}

// keep gives the members what they have in current, as far as it is a task and no
// other has it, and returns the tasks that nobody has.
func keep(next, current map[string][]string, members, tasks []string) (pool []string) {
	owner := make(map[string]string, len(tasks))
	for _, name := range members {
		for _, task := range current[name] {
			if _, taken := owner[task]; !taken {
				owner[task] = name
			}
		}
		next[name] = []string{}
	}
	for _, task := range tasks {
		if name, ok := owner[task]; ok {
			next[name] = append(next[name], task)
		} else {
			pool = append(pool, task)
		}
	}
	return pool
}

// quotasOf is how many of the tasks each member gets.
func quotasOf(has map[string][]string, members []string, tasks int) map[string]int {
	byNumber := slices.Clone(members)
	slices.SortStableFunc(byNumber, func(a, b string) int { return cmp.Compare(len(has[b]), len(has[a])) })
	quotas := make(map[string]int, len(members))
	for i, name := range byNumber {
		quotas[name] = tasks / len(members)
		if i < tasks%len(members) {
			quotas[name]++
		}
	}
	return quotas
}

// shed splits tasks into at most quota that are kept and the others. Those are
// spread over all of them: the tasks of a stage are neighbours, and a new member
// is to get a share of every stage.
func shed(tasks []string, quota int) (kept, others []string) {
	surplus := len(tasks) - quota
	if surplus <= 0 {
		return tasks, nil
	}
	for i, task := range tasks {
		// Of every len(tasks)/surplus tasks the last one goes.
		if (i+1)*surplus/len(tasks) > i*surplus/len(tasks) {
			others = append(others, task)
		} else {
			kept = append(kept, task)
		}
	}
	if kept == nil {
		kept = []string{}
	}
	return kept, others
}

func sortedSet(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return slices.Compact(names)
}

// peer is what matters of a live member for the assignment.
type peer struct {
	name, hash string
	leaving    bool
}

// rebalanced is the assignment after a over the live members, as the member self
// of the given definition sees it, and whether it differs from a. It is an
// ErrDefinition when a is of another definition and one of its members is alive:
// of two definitions that start at the same time, the one that was written first
// runs.
func rebalanced(a Assignment, live []peer, self, hash string, tasks []string) (next Assignment, changed bool, err error) {
	tasks = sortedSet(tasks)
	fits := a.Version == 0 || a.fits(hash, tasks)
	var names []string
	for _, p := range live {
		if p.leaving {
			continue
		}
		if _, assigned := a.Owners[p.name]; !fits && assigned && p.name != self && p.hash == a.Hash {
			return a, false, fmt.Errorf("%w: member %s runs definition %s with %d tasks, this process definition %s with %d",
				ErrDefinition, p.name, short(p.hash), a.tasks(), short(hash), len(tasks))
		}
		if p.hash == hash {
			names = append(names, p.name)
		}
	}
	next = Assignment{Version: assignmentVersion, Generation: a.Generation + 1, Hash: hash, Owners: Assign(a.Owners, names, tasks)}
	if a.Version != 0 && a.Hash == hash && maps.EqualFunc(a.Owners, next.Owners, slices.Equal) {
		return a, false, nil
	}
	return next, true, nil
}

// fits reports whether a is of the definition with that hash and those tasks. One
// that assigns nothing (everybody had left) fits any tasks.
func (a Assignment) fits(hash string, tasks []string) bool {
	if a.Hash != hash {
		return false
	}
	var assigned []string
	for _, of := range a.Owners {
		assigned = append(assigned, of...)
	}
	slices.Sort(assigned)
	return len(assigned) == 0 || slices.Equal(assigned, tasks)
}

// tasks is the number of tasks that are assigned.
func (a Assignment) tasks() (n int) {
	for _, of := range a.Owners {
		n += len(of)
	}
	return n
}

// neighbour is the member whose lease the member name watches: the next one by
// name, and after the last the first. "" when there is no other. Each member has
// one that watches it, so that a death is seen whoever dies, at a cost that does
// not depend on the number of members.
func (a Assignment) neighbour(name string) string {
	first, next := "", ""
	for other := range a.Owners {
		if other == name {
			continue
		}
		if first == "" || other < first {
			first = other
		}
		if other > name && (next == "" || other < next) {
			next = other
		}
	}
	if next == "" {
		return first
	}
	return next
}

func encodeAssignment(a Assignment) ([]byte, error) {
	b, err := json.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("encode the assignment: %w", err)
	}
	return b, nil
}

func decodeAssignment(b []byte) (Assignment, error) {
	var a Assignment
	if err := json.Unmarshal(b, &a); err != nil {
		return Assignment{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	if a.Version != assignmentVersion {
		return Assignment{}, fmt.Errorf("%w: it has version %d, this natsflow reads version %d: use the natsflow that wrote it", ErrRecord, a.Version, assignmentVersion)
	}
	return a, nil
}
