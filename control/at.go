package control

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// parseAt decodes "now", "head", {"seq":{STREAM:N}} or {"time":RFC 3339}.
func parseAt(v jsontext.Value) (At, error) {
	switch v.Kind() {
	case '"':
		s, err := strictString("at", v)
		if err != nil {
			return At{}, err
		}
		words := []string{AtNow, AtHead}
		if !slices.Contains(words, s) {
			return At{}, fmt.Errorf(`at %q: must be "now", "head", {"seq":{STREAM:N}} or {"time":TIME}%s`, s, didYouMean(s, words))
		}
		return At{Kind: s}, nil
	case '{':
		return parseAtObject(v)
	}
	return At{}, fmt.Errorf(`at must be "now", "head", {"seq":{STREAM:N}} or {"time":TIME}, not %s`, kindName(v.Kind()))
}

func parseAtObject(v jsontext.Value) (At, error) {
	members, err := strictObject("at", v, AtSeq, AtTime)
	if err != nil {
		return At{}, err
	}
	if len(members) != 1 {
		return At{}, fmt.Errorf("at must have one member, seq or time; it has %d", len(members))
	}
	if v, ok := members[AtTime]; ok {
		s, err := strictString("at.time", v)
		if err != nil {
			return At{}, err
		}
		t, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			return At{}, fmt.Errorf("at.time %q: must be RFC 3339, for example 2026-01-02T03:04:05Z", s)
		}
		at := At{Kind: AtTime, Time: t.UTC()}
		return at, at.validate()
	}
	at := At{Kind: AtSeq}
	if at.Seq, err = parseSeqs(members[AtSeq]); err != nil {
		return At{}, err
	}
	return at, at.validate()
}

func parseSeqs(v jsontext.Value) (map[string]uint64, error) {
	if v.Kind() != '{' {
		return nil, fmt.Errorf("at.seq must be an object {STREAM:N}, not %s", kindName(v.Kind()))
	}
	var raw map[string]jsontext.Value
	if err := jsonv2.Unmarshal(v, &raw); err != nil {
		return nil, fmt.Errorf("at.seq: %w", plainJSONError(err))
	}
	seqs := make(map[string]uint64, len(raw))
	for _, stream := range slices.Sorted(maps.Keys(raw)) {
		var n uint64
		if raw[stream].Kind() != '0' || jsonv2.Unmarshal(raw[stream], &n) != nil {
			return nil, fmt.Errorf("at.seq of %q must be a whole number, not %s", stream, raw[stream])
		}
		seqs[stream] = n
	}
	return seqs, nil
}

func (a At) validate() error {
	switch a.Kind {
	case AtNow, AtHead:
		if len(a.Seq) > 0 || !a.Time.IsZero() {
			return fmt.Errorf("at %s has no sequences and no time", a.Kind)
		}
	case AtSeq:
		if len(a.Seq) == 0 {
			return fmt.Errorf("at.seq names no stream")
		}
		if _, empty := a.Seq[""]; empty {
			return fmt.Errorf("at.seq has an empty stream name")
		}
	case AtTime:
		if y := a.Time.UTC().Year(); a.Time.IsZero() || y < 1970 || y > 9999 {
			return fmt.Errorf("at.time must be between the years 1970 and 9999")
		}
	default:
		return fmt.Errorf("unknown at %q", a.Kind)
	}
	return nil
}

// equal reports whether a and b ask for the same cut.
func (a At) equal(b At) bool {
	return a.Kind == b.Kind && maps.Equal(a.Seq, b.Seq) && a.Time.Equal(b.Time)
}

// IsZero reports whether a is not set.
func (a At) IsZero() bool { return a.Kind == "" }

// String is a in words for people: "now", "head", "ORDERS:123", a time.
func (a At) String() string {
	switch a.Kind {
	case AtSeq:
		return FormatCut(a.Seq)
	case AtTime:
		return a.Time.UTC().Format(time.RFC3339Nano)
	}
	return a.Kind
}

// MarshalJSON writes a as the body of a command has it.
func (a At) MarshalJSON() ([]byte, error) {
	switch a.Kind {
	case AtSeq:
		return json.Marshal(map[string]map[string]uint64{AtSeq: a.Seq})
	case AtTime:
		return json.Marshal(map[string]string{AtTime: a.Time.UTC().Format(time.RFC3339Nano)})
	}
	return json.Marshal(a.Kind)
}

// UnmarshalJSON reads what MarshalJSON writes, strictly.
func (a *At) UnmarshalJSON(b []byte) (err error) {
	*a, err = parseAt(jsontext.Value(b))
	return err
}

// FormatCut is a cut for people: "A:1 B:2", by name of the source.
func FormatCut(cut map[string]uint64) string {
	var sb strings.Builder
	for i, source := range slices.Sorted(maps.Keys(cut)) {
		if i > 0 {
			sb.WriteByte(' ')
		}
		fmt.Fprintf(&sb, "%s:%d", source, cut[source])
	}
	return sb.String()
}
