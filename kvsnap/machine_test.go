package kvsnap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"natsflow/bus"
)

var errCrash = errors.New("crash")

// world is the naive model: what was committed, and the head.
type world struct {
	commits []committed
	head    Head
	touched bool // by anything but claims
}

type committed struct {
	n             uint64
	delta, outbox []byte
	sinks         map[string]uint64
}

func (w world) state() state {
	st := state{}
	for _, c := range w.commits {
		_ = st.load(c.delta)
	}
	return st
}

func (w world) unpublished() []Pending {
	var list []Pending
	for _, c := range w.commits {
		if c.n > w.head.Published && len(c.outbox) > 0 {
			list = append(list, Pending{N: c.n, Outbox: c.outbox, Sinks: c.sinks})
		}
	}
	return list
}

// differs says in what the recovered task is not that of the world, "" if in
// nothing.
func (w world) differs(r Recovered, got state) string {
	if r.Fresh == w.touched {
		return fmt.Sprintf("fresh is %v", r.Fresh)
	}
	if diff := cmp.Diff(w.head, r.Head, cmpopts.EquateEmpty()); diff != "" {
		return diff
	}
	if !maps.Equal(w.state(), got) {
		return "state differs"
	}
	same := func(a, b Pending) bool {
		return a.N == b.N && bytes.Equal(a.Outbox, b.Outbox) && maps.Equal(a.Sinks, b.Sinks)
	}
	if want := w.unpublished(); !slices.EqualFunc(want, r.Unpublished, same) {
		return fmt.Sprintf("%d outboxes instead of %d", len(r.Unpublished), len(want))
	}
	return ""
}

// machine drives one task through commits, bases, claims, releases, crashes at
// every probe point, late former owners and late purges. worlds holds what the
// bucket may contain: one, or two while the outcome of a crash is not known.
type machine struct {
	ctx     context.Context
	bucket  bucket
	fake    *fakeBucket // nil with a real server
	opened  *Store
	log     *Log // nil: dead or released
	zombies []*Log
	worlds  []world
	gen     uint64
	seq     uint64 // of offsets

	mu    sync.Mutex
	point string // where to crash, at the pass after `after` others
	after int
	lost  int // what happens to the next append
	late  []func()
}

func (m *machine) store() *Store {
	if m.opened != nil {
		return m.opened
	}
	cfg := testConfig()
	cfg.ChunkSize = 200
	cfg.Probe = func(_ context.Context, point string, _ TaskID) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if point != m.point {
			return nil
		}
		if m.after--; m.after >= 0 {
			return nil
		}
		return errCrash
	}
	m.opened = newStore(m.bucket, cfg)
	return m.opened
}

// fakeFaults makes answers get lost and purges come late.
func (m *machine) fakeFaults() {
	m.fake.onAppend = func(_ string, store func() (uint64, error)) (uint64, error) {
		lost := m.lost
		m.lost = 0
		switch lost {
		case 1:
			if _, err := store(); err != nil {
				return 0, err
			}
			return 0, bus.ErrUnknownOutcome
		case 2:
			return 0, bus.ErrUnknownOutcome
		case 3:
			return 0, bus.ErrConflict
		case 4: // the first attempt arrives after the second
			m.late = append(m.late, func() { _, _ = store() })
			return 0, bus.ErrUnknownOutcome
		}
		return store()
	}
	m.fake.onPurge = func(do func()) error {
		if len(m.late)%2 == 1 {
			m.late = append(m.late, do)
			return bus.ErrUnknownOutcome
		}
		do()
		return nil
	}
}

// danger draws a crash and a lost answer for the next operation.
func (m *machine) danger(t *rapid.T, points ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.point = rapid.SampledFrom(append([]string{"", "", ""}, points...)).Draw(t, "crash at")
	m.after = rapid.IntRange(0, 3).Draw(t, "after")
	if m.fake != nil {
		m.lost = rapid.SampledFrom([]int{0, 0, 0, 0, 1, 2, 3, 4}).Draw(t, "lost answer")
	}
}

func (m *machine) safe() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.point, m.lost = "", 0
}

// crashed takes the log out of use.
func (m *machine) crashed() {
	m.zombies = append(m.zombies, m.log)
	m.log = nil
	m.safe()
}

// only returns the one world there is; with a living log there is no doubt.
func (m *machine) only() *world { return &m.worlds[0] }

