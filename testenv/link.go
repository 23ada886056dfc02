package testenv

import (
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// Direction says which way bytes go over a [Link].
type Direction uint8

// The directions of a link. Both is the two of them.
const (
	ToServer Direction = 1 << iota
	ToClient
	Both = ToServer | ToClient
)

// ErrCut is returned by the dialer of a [Link] that lets no connection in.
var ErrCut = errors.New("link is cut")

const (
	// holdLimit bounds what a link holds in one direction of one connection.
	// Above it, its peers block as they would on a full socket buffer.
	holdLimit = 64 << 20
	// idleLimit bounds what a link that does no harm keeps in its queue, so that
	// a slow receiver is felt by the sender as it is without the link.
	idleLimit = 256 << 10
	// frozenLimit is what a frozen link still takes, as a socket buffer would.
	frozenLimit = 64 << 10
)

// lane is the state of one direction.
type lane struct {
	frozen   bool
	held     bool
	delay    time.Duration
	cutAfter int64 // bytes that still go through before a cut; negative for no limit
	sifted   bool  // NATS messages are told apart on new connections
	keep     func(subject string) bool
}

// limit is what a pump keeps in its queue at most, in bytes.
func (ln lane) limit() int {
	if ln.frozen {
		return frozenLimit
	}
	if ln.held || ln.delay > 0 {
		return holdLimit
	}
	return idleLimit
}

// Link stands between clients and a server and misbehaves on demand. One link
// can carry many connections; what is asked of it applies to all of them, and a
// delay or a limit also to those opened later. Its methods are safe for concurrent use.
//
// New connections are refused while the link is cut, holds or is frozen. Those
// would time out on a network; but the client of NATS keeps its mutex while it
// shakes hands, a goroutine that waits for a mutex keeps the time of a bubble
// from passing, and so the timeout would never come. For the same reason a
// bubble stands still for ever if a client is used by one goroutine while it
// reconnects over a delayed link in another: set a delay after connecting.
type Link struct {
	tb testing.TB

	mu    sync.Mutex
	lanes map[Direction]*lane // ToServer, ToClient
	// changed is closed and renewed at each change of a lane, so that pumps,
	// which may have to wait inside a bubble, wait for a channel: a condition
	// variable could not be combined with their other events.
	changed chan struct{}
	cut     bool
	ended   bool
	pairs   map[*pair]struct{}
	dials   int
	stops   []func() // of listeners
	wg      sync.WaitGroup
}

// NewLink returns a link that does no harm yet. It ends with the test. For use
// in a bubble it must be made in that bubble.
func NewLink(tb testing.TB) *Link {
	tb.Helper()
	l := &Link{
		tb:      tb,
		lanes:   map[Direction]*lane{ToServer: {cutAfter: -1}, ToClient: {cutAfter: -1}},
		changed: make(chan struct{}),
		pairs:   make(map[*pair]struct{}),
	}
	tb.Cleanup(l.close)
	return l
}

// Dialer wraps a dialer, e.g. [Server.InProcess], so that its connections go
// over the link. While the link refuses connections it returns [ErrCut].
func (l *Link) Dialer(dial func() (net.Conn, error)) func() (net.Conn, error) {
	return func() (net.Conn, error) {
		client, inner := net.Pipe()
		if err := l.join(inner, dial); err != nil {
			client.Close() //nolint:errcheck // a pipe's Close returns nil
			inner.Close()  //nolint:errcheck // the same
			return nil, err
		}
		return client, nil
	}
}

// Proxy opens a listener on a free loopback port that forwards to the server at
// url, and returns its own URL. While the link refuses connections, or the server
// is down, it closes what it has accepted at once. It cannot be used in a bubble.
func (l *Link) Proxy(url string) string {
	l.tb.Helper()
	addr := strings.TrimPrefix(url, "nats://")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		l.tb.Fatalf("testenv: opening a proxy: %v", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stops = append(l.stops, func() { ln.Close() }) //nolint:errcheck // of a listener that is no longer needed
	l.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return // closed
			}
			err = l.join(conn, func() (net.Conn, error) {
				return net.DialTimeout("tcp", addr, 5*time.Second)
			})
			if err != nil {
				abort(conn)
			}
		}
	})
	return "nats://" + ln.Addr().String()
}

