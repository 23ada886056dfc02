package control

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestMayTake(t *testing.T) {
	now := scriptTime(0)
	of := func(owner, instance string) TaskRecord { return TaskRecord{Owner: owner, Instance: instance} }
	tests := []struct {
		name string
		c    claim
		want verdict
	}{
		{"free", claim{}, claimTake},
		{"free, with a final entry", claim{task: TaskRecord{Final: &Final{Epoch: 3}}}, claimTake},
		{"ours", claim{task: of("b", "b1"), owner: holder{true, "b1", false}}, claimOurs},
		{"ours, and the lease was not looked at", claim{task: of("b", "b1")}, claimOurs},
		{"owner there", claim{task: of("a", "a1"), owner: holder{true, "a1", true}}, claimOther},
		{"owner there, not settled", claim{task: of("a", "a1"), owner: holder{true, "a1", false}}, claimOther},
		{"owner gone", claim{task: of("a", "a1")}, claimTake},
		{"owner replaced, may be trusted", claim{task: of("a", "a1"), owner: holder{true, "a2", false}}, claimOther},
		{"owner replaced, run out", claim{task: of("a", "a1"), owner: holder{true, "a2", true}}, claimTake},
		{"owner there, unreadable", claim{task: of("a", "a1"), owner: holder{present: true}}, claimOther},
		{"of our name, may be trusted", claim{task: of("b", "b0"), owner: holder{true, "b1", false}, heldUntil: now.Add(1)}, claimWait},
		{"of our name, run out", claim{task: of("b", "b0"), owner: holder{true, "b1", false}, heldUntil: now}, claimTake},
		{"of our name, vouched for", claim{task: of("b", "b0"), owner: holder{true, "b1", true}}, claimTake},
		{"of our name, which a younger process has", claim{task: of("b", "b2"), owner: holder{true, "b2", true}}, claimLost},
		{"of our name, which nobody has", claim{task: of("b", "b2")}, claimLost},
		{"of our former process, and a younger one has the name", claim{task: of("b", "b0"), owner: holder{true, "b2", true}}, claimLost},
		{"our instance under another name", claim{task: of("a", "b1"), owner: holder{true, "b1", true}}, claimOther},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := mayTake("b", "b1", tt.c, now); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestDisowned(t *testing.T) {
	final := &Final{Epoch: 2}
	tests := []struct {
		name string
		rec  TaskRecord
		want TaskRecord
		ok   bool
	}{
		{"taken", TaskRecord{Owner: "b", Instance: "b1", Revision: 8}, TaskRecord{Revision: 8}, true},
		{"there was no record", TaskRecord{}, TaskRecord{}, false},
		{"still free, the write may arrive", TaskRecord{Final: final, Revision: 7}, TaskRecord{Final: final, Revision: 7}, true},
		{"of one who is gone, the write may arrive", TaskRecord{Owner: "a", Instance: "a1", Revision: 7}, TaskRecord{Owner: "a", Instance: "a1", Revision: 7}, true},
		{"another was faster", TaskRecord{Owner: "a", Instance: "a1", Revision: 9}, TaskRecord{Owner: "a", Instance: "a1", Revision: 9}, false},
		{"of our name", TaskRecord{Owner: "b", Instance: "b0", Revision: 9}, TaskRecord{Owner: "b", Instance: "b0", Revision: 9}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, write := disowned("b", "b1", tt.rec, 7)
			if d := cmp.Diff(tt.want, got); d != "" || write != tt.ok {
				t.Errorf("write %v %s", write, d)
			}
		})
	}
}

func TestCutOf(t *testing.T) {
	tasks := []string{"0", "1", "2"}
	at := func(n uint64) map[string]uint64 { return map[string]uint64{"A": n, "B": 10 - n} }
	tests := []struct {
		name  string
		stops []Stopped
		cut   map[string]uint64
		ok    bool
	}{
		{"nobody", nil, map[string]uint64{}, false},
		{"one for all", []Stopped{{3, at(4), tasks}}, at(4), true},
		{"the highest of each source", []Stopped{{3, at(4), tasks[:2]}, {3, at(6), tasks[2:]}}, map[string]uint64{"A": 6, "B": 6}, true},
		{"a task is missing", []Stopped{{3, at(4), tasks[:2]}}, at(4), false},
		{"a task twice does not stand for another", []Stopped{{3, at(4), tasks[:2]}, {3, at(4), tasks[1:2]}}, at(4), false},
		{"another epoch", []Stopped{{2, at(9), tasks}, {4, at(9), tasks}}, map[string]uint64{}, false},
		{"one that stands by", []Stopped{{3, at(4), tasks}, {3, nil, nil}}, at(4), true},
		{"sources that only some read", []Stopped{{3, map[string]uint64{"A": 1}, tasks[:1]}, {3, map[string]uint64{"B": 2}, tasks[1:]}}, map[string]uint64{"A": 1, "B": 2}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cut, ok := CutOf(tt.stops, tasks, 3)
			if ok != tt.ok || !maps.Equal(cut, tt.cut) {
				t.Errorf("got %v, %v, want %v, %v", cut, ok, tt.cut, tt.ok)
			}
		})
	}
}

