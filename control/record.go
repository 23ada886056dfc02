package control

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// recordVersion is the version of the flow record that this code reads and
// writes. A change that an older version must not overwrite raises it.
const recordVersion = 1

const (
	// maxHistory is how many commands the record keeps.
	maxHistory = 16
	// maxText bounds a text of the record, in bytes, and maxNoted what the
	// history repeats of a command: the length of its kind and the number of
	// sources.
	maxText, maxNoted = 1000, 32
)

// State is where a flow is between running and stopped.
type State string

// The states of a flow; see the package documentation for the moves.
const (
	StateRunning  State = "running"
	StateDraining State = "draining"
	StateDrained  State = "drained"
	StateFinished State = "finished"
)

// Stopped reports whether the flow waits for a resume.
func (s State) Stopped() bool { return s == StateDrained || s == StateFinished }

// Record is the flow record: the desired and the actual state of a flow. Its
// methods are pure; a method never changes the receiver's maps or slices.
type Record struct {
	Version int    `json:"version"`
	Flow    string `json:"flow"`
	State   State  `json:"state"`
	// Epoch rises by one with each drain that is begun; 0 before the first.
	Epoch uint64 `json:"epoch"`
	// Drain is the drain of this epoch, from its command until the resume; nil
	// while running.
	Drain *Drain `json:"drain,omitempty"`
	// LastCommand is the sequence of the last command that was looked at.
	LastCommand uint64 `json:"last_command"`
	// LastError is what was refused or went wrong last, LastErrorTime when, and
	// LastErrorCommand the command it is about, 0 if it is about none. They stay
	// until the next error.
	LastError        string    `json:"last_error,omitempty"`
	LastErrorTime    time.Time `json:"last_error_time,omitzero"`
	LastErrorCommand uint64    `json:"last_error_command,omitempty"`
	// Partitions is fixed when the flow is created.
	Partitions int `json:"partitions"`
	// Stages that the definition has, if there are several.
	Stages int `json:"stages,omitempty"`
	// Hash identifies the definition that was seen last.
	Hash string `json:"hash"`
	// Steps are the stateful steps, whose state is stored under their ids.
	Steps []StepRecord `json:"steps,omitempty"`
	// LeftOver are the ids of former steps, in order, whose state was given up.
	// The tasks leave it out when they load; it stays stored until each has its
	// next base. No step gets such an id again, or it would find that state in
	// some tasks and not in others.
	LeftOver []string `json:"left_over,omitempty"`
	// Sources are the source streams by name.
	Sources map[string]SourceRecord `json:"sources,omitempty"`
	// FormerSources were read by a former definition. The tasks keep their
	// positions in them, which mean nothing in another stream of the same name.
	FormerSources map[string]SourceRecord `json:"former_sources,omitempty"`
	// Report is of the last drain that ended.
	Report *Report `json:"report,omitempty"`
	// History has the last 16 commands, the oldest first.
	History []HistoryEntry `json:"history,omitempty"`
	// Control is the stream that LastCommand counts in.
	Control ControlRef `json:"control"`
	Created time.Time  `json:"created"`
	Updated time.Time  `json:"updated"`

	// Revision is the sequence of this record in its bucket. It rises with every
	// change.
	Revision uint64 `json:"-"`
}

// Drain is a drain that was begun.
type Drain struct {
	Command Command `json:"command"`
	// Cut is the last sequence of each source that belongs to the epoch; nil
	// until it is fixed, and never changed after that.
	Cut map[string]uint64 `json:"cut,omitempty"`
	// Since is the time of the command.
	Since time.Time `json:"since"`
}

// StepRecord is a stateful step of the definition.
type StepRecord struct {
	ID      string `json:"id"`
	Kind    string `json:"kind"`
	Version int    `json:"version,omitempty"`
	// Stage whose tasks have the state.
	Stage int `json:"stage,omitempty"`
}

// same reports whether the state of one step can be that of the other.
func (s StepRecord) same(other StepRecord) bool {
	return s.ID == other.ID && s.Kind == other.Kind && s.Stage == other.Stage
}

// SourceRecord is a source stream as it was when the flow began to read it.
type SourceRecord struct {
	// Created tells a stream from another one of the same name.
	Created  time.Time `json:"created"`
	Subjects []string  `json:"subjects,omitempty"`
	// PartitionBy are the tokens of the subject by which the server sorts it.
	PartitionBy []int `json:"partition_by,omitempty"`
	// Origin is the stream that the flow was told to read, if this one is a stream of
	// the flow's own that takes over what is there.
	Origin string `json:"origin,omitempty"`
}

// ControlRef names the control stream of a flow.
type ControlRef struct {
	Prefix  string    `json:"prefix"`
	Stream  string    `json:"stream"`
	Created time.Time `json:"created"`
}

func (r ControlRef) equal(o ControlRef) bool {
	return r.Prefix == o.Prefix && r.Stream == o.Stream && r.Created.Equal(o.Created)
}

