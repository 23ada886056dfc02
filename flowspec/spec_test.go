package flowspec

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

func TestLoad(t *testing.T) {
	for _, path := range []string{"../examples/flights", "../examples/flights/flow.yaml"} {
		s, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		want := &Spec{
			File: "../examples/flights/flow.yaml", Name: "flights", Partitions: 16,
			Sources:        []Source{{Stream: "FLIGHTS", Subjects: []string{"flights.>"}, Format: JSON}},
			CommitInterval: 100 * time.Millisecond,
			Dev:            Dev{Feed: map[string]Feed{"FLIGHTS": {File: "../examples/flights/flights.ndjson.gz", Subject: "flights.{origin}"}}},
		}
		unexported := cmp.FilterPath(func(p cmp.Path) bool {
			name := p.Last().String()
			return name == ".lists" || name == ".template"
		}, cmp.Ignore())
		if diff := cmp.Diff(want, s, unexported); diff != "" {
			t.Error(diff)
		}
		feed := s.Dev.Feed["FLIGHTS"]
		subject, err := feed.AppendSubject(nil, []byte(`{"origin":"A.B"}`))
		if string(subject) != "flights.A=2EB" || err != nil || feed.Wildcard() != "flights.*" {
			t.Errorf("%s, %v, %s", subject, err, feed.Wildcard())
		}
		for _, line := range []string{`{"x":1}`, `{"origin":`} {
			if _, err := feed.AppendSubject(nil, []byte(line)); err == nil {
				t.Errorf("%s: no error", line)
			}
		}
	}
}

