package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
)

func TestMember_join(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.wantShared(0, soon, group(a))
		time.Sleep(time.Minute)
		had := a.holds()
		b := s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		if kept := a.holds(); len(kept) != 4 || slices.ContainsFunc(kept, func(task string) bool { return !slices.Contains(had, task) }) {
			t.Errorf("a has %v of %v", kept, had)
		}
		time.Sleep(time.Minute)
		hadA, hadB, revs := a.holds(), b.holds(), s.revisions(a.c)
		c := s.join("c")
		s.wantShared(0, time.Second, group(a, b, c))
		if !containsAll(hadA, a.holds()) || !containsAll(hadB, b.holds()) {
			t.Errorf("a %v of %v, b %v of %v", a.holds(), hadA, b.holds(), hadB)
		}
		// Only what c has moved: it was released, and taken.
		moved := 0
		for key, rev := range s.revisions(a.c) {
			task, isTask := strings.CutPrefix(key, "f.task.")
			if isTask && rev != revs[key] {
				moved++
				if !c.has(task) {
					t.Errorf("task %s was written", task)
				}
			}
		}
		if moved != 2 {
			t.Errorf("%d tasks moved, want 2", moved)
		}
		s.wantStays(10*time.Minute, eight(), a, b, c)

		list, assigned, err := b.c.Members(s.ctx)
		if err != nil || len(list) != 3 {
			t.Fatalf("members %+v, %v", list, err)
		}
		for i, p := range group(a, b, c) {
			m := list[i]
			if m.Name != p.m.Name() || !slices.Equal(m.Tasks, p.holds()) || !slices.Equal(m.Tasks, assigned.Owners[m.Name]) {
				t.Errorf("member %+v, assigned %v", m, assigned)
			}
			if m.Age > ttl || m.TTL != ttl || m.PID == 0 || m.Host == "" || m.Hash != "h1" || !m.Settled || m.Leaving {
				t.Errorf("member %+v", m)
			}
		}
		if assigned.Generation != 3 {
			t.Errorf("assignment %+v", assigned)
		}
	})
}

func containsAll(all, some []string) bool {
	return !slices.ContainsFunc(some, func(x string) bool { return !slices.Contains(all, x) })
}

func TestMember_leave(t *testing.T) {
	bubble(t, func(s *site) {
		a, b, c := s.join("a"), s.join("b"), s.join("c")
		s.wantShared(0, time.Second, group(a, b, c))
		time.Sleep(time.Minute)
		a.leave()
		s.wantShared(0, soon, group(b, c), a)
		b.leave()
		s.wantShared(0, soon, group(c), a, b)
		// The names are free again.
		a = s.join("a")
		s.wantShared(0, time.Second, group(a, c))
		c.leave()
		s.wantShared(0, soon, group(a), c)
		a.leave()
		// Nobody is there, and the next one begins at once.
		time.Sleep(time.Minute)
		b = s.join("b")
		s.wantShared(0, soon, group(b))
	})
}

// TestMember_yield: the others know at once what they will get, and get it when it
// is released.
func TestMember_yield(t *testing.T) {
	bubble(t, func(s *site) {
		a, b, c := s.join("a"), s.join("b"), s.join("c")
		s.wantShared(0, time.Second, group(a, b, c))
		time.Sleep(time.Minute)
		had := a.holds()
		// A worker that has to finish what it does before it can release.
		a.mu.Lock()
		a.passive = true
		a.mu.Unlock()
		_, changed := a.m.Wanted()
		if err := a.m.Yield(s.ctx); err != nil {
			t.Fatal(err)
		}
		<-changed
		if wanted, _ := a.m.Wanted(); wanted == nil || len(wanted) != 0 {
			t.Errorf("wanted %v", wanted)
		}
		time.Sleep(10 * time.Millisecond)
		var wanted []string
		for _, p := range group(b, c) {
			of, _ := p.m.Wanted()
			wanted = append(wanted, of...)
		}
		if !slices.Equal(sortedSet(wanted), eight()) {
			t.Errorf("assigned to the others: %v", wanted)
		}
		if !a.m.Trusted() {
			t.Error("not trusted")
		}
		s.wantShared(0, soon, group(b, c), a)
		if len(a.holds()) != 0 {
			t.Errorf("holds %v of %v", a.holds(), had)
		}
		// It is not assigned anything any more, whatever the others do.
		d := s.join("d")
		s.wantShared(0, time.Second, group(b, c, d), a)
		s.wantStays(5*time.Minute, eight(), b, c, d)
		list, assigned, err := b.c.Members(s.ctx)
		if err != nil || len(list) != 4 || !list[0].Leaving || len(assigned.Owners) != 3 {
			t.Errorf("members %+v, %+v, %v", list, assigned, err)
		}
		a.leave()
		s.wantStays(time.Minute, eight(), b, c, d)
		if err := a.m.Yield(s.ctx); !errors.Is(err, ErrLeaseLost) {
			t.Errorf("error %v", err)
		}
	})
}

