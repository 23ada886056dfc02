package bus

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"natsflow/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// connect opens an in-process connection to s, closed at the end of the test.
func connect(tb testing.TB, s *testenv.Server, change ...func(*Config)) *Conn {
	tb.Helper()
	cfg := Config{InProcess: s.InProcess}
	for _, c := range change {
		c(&cfg)
	}
	c, err := Connect(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(c.Close)
	return c
}

// limited is the test's context with a bound, so that a hang is a failure that names its place.
func limited(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	tb.Cleanup(cancel)
	return ctx
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// stream creates a stream "S" that takes "s.>".
func stream(tb testing.TB, c *Conn) {
	tb.Helper()
	if _, err := c.CreateStream(tb.Context(), StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		tb.Fatal(err)
	}
}

// feed publishes n messages with the texts from..from+n-1 to s.<i mod 4>.
func feed(tb testing.TB, c *Conn, from, n int) {
	tb.Helper()
	f := c.NewFeeder(0)
	for i := from; i < from+n; i++ {
		if err := f.Publish(fmt.Sprintf("s.%d", i%4), "", []byte(fmt.Sprint(i))); err != nil {
			tb.Fatal(err)
		}
	}
	if err := f.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// tap counts what is written to a connection, and can cut it or swallow it.
type tap struct {
	mu      sync.Mutex
	conns   []net.Conn
	written int
	swallow bool
}

func (p *tap) dial(dial func() (net.Conn, error)) func() (net.Conn, error) {
	return func() (net.Conn, error) {
		conn, err := dial()
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.conns = append(p.conns, conn)
		return &tapped{Conn: conn, tap: p}, nil
	}
}

// cut drops all connections.
func (p *tap) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

func (p *tap) bytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.written
}

func (p *tap) setSwallow(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.swallow = on
}

type tapped struct {
	net.Conn
	tap *tap
}

func (c *tapped) Write(b []byte) (int, error) {
	c.tap.mu.Lock()
	c.tap.written += len(b)
	swallow := c.tap.swallow
	c.tap.mu.Unlock()
	if swallow {
		return len(b), nil
	}
	return c.Conn.Write(b)
}
