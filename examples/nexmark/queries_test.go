package main

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"natsflow/examples/nexmark/gen"
	"natsflow/flow"
	"natsflow/flow/flowtest"
	"natsflow/flowspec"
)

// query is one of the benchmark.
type query struct {
	name string
	// upsert names the members that tell results apart of which only the last one
	// counts. Without it, all results count.
	upsert []string
	// closed: results come when time has passed. An event of this kind makes it pass; see
	// events.last.
	closed string
}

var queries = []query{
	{name: "q0"},
	{name: "q1"},
	{name: "q2"},
	{name: "q3"},
	{name: "q4", upsert: []string{"id"}, closed: gen.BidEvent},
	{name: "q5", closed: gen.BidEvent},
	{name: "q6", closed: gen.BidEvent},
	{name: "q7", closed: gen.BidEvent},
	{name: "q8", closed: gen.AuctionEvent},
	{name: "q9", closed: gen.BidEvent},
	{name: "q11", closed: gen.BidEvent},
	{name: "q12", closed: gen.BidEvent},
	{name: "q13"},
	{name: "q14"},
	{name: "q15", upsert: []string{"key"}},
	{name: "q16", upsert: []string{"key"}},
	{name: "q17", upsert: []string{"key"}},
	{name: "q18", upsert: []string{"bidder", "auction"}},
	{name: "q19", upsert: []string{"key"}},
	{name: "q20"},
	{name: "q21"},
	{name: "q22"},
}

// build returns the flow of a query, which is in YAML or in Go.
func (q query) build(t *testing.T) *flow.Flow {
	t.Helper()
	if build := flows[q.name]; build != nil {
		f, err := build()
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	spec, err := flowspec.Load(q.name)
	if err != nil {
		t.Fatal(err)
	}
	f, err := spec.Build()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (q query) sink() string { return strings.ToUpper(stream + "_" + q.name) }

// counting returns the results that count, in one order.
func (q query) counting(t *testing.T, results []row) []string {
	t.Helper()
	last := map[string]string{}
	var all []string
	for _, r := range results {
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		line := string(data)
		if q.upsert == nil {
			all = append(all, line)
			continue
		}
		var key strings.Builder
		for _, name := range q.upsert {
			fmt.Fprintln(&key, r[name])
		}
		last[key.String()] = line
	}
	for _, line := range last {
		all = append(all, line)
	}
	slices.Sort(all)
	return all
}

// TestQueries asks the flow and SQL the same question about the same events, with
// crashes and stops, and for the events of the file also without.
func TestQueries(t *testing.T) {
	for i, set := range dataSets(t) {
		for _, q := range queries {
			t.Run(q.name+"/"+set.name, func(t *testing.T) {
				want := q.counting(t, set.ask(t, q.name))
				if len(want) == 0 {
					t.Error("SQL has no rows")
				}
				for _, disturbed := range []bool{true, false}[:2-min(i, 1)] {
					got := q.counting(t, set.run(t, q, disturbed))
					if diff := gocmp.Diff(want, got); diff != "" {
						t.Errorf("disturbed: %v; %d rows of SQL, %d of the flow (-SQL +flow):\n%.3000s", disturbed, len(want), len(got), diff)
					}
				}
			})
		}
	}
}

// run plays the events and returns the results.
func (e *events) run(t *testing.T, q query, disturbed bool) []row {
	t.Helper()
	f := q.build(t)
	r := flowtest.New(t, f)
	for _, l := range f.Lookups() {
		for key, value := range sideInput() {
			r.Set(l.Bucket, strconv.Itoa(key), value)
		}
	}
	rng := rand.New(rand.NewPCG(5, 5))
	subjects := f.Sources()[0].Subjects
	var records []flowtest.Record
	for i, event := range e.all {
		if slices.Contains(subjects, event.Subject()) {
			records = append(records, flowtest.Record{Stream: stream, Subject: event.Subject(), Time: e.taken(i), Data: e.data[i]})
		}
	}
	for chunk := range slices.Chunk(records, 97) {
		r.Push(chunk...)
		if !disturbed {
			continue
		}
		switch rng.IntN(6) {
		case 0:
			r.Crash()
		case 1:
			r.Commit()
		case 2:
			r.Drain()
		case 3:
			r.Crash(rng.IntN(16), rng.IntN(16))
		}
	}
	if q.closed != "" {
		event := e.last(q.closed)
		r.Push(flowtest.Record{Stream: stream, Subject: event.Subject(), Time: r.Now().Add(time.Hour), Data: string(event.JSON())})
	}
	var rows []row
	for _, data := range r.Data(q.sink()) {
		rows = append(rows, rowOf(t, []byte(data)))
	}
	if errs := r.Errors(); len(errs) > 0 {
		t.Errorf("%d dead letters, the first: %s", len(errs), errs[0])
	}
	if r.Late() > 0 {
		t.Errorf("%d late records", r.Late())
	}
	return rows
}

// TestQueries_all: each folder has a query, its SQL, and a flow in YAML or in Go.
func TestQueries_all(t *testing.T) {
	folders, err := filepath.Glob("q*/query.sql")
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, folder := range folders {
		want = append(want, filepath.Dir(folder))
	}
	for _, q := range queries {
		got = append(got, q.name)
		_, err := os.Stat(filepath.Join(q.name, "flow.yaml"))
		if inYAML, inGo := err == nil, flows[q.name] != nil; inYAML == inGo {
			t.Errorf("%s: in YAML: %v, in Go: %v", q.name, inYAML, inGo)
		}
	}
	byLength := func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) }
	slices.SortFunc(want, byLength)
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("queries (-folders +tested):\n%s", diff)
	}
}

// TestEvents makes the events of the file again.
func TestEvents(t *testing.T) {
	file, err := os.Open("events.ndjson.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	g, err := gen.New(standard)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for lines := bufio.NewScanner(unzipped); lines.Scan(); n++ {
		if want := string(g.Event(n).JSON()); lines.Text() != want {
			t.Fatalf("line %d: %s, want %s", n+1, lines.Text(), want)
		}
	}
	if n != standardEvents {
		t.Errorf("%d lines, want %d", n, standardEvents)
	}
}
