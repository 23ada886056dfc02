package kvsnap

import (
	"bytes"
	"errors"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"natsflow/bus"
)

// damagedLog is a log with everything in it: a base in chunks, deltas and
// outboxes in entries and in chunks, all of them needed.
func damagedLog(t *testing.T) (*fakeBucket, state) {
	t.Helper()
	s, b := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	st := state{}
	commit := func(key string, size, out int) {
		value := string(noise(uint64(size), size))
		_ = st.load(pair(nil, key, value))
		c := Commit{Head: testHead(uint64(size)), Delta: pair(nil, key, value)}
		if out > 0 {
			c.Outbox = noise(uint64(out), out)
		}
		mustAppend(t, l, c)
	}
	commit("a", 3000, 0)
	commit("b", 100, 50)
	mustBase(t, l, st, Head{})
	commit("c", 2500, 1500)
	commit("d", 300, 0)
	commit("e", 700, 700)
	return b, st
}

// claimDamaged claims on a copy and sees to it that damage is found at a key,
// and that nothing is lost of what is there.
func claimDamaged(t *testing.T, b *fakeBucket, want string, what string) {
	t.Helper()
	before := b.snapshot()
	b.onPurge = func(func()) error {
		t.Errorf("%s: purged", what)
		return nil
	}
	s := newStore(b, testConfig())
	for range 2 {
		_, _, err := s.Claim(t.Context(), testTask, func([]byte) error { return nil })
		var damage *CorruptError
		if !errors.As(err, &damage) || !errors.Is(err, ErrSnapshotCorrupt) {
			t.Fatalf("%s: got %v, want a CorruptError", what, err)
		}
		if damage.Key != want && !(strings.HasPrefix(want, "chunk.") && strings.HasPrefix(damage.Key, want[:strings.LastIndexByte(want, '.')])) {
			t.Fatalf("%s: names %s, want %s", what, damage.Key, want)
		}
	}
	after := b.snapshot()
	for key, item := range before {
		if now := after[key]; now.Seq != item.Seq || now.Deleted != item.Deleted || !bytes.Equal(now.Value, item.Value) {
			t.Fatalf("%s: %s was changed", what, key)
		}
	}
	if len(after) > len(before)+1 {
		t.Fatalf("%s: two claims left %d entries", what, len(after)-len(before))
	}
}

func TestClaim_findsDamage(t *testing.T) {
	b, st := damagedLog(t)
	whole := newStore(b.copyOf(), testConfig())
	if _, r, got := mustClaim(t, whole, testTask); !maps.Equal(st, got) || len(r.Unpublished) != 3 {
		t.Fatalf("the whole log: %+v", r)
	}
	// The bodies of entries up to the base's From are not read: that delta in
	// chunks, and the base itself is the last entry that can replace it.
	dead := map[string]bool{}
	for key := range b.items {
		dead[key] = strings.HasPrefix(key, "chunk.0.3.2-1-")
	}
	head, _ := b.lastOf(testTask.logFilter())
	rng := rand.New(rand.NewPCG(3, 4))
	for key, item := range b.snapshot() {
		if dead[key] {
			continue
		}
		for range 8 {
			c, bit := b.copyOf(), rng.IntN(8*len(item.Value))
			bad := bytes.Clone(item.Value)
			bad[bit/8] ^= 1 << (bit % 8)
			c.items[key] = bus.Item{Key: key, Value: bad, Seq: item.Seq}
			claimDamaged(t, c, key, "flipped bit")
		}
		c := b.copyOf()
		c.items[key] = bus.Item{Key: key, Value: item.Value[:rng.IntN(len(item.Value))], Seq: item.Seq}
		claimDamaged(t, c, key, "truncated")

		c = b.copyOf()
		c.items[key] = bus.Item{Key: key, Seq: item.Seq, Deleted: true}
		claimDamaged(t, c, key, "deleted with a marker")

		if key == head.Key {
			continue // an end that is missing cannot be told from a shorter log
		}
		c = b.copyOf()
		delete(c.items, key)
		claimDamaged(t, c, key, "missing")
	}
	for key := range dead {
		if dead[key] {
			c := b.copyOf()
			delete(c.items, key)
			if _, _, got := mustClaim(t, newStore(c, testConfig()), testTask); !maps.Equal(st, got) {
				t.Error("a dead chunk was needed")
			}
		}
	}
}