// TestMember_yieldAll: all of them leave at once, as at the end of a deployment.
func TestMember_yieldAll(t *testing.T) {
	bubble(t, func(s *site) {
		var all []*process
		for i := range 8 {
			all = append(all, s.join(fmt.Sprint("w", i)))
		}
		s.wantShared(0, 2*time.Second, all)
		time.Sleep(time.Minute)
		start := time.Now()
		var wg sync.WaitGroup
		for _, p := range all {
			wg.Go(func() {
				if err := p.m.Yield(s.ctx); err != nil {
					t.Error(err)
				}
				if err := p.shut(s.ctx); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if took := time.Since(start); took > time.Second {
			t.Errorf("took %v", took)
		}
		tasks, err := all[0].c.Tasks(s.ctx)
		if err != nil || len(tasks) != 8 {
			t.Fatalf("tasks %v, %v", tasks, err)
		}
		for task, rec := range tasks {
			if !rec.Free() {
				t.Errorf("task %s: %+v", task, rec)
			}
		}
		// They take nothing back: a freed task is not wanted by who leaves.
		if list, assigned, err := all[0].c.Members(s.ctx); err != nil || len(list) != 0 || len(assigned.Owners) != 0 {
			t.Errorf("members %v, %v, %v", list, assigned, err)
		}
	})
}

func TestMember_moreThanTasks(t *testing.T) {
	bubble(t, func(s *site) {
		few := func(name string) *process {
			return s.joinWith(func(c *Config) { c.Tasks = taskNames(1, 2); joining(name)(c) }, nil)
		}
		tasks := taskNames(1, 2)
		a, b, c := few("a"), few("b"), few("c")
		s.wantSharedTasks(0, time.Second, tasks, group(a, b, c))
		s.wantStays(10*time.Minute, tasks, a, b, c)
		idle := group(a, b, c)[slices.IndexFunc(group(a, b, c), func(p *process) bool { return len(p.holds()) == 0 })]
		if wanted, _ := idle.m.Wanted(); wanted == nil || len(wanted) != 0 {
			t.Errorf("wanted %#v", wanted)
		}
		if n := s.log.count("standing by"); n == 0 {
			t.Error("no line about standing by")
		}
		// One that stands by takes over.
		dead := group(a, b, c)[slices.IndexFunc(group(a, b, c), func(p *process) bool { return len(p.holds()) > 0 })]
		dead.kill()
		rest := slices.DeleteFunc(group(a, b, c), func(p *process) bool { return p == dead })
		s.wantSharedTasks(ttl/2, ttl+time.Second, tasks, rest, dead)
	})
}

func TestMember_dies(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.wantShared(0, soon, group(a))
		b := s.join("b")
		c := s.join("c")
		s.wantShared(0, time.Second, group(a, b, c))
		time.Sleep(time.Minute + ttl/7)
		a.kill()
		s.wantShared(ttl/2, ttl+time.Second, group(b, c), a)
		if a.m.Trusted() {
			t.Error("trusted at the time of the take-over")
		}
		if err := a.ended(); err == nil {
			t.Error("ended without an error")
		}
		s.wantStays(5*time.Minute, eight(), b, c)
	})
}

// TestMember_neighboursDie kills any two, or all but one, of five at the same time.
func TestMember_neighboursDie(t *testing.T) {
	for _, dead := range [][]int{{0, 1}, {1, 2}, {4, 0}, {0, 2}, {1, 2, 3}, {0, 1, 2, 3}} {
		t.Run(fmt.Sprint(dead), func(t *testing.T) {
			bubble(t, func(s *site) {
				var all, rest, gone []*process
				for i := range 5 {
					all = append(all, s.join(fmt.Sprint("w", i)))
				}
				s.wantShared(0, time.Second, all)
				time.Sleep(time.Minute)
				for i, p := range all {
					if slices.Contains(dead, i) {
						p.kill()
						gone = append(gone, p)
					} else {
						rest = append(rest, p)
					}
				}
				s.wantShared(ttl/2, ttl+time.Second, rest, gone...)
				s.wantStays(5*time.Minute, eight(), rest...)
			})
		})
	}
}

func TestMember_allDie(t *testing.T) {
	bubble(t, func(s *site) {
		a, b := s.join("a"), s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		time.Sleep(time.Minute)
		a.kill()
		b.kill()
		// One of them is restarted at once under its name, another under a new one.
		a2, c := s.join("a"), s.join("c")
		s.wantShared(ttl/2, ttl+time.Second, group(a2, c), a, b)
		a2.kill()
		c.kill()
		time.Sleep(time.Hour)
		d := s.join("d")
		s.wantShared(0, soon, group(d), a2, c)
	})
}

// TestMember_frozen freezes a process at every tenth of a renewal's interval, and
// has all it had sent arrive late.
func TestMember_frozen(t *testing.T) {
	for i := range 10 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			bubble(t, func(s *site) {
				a := s.join("a")
				s.wantShared(0, soon, group(a))
				b := s.join("b")
				s.wantShared(0, time.Second, group(a, b))
				time.Sleep(time.Minute + time.Duration(i)*ttl/30)
				a.freeze()
				s.wantShared(ttl/2, ttl+time.Second, group(b), a)
				if a.m.Trusted() {
					t.Error("trusted")
				}
				a.thaw()
				a.wantEnd(ErrLeaseLost)
				s.wantStays(10*time.Second, eight(), b)
			})
		})
	}
}

