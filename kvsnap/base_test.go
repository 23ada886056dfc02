package kvsnap

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
)

func TestBase_replacesTheLog(t *testing.T) {
	s, b := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	st := state{}
	for i := range 10 {
		m := map[string]string{fmt.Sprint(i): strings.Repeat("v", 200), "gone": fmt.Sprint(i)}
		_ = st.load(pairs(m))
		mustAppend(t, l, Commit{Head: testHead(uint64(i)), Delta: pairs(m), Outbox: noise(uint64(i), 1500)})
	}
	delete(st, "gone")
	mustAppend(t, l, Commit{Head: testHead(10), Delta: pair(nil, "gone", "")})
	mustBase(t, l, st, Head{Published: l.N()})
	if log, chunks := len(b.sorted("log.>")), len(b.sorted("chunk.>")); log != 1 || chunks > 3 {
		t.Errorf("%d entries and %d chunks after a base", log, chunks)
	}
	_, r, got := mustClaim(t, s, testTask)
	if !maps.Equal(st, got) || len(r.Unpublished) != 0 || r.Entries != 2 {
		t.Errorf("got %+v", r)
	}
	want := testHead(10)
	want.Published = 12
	if diff := cmp.Diff(want, r.Head); diff != "" {
		t.Error(diff)
	}
}

// What a base must not purge: entries whose outbox is not confirmed, and chunks
// of commits that are made while it is written.
func TestBase_keepsWhatIsNeeded(t *testing.T) {
	s, b := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	st := state{}
	commit := func(key, value string, out []byte, h Head) uint64 {
		_ = st.load(pair(nil, key, value))
		return mustAppend(t, l, Commit{Head: h, Delta: pair(nil, key, value), Outbox: out})
	}
	commit("a", string(noise(1, 2500)), noise(10, 1500), Head{})
	commit("b", "2", noise(11, 1500), Head{})
	commit("c", "3", nil, Head{})
	published := l.N() - 2 // the first one
	base := l.BeginBase()
	st.addTo(base, 100)
	commit("a", string(noise(2, 2500)), noise(12, 1500), Head{})
	stale := Head{Offsets: map[string]uint64{"ORDERS": 1}, Published: published}
	commit("d", string(noise(3, 2500)), nil, Head{Offsets: map[string]uint64{"ORDERS": 9}})
	if err := base.Finish(t.Context(), stale); err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, item := range b.sorted("log.>") {
		keys = append(keys, item.Key)
	}
	if diff := cmp.Diff([]string{"log.0.3.3", "log.0.3.4", "log.0.3.5", "log.0.3.6", "log.0.3.7"}, keys); diff != "" {
		t.Error(diff)
	}
	_, r, got := mustClaim(t, s, testTask)
	if !maps.Equal(st, got) {
		t.Error("state differs")
	}
	if r.Head.Offsets["ORDERS"] != 9 {
		t.Errorf("a base moved the position: %v", r.Head)
	}
	want := []Pending{{N: 3, Outbox: noise(11, 1500)}, {N: 5, Outbox: noise(12, 1500)}}
	if diff := cmp.Diff(want, r.Unpublished); diff != "" {
		t.Error(diff)
	}
}

func TestBase_empty(t *testing.T) {
	s, _ := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	mustAppend(t, l, Commit{Delta: pair(nil, "a", "1")})
	mustAppend(t, l, Commit{Delta: pair(nil, "a", "")})
	mustBase(t, l, state{}, Head{Published: l.N()})
	_, r, got := mustClaim(t, s, testTask)
	if len(got) != 0 || r.StateBytes != 0 || r.Fresh {
		t.Errorf("got %v, %+v", got, r)
	}
}

func TestBase_oneAtATime(t *testing.T) {
	cfg := testConfig()
	s, _ := fakeStore(cfg)
	l, _, _ := mustClaim(t, s, testTask)
	mustAppend(t, l, Commit{Delta: noise(1, 5000)})
	if !l.BaseDue() {
		t.Error("no base is due")
	}
	first := l.BeginBase()
	if l.BaseDue() {
		t.Error("a base is due while one is written")
	}
	second := l.BeginBase()
	second.Add([]byte("x"))
	if err := second.Finish(t.Context(), Head{}); !errors.Is(err, ErrBaseActive) {
		t.Errorf("got %v", err)
	}
	first.Abort()
	first.Abort()
	first.Add(make([]byte, 100000)) // returns
	if err := first.Finish(t.Context(), Head{}); err == nil {
		t.Error("an aborted base was finished")
	}
	if !l.BaseDue() {
		t.Error("no base is due after the abort")
	}
	mustBase(t, l, state{}, Head{})
	if l.BaseDue() {
		t.Error("a base is due after one")
	}
}

// Abort frees an Add that waits for the upload.
func TestBase_abortWhileAdding(t *testing.T) {
	s, b := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	entered := make(chan struct{}, 100)
	hold := make(chan struct{})
	b.onPut = func(_ []bus.Item, store func() error) error {
		entered <- struct{}{}
		<-hold
		return store()
	}
	base := l.BeginBase()
	added := make(chan struct{})
	go func() {
		defer close(added)
		base.Add(make([]byte, 1<<20))
	}()
	<-entered
	aborted := make(chan struct{})
	go func() {
		defer close(aborted)
		base.Abort()
	}()
	<-added // although the upload still hangs
	close(hold)
	<-aborted
	mustAppend(t, l, Commit{})
}

