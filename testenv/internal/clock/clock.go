// Package clock keeps real and virtual time apart within one process.
//
// Two things in a process with a nats-server are shared by all tests of it and
// remember which clock they were born with:
//
//   - the server's coarse clock (nats-server/v2/server/ats): its goroutine is
//     started by the first store that opens and ends with the last one. In
//     virtual time it must have been started inside the bubble, or it never
//     advances there;
//   - the client's pool of timers: the runtime ends the process when a timer
//     made in a bubble is touched outside of it.
//
// So a test in virtual time must have the process to itself. Servers in real
// time share it.
package clock

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
)

// ErrBusy is returned when the other kind of time did not end in time. A test
// that starts a server in real time and then opens a bubble itself runs into it.
var ErrBusy = errors.New("clock in use")

// Guard lets either any number of users of real time in, or one of virtual
// time. The zero value is ready for use.
type Guard struct {
	mu      sync.Mutex
	shared  int
	virtual bool
	changed chan struct{} // closed and renewed whenever somebody leaves
}

// process is the guard of this process. It is a global because what it guards
// are globals of other packages.
var process Guard

// Shared takes a share of the process's real time, after waiting at most
// patience for a bubble to end. release must be called once; more calls do nothing.
func Shared(patience time.Duration) (release func(), err error) { return process.Shared(patience) }

// Virtual takes the process for one bubble, after waiting at most patience for
// all users of real time, and for other bubbles, to end. It must be called
// outside of the bubble. release must be called once, also outside.
func Virtual(patience time.Duration) (release func(), err error) { return process.Virtual(patience) }

// Shared is what the function of that name does, on one guard.
func (g *Guard) Shared(patience time.Duration) (release func(), err error) {
	err = g.enter(patience, func() bool {
		if g.virtual {
			return false
		}
		g.shared++
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for a test in virtual time to end: %w", err)
	}
	return sync.OnceFunc(func() { g.leave(func() { g.shared-- }) }), nil
}

// Virtual is what the function of that name does, on one guard.
func (g *Guard) Virtual(patience time.Duration) (release func(), err error) {
	err = g.enter(patience, func() bool {
		if g.virtual || g.shared > 0 {
			return false
		}
		g.virtual = true
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for servers in real time to stop: %w", err)
	}
	emptyPools()
	return sync.OnceFunc(func() {
		emptyPools()
		g.leave(func() { g.virtual = false })
	}), nil
}

// enter calls take under the lock, again after each leave, until it says true.
func (g *Guard) enter(patience time.Duration, take func() bool) error {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		g.mu.Lock()
		if take() {
			g.mu.Unlock()
			return nil
		}
		if g.changed == nil {
			g.changed = make(chan struct{})
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-deadline.C:
			return fmt.Errorf("%w after %v", ErrBusy, patience)
		}
	}
}

func (g *Guard) leave(give func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	give()
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// emptyPools drops what every sync.Pool of the process holds, among it the
// client's timers: the first collection moves a pool's content aside, the
// second one forgets it.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}
