package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// minMajor and minMinor are the oldest server that has all that is used here (fast ingest, ADR-50; per-key TTL).
const minMajor, minMinor = 2, 15

// versionPoll is the time between looks at a new connection that was lost again.
const versionPoll = 10 * time.Millisecond

// Conn is a connection to NATS with JetStream. It is safe for concurrent use. After the first connect it reconnects
// for ever, until Close or Abort. While it is away nothing is buffered: calls wait for it, within their bounds.
type Conn struct {
	cfg  Config
	log  *slog.Logger
	gate *gate
	nc   *nats.Conn
	js   jetstream.JetStream
	api  string
	acks *ackHub

	life      context.Context // ends with Close and Abort
	end       context.CancelFunc
	closeOnce sync.Once
	closed    chan struct{} // closed by nats.go once it has given up its goroutines

	mu   sync.Mutex
	up   chan struct{} // closed while connected
	down chan struct{} // closed when the present connection is lost
}

// Connect connects and returns once it has; it tries again until cfg.ConnectTimeout or ctx ends. Wrong credentials end
// it at once. It returns ErrServerTooOld for a server before 2.15. Whether JetStream is enabled is asked with
// RequireJetStream.
func Connect(ctx context.Context, cfg Config) (*Conn, error) {
	cfg, err := cfg.withContext()
	if err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("connecting to NATS: %w", err)
	}
	creds, err := cfg.credentials()
	if err != nil {
		return nil, fmt.Errorf("connecting to NATS: %w", err)
	}
	c := &Conn{
		cfg: cfg, log: cfg.Logger, api: cfg.apiSubject(), gate: &gate{cfg: cfg},
		closed: make(chan struct{}), up: make(chan struct{}), down: make(chan struct{}),
	}
	c.acks = newAckHub(c)
	c.life, c.end = context.WithCancel(context.WithoutCancel(ctx))
	deadline := time.Now().Add(c.cfg.ConnectTimeout)
	if err := c.dial(ctx, deadline, append(c.options(), creds...)); err != nil {
		c.end()
		return nil, err
	}
	if err := c.ready(ctx, deadline); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// ready finishes a connection that nats.go has made.
func (c *Conn) ready(ctx context.Context, deadline time.Time) error {
	version, err := c.awaitVersion(ctx, deadline)
	if err == nil {
		err = checkVersion(version)
	}
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", c.URL(), err)
	}
	var opts []jetstream.JetStreamOpt
	opts = append(opts, jetstream.WithDefaultTimeout(c.cfg.RequestTimeout))
	if c.cfg.domain != "" && c.cfg.apiPrefix == "" {
		c.js, err = jetstream.NewWithDomain(c.nc, c.cfg.domain, opts...)
	} else {
		c.js, err = jetstream.NewWithAPIPrefix(c.nc, strings.TrimSuffix(c.api, "."), opts...)
	}
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", c.URL(), err)
	}
	return c.acks.start()
}

// awaitVersion returns the server's version. A connection that was lost again just after it was made has none until it
// is back, which is no reason to think that the server is old.
func (c *Conn) awaitVersion(ctx context.Context, deadline time.Time) (string, error) {
	for {
		if version := c.nc.ConnectedServerVersion(); version != "" {
			return version, nil
		}
		if err := c.gate.check(); err != nil {
			return "", err
		}
		if time.Now().After(deadline) {
			return "", fmt.Errorf("no server within %s: %w", c.cfg.ConnectTimeout, nats.ErrDisconnected)
		}
		if err := sleep(ctx, versionPoll); err != nil {
			return "", err
		}
	}
}

func (c *Conn) options() []nats.Option {
	opts := []nats.Option{
		nats.Name(c.cfg.Name),
		nats.Timeout(dialTimeout),
		nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort(),
		nats.CustomReconnectDelay(func(attempts int) time.Duration {
			return jitter(min(10*time.Millisecond<<min(attempts, 8), 2*time.Second), rand.Float64)
		}),
		// Nothing is kept while disconnected: a write that nobody waits for any more must not be made later.
		nats.ReconnectBufSize(-1),
		nats.FlusherTimeout(flusherTimeout),
		nats.PingInterval(10 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) { c.onDown(nc, err) }),
		nats.ReconnectHandler(c.onUp),
		nats.ClosedHandler(func(*nats.Conn) { close(c.closed) }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			c.log.Warn("connection error", "err", err, "subject", subject)
		}),
	}
	if c.cfg.InProcess != nil {
		return append(opts, nats.InProcessServer(c.gate))
	}
	return append(opts, nats.SetCustomDialer(c.gate))
}

