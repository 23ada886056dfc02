package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"natsflow/bus"
)

// statusPause is the least time between two writes that PushStatus asks for.
const statusPause = 200 * time.Millisecond

// errLeft ends Run after Leave.
var errLeft = errors.New("left")

// Run renews the lease and takes the flow over when its owner is gone. It returns
// nil after Leave, ErrReplaced, ErrLeaseLost, or the cause of ctx. However it
// ends, Trusted is false from then on.
func (m *Member) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m.mu.Lock()
	if m.left || m.stop != nil {
		left := m.left
		m.mu.Unlock()
		if left {
			return nil
		}
		return errors.New("run a member: it ran already")
	}
	m.stop = cancel
	m.mu.Unlock()
	defer close(m.stopped)
	defer m.lease.end()

	var wg sync.WaitGroup
	wg.Go(func() { cancel(m.watch(ctx)) })
	cancel(m.loop(ctx))
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, errLeft) {
		return err
	}
	return nil
}

// watch asks for a look when something changed that may matter. It is a hint: all
// decisions are made on what is read from the leader then.
func (m *Member) watch(ctx context.Context) error {
	flow := m.c.cfg.Flow
	hint := func(item bus.Item) error {
		switch {
		case item.Key == m.key && item.Seq > m.joined && item.Deleted:
			return fmt.Errorf("%w: it was removed or expired", ErrLeaseLost)
		case item.Key == m.key && item.Seq > m.joined && !m.isOwn(item.Value):
			return m.replacedBy(item.Value)
		case item.Deleted, item.Key == assignmentKey(flow), item.Key == "":
			m.wantLook()
		}
		return nil
	}
	err := retry(ctx, m.c.log, "watch the members", func() error {
		return m.c.bucket.Watch(ctx, flow+".>", hint)
	})
	if err != nil && ctx.Err() == nil && !errors.Is(err, ErrReplaced) && !errors.Is(err, ErrLeaseLost) {
		return fmt.Errorf("watch the members: %w", err)
	}
	return err
}

func (m *Member) wantLook() {
	select {
	case m.looks <- struct{}{}:
	default:
	}
}

func (m *Member) replacedBy(value []byte) error {
	var by MemberInfo
	if err := json.Unmarshal(value, &by); err != nil {
		return fmt.Errorf("%w %s", ErrReplaced, m.Name())
	}
	return fmt.Errorf("%w %s: it runs on host %s with process id %d since %s", ErrReplaced, m.Name(), by.Host, by.PID, by.Started.UTC().Format(time.RFC3339))
}

// loop is the one goroutine that renews and looks, so that at most one request
// about the lease is under way.
func (m *Member) loop(ctx context.Context) error {
	ttl := m.c.cfg.LeaseTTL
	renew, again := time.NewTimer(0), time.NewTimer(0)
	trust := time.NewTimer(time.Until(m.lease.until()))
	defer renew.Stop()
	defer again.Stop()
	defer trust.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-trust.C:
		case <-m.kick:
			// Moves the renewal forward, which carries the status.
			renew.Reset(max(0, time.Until(m.wrote.Add(statusPause))))
			continue
		case <-renew.C:
			next, err := m.renew(ctx)
			if err != nil {
				return err
			}
			renew.Reset(next)
			trust.Reset(time.Until(m.lease.until()))
			// A hint can be lost (the watcher was away for longer than a mark of
			// deletion lives), hence a look with each renewal.
			m.wantLook()
		case <-m.looks:
			next, err := m.look(ctx)
			if err != nil {
				return err
			}
			if next > 0 {
				again.Reset(next)
			}
		case <-again.C:
			m.wantLook()
		}
		// After a freeze several timers are due at once and any may come first.
		if !m.Trusted() && ctx.Err() == nil {
			return fmt.Errorf("%w: it was not renewed within %v", ErrLeaseLost, ttl-ttl/4)
		}
	}
}

// renew writes our entry again and returns when to do so next.
func (m *Member) renew(ctx context.Context) (time.Duration, error) {
	ttl := m.c.cfg.LeaseTTL
	if !m.Trusted() {
		return 0, fmt.Errorf("%w: it was not renewed within %v", ErrLeaseLost, ttl-ttl/4)
	}
	m.mu.Lock()
	info := m.info
	m.mu.Unlock()
	value, err := json.Marshal(info)
	if err != nil {
		return 0, fmt.Errorf("renew the lease: %w", err)
	}
	// One try must leave the time for another one.
	try, cancel := context.WithTimeout(ctx, ttl/4)
	defer cancel()
	started := time.Now()
	rev, err := m.c.bucket.Update(try, m.key, value, m.rev, info.TTL)
	switch {
	case err == nil:
		m.rev, m.wrote = rev, started
		if !m.lease.renewed(started, time.Now(), ttl) {
			return 0, fmt.Errorf("%w: the renewal took too long", ErrLeaseLost)
		}
		return ttl / 3, nil
	case errors.Is(err, bus.ErrFenced):
		return 0, m.adopt(try)
	}
	m.c.log.DebugContext(ctx, "renew the lease", "err", err)
	return shortly(ttl), nil
}

