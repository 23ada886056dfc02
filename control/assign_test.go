package control

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestAssign(t *testing.T) {
	stages := []string{"0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2", "1.3"}
	tests := []struct {
		name           string
		current        map[string][]string
		members, tasks []string
		want           map[string][]string
	}{
		{"nobody", map[string][]string{"a": {"1"}}, nil, []string{"1"}, map[string][]string{}},
		{"no tasks", nil, []string{"a"}, nil, map[string][]string{"a": {}}},
		{"one", nil, []string{"a"}, []string{"2", "1"}, map[string][]string{"a": {"1", "2"}}},
		{
			"some of every stage", nil,
			[]string{"a", "b"},
			stages,
			map[string][]string{"a": {"0.0", "0.2", "1.0", "1.2"}, "b": {"0.1", "0.3", "1.1", "1.3"}},
		},
		{
			"some of every stage to one who joins",
			map[string][]string{"a": stages},
			[]string{"a", "b"},
			stages,
			map[string][]string{"a": {"0.0", "0.2", "1.0", "1.2"}, "b": {"0.1", "0.3", "1.1", "1.3"}},
		},
		{"more members than tasks", nil, []string{"c", "b", "a"}, []string{"1"}, map[string][]string{"a": {"1"}, "b": {}, "c": {}}},
		{
			"the odd task stays",
			map[string][]string{"b": {"1", "2"}, "a": {"3"}},
			[]string{"a", "b"},
			[]string{"1", "2", "3"},
			map[string][]string{"a": {"3"}, "b": {"1", "2"}},
		},
		{
			"of one who is gone",
			map[string][]string{"a": {"1"}, "b": {"2"}, "c": {"3", "4"}},
			[]string{"a", "b"},
			[]string{"1", "2", "3", "4"},
			map[string][]string{"a": {"1", "3"}, "b": {"2", "4"}},
		},
		{
			"a task that is none, and one twice",
			map[string][]string{"a": {"1", "x"}, "b": {"1", "2"}},
			[]string{"a", "b"},
			[]string{"1", "2"},
			map[string][]string{"a": {"1"}, "b": {"2"}},
		},
		{"a member given twice", nil, []string{"a", "a"}, []string{"1", "1"}, map[string][]string{"a": {"1"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, Assign(tt.current, tt.members, tt.tasks)); d != "" {
				t.Error(d)
			}
		})
	}
}

// fewestMoves tries every way to give out the larger quotas.
func fewestMoves(current map[string][]string, members []string, tasks int) int {
	had, best := 0, 0
	for _, name := range members {
		had += len(current[name])
	}
	for larger := range uint(1) << len(members) {
		if bits.OnesCount(larger) != tasks%len(members) {
			continue
		}
		kept := 0
		for i, name := range members {
			kept += min(len(current[name]), tasks/len(members)+int(larger>>i&1))
		}
		best = max(best, kept)
	}
	return had - best
}

func TestAssign_rapid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tasks, members []string
		for i := range rapid.IntRange(0, 20).Draw(t, "tasks") {
			tasks = append(tasks, fmt.Sprintf("%d.%d", i%3, i))
		}
		all := []string{"a", "b", "c", "d", "e", "f", "g"}
		for _, name := range all {
			if rapid.Bool().Draw(t, name) {
				members = append(members, name)
			}
		}
		current := map[string][]string{}
		for _, task := range tasks {
			if name := rapid.SampledFrom(append(all, "")).Draw(t, "owner"); name != "" {
				current[name] = append(current[name], task)
			}
		}
		got := Assign(current, members, tasks)
		if len(got) != len(members) {
			t.Fatalf("members %v, want %v", got, members)
		}
		moves, least, most := 0, len(tasks), 0
		var assigned []string
		for _, name := range members {
			of, ok := got[name]
			if !ok || of == nil || !slices.IsSorted(of) {
				t.Fatalf("member %s: %v", name, of)
			}
			assigned = append(assigned, of...)
			least, most = min(least, len(of)), max(most, len(of))
			for _, task := range current[name] {
				if !slices.Contains(of, task) {
					moves++
				}
			}
		}
		if len(members) == 0 {
			return
		}
		slices.Sort(assigned)
		if !slices.Equal(assigned, sortedSet(tasks)) {
			t.Fatalf("assigned %v of %v", assigned, tasks)
		}
		if most-least > 1 {
			t.Fatalf("not balanced: %v", got)
		}
		if want := fewestMoves(current, members, len(tasks)); moves != want {
			t.Fatalf("%d moves from %v to %v, possible are %d", moves, current, got, want)
		}
		if again := Assign(got, members, tasks); !cmp.Equal(got, again) {
			t.Fatalf("not stable: %v, then %v", got, again)
		}
		slices.Reverse(members)
		slices.Reverse(tasks)
		for name := range current {
			slices.Reverse(current[name])
		}
		if other := Assign(current, members, tasks); !cmp.Equal(got, other) {
			t.Fatalf("depends on the order: %v and %v", got, other)
		}
	})
}

