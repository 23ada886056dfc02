package control

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestMember_sameName(t *testing.T) {
	t.Run("alive", func(t *testing.T) {
		bubble(t, func(s *site) {
			old, other := s.join("a"), s.join("b")
			s.wantShared(0, time.Second, group(old, other))
			time.Sleep(time.Minute)
			had := other.holds()
			young := s.join("a")
			err := old.endedWith(ErrReplaced)
			if !strings.Contains(err.Error(), "process id") {
				t.Errorf("error %v", err)
			}
			time.Sleep(soon)
			if wanted, _ := young.m.Wanted(); len(wanted) != 4 {
				t.Errorf("wanted %v: the name has its tasks", wanted)
			}
			// It does not know that the older one has stopped.
			s.wantShared(ttl/2, ttl+soon, group(young, other), old)
			if !slices.Equal(had, other.holds()) {
				t.Errorf("the other's tasks moved: %v, now %v", had, other.holds())
			}
			if err := old.m.Leave(s.ctx); err != nil {
				t.Error(err)
			}
			s.wantStays(time.Minute, eight(), young, other)
		})
	})
	t.Run("alive, immediate", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			s.wantShared(0, soon, group(old))
			young := s.join("a", WithSameName{Immediate: true})
			s.wantShared(0, soon, group(young), old)
			old.wantEnd(ErrReplaced)
		})
	})
	t.Run("standing by", func(t *testing.T) {
		bubble(t, func(s *site) {
			one := func(name string) *process {
				return s.joinWith(func(c *Config) { c.Tasks = []string{"0"}; joining(name)(c) }, nil)
			}
			owner := one("b")
			s.wantSharedTasks(0, soon, []string{"0"}, group(owner))
			old := one("a")
			young := one("a")
			old.wantEnd(ErrReplaced)
			s.wantSharedTasks(0, soon, []string{"0"}, group(owner, young), old)
			s.wantStays(time.Minute, []string{"0"}, owner, young)
			owner.leave()
			s.wantSharedTasks(0, soon, []string{"0"}, group(young))
		})
	})
	t.Run("dead", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			s.wantShared(0, soon, group(old))
			old.kill()
			time.Sleep(2 * ttl)
			young := s.join("a")
			s.wantShared(0, soon, group(young))
		})
	})
	t.Run("frozen", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			s.wantShared(0, soon, group(old))
			time.Sleep(time.Minute)
			old.freeze()
			time.Sleep(time.Second)
			young := s.join("a")
			s.wantShared(ttl/5, ttl, group(young), old)
			old.thaw()
			if err := old.ended(); !errors.Is(err, ErrLeaseLost) && !errors.Is(err, ErrReplaced) {
				t.Errorf("error %v", err)
			}
			s.wantStays(time.Minute, eight(), young)
			// However it ended: it is the older one and stays that.
			if _, err := old.c.Join(s.ctx); !errors.Is(err, ErrReplaced) {
				t.Errorf("the older one joins again: error %v", err)
			}
			s.wantStays(time.Minute, eight(), young)
			young.leave()
			if _, err := old.c.Join(s.ctx); err != nil {
				t.Errorf("the name is free, and the older one cannot join: %v", err)
			}
		})
	})
	t.Run("lost its lease, and nobody came", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			s.wantShared(0, soon, group(old))
			if err := old.c.bucket.Delete(s.ctx, old.m.key, 0); err != nil {
				t.Fatal(err)
			}
			old.wantEnd(ErrLeaseLost)
			for range 2 {
				// The second takes over from the first, which is of the same process.
				if _, err := old.c.Join(s.ctx); err != nil {
					t.Fatal(err)
				}
			}
		})
	})
	// The one that replaced a frozen process leaves before that one's lease has
	// run out: a third must not start yet.
	t.Run("frozen, and its heir leaves", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			third := s.join("b")
			s.wantShared(0, time.Second, group(old, third))
			time.Sleep(time.Minute)
			old.freeze()
			young := s.join("a")
			time.Sleep(soon)
			young.leave()
			s.wantShared(ttl/2, 2*ttl, group(third), old, young)
		})
	})
	// What a frozen process held is assigned to another than its heir: that one
	// waits until the heir says that the former lease has run out.
	t.Run("frozen, and a third joins", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			s.wantShared(0, soon, group(old))
			time.Sleep(time.Minute)
			old.freeze()
			young, third := s.join("a"), s.join("b")
			s.wantShared(ttl/2, ttl+time.Second, group(young, third), old)
			s.wantStays(time.Minute, eight(), young, third)
		})
	})
	// The same, of a process that its heir's host vouches for.
	t.Run("frozen, immediate, and a third joins", func(t *testing.T) {
		bubble(t, func(s *site) {
			old := s.join("a")
			s.wantShared(0, soon, group(old))
			time.Sleep(time.Minute)
			old.kill()
			young, third := s.join("a", WithSameName{Immediate: true}), s.join("b")
			s.wantShared(0, time.Second, group(young, third))
		})
	})
}
