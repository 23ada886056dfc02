package kvsnap

import "maps"

// Head is what a task knows of its position besides its state. Every entry of
// the log repeats it, so that the last entry alone tells all but the state.
// An empty map reads back as nil.
type Head struct {
	// Offsets has, per source stream, the last sequence that is applied.
	Offsets map[string]uint64 `json:"offsets,omitempty"`
	// Watermarks per source, Unix nanoseconds: up to where the task has done what is
	// due. A source whose records bring their time has another name here, and its own
	// name stands for the time of the stream, if the flow goes by that, too.
	Watermarks map[string]int64 `json:"watermarks,omitempty"`
	// Clocks has, per source, the highest time of the records up to Offsets, Unix
	// nanoseconds: what whoever reads on from there has to begin with.
	Clocks map[string]int64 `json:"clocks,omitempty"`
	// Epoch of the flow in which the entry was written.
	Epoch uint64 `json:"epoch,omitempty"`
	// Final marks the last entry of a drain at Epoch.
	Final bool `json:"final,omitempty"`
	// Published: every entry up to this number has its outbox fully published.
	// It cannot be beyond the last entry, and it never goes back. Move it over
	// entries without an outbox as well: only what is at or before it is purged.
	Published uint64 `json:"published,omitempty"`
	// Sinks has, per sink stream, a sequence at or before which the results of
	// this entry and of later ones cannot be: where a search for them starts.
	Sinks map[string]uint64 `json:"sinks,omitempty"`
	// Records applied, since the task was created.
	Records uint64 `json:"records,omitempty"`
	// Results handed to sinks, since the task was created.
	Results uint64 `json:"results,omitempty"`
	// DeadLetters written, since the task was created.
	DeadLetters uint64 `json:"dead_letters,omitempty"`
	// Late records, since the task was created.
	Late uint64 `json:"late,omitempty"`
}

// clone copies the maps, so that the log's own head cannot be changed by the
// caller who goes on with his.
func (h Head) clone() Head {
	h.Offsets = maps.Clone(h.Offsets)
	h.Watermarks = maps.Clone(h.Watermarks)
	h.Clocks = maps.Clone(h.Clocks)
	h.Sinks = maps.Clone(h.Sinks)
	return h
}

// isZero tells a head that says nothing.
func (h Head) isZero() bool {
	return len(h.Offsets) == 0 && len(h.Watermarks) == 0 && len(h.Clocks) == 0 && h.Epoch == 0 && !h.Final && h.Published == 0 &&
		len(h.Sinks) == 0 && h.Records == 0 && h.Results == 0 && h.DeadLetters == 0 && h.Late == 0
}

// confirm returns h with what later says about publishing. Nothing else is
// taken from later: a base is written while commits go on, and the head that its
// writer holds may be older than the last commit, or newer. Either would make
// positions and state disagree.
func (h Head) confirm(later Head) Head {
	h = h.clone()
	h.Published = max(h.Published, later.Published)
	for sink, seq := range later.Sinks {
		if h.Sinks == nil {
			h.Sinks = make(map[string]uint64, len(later.Sinks))
		}
		h.Sinks[sink] = max(h.Sinks[sink], seq)
	}
	return h
}

// Commit is one step forward of a task.
type Commit struct {
	// Head after the step.
	Head
	// Delta is the changed part of the state, in absolute values: loading it
	// twice is the same as loading it once. Any size; may be empty.
	Delta []byte
	// Outbox has the results to publish once the commit is acknowledged. Any
	// size; may be empty.
	Outbox []byte
	// Outputs is the number of results in Outbox, for people who look at the
	// entry.
	Outputs int
	// Targets are the names that the numbers in Outbox stand for, for whoever
	// publishes it in the end: it may number them otherwise.
	Targets []string
}

// Pending is an outbox that is not confirmed as published.
type Pending struct {
	// N is the number of the commit.
	N uint64
	// Outbox and Targets as they were committed.
	Outbox  []byte
	Targets []string
	// Sinks of the commit's own head: none of its results is at or before
	// these sequences.
	Sinks map[string]uint64
}

// Recovered is what [Store.Claim] found.
type Recovered struct {
	// Fresh: nothing was ever committed by this task.
	Fresh bool
	// Generation of this claim, from 1.
	Generation uint64
	// Head of the last entry before the claim.
	Head Head
	// Unpublished has the outboxes of the entries after Head.Published,
	// ascending. Entries without one are left out.
	Unpublished []Pending
	// StateBytes is the raw size of the bodies that were given to load.
	StateBytes int64
	// Entries is the number of entries that the state was read from.
	Entries int
}
