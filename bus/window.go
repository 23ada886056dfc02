package bus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// stallTimeout ends the wait for acknowledgements when none has come for this long. The server forgets a fast batch
	// after as long a silence.
	stallTimeout = 10 * time.Second
	// pingEvery is when the server is asked what has become of a batch, if nothing is heard: a change of leader can lose
	// an acknowledgement.
	pingEvery = stallTimeout / 8
)

// maxErrors bounds the errors that are kept of one window.
const maxErrors = 10

// progress is how far a number of messages has been acknowledged. One goroutine publishes and waits, the hub's reports.
type progress struct {
	notify chan struct{} // one token: what is waited for has come

	mu    sync.Mutex
	acked uint64 // messages
	need  uint64 // wake the waiter at so many
	last  uint64 // highest sequence in the stream
	errs  []error
	fatal bool // no use in waiting for more
}

// report moves acked to at least acked; err, if any, is kept; fatal ends the waiting.
func (p *progress) report(acked, last uint64, err error, fatal bool) {
	p.mu.Lock()
	p.acked, p.last = max(p.acked, acked), max(p.last, last)
	if err != nil && !p.fatal { // what follows a fatal one is its consequence
		p.errs = append(p.errs, err)
	}
	p.fatal = p.fatal || fatal
	wake := p.fatal || p.acked >= p.need
	p.mu.Unlock()
	if wake {
		p.wake()
	}
}

// one reports the acknowledgement, or the refusal, of one message.
func (p *progress) one(last uint64, err error) {
	p.mu.Lock()
	p.acked++
	p.last = max(p.last, last)
	if err != nil && len(p.errs) < maxErrors {
		p.errs = append(p.errs, err)
	}
	wake := p.acked == p.need || err != nil
	p.mu.Unlock()
	if wake {
		p.wake()
	}
}

func (p *progress) wake() {
	select {
	case p.notify <- struct{}{}:
	default:
	}
}

// state is what the waiter looks at.
func (p *progress) state(need uint64) (acked uint64, fatal bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.need = need
	return p.acked, p.fatal, errors.Join(p.errs...)
}

// waiter waits for progress on one connection.
type waiter struct {
	progress
	c     *Conn
	down  <-chan struct{}
	timer *time.Timer
	ping  func() error // nil: there is nothing to ask
}

func (w *waiter) init(ctx context.Context, c *Conn) error {
	w.c, w.notify, w.timer = c, make(chan struct{}, 1), time.NewTimer(c.cfg.RequestTimeout)
	down, err := c.connectedWithin(ctx, w.timer)
	w.down = down
	return err
}

// await returns when need messages are acknowledged, or with the first error if failFast, or when there is no hope.
func (w *waiter) await(ctx context.Context, need uint64, failFast bool) error {
	before, fatal, err := w.state(need)
	patience, silent := stallTimeout, time.Duration(0)
	if w.ping != nil {
		patience = pingEvery
	}
	for {
		if err != nil && (failFast || fatal) {
			return err
		}
		if before >= need {
			return nil
		}
		w.timer.Reset(patience)
		select {
		case <-w.notify:
		case <-w.down:
			return nats.ErrDisconnected
		case <-w.c.closed:
			return errors.Join(ErrUnknownOutcome, ErrClosed)
		case <-ctx.Done():
			return errors.Join(ErrUnknownOutcome, context.Cause(ctx))
		case <-w.timer.C:
			silent += patience
		}
		var acked uint64
		if acked, fatal, err = w.state(need); acked != before || fatal {
			before, silent = acked, 0
		}
		if silent >= stallTimeout {
			return fmt.Errorf("no acknowledgement for %s: %w", stallTimeout, nats.ErrTimeout)
		}
		if silent > 0 && w.ping != nil {
			if err := w.ping(); err != nil {
				return err
			}
		}
	}
}

// gone reports whether the connection that the publishing began on is lost: what follows must not leave on another.
func (w *waiter) gone() bool {
	select {
	case <-w.down:
		return true
	default:
		return false
	}
}

// window publishes messages of which each gets an acknowledgement of its own, a bounded number at a time.
type window struct {
	waiter
	key, reply       string
	limit, sent      uint64
	bytes, sentBytes int // outstanding size is bounded roughly: it is emptied by waiting for half of the messages
	failFast         bool
}

// newWindow waits for the connection. Messages are to be published with the window's reply subject.
func (c *Conn) newWindow(ctx context.Context, limit uint64, bytes int) (*window, error) {
	w := &window{limit: limit, bytes: bytes}
	if err := w.init(ctx, c); err != nil {
		return nil, err
	}
	w.key, w.reply = c.acks.add(w)
	return w, nil
}

func (w *window) close() {
	w.c.acks.remove(w.key)
	w.timer.Stop()
}

// receive implements receiver.
func (w *window) receive(m *nats.Msg) {
	if isNoResponders(m) {
		w.one(0, nats.ErrNoResponders)
		return
	}
	ack, err := parsePubAck(m.Data)
	w.one(ack.seq, err)
}

// publish sends m, whose Reply is w.reply, and blocks while the window is full.
func (w *window) publish(ctx context.Context, m *nats.Msg) error {
	if w.sent >= w.limit {
		if err := w.await(ctx, w.sent-w.limit+1, w.failFast); err != nil {
			return err
		}
	}
	if w.sentBytes += len(m.Data); w.sentBytes > w.bytes {
		w.sentBytes = len(m.Data)
		if err := w.await(ctx, w.sent, w.failFast); err != nil {
			return err
		}
	}
	if w.gone() {
		return nats.ErrDisconnected
	}
	if err := w.c.nc.PublishMsg(m); err != nil {
		return err
	}
	w.sent++
	return nil
}

// flush waits for all that was sent and returns everything that was refused, up to a bound.
func (w *window) flush(ctx context.Context) error {
	if err := w.await(ctx, w.sent, w.failFast); err != nil {
		return err
	}
	_, _, err := w.state(0)
	return err
}

// Feeder publishes many messages, without waiting for each. It is safe for concurrent use.
type Feeder struct {
	c     *Conn
	limit uint64

	mu  sync.Mutex
	w   *window
	err error
}

// NewFeeder makes a feeder with at most maxPending messages outstanding (0: 4000). Flush must be called at the end.
func (c *Conn) NewFeeder(maxPending int) *Feeder {
	if maxPending <= 0 {
		maxPending = 4000
	}
	return &Feeder{c: c, limit: uint64(maxPending)}
}

// Publish sends a message with a message id (none if empty), and blocks while too many are outstanding. An error is of
// an earlier message, or of the connection; all that follows until the next Flush fails with it.
func (f *Feeder) Publish(subject, msgID string, data []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil && f.w == nil {
		f.w, f.err = f.c.newWindow(f.c.life, f.limit, putWindowBytes)
	}
	if f.err == nil {
		f.w.failFast = true
		m := &nats.Msg{Subject: subject, Reply: f.w.reply, Data: data}
		if msgID != "" {
			m.Header = nats.Header{hdrMsgID: {msgID}}
		}
		f.err = f.w.publish(f.c.life, m)
	}
	return classify("publishing to "+subject, f.err)
}

// Flush waits until all is acknowledged and returns what failed since the last Flush; after it the feeder begins anew.
// With ErrUnknownOutcome a part of it may be stored; message ids make it safe to publish all of it again.
func (f *Feeder) Flush(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.err
	if f.w != nil {
		if err == nil {
			err = f.w.flush(ctx)
		}
		f.w.close()
	}
	f.w, f.err = nil, nil
	return classify("publishing", err)
}