func TestMember_ttl(t *testing.T) {
	for _, lease := range []time.Duration{2 * time.Second, 30 * time.Second} {
		t.Run(lease.String(), func(t *testing.T) {
			bubble(t, func(s *site) {
				c := s.open(joining("a"), func(c *Config) { c.LeaseTTL = lease })
				m, err := c.Join(s.ctx)
				if err != nil {
					t.Fatal(err)
				}
				if wanted, _ := m.Wanted(); wanted != nil {
					t.Errorf("wanted %v before the first look", wanted)
				}
				// Without Run it is not renewed.
				start := time.Now()
				time.Sleep(lease*3/4 - time.Millisecond)
				if !m.Trusted() {
					t.Errorf("not trusted after %v", time.Since(start))
				}
				time.Sleep(2 * time.Millisecond)
				if m.Trusted() {
					t.Errorf("trusted after %v", time.Since(start))
				}
				if err := m.Run(s.ctx); !errors.Is(err, ErrLeaseLost) {
					t.Errorf("error %v", err)
				}
				if err := m.Run(s.ctx); err == nil {
					t.Error("ran twice")
				}
				if _, held, err := m.Acquire(s.ctx, "0.0"); held || !errors.Is(err, ErrLeaseLost) {
					t.Errorf("held %v, %v", held, err)
				}
				time.Sleep(lease)
				if list, _, err := c.Members(s.ctx); err != nil || len(list) != 0 {
					t.Errorf("members %v, %v", list, err)
				}
				if err := m.Leave(s.ctx); err != nil {
					t.Error(err)
				}
				if err := m.Run(s.ctx); err != nil {
					t.Errorf("after leaving: %v", err)
				}
			})
		})
	}
}

// TestMember_outage: an interruption shorter than the trust is nobody's business,
// a longer one ends it, and one can join again.
func TestMember_outage(t *testing.T) {
	bubble(t, func(s *site) {
		a, b := s.join("a"), s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		for range 20 {
			a.link.Cut()
			time.Sleep(ttl / 5)
			a.link.Heal()
			s.wantStays(ttl, eight(), a, b)
		}
		a.link.Cut()
		a.wantEnd(ErrLeaseLost)
		s.wantShared(0, ttl+time.Second, group(b), a)
		a.link.Heal()
		m, err := a.c.Join(s.ctx)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- m.Run(s.ctx) }()
		for wanted, changed := m.Wanted(); len(wanted) != 4; wanted, changed = m.Wanted() {
			<-changed
		}
		if err := m.Leave(s.ctx); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		s.wantShared(0, soon, group(b))
		// Both are cut off for a moment: who comes back finds it as it was.
		a = s.join("a")
		s.wantShared(0, time.Second, group(a, b))
		a.link.Cut()
		b.link.Cut()
		time.Sleep(ttl / 5)
		a.link.Heal()
		b.link.Heal()
		s.wantStays(time.Minute, eight(), a, b)
	})
}

