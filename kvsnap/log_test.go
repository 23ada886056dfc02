package kvsnap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
)

func fakeStore(cfg Config) (*Store, *fakeBucket) {
	b := newFake()
	return newStore(b, cfg), b
}

func TestLog_commitsSurvive(t *testing.T) {
	s, _ := fakeStore(testConfig())
	l, r, _ := mustClaim(t, s, testTask)
	if !r.Fresh || r.Generation != 1 || l.N() != 1 || l.Generation() != 1 {
		t.Fatalf("first claim: %+v, n %d", r, l.N())
	}
	big := string(noise(1, 3500)) // four chunks
	want := state{}
	for i, m := range []map[string]string{{"a": "1", "b": "2"}, {"big": big}, {"a": "", "c": "3"}} {
		c := Commit{Head: testHead(uint64(i + 1)), Delta: pairs(m)}
		if i != 1 {
			c.Outbox, c.Outputs = []byte(fmt.Sprint("out", i)), 1
		} else {
			c.Outbox, c.Outputs = noise(9, 2500), 7
		}
		if n := mustAppend(t, l, c); n != uint64(i+2) {
			t.Fatalf("commit %d is entry %d", i, n)
		}
		if err := want.load(c.Delta); err != nil {
			t.Fatal(err)
		}
	}
	_, r, got := mustClaim(t, s, testTask)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	wantR := Recovered{Generation: 2, Head: testHead(3), Entries: 5, StateBytes: r.StateBytes, Unpublished: []Pending{
		{N: 2, Outbox: []byte("out0"), Sinks: testHead(1).Sinks},
		{N: 3, Outbox: noise(9, 2500), Sinks: testHead(2).Sinks},
		{N: 4, Outbox: []byte("out2"), Sinks: testHead(3).Sinks},
	}}
	if diff := cmp.Diff(wantR, r); diff != "" {
		t.Error(diff)
	}
}

func TestLog_publishedIsChecked(t *testing.T) {
	s, _ := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	n := mustAppend(t, l, Commit{Outbox: []byte("x")})
	if _, err := l.Append(t.Context(), Commit{Head: Head{Published: n + 1}}); err == nil {
		t.Error("a commit confirmed an entry that does not exist")
	}
	mustAppend(t, l, Commit{Head: Head{Published: n}})
	mustAppend(t, l, Commit{Head: Head{Published: 0}}) // cannot go back
	if _, r, _ := mustClaim(t, s, testTask); r.Head.Published != n || len(r.Unpublished) != 0 {
		t.Errorf("published %d, pending %v", r.Head.Published, r.Unpublished)
	}
}

func TestLog_fencedIsSticky(t *testing.T) {
	s, b := fakeStore(testConfig())
	old, _, _ := mustClaim(t, s, testTask)
	base := old.BeginBase()
	base.Add([]byte("state"))
	l, _, _ := mustClaim(t, s, testTask)
	n := mustAppend(t, l, Commit{Delta: pairs(map[string]string{"a": "1"})})
	before := b.sorted("log.>")
	for range 2 {
		if _, err := old.Append(t.Context(), Commit{}); !errors.Is(err, bus.ErrFenced) {
			t.Errorf("append of the former owner: %v", err)
		}
	}
	if err := base.Finish(t.Context(), Head{}); !errors.Is(err, bus.ErrFenced) {
		t.Errorf("base of the former owner: %v", err)
	}
	if err := old.Release(t.Context(), Head{}); !errors.Is(err, bus.ErrFenced) {
		t.Errorf("release of the former owner: %v", err)
	}
	late := old.BeginBase()
	late.Add(make([]byte, 10000))
	if err := late.Finish(t.Context(), Head{}); !errors.Is(err, bus.ErrFenced) {
		t.Errorf("late base of the former owner: %v", err)
	}
	if diff := cmp.Diff(before, b.sorted("log.>")); diff != "" || l.N() != n || old.BaseDue() {
		t.Error("the former owner changed the log")
	}
}

