package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/testenv"
)

// process is a member that runs, as a worker has one.
type process struct {
	s    *site
	c    *Control
	m    *Member
	link *testenv.Link
	done chan error
	stop context.CancelFunc
}

// join starts a process under a name, on a link of its own.
func (s *site) join(name string, opts ...JoinOption) *process {
	s.t.Helper()
	link := testenv.NewLink(s.t)
	c := s.open(s.linked(link), named(name))
	m, err := c.Join(s.ctx, opts...)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(s.ctx)
	p := &process{s: s, c: c, m: m, link: link, done: make(chan error, 1), stop: stop}
	go func() {
		p.done <- m.Run(ctx)
		close(p.done)
	}()
	s.t.Cleanup(func() {
		stop()
		for range p.done {
		}
	})
	return p
}

func (p *process) isActive() bool { return p.m.isActive() && p.m.Trusted() }

// wantActive waits until p is active, at least and at most for a time.
func (p *process) wantActive(least, most time.Duration) {
	p.s.t.Helper()
	start := time.Now()
	select {
	case <-p.m.Active():
	case err := <-p.done:
		p.s.t.Fatalf("%s ended: %v", p.m.Name(), err)
	case <-time.After(most):
		p.s.t.Fatalf("%s is not active after %v", p.m.Name(), most)
	}
	if took := time.Since(start); took < least {
		p.s.t.Errorf("%s was active after %v, expected %v to %v", p.m.Name(), took, least, most)
	}
	if !p.m.Trusted() {
		p.s.t.Errorf("%s is active and not trusted", p.m.Name())
	}
}

func (p *process) wantStandBy(d time.Duration) {
	p.s.t.Helper()
	select {
	case <-p.m.Active():
		p.s.t.Fatalf("%s is active", p.m.Name())
	case err := <-p.done:
		p.s.t.Fatalf("%s ended: %v", p.m.Name(), err)
	case <-time.After(d):
	}
	if !p.m.Trusted() {
		p.s.t.Errorf("%s is not trusted", p.m.Name())
	}
}

func (p *process) wantEnd(want error) error {
	p.s.t.Helper()
	err := p.ended()
	if !errors.Is(err, want) {
		p.s.t.Errorf("%s ended with %v, want %v", p.m.Name(), err, want)
	}
	return err
}

// ended waits for the end of Run.
func (p *process) ended() error {
	p.s.t.Helper()
	select {
	case err := <-p.done:
		if p.m.Trusted() {
			p.s.t.Errorf("%s ended and is trusted", p.m.Name())
		}
		return err
	case <-time.After(time.Minute):
		p.s.t.Fatalf("%s did not end", p.m.Name())
		return nil
	}
}

func (p *process) leave() {
	p.s.t.Helper()
	if err := p.m.Leave(p.s.ctx); err != nil {
		p.s.t.Error(err)
	}
	p.wantEnd(nil)
}

// freeze keeps everything of p off the network, both ways; release lets it all
// pass, late.
func (p *process) freeze() {
	p.link.Hold(testenv.ToServer)
	p.link.Hold(testenv.ToClient)
}

func (p *process) release() {
	p.link.Release(testenv.ToServer)
	p.link.Release(testenv.ToClient)
}

const (
	ttl  = defaultLeaseTTL
	soon = 200 * time.Millisecond
)

func TestMember_leave(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		a.wantActive(0, soon)
		b := s.join("b")
		b.wantStandBy(10 * time.Minute)
		list, assigned, err := b.c.Members(s.ctx)
		if err != nil || len(list) != 2 || list[0].Name != "a" || !list[0].Active || list[1].Active || assigned.Owner != "a" || assigned.Generation != 1 {
			t.Errorf("members %+v, %+v, %v", list, assigned, err)
		}
		for _, m := range list {
			if m.Age > ttl || m.TTL != ttl || m.PID == 0 || m.Host == "" {
				t.Errorf("member %+v", m)
			}
		}
		a.leave()
		b.wantActive(0, soon)
		// The name is free again; its next process stands by.
		a = s.join("a")
		a.wantStandBy(time.Minute)
		b.leave()
		a.wantActive(0, soon)
		if _, assigned, _ = a.c.Members(s.ctx); assigned.Generation != 3 || assigned.Instance != a.m.Instance() {
			t.Errorf("assignment %+v", assigned)
		}
		if n := s.log.count("standing by"); n != 2 {
			t.Errorf("%d lines about standing by", n)
		}
	})
}

