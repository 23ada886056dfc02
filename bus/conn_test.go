package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"natsflow/testenv"
)

func TestConnect(t *testing.T) {
	s := testenv.StartServer(t)
	c, err := Connect(t.Context(), Config{URL: s.URL()})
	if err != nil {
		t.Fatal(err)
	}
	if !c.Connected() || c.URL() != s.URL() || c.ServerVersion() == "" || c.MaxPayload() != 1<<20 {
		t.Errorf("%v %s %s %d", c.Connected(), c.URL(), c.ServerVersion(), c.MaxPayload())
	}
	if err := c.RequireJetStream(limited(t)); err != nil {
		t.Error(err)
	}
	c.Close()
	c.Close()
	if _, err := c.Publish(t.Context(), "s", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Publish after Close: %v", err)
	}
	if _, err := c.Stream(t.Context(), "S"); !errors.Is(err, ErrClosed) {
		t.Errorf("Stream after Close: %v", err)
	}
}

// hangUp ends the first connection as soon as the server has answered the handshake.
type hangUp struct {
	dial func() (net.Conn, error)
	once sync.Once
}

func (h *hangUp) open() (net.Conn, error) {
	conn, err := h.dial()
	h.once.Do(func() { conn = &shortConn{Conn: conn} })
	return conn, err
}

type shortConn struct {
	net.Conn
	over bool
}