func TestCutOf_rapid(t *testing.T) {
	names := []string{"0", "1", "2", "3"}
	stop := rapid.Custom(func(t *rapid.T) Stopped {
		return Stopped{
			Epoch:     rapid.Uint64Range(1, 2).Draw(t, "epoch"),
			Positions: rapid.MapOfN(rapid.SampledFrom([]string{"A", "B", "C"}), rapid.Uint64Range(0, 9), 0, 3).Draw(t, "positions"),
			Tasks:     rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, 4, rapid.ID).Draw(t, "tasks"),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		stops := rapid.SliceOfN(stop, 0, 5).Draw(t, "stops")
		tasks := rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, 4, rapid.ID).Draw(t, "all tasks")
		cut, ok := CutOf(stops, tasks, 2)
		// Said the other way round: every position of the epoch is at or before the
		// cut, every source of the cut is where somebody is, and a task is missing
		// if nobody has it.
		for source, at := range cut {
			if !anyOf(stops, func(s Stopped) bool { p, has := s.Positions[source]; return s.Epoch == 2 && has && p == at }) {
				t.Fatalf("nobody is at %s:%d", source, at)
			}
		}
		for source := range map[string]int{"A": 0, "B": 0, "C": 0} {
			if anyOf(stops, func(s Stopped) bool {
				p, has := s.Positions[source]
				at, is := cut[source]
				return s.Epoch == 2 && has && (!is || p > at)
			}) {
				t.Fatalf("somebody is behind the cut of %s: %v", source, cut)
			}
		}
		missing := false
		for _, task := range tasks {
			missing = missing || !anyOf(stops, func(s Stopped) bool {
				return s.Epoch == 2 && fmt.Sprint(s.Tasks) != "[]" && anyOf(s.Tasks, func(x string) bool { return x == task })
			})
		}
		if ok == missing {
			t.Fatalf("ok %v with %v for %v", ok, stops, tasks)
		}
	})
}

func anyOf[T any](list []T, is func(T) bool) bool {
	for _, x := range list {
		if is(x) {
			return true
		}
	}
	return false
}

func TestTaskRecord_stored(t *testing.T) {
	final := &Final{Epoch: 3, Results: 4, DeadLetters: 1, Bytes: 99, Worker: "a", Time: scriptTime(2)}
	for want, rec := range map[string]TaskRecord{
		`{}`: {},
		`{"owner":"a","instance":"a1","since":"2026-01-02T03:00:01Z"}`:                                                                            {Owner: "a", Instance: "a1", Since: scriptTime(1), Revision: 9},
		`{"final":{"epoch":3,"results":4,"dead_letters":1,"bytes":99,"worker":"a","time":"2026-01-02T03:00:02Z"},"since":"2026-01-02T03:00:01Z"}`: {Final: final, Since: scriptTime(1)},
	} {
		b, err := encodeTask(rec)
		if err != nil {
			t.Fatal(err)
		}
		if string(b) != want {
			t.Errorf("stored as %s, want %s", b, want)
		}
		got, err := decodeTask(b)
		rec.Revision = 0
		if d := cmp.Diff(rec, got); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	}
	for _, bad := range []string{"", "x", `{"owner":"a"}`, `{"instance":"a"}`} {
		if _, err := decodeTask([]byte(bad)); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: error %v", bad, err)
		}
	}
	if held := (TaskRecord{Owner: "a", Instance: "a1"}); held.Free() || !(TaskRecord{Final: final, Since: time.Now()}).Free() {
		t.Error("free")
	}
}
