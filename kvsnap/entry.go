package kvsnap

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// The kinds of entries.
const (
	KindClaim   = "claim"
	KindCommit  = "commit"
	KindBase    = "base"
	KindRelease = "release"
)

// The names of sections, in the order in which their bodies follow the header.
const (
	sectionDelta  = "delta"
	sectionOutbox = "outbox"
	sectionBase   = "base"
)

// header is the first line of an entry, as JSON.
type header struct {
	Kind string `json:"kind"`
	Flow string `json:"flow"`
	Task string `json:"task"`
	// N is the entry's number, which is also the last part of its key.
	N uint64 `json:"n"`
	// Generation of the claim that the entry was written under.
	Generation uint64    `json:"generation"`
	Owner      string    `json:"owner"`
	Time       time.Time `json:"time"`
	// Nonce of a claim: two processes with the same name that claim at the
	// same moment must be able to tell whose claim was stored.
	Nonce string `json:"nonce,omitempty"`
	// Fresh, of claims and releases: nothing was committed yet.
	Fresh bool `json:"fresh,omitempty"`
	Head  Head `json:"head"`
	// Outputs of a commit.
	Outputs int `json:"outputs,omitempty"`
	// Targets of a commit.
	Targets []string `json:"targets,omitempty"`
	// From of a base: deltas after this entry are to be loaded on top of it.
	From uint64 `json:"from,omitempty"`
	// Floor of a base: entries up to this one are not needed any more.
	Floor    uint64    `json:"floor,omitempty"`
	Sections []section `json:"sections,omitempty"`
}

// section describes a body: in the entry itself, or in a set of chunks.
type section struct {
	Name string `json:"name"`
	// Raw and Stored are the sizes in bytes before and after compression. For
	// chunks they are sums, and Stored leaves the chunks' headers out.
	Raw    int64 `json:"raw"`
	Stored int64 `json:"stored"`
	// Encoding of a body in the entry. Chunks name their own.
	Encoding string `json:"enc,omitempty"`
	// Set is the name of the chunk set, empty for a body in the entry.
	Set    string `json:"set,omitempty"`
	Chunks int    `json:"chunks,omitempty"`
	// Sums is the checksum of the checksums of the chunks, so that a chunk
	// which is whole but not the one that was written shows, too.
	Sums string `json:"sums,omitempty"`
}

// entry is a decoded entry. bodies has one element per section, nil for those
// in chunks; they are parts of the value it was decoded from.
type entry struct {
	header
	task   TaskID
	seq    uint64 // in the bucket's stream
	bodies [][]byte
}

// section returns the section of that name, and where it is.
func (e *entry) section(name string) (section, []byte, bool) {
	for i, s := range e.Sections {
		if s.Name == name {
			return s, e.bodies[i], true
		}
	}
	return section{}, nil, false
}

// forget lets go of the bytes of a section that is in the entry itself.
func (e *entry) forget(name string) {
	for i, s := range e.Sections {
		if s.Name == name {
			e.bodies[i] = nil
		}
	}
}

// encodeEntry seals a header and the bodies of its inline sections.
func encodeEntry(h *header, bodies ...[]byte) ([]byte, error) {
	line, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode entry %d: %w", h.N, err)
	}
	value, _ := seal(line, bodies...)
	return value, nil
}

// decodeEntry decodes and checks the value of a key. flow is not checked if
// empty. Every error is a *CorruptError.
func decodeEntry(flow, key string, value []byte) (*entry, error) {
	task, n, ok := parseEntryKey(key)
	if !ok {
		return nil, corrupt(key, "not the key of a log entry")
	}
	line, body, _, err := unseal(value)
	if err != nil {
		return nil, corrupt(key, "%v", err)
	}
	e := &entry{task: task}
	if err := unmarshalStrict(line, &e.header); err != nil {
		return nil, corrupt(key, "%v", err)
	}
	switch {
	case flow != "" && e.Flow != flow:
		return nil, corrupt(key, "belongs to flow %q instead of %q", e.Flow, flow)
	case e.Task != task.String():
		return nil, corrupt(key, "belongs to task %q", e.Task)
	case e.N != n:
		return nil, corrupt(key, "is entry %d", e.N)
	}
	if err := e.validate(); err != nil {
		return nil, corrupt(key, "%v", err)
	}
	if err := e.cut(body); err != nil {
		return nil, corrupt(key, "%v", err)
	}
	return e, nil
}

// validate checks what a header of its kind may say.
func (h *header) validate() error {
	var names []string
	switch h.Kind {
	case KindClaim, KindRelease:
	case KindCommit:
		names = []string{sectionDelta, sectionOutbox}
	case KindBase:
		names = []string{sectionBase}
		if len(h.Sections) != 1 || h.From >= h.N || h.Floor > h.From {
			return fmt.Errorf("base of entries up to %d with floor %d and %d sections", h.From, h.Floor, len(h.Sections))
		}
	default:
		return fmt.Errorf("unknown kind %q", h.Kind)
	}
	if h.N == 0 || h.Generation == 0 || h.Outputs < 0 || h.Head.Published > h.N {
		return fmt.Errorf("n %d, generation %d, outputs %d, published %d: out of bounds", h.N, h.Generation, h.Outputs, h.Head.Published)
	}
	for _, s := range h.Sections {
		i := slices.Index(names, s.Name)
		if i < 0 {
			return fmt.Errorf("section %q is unknown, repeated or out of order in a %s", s.Name, h.Kind)
		}
		names = names[i+1:]
		if err := s.validate(); err != nil {
			return fmt.Errorf("section %s: %w", s.Name, err)
		}
	}
	return nil
}

func (s section) validate() error {
	if s.Raw < 0 || s.Stored < 0 || s.Chunks < 0 {
		return errors.New("negative size")
	}
	if s.Set == "" {
		empty := s.Name == sectionBase && s.Raw == 0 && s.Stored == 0 // a base of nothing
		if s.Chunks != 0 || s.Sums != "" || s.Raw > maxPiece || (s.Name == sectionBase && !empty) {
			return errors.New("neither a body nor chunks")
		}
		return nil
	}
	most := int64(s.Chunks) * maxPiece
	if s.Chunks < 1 || int64(s.Chunks) > 1<<32 || s.Raw > most || s.Stored > most || s.Encoding != "" || len(s.Sums) != sumDigit {
		return errors.New("chunk set is out of bounds")
	}
	return nil
}

// cut shares the bytes behind the header among the sections.
func (e *entry) cut(body []byte) error {
	e.bodies = make([][]byte, len(e.Sections))
	for i, s := range e.Sections {
		if s.Set != "" {
			continue
		}
		if s.Stored > int64(len(body)) {
			return fmt.Errorf("section %s has %d bytes, only %d are there", s.Name, s.Stored, len(body))
		}
		e.bodies[i], body = body[:s.Stored:s.Stored], body[s.Stored:]
	}
	if len(body) > 0 {
		return fmt.Errorf("%d bytes behind the last section", len(body))
	}
	return nil
}