func TestMember_status(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.wantShared(0, soon, group(a))
		status := func() string {
			list, _, err := a.c.Members(s.ctx)
			if err != nil || len(list) != 1 {
				t.Fatalf("members %v, %v", list, err)
			}
			return string(list[0].Status)
		}
		a.m.SetStatus(json.RawMessage(`{"n":1}`))
		time.Sleep(ttl/3 + soon)
		if got := status(); got != `{"n":1}` {
			t.Errorf("status %s", got)
		}
		rev := func() uint64 {
			item, err := a.c.bucket.Get(s.ctx, a.m.key)
			if err != nil {
				t.Fatal(err)
			}
			return item.Seq
		}
		before := rev()
		for i := range 100 {
			a.m.SetStatus(json.RawMessage(fmt.Sprintf(`{"n":%d}`, i)))
			a.m.PushStatus()
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(statusPause + soon)
		if got := status(); got != `{"n":99}` {
			t.Errorf("status %s", got)
		}
		if n := rev() - before; n < 4 || n > 7 {
			t.Errorf("%d writes in a second", n)
		}
	})
}

// TestMember_tell: who lists the members after Tell has returned sees the stop.
func TestMember_tell(t *testing.T) {
	bubble(t, func(s *site) {
		a, b := s.join("a"), s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		time.Sleep(time.Minute)
		stops := func() (stops []Stopped) {
			list, _, err := b.c.Members(s.ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range list {
				if m.Stopped != nil {
					stops = append(stops, *m.Stopped)
				}
			}
			return stops
		}
		start := time.Now()
		for i, p := range group(a, b) {
			stop := &Stopped{Epoch: 1, Positions: map[string]uint64{"IN": uint64(70 + i)}, Tasks: p.holds()}
			if err := p.m.Tell(s.ctx, stop); err != nil {
				t.Fatal(err)
			}
			cut, ok := CutOf(stops(), eight(), 1)
			if ok != (i == 1) || cut["IN"] != uint64(70+i) {
				t.Errorf("cut %v, %v", cut, ok)
			}
		}
		if took := time.Since(start); took > soon {
			t.Errorf("took %v", took)
		}
		// It stays, whatever the renewals, and until it is taken back.
		time.Sleep(time.Minute)
		if got := stops(); len(got) != 2 {
			t.Errorf("stops %v", got)
		}
		if err := a.m.Tell(s.ctx, nil); err != nil {
			t.Error(err)
		}
		if got := stops(); len(got) != 1 {
			t.Errorf("stops %v", got)
		}
		// It waits for a server that is away for a moment, and not for ever.
		a.link.Cut()
		time.AfterFunc(ttl/4, a.link.Heal)
		if err := a.m.Tell(s.ctx, &Stopped{Epoch: 2}); err != nil {
			t.Error(err)
		}
		if got := stops(); len(got) != 2 {
			t.Errorf("stops %v", got)
		}
		a.link.Cut()
		if err := a.m.Tell(s.ctx, &Stopped{Epoch: 3}); !errors.Is(err, ErrLeaseLost) {
			t.Errorf("error %v", err)
		}
		a.wantEnd(ErrLeaseLost)
		ctx, cancel := context.WithTimeout(s.ctx, time.Second)
		defer cancel()
		b.link.Cut()
		if err := b.m.Tell(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
	})
}

// TestMember_final: what the last owner says of a task stays until the next one.
func TestMember_final(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.wantShared(0, soon, group(a))
		a.mu.Lock()
		a.passive = true
		a.mu.Unlock()
		final := &Final{Epoch: 3, Results: 10, DeadLetters: 1, Bytes: 1 << 20, Worker: "a", Time: scriptTime(3)}
		if err := a.m.Release(s.ctx, "0.1", final); err != nil {
			t.Fatal(err)
		}
		// A second time, and of one that is another's: nothing.
		for _, task := range []string{"0.1", "none"} {
			if err := a.m.Release(s.ctx, task, nil); err != nil {
				t.Error(err)
			}
		}
		tasks, err := a.c.Tasks(s.ctx)
		if err != nil || len(tasks) != 8 {
			t.Fatalf("tasks %v, %v", tasks, err)
		}
		if d := cmp.Diff(final, tasks["0.1"].Final); d != "" || !tasks["0.1"].Free() || tasks["0.1"].Since.IsZero() {
			t.Errorf("record %+v %s", tasks["0.1"], d)
		}
		if rec := tasks["0.0"]; rec.Owner != "a" || rec.Instance != a.m.Instance() || rec.Final != nil || rec.Revision == 0 {
			t.Errorf("record %+v", rec)
		}
		rec, held, err := a.m.Acquire(s.ctx, "0.1")
		if err != nil || !held || rec.Final != nil || rec.Owner != "a" {
			t.Errorf("record %+v, %v, %v", rec, held, err)
		}
		if again, held, err := a.m.Acquire(s.ctx, "0.1"); err != nil || !held || again.Revision != rec.Revision {
			t.Errorf("record %+v, %v, %v", again, held, err)
		}
		// Releasing waits for a server that is away.
		a.link.Cut()
		time.AfterFunc(ttl/4, a.link.Heal)
		if err := a.m.Release(s.ctx, "0.1", final); err != nil {
			t.Error(err)
		}
		if _, _, err := a.m.Acquire(s.ctx, "no task"); err == nil {
			t.Error("acquired what is not a name of a task")
		}
	})
}

