package control

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Errors of Define.
var (
	// ErrDefinition: the flow's state does not fit the definition.
	ErrDefinition = errors.New("the definition does not fit the flow's state")
	// ErrSourceRecreated: a source stream was deleted and created again, so that
	// the recorded positions mean nothing in it.
	ErrSourceRecreated = errors.New("a source stream was created anew")
)

// Definition is what a flow's record must know of the flow as it is deployed.
type Definition struct {
	Partitions int
	// Stages of the flow; 0 is 1.
	Stages int
	// Hash identifies the definition: equal definitions have equal hashes.
	Hash string
	// Steps are the stateful steps only.
	Steps   []StepRecord
	Sources map[string]SourceRecord
	// AcceptRecreated takes source streams that were created anew, with their
	// new times of creation.
	AcceptRecreated bool
	// AcceptChanges lets a drained flow go on without the state of steps that
	// are gone; see [Record.LeftOver].
	AcceptChanges bool
}

// stages is what the record has of them.
func (d Definition) stages() int {
	if d.Stages == 1 {
		return 0
	}
	return d.Stages
}

func (d Definition) validate() error {
	if d.Partitions < 1 {
		return fmt.Errorf("%d partitions: must be at least 1", d.Partitions)
	}
	seen := make(map[string]bool, len(d.Steps))
	for _, s := range d.Steps {
		if s.ID == "" || seen[s.ID] {
			return fmt.Errorf("step id %q: must be there and unique", s.ID)
		}
		seen[s.ID] = true
	}
	return nil
}

// newRecord is the first record of a flow. Commands up to last were published
// before the flow existed and must not affect it.
func newRecord(flow string, def Definition, ref ControlRef, last uint64, now time.Time) Record {
	return Record{
		Version: recordVersion, Flow: flow, State: StateRunning,
		LastCommand: last, Partitions: def.Partitions, Stages: def.stages(), Hash: def.Hash,
		Steps: slices.Clone(def.Steps), Sources: maps.Clone(def.Sources),
		Control: ref, Created: now, Updated: now,
	}
}

// Change is what another definition changes in a flow. The steps are those with
// state.
type Change struct {
	// Kept steps go on with the state that is stored under their ids.
	Kept []KeptStep `json:"steps_kept"`
	// New steps begin without state.
	New []StepRecord `json:"steps_new"`
	// LeftOver are stored steps which the definition does not have, or has as
	// another kind of step or in another stage; then that one is among New, and in Taken.
	LeftOver []StepRecord `json:"steps_left_over"`
	// Taken are ids of New steps under which there may be the state of another
	// step: each needs another id.
	Taken []string `json:"ids_taken"`
	// Sources by name, in order. One that is back was read before and goes on from
	// where it was left. Recreated ones have the name of one that was read, and are
	// not that stream.
	SourcesKept      []string `json:"sources_kept"`
	SourcesNew       []string `json:"sources_new"`
	SourcesBack      []string `json:"sources_back"`
	SourcesGone      []string `json:"sources_gone"`
	SourcesRecreated []string `json:"sources_recreated"`
}

// KeptStep is a step with the version of its state, and the one stored.
type KeptStep struct {
	StepRecord
	Stored int `json:"stored_version,omitempty"`
}

