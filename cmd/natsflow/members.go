package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
	"natsflow/worker"
)

// member is a worker process of a flow, as it says itself.
type member struct {
	Name    string    `json:"name"`
	Host    string    `json:"host"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// Renewed is when its lease was renewed last, by the server's clock, LeaseAge
	// how long ago that is by ours, and LeaseTTL how long the lease lasts after it.
	Renewed  time.Time     `json:"renewed"`
	LeaseAge time.Duration `json:"lease_age_ns"`
	LeaseTTL time.Duration `json:"lease_ttl_ns"`
	// Tasks are those that it holds.
	Tasks []string `json:"tasks"`
	// StandsBy: the other workers have all tasks.
	StandsBy bool `json:"standing_by"`
	// Stopped is what it said for the cut of a drain.
	Stopped *control.Stopped `json:"stopped,omitempty"`
	Status  *worker.Status   `json:"status,omitempty"`
}

// speaks reports whether a member has tasks and says where it is with them.
func (m member) speaks() bool { return m.Status != nil && m.Status.Tasks > 0 && len(m.Tasks) > 0 }

// exact reports whether what a member says is about the very tasks that it holds.
// A status is up to a second old, or two: tasks that have moved since would count
// twice or not at all.
func (m member) exact() bool { return m.speaks() && m.Status.Tasks-m.Status.Done == len(m.Tasks) }

// taskStatus says who has a task.
type taskStatus struct {
	Task string `json:"task"`
	// Owner is a worker that is alive; empty if nobody has the task.
	Owner string `json:"owner,omitempty"`
	// Former is the worker that had it and is gone.
	Former string `json:"former_owner,omitempty"`
	// Since is when the task was taken or released.
	Since time.Time `json:"since,omitzero"`
	// Generation is how often the task has been claimed, if its owner says so.
	Generation uint64 `json:"generation,omitempty"`
	// Final is the epoch whose drain the task has come to the end of.
	Final uint64 `json:"final_epoch,omitempty"`

	final *control.Final
}

// crew is who works on a flow: its members by name, and its tasks in order.
type crew struct {
	members []member
	tasks   []taskStatus
}

// listCrew asks who works on a flow. Who holds a task, only its record tells here:
// what the list of the members says of it is from another moment. The members are
// read after the tasks, so that a task whose owner is missing has lost it.
func listCrew(ctx context.Context, ctl *control.Control, rec control.Record) (crew, error) {
	records, err := ctl.Tasks(ctx)
	if err != nil {
		return crew{}, err
	}
	list, assignment, err := ctl.Members(ctx)
	if err != nil {
		return crew{}, err
	}
	return newCrew(records, list, assignment, rec), nil
}

func newCrew(records map[string]control.TaskRecord, list []control.MemberInfo, assignment control.Assignment, rec control.Record) crew {
	w := crew{members: make([]member, 0, len(list))}
	holds := map[string][]string{} // by instance
	for name, rec := range records {
		holds[rec.Instance] = append(holds[rec.Instance], name)
	}
	alive := map[string]bool{}
	generations := map[string]uint64{}
	for _, info := range list {
		m := member{
			Name: info.Name, Host: info.Host, PID: info.PID, Started: info.Started, Renewed: info.Renewed,
			LeaseAge: info.Age, LeaseTTL: info.TTL, Tasks: holds[info.Instance], Stopped: info.Stopped,
		}
		if m.Tasks == nil {
			m.Tasks = []string{}
		}
		slices.SortFunc(m.Tasks, compareTasks)
		var st worker.Status
		if len(info.Status) > 0 && json.Unmarshal(info.Status, &st) == nil {
			m.Status = &st
			for _, name := range m.Tasks {
				generations[name] = st.Generations[name]
			}
			// It is shown with the tasks.
			st.Generations = nil
			m.StandsBy = len(m.Tasks) == 0 && st.Phase == "standing by"
		}
		alive[info.Instance] = true
		w.members = append(w.members, m)
	}
	for _, name := range taskNames(assignment, rec) {
		rec := records[name]
		t := taskStatus{Task: name, Since: rec.Since}
		switch {
		case alive[rec.Instance]:
			t.Owner, t.Generation = rec.Owner, generations[name]
		case !rec.Free():
			t.Former = rec.Owner
		case rec.Final != nil:
			t.final, t.Final = rec.Final, rec.Final.Epoch
		}
		w.tasks = append(w.tasks, t)
	}
	return w
}

// taskNames are the names of all tasks of a flow.
func taskNames(assignment control.Assignment, rec control.Record) []string {
	all := map[string]bool{}
	for stage := range max(rec.Stages, 1) {
		for p := range rec.Partitions {
			all[kvsnap.TaskID{Stage: stage, Partition: p}.String()] = true
		}
	}
	for _, tasks := range assignment.Owners {
		for _, name := range tasks {
			all[name] = true
		}
	}
	return slices.SortedFunc(maps.Keys(all), compareTasks)
}

// compareTasks orders the names of tasks by their numbers: 0.2 before 0.10.
func compareTasks(a, b string) int {
	x, errX := kvsnap.ParseTaskID(a)
	y, errY := kvsnap.ParseTaskID(b)
	if errX != nil || errY != nil {
		return cmp.Compare(a, b)
	}
	return cmp.Or(cmp.Compare(x.Stage, y.Stage), cmp.Compare(x.Partition, y.Partition))
}

// done reports whether a task has come to the end of the drain that rec is about.
func (t taskStatus) done(rec control.Record) bool {
	return t.Owner == "" && t.final != nil && t.final.Epoch == rec.Epoch && rec.Drain != nil && rec.Drain.Cut != nil
}

// count returns how many tasks are done in the drain that rec is about, and which
// of the others nobody has.
func (w crew) count(rec control.Record) (done int, ownerless []string) {
	for _, t := range w.tasks {
		switch {
		case t.done(rec):
			done++
		case t.Owner == "":
			ownerless = append(ownerless, t.Task)
		}
	}
	return done, ownerless
}

// working are the members that have tasks.
func (w crew) working() []member {
	return slices.DeleteFunc(slices.Clone(w.members), func(m member) bool { return len(m.Tasks) == 0 })
}

// standingBy is the number of members that the others leave no tasks to.
func (w crew) standingBy() (n int) {
	for _, m := range w.members {
		if m.StandsBy {
			n++
		}
	}
	return n
}

// silent are the tasks of which no worker says how far they are.
func (w crew) silent(rec control.Record) map[string]bool {
	exact := map[string]bool{}
	for _, m := range w.members {
		exact[m.Name] = m.exact()
	}
	tasks := map[string]bool{}
	for _, t := range w.tasks {
		if !exact[t.Owner] && !t.done(rec) {
			tasks[t.Task] = true
		}
	}
	return tasks
}

// progress is how far a flow is, over all its tasks.
type progress struct {
	Results, Dead, Late uint64
	Keys                int
	// Trouble is what its workers wait for.
	Trouble string
	// Warnings are what needs somebody soon.
	Warnings []string
	Sources  map[string]worker.SourceStatus
}

// exchange is the name of the exchange of a flow, and whether it has one.
func exchange(rec control.Record) (string, bool) {
	return flow.ExchangeStream(rec.Flow), rec.Stages > 1
}

// inputs are the streams that a task reads.
func inputs(rec control.Record, task string) []string {
	if id, err := kvsnap.ParseTaskID(task); err == nil && id.Stage > 0 {
		name, _ := exchange(rec)
		return []string{name}
	}
	return sortedKeys(rec.Sources)
}

// reach takes a position of some tasks into account: what has been read is the
// furthest of all, what is committed the lowest. Each worker reads the whole of a
// source, so that the rate is the highest.
func (p *progress) reach(source string, at worker.SourceStatus) {
	all, known := p.Sources[source]
	if !known {
		p.Sources[source] = at
		return
	}
	all.Read, all.Rate = max(all.Read, at.Read), max(all.Rate, at.Rate)
	all.Committed = min(all.Committed, at.Committed)
	p.Sources[source] = all
}

// progress adds up what the workers say of their tasks, what is recorded of those
// that are done, and what is stored of the silent ones.
func (w crew) progress(rec control.Record, stored map[string]kvsnap.Head) progress {
	p := progress{Sources: map[string]worker.SourceStatus{}}
	for _, m := range w.members {
		if m.Status == nil {
			continue
		}
		if m.Status.Trouble != "" {
			p.Trouble = join(p.Trouble, m.Name+": "+m.Status.Trouble)
		}
		for _, w := range m.Status.Warnings {
			p.Warnings = append(p.Warnings, m.Name+": "+w)
		}
		if !m.exact() {
			continue
		}
		p.Results += m.Status.Results
		p.Dead += m.Status.DeadLetters
		p.Late += m.Status.Late
		p.Keys += m.Status.StateKeys
		for name := range rec.Sources {
			if at, ok := m.Status.Sources[name]; ok {
				p.reach(name, at)
			}
		}
		if name, ok := exchange(rec); ok {
			for _, at := range m.Status.Exchange {
				p.reach(name, at)
			}
		}
	}
	silent := w.silent(rec)
	for _, t := range w.tasks {
		switch {
		case t.done(rec):
			p.Results += t.final.Results
			p.Dead += t.final.DeadLetters
			p.Late += t.final.Late
			for _, name := range inputs(rec, t.Task) {
				at, ok := rec.Drain.Cut[name]
				if !ok {
					continue // of the exchange it has read all that there is for it
				}
				p.reach(name, worker.SourceStatus{Read: at, Committed: at})
			}
		case silent[t.Task]:
			// One that has never committed is at the beginning.
			head := stored[t.Task]
			p.Results += head.Results
			p.Dead += head.DeadLetters
			p.Late += head.Late
			for _, name := range inputs(rec, t.Task) {
				p.reach(name, worker.SourceStatus{Read: head.Offsets[name], Committed: head.Offsets[name]})
			}
		}
	}
	for _, m := range w.members {
		// Whoever has the tasks now, this far the flow was.
		p.passed(m)
	}
	return p
}

// passed takes into account what a member has read, and how fast.
func (p *progress) passed(m member) {
	if !m.speaks() {
		return
	}
	for name, all := range p.Sources {
		at := m.Status.Sources[name]
		all.Read, all.Rate = max(all.Read, at.Read), max(all.Rate, at.Rate)
		p.Sources[name] = all
	}
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// storedHeads reads what the task logs say last, by task.
func storedHeads(ctx context.Context, conn *bus.Conn, name string) (map[string]kvsnap.Head, error) {
	store, err := openStore(ctx, conn, name)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	tasks, err := store.Tasks(ctx)
	if err != nil {
		return nil, err
	}
	heads := make(map[string]kvsnap.Head, len(tasks))
	for _, t := range tasks {
		heads[t.Task.String()] = t.Head
	}
	return heads, nil
}

// sortedKeys returns the keys of a map in order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