// Whole values in the wrong places.
func TestClaim_findsMixedUpValues(t *testing.T) {
	b, _ := damagedLog(t)
	keys := map[string][]string{}
	for key := range b.items {
		if !strings.HasPrefix(key, "chunk.0.3.2-1-") {
			kind, _, _ := strings.Cut(key, ".")
			keys[kind] = append(keys[kind], key)
		}
	}
	for _, list := range keys {
		for i := range list {
			one, two := list[i], list[(i+1)%len(list)]
			c := b.copyOf()
			x, y := c.items[one], c.items[two]
			x.Value, y.Value = y.Value, x.Value
			c.items[one], c.items[two] = x, y
			s := newStore(c, testConfig())
			if _, _, err := s.Claim(t.Context(), testTask, nil); !errors.Is(err, ErrSnapshotCorrupt) {
				t.Errorf("%s and %s changed places: %v", one, two, err)
			}
		}
	}

	// The log of another flow, or of a task of that name in another flow.
	cfg := testConfig()
	cfg.Flow = "payments"
	if _, _, err := newStore(b.copyOf(), cfg).Claim(t.Context(), testTask, nil); !errors.Is(err, ErrSnapshotCorrupt) {
		t.Errorf("the log of another flow: %v", err)
	}

	// A chunk set that was written anew with other bytes of the same size.
	c := b.copyOf()
	for key, item := range maps.Clone(c.items) {
		if !strings.HasPrefix(key, "chunk.0.3.5-1-") {
			continue
		}
		task, set, i, _ := parseChunkKey(key)
		s := newStore(newFake(), testConfig())
		cs := chunkSet{count: i}
		var read chunkSet
		read.count = i
		raw, err := decodeChunk(s.codec, "orders", key, item.Value, &read)
		if err != nil {
			t.Fatal(err)
		}
		again, err := s.encodeChunk(task, set, &cs, noise(77, len(raw)))
		if err != nil {
			t.Fatal(err)
		}
		c.items[key] = bus.Item{Key: key, Value: again.Value, Seq: item.Seq}
	}
	if _, _, err := newStore(c, testConfig()).Claim(t.Context(), testTask, nil); !errors.Is(err, ErrSnapshotCorrupt) {
		t.Errorf("replaced chunks: %v", err)
	}
}

// An entry of a former generation behind one of a later generation.
func TestClaim_findsGenerationsOutOfOrder(t *testing.T) {
	s, b := fakeStore(testConfig())
	mustClaim(t, s, testTask)
	l, _, _ := mustClaim(t, s, testTask)
	mustAppend(t, l, Commit{})
	h := s.newHeader(KindCommit, testTask, 3, 1, Head{})
	if _, err := b.Append(t.Context(), testTask.entryKey(3), encodeTest(t, h), testTask.logFilter(), b.seq); err != nil {
		t.Fatal(err)
	}
	var damage *CorruptError
	if _, _, err := s.Claim(t.Context(), testTask, nil); !errors.As(err, &damage) || damage.Key != "log.0.3.3" {
		t.Errorf("got %v", err)
	}
}

// A damaged entry in front of the floor, left by a purge that did not happen, is
// nobody's loss.
func TestClaim_ignoresDamageInDeadEntries(t *testing.T) {
	s, b := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	st := state{}
	for _, k := range []string{"a", "b", "c"} {
		_ = st.load(pair(nil, k, "1"))
		mustAppend(t, l, Commit{Delta: pair(nil, k, "1")})
	}
	b.onPurge = func(func()) error { return bus.ErrUnknownOutcome }
	mustBase(t, l, st, Head{Published: l.N()})
	mustAppend(t, l, Commit{Delta: pair(nil, "d", "1")})
	st["d"] = "1"
	item := b.items["log.0.3.2"]
	item.Value = []byte("rubbish")
	b.items["log.0.3.2"] = item
	delete(b.items, "log.0.3.1")
	b.onPurge = nil
	l, r, got := mustClaim(t, s, testTask)
	if !maps.Equal(st, got) || r.Entries != 3 {
		t.Errorf("got %v, %+v", got, r)
	}
	mustBase(t, l, st, Head{Published: l.N()})
	if n := len(b.items); n != 2 {
		t.Errorf("%d items left", n)
	}
}

// Every probe point, each at its first few passes: the operation ends there with
// the probe's error, and the log is dead.
func TestLog_probe(t *testing.T) {
	crash := errors.New("crash")
	for _, point := range []string{PointChunkWritten, PointEntryUnacked, PointCommitted, PointBaseWritten, PointPurged} {
		for nth := range 4 {
			b := newFake()
			cfg := testConfig()
			cfg.Probe = probeAt(point, nth, crash)
			s := newStore(b, cfg)
			st := state{"a": string(noise(1, 2500))}
			err := func() error {
				l, _, err := s.Claim(t.Context(), testTask, nil)
				if err != nil {
					return err
				}
				for range 5 {
					if _, err := l.Append(t.Context(), Commit{Delta: pairs(st)}); err != nil {
						if _, again := l.Append(t.Context(), Commit{}); !errors.Is(again, crash) {
							t.Errorf("%s: the log lives on: %v", point, again)
						}
						return err
					}
					base := l.BeginBase()
					st.addTo(base, 100)
					if err := base.Finish(t.Context(), Head{}); err != nil {
						return err
					}
				}
				return nil
			}()
			if !errors.Is(err, crash) {
				t.Errorf("%s %d: got %v", point, nth, err)
			}
			if _, _, got := mustClaim(t, newStore(b, testConfig()), testTask); len(got) > 0 && !maps.Equal(st, got) {
				t.Errorf("%s %d: state differs", point, nth)
			}
		}
	}
}
