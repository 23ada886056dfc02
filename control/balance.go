package control

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"natsflow/bus"
)

// errRing restarts the watch: the neighbour is another one.
var errRing = errors.New("the neighbour changed")

// watch follows the assignment, our own entry, and the neighbour's. It is a hint:
// what it asks for is decided on what is read from the leader then.
func (m *Member) watch(ctx context.Context) error {
	for {
		watched, stop := context.WithCancelCause(ctx)
		m.mu.Lock()
		m.rewatch = stop
		keys := []string{assignmentKey(m.c.cfg.Flow), m.key}
		neighbour := ""
		if m.neighbour != "" {
			neighbour = memberKey(m.c.cfg.Flow, m.neighbour)
			keys = append(keys, neighbour)
		}
		m.mu.Unlock()
		h := &hints{m: m, neighbour: neighbour}
		err := retry(watched, m.c.log, "watch the members", func() error {
			return m.c.bucket.WatchAll(watched, keys, h.take)
		})
		changed := errors.Is(context.Cause(watched), errRing)
		stop(nil)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, ErrReplaced), errors.Is(err, ErrLeaseLost):
			return err
		case !changed:
			return fmt.Errorf("watch the members: %w", err)
		}
	}
}

// hints takes what a watch brings.
type hints struct {
	m         *Member
	neighbour string // its key, "" when there is none
	alive     bool   // the neighbour, as far as was seen
}

func (h *hints) take(item bus.Item) error {
	m := h.m
	switch item.Key {
	case "": // the end of what was there
		if h.neighbour != "" && !h.alive {
			poke(m.looks)
		}
	case m.key:
		switch {
		case item.Seq <= m.joined:
		case item.Deleted:
			return fmt.Errorf("%w: it was removed or expired", ErrLeaseLost)
		case !m.isOwn(item.Value):
			return m.replacedBy(item.Value)
		}
	case h.neighbour:
		if h.alive = !item.Deleted; !h.alive {
			poke(m.looks)
		}
	default:
		a, err := assignmentOf(item)
		if item.Deleted || err != nil || m.apply(a, item.Seq) {
			poke(m.looks)
		}
	}
	return nil
}

// apply takes over what the assignment says of this member, unless a later one was
// seen. It reports whether the assignment lacks this member.
func (m *Member) apply(a Assignment, rev uint64) (missing bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	own, listed := a.Owners[m.info.Name]
	listed = listed && a.Hash == m.info.Hash
	missing = !listed && !m.info.Leaving
	if rev <= m.seen {
		return missing
	}
	m.seen, m.ring = rev, len(a.Owners)
	if next := a.neighbour(m.info.Name); next != m.neighbour {
		m.neighbour = next
		if m.rewatch != nil {
			m.rewatch(errRing)
		}
	}
	// As long as no assignment had us it is not known what we shall do.
	if known := m.wanted != nil; listed || known {
		next := append([]string{}, own...)
		if !listed {
			next = next[:0]
		}
		if !known || !slices.Equal(next, m.wanted) {
			m.want(next, a)
		}
	}
	return missing
}

// want needs the lock.
func (m *Member) want(tasks []string, a Assignment) {
	m.wanted = tasks
	if len(m.claims) > 0 {
		poke(m.checks)
	}
	close(m.rewanted)
	m.rewanted = make(chan struct{})
	what := "assigned"
	if len(tasks) == 0 {
		what = "standing by"
	}
	m.c.log.Info(what, "member", m.info.Name, "tasks", len(tasks), "of", len(m.c.cfg.Tasks), "members", len(a.Owners), "generation", a.Generation)
}

// balance looks when there is a hint, and now and then without one: a hint can be
// lost (the watcher was away for longer than a mark of deletion lives).
func (m *Member) balance(ctx context.Context) error {
	ttl := m.c.cfg.LeaseTTL
	timer := time.NewTimer(m.checkPause())
	defer timer.Stop()
	whole := time.Now().Add(m.wholePause())
	full := false
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-m.looks:
			full = true
		case <-m.checks:
		case <-timer.C:
			full = full || !time.Now().Before(whole)
		}
		try, cancel := context.WithTimeout(ctx, ttl)
		missed, err := false, error(nil)
		if !full {
			missed, err = m.check(try)
		}
		if err == nil && (full || missed) {
			full = true
			if err = m.look(try); err == nil {
				whole = time.Now().Add(m.wholePause())
			}
		}
		if err == nil {
			err = m.tidy(try)
		}
		cancel()
		pause := m.checkPause()
		switch {
		case err == nil:
			full = false
		case errors.Is(err, ErrRecord), errors.Is(err, ErrDefinition):
			return err
		default:
			m.c.log.DebugContext(ctx, "look at the assignment", "err", err)
			pause = shortly(ttl)
		}
		timer.Reset(pause)
	}
}

// checkPause is the time between two checks: about every fourth renewal.
func (m *Member) checkPause() time.Duration {
	every := m.c.cfg.LeaseTTL * 4 / 3
	return every*3/4 + rand.N(every/2)
}

// wholePause is the time between two looks without a reason: about a minute, and
// longer with many members, as one that looks is enough and each look reads the
// entries of all of them.
func (m *Member) wholePause() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	every := max(time.Minute, time.Duration(m.ring)*5*time.Second)
	return every*3/4 + rand.N(every/2)
}

// check reads the assignment and the neighbour's entry, and tells whether there is
// a reason for a look.
func (m *Member) check(ctx context.Context) (missed bool, err error) {
	a, rev, err := m.c.readAssignment(ctx)
	if err != nil {
		return false, fmt.Errorf("read the assignment: %w", err)
	}
	if m.apply(a, rev) {
		return true, nil
	}
	m.mu.Lock()
	neighbour := m.neighbour
	m.mu.Unlock()
	if neighbour == "" {
		return false, nil
	}
	_, err = m.c.bucket.Get(ctx, memberKey(m.c.cfg.Flow, neighbour))
	if errors.Is(err, bus.ErrNotFound) {
		return true, nil
	}
	return false, err
}

// look writes the assignment as it should be, unless it is so already, and takes
// over what it says. The assignment is read before the members are listed. So who
// joins after that list finds this assignment when it looks itself, or has written
// one before, and then ours is refused.
func (m *Member) look(ctx context.Context) error {
	a, rev, err := m.c.readAssignment(ctx)
	if err != nil {
		return fmt.Errorf("read the assignment: %w", err)
	}
	members, err := m.c.live(ctx)
	if err != nil {
		return fmt.Errorf("list members: %w", err)
	}
	m.mu.Lock()
	self := m.info
	m.mu.Unlock()
	live := make([]peer, 0, len(members))
	for _, info := range members {
		own := info.Instance == self.Instance
		live = append(live, peer{info.Name, info.Hash, info.Leaving || own && self.Leaving})
	}
	next, changed, err := rebalanced(a, live, self.Name, self.Hash, m.c.cfg.Tasks)
	if err != nil {
		return err
	}
	if changed {
		if rev, err = m.c.writeAssignment(ctx, next, rev); err != nil {
			return fmt.Errorf("write the assignment: %w", err)
		}
	}
	if m.apply(next, rev) {
		// Our entry was not there when the members were listed. Unless we get to
		// know that we have lost it, it will be the next time.
		return fmt.Errorf("list members: %s is not among them", m.Name())
	}
	return nil
}
