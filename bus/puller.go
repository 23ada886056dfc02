package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	pullExpires   = 30 * time.Second
	pullHeartbeat = 2 * time.Second
	// pullSilence is how long there may be no heartbeat before the consumer is taken for lost. The server that had it
	// may be gone; that is to be known when the cluster has elected another leader, after 4 to 9 s, and not long after.
	pullSilence    = 2*pullHeartbeat + time.Second
	pullUnsettled  = 100 * time.Millisecond
	pullMessages   = 20000
	pullBytes      = 32 << 20
	pullMaxBackoff = 5 * time.Second
	// pullLongSession is a session that was none of a series of failures.
	pullLongSession = time.Minute
)

// errDone ends a read that has come to its end.
var errDone = errors.New("done")

// errLost ends a session with a consumer; the next one begins behind what has been handled.
var errLost = errors.New("consumer is lost")

// errNotYet is what a callback for the end of the messages answers when it knows of more: a consumer with one replica
// may sit on a server that is behind the leader of the stream.
var errNotYet = errors.New("there is more to come")

// pullConfig says what a puller reads.
type pullConfig struct {
	stream      string
	subjects    []string
	from        uint64
	name        string
	maxMessages int
	maxBytes    int
	headersOnly bool
	log         *slog.Logger
	created     time.Time // of the stream; another one is refused unless it is zero
	once        bool      // the run ends when the consumer is lost
}

// puller reads a stream by pull consumers that it makes anew whenever there is doubt. It speaks the protocol of ADR-13
// itself, on one goroutine, the caller's: so a handler that blocks is plain back-pressure, and a heartbeat is missed
// only when there was time to listen.
type puller struct {
	c   *Conn
	cfg pullConfig
	msg Msg // reused for every message

	last    atomic.Uint64 // last sequence handled, or the one before the first wanted
	handled atomic.Uint64 // consumer sequence of the last message handled in this session
	session atomic.Uint64 // counts the consumers

	mu       sync.Mutex
	consumer string    // name of the present one, "" when there is none
	pending  uint64    // matching messages when it was made
	without  time.Time // since when there is none though there should be, zero when there is
	why      error     // the last failure meanwhile

	ch   chan *nats.Msg
	sub  *nats.Subscription
	down <-chan struct{}
	req  []byte

	unsettled bool          // somebody waits for the end, and it has not been reached
	quiet     time.Duration // since something was heard, while unsettled

	wantMsgs, wantBytes int // requested and not yet delivered
	grown               int // times that maxBytes had to be doubled since the last message
}

func newPuller(c *Conn, cfg pullConfig) *puller {
	if cfg.maxMessages <= 0 {
		cfg.maxMessages = pullMessages
	}
	if cfg.maxBytes <= 0 {
		cfg.maxBytes = pullBytes
	}
	// A request is renewed when half of it is used; the other half must still hold the largest message.
	cfg.maxBytes = max(cfg.maxBytes, 2*(int(c.MaxPayload())+64<<10))
	cfg.from = max(cfg.from, 1)
	if cfg.log == nil {
		cfg.log = c.log
	}
	p := &puller{c: c, cfg: cfg}
	p.last.Store(cfg.from - 1)
	return p
}

// open makes a consumer that begins behind the last message handled.
func (p *puller) open(ctx context.Context) error {
	timer := time.NewTimer(p.c.cfg.RequestTimeout)
	defer timer.Stop()
	down, err := p.c.connectedWithin(ctx, timer)
	if err != nil {
		return err
	}
	cc := jetstream.ConsumerConfig{
		Name: p.cfg.name + "-" + shortID(), DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: p.last.Load() + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: 5 * time.Minute,
		HeadersOnly: p.cfg.headersOnly,
	}
	switch len(p.cfg.subjects) {
	case 0:
	case 1:
		cc.FilterSubject = p.cfg.subjects[0]
	default:
		cc.FilterSubjects = p.cfg.subjects
	}
	// Subscribed before the consumer exists, so that a failure here leaves nothing behind on the server.
	ch := make(chan *nats.Msg, p.cfg.maxMessages+1024)
	inbox := p.c.nc.NewInbox()
	sub, err := p.c.nc.ChanSubscribe(inbox, ch)
	if err != nil {
		return err
	}
	info, err := p.c.createConsumer(ctx, p.cfg.stream, cc)
	if err != nil {
		_ = sub.Unsubscribe()
		return err
	}
	p.mu.Lock()
	p.consumer, p.pending = info.Name, info.NumPending
	p.mu.Unlock()
	p.ch, p.sub, p.down = ch, sub, down
	p.wantMsgs, p.wantBytes, p.unsettled, p.quiet = 0, 0, false, 0
	p.handled.Store(0)
	p.session.Add(1)
	if err := p.sameStream(ctx); err != nil {
		return err
	}
	p.lack(nil)
	return nil
}