func (m *machine) drawHead(t *rapid.T) Head {
	m.seq += rapid.Uint64Range(0, 5).Draw(t, "records")
	w := m.only()
	return Head{
		Offsets: map[string]uint64{"ORDERS": m.seq}, Epoch: w.head.Epoch + rapid.Uint64Range(0, 1).Draw(t, "epoch"),
		Sinks: map[string]uint64{"TOTALS": m.seq * 2}, Records: m.seq,
		Published: rapid.Uint64Range(w.head.Published, m.log.N()).Draw(t, "published"),
	}
}

func drawBody(t *rapid.T, name string) []byte {
	size := rapid.SampledFrom([]int{0, 5, 60, 190, 201, 900, 2500}).Draw(t, name)
	return noise(rapid.Uint64().Draw(t, "seed"), size)
}

func (m *machine) drawDelta(t *rapid.T) []byte {
	delta := map[string]string{}
	for range rapid.IntRange(0, 3).Draw(t, "changes") {
		delta[rapid.SampledFrom([]string{"a", "b", "c", "d", "e"}).Draw(t, "key")] = string(drawBody(t, "value"))
	}
	return pairs(delta)
}

// commit makes one commit, and reports whether the process is still alive.
func (m *machine) commit(t *rapid.T, points ...string) bool {
	m.danger(t, points...)
	c := Commit{Head: m.drawHead(t), Delta: m.drawDelta(t), Outbox: drawBody(t, "outbox")}
	before := *m.only()
	after := before
	after.head, after.touched = c.Head, true
	after.commits = append(slices.Clone(before.commits), committed{m.log.N() + 1, c.Delta, c.Outbox, c.Sinks})
	point := m.point
	n, err := m.log.Append(m.ctx, c)
	switch {
	case err == nil && n != after.commits[len(after.commits)-1].n:
		t.Fatalf("commit got number %d", n)
	case err == nil:
		m.worlds = []world{after}
		m.safe()
		return true
	case !errors.Is(err, errCrash):
		t.Fatalf("commit: %v", err)
	}
	switch point {
	case PointChunkWritten:
	case PointCommitted:
		m.worlds = []world{after}
	default:
		m.worlds = []world{before, after}
	}
	m.crashed()
	return false
}

// base writes a base with commits in between.
func (m *machine) base(t *rapid.T) {
	b := m.log.BeginBase()
	for i, k := range []string{"a", "b", "c", "d", "e"} {
		if v, ok := m.only().state()[k]; ok {
			b.Add(pair(nil, k, v))
		}
		if i%2 == 1 && rapid.Bool().Draw(t, "commit while the base is written") && !m.commit(t, PointEntryUnacked) {
			b.Abort()
			return
		}
	}
	if rapid.IntRange(0, 9).Draw(t, "abort") == 0 {
		b.Abort()
		return
	}
	m.danger(t, PointChunkWritten, PointEntryUnacked, PointBaseWritten, PointPurged)
	before := *m.only()
	h := Head{Published: rapid.Uint64Range(0, m.log.N()).Draw(t, "published"), Sinks: map[string]uint64{"DEAD": m.seq}}
	after := before
	after.head, after.touched = before.head.confirm(h), true
	err := b.Finish(m.ctx, h)
	switch {
	case err == nil:
		m.worlds = []world{after}
		m.safe()
	case errors.Is(err, errCrash):
		m.worlds = []world{before, after}
		m.crashed()
	default:
		t.Fatalf("base: %v", err)
	}
}

func (m *machine) release(t *rapid.T) {
	h := m.drawHead(t)
	m.danger(t, PointEntryUnacked, PointCommitted)
	before := *m.only()
	after := before
	after.head, after.touched = h, true
	err := m.log.Release(m.ctx, h)
	switch {
	case err == nil:
		m.worlds = []world{after}
		m.crashed()
	case errors.Is(err, errCrash):
		m.worlds = []world{before, after}
		m.crashed()
	default:
		t.Fatalf("release: %v", err)
	}
}

// claim opens the task and compares what it finds with the worlds.
func (m *machine) claim(t *rapid.T) {
	if m.log != nil {
		m.crashed()
	}
	for {
		m.danger(t, PointEntryUnacked, PointCommitted)
		got := state{}
		l, r, err := m.store().Claim(m.ctx, testTask, got.load)
		m.safe()
		if errors.Is(err, errCrash) {
			m.gen++ // may be
			continue
		}
		if err != nil {
			t.Fatalf("claim: %v", err)
		}
		if r.Generation > m.gen+1 {
			t.Fatalf("generation %d after %d", r.Generation, m.gen)
		}
		m.log, m.gen = l, r.Generation
		var diffs []string
		for _, w := range m.worlds {
			diff := w.differs(r, got)
			if diff == "" {
				m.worlds = []world{w}
				return
			}
			diffs = append(diffs, diff)
		}
		t.Fatalf("recovered what was not committed; against each of the possible worlds: %v", diffs)
	}
}