func TestMember_dies(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		a.wantActive(0, soon)
		b := s.join("b")
		b.wantStandBy(time.Minute + ttl/7)
		a.c.cfg.Conn.Abort()
		b.wantActive(ttl/2, ttl+soon)
		if a.m.Trusted() {
			t.Error("trusted at the time of the take-over")
		}
		if err := a.ended(); err == nil {
			t.Error("ended without an error")
		}
	})
}

// TestMember_frozen freezes the active process at every tenth of a renewal's
// interval, and has all it had sent arrive late.
func TestMember_frozen(t *testing.T) {
	for i := range 10 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			bubble(t, func(s *site) {
				a := s.join("a")
				a.wantActive(0, soon)
				b := s.join("b")
				b.wantStandBy(time.Minute + time.Duration(i)*ttl/30)
				a.freeze()
				b.wantActive(ttl/2, ttl+soon)
				if a.isActive() {
					t.Error("two are active")
				}
				a.release()
				a.wantEnd(ErrLeaseLost)
				b.wantStays(10 * time.Second)
			})
		})
	}
}

// wantStays checks that p stays active.
func (p *process) wantStays(d time.Duration) {
	p.s.t.Helper()
	select {
	case err := <-p.done:
		p.s.t.Fatalf("%s ended: %v", p.m.Name(), err)
	case <-time.After(d):
	}
	if !p.isActive() {
		p.s.t.Errorf("%s is not active any more", p.m.Name())
	}
}

func TestMember_sameName(t *testing.T) {
	t.Run("alive", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			old.wantActive(0, soon)
			other := s.join("b")
			time.Sleep(time.Minute)
			young := s.join("a")
			err := old.wantEnd(ErrReplaced)
			if !strings.Contains(err.Error(), "process id") {
				t.Errorf("error %v", err)
			}
			// It does not know that the older one has stopped.
			young.wantActive(ttl/2, ttl)
			other.wantStandBy(time.Minute)
			if err := old.m.Leave(s.ctx); err != nil {
				t.Error(err)
			}
			young.wantStays(time.Minute)
		})
	})
	t.Run("alive, immediate", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			old.wantActive(0, soon)
			young := s.join("a", WithSameName{Immediate: true})
			young.wantActive(0, soon)
			old.wantEnd(ErrReplaced)
		})
	})
	t.Run("standing by", func(t *testing.T) {
		bubble(t, func(s *site) {
			owner := s.join("b")
			owner.wantActive(0, soon)
			old := s.join("a")
			young := s.join("a")
			old.wantEnd(ErrReplaced)
			young.wantStandBy(time.Minute)
			owner.leave()
			young.wantActive(0, soon)
		})
	})
	t.Run("dead", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			old.wantActive(0, soon)
			old.c.cfg.Conn.Abort()
			time.Sleep(2 * ttl)
			young := s.join("a")
			young.wantActive(0, soon)
		})
	})
	t.Run("frozen", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			old.wantActive(0, soon)
			time.Sleep(time.Minute)
			old.freeze()
			time.Sleep(time.Second)
			young := s.join("a")
			young.wantActive(ttl/5, ttl)
			if old.isActive() {
				t.Error("two are active")
			}
			old.release()
			if err := old.ended(); !errors.Is(err, ErrLeaseLost) && !errors.Is(err, ErrReplaced) {
				t.Errorf("error %v", err)
			}
			young.wantStays(time.Minute)
		})
	})
	// The one that replaced a frozen process leaves before that one's lease has
	// run out: a third must not start yet.
	t.Run("frozen, and its heir leaves", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			old.wantActive(0, soon)
			third := s.join("b")
			time.Sleep(time.Minute)
			old.freeze()
			young := s.join("a")
			young.wantStandBy(soon)
			young.leave()
			third.wantActive(ttl/2, 2*ttl)
			if old.isActive() {
				t.Error("two are active")
			}
		})
	})
}