func (c *shortConn) Read(b []byte) (int, error) {
	if c.over {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(b)
	c.over = bytes.Contains(b[:n], []byte("PONG"))
	return n, err
}

// A connection that is lost as soon as it is there comes back. While it is away the server has no version, which does
// not make it too old.
func TestConnect_LostAtOnce(t *testing.T) {
	s := testenv.StartServer(t)
	for range 25 {
		h := &hangUp{dial: s.InProcess}
		c, err := Connect(limited(t), Config{InProcess: h.open})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Stream(limited(t), "S"); !errors.Is(err, ErrNotFound) {
			t.Errorf("it cannot be used: %v", err)
		}
		c.Close()
	}
}

// A connection that is not there again in time says so, and one that may not come back ends at once.
func TestConn_ready(t *testing.T) {
	s := testenv.StartServer(t)
	link := testenv.NewLink(t)
	var shut atomic.Bool
	c := connect(t, s, func(cfg *Config) {
		cfg.InProcess, cfg.Trusted = link.Dialer(s.InProcess), func() bool { return !shut.Load() }
	})
	link.Cut()
	for c.Connected() {
		if err := sleep(limited(t), time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.ready(limited(t), time.Now()); !errors.Is(err, nats.ErrDisconnected) {
		t.Errorf("no server: %v", err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.ready(over, time.Now().Add(time.Hour)); !errors.Is(err, context.Canceled) {
		t.Errorf("no patience: %v", err)
	}
	shut.Store(true)
	if err := c.ready(limited(t), time.Now().Add(time.Hour)); !errors.Is(err, ErrUntrusted) {
		t.Errorf("no trust: %v", err)
	}
}

func TestConnect_Refused(t *testing.T) {
	s := testenv.StartServer(t, testenv.NoJetStream(), testenv.Configure(func(o *server.Options) { o.Username, o.Password = "u", "p" }))
	ctx := limited(t)
	if _, err := Connect(ctx, Config{URL: s.URL()}); err == nil {
		t.Fatal("without a password")
	}
	c, err := Connect(ctx, Config{URL: s.URL(), User: "u", Password: "p"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.RequireJetStream(ctx); !errors.Is(err, ErrNoJetStream) {
		t.Errorf("RequireJetStream: %v", err)
	}
	for _, cfg := range []Config{{TLSCert: "x"}, {Creds: "a", NKey: "b"}, {Password: "p"}, {Context: "no-such"}, {Context: "../x"}, {NKey: "/none"}} {
		if _, err := Connect(ctx, cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
}

func TestConnect_Patience(t *testing.T) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	url := "nats://" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Connect(t.Context(), Config{URL: url, ConnectTimeout: 200 * time.Millisecond}); err == nil {
		t.Fatal("connected to nothing")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	bye := errors.New("bye")
	time.AfterFunc(100*time.Millisecond, func() { cancel(bye) })
	if _, err := Connect(ctx, Config{URL: url}); !errors.Is(err, bye) {
		t.Fatalf("cancelled: %v", err)
	}
}

func TestConnect_Context(t *testing.T) {
	s := testenv.StartServer(t, testenv.Configure(func(o *server.Options) { o.Username, o.Password = "u", "p" }))
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	write := func(name string, fields map[string]any) {
		t.Helper()
		file := filepath.Join(dir, "nats", "context", name+".json")
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, must(json.Marshal(fields)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("good", map[string]any{"description": "", "url": s.URL(), "user": "u", "password": "p", "inbox_prefix": "_MY", "color_scheme": "x"})
	write("bad", map[string]any{"url": s.URL(), "user": "u", "password": "wrong"})
	write("nsc", map[string]any{"url": s.URL(), "nsc": "nsc://x"})
	ctx := limited(t)
	for _, cfg := range []Config{{Context: "good"}, {Context: "bad", User: "u", Password: "p"}} {
		c, err := Connect(ctx, cfg)
		if err != nil {
			t.Fatalf("%+v: %v", cfg, err)
		}
		if err := c.RequireJetStream(ctx); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	for _, name := range []string{"bad", "nsc"} {
		if _, err := Connect(ctx, Config{Context: name}); err == nil {
			t.Errorf("context %s was taken", name)
		}
	}
	if _, err := Connect(ctx, Config{Context: "none"}); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such context: %v", err)
	}
}

func TestCheckVersion(t *testing.T) {
	for v, ok := range map[string]bool{
		"2.15.0": true, "2.15.3": true, "2.16.0-dev": true, "3.0.0": true, "2.15.0-RC.1": true,
		"2.14.9": false, "1.99.0": false, "": false, "x": false, "2.15": false,
	} {
		if err := checkVersion(v); (err == nil) != ok || err != nil && !errors.Is(err, ErrServerTooOld) {
			t.Errorf("%q: %v", v, err)
		}
	}
}

// TestConn_UnknownOutcome: the connection is cut while a write is under way.
func TestConn_UnknownOutcome(t *testing.T) {
	s := testenv.StartServer(t)
	var p tap
	c := connect(t, s, func(cfg *Config) { cfg.InProcess = p.dial(cfg.InProcess) })
	b := bucket(t, c, BucketConfig{})
	ctx := limited(t)
	p.setSwallow(true)
	time.AfterFunc(50*time.Millisecond, func() { p.setSwallow(false); p.cut() })
	start := time.Now()
	_, err := b.Append(ctx, "log.1", nil, "log.>", 0)
	if !errors.Is(err, ErrUnknownOutcome) || !Retryable(err) {
		t.Fatalf("Append: %v", err)
	}
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("it took %s to notice", d)
	}
	// It reconnects, and reads are simply repeated.
	if _, err := b.Last(ctx, "log.>"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("Last: %v", err)
	}
	if _, err := b.Append(ctx, "log.1", nil, "log.>", 0); err != nil {
		t.Fatal(err)
	}
	// Without an answer, a write ends with ctx.
	p.setSwallow(true)
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := b.Append(short, "log.2", nil, "log.>", 1); !errors.Is(err, ErrUnknownOutcome) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Append: %v", err)
	}
	// A failed server is not a stale answer either.
	p.setSwallow(false)
	s.Stop()
	short, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := b.Append(short, "log.2", nil, "log.>", 1); !errors.Is(err, ErrUnknownOutcome) {
		t.Fatalf("Append: %v", err)
	}
}

// guarded runs a test against a guarded connection of either kind.
func guarded(t *testing.T, run func(t *testing.T, s *testenv.Server, c *Conn, trusted *atomic.Bool, written func() int)) {
	t.Run("in process", func(t *testing.T) {
		s := testenv.StartServer(t)
		var trusted atomic.Bool
		trusted.Store(true)
		var p tap
		c := connect(t, s, func(cfg *Config) { cfg.InProcess, cfg.Trusted = p.dial(cfg.InProcess), trusted.Load })
		run(t, s, c, &trusted, p.bytes)
	})
	t.Run("tcp", func(t *testing.T) {
		s := testenv.StartServer(t)
		var trusted atomic.Bool
		trusted.Store(true)
		var asked atomic.Int64
		proxy := newCounter(t, s.URL())
		c := connect(t, s, func(cfg *Config) {
			cfg.InProcess, cfg.URL, cfg.Trusted = nil, proxy.url, func() bool { asked.Add(1); return trusted.Load() }
		})
		run(t, s, c, &trusted, func() int { return int(proxy.bytes.Load()) })
		if asked.Load() < 3 {
			t.Errorf("the guard was asked %d times", asked.Load())
		}
	})
}

func TestConn_Guarded(t *testing.T) {
	guarded(t, func(t *testing.T, s *testenv.Server, c *Conn, trusted *atomic.Bool, written func() int) {
		ctx := limited(t)
		stream(t, c)
		feed(t, c, 0, 10)
		if err := c.nc.Flush(); err != nil {
			t.Fatal(err)
		}
		trusted.Store(false)
		before := written()
		for range 100 {
			_ = c.Notify("s.late", []byte("late"))
		}
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if _, err := c.Publish(short, "s.late", nil, nil); !errors.Is(err, ErrUnknownOutcome) {
			t.Errorf("Publish: %v", err)
		}
		// Neither closing nor reconnecting lets anything out.
		c.Close()
		other := connect(t, s)
		if got := must(other.Stream(ctx, "S")).LastSeq; got != 10 {
			t.Errorf("last sequence %d", got)
		}
		if after := written(); after != before {
			t.Errorf("%d bytes left the connection", after-before)
		}
		if _, err := Connect(ctx, Config{InProcess: s.InProcess, Trusted: trusted.Load}); !errors.Is(err, ErrUntrusted) {
			t.Errorf("Connect without trust: %v", err)
		}
	})
}

// TestConn_GuardedReconnect: what is published while the connection is away must not leave later.
func TestConn_GuardedReconnect(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s, func(cfg *Config) { cfg.Trusted = func() bool { return true } })
	stream(t, c)
	ctx := limited(t)
	s.Stop()
	for c.Connected() {
		if err := sleep(ctx, time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	failed := 0
	for range 100 {
		if c.Notify("s.late", []byte("late")) != nil {
			failed++
		}
	}
	if failed != 100 {
		t.Errorf("%d of 100 were taken while disconnected", 100-failed)
	}
	s.Restart()
	if seq, err := c.Publish(ctx, "s.new", nil, nil); err != nil || seq != 1 {
		t.Errorf("Publish: %d, %v", seq, err)
	}
}

func TestConn_Abort(t *testing.T) {
	s := testenv.StartServer(t)
	var p tap
	c := connect(t, s, func(cfg *Config) { cfg.InProcess = p.dial(cfg.InProcess) })
	stream(t, c)
	c.Abort()
	before := p.bytes()
	if c.Connected() || c.Notify("s.x", nil) == nil {
		t.Error("still connected")
	}
	if _, err := c.Publish(t.Context(), "s.x", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Publish: %v", err)
	}
	if p.bytes() != before {
		t.Error("something was written")
	}
	c.Close()
}

func TestConn_Subscribe(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	got := make(chan string, 1)
	stop := must(c.Subscribe("a.*", func(subject string, data []byte) { got <- subject + " " + string(data) }))
	if err := c.Notify("a.b", []byte("x")); err != nil {
		t.Fatal(err)
	}
	if s := <-got; s != "a.b x" {
		t.Error(s)
	}
	stop()
}

func TestFeeder(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	ctx := limited(t)
	f := c.NewFeeder(16)
	for range 2 {
		for i := range 100 {
			if err := f.Publish("s.x", FormatPosition("f", "t", 1, i), []byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Flush(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if got := must(c.Stream(ctx, "S")).LastSeq; got != 100 {
		t.Errorf("last sequence %d: ids were not used", got)
	}
	if err := f.Publish("nowhere", "", nil); err != nil {
		t.Fatal(err)
	}
	if err := f.Flush(ctx); !errors.Is(err, ErrUnknownOutcome) {
		t.Errorf("to nowhere: %v", err)
	}
	if err := f.Flush(ctx); err != nil {
		t.Errorf("an error stays: %v", err)
	}
}

// TestConn_VirtualTime: nothing here keeps virtual time from passing, and a dead server is noticed by timers alone.
func TestConn_VirtualTime(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		var p tap
		c := connect(t, s, func(cfg *Config) {
			cfg.InProcess, cfg.Trusted = p.dial(cfg.InProcess), func() bool { return true }
		})
		b := bucket(t, c, BucketConfig{MarkerTTL: time.Second})
		ctx := t.Context()
		must(b.Put(ctx, "k", nil, 0))
		p.setSwallow(true)
		start := time.Now()
		if _, err := b.Put(ctx, "k", nil, 0); !errors.Is(err, ErrUnknownOutcome) {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("it took %s", d)
		}
		p.setSwallow(false)
		p.cut()
		synctest.Wait()
		time.Sleep(time.Hour)
		must(b.Put(ctx, "k", nil, 0))
	})
}

// counter is a TCP proxy that counts what clients send.
type counter struct {
	url   string
	bytes atomic.Int64
}

func newCounter(t *testing.T, url string) *counter {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	p := &counter{url: "nats://" + l.Addr().String()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			srv, err := net.Dial("tcp", url[len("nats://"):])
			if err != nil {
				_ = client.Close()
				continue
			}
			go copyCounting(srv, client, &p.bytes)
			go copyCounting(client, srv, new(atomic.Int64))
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return p
}

func copyCounting(dst, src net.Conn, n *atomic.Int64) {
	buf := make([]byte, 32<<10)
	for {
		k, err := src.Read(buf)
		n.Add(int64(k))
		if err == nil {
			_, err = dst.Write(buf[:k])
		}
		if err != nil {
			_ = dst.Close()
			_ = src.Close()
			return
		}
	}
}

// A close waits for the server to have what was sent, and no longer than the connection lasts.
func TestConn_closeOfLostConnection(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		link := testenv.NewLink(t)
		c := connect(t, s, func(cfg *Config) { cfg.InProcess = link.Dialer(s.InProcess) })
		link.Hold(testenv.ToServer)
		began, closed := time.Now(), make(chan struct{})
		go func() {
			defer close(closed)
			c.Close()
		}()
		time.Sleep(time.Second)
		select {
		case <-closed:
			t.Error("closed while the server has not got what was sent")
		default:
		}
		link.Cut()
		<-closed
		if took := time.Since(began); took != time.Second {
			t.Errorf("closing took %v, the connection lasted for 1s", took)
		}
	})
}