// TestMember_acquireAnothers: an assignment is not asked for, a lease is.
func TestMember_acquireAnothers(t *testing.T) {
	bubble(t, func(s *site) {
		a, b := s.join("a"), s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		task := a.holds()[0]
		rec, held, err := b.m.Acquire(s.ctx, task)
		if err != nil || held || rec.Owner != "a" || rec.Instance != a.m.Instance() {
			t.Errorf("record %+v, %v, %v", rec, held, err)
		}
		if _, err := b.c.bucket.Put(s.ctx, taskKey("f", task), []byte("x"), 0); err != nil {
			t.Fatal(err)
		}
		if _, held, err := b.m.Acquire(s.ctx, task); held || !errors.Is(err, ErrRecord) {
			t.Errorf("held %v, %v", held, err)
		}
		if _, err := b.c.Tasks(s.ctx); !errors.Is(err, ErrRecord) {
			t.Errorf("error %v", err)
		}
		b.link.Cut()
		if _, held, err := b.m.Acquire(s.ctx, task); held || !bus.Retryable(err) {
			t.Errorf("held %v, %v", held, err)
		}
	})
}

func TestMember_cancelled(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.wantShared(0, soon, group(a))
		a.stop()
		a.wantEnd(context.Canceled)
		if err := a.shut(s.ctx); err != nil {
			t.Error(err)
		}
		b := s.join("b")
		s.wantShared(0, soon, group(b))
		// Leaving is bounded by its context also when the server is away.
		b.link.Cut()
		ctx, cancel := context.WithTimeout(s.ctx, 2*time.Second)
		defer cancel()
		if err := b.m.Leave(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		b.wantEnd(nil)
	})
}

func TestMember_removedByHand(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.wantShared(0, soon, group(a))
		if err := a.c.bucket.Delete(s.ctx, a.m.key, 0); err != nil {
			t.Fatal(err)
		}
		a.wantEnd(ErrLeaseLost)
		b := s.join("b")
		s.wantShared(0, soon, group(b), a)
		// The assignment alone is no loss.
		if err := b.c.bucket.Delete(s.ctx, assignmentKey("f"), 0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(soon)
		if _, assigned, err := b.c.Members(s.ctx); err != nil || len(assigned.Owners["b"]) != 8 {
			t.Errorf("assignment %v, %v", assigned, err)
		}
		s.wantStays(time.Minute, eight(), b)
		if _, err := b.c.bucket.Put(s.ctx, assignmentKey("f"), []byte("x"), 0); err != nil {
			t.Fatal(err)
		}
		b.wantEnd(ErrRecord)
	})
}