// Report says what a drain did.
type Report struct {
	Epoch  uint64            `json:"epoch"`
	Mode   Mode              `json:"mode"`
	Reason string            `json:"reason,omitempty"`
	Cut    map[string]uint64 `json:"cut"`
	// Records is how many messages were read, by source, in the session that ended
	// the drain.
	Records     map[string]uint64 `json:"records,omitempty"`
	Results     uint64            `json:"results"`
	DeadLetters uint64            `json:"dead_letters"`
	Late        uint64            `json:"late,omitempty"`
	// AtEnd counts those of the results that the end of the drain made: final ones
	// of a finish, partial ones of a suspend. OpenWindows stay open.
	AtEnd         uint64 `json:"at_end,omitempty"`
	OpenWindows   uint64 `json:"open_windows,omitempty"`
	Tasks         int    `json:"tasks"`
	SnapshotBytes uint64 `json:"snapshot_bytes"`
	// Duration is from the command to the end, in nanoseconds in JSON.
	Duration time.Duration `json:"duration_ns"`
	// Worker recorded the report. Workers is how many took part, and Last the one
	// of the last task that had its final entry.
	Worker  string    `json:"worker"`
	Workers int       `json:"workers,omitempty"`
	Last    string    `json:"last,omitempty"`
	Time    time.Time `json:"time"`
}

// HistoryEntry is a command and what came of it.
type HistoryEntry struct {
	Seq     uint64    `json:"seq"`
	Time    time.Time `json:"time"`
	Kind    Kind      `json:"kind,omitempty"`
	Mode    Mode      `json:"mode,omitempty"`
	At      At        `json:"at,omitzero"`
	Reason  string    `json:"reason,omitempty"`
	Epoch   uint64    `json:"epoch"`
	Outcome string    `json:"outcome"`
}

// clone copies r deeply enough that next states share nothing that changes.
func (r Record) clone() Record {
	if r.Drain != nil {
		d := *r.Drain
		d.Cut = maps.Clone(d.Cut)
		r.Drain = &d
	}
	r.Steps = slices.Clone(r.Steps)
	r.LeftOver = slices.Clone(r.LeftOver)
	r.Sources = maps.Clone(r.Sources)
	r.FormerSources = maps.Clone(r.FormerSources)
	r.History = slices.Clone(r.History)
	return r
}

// note appends a history entry for cmd and drops the oldest.
func (r *Record) note(cmd Command, outcome string) {
	if len(cmd.At.Seq) > maxNoted {
		cmd.At = At{} // the control stream still has it
	}
	r.History = append(r.History, HistoryEntry{
		Seq: cmd.Seq, Time: cmd.Time, Kind: Kind(bounded(string(cmd.Kind), maxNoted)), Mode: cmd.Mode, At: cmd.At,
		Reason: cmd.Reason, Epoch: r.Epoch, Outcome: bounded(outcome, maxText),
	})
	if n := len(r.History) - maxHistory; n > 0 {
		r.History = slices.Delete(r.History, 0, n)
	}
}

// renote replaces the outcome of the command with sequence seq, if it is still
// in the history.
func (r *Record) renote(seq uint64, outcome string) {
	for i := range r.History {
		if r.History[i].Seq == seq {
			r.History[i].Outcome = outcome
		}
	}
}

func (r *Record) setError(at time.Time, command uint64, text string) {
	r.LastError, r.LastErrorTime, r.LastErrorCommand = bounded(text, maxText), at, command
}

// ErrRecord is in the chain when a stored flow record, member or assignment
// cannot be read. It is never overwritten then.
var ErrRecord = errors.New("unreadable control record")

// encodeRecord is the stored form of r.
func encodeRecord(r Record) ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, fmt.Errorf("encode flow record: %w", err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode flow record: %w", err)
	}
	return b, nil
}

// decodeRecord reads what encodeRecord wrote. A newer version and an unknown
// member are refused, since writing the record back would lose what they mean.
func decodeRecord(b []byte) (Record, error) {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	if head.Version != recordVersion {
		return Record{}, fmt.Errorf("%w: it has version %d, this natsflow reads version %d: use the natsflow that wrote it or a newer one", ErrRecord, head.Version, recordVersion)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var r Record
	if err := dec.Decode(&r); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	if dec.More() {
		return Record{}, fmt.Errorf("%w: data after the record", ErrRecord)
	}
	if err := r.check(); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	return r, nil
}

// check holds what is true of every record, before writing and after reading.
func (r Record) check() error {
	draining := r.State == StateDraining
	switch {
	case r.Version != recordVersion:
		return fmt.Errorf("version is %d, not %d", r.Version, recordVersion)
	case r.State != StateRunning && !draining && !r.State.Stopped():
		return fmt.Errorf("unknown state %q", r.State)
	case r.State == StateRunning && r.Drain != nil:
		return errors.New("running with a drain")
	case r.State != StateRunning && r.Drain == nil:
		return fmt.Errorf("%s without a drain", r.State)
	case r.State.Stopped() && (r.Drain.Cut == nil || r.Report == nil):
		return fmt.Errorf("%s without a cut or a report", r.State)
	case r.State != StateRunning && r.Epoch == 0:
		return fmt.Errorf("%s in epoch 0", r.State)
	case len(r.History) > maxHistory:
		return fmt.Errorf("%d entries of history, more than %d", len(r.History), maxHistory)
	case r.Partitions < 1:
		return fmt.Errorf("%d partitions", r.Partitions)
	}
	return ValidFlow(r.Flow)
}
