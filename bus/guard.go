package bus

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// gate stands between nats.go and the network. Every connection that nats.go makes, the first one and the later ones,
// goes through it, so that Abort and the guard hold for all of them.
type gate struct {
	cfg     Config
	aborted atomic.Bool

	mu   sync.Mutex
	last net.Conn
}

// Dial implements nats.CustomDialer.
func (g *gate) Dial(network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	if g.cfg.Trusted != nil {
		d.Control = userTimeout(g.cfg.UserTimeout)
	}
	return g.open(func() (net.Conn, error) { return d.Dial(network, address) })
}

// InProcessConn implements nats.InProcessConnProvider.
func (g *gate) InProcessConn() (net.Conn, error) {
	return g.open(g.cfg.InProcess)
}

func (g *gate) open(dial func() (net.Conn, error)) (net.Conn, error) {
	if err := g.check(); err != nil {
		return nil, err
	}
	conn, err := dial()
	if err != nil {
		return nil, err
	}
	wrapped := g.wrap(conn)
	g.mu.Lock()
	g.last = wrapped
	g.mu.Unlock()
	// Abort may have come between the check and the assignment.
	if err := g.check(); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return wrapped, nil
}

// check says whether a byte may leave now.
func (g *gate) check() error {
	if g.aborted.Load() {
		return ErrClosed
	}
	if g.cfg.Trusted != nil && !g.cfg.Trusted() {
		return ErrUntrusted
	}
	return nil
}

// abort closes the network connection without taking a lock of nats.go, which may be held by a blocked write.
func (g *gate) abort() {
	g.aborted.Store(true)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.last != nil {
		_ = g.last.Close()
	}
}

func (g *gate) wrap(conn net.Conn) net.Conn {
	if g.cfg.Trusted != nil {
		if raw := rawWriter(conn, g.check); raw != nil {
			return &gatedConn{Conn: conn, gate: g, raw: raw}
		}
	}
	return &gatedConn{Conn: conn, gate: g}
}

// gatedConn refuses to write once the gate is shut, and is closed by the refusal.
type gatedConn struct {
	net.Conn
	gate *gate
	raw  func(b []byte) (int, error) // checks before every system call; nil where that cannot be had
}

// Write writes b if the gate is open. A guarded TCP connection asks again before every system call: a process that was
// frozen in the middle of a long write must not go on with the rest of it when it wakes.
func (c *gatedConn) Write(b []byte) (int, error) {
	if err := c.gate.check(); err != nil {
		_ = c.Close()
		return 0, err
	}
	if c.raw == nil {
		return c.Conn.Write(b)
	}
	n, err := c.raw(b)
	if err != nil {
		_ = c.Close()
	}
	return n, err
}

// jitter spreads d by a quarter up and down.
func jitter(d time.Duration, random func() float64) time.Duration {
	return time.Duration(float64(d) * (0.75 + random()/2))
}