// Claims that fail, and starts and stops without work, do not make the log
// longer, and lose nothing.
func TestLog_idleClaimsDoNotGrow(t *testing.T) {
	s, b := fakeStore(testConfig())
	for i := range 5 {
		l, r, _ := mustClaim(t, s, testTask)
		if !r.Fresh || r.Generation != uint64(i+1) {
			t.Fatalf("claim %d: %+v", i, r)
		}
		if i%2 == 0 {
			if err := l.Release(t.Context(), Head{}); err != nil {
				t.Fatal(err)
			}
			if _, err := l.Append(t.Context(), Commit{}); !errors.Is(err, ErrReleased) {
				t.Fatalf("append after release: %v", err)
			}
		}
	}
	l, _, _ := mustClaim(t, s, testTask)
	mustAppend(t, l, Commit{Head: testHead(5), Delta: pairs(map[string]string{"a": "1"}), Outbox: []byte("x")})
	final := testHead(5)
	final.Final = true
	if err := l.Release(t.Context(), final); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("unknown codec")
	for range 5 {
		if _, _, err := s.Claim(t.Context(), testTask, func([]byte) error { return broken }); !errors.Is(err, broken) {
			t.Fatal(err)
		}
	}
	_, r, got := mustClaim(t, s, testTask)
	if r.Fresh || r.Generation != 12 || r.Entries != 3 || len(r.Unpublished) != 1 || got["a"] != "1" {
		t.Errorf("got %+v, %v", r, got)
	}
	if diff := cmp.Diff(final, r.Head); diff != "" {
		t.Error(diff)
	}
	if n := len(b.sorted("log.>")); n != 3 {
		t.Errorf("%d entries", n)
	}
}

func TestLog_releaseOfAnUnusedTaskKeepsItsHead(t *testing.T) {
	s, _ := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	h := Head{Offsets: map[string]uint64{"ORDERS": 7}, Epoch: 1, Final: true}
	if err := l.Release(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if _, r, _ := mustClaim(t, s, testTask); r.Fresh || !cmp.Equal(r.Head, h) {
		t.Errorf("got %+v", r)
	}
}

// An answer that is lost, whether or not the entry was stored, is no error and
// makes exactly one entry.
func TestLog_lostAnswers(t *testing.T) {
	for _, stored := range []bool{true, false} {
		for _, class := range []error{bus.ErrUnknownOutcome, bus.ErrConflict} {
			t.Run(fmt.Sprint(class, "/stored=", stored), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s, b := fakeStore(testConfig())
					failures := 0
					b.onAppend = func(_ string, store func() (uint64, error)) (uint64, error) {
						if failures++; failures%3 != 0 {
							if stored {
								if _, err := store(); err != nil && failures%3 == 1 {
									return 0, err
								}
							}
							return 0, class
						}
						return store()
					}
					l, _, _ := mustClaim(t, s, testTask)
					for i := range 5 {
						mustAppend(t, l, Commit{Delta: pairs(map[string]string{fmt.Sprint(i): "1"})})
					}
					if err := l.Release(t.Context(), Head{}); err != nil {
						t.Fatal(err)
					}
					b.onAppend = nil
					_, r, got := mustClaim(t, s, testTask)
					if len(got) != 5 || r.Generation != 2 || r.Entries != 7 {
						t.Errorf("got %v, %+v", got, r)
					}
				})
			})
		}
	}
}

// The context ends while no answer comes: nobody knows, so the log is closed.
func TestLog_unknownOutcomeIsSticky(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := fakeStore(testConfig())
		l, _, _ := mustClaim(t, s, testTask)
		b.onAppend = func(string, func() (uint64, error)) (uint64, error) { return 0, bus.ErrUnknownOutcome }
		b.onLast = func() (*bus.Item, error) { return nil, bus.ErrUnknownOutcome }
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := l.Append(ctx, Commit{}); !errors.Is(err, bus.ErrUnknownOutcome) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
		b.onAppend, b.onLast = nil, nil
		if _, err := l.Append(t.Context(), Commit{}); !errors.Is(err, bus.ErrUnknownOutcome) {
			t.Fatalf("got %v", err)
		}
		if _, r, _ := mustClaim(t, s, testTask); r.Generation != 2 {
			t.Fatalf("got %+v", r)
		}
	})
}

// After a lost answer the head is read from a server that does not know yet that
// it leads no more. Its old answer says nothing.
func TestLog_staleHead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := fakeStore(testConfig())
		l, _, _ := mustClaim(t, s, testTask)
		stale, _ := b.Last(t.Context(), testTask.logFilter())
		mustAppend(t, l, Commit{Delta: pair(nil, "a", "1")})
		b.onAppend = func(_ string, store func() (uint64, error)) (uint64, error) {
			_, err := store()
			return 0, errors.Join(err, bus.ErrUnknownOutcome)
		}
		looks := 0
		b.onLast = func() (*bus.Item, error) {
			if looks++; looks < 5 {
				return &stale, nil
			}
			return nil, nil
		}
		if n := mustAppend(t, l, Commit{Delta: pair(nil, "b", "2")}); n != 3 || looks != 5 {
			t.Errorf("entry %d after %d looks", n, looks)
		}
		b.onAppend, b.onLast = nil, nil
		if _, _, got := mustClaim(t, s, testTask); !maps.Equal(got, state{"a": "1", "b": "2"}) {
			t.Errorf("got %v", got)
		}
	})
}

