package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// Headers of JetStream and of KV (ADR-8, ADR-20, ADR-43).
const (
	hdrMsgID           = "Nats-Msg-Id"
	hdrExpectedSeq     = "Nats-Expected-Last-Subject-Sequence"
	hdrExpectedSubject = "Nats-Expected-Last-Subject-Sequence-Subject"
	hdrRollup          = "Nats-Rollup"
	hdrTTL             = "Nats-TTL"
	hdrMarkerReason    = "Nats-Marker-Reason"
	hdrKVOperation     = "KV-Operation"
	hdrMsgSize         = "Nats-Msg-Size" // where only the headers are sent
	hdrStatus          = "Status"
	hdrDescription     = "Description"
	hdrPendingMsgs     = "Nats-Pending-Messages"
	hdrPendingBytes    = "Nats-Pending-Bytes"
	hdrLastConsumer    = "Nats-Last-Consumer" // of a heartbeat: the last delivery
)

// oneReply receives a single reply.
type oneReply chan *nats.Msg

func (r oneReply) receive(m *nats.Msg) {
	select {
	case r <- m:
	default:
	}
}

// call publishes m and waits for one reply: until ctx ends, the request timeout, or the loss of the connection, which
// is noticed at once. Without a reply the outcome is unknown.
func (c *Conn) call(ctx context.Context, m *nats.Msg) (*nats.Msg, error) {
	return c.callWith(ctx, m, "")
}

// callWith is call with something appended to the subject of the reply.
func (c *Conn) callWith(ctx context.Context, m *nats.Msg, suffix string) (*nats.Msg, error) {
	timer := time.NewTimer(c.cfg.RequestTimeout)
	defer timer.Stop()
	reply := make(oneReply, 1)
	key, subject := c.acks.add(reply)
	defer c.acks.remove(key)
	m.Reply = subject + suffix
	down, err := c.publishWithin(ctx, m, timer)
	if err != nil {
		return nil, err
	}
	select {
	case r := <-reply:
		if isNoResponders(r) {
			return nil, nats.ErrNoResponders
		}
		return r, nil
	case <-down:
		return nil, nats.ErrDisconnected
	case <-c.closed:
		return nil, errors.Join(ErrUnknownOutcome, ErrClosed)
	case <-ctx.Done():
		return nil, errors.Join(ErrUnknownOutcome, context.Cause(ctx))
	case <-timer.C:
		return nil, nats.ErrTimeout
	}
}

// publishWithin publishes m when there is a connection, and returns what is closed when that is lost.
func (c *Conn) publishWithin(ctx context.Context, m *nats.Msg, timer *time.Timer) (<-chan struct{}, error) {
	for {
		down, err := c.connectedWithin(ctx, timer)
		if err != nil {
			return nil, err
		}
		err = c.nc.PublishMsg(m)
		if !errors.Is(err, nats.ErrReconnectBufExceeded) {
			return down, err
		}
		// The connection is lost, and we have not been told yet. Nothing was sent.
		select {
		case <-down:
		case <-c.closed:
			return nil, ErrClosed
		case <-ctx.Done():
			return nil, errors.Join(nats.ErrDisconnected, context.Cause(ctx))
		case <-timer.C:
			return nil, nats.ErrDisconnected
		}
	}
}

// connectedWithin is connected with a bound.
func (c *Conn) connectedWithin(ctx context.Context, timer *time.Timer) (<-chan struct{}, error) {
	c.mu.Lock()
	up, down := c.up, c.down
	c.mu.Unlock()
	for {
		select {
		case <-c.closed:
			return nil, ErrClosed
		default:
		}
		select {
		case <-up:
			return down, nil
		default:
		}
		select {
		case <-up:
		case <-c.closed:
		case <-ctx.Done():
			return nil, errors.Join(nats.ErrDisconnected, context.Cause(ctx))
		case <-timer.C:
			return nil, nats.ErrDisconnected
		}
		c.mu.Lock()
		up, down = c.up, c.down
		c.mu.Unlock()
	}
}

func isNoResponders(m *nats.Msg) bool {
	return len(m.Data) == 0 && m.Header != nil && m.Header.Get(hdrStatus) == "503"
}

