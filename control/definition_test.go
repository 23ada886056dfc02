package control

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// defined is a definition with steps written "id:kind" and source A.
func defined(hash string, steps ...string) Definition {
	def := Definition{Partitions: 16, Hash: hash, Sources: map[string]SourceRecord{"A": {Created: scriptTime(0)}}}
	for _, s := range steps {
		id, kind, _ := strings.Cut(s, ":")
		def.Steps = append(def.Steps, StepRecord{ID: id, Kind: kind})
	}
	return def
}

func accepting(def Definition) Definition {
	def.AcceptChanges = true
	return def
}

// inState is a flow of definition h1 in a state.
func inState(t *testing.T, state State, steps ...string) Record {
	t.Helper()
	rec, err := testRecord("A").redefine(defined("h1", steps...))
	if err != nil {
		t.Fatal(err)
	}
	if state == StateRunning {
		return rec
	}
	mode := ModeSuspend
	if state == StateFinished {
		mode = ModeFinish
	}
	rec, _ = rec.Apply(Command{Seq: 1, Kind: KindDrain, Mode: mode, Time: scriptTime(1)})
	if state == StateDraining {
		return rec
	}
	if rec, err = rec.FixCut(1, map[string]uint64{"A": 5}, map[string]uint64{"A": 5}); err != nil {
		t.Fatal(err)
	}
	if rec, err = rec.Drained(1, Report{Tasks: 16, Worker: "w", Time: scriptTime(2)}); err != nil {
		t.Fatal(err)
	}
	if rec.State != state {
		t.Fatalf("state %s, want %s", rec.State, state)
	}
	return rec
}

func ids(steps []StepRecord) []string {
	var list []string
	for _, s := range steps {
		list = append(list, s.ID)
	}
	return list
}

func TestRecord_redefine_acceptChanges(t *testing.T) {
	for _, state := range []State{StateRunning, StateDraining, StateDrained, StateFinished} {
		t.Run(string(state), func(t *testing.T) {
			rec := inState(t, state, "count:aggregate", "seen:dedupe")
			def := defined("h2", "total:aggregate", "seen:dedupe")
			if _, err := rec.redefine(def); !errors.Is(err, ErrDefinition) ||
				!strings.Contains(err.Error(), `state of step "count" (aggregate)`) || !strings.Contains(err.Error(), "it was h1 and is now h2") ||
				!strings.Contains(err.Error(), "--resume --accept-changes") {
				t.Errorf("without acceptance: error %v", err)
			}
			next, err := rec.redefine(accepting(def))
			if !state.Stopped() {
				if !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), "is "+string(state)) || !strings.Contains(err.Error(), "drain") {
					t.Errorf("error %v", err)
				}
				if len(next.LeftOver) > 0 {
					t.Errorf("left over: %q", next.LeftOver)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff([]string{"count"}, next.LeftOver); d != "" {
				t.Error(d)
			}
			if next.Hash != "h2" || next.State != state || !slices.Equal(ids(next.Steps), []string{"total", "seen"}) || len(rec.LeftOver) > 0 {
				t.Errorf("record %+v, from %+v", next, rec)
			}
			// It is said once: the definition then fits without, and the ids stay.
			again, err := next.redefine(def)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(next, again); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRecord_redefine_idsAreNotReused(t *testing.T) {
	rec := inState(t, StateDrained, "b:aggregate", "a:aggregate")
	rec, err := rec.redefine(accepting(defined("h2", "c:aggregate")))
	if err != nil {
		t.Fatal(err)
	}
	rec, err = rec.redefine(accepting(defined("h3")))
	if err != nil {
		t.Fatal(err)
	}
	b, err := encodeRecord(rec)
	if err != nil {
		t.Fatal(err)
	}
	if rec, err = decodeRecord(b); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"a", "b", "c"}, rec.LeftOver); d != "" {
		t.Error(d)
	}
	for _, id := range []string{"a", "b", "c"} {
		def := defined("h4", id+":aggregate")
		for _, def := range []Definition{def, accepting(def)} {
			next, err := rec.redefine(def)
			if !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), fmt.Sprintf("the id %q of a new step", id)) || !strings.Contains(err.Error(), "another id") {
				t.Errorf("step %s: error %v", id, err)
			}
			if next.Hash != "h3" {
				t.Errorf("step %s: the record has definition %s", id, next.Hash)
			}
		}
		if err := rec.Reuses(id); !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), "now h3") {
			t.Errorf("step %s: error %v", id, err)
		}
	}
	if err := rec.Reuses("d"); err != nil {
		t.Errorf("step d: %v", err)
	}
	if _, err := rec.redefine(defined("h4", "d:aggregate")); err != nil {
		t.Errorf("step d: %v", err)
	}
}