// adopt finds out why a renewal was refused. An entry of our own is an earlier
// try of which the answer was lost; it does not extend the trust, the next
// renewal does.
func (m *Member) adopt(ctx context.Context) error {
	item, own, err := m.readOwn(ctx)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return fmt.Errorf("%w: it expired", ErrLeaseLost)
	case err != nil:
		return nil //nolint:nilerr // tried again while the trust lasts
	case !own:
		return m.replacedBy(item.Value)
	}
	m.rev = item.Seq
	return nil
}

func shortly(ttl time.Duration) time.Duration {
	pause := ttl / 20
	return pause/2 + rand.N(pause)
}

// look reads the assignment and its owner's lease and acts on them. It returns
// when to look again, 0 for not before something changes.
func (m *Member) look(ctx context.Context) (time.Duration, error) {
	ttl := m.c.cfg.LeaseTTL
	try, cancel := context.WithTimeout(ctx, ttl/6)
	defer cancel()
	s, rev, err := m.situation(try)
	if errors.Is(err, ErrRecord) {
		return 0, err
	}
	if err != nil {
		m.c.log.DebugContext(ctx, "look at the assignment", "err", err)
		return shortly(ttl), nil
	}
	now := time.Now()
	act := decide(m.Name(), m.Instance(), s, now)
	if act.kind == actLost && s.owner.present {
		return 0, fmt.Errorf("%w %s", ErrReplaced, m.Name())
	}
	if act.kind == actLost || m.isActive() && act.kind != actStart {
		return 0, fmt.Errorf("%w: the flow is assigned to %s", ErrLeaseLost, s.assignment.Owner)
	}
	switch act.kind {
	case actStart:
		m.start(ctx, s.assignment.Generation)
	case actWait:
		m.say(ctx, "waiting for the lease of the former process of this name to run out", "wait", act.until.Sub(now))
		return act.until.Sub(now), nil
	case actStandBy:
		m.say(ctx, "standing by", "owner", s.assignment.Owner)
	case actTake:
		return m.take(ctx, try, act.next, rev)
	}
	return 0, nil
}

// situation reads the assignment first and its owner's lease after it.
func (m *Member) situation(ctx context.Context) (situation, uint64, error) {
	s := situation{heldUntil: m.heldUntil}
	a, rev, err := m.c.readAssignment(ctx)
	if errors.Is(err, bus.ErrNotFound) {
		return s, 0, nil
	}
	if err != nil {
		return s, 0, err
	}
	s.assigned, s.assignment = true, a
	item, err := m.c.bucket.Get(ctx, memberKey(m.c.cfg.Flow, a.Owner))
	switch {
	case errors.Is(err, bus.ErrNotFound):
	case err != nil:
		return s, 0, err
	default:
		s.owner.present = true
		var info MemberInfo
		if json.Unmarshal(item.Value, &info) == nil {
			s.owner.instance = info.Instance
		}
	}
	return s, rev, nil
}

// take writes the assignment. Of several that try, the compare-and-set lets one
// succeed.
func (m *Member) take(ctx, try context.Context, next Assignment, rev uint64) (time.Duration, error) {
	ttl := m.c.cfg.LeaseTTL
	value, err := json.Marshal(next)
	if err != nil {
		return 0, fmt.Errorf("take the flow over: %w", err)
	}
	if !m.Trusted() {
		return 0, fmt.Errorf("%w: it was not renewed within %v", ErrLeaseLost, ttl-ttl/4)
	}
	key := assignmentKey(m.c.cfg.Flow)
	if rev == 0 {
		_, err = m.c.bucket.Create(try, key, value, 0)
	} else {
		_, err = m.c.bucket.Update(try, key, value, rev, 0)
	}
	if err != nil {
		m.c.log.DebugContext(ctx, "take the flow over", "err", err)
		return shortly(ttl), nil
	}
	m.start(ctx, next.Generation)
	return 0, nil
}

func (m *Member) isActive() bool {
	select {
	case <-m.active:
		return true
	default:
		return false
	}
}

// start closes Active, if the lease is still trusted; the caller checks that
// again right after it.
func (m *Member) start(ctx context.Context, generation uint64) {
	if m.isActive() || !m.Trusted() {
		return
	}
	m.say(ctx, "active", "generation", generation)
	close(m.active)
}

// say logs what the member does when that changes, not at each look.
func (m *Member) say(ctx context.Context, what, key string, value any) {
	said := what
	if key != "wait" { // the time left is another at each look
		said += fmt.Sprint(value)
	}
	if said == m.said {
		return
	}
	m.said = said
	m.c.log.InfoContext(ctx, what, "member", m.Name(), key, value)
}