// zombie lets a former owner try to write.
func (m *machine) zombie(t *rapid.T) {
	if len(m.zombies) == 0 {
		return
	}
	z := rapid.SampledFrom(m.zombies).Draw(t, "former owner")
	before, err := m.bucket.Last(m.ctx, testTask.logFilter())
	if err != nil {
		t.Fatal(err)
	}
	_, aerr := z.Append(m.ctx, Commit{Delta: drawBody(t, "delta")})
	b := z.BeginBase()
	b.Add(drawBody(t, "slice"))
	ferr := b.Finish(m.ctx, Head{})
	rerr := z.Release(m.ctx, Head{})
	if aerr == nil || ferr == nil || rerr == nil {
		t.Fatalf("a former owner wrote: %v, %v, %v", aerr, ferr, rerr)
	}
	after, err := m.bucket.Last(m.ctx, testTask.logFilter())
	if err != nil || !cmp.Equal(before, after) {
		t.Fatalf("a former owner changed the head: %v", err)
	}
}

func (m *machine) actions() map[string]func(*rapid.T) {
	alive := func(f func(*rapid.T)) func(*rapid.T) {
		return func(t *rapid.T) {
			if m.log == nil {
				m.claim(t)
			}
			f(t)
		}
	}
	commit := alive(func(t *rapid.T) { m.commit(t, PointChunkWritten, PointEntryUnacked, PointCommitted) })
	actions := map[string]func(*rapid.T){
		"commit": commit, "commit2": commit, "commit3": commit,
		"base": alive(m.base), "release": alive(m.release), "claim": m.claim, "zombie": alive(m.zombie),
	}
	if m.fake != nil {
		actions["late"] = func(t *rapid.T) {
			for _, do := range m.late {
				do()
			}
			m.late = nil
		}
	}
	return actions
}

// finish: after all this, everything is published and two bases are written.
// Nothing may be left but the last one.
func (m *machine) finish(t *rapid.T) {
	m.claim(t)
	for _, do := range m.late {
		do()
	}
	m.late = nil
	for range 2 {
		if _, err := m.log.Append(m.ctx, Commit{Head: Head{Published: m.log.N()}}); err != nil {
			t.Fatal(err)
		}
		b := m.log.BeginBase()
		m.only().state().addTo(b, 1)
		if err := b.Finish(m.ctx, Head{Published: m.log.N()}); err != nil {
			t.Fatal(err)
		}
	}
	if m.fake == nil {
		return
	}
	used := 0
	for _, v := range m.only().state() {
		used += len(v) + 100
	}
	if log, chunks := len(m.fake.sorted("log.>")), len(m.fake.sorted("chunk.>")); log != 1 || chunks > 1+used/200 {
		t.Fatalf("%d entries and %d chunks are left of a state of %d bytes: %v", log, chunks, used, slices.Sorted(maps.Keys(m.fake.items)))
	}
}

func TestStore_machine(t *testing.T) {
	// In virtual time, as retries wait.
	synctest.Test(t, func(t *testing.T) {
		// Not t itself: rapid would ask for its deadline, which a bubble forbids.
		rapid.Check(struct{ testing.TB }{t}, func(rt *rapid.T) {
			m := &machine{ctx: t.Context(), fake: newFake(), worlds: []world{{}}}
			m.bucket = m.fake
			m.fakeFaults()
			rt.Repeat(m.actions())
			m.finish(rt)
		})
	})
}

func TestStore_machineOnServer(t *testing.T) {
	conn := startBus(t)
	buckets := 0
	rapid.Check(t, func(rt *rapid.T) {
		buckets++
		b, err := conn.EnsureBucket(t.Context(), bus.BucketConfig{Name: fmt.Sprint("natsflow_", buckets)})
		if err != nil {
			rt.Fatal(err)
		}
		m := &machine{ctx: t.Context(), bucket: b, worlds: []world{{}}}
		rt.Repeat(m.actions())
		m.finish(rt)
	})
}