// What cannot be accepted: another number of partitions, another kind of step under
// an id, and what has an acceptance of its own.
func TestRecord_redefine_notAcceptable(t *testing.T) {
	partitions, recreated := defined("h2", "count:aggregate"), defined("h2")
	partitions.Partitions = 8
	recreated.Sources["A"] = SourceRecord{Created: scriptTime(77)}
	for name, c := range map[string]struct {
		def  Definition
		is   error
		want string
	}{
		"partitions": {partitions, ErrDefinition, "created with 16 partitions and is now defined with 8"},
		"kind":       {defined("h2", "count:dedupe"), ErrDefinition, `step "count" of flow f was aggregate and is now dedupe`},
		"source":     {recreated, ErrSourceRecreated, "A was created"},
	} {
		t.Run(name, func(t *testing.T) {
			rec := inState(t, StateDrained, "count:aggregate")
			next, err := rec.redefine(accepting(c.def))
			if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v", err)
			}
			if d := cmp.Diff(rec, next); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRecord_Compare(t *testing.T) {
	rec := inState(t, StateDrained, "gone:dedupe", "kept:aggregate", "kind:aggregate", "former:aggregate")
	rec, err := rec.redefine(accepting(defined("h2", "gone:dedupe", "kept:aggregate", "kind:aggregate")))
	if err != nil {
		t.Fatal(err)
	}
	rec.Sources = map[string]SourceRecord{"A": {Created: scriptTime(1)}, "B": {Created: scriptTime(1)}, "C": {Created: scriptTime(1)}}
	rec.FormerSources = map[string]SourceRecord{"E": {Created: scriptTime(1)}, "F": {Created: scriptTime(1)}, "G": {Created: scriptTime(1)}}
	def := defined("h3", "former:aggregate", "new:dedupe", "kept:aggregate", "kind:dedupe")
	def.Steps[2].Version = 2
	def.Sources = map[string]SourceRecord{"B": {Created: scriptTime(1)}, "C": {Created: scriptTime(2)}, "D": {Created: scriptTime(1)}}
	def.Sources["E"], def.Sources["F"] = SourceRecord{Created: scriptTime(1)}, SourceRecord{Created: scriptTime(2)}
	want := Change{
		Kept:        []KeptStep{{StepRecord{ID: "kept", Kind: "aggregate", Version: 2}, 0}},
		New:         []StepRecord{{ID: "former", Kind: "aggregate"}, {ID: "new", Kind: "dedupe"}, {ID: "kind", Kind: "dedupe"}},
		LeftOver:    []StepRecord{{ID: "gone", Kind: "dedupe"}, {ID: "kind", Kind: "aggregate"}},
		Taken:       []string{"former", "kind"},
		SourcesKept: []string{"B"}, SourcesNew: []string{"D"}, SourcesBack: []string{"E"}, SourcesGone: []string{"A"},
		SourcesRecreated: []string{"C", "F"},
	}
	if d := cmp.Diff(want, rec.Compare(def)); d != "" {
		t.Error(d)
	}
}

// A source that comes back goes on from the positions that the tasks have kept, so
// it must be the same stream.
func TestRecord_redefine_sourceComesBack(t *testing.T) {
	with := func(hash string, sources map[string]uint64) Definition {
		def := defined(hash)
		def.Sources = map[string]SourceRecord{}
		for name, seconds := range sources {
			def.Sources[name] = SourceRecord{Created: scriptTime(seconds)}
		}
		return def
	}
	define := func(rec Record, def Definition) Record {
		t.Helper()
		next, err := rec.redefine(def)
		if err != nil {
			t.Fatal(err)
		}
		b, err := encodeRecord(next)
		if err != nil {
			t.Fatal(err)
		}
		if next, err = decodeRecord(b); err != nil {
			t.Fatal(err)
		}
		return next
	}
	first := define(testRecord("A"), with("h1", map[string]uint64{"A": 0, "B": 5}))
	gone := define(define(first, with("h2", map[string]uint64{"A": 0})), with("h3", map[string]uint64{"A": 0}))
	if d := cmp.Diff(map[string]SourceRecord{"B": {Created: scriptTime(5)}}, gone.FormerSources); d != "" {
		t.Error(d)
	}
	back := define(gone, with("h1", map[string]uint64{"A": 0, "B": 5}))
	if d := cmp.Diff(first, back); d != "" {
		t.Error(d)
	}
	other := with("h1", map[string]uint64{"A": 0, "B": 6})
	if _, err := gone.redefine(other); !errors.Is(err, ErrSourceRecreated) || !strings.Contains(err.Error(), "B was created 2026-01-02T03:00:05Z") {
		t.Errorf("error %v", err)
	}
	other.AcceptRecreated = true
	if rec := define(gone, other); rec.FormerSources != nil || !rec.Sources["B"].Created.Equal(scriptTime(6)) {
		t.Errorf("record %+v", rec)
	}
}

// The state of a step is not given up while a worker of the former definition may
// begin to run: whichever of the two comes first, the other one hears of it.
func TestControl_acceptChangesAgainstResume(t *testing.T) {
	drained := func(s *site) (former, next *Control) {
		former, next = s.open(named("a")), s.open(named("b"))
		s.define(former) // definition h1
		s.pub(former, "control.drain.f", "")
		s.must(former.CatchUp(s.ctx))
		s.must(former.FixCut(s.ctx, 1, map[string]uint64{"IN": 0}, nil))
		s.must(former.Drained(s.ctx, 1, Report{Tasks: 16, Worker: "a", Time: scriptTime(1)}))
		return former, next
	}
	def := Definition{Partitions: 16, Hash: "h2", AcceptChanges: true, Sources: map[string]SourceRecord{"IN": {Created: scriptTime(0)}}}
	t.Run("the resume first", func(t *testing.T) {
		bubble(t, func(s *site) {
			former, next := drained(s)
			s.define(former)
			s.must(former.Resume(s.ctx, ""))
			if _, err := next.Define(s.ctx, def); !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), "is running") {
				t.Errorf("error %v", err)
			}
			if rec := s.must(former.Record(s.ctx)); rec.Hash != "h1" || len(rec.LeftOver) > 0 {
				t.Errorf("record %+v", rec)
			}
		})
	})
	t.Run("the acceptance first", func(t *testing.T) {
		bubble(t, func(s *site) {
			former, next := drained(s)
			s.define(former)
			s.must(next.Define(s.ctx, def))
			rec := s.must(former.Resume(s.ctx, ""))
			if err := rec.Reuses("count"); !errors.Is(err, ErrDefinition) {
				t.Errorf("error %v, record %+v", err, rec)
			}
		})
	})
}

// A source that is read as it is, and one that is read through a stream of the flow's
// own, do not become each other.
func TestRecord_Fits_sameWay(t *testing.T) {
	plain := map[string]SourceRecord{"A": {Created: scriptTime(0)}}
	own := map[string]SourceRecord{"OWN_A": {Created: scriptTime(1), Origin: "A"}}
	both := map[string]SourceRecord{"OWN_A": {Created: scriptTime(1), Origin: "A"}, "B": {Created: scriptTime(0)}}
	for _, tc := range []struct {
		name     string
		was, def map[string]SourceRecord
		want     string
	}{
		{"as it is", plain, plain, ""},
		{"own", own, own, ""},
		{"own, and another", own, both, ""},
		{"own, new", map[string]SourceRecord{"B": {Created: scriptTime(0)}}, both, ""},
		{"got another retention", plain, own, "stream A had limits retention when flow f began to read it"},
		{"own is gone", own, plain, "flow f reads A through the stream OWN_A, which was deleted"},
	} {
		err := Record{Flow: "f", Partitions: 1, Sources: tc.was}.Fits(Definition{Partitions: 1, Sources: tc.def})
		if (tc.want == "") != (err == nil) || err != nil && (!errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	rec := Record{Flow: "f", Sources: own}
	if err := rec.knowsSources(map[string]uint64{"A": 1}); err == nil || !strings.Contains(err.Error(), `reads "A" through its own stream "OWN_A"`) {
		t.Errorf("a cut of the source: %v", err)
	}
	if err := rec.knowsSources(map[string]uint64{"OWN_A": 1}); err != nil {
		t.Error(err)
	}
}
