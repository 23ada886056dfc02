package control

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestRecord_scripts runs the scripts of testdata/record. A script is a list of
// steps: a line with what happens, a body if it is a message, "----", and what
// comes of it. "go test -update" rewrites the latter.
//
//	new FLOW PARTITIONS SOURCE...     a new record
//	msg SEQ SUBJECT                   a message of the control stream, with body
//	cut EPOCH [SOURCE:N ...] [read SOURCE:N ...]
//	drained EPOCH                     the end of a drain
//	define PARTITIONS HASH [stages :N] [step ID:KIND[@STAGE] ...] [source NAME:AGE ...]
//	history                           shows the history
func TestRecord_scripts(t *testing.T) {
	files, err := filepath.Glob("testdata/record/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
				return
			}
			if d := cmp.Diff(string(want), got); d != "" {
				t.Error(d)
			}
		})
	}
}

// scriptEpoch is second 0 of all scripts.
func scriptTime(seconds uint64) time.Time {
	return time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC).Add(time.Duration(seconds) * time.Second)
}

func runScript(t *testing.T, script string) string {
	var out strings.Builder
	var rec Record
	for _, step := range strings.Split(strings.TrimSpace(script), "\n\n") {
		if strings.HasPrefix(step, "#") {
			fmt.Fprintf(&out, "%s\n\n", step)
			continue
		}
		input, _, _ := strings.Cut(step, "\n----")
		line, body, _ := strings.Cut(input, "\n")
		s := &scriptStep{t: t, rec: rec, args: strings.Fields(line), body: body}
		s.run()
		if !sameJSON(t, rec, s.before) {
			t.Errorf("%s: changed the record it was called on", line)
		}
		rec = s.rec
		fmt.Fprintf(&out, "%s\n----\n%s\n\n", input, strings.TrimSpace(s.out.String()))
	}
	return strings.TrimSpace(out.String()) + "\n"
}

// sameJSON also checks that a record survives being stored.
func sameJSON(t *testing.T, rec Record, encoded []byte) bool {
	if encoded == nil {
		return true
	}
	now, err := encodeRecord(rec)
	if err != nil {
		t.Fatal(err)
	}
	back, err := decodeRecord(now)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(rec, back); d != "" {
		t.Errorf("stored and read again: %s", d)
	}
	return bytes.Equal(now, encoded)
}

type scriptStep struct {
	t      *testing.T
	rec    Record
	before []byte
	args   []string
	body   string
	out    strings.Builder
}

func (s *scriptStep) run() {
	if s.rec.Version != 0 {
		var err error
		if s.before, err = encodeRecord(s.rec); err != nil {
			s.t.Fatal(err)
		}
	}
	switch s.args[0] {
	case "new":
		def := Definition{Partitions: int(s.number(2)), Hash: "h0", Sources: map[string]SourceRecord{}}
		for _, name := range s.args[3:] {
			def.Sources[name] = SourceRecord{Created: scriptTime(0)}
		}
		s.rec = newRecord(s.args[1], def, ControlRef{Prefix: "control", Stream: StreamName, Created: scriptTime(0)}, 0, scriptTime(0))
	case "msg":
		s.message()
	case "cut":
		cut, read := s.cuts(s.args[2:])
		next, err := s.rec.FixCut(s.number(1), cut, read)
		s.rec = next
		s.err(err)
	case "drained":
		next, err := s.rec.Drained(s.number(1), Report{Tasks: 16, Worker: "w", Time: scriptTime(1000)})
		s.rec = next
		s.err(err)
	case "define":
		next, err := s.rec.redefine(s.definition())
		s.rec = next
		s.err(err)
		var steps []string
		for _, st := range next.Steps {
			text := fmt.Sprintf("{%s %s %d}", st.ID, st.Kind, st.Version)
			if st.Stage > 0 {
				text = fmt.Sprintf("{%s %s %d, stage %d}", st.ID, st.Kind, st.Version, st.Stage)
			}
			steps = append(steps, text)
		}
		fmt.Fprintf(&s.out, "definition %s, steps %v\n", next.Hash, steps)
		if next.Stages > 0 {
			fmt.Fprintf(&s.out, "%d stages\n", next.Stages)
		}
	case "history":
		for _, h := range s.rec.History {
			fmt.Fprintf(&s.out, "%d %s: %s\n", h.Seq, h.Kind, h.Outcome)
		}
		return
	default:
		s.t.Fatalf("unknown step %q", s.args)
	}
	s.show()
}

func (s *scriptStep) message() {
	cmd, err := ParseCommand("control", s.args[2], []byte(s.body))
	cmd.Seq, cmd.Time = s.number(1), scriptTime(s.number(1))
	var o Outcome
	if err != nil {
		s.rec, o = s.rec.Refuse(cmd, err)
	} else {
		s.rec, o = s.rec.Apply(cmd)
	}
	fmt.Fprintf(&s.out, "%s\n", strings.TrimSpace(string(o.Kind)+" "+o.Text))
}

func (s *scriptStep) definition() Definition {
	def := Definition{Partitions: int(s.number(1)), Hash: s.args[2], Sources: map[string]SourceRecord{}}
	kind := ""
	for _, arg := range s.args[3:] {
		name, value, ok := strings.Cut(arg, ":")
		switch {
		case !ok:
			kind = arg
		case kind == "step":
			kind, at, _ := strings.Cut(value, "@")
			stage, _ := strconv.Atoi(at) // 0 if there is none
			def.Steps = append(def.Steps, StepRecord{ID: name, Kind: kind, Stage: stage})
		case kind == "stages":
			n, err := strconv.Atoi(value)
			if err != nil {
				s.t.Fatal(err)
			}
			def.Stages = n
		default:
			age, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				s.t.Fatal(err)
			}
			def.Sources[name] = SourceRecord{Created: scriptTime(age)}
		}
	}
	return def
}

func (s *scriptStep) cuts(args []string) (cut, read map[string]uint64) {
	cut, read = map[string]uint64{}, map[string]uint64{}
	into := cut
	for _, arg := range args {
		source, value, ok := strings.Cut(arg, ":")
		if !ok {
			into = read
			continue
		}
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		into[source] = n
	}
	return cut, read
}

func (s *scriptStep) number(i int) uint64 {
	n, err := strconv.ParseUint(s.args[i], 10, 64)
	if err != nil {
		s.t.Fatalf("%q: %v", s.args, err)
	}
	return n
}

func (s *scriptStep) err(err error) {
	if err != nil {
		fmt.Fprintf(&s.out, "error: %v\n", err)
	}
}

func (s *scriptStep) show() {
	r := s.rec
	fmt.Fprintf(&s.out, "%s, epoch %d, last command %d", r.State, r.Epoch, r.LastCommand)
	if d := r.Drain; d != nil {
		fmt.Fprintf(&s.out, ", drain by %d (%s at %s)", d.Command.Seq, d.Command.Mode, d.Command.At)
		if d.Cut != nil {
			fmt.Fprintf(&s.out, " cut %s", FormatCut(d.Cut))
		}
	}
	if r.LastError != "" {
		fmt.Fprintf(&s.out, "\nlast error: %s", r.LastError)
	}
	if p := r.Report; p != nil {
		fmt.Fprintf(&s.out, "\nreport: epoch %d %s %q at %s, %v", p.Epoch, p.Mode, p.Reason, FormatCut(p.Cut), p.Duration)
	}
}
