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

// Run renews the lease and keeps the assignment as it should be: of the live
// members of this definition. It returns nil after Leave, ErrReplaced, ErrLeaseLost,
// ErrDefinition (members of another definition run), or the cause of ctx. However
// it ends, Trusted is false from then on.
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

	// A new member sees to its share itself.
	poke(m.looks)
	var wg sync.WaitGroup
	wg.Go(func() { cancel(m.watch(ctx)) })
	wg.Go(func() { cancel(m.balance(ctx)) })
	cancel(m.keep(ctx))
	m.lease.end() // before others are waited for
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, errLeft) {
		return err
	}
	return nil
}

// alarm is a timer that knows when it is due.
type alarm struct {
	*time.Timer
	due time.Time
}

func newAlarm(d time.Duration) *alarm { return &alarm{time.NewTimer(d), time.Now().Add(d)} }

func (a *alarm) set(d time.Duration) {
	a.due = time.Now().Add(d)
	a.Reset(d)
}

// sooner moves the alarm forward, never back.
func (a *alarm) sooner(d time.Duration) {
	if time.Now().Add(d).Before(a.due) {
		a.set(d)
	}
}

// keep is the one goroutine that renews, so that at most one request about the
// lease is under way.
func (m *Member) keep(ctx context.Context) error {
	ttl := m.c.cfg.LeaseTTL
	renew := newAlarm(0)
	trust, settle := time.NewTimer(time.Until(m.lease.until())), time.NewTimer(time.Until(m.heldUntil))
	defer renew.Stop()
	defer trust.Stop()
	defer settle.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-trust.C:
		case <-m.kick:
			// The renewal carries the status.
			renew.sooner(max(0, time.Until(m.wrote.Add(statusPause))))
			continue
		case <-m.urgent:
			renew.sooner(0)
			continue
		case <-settle.C:
			// Others may wait for that, too.
			renew.sooner(0)
			continue
		case <-renew.C:
			next, err := m.renew(ctx)
			if err != nil {
				return err
			}
			renew.set(next)
			trust.Reset(time.Until(m.lease.until()))
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
	started := time.Now()
	m.mu.Lock()
	m.info.Settled = m.info.Settled || !started.Before(m.heldUntil)
	info, said := m.info, m.said
	m.mu.Unlock()
	value, err := json.Marshal(info)
	if err != nil {
		return 0, fmt.Errorf("renew the lease: %w", err)
	}
	// One try must leave the time for another one.
	try, cancel := context.WithTimeout(ctx, ttl/4)
	defer cancel()
	rev, err := m.c.bucket.Update(try, m.key, value, m.rev, info.TTL)
	switch {
	case err == nil:
		m.rev, m.wrote = rev, started
		if !m.lease.renewed(started, time.Now(), ttl) {
			return 0, fmt.Errorf("%w: the renewal took too long", ErrLeaseLost)
		}
		m.acknowledged(said)
		return ttl / 3, nil
	case errors.Is(err, bus.ErrFenced):
		return 0, m.adopt(try)
	}
	m.c.log.DebugContext(ctx, "renew the lease", "err", err)
	return shortly(ttl), nil
}

// acknowledged wakes those who wait for what they said.
func (m *Member) acknowledged(said uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if said > m.acked {
		m.acked = said
		close(m.heard)
		m.heard = make(chan struct{})
	}
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

func (m *Member) replacedBy(value []byte) error {
	var by MemberInfo
	if err := json.Unmarshal(value, &by); err != nil {
		return fmt.Errorf("%w %s", ErrReplaced, m.Name())
	}
	return fmt.Errorf("%w %s: it runs on host %s with process id %d since %s", ErrReplaced, m.Name(), by.Host, by.PID, by.Started.UTC().Format(time.RFC3339))
}

func shortly(ttl time.Duration) time.Duration {
	pause := ttl / 20
	return pause/2 + rand.N(pause)
}