func TestMember_ttl(t *testing.T) {
	for _, lease := range []time.Duration{2 * time.Second, 30 * time.Second} {
		t.Run(lease.String(), func(t *testing.T) {
			bubble(t, func(s *site) {
				short := func(c *Config) { c.LeaseTTL = lease; c.Name = "a" }
				c := s.open(short)
				m, err := c.Join(s.ctx)
				if err != nil {
					t.Fatal(err)
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
		a := s.join("a")
		a.wantActive(0, soon)
		for range 20 {
			a.link.Cut()
			time.Sleep(ttl / 5)
			a.link.Heal()
			a.wantStays(ttl)
		}
		a.link.Cut()
		a.wantEnd(ErrLeaseLost)
		a.link.Heal()
		time.Sleep(ttl)
		m, err := a.c.Join(s.ctx)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- m.Run(s.ctx) }()
		<-m.Active()
		if err := m.Leave(s.ctx); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestMember_status(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		a.wantActive(0, soon)
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

func TestMember_cancelled(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		a.wantActive(0, soon)
		a.stop()
		a.wantEnd(context.Canceled)
		if err := a.m.Leave(s.ctx); err != nil {
			t.Error(err)
		}
		b := s.join("b")
		b.wantActive(0, soon)
		// Leaving is bounded by its context also when the server is away.
		b.link.Cut()
		ctx, cancel := context.WithTimeout(s.ctx, time.Second)
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
		a.wantActive(0, soon)
		if err := a.c.bucket.Delete(s.ctx, a.m.key, 0); err != nil {
			t.Fatal(err)
		}
		a.wantEnd(ErrLeaseLost)
		b := s.join("b")
		b.wantActive(0, soon)
		if _, err := b.c.bucket.Put(s.ctx, assignmentKey("f"), []byte("x"), 0); err != nil {
			t.Fatal(err)
		}
		b.wantEnd(ErrRecord)
	})
}

// TestMember_lostHint: the mark of the owner's end was gone before the one that
// stands by could see it.
func TestMember_lostHint(t *testing.T) {
	bubble(t, func(s *site) {
		a := s.join("a")
		a.wantActive(0, soon)
		b := s.join("b")
		b.wantStandBy(time.Minute)
		a.c.cfg.Conn.Abort()
		if err := b.c.bucket.Purge(s.ctx, a.m.key, 0); err != nil {
			t.Fatal(err)
		}
		b.wantActive(0, ttl/3+soon)
	})
}

// TestMember_histories lets processes come, leave, die and be cut off and held up
// at random. At no time may two be active and trusted; in the end one is.
func TestMember_histories(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			bubble(t, func(s *site) { s.history(rand.New(rand.NewPCG(seed, 2))) })
		})
	}
}

func (s *site) history(rng *rand.Rand) {
	var alive []*process
	check := func() {
		var active []string
		for _, p := range alive {
			if p.isActive() {
				active = append(active, p.m.Name())
			}
		}
		if len(active) > 1 {
			s.t.Errorf("active at once: %v", active)
		}
	}
	for range 60 {
		for range rng.IntN(40) {
			time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			check()
		}
		if len(alive) < 3 {
			alive = append(alive, s.join([]string{"a", "b"}[rng.IntN(2)]))
			continue
		}
		i := rng.IntN(len(alive))
		p := alive[i]
		gone := false
		switch rng.IntN(6) {
		case 0:
			// It may be cut off or dead; then its lease runs out.
			ctx, cancel := context.WithTimeout(s.ctx, time.Second)
			if err := p.m.Leave(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, bus.ErrClosed) {
				s.t.Error(err)
			}
			cancel()
			gone = true
		case 1:
			p.c.cfg.Conn.Abort()
		case 2:
			p.freeze()
		case 3:
			p.release()
		case 4:
			p.link.Cut()
		case 5:
			p.link.Heal()
		}
		if gone || !p.m.Trusted() {
			p.stop()
			alive = append(alive[:i], alive[i+1:]...)
		}
	}
	for _, p := range alive {
		p.stop()
		for range p.done {
		}
	}
	p := s.join("c")
	p.wantActive(0, 2*ttl)
}

func TestJoin_refused(t *testing.T) {
	bubble(t, func(s *site) {
		c := s.open(func(c *Config) { c.Flow = "" })
		if _, err := c.Join(s.ctx); !errors.Is(err, ErrNoFlow) {
			t.Errorf("error %v", err)
		}
		c.cfg.Conn.Close()
		c.cfg.Flow = "f"
		if _, err := c.Join(s.ctx); !errors.Is(err, bus.ErrClosed) {
			t.Errorf("error %v", err)
		}
	})
}