// An entry never has more than ChunkSize of bodies, and no more is moved to
// chunks than has to be.
func TestLog_placesBodies(t *testing.T) {
	for _, tt := range []struct {
		delta, outbox int
		chunks        [2]int // of delta and outbox
	}{
		{400, 600, [2]int{}},
		{401, 600, [2]int{0, 1}},
		{600, 401, [2]int{1, 0}},
		{1000, 0, [2]int{}},
		{1001, 0, [2]int{2, 0}},
		{0, 2001, [2]int{0, 3}},
		{1000, 1000, [2]int{1, 0}},
		{5000, 5000, [2]int{5, 5}},
	} {
		s, b := fakeStore(testConfig())
		l, _, _ := mustClaim(t, s, testTask)
		c := Commit{Delta: noise(1, tt.delta), Outbox: noise(2, tt.outbox)}
		n := mustAppend(t, l, c)
		head, _ := b.lastOf(testTask.logFilter())
		if len(head.Value) > 1000+700 {
			t.Errorf("%d and %d bytes: an entry of %d", tt.delta, tt.outbox, len(head.Value))
		}
		e, err := s.decodeItem(head)
		if err != nil {
			t.Fatal(err)
		}
		var chunks [2]int
		for _, sec := range e.Sections {
			if sec.Name == sectionOutbox {
				chunks[1] = sec.Chunks
			} else {
				chunks[0] = sec.Chunks
			}
		}
		if chunks != tt.chunks {
			t.Errorf("%d and %d bytes: chunks %v, want %v", tt.delta, tt.outbox, chunks, tt.chunks)
		}
		var delta []byte
		_, r, err := s.Claim(t.Context(), testTask, func(body []byte) error { delta = body; return nil })
		if err != nil || !bytes.Equal(delta, c.Delta) {
			t.Errorf("%d bytes of delta came back, %v", len(delta), err)
		}
		if tt.outbox > 0 && (len(r.Unpublished) != 1 || r.Unpublished[0].N != n || !bytes.Equal(r.Unpublished[0].Outbox, c.Outbox)) {
			t.Errorf("outbox of %d bytes did not come back", tt.outbox)
		}
	}
}

// A context that has ended before anything was sent closes nothing.
func TestLog_endedContext(t *testing.T) {
	s, _ := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Append(ctx, Commit{}); !errors.Is(err, context.Canceled) || errors.Is(err, bus.ErrUnknownOutcome) {
		t.Fatalf("got %v", err)
	}
	mustAppend(t, l, Commit{})
}

// The bucket is full after an attempt that was not answered; the caller makes a
// larger commit; then the first attempt arrives after all. What is stored is not
// what the caller holds, so the log must be opened again.
func TestLog_lateAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := fakeStore(testConfig())
		l, _, _ := mustClaim(t, s, testTask)
		var late func() (uint64, error)
		b.onAppend = func(_ string, store func() (uint64, error)) (uint64, error) {
			if late == nil {
				late = store
				return 0, bus.ErrUnknownOutcome
			}
			return 0, bus.ErrNoSpace
		}
		first := Commit{Delta: noise(1, 3000)}
		if _, err := l.Append(t.Context(), first); !errors.Is(err, bus.ErrNoSpace) {
			t.Fatalf("got %v", err)
		}
		b.onAppend = nil
		if _, err := late(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := l.Append(t.Context(), Commit{Delta: noise(2, 10)}); !errors.Is(err, bus.ErrUnknownOutcome) {
				t.Fatalf("got %v", err)
			}
		}
		var got [][]byte
		_, _, err := s.Claim(t.Context(), testTask, func(body []byte) error { got = append(got, body); return nil })
		if err != nil || len(got) != 1 || !bytes.Equal(got[0], first.Delta) {
			t.Fatalf("recovered %d bodies, %v", len(got), err)
		}
	})
}