func TestLoad_Errors(t *testing.T) {
	for _, path := range []string{"testdata/operators", "testdata/missing.yaml"} {
		if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, FileName)
	if err := os.WriteFile(file, []byte("flow: F\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Load(dir)
	var mistake *Error
	if !errors.As(err, &mistake) || mistake.File != file || mistake.Line != 1 {
		t.Errorf("%v", err)
	}
}

func TestSpec_Settings(t *testing.T) {
	s, err := Parse("dir/flow.yaml", []byte(`
delivery: at-least-once
on_error: stop
commit: {interval: 2s}
partitions: 3
steps:
  - to: {kv: B, key: x}
source: {stream: IN, format: bytes}
flow: f-1
dev: {feed: {IN: {file: /abs/x.gz, subject: in}}}
`))
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	o := f.Options()
	if o.Partitions != 3 || o.OnError != flow.Stop || o.Delivery != flow.AtLeastOnce || o.CommitInterval != 2*time.Second {
		t.Errorf("%+v", o)
	}
	if s.Sources[0].Format != Bytes || s.Dev.Feed["IN"].File != "/abs/x.gz" {
		t.Errorf("%+v", s)
	}
}

// TestSpec_Hash checks what makes a flow another one.
func TestSpec_Hash(t *testing.T) {
	hash := func(src string) string {
		t.Helper()
		s, err := Parse("flow.yaml", []byte(src))
		if err != nil {
			t.Fatal(err)
		}
		f, err := s.Build()
		if err != nil {
			t.Fatal(err)
		}
		return f.Hash()
	}
	const base = "flow: f\nsource: {stream: IN}\nsteps:\n  - filter: a > 1\n  - to: {stream: OUT, subject: out}\n"
	for _, same := range []string{
		"# a comment\nsource:\n  stream: IN\nflow: f\nsteps:\n- filter:   'a>1'\n- to:\n    subject: out\n    stream: OUT\n",
		base + "dev: {feed: {IN: {file: x, subject: y}}}\ncommit: {interval: 5s}\n",
	} {
		if hash(same) != hash(base) {
			t.Errorf("another hash:\n%s", same)
		}
	}
	for _, change := range [][2]string{{"a > 1", "a > 2"}, {"IN", "IN2"}, {"subject: out", "subject: out2"}, {"flow: f", "flow: g"}} {
		if hash(strings.Replace(base, change[0], change[1], 1)) == hash(base) {
			t.Errorf("%v gives the same hash", change)
		}
	}
}

func TestSpec_Plan(t *testing.T) {
	for name, path := range map[string]string{
		"flights": "../examples/flights", "earthquakes": "../examples/earthquakes", "travel": "testdata/travel.yaml", "daily": "../examples/flights/daily.yaml", "stages": "testdata/stages.yaml", "redistribute": "testdata/redistribute.yaml",
		"tables": "testdata/tables.yaml", "joins": "testdata/joins.yaml",
	} {
		s, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		plan := s.Plan()
		data, err := json.MarshalIndent(plan, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		for file, got := range map[string]string{name + ".plan": plan.String(), name + ".plan.json": string(data) + "\n"} {
			file = filepath.Join("testdata", file)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", file, diff)
			}
		}
		checkPlan(t, s, plan)
	}
}

// checkPlan compares the plan with the flow that is built.
func checkPlan(t *testing.T, s *Spec, plan Plan) {
	t.Helper()
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	planned := map[string]PlanStep{}
	stages := map[string]int{}
	for _, stage := range plan.Stages {
		for _, step := range stage.Steps {
			planned[step.ID], stages[step.ID] = step, stage.Stage
		}
	}
	if len(plan.Stages) != f.Stages() {
		t.Errorf("%d stages are planned, the flow has %d", len(plan.Stages), f.Stages())
	}
	for _, step := range f.Steps() {
		p, ok := planned[step.ID]
		if step.Kind == "source" || step.Kind == "merge" || strings.HasSuffix(step.ID, ".stop-when") || strings.HasSuffix(step.ID, ".key") || strings.HasSuffix(step.ID, ".late") || strings.HasSuffix(step.ID, ".late-with") {
			continue
		}
		if !ok || p.Kind != step.Kind || (p.State != "") != step.Stateful || p.StateVersion != step.Version || stages[step.ID] != step.Stage {
			t.Errorf("step %+v is planned as %+v", step, p)
		}
	}
}

// TestExamples runs the examples on their data and compares with a plain count.
func TestExamples(t *testing.T) {
	for name, stream := range map[string]string{"flights": "FLIGHTS", "earthquakes": "EARTHQUAKES"} {
		s, err := Load("../examples/" + name)
		if err != nil {
			t.Fatal(err)
		}
		feed := s.Dev.Feed[stream]
		p := playerOf(t, s)
		lines := readLines(t, feed.File)
		check, fed := checkFlights, lines
		if name == "earthquakes" {
			// Everything twice: the second time is dropped.
			check, fed = checkEarthquakes, append(slices.Clip(lines), lines...)
		}
		for i, line := range fed {
			subject, err := feed.AppendSubject(nil, line)
			if err != nil {
				t.Fatal(err)
			}
			p.play(input{string(subject), start.Add(time.Duration(i) * time.Millisecond).UnixNano(), line})
		}
		p.seal()
		check(t, lines, p.out)
	}
}

func readLines(t *testing.T, file string) [][]byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var lines [][]byte
	for sc := bufio.NewScanner(z); sc.Scan(); {
		lines = append(lines, []byte(sc.Text()))
	}
	return lines
}

// lastResults returns the last result of each key.
func lastResults(t *testing.T, out []string) map[string]map[string]any {
	t.Helper()
	last := map[string]map[string]any{}
	for _, line := range out {
		words := strings.SplitN(line, " ", 3)
		switch words[0] {
		case "DEAD", "CONTROL":
			t.Fatal(line)
		case "REPORTS":
			continue
		}
		var result map[string]any
		if err := json.Unmarshal([]byte(words[2]), &result); err != nil {
			t.Fatal(err)
		}
		last[result["key"].(string)] = result
	}
	return last
}

func checkFlights(t *testing.T, lines [][]byte, out []string) {
	t.Helper()
	if len(lines) != 20000 || len(out) != 20000 {
		t.Errorf("%d lines, %d results", len(lines), len(out))
	}
	want := map[string]map[string]any{}
	total := map[string]float64{}
	for _, line := range lines {
		var r struct {
			Origin string
			Delay  float64
		}
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		w := want[r.Origin]
		if w == nil {
			w = map[string]any{"key": r.Origin, "flights": 0.0, "late": 0.0, "worst": r.Delay}
			want[r.Origin] = w
		}
		w["flights"] = w["flights"].(float64) + 1
		if r.Delay > 15 {
			w["late"] = w["late"].(float64) + 1
		}
		w["worst"] = max(w["worst"].(float64), r.Delay)
		total[r.Origin] += r.Delay
		w["avg_delay"] = total[r.Origin] / w["flights"].(float64)
	}
	if diff := cmp.Diff(want, lastResults(t, out)); diff != "" {
		t.Error(diff)
	}
}

func checkEarthquakes(t *testing.T, lines [][]byte, out []string) {
	t.Helper()
	count := map[string]float64{}
	seen := map[string]bool{}
	for _, line := range lines {
		var r struct{ ID, Net string }
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if !seen[r.ID] {
			count[r.Net]++
		}
		seen[r.ID] = true
	}
	got := map[string]float64{}
	for key, result := range lastResults(t, out) {
		got[key] = result["quakes"].(float64)
	}
	if diff := cmp.Diff(count, got); diff != "" {
		t.Error(diff)
	}
}

var fence = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")

// TestDocs reads every piece of YAML in the documents. A piece that is no whole
// flow is one or several steps, or a few fields of a flow.
func TestDocs(t *testing.T) {
	for _, file := range []string{"../docs/YAML.md", "../README.md", "../examples/flights/README.md", "../examples/earthquakes/README.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		pieces := fence.FindAllStringSubmatch(string(text), -1)
		if len(pieces) < 10 && strings.HasSuffix(file, "YAML.md") {
			t.Errorf("%s: %d pieces of YAML", file, len(pieces))
		}
		for _, piece := range pieces {
			s, err := Parse(file, []byte(wholeFlow(piece[1])))
			if err != nil {
				t.Errorf("%s:\n%s\n%v", file, piece[1], err)
				continue
			}
			if _, err := s.Build(); err != nil {
				t.Errorf("%s:\n%s\n%v", file, piece[1], err)
			}
		}
	}
}

// wholeFlow completes a piece of a flow.
func wholeFlow(piece string) string {
	if strings.Contains(piece, "flow:") {
		return piece
	}
	whole := "flow: docs\n"
	if !strings.Contains(piece, "source:") && !strings.Contains(piece, "sources:") {
		whole += "source: {stream: IN}\n"
	}
	if strings.HasPrefix(piece, "- ") {
		whole += "steps:\n"
		stateful := strings.Contains(piece, "- aggregate:") || strings.Contains(piece, "- dedupe:") || strings.Contains(piece, "- lookup:") || strings.Contains(piece, "{key}")
		if stateful && !strings.Contains(piece, "- key:") {
			whole += "- key: k\n"
		}
		whole += piece
		if !strings.Contains(piece, "- to:") {
			whole += "- to: {stream: OUT, subject: out}\n"
		}
		return whole
	}
	if !strings.Contains(piece, "steps:") {
		whole += "steps:\n- to: {stream: OUT, subject: out}\n"
	}
	return whole + piece
}

// FuzzParse reads anything. What is accepted can be built, planned and run.
func FuzzParse(f *testing.F) {
	for _, file := range []string{"../examples/flights/flow.yaml", "../examples/earthquakes/flow.yaml", "../examples/flights/daily.yaml", "testdata/travel.yaml"} {
		src, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(src)
	}
	archives, err := filepath.Glob("testdata/operators/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range append(archives, "testdata/errors.txtar") {
		for _, piece := range readArchive(f, file).files {
			if strings.HasSuffix(piece.name, ".yaml") {
				f.Add([]byte(piece.data))
			}
		}
	}
	f.Add([]byte(replayFlow))
	f.Fuzz(func(t *testing.T, src []byte) {
		s, err := Parse("fuzz.yaml", src)
		if err != nil {
			checkErrors(t, src, err)
			return
		}
		if _, err := s.Build(); err != nil {
			t.Fatalf("%q: %v", src, err)
		}
		if s.Plan().String() == "" || s.Partitions > 64 {
			return
		}
		p := playerOf(t, s)
		for i, payload := range []string{`{"k":"a","v":1,"legs":[{"k":1}]}`, `{"k":null,"v":"x"}`, `[`, `{"delay":1,"origin":"ATL"}`} {
			p.playFrom(i%len(p.routers), input{"in.a.b", 1, []byte(payload)})
		}
		p.seal()
	})
}

// FuzzPayload runs a flow with every kind of step on any payload: it never
// panics, and what comes out is JSON.
func FuzzPayload(f *testing.F) {
	for _, s := range []string{
		`{"legs":[{"k":"a","id":1,"v":2}]}`, `{"legs":[{"k":"\u0000","id":"x","v":1e999}]}`, `{"legs":[[]]}`, `{}`, `[]`, `"`, `{"legs":[{"k":"\ud800","id":1}]}`,
		"{\"legs\":[{\"k\":\"\xff\"}]}", `{"legs" : [ { "k" : -0.0 , "id" : 1E2 } ] }`, `{"l\u0065gs":[{"k":true,"id":false}]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		p := newPlayer(t, replayFlow)
		p.play(input{"in", 1, payload})
		p.play(input{"in", 2, payload})
		p.seal()
		for _, line := range p.out {
			words := strings.SplitN(line, " ", 3)
			if words[0] != "DEAD" && !json.Valid([]byte(words[2])) {
				t.Errorf("%q", line)
			}
			if strings.Contains(line, "panicked") {
				t.Errorf("%q", line)
			}
		}
	})
}

func TestDecodeJSON_Deep(t *testing.T) {
	deep := func(n int) string { return `{"a":` + strings.Repeat("[", n) + strings.Repeat("]", n) + `}` }
	for _, c := range []struct {
		payload string
		ok      bool
	}{
		{deep(maxDepth - 1), true},
		{deep(maxDepth), false},
		{deep(1 << 22), false},
		{`{"a":"` + strings.Repeat("[", 1<<15) + `\"` + strings.Repeat("{", 1<<15) + `"}`, true},
	} {
		if _, err := decodeJSON(nil, []byte(c.payload)); (err == nil) != c.ok {
			t.Errorf("%d bytes: %v", len(c.payload), err)
		}
	}
}