// dial makes the first connection.
func (c *Conn) dial(ctx context.Context, deadline time.Time, opts []nats.Option) error {
	for attempt := 0; ; attempt++ {
		nc, err := nats.Connect(c.cfg.URL, opts...)
		if err == nil {
			c.made(nc)
			return nil
		}
		if errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, ErrUntrusted) {
			return fmt.Errorf("connecting to %s: %w", c.cfg.URL, err)
		}
		wait := jitter(min(100*time.Millisecond<<min(attempt, 5), 2*time.Second), rand.Float64)
		if time.Until(deadline) < wait {
			return fmt.Errorf("connecting to %s: no server within %s: %w", c.cfg.URL, c.cfg.ConnectTimeout, err)
		}
		if attempt == 0 {
			c.log.Warn("NATS is not there yet, trying again", "url", c.cfg.URL, "patience", c.cfg.ConnectTimeout, "err", err)
		}
		if err := sleep(ctx, wait); err != nil {
			return fmt.Errorf("connecting to %s: %w", c.cfg.URL, err)
		}
	}
}

// made takes the first connection. It may be lost already, and even be back: then onDown and onUp run meanwhile, or
// did before, or will.
func (c *Conn) made(nc *nats.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nc = nc
	if !nc.IsConnected() {
		return // onUp is still to come
	}
	select {
	case <-c.up:
	default:
		close(c.up)
	}
}

func (c *Conn) onDown(nc *nats.Conn, err error) {
	c.mu.Lock()
	select {
	case <-c.up:
		c.up = make(chan struct{})
		close(c.down)
	default:
	}
	c.mu.Unlock()
	if c.gate.aborted.Load() || nc.IsClosed() {
		return
	}
	c.log.Warn("disconnected from NATS", "err", err)
}

func (c *Conn) onUp(nc *nats.Conn) {
	c.mu.Lock()
	select {
	case <-c.up:
	default:
		c.down = make(chan struct{})
		close(c.up)
	}
	c.mu.Unlock()
	c.log.Info("reconnected to NATS", "url", nc.ConnectedUrlRedacted())
}

// Close sends what has been published, with a bound of two seconds, closes and waits for its goroutines.
func (c *Conn) Close() {
	c.closeOnce.Do(func() {
		c.flush()
		c.nc.Close()
		c.end()
	})
	<-c.closed
}

// whileUp returns a context that ends with the present connection, at once if there is none: for what is of no use on
// the next one.
func (c *Conn) whileUp(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	c.mu.Lock()
	up, down := c.up, c.down
	c.mu.Unlock()
	select {
	case <-up:
	default:
		cancel(nats.ErrDisconnected)
	}
	go func() {
		select {
		case <-down:
			cancel(nats.ErrDisconnected)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// flush waits a moment for the server to have what was sent, as long as the connection lives: nats.go would go on
// waiting for the answer on the next one. What is lost here was never acknowledged.
func (c *Conn) flush() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.life), closeTimeout)
	defer cancel()
	ctx, stop := c.whileUp(ctx)
	defer stop()
	if ctx.Err() == nil {
		_ = c.nc.FlushWithContext(ctx)
	}
}

// Abort drops the network connection at once: nothing more is sent, and it never reconnects. For those
// who cannot wait, and for tests of crashes.
func (c *Conn) Abort() {
	c.gate.abort()
	c.closeOnce.Do(func() {
		c.nc.Close()
		c.end()
	})
	<-c.closed
}

// Connected reports whether there is a connection now.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

// URL is the server that it is connected to, without credentials; the configured ones while it is not connected.
func (c *Conn) URL() string {
	if c.nc != nil {
		if u := c.nc.ConnectedUrlRedacted(); u != "" {
			return u
		}
	}
	return c.cfg.URL
}

// ServerVersion is the version of the server that it is connected to.
func (c *Conn) ServerVersion() string { return c.nc.ConnectedServerVersion() }

// MaxPayload is the size in bytes, with headers, of the largest message that the server takes.
func (c *Conn) MaxPayload() int64 { return c.nc.MaxPayload() }

// RequireJetStream returns ErrNoJetStream when JetStream is not enabled on the server or for the account.
func (c *Conn) RequireJetStream(ctx context.Context) error {
	err := c.retry(ctx, func(ctx context.Context) error {
		_, err := c.js.AccountInfo(ctx)
		return err
	})
	if err != nil {
		return classify("asking for JetStream at "+c.URL(), err)
	}
	return nil
}

func checkVersion(version string) error {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) == 3 {
		major, err1 := strconv.Atoi(parts[0])
		minor, err2 := strconv.Atoi(parts[1])
		if err1 == nil && err2 == nil && (major > minMajor || major == minMajor && minor >= minMinor) {
			return nil
		}
	}
	return fmt.Errorf("%w: it is nats-server %s, natsflow needs %d.%d or newer", ErrServerTooOld, version, minMajor, minMinor)
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