// retry repeats a read, or a write that may be repeated, while the server has no leader for it or is away: with growing
// pauses, for about twice the request timeout. A refusal of another kind ends it.
func (c *Conn) retry(ctx context.Context, do func(context.Context) error) error {
	deadline := time.Now().Add(2 * c.cfg.RequestTimeout)
	for attempt := 0; ; attempt++ {
		err := do(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		class := classOf(err)
		if !errors.Is(class, ErrUnknownOutcome) && !errors.Is(class, ErrConflict) || errors.Is(err, ErrClosed) {
			return err
		}
		pause := jitter(min(10*time.Millisecond<<min(attempt, 6), 500*time.Millisecond), rand.Float64)
		if time.Until(deadline) < pause {
			return err
		}
		if sleep(ctx, pause) != nil {
			return err
		}
	}
}

// ask calls the JetStream API and decodes the answer into answer. Only for calls that may be repeated.
func (c *Conn) ask(ctx context.Context, subject string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	return c.retry(ctx, func(ctx context.Context) error {
		r, err := c.call(ctx, &nats.Msg{Subject: c.api + subject, Data: body})
		if err != nil {
			return err
		}
		var failed struct {
			Error *APIError `json:"error"`
		}
		if err := json.Unmarshal(r.Data, &failed); err != nil {
			return fmt.Errorf("answer of %s: %w", subject, err)
		}
		if failed.Error != nil {
			return failed.Error
		}
		if answer == nil {
			return nil
		}
		return json.Unmarshal(r.Data, answer)
	})
}

// publish is one JetStream publish, acknowledged. It is never repeated here.
func (c *Conn) publish(ctx context.Context, m *nats.Msg) (pubAck, error) {
	r, err := c.call(ctx, m)
	if err != nil {
		return pubAck{}, err
	}
	ack, err := parsePubAck(r.Data)
	if err != nil {
		return ack, err
	}
	return ack, nil
}

// Publish publishes one message to whichever stream takes its subject and returns its sequence there.
func (c *Conn) Publish(ctx context.Context, subject string, headers map[string]string, data []byte) (seq uint64, err error) {
	m := &nats.Msg{Subject: subject, Data: data}
	if len(headers) > 0 {
		m.Header = make(nats.Header, len(headers))
		for k, v := range headers {
			m.Header[k] = []string{v}
		}
	}
	ack, err := c.publish(ctx, m)
	return ack.seq, classify("publishing to "+subject, err)
}

// Notify publishes a message of core NATS: at most once, no acknowledgement.
func (c *Conn) Notify(subject string, data []byte) error {
	return classify("publishing to "+subject, c.nc.Publish(subject, data))
}

// Subscribe calls handle, one message at a time, for every core NATS message on subject until unsubscribe is called.
// The subscription survives reconnects; what is published meanwhile is missed.
func (c *Conn) Subscribe(subject string, handle func(subject string, data []byte)) (unsubscribe func(), err error) {
	sub, err := c.nc.Subscribe(subject, func(m *nats.Msg) { handle(m.Subject, m.Data) })
	if err != nil {
		return nil, classify("subscribing to "+subject, err)
	}
	return func() { _ = sub.Unsubscribe() }, nil // fails only when there is nothing left to unsubscribe
}

// pubAck is the server's answer to a publish.
type pubAck struct {
	seq, count uint64
	duplicate  bool
}

var (
	seqField   = []byte(`"seq":`)
	countField = []byte(`"count":`)
	dupField   = []byte(`"duplicate":`)
	errorField = []byte(`"error":`)
)

// parsePubAck reads an acknowledgement without a general JSON decoder: it is called once per message. An error answer
// is returned as *APIError.
func parsePubAck(b []byte) (pubAck, error) {
	if bytes.Contains(b, errorField) {
		var failed struct {
			Error *APIError `json:"error"`
		}
		if err := json.Unmarshal(b, &failed); err != nil {
			return pubAck{}, fmt.Errorf("acknowledgement: %w", err)
		}
		if failed.Error != nil {
			return pubAck{}, failed.Error
		}
	}
	var ack pubAck
	var ok bool
	if ack.seq, ok = numberAfter(b, seqField); !ok {
		return ack, fmt.Errorf("not a JetStream acknowledgement: %s", strconv.Quote(string(b[:min(len(b), 100)])))
	}
	ack.count, _ = numberAfter(b, countField)
	ack.duplicate = bytes.Contains(b, dupField)
	return ack, nil
}

// numberAfter is the unsigned number that follows field in b.
func numberAfter(b, field []byte) (uint64, bool) {
	i := bytes.Index(b, field)
	if i < 0 {
		return 0, false
	}
	i += len(field)
	for i < len(b) && b[i] == ' ' {
		i++
	}
	start, n := i, uint64(0)
	for ; i < len(b) && b[i] >= '0' && b[i] <= '9'; i++ {
		n = n*10 + uint64(b[i]-'0')
	}
	return n, i > start
}