func TestLog_fullBucket(t *testing.T) {
	s, b := fakeStore(testConfig())
	l, _, _ := mustClaim(t, s, testTask)
	mustAppend(t, l, Commit{Delta: pairs(map[string]string{"a": "1"})})
	full := b.snapshot()
	b.limit = b.used + 2500
	big := Commit{Delta: pairs(map[string]string{"b": string(noise(1, 5000))})}
	for range 3 {
		if _, err := l.Append(t.Context(), big); !errors.Is(err, bus.ErrNoSpace) {
			t.Fatalf("got %v", err)
		}
		base := l.BeginBase()
		base.Add(noise(2, 6000))
		if err := base.Finish(t.Context(), Head{}); !errors.Is(err, bus.ErrNoSpace) {
			t.Fatalf("base: %v", err)
		}
	}
	if diff := cmp.Diff(full, b.snapshot()); diff != "" {
		t.Errorf("refused writes left something behind: %s", diff)
	}
	if _, _, got := mustClaim(t, s, testTask); got["a"] != "1" {
		t.Errorf("got %v", got)
	}
	b.limit = 0
	l, _, _ = mustClaim(t, s, testTask)
	if _, err := l.Append(t.Context(), big); err != nil {
		t.Fatal(err)
	}
}

// A successor claims, commits and purges while a claim is being read: that one
// is overtaken, and not the victim of damage.
func TestClaim_overtaken(t *testing.T) {
	for _, key := range []string{"log.", "chunk."} {
		t.Run(key, func(t *testing.T) {
			s, b := fakeStore(testConfig())
			l, _, _ := mustClaim(t, s, testTask)
			st := state{"big": string(noise(1, 5000))}
			mustAppend(t, l, Commit{Delta: pairs(st)})
			mustBase(t, l, st, Head{})
			b.onRead = func(item bus.Item) {
				if !strings.HasPrefix(item.Key, key) {
					return
				}
				b.onRead = nil
				l2, _, st2 := mustClaim(t, s, testTask)
				mustAppend(t, l2, Commit{Head: Head{Published: 2}})
				mustBase(t, l2, st2, Head{Published: l2.N()})
			}
			if _, _, err := s.Claim(t.Context(), testTask, state{}.load); !errors.Is(err, bus.ErrFenced) || b.onRead != nil {
				t.Errorf("got %v", err)
			}
			if _, _, got := mustClaim(t, s, testTask); !maps.Equal(got, st) {
				t.Error("state differs")
			}
		})
	}
}

func TestClaim_lostRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := fakeStore(testConfig())
		l, _, _ := mustClaim(t, s, testTask)
		mustAppend(t, l, Commit{Delta: pairs(map[string]string{"a": "1"})})
		other := newStore(b, testConfig())
		races := 0
		b.onAppend = func(_ string, store func() (uint64, error)) (uint64, error) {
			if races++; races <= 2 {
				hook := b.onAppend
				b.onAppend = nil
				l2, _, _ := mustClaim(t, other, testTask)
				if races == 2 { // the other one is at work already, under the generation that we meant to take
					mustAppend(t, l2, Commit{Delta: pairs(map[string]string{"b": "2"})})
				}
				b.onAppend = hook
			}
			return store()
		}
		_, r, got := mustClaim(t, s, testTask)
		if want := (state{"a": "1", "b": "2"}); r.Generation != 4 || !maps.Equal(got, want) {
			t.Errorf("generation %d, %v", r.Generation, got)
		}
	})
}

// A chunk batch that was sent twice may be stored out of order.
func TestClaim_chunksOutOfOrder(t *testing.T) {
	s, b := fakeStore(testConfig())
	b.onPut = func(items []bus.Item, store func() error) error {
		slices.Reverse(items)
		return store()
	}
	l, _, _ := mustClaim(t, s, testTask)
	st := state{"big": string(noise(1, 7500)), "small": "1"}
	delta := state{"other": string(noise(2, 7500))}
	mustAppend(t, l, Commit{Delta: pairs(st)})
	mustBase(t, l, st, Head{Published: 1})
	mustAppend(t, l, Commit{Delta: pairs(delta)})
	_, _, got := mustClaim(t, s, testTask)
	st["other"] = delta["other"]
	if !maps.Equal(st, got) {
		t.Error("state differs")
	}
}

func TestStore_configIsChecked(t *testing.T) {
	s := New(Config{ChunkSize: -1, MinBaseBytes: -1})
	_, _, err := s.Claim(t.Context(), testTask, nil)
	for _, want := range []string{"no flow", "chunk size -1", "no bucket", "negative"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %q", err, want)
		}
	}
	if _, err := s.Tasks(t.Context()); err == nil {
		t.Error("Tasks went on")
	}
	ok, _ := fakeStore(testConfig())
	if _, _, err := ok.Claim(t.Context(), TaskID{Stage: -1}, nil); err == nil {
		t.Error("negative stage was accepted")
	}
}