// TestMember_dropped: somebody wrote an assignment without a member that lives.
func TestMember_dropped(t *testing.T) {
	bubble(t, func(s *site) {
		a, b := s.join("a"), s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		wrong := Assignment{Version: 1, Generation: 77, Hash: "h1", Owners: map[string][]string{"a": eight()}}
		_, rev, err := a.c.readAssignment(s.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.c.writeAssignment(s.ctx, wrong, rev); err != nil {
			t.Fatal(err)
		}
		time.Sleep(soon)
		s.wantShared(0, time.Second, group(a, b))
		if _, assigned, err := a.c.Members(s.ctx); err != nil || assigned.Generation != 78 {
			t.Errorf("assignment %v, %v", assigned, err)
		}
	})
}

// TestMember_lostHint: the mark of a member's end was gone before its neighbour
// could see it.
func TestMember_lostHint(t *testing.T) {
	bubble(t, func(s *site) {
		a, b := s.join("a"), s.join("b")
		s.wantShared(0, time.Second, group(a, b))
		time.Sleep(time.Minute)
		a.kill()
		if err := b.c.bucket.Purge(s.ctx, a.m.key, 0); err != nil {
			t.Fatal(err)
		}
		s.wantShared(0, ttl*5/3+soon, group(b), a)
	})
}

// TestMember_definitions: of two definitions that start at the same time one runs,
// and another does not start beside one that runs.
func TestMember_definitions(t *testing.T) {
	of := func(s *site, name, hash string, tasks []string) *process {
		return s.joinWith(func(c *Config) { c.Name, c.Hash, c.Tasks = name, hash, tasks }, nil)
	}
	more := taskNames(3, 4)
	t.Run("beside", func(t *testing.T) {
		bubble(t, func(s *site) {
			a, b := s.join("a"), s.join("b")
			s.wantShared(0, time.Second, group(a, b))
			before := s.revisions(a.c)
			for _, hash := range []string{"h2", "h1"} { // of the same hash, with other tasks
				p := of(s, "c", hash, more)
				err := p.endedWith(ErrDefinition)
				if !strings.Contains(err.Error(), "12") {
					t.Errorf("error %v", err)
				}
				p.leave()
			}
			if d := cmp.Diff(before, s.revisions(a.c)); d != "" {
				t.Error(d)
			}
			s.wantStays(5*time.Minute, eight(), a, b)
		})
	})
	t.Run("at once", func(t *testing.T) {
		bubble(t, func(s *site) {
			a, b := of(s, "a", "h1", eight()), of(s, "b", "h2", more)
			select {
			case err := <-a.done:
				if !errors.Is(err, ErrDefinition) {
					t.Errorf("error %v", err)
				}
				a.leave()
				s.wantSharedTasks(0, time.Second, more, group(b), a)
			case err := <-b.done:
				if !errors.Is(err, ErrDefinition) {
					t.Errorf("error %v", err)
				}
				b.leave()
				s.wantShared(0, time.Second, group(a), b)
			case <-time.After(time.Minute):
				t.Error("both run")
			}
		})
	})
	t.Run("after", func(t *testing.T) {
		bubble(t, func(s *site) {
			a, b := s.join("a"), s.join("b")
			s.wantShared(0, time.Second, group(a, b))
			a.kill()
			b.leave()
			time.Sleep(2 * ttl)
			c, d := of(s, "c", "h2", more), of(s, "a", "h2", more)
			s.wantSharedTasks(0, time.Second, more, group(c, d), a, b)
		})
	})
}

func TestControl_defineBeside(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		s.define(a.c) // definition h1
		s.wantShared(0, soon, group(a))
		other := Definition{Partitions: 16, Hash: "h2", Steps: []StepRecord{{ID: "count", Kind: "aggregate"}}}
		b := s.open(named("b"))
		_, err := b.Define(s.ctx, other)
		if !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), "member a of flow f") || !strings.Contains(err.Error(), "definition h1, and this process has h2") || !strings.Contains(err.Error(), "--resume") {
			t.Errorf("error %v", err)
		}
		if rec := s.must(b.Record(s.ctx)); rec.Hash != "h1" {
			t.Errorf("record %+v", rec)
		}
		// The same definition, and another one in place of a.
		s.define(b)
		if rec := s.must(s.open(named("a")).Define(s.ctx, other)); rec.Hash != "h2" {
			t.Errorf("record %+v", rec)
		}
		s.define(a.c)
		// Not during a drain, also when nobody is there.
		s.pub(a.c, "control.drain.f", "")
		s.must(a.c.CatchUp(s.ctx))
		a.leave()
		if _, err := b.Define(s.ctx, other); !errors.Is(err, ErrDefinition) || !strings.Contains(err.Error(), "draining") {
			t.Errorf("error %v", err)
		}
		s.define(b)
		s.must(b.Resume(s.ctx, ""))
		s.must(b.Define(s.ctx, other))
	})
}

func TestJoin_refused(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open(joining("a"), func(c *Config) { c.Flow = "" })
		if _, err := c.Join(s.ctx); !errors.Is(err, ErrNoFlow) {
			t.Errorf("error %v", err)
		}
		c = s.open()
		if _, err := c.Join(s.ctx); err == nil || !strings.Contains(err.Error(), "no tasks") {
			t.Errorf("error %v", err)
		}
		c = s.open(joining("a"))
		c.cfg.Conn.Close()
		if _, err := c.Join(s.ctx); !errors.Is(err, bus.ErrClosed) {
			t.Errorf("error %v", err)
		}
	})
}