// Over a long run the bytes written are at most three per byte of delta, for
// states of any size, hot or cold, growing or not, with large and small commits.
func TestLog_amortised(t *testing.T) {
	for _, tt := range []struct {
		name              string
		keys, value       int
		perCommit, commit int
		growing           bool
	}{
		{"tiny hot state", 10, 100, 10, 10000, false},
		{"small hot state", 1000, 100, 200, 800, false},
		{"small state, tiny commits", 1000, 100, 1, 10000, false},
		{"large state, large commits", 20000, 100, 300, 300, false},
		{"large state, small commits", 20000, 100, 20, 4000, false},
		{"growing state", 1, 100, 100, 500, true},
		{"large values", 20, 20000, 1, 700, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, b := fakeStore(Config{Flow: "orders"})
			l, _, _ := mustClaim(t, s, testTask)
			rng := rand.New(rand.NewPCG(1, 2))
			st := state{}
			longest := 0
			keys := tt.keys
			for i := range tt.commit {
				m := map[string]string{}
				for j := range tt.perCommit {
					k := rng.IntN(keys)
					if tt.growing {
						k = i*tt.perCommit + j
					}
					m[fmt.Sprint("key-", k)] = string(noise(rng.Uint64(), tt.value))
				}
				for k, v := range m {
					st[k] = v
				}
				mustAppend(t, l, Commit{Delta: pairs(m), Head: Head{Published: l.N()}})
				if l.BaseDue() {
					longest = max(longest, len(b.items))
					mustBase(t, l, st, Head{Published: l.N()})
				}
			}
			stats := l.Stats()
			ratio := float64(stats.DeltaBytes+stats.BaseBytes) / float64(stats.DeltaBytes)
			t.Logf("%.2f bytes written per byte of delta: %d bases, %d MB of deltas, at most %d entries and chunks",
				ratio, stats.Bases, stats.DeltaBytes>>20, longest)
			if ratio > 3 || stats.Bases == 0 {
				t.Errorf("ratio %.2f with %d bases", ratio, stats.Bases)
			}
			if longest > maxStretch*defaultMaxEntries+200 {
				t.Errorf("log grew to %d", longest)
			}
			_, _, got := mustClaim(t, s, testTask)
			if !maps.Equal(st, got) {
				t.Error("state differs")
			}
		})
	}
}

// Whether a base is due survives a change of owner.
func TestLog_baseDueAfterClaim(t *testing.T) {
	for _, point := range []int{0, 2, 3} { // commits after the base
		s, _ := fakeStore(testConfig())
		l, _, _ := mustClaim(t, s, testTask)
		st := state{"a": string(noise(1, 2500))}
		mustAppend(t, l, Commit{Delta: pairs(st)})
		mustBase(t, l, st, Head{})
		for i := range point {
			mustAppend(t, l, Commit{
				Delta: pair(nil, "a", string(noise(uint64(i), 900+10*point))), Outbox: []byte("out"),
			})
		}
		again, _, _ := mustClaim(t, s, testTask)
		if want := point == 3; l.BaseDue() != want || again.BaseDue() != want {
			t.Errorf("%d commits after a base: due %v, and %v after a claim", point, l.BaseDue(), again.BaseDue())
		}
		want := l.due
		want.delta, want.deltaBase = want.delta-want.deltaBase, 0
		if again.due != want {
			t.Errorf("%+v became %+v", want, again.due)
		}
	}
}

// The bounds of a log whose bases are never worth their bytes.
func TestLog_baseDueBounds(t *testing.T) {
	newLog := func(state, delta, outbox, entries uint64) *Log {
		s, _ := fakeStore(Config{Flow: "orders"})
		return &Log{store: s, n: entries, due: dueState{state: state, delta: delta, outbox: outbox}}
	}
	for _, tt := range []struct {
		name                          string
		state, delta, outbox, entries uint64
		want                          bool
	}{
		{"nothing", 0, 0, 0, 0, false},
		{"less than the least", 0, 256 << 10, 0, 500, false},
		{"more than the least", 0, 256<<10 + 1, 0, 10, true},
		{"less than the state", 1 << 20, 1<<20 - 1, 0, 5000, false},
		{"as much as the state", 1 << 20, 1 << 20, 0, 10, true},
		{"many entries of a small state", 1000, 1000, 0, 501, true},
		{"many entries, not worth it", 1001, 1000, 0, 501, false},
		{"too many entries", 1 << 30, 1, 0, 5001, true},
		{"outboxes", 1000, 1, 32<<20 + 1, 10, true},
		{"outboxes and a large state", 16 << 20, 1, 32<<20 + 1, 10, false},
		{"outboxes larger than a large state", 16 << 20, 1, 64<<20 + 1, 10, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := newLog(tt.state, tt.delta, tt.outbox, tt.entries).BaseDue(); got != tt.want {
				t.Errorf("due: %v", got)
			}
		})
	}
}