// sameStream makes sure that the consumer is one of the stream that was read before, and that this has not lost its
// end: in both cases what comes next would be skipped up to the last message handled.
func (p *puller) sameStream(ctx context.Context) error {
	if p.cfg.created.IsZero() {
		return nil
	}
	for again := false; ; again = true {
		info, err := p.c.Stream(ctx, p.cfg.stream)
		last := p.last.Load()
		switch {
		case err != nil:
			return err
		case !info.Created.Equal(p.cfg.created):
			return userError{fmt.Errorf("%w: stream %s was deleted, and another one was created under its name", ErrNotFound, p.cfg.stream)}
		case info.LastSeq >= last:
			return nil
		case again:
			return userError{fmt.Errorf("%w: stream %s ends at sequence %d, and it was read up to %d: it was restored from a backup, or a server has lost its end", ErrNotFound, p.cfg.stream, info.LastSeq, last)}
		}
		// A server that leads no more may have answered.
		if err := sleep(ctx, pullSilence); err != nil {
			return err
		}
	}
}

// shut forgets the consumer and deletes it if the server can be asked. A failure leaves it to its inactive threshold.
func (p *puller) shut(ctx context.Context) error {
	p.mu.Lock()
	name := p.consumer
	p.consumer = ""
	p.mu.Unlock()
	if name == "" {
		return nil
	}
	_ = p.sub.Unsubscribe()
	ctx, stop := p.c.whileUp(ctx)
	defer stop()
	if ctx.Err() != nil {
		return nil
	}
	_, err := p.c.call(ctx, &nats.Msg{Subject: p.c.api + "CONSUMER.DELETE." + p.cfg.stream + "." + name})
	return err
}