// Compare returns what the definition changes in the flow.
func (r Record) Compare(def Definition) Change {
	c := Change{
		Kept: []KeptStep{}, New: []StepRecord{}, LeftOver: []StepRecord{}, Taken: []string{},
		SourcesKept: []string{}, SourcesNew: []string{}, SourcesBack: []string{}, SourcesGone: []string{}, SourcesRecreated: []string{},
	}
	for _, s := range def.Steps {
		if old, ok := stepOf(r.Steps, s.ID); ok && old.same(s) {
			c.Kept = append(c.Kept, KeptStep{s, old.Version})
			continue
		} else if ok || slices.Contains(r.LeftOver, s.ID) {
			c.Taken = append(c.Taken, s.ID)
		}
		c.New = append(c.New, s)
	}
	for _, old := range r.Steps {
		if s, ok := stepOf(def.Steps, old.ID); !ok || !s.same(old) {
			c.LeftOver = append(c.LeftOver, old)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(def.Sources)) {
		old, known := r.source(name)
		_, read := r.Sources[name]
		switch created := def.Sources[name].Created; {
		case !known:
			c.SourcesNew = append(c.SourcesNew, name)
		case !old.Created.Equal(created):
			c.SourcesRecreated = append(c.SourcesRecreated, name)
		case read:
			c.SourcesKept = append(c.SourcesKept, name)
		default:
			c.SourcesBack = append(c.SourcesBack, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Sources)) {
		if _, ok := def.Sources[name]; !ok {
			c.SourcesGone = append(c.SourcesGone, name)
		}
	}
	return c
}

// source returns what is known of a stream that the flow reads, or has read.
func (r Record) source(name string) (src SourceRecord, known bool) {
	if src, known = r.Sources[name]; !known {
		src, known = r.FormerSources[name]
	}
	return src, known
}

func stepOf(steps []StepRecord, id string) (StepRecord, bool) {
	i := slices.IndexFunc(steps, func(s StepRecord) bool { return s.ID == id })
	if i < 0 {
		return StepRecord{}, false
	}
	return steps[i], true
}

// Fits returns nil if the flow can go on under the definition once it is drained,
// or an ErrDefinition or ErrSourceRecreated that says what to do.
func (r Record) Fits(def Definition) error {
	if def.Partitions != r.Partitions {
		return fmt.Errorf("%w: flow %s was created with %d partitions and is now defined with %d: keep %d, or give the flow another name to start it afresh",
			ErrDefinition, r.Flow, r.Partitions, def.Partitions, r.Partitions)
	}
	c := r.Compare(def)
	if err := r.untaken(c, def); err != nil {
		return err
	}
	if err := r.sameWay(def); err != nil {
		return err
	}
	if len(c.LeftOver) > 0 && !def.AcceptChanges {
		return fmt.Errorf("%w: flow %s has state of %s, which the definition does not have (it was %s and is now %s): put it back, give it its former id if it was renamed, or drain the flow and start it with --resume --accept-changes to go on without that state",
			ErrDefinition, r.Flow, stepList(c.LeftOver), short(r.Hash), short(def.Hash))
	}
	if len(c.SourcesRecreated) > 0 && !def.AcceptRecreated {
		name := c.SourcesRecreated[0]
		old, _ := r.source(name)
		return fmt.Errorf("%w: %s was created %s when flow %s began to read it, and is now one created %s",
			ErrSourceRecreated, name, old.Created.UTC().Format(time.RFC3339), r.Flow, def.Sources[name].Created.UTC().Format(time.RFC3339))
	}
	return nil
}

// sameWay refuses a source that was read as it is and is now to be read through a
// stream of the flow's own, or the other way round: the positions in the one say
// nothing in the other.
func (r Record) sameWay(def Definition) error {
	for _, name := range slices.Sorted(maps.Keys(def.Sources)) {
		origin := def.Sources[name].Origin
		if old, ok := r.Sources[origin]; ok && old.Origin == "" {
			return fmt.Errorf("%w: stream %s had limits retention when flow %s began to read it, and has not now: what was processed would be processed again from stream %s: give %s limits retention again, or give the flow another name to start afresh",
				ErrDefinition, origin, r.Flow, name, origin)
		}
		if own, ok := r.through(name); ok && origin == "" {
			return fmt.Errorf("%w: flow %s reads %s through the stream %s, which was deleted, and with it all that was not processed: give the flow another name to start afresh",
				ErrDefinition, r.Flow, name, own)
		}
	}
	return nil
}

// untaken refuses steps that would find the state of another step under their id,
// in some tasks and not in others. No acceptance helps there.
func (r Record) untaken(c Change, def Definition) error {
	if len(c.Taken) == 0 {
		return nil
	}
	id := c.Taken[0]
	s, _ := stepOf(def.Steps, id)
	if old, ok := stepOf(r.Steps, id); ok && old.Kind == s.Kind {
		return fmt.Errorf("%w: step %q of flow %s was in stage %d and is now in stage %d, whose tasks do not have its state (definition %s, now %s): give the new step another id",
			ErrDefinition, id, r.Flow, old.Stage, s.Stage, short(r.Hash), short(def.Hash))
	} else if ok {
		return fmt.Errorf("%w: step %q of flow %s was %s and is now %s (definition %s, now %s): give the new step another id",
			ErrDefinition, id, r.Flow, old.Kind, s.Kind, short(r.Hash), short(def.Hash))
	}
	return fmt.Errorf("%w: the id %q of a new step (%s) of flow %s was that of a step whose state was left over when it went, and may still be stored: give the new step another id",
		ErrDefinition, id, s.Kind, r.Flow)
}

func stepList(steps []StepRecord) string {
	texts := make([]string, len(steps))
	for i, s := range steps {
		texts[i] = fmt.Sprintf("step %q (%s)", s.ID, s.Kind)
	}
	return strings.Join(texts, ", ")
}

// redefine is the record under another definition, or an ErrDefinition or
// ErrSourceRecreated that says what to do.
func (r Record) redefine(def Definition) (Record, error) {
	if err := r.Fits(def); err != nil {
		return r, err
	}
	if r.State == StateDraining && def.Hash != r.Hash {
		return r, fmt.Errorf("%w: flow %s is draining with definition %s, and this process has %s: let the drain end with the former definition and start the new one with --resume, or resume the flow to cancel the drain",
			ErrDefinition, r.Flow, short(r.Hash), short(def.Hash))
	}
	if r.State == StateDraining && !sameKeys(r.Sources, def.Sources) {
		return r, fmt.Errorf("%w: the sources of flow %s differ while a drain is under way: let it end with the former definition, or resume the flow to cancel it", ErrDefinition, r.Flow)
	}
	if err := r.samePartitioning(def); err != nil {
		return r, err
	}
	if r.Exchanging(def) {
		return r, fmt.Errorf("%w: flow %s is %s and has %d stages: records that went on to a later one under the definition %s may still be on their way: drain the flow with that definition (natsflow drain %s), then start this one, %s, with --resume",
			ErrDefinition, r.Flow, r.State, r.Stages, short(r.Hash), r.Flow, short(def.Hash))
	}
	next, change := r.clone(), r.Compare(def)
	if gone := change.LeftOver; len(gone) > 0 {
		// A worker of the former definition needs the state as long as it runs, and
		// makes the record say that the flow runs before it begins.
		if !r.State.Stopped() {
			return r, fmt.Errorf("%w: flow %s is %s: only a drained flow can go on without the state of %s: drain it with a definition that has it (the last one was %s; natsflow drain %s), then start this one, %s, with --resume --accept-changes",
				ErrDefinition, r.Flow, r.State, stepList(gone), short(r.Hash), r.Flow, short(def.Hash))
		}
		for _, s := range gone {
			next.LeftOver = append(next.LeftOver, s.ID)
		}
		slices.Sort(next.LeftOver)
	}
	next.forgetSources(change)
	next.Hash, next.Stages = def.Hash, def.stages()
	next.Steps, next.Sources = slices.Clone(def.Steps), maps.Clone(def.Sources)
	return next, nil
}

// Exchanging reports whether another definition has to wait for a drain, since there
// may be records on their way from one stage to the next, which are what the former
// definition has made of them.
func (r Record) Exchanging(def Definition) bool {
	return r.Stages > 1 && def.Hash != r.Hash && !r.State.Stopped()
}

// samePartitioning refuses another PartitionBy of a source unless the flow is
// drained: which task publishes the dead letter of a record without a key depends
// on it, and before a drain the tasks are at different positions.
func (r Record) samePartitioning(def Definition) error {
	if r.State.Stopped() {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(def.Sources)) {
		old, ok := r.Sources[name]
		if by := def.Sources[name].PartitionBy; ok && !slices.Equal(old.PartitionBy, by) {
			return fmt.Errorf("%w: source %s of flow %s is partitioned by the tokens %v of its subjects and by %v in this definition: drain the flow with the former definition %s, then start this one, %s, with --resume",
				ErrDefinition, name, r.Flow, old.PartitionBy, by, short(r.Hash), short(def.Hash))
		}
	}
	return nil
}

// forgetSources keeps what is known of sources that are not read any more: the
// tasks keep their positions in them.
func (r *Record) forgetSources(c Change) {
	for _, name := range c.SourcesGone {
		if r.FormerSources == nil {
			r.FormerSources = map[string]SourceRecord{}
		}
		r.FormerSources[name] = r.Sources[name]
	}
	for _, name := range slices.Concat(c.SourcesBack, c.SourcesRecreated) {
		delete(r.FormerSources, name)
	}
	if len(r.FormerSources) == 0 {
		r.FormerSources = nil
	}
}

// Reuses returns an ErrDefinition if the id of a step with state is among
// [Record.LeftOver]. [Control.Define] has refused such a definition; a worker must
// still look when it begins to run the flow, since another definition may have been
// accepted between the two.
func (r Record) Reuses(id string) error {
	if !slices.Contains(r.LeftOver, id) {
		return nil
	}
	return fmt.Errorf("%w: the state of step %q of flow %s was left over when another definition was accepted, now %s: start that one, or give the step another id",
		ErrDefinition, id, r.Flow, short(r.Hash))
}

// agrees returns an ErrDefinition when a member other than self runs another
// definition: two that work on the same tasks would not mean the same by their
// state.
func (d Definition) agrees(flow, self string, members []MemberInfo) error {
	for _, m := range members {
		if m.Name != self && m.Hash != d.Hash {
			return fmt.Errorf("%w: member %s of flow %s (host %s, process id %d) runs definition %s, and this process has %s: drain the flow, which ends that member, or stop it if the flow is drained already; then start the new definition with --resume; if that member has died, wait for %v until its lease has run out",
				ErrDefinition, m.Name, flow, m.Host, m.PID, short(m.Hash), short(d.Hash), m.TTL)
		}
	}
	return nil
}

// rebind is the record counting commands in another control stream. A stream of
// the same name that was created anew holds only commands from after the flow's
// creation: all count. In the stream of another prefix those that are there
// already were meant for others.
//
// A stream whose last sequence is before a command that was looked at has lost its
// end, as by a crash of the server's machine: what comes gets these sequences anew.
// looked is the record's last command as it was read before last was.
func (r Record) rebind(ref ControlRef, last, looked uint64, at time.Time) Record {
	if r.Control.equal(ref) && (last >= looked || r.LastCommand != looked) {
		return r
	}
	next := r.clone()
	if r.Control.equal(ref) {
		next.LastCommand = last
		next.setError(at, last, fmt.Sprintf("the control stream %s ends at sequence %d, and command %d was looked at: it has lost its end: repeat the commands that you gave since",
			ref.Stream, last, looked))
		return next
	}
	next.LastCommand = last
	if r.Control.Stream == ref.Stream {
		next.LastCommand = 0
	}
	next.Control = ref
	return next
}

func sameKeys[V any](a, b map[string]V) bool {
	if len(a) != len(b) {
		return false
	}
	for k := range a {
		if _, ok := b[k]; !ok {
			return false
		}
	}
	return true
}

func short(hash string) string {
	if hash == "" {
		return "unknown"
	}
	return hash[:min(12, len(hash))]
}
