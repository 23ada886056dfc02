package control

import (
	"errors"
	"fmt"
	"maps"
	"slices"
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
	// Hash identifies the definition: equal definitions have equal hashes.
	Hash string
	// Steps are the stateful steps only.
	Steps   []StepRecord
	Sources map[string]SourceRecord
	// AcceptRecreated takes source streams that were created anew, with their
	// new times of creation.
	AcceptRecreated bool
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
		LastCommand: last, Partitions: def.Partitions, Hash: def.Hash,
		Steps: slices.Clone(def.Steps), Sources: maps.Clone(def.Sources),
		Control: ref, Created: now, Updated: now,
	}
}

// redefine is the record under another definition, or an ErrDefinition or
// ErrSourceRecreated that says what to do.
func (r Record) redefine(def Definition) (Record, error) {
	if def.Partitions != r.Partitions {
		return r, fmt.Errorf("%w: flow %s was created with %d partitions and is now defined with %d: keep %d, or give the flow another name to start it afresh",
			ErrDefinition, r.Flow, r.Partitions, def.Partitions, r.Partitions)
	}
	for _, old := range r.Steps {
		i := slices.IndexFunc(def.Steps, func(s StepRecord) bool { return s.ID == old.ID })
		switch {
		case i < 0:
			return r, fmt.Errorf("%w: stateful step %q (%s) of flow %s is gone (definition %s, now %s) and its state would be lost: put it back, keep its id if it was renamed, or give the flow another name",
				ErrDefinition, old.ID, old.Kind, r.Flow, short(r.Hash), short(def.Hash))
		case def.Steps[i].Kind != old.Kind:
			return r, fmt.Errorf("%w: step %q of flow %s was %s and is now %s (definition %s, now %s): give the new step another id and keep the old one, or give the flow another name",
				ErrDefinition, old.ID, r.Flow, old.Kind, def.Steps[i].Kind, short(r.Hash), short(def.Hash))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(def.Sources)) {
		old, ok := r.Sources[name]
		if ok && !old.Created.Equal(def.Sources[name].Created) && !def.AcceptRecreated {
			return r, fmt.Errorf("%w: %s was created %s when flow %s began to read it, and is now one created %s",
				ErrSourceRecreated, name, old.Created.UTC().Format(time.RFC3339), r.Flow, def.Sources[name].Created.UTC().Format(time.RFC3339))
		}
	}
	if r.State == StateDraining && !sameKeys(r.Sources, def.Sources) {
		return r, fmt.Errorf("%w: the sources of flow %s differ while a drain is under way: let it end with the former definition, or resume the flow to cancel it", ErrDefinition, r.Flow)
	}
	next := r.clone()
	next.Hash = def.Hash
	next.Steps, next.Sources = slices.Clone(def.Steps), maps.Clone(def.Sources)
	return next, nil
}

// rebind is the record counting commands in another control stream. A stream of
// the same name that was created anew holds only commands from after the flow's
// creation: all count. In the stream of another prefix those that are there
// already were meant for others.
func (r Record) rebind(ref ControlRef, last uint64) Record {
	if r.Control.equal(ref) {
		return r
	}
	next := r.clone()
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