// run handles messages until ctx ends or a callback errs. empty, if not nil, is called when all the messages that the
// consumer knew of have been handled; while it returns errNotYet it is called again and again.
func (p *puller) run(ctx context.Context, handle func(*Msg) error, empty func() error) error {
	defer p.lack(nil)
	failures := 0
	for {
		before, began := p.last.Load(), time.Now()
		err := p.once(ctx, handle, empty)
		var user userError
		if errors.As(err, &user) {
			// The message that the handler refused is not handled, and this consumer has delivered it. The next run needs
			// another one: without it, the message would only be missed when a later one comes.
			p.finish(ctx)
			return user.error
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if p.cfg.once || !errors.Is(err, errLost) && !Retryable(err) {
			return err
		}
		if p.last.Load() > before || time.Since(began) > pullLongSession {
			failures = 0
		}
		if failures == 0 {
			p.cfg.log.Info("cursor is made anew", "stream", p.cfg.stream, "seq", p.last.Load(), "err", err)
		}
		failures++
		p.lack(err)
		// Best effort and bounded: the consumer may be the very thing that does not answer.
		dctx, cancel := context.WithTimeout(ctx, time.Second)
		_ = p.shut(dctx)
		cancel()
		if err := sleep(ctx, jitter(min(20*time.Millisecond<<min(failures, 9), pullMaxBackoff), rand.Float64)); err != nil {
			return err
		}
	}
}

// lack notes that there is no consumer, and why; nil ends that.
func (p *puller) lack(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch p.why = err; {
	case err == nil:
		p.without = time.Time{}
	case p.without.IsZero():
		p.without = time.Now()
	}
}

// userError carries an error of a callback past the decision whether to go on: it ends the run, whatever its class.
type userError struct{ error }

// once is one session with one consumer. It returns errLost, a retryable error, or one that ends the run.
func (p *puller) once(ctx context.Context, handle func(*Msg) error, empty func() error) error {
	p.mu.Lock()
	open := p.consumer != ""
	p.mu.Unlock()
	if !open {
		if err := p.open(ctx); err != nil {
			return classify("reading stream "+p.cfg.stream, err)
		}
	}
	return p.receive(ctx, handle, empty)
}

func (p *puller) receive(ctx context.Context, handle func(*Msg) error, empty func() error) error {
	// The count of what is pending may never come to 0: a message that is replaced while it is on its way may stay in
	// it. So the end is also looked for whenever nothing has come for a moment.
	p.unsettled = empty != nil
	if p.pending == 0 {
		if err := p.atEnd(empty); err != nil {
			return err
		}
	}
	silence := time.NewTimer(pullSilence)
	defer silence.Stop()
	for n := 0; ; n++ {
		if err := p.pull(); err != nil {
			return err
		}
		if n%64 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var m *nats.Msg
		select {
		case m = <-p.ch:
			p.quiet = 0
		default:
			var err error
			if m, err = p.await(ctx, silence); err != nil {
				return err
			}
		}
		if m == nil {
			if err := p.atEnd(empty); err != nil {
				return err
			}
			continue
		}
		if err := p.take(m, handle, empty); err != nil {
			return err
		}
	}
}

// atEnd tells the callback that the consumer has no more.
func (p *puller) atEnd(empty func() error) error {
	if empty == nil {
		return nil
	}
	err := empty()
	if p.unsettled = errors.Is(err, errNotYet); p.unsettled || err == nil {
		return nil
	}
	return userError{err}
}

// await waits for the next message of the server, which sends at least heartbeats. It returns none when it is time to
// look again whether the end was reached.
func (p *puller) await(ctx context.Context, silence *time.Timer) (*nats.Msg, error) {
	patience := pullSilence
	if p.unsettled {
		patience = pullUnsettled
	}
	silence.Reset(patience)
	select {
	case m := <-p.ch:
		p.quiet = 0
		return m, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-p.down:
		return nil, fmt.Errorf("%w: %w", errLost, nats.ErrDisconnected)
	case <-p.c.closed:
		return nil, classify("reading stream "+p.cfg.stream, nats.ErrConnectionClosed)
	case <-silence.C:
		if p.quiet += patience; p.quiet < pullSilence {
			return nil, nil
		}
		return nil, fmt.Errorf("%w: no heartbeat for %s", errLost, pullSilence)
	}
}

// pull asks for more when half of what was asked for has come.
func (p *puller) pull() error {
	if p.wantMsgs > p.cfg.maxMessages/2 && p.wantBytes > p.cfg.maxBytes/2 {
		return nil
	}
	msgs, size := p.cfg.maxMessages-p.wantMsgs, p.cfg.maxBytes-p.wantBytes
	b := append(p.req[:0], `{"expires":`...)
	b = strconv.AppendInt(b, int64(pullExpires), 10)
	b = append(b, `,"idle_heartbeat":`...)
	b = strconv.AppendInt(b, int64(pullHeartbeat), 10)
	b = append(b, `,"batch":`...)
	b = strconv.AppendInt(b, int64(msgs), 10)
	b = append(b, `,"max_bytes":`...)
	b = strconv.AppendInt(b, int64(size), 10)
	p.req = append(b, '}')
	// consumer is only changed by this goroutine.
	err := p.c.nc.PublishRequest(p.c.api+"CONSUMER.MSG.NEXT."+p.cfg.stream+"."+p.consumer, p.sub.Subject, p.req)
	if err != nil {
		if errors.Is(err, nats.ErrConnectionClosed) {
			return classify("reading stream "+p.cfg.stream, err)
		}
		return fmt.Errorf("%w: %w", errLost, err)
	}
	p.wantMsgs, p.wantBytes = p.cfg.maxMessages, p.cfg.maxBytes
	return nil
}

// take handles one message of the server: a message of the stream, or a status.
func (p *puller) take(m *nats.Msg, handle func(*Msg) error, empty func() error) error {
	pos, ok := parseAckSubject(m.Reply)
	if !ok {
		return p.status(m)
	}
	p.wantMsgs--
	p.wantBytes -= m.Size()
	p.grown = 0
	if pos.consumer != p.handled.Load()+1 {
		// Something on the way was lost, or the consumer was reset by somebody.
		return fmt.Errorf("%w: delivery %d came after %d", errLost, pos.consumer, p.handled.Load())
	}
	if pos.stream <= p.last.Load() {
		// It was handled before. Nothing is delivered twice to a consumer without acks: the stream is another one, or the
		// consumer was reset by somebody.
		return fmt.Errorf("%w: it delivered sequence %d after %d", errLost, pos.stream, p.last.Load())
	}
	p.msg = Msg{Subject: m.Subject, Data: m.Data, Header: m.Header, Seq: pos.stream, Time: pos.time, Pending: pos.pending}
	if err := handle(&p.msg); err != nil {
		return userError{err}
	}
	p.last.Store(pos.stream)
	p.handled.Store(pos.consumer)
	if pos.pending == 0 {
		return p.atEnd(empty)
	}
	return nil
}

// status handles what the server says about the requests (ADR-13).
func (p *puller) status(m *nats.Msg) error {
	switch status := m.Header.Get(hdrStatus); status {
	case "100":
		// A heartbeat stands in line behind what was delivered: so the loss of a message is noticed that no other follows.
		at, err := strconv.ParseUint(m.Header.Get(hdrLastConsumer), 10, 64)
		if err == nil && at > p.handled.Load() {
			return fmt.Errorf("%w: delivery %d has not come, the last one was %d", errLost, at, p.handled.Load())
		}
		return nil
	case "408", "409":
		left, err := strconv.Atoi(m.Header.Get(hdrPendingMsgs))
		if err != nil {
			return fmt.Errorf("%w: %s %s", errLost, status, m.Header.Get(hdrDescription))
		}
		size, _ := strconv.Atoi(m.Header.Get(hdrPendingBytes)) // 0 when absent
		p.wantMsgs, p.wantBytes = max(p.wantMsgs-left, 0), max(p.wantBytes-size, 0)
		if status == "409" {
			p.grow(m.Header.Get(hdrDescription))
		}
		return nil
	default:
		return fmt.Errorf("%w: %s %s", errLost, status, m.Header.Get(hdrDescription))
	}
}

// grow makes the requests larger when one was ended for its size with nothing delivered since the last: a message that
// does not fit would otherwise be asked for in vain for ever.
func (p *puller) grow(description string) {
	if description != "Message Size Exceeds MaxBytes" {
		return
	}
	if p.grown++; p.grown > 2 {
		p.cfg.maxBytes = min(2*p.cfg.maxBytes, 1<<30)
	}
}