// Cut drops every connection at once; what is on its way in either direction is
// lost, held bytes among it. New connections are refused until [Link.Heal].
func (l *Link) Cut() { l.drop(true) }

// Heal lets connections in again after a cut.
func (l *Link) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}

// Drop drops every connection as [Link.Cut] does, and lets new ones in.
func (l *Link) Drop() { l.drop(false) }

// CutAfter cuts the link once n more bytes have gone through in direction dir,
// over all connections: exactly those arrive. A negative n calls it off.
func (l *Link) CutAfter(dir Direction, n int64) {
	l.change(dir, func(ln *lane) { ln.cutAfter = n })
}

// Hold accepts what is sent in direction dir, 64 MiB a connection at most, and
// keeps it until [Link.Release], as a network does with the last words of a
// process that it has cut off.
func (l *Link) Hold(dir Direction) { l.change(dir, func(ln *lane) { ln.held = true }) }

// Release delivers what was held in direction dir, in order, and what follows.
func (l *Link) Release(dir Direction) { l.change(dir, func(ln *lane) { ln.held = false }) }

// Freeze delivers nothing more in direction dir and, unlike [Link.Hold], soon
// takes nothing more either: after about 64 KiB a connection the sender blocks.
func (l *Link) Freeze(dir Direction) { l.change(dir, func(ln *lane) { ln.frozen = true }) }

// Thaw ends a [Link.Freeze].
func (l *Link) Thaw(dir Direction) { l.change(dir, func(ln *lane) { ln.frozen = false }) }

// Delay lets everything sent in direction dir arrive later by d. It is a
// latency, not a limit to the rate.
func (l *Link) Delay(dir Direction, d time.Duration) {
	l.change(dir, func(ln *lane) { ln.delay = d })
}

// Sift loses the NATS messages in direction dir whose subject keep does not
// accept, as a server or a client does that has no room for them: the connection
// lasts and nobody is told. What passes to the server has the subject that it is
// published on, what passes to the client the one that it was published on, which
// is an inbox if it is an answer. keep is called from the goroutines of the
// connections; nil accepts all. It applies to connections that are opened after
// the first call for that direction, and to none that does not speak NATS in
// plain text.
func (l *Link) Sift(dir Direction, keep func(subject string) bool) {
	l.change(dir, func(ln *lane) { ln.sifted, ln.keep = true, keep })
}

// Conns is the number of connections that are open.
func (l *Link) Conns() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pairs)
}

// Dials is the number of connections that were opened, or refused, so far.
func (l *Link) Dials() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dials
}

func (l *Link) change(dir Direction, change func(*lane)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for d, ln := range l.lanes {
		if dir&d != 0 {
			change(ln)
		}
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *Link) drop(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = l.cut || cut
	for p := range l.pairs {
		p.abort()
	}
	clear(l.pairs)
}

// join connects client with what dial returns.
func (l *Link) join(client net.Conn, dial func() (net.Conn, error)) error {
	l.mu.Lock()
	l.dials++
	refused := l.refuses()
	l.mu.Unlock()
	if refused {
		return ErrCut
	}
	server, err := dial()
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refuses() { // since a moment ago
		abort(server)
		return ErrCut
	}
	p := &pair{client: client, server: server, gone: make(chan struct{}), sieves: make(map[Direction]*sieve)}
	for dir, ln := range l.lanes {
		if ln.sifted {
			p.sieves[dir] = &sieve{}
		}
	}
	l.pairs[p] = struct{}{}
	l.wg.Go(func() { p.carry(l) })
	return nil
}

// refuses needs the lock.
func (l *Link) refuses() bool {
	stuck := l.cut || l.ended
	for _, ln := range l.lanes {
		stuck = stuck || ln.held || ln.frozen
	}
	return stuck
}

func (l *Link) forget(p *pair) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.abort()
	delete(l.pairs, p)
}

// close ends the link and waits for its goroutines.
func (l *Link) close() {
	l.mu.Lock()
	l.ended = true
	for _, stop := range l.stops {
		stop()
	}
	l.mu.Unlock()
	l.drop(true)
	l.wg.Wait()
}
