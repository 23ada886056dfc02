package testenv

import (
	"net"
	"sync"
	"time"
)

// pair is one connection over a link: the client's end and the server's.
type pair struct {
	client, server net.Conn
	once           sync.Once
	gone           chan struct{} // closed by abort
}

// abort drops both ends; what is on its way is lost.
func (p *pair) abort() {
	p.once.Do(func() {
		close(p.gone)
		abort(p.client)
		abort(p.server)
	})
}

// abort closes a connection such that the peer sees a reset where there is such
// a thing, and unsent bytes are thrown away.
func abort(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // best effort: without it, the close is a polite one
	}
	conn.Close() //nolint:errcheck,gosec // it is thrown away
}

// carry moves bytes both ways until either end closes or the pair is dropped.
func (p *pair) carry(l *Link) {
	defer l.forget(p)
	var wg sync.WaitGroup
	for _, dir := range []Direction{ToServer, ToClient} {
		b := &pump{link: l, pair: p, dir: dir, more: make(chan struct{}, 1), room: make(chan struct{}, 1)}
		b.src, b.dst = p.client, p.server
		if dir == ToClient {
			b.src, b.dst = p.server, p.client
		}
		wg.Go(b.read)
		wg.Go(b.write)
	}
	wg.Wait()
}

// chunk is what one Read returned; nil data stands for the end of the stream.
type chunk struct {
	data []byte
	at   time.Time // when it was read
}

// pump moves the bytes of one direction: read fills a bounded queue and write
// empties it, so that what is held or late does not block the sender.
type pump struct {
	link     *Link
	pair     *pair
	dir      Direction
	src, dst net.Conn

	mu    sync.Mutex
	queue []chunk
	size  int

	more, room chan struct{} // one token each: something was queued, taken out
}

const (
	pumpBuffer = 64 << 10
	// idleLimit bounds what a link that does no harm keeps in its queue, so that
	// a slow receiver is felt by the sender as it is without the link.
	idleLimit = 256 << 10
)

func (b *pump) read() {
	buf := make([]byte, pumpBuffer)
	for {
		if !b.wait(func(ln *lane) bool { return !ln.frozen }) {
			return
		}
		n, err := b.src.Read(buf)
		// A freeze that came during the read also holds back what it returned.
		if !b.wait(func(ln *lane) bool { return !ln.frozen }) {
			return
		}
		if n > 0 && !b.put(append([]byte(nil), buf[:n]...)) {
			return
		}
		if err != nil {
			b.put(nil)
			return
		}
	}
}

func (b *pump) put(data []byte) bool {
	for {
		b.mu.Lock()
		if b.size < b.limit() || data == nil {
			b.queue = append(b.queue, chunk{data, time.Now()})
			b.size += len(data)
			b.mu.Unlock()
			signal(b.more)
			return true
		}
		b.mu.Unlock()
		select {
		case <-b.room:
		case <-b.pair.gone:
			return false
		case <-b.changed():
		}
	}
}

func (b *pump) write() {
	for {
		c, ok := b.take()
		if !ok {
			return
		}
		if c.data == nil {
			b.pair.abort() // all that went before has been written
			return
		}
		data, cut := b.cutShort(c.data)
		if _, err := b.dst.Write(data); err != nil {
			b.pair.abort()
			return
		}
		if cut {
			// The end of the connection is orderly for the receiver, so that
			// what it was sent is not thrown away by a reset.
			b.dst.Close() //nolint:errcheck,gosec // it is thrown away
			b.link.Cut()
			return
		}
	}
}

// take waits for the head of the queue to be due and removes it.
func (b *pump) take() (chunk, bool) {
	for {
		b.mu.Lock()
		var head *chunk
		if len(b.queue) > 0 {
			head = &b.queue[0]
		}
		held, delay := b.look()
		if head != nil && !held {
			c := *head
			wait := time.Until(c.at.Add(delay))
			if delay == 0 || wait <= 0 {
				b.queue[0] = chunk{}
				b.queue = b.queue[1:]
				b.size -= len(c.data)
				b.mu.Unlock()
				signal(b.room)
				return c, true
			}
			b.mu.Unlock()
			if !b.sleep(wait) {
				return chunk{}, false
			}
			continue
		}
		b.mu.Unlock()
		if !b.idle(head == nil) {
			return chunk{}, false
		}
	}
}

// idle waits for a change of the link, or of the queue when that is empty.
func (b *pump) idle(empty bool) bool {
	changed := b.changed()
	// The state may have changed since it was looked at: look again rather than
	// miss a change. A queue that was empty leaves its token.
	if held, _ := b.look(); !empty && !held {
		return true
	}
	more := b.more
	if !empty {
		more = nil
	}
	select {
	case <-more:
	case <-changed:
	case <-b.pair.gone:
		return false
	}
	return true
}

func (b *pump) sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-b.changed():
	case <-b.pair.gone:
		return false
	}
	return true
}

// wait waits until ok says true of the lane, or returns false when the pair is gone.
func (b *pump) wait(ok func(*lane) bool) bool {
	for {
		b.link.mu.Lock()
		fine, changed := ok(b.link.lanes[b.dir]), b.link.changed
		b.link.mu.Unlock()
		if fine {
			return true
		}
		select {
		case <-changed:
		case <-b.pair.gone:
			return false
		}
	}
}

func (b *pump) changed() <-chan struct{} {
	b.link.mu.Lock()
	defer b.link.mu.Unlock()
	return b.link.changed
}

func (b *pump) look() (held bool, delay time.Duration) {
	b.link.mu.Lock()
	defer b.link.mu.Unlock()
	ln := b.link.lanes[b.dir]
	return ln.held, ln.delay
}

func (b *pump) limit() int {
	if held, delay := b.look(); held || delay > 0 {
		return holdLimit
	}
	return idleLimit
}

// cutShort applies CutAfter to what is about to be written.
func (b *pump) cutShort(data []byte) (_ []byte, cut bool) {
	b.link.mu.Lock()
	defer b.link.mu.Unlock()
	ln := b.link.lanes[b.dir]
	if ln.cutAfter < 0 {
		return data, false
	}
	if int64(len(data)) < ln.cutAfter {
		ln.cutAfter -= int64(len(data))
		return data, false
	}
	data = data[:ln.cutAfter]
	ln.cutAfter = -1
	b.link.cut = true // nothing may pass between now and the cut itself
	return data, true
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // there is a token already
	}
}