func TestAssignment_neighbour(t *testing.T) {
	a := Assignment{Owners: map[string][]string{"a": {}, "b": {}, "d": {}}}
	for name, want := range map[string]string{"a": "b", "b": "d", "d": "a", "c": "d", "e": "a", "": "a"} {
		if got := a.neighbour(name); got != want {
			t.Errorf("of %q: %q, want %q", name, got, want)
		}
	}
	alone := Assignment{Owners: map[string][]string{"a": {}}}
	if got := alone.neighbour("a"); got != "" {
		t.Errorf("of the only one: %q", got)
	}
}

func TestRebalanced(t *testing.T) {
	two := Assignment{Version: 1, Generation: 7, Hash: "h1", Owners: map[string][]string{"a": {"1"}, "b": {"2"}}}
	other := Assignment{Version: 1, Generation: 7, Hash: "h2", Owners: map[string][]string{"b": {"1", "2", "3"}}}
	fewer := Assignment{Version: 1, Generation: 7, Hash: "h1", Owners: map[string][]string{"b": {"1"}}}
	empty := Assignment{Version: 1, Generation: 7, Hash: "h1", Owners: map[string][]string{}}
	a, b := peer{name: "a", hash: "h1"}, peer{name: "b", hash: "h1"}
	tests := []struct {
		name    string
		now     Assignment
		live    []peer
		want    map[string][]string // nil: no change
		refused bool
	}{
		{"first", Assignment{}, []peer{a}, map[string][]string{"a": {"1", "2"}}, false},
		{"as it should be", two, []peer{b, a}, nil, false},
		{"one is gone", two, []peer{a}, map[string][]string{"a": {"1", "2"}}, false},
		{"one leaves", two, []peer{a, {"b", "h1", true}}, map[string][]string{"a": {"1", "2"}}, false},
		{"we leave", two, []peer{{"a", "h1", true}, b}, map[string][]string{"b": {"1", "2"}}, false},
		{"all leave", two, []peer{{"a", "h1", true}}, map[string][]string{}, false},
		{"all had left", empty, []peer{a}, map[string][]string{"a": {"1", "2"}}, false},
		{"one of another definition came", two, []peer{a, b, {"c", "h2", false}}, nil, false},
		{"another definition runs", other, []peer{a, {"b", "h2", false}}, nil, true},
		{"another definition leaves", other, []peer{a, {"b", "h2", true}}, map[string][]string{"a": {"1", "2"}}, false},
		{"another definition died", other, []peer{a}, map[string][]string{"a": {"1", "2"}}, false},
		{"another definition was of our name", Assignment{Version: 1, Hash: "h2", Owners: map[string][]string{"a": {"3"}}}, []peer{a}, map[string][]string{"a": {"1", "2"}}, false},
		{"other tasks run", fewer, []peer{a, b}, nil, true},
		{"other tasks died", fewer, []peer{a}, map[string][]string{"a": {"1", "2"}}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, changed, err := rebalanced(tt.now, tt.live, "a", "h1", []string{"2", "1"})
			if errors.Is(err, ErrDefinition) != tt.refused || err != nil && !tt.refused {
				t.Fatalf("error %v", err)
			}
			if changed != (tt.want != nil) {
				t.Fatalf("changed %v: %+v", changed, got)
			}
			if !changed {
				if d := cmp.Diff(tt.now, got); d != "" {
					t.Error(d)
				}
				return
			}
			want := Assignment{Version: 1, Generation: tt.now.Generation + 1, Hash: "h1", Owners: tt.want}
			if d := cmp.Diff(want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestAssignment_stored(t *testing.T) {
	a := Assignment{Version: 1, Generation: 3, Hash: "h", Owners: map[string][]string{"a": {"0.0", "0.2"}, "b": {"0.1"}, "c": {}}}
	b, err := encodeAssignment(a)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"version":1,"generation":3,"hash":"h","owners":{"a":["0.0","0.2"],"b":["0.1"],"c":[]}}`; string(b) != want {
		t.Errorf("stored as %s", b)
	}
	got, err := decodeAssignment(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(a, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"x", "{}", `{"version":2}`, `{"owner":"a","instance":"i","generation":2}`} {
		if _, err := decodeAssignment([]byte(bad)); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: error %v", bad, err)
		}
	}
}

func TestValidTasks(t *testing.T) {
	for _, good := range [][]string{{"0.0"}, {"0.0", "0.1", "a_b-c"}} {
		if err := validTasks(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range [][]string{nil, {""}, {"0."}, {".0"}, {"a..b"}, {"*"}, {"a b"}, {"0.0", "0.1", "0.0"}, {string(make([]byte, 101))}} {
		if err := validTasks(bad); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}
