package control

import (
	"fmt"
	"sync/atomic"
	"time"
)

const (
	defaultLeaseTTL = 5 * time.Second
	minLeaseTTL     = 2 * time.Second
)

// validLeaseTTL holds the TTL to what the server can do (whole seconds) and to
// what leaves a renewal the time to be repeated once.
func validLeaseTTL(ttl time.Duration) error {
	if ttl < minLeaseTTL || ttl%time.Second != 0 {
		return fmt.Errorf("lease TTL %v: must be whole seconds, at least %v", ttl, minLeaseTTL)
	}
	return nil
}

// trustedUntil is when trust in a lease ends of which the renewal was started at
// started. Counting from the start and not from the acknowledgement is what
// makes it safe: the server stores the renewal later than that.
func trustedUntil(started time.Time, ttl time.Duration) time.Time {
	return started.Add(ttl - ttl/4)
}

// trusts reports whether a lease that is trusted until deadline is so at now. It
// looks at both clocks: the monotonic one stands still while a machine sleeps,
// and the wall clock may be set back.
func trusts(deadline, now time.Time) bool {
	return now.Before(deadline) && now.Round(0).Before(deadline.Round(0))
}

// lease is the trust of a process in its own lease. It can be read from any
// goroutine without a lock, since it is asked before each write to the network.
type lease struct {
	deadline atomic.Pointer[time.Time] // nil: ended, for ever
}

func newLease(started time.Time, ttl time.Duration) *lease {
	l := &lease{}
	until := trustedUntil(started, ttl)
	l.deadline.Store(&until)
	return l
}

// renewed extends the trust. It reports false, and ends the trust for good, when
// it had run out by now: others may have acted on that already, so a late
// acknowledgement must not bring it back.
func (l *lease) renewed(started, now time.Time, ttl time.Duration) bool {
	old := l.deadline.Load()
	if old == nil || !trusts(*old, now) {
		l.end()
		return false
	}
	until := trustedUntil(started, ttl)
	return l.deadline.CompareAndSwap(old, &until)
}

// trusted is false for ever once it was ended.
func (l *lease) trusted(now time.Time) bool {
	d := l.deadline.Load()
	return d != nil && trusts(*d, now)
}

// until is when the trust runs out; zero when it was ended.
func (l *lease) until() time.Time {
	if d := l.deadline.Load(); d != nil {
		return *d
	}
	return time.Time{}
}

func (l *lease) end() { l.deadline.Store(nil) }

// heldFor is how long a process that took over the lease of a name has to wait
// until the former holder cannot trust it any more: what was left of it. renewed
// and taken are the server's timestamps of the last renewal and of the take-over.
func heldFor(ttl time.Duration, renewed, taken time.Time) time.Duration {
	return min(ttl, max(0, ttl-taken.Sub(renewed)))
}
