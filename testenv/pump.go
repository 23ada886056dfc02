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
	sieves         map[Direction]*sieve
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
	conn.Close() //nolint:errcheck // it is thrown away
}

// carry moves bytes both ways until either end closes or the pair is dropped.
func (p *pair) carry(l *Link) {
	defer l.forget(p)
	var wg sync.WaitGroup
	for _, dir := range []Direction{ToServer, ToClient} {
		b := &pump{link: l, pair: p, dir: dir, sieve: p.sieves[dir], more: make(chan struct{}, 1), room: make(chan struct{}, 1)}
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
	sieve    *sieve // nil if nothing is sifted

	mu    sync.Mutex
	queue []chunk
	size  int

	more, room chan struct{} // one token each: something was queued, taken out
}

// pumpBuffer is the size of one Read.
const pumpBuffer = 64 << 10

func (b *pump) read() {
	buf := make([]byte, pumpBuffer)
	for {
		n, err := b.src.Read(buf)
		data := append([]byte(nil), buf[:n]...)
		if b.sieve != nil {
			ln, _ := b.look()
			data = b.sieve.sift(data, ln.keep)
		}
		if len(data) > 0 && !b.put(data) {
			return
		}
		if err != nil {
			b.put(nil)
			return
		}
	}
}

// put queues data, when there is room; the end of the stream needs none.
func (b *pump) put(data []byte) bool {
	for {
		ln, changed := b.look()
		b.mu.Lock()
		if b.size < ln.limit() || data == nil {
			b.queue = append(b.queue, chunk{data, time.Now()})
			b.size += len(data)
			b.mu.Unlock()
			signal(b.more)
			return true
		}
		b.mu.Unlock()
		select {
		case <-b.room:
		case <-changed:
		case <-b.pair.gone:
			return false
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
		if len(data) > 0 { // an empty write to a pipe would wait for a reader
			if _, err := b.dst.Write(data); err != nil {
				b.pair.abort()
				return
			}
		}
		if cut {
			// The end of the connection is orderly for the receiver, so that
			// what it was sent is not thrown away by a reset.
			b.dst.Close() //nolint:errcheck // it is thrown away
			b.link.Cut()
			return
		}
	}
}

// take waits for the head of the queue to be due and removes it.
func (b *pump) take() (chunk, bool) {
	for {
		// Taken before the queue is looked at, so that no change is missed.
		ln, changed := b.look()
		c, ok, wait := b.head(ln)
		if ok {
			signal(b.room)
			return c, true
		}
		var due <-chan time.Time
		if wait > 0 {
			t := time.NewTimer(wait)
			defer t.Stop() // few: only while a delay is set, and then once a chunk
			due = t.C
		}
		select {
		case <-due:
		case <-b.more:
		case <-changed:
		case <-b.pair.gone:
			return chunk{}, false
		}
	}
}

// head removes the head of the queue if it is due, or says how long it still
// has to wait: 0 when only a change can tell.
func (b *pump) head(ln lane) (c chunk, ok bool, wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) == 0 || ln.held || ln.frozen {
		return chunk{}, false, 0
	}
	c = b.queue[0]
	if ln.delay > 0 {
		if wait = time.Until(c.at.Add(ln.delay)); wait > 0 {
			return chunk{}, false, wait
		}
	}
	b.queue[0] = chunk{} // let go of the data
	b.queue = b.queue[1:]
	b.size -= len(c.data)
	return c, true, 0
}

// look returns the state of the lane, and a channel that is closed when that
// may have changed.
func (b *pump) look() (lane, <-chan struct{}) {
	b.link.mu.Lock()
	defer b.link.mu.Unlock()
	return *b.link.lanes[b.dir], b.link.changed
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
