// Package embed runs a nats-server with JetStream inside this process, for
// `natsflow dev` and for tests. It does not import testing, so that the binary
// does not either; what tests need on top is in package testenv.
package embed

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"natsflow/testenv/internal/clock"
)

// Version is the version of the server that is linked in, e.g. "2.15.3".
const Version = server.VERSION

// ErrStopped is returned by [Server.InProcess] while the server does not run.
var ErrStopped = errors.New("embedded server is stopped")

const (
	// readyTimeout bounds a start: milliseconds as a rule, more when a large
	// store has to be recovered.
	readyTimeout = 60 * time.Second
	// clockPatience bounds the wait for a test in virtual time to end.
	clockPatience = 2 * time.Minute
	// settle is how long a server in virtual time has to end what its clients, which
	// are gone, have asked for. Time passes when all of that waits.
	settle = time.Millisecond
)

// Config says how an embedded server runs. Only Store is required.
type Config struct {
	// Store is the folder of the JetStream data. It is created if missing.
	Store string
	// Listen is "host:port" of the client listener. Port 0 takes a free one.
	// Empty means no listener at all: only [Server.InProcess] connects.
	Listen string
	// Name of the server. Defaults to "natsflow".
	Name string
	// MaxStore limits what JetStream may store in files, in bytes.
	// Defaults to the server's own choice, 75% of the free disk.
	MaxStore int64
	// MaxPayload limits a message, in bytes. Defaults to the server's 1 MiB.
	MaxPayload int32
	// SyncAlways makes each write wait for fsync. Defaults to false: the
	// server syncs every two minutes.
	SyncAlways bool
	// NoJetStream leaves JetStream off.
	NoJetStream bool
	// Logger gets the server's warnings and errors; its notices as Debug.
	// Defaults to none.
	Logger *slog.Logger
	// Configure, when set, has the last word on the server's options. It is
	// called at each start.
	Configure func(*server.Options)
	// Virtual says that the caller runs inside a testing/synctest bubble and
	// has the process's clock for itself, as testenv.Bubble sees to.
	Virtual bool
}

func (c Config) validate() error {
	var errs []error
	if c.Store == "" && !c.NoJetStream {
		errs = append(errs, errors.New("no store folder given"))
	}
	if c.MaxStore < 0 {
		errs = append(errs, fmt.Errorf("store limit is negative: %d", c.MaxStore))
	}
	if c.MaxPayload < 0 {
		errs = append(errs, fmt.Errorf("payload limit is negative: %d", c.MaxPayload))
	}
	return errors.Join(errs...)
}

// options translates the configuration. port is the one to listen on, 0 for
// any, and ignored without a listener.
func (c Config) options(host string, port int) *server.Options {
	o := &server.Options{
		ServerName:        c.Name,
		JetStream:         !c.NoJetStream,
		StoreDir:          c.Store,
		JetStreamMaxStore: c.MaxStore,
		MaxPayload:        c.MaxPayload,
		SyncAlways:        c.SyncAlways,
		NoSigs:            true, // signals are the embedding process's business
		NoLog:             c.Logger == nil,
		DontListen:        c.Listen == "",
		Host:              host,
		Port:              port,
	}
	if o.ServerName == "" {
		o.ServerName = "natsflow"
	}
	if port == 0 {
		o.Port = server.RANDOM_PORT
	}
	if c.Configure != nil {
		c.Configure(o)
	}
	return o
}

// Server is an embedded server. It is safe for concurrent use.
type Server struct {
	host string
	// turn is held by whoever starts or stops the server. It is a channel and no mutex,
	// since both take time: whoever waits for a mutex keeps virtual time from passing,
	// also for the one who holds it.
	turn    chan struct{}
	release func() // gives the process's clock back

	mu    sync.Mutex // never held while anything waits
	cfg   Config
	port  int            // of the first start, kept by later ones; 0 without a listener
	run   *server.Server // nil while the server is stopped, stops or starts
	conns map[*conn]bool // the open ones of InProcess, in virtual time
}

// conn is a connection that its server forgets when it is closed.
type conn struct {
	net.Conn
	of *Server
}

// Close closes the connection.
func (c *conn) Close() error {
	c.of.mu.Lock()
	delete(c.of.conns, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// Start starts a server and returns when it accepts connections. The caller
// must call [Server.Stop].
func Start(cfg Config) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("configuring embedded server: %w", err)
	}
	s := &Server{cfg: cfg, turn: make(chan struct{}, 1), conns: make(map[*conn]bool)}
	if cfg.Listen != "" {
		host, port, err := net.SplitHostPort(cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("parsing listen address %q: %w", cfg.Listen, err)
		}
		if s.port, err = strconv.Atoi(port); err != nil || s.port < 0 || s.port > 65535 {
			return nil, fmt.Errorf("parsing listen address %q: port is not 0 to 65535", cfg.Listen)
		}
		s.host = host
	}
	if err := s.start(); err != nil {
		return nil, err
	}
	return s, nil
}

// Stop shuts the server down as a signal would, and waits for it. What was
// acknowledged is in the store. Stopping a stopped server does nothing.
func (s *Server) Stop() {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.stop()
}

// stop needs the turn.
func (s *Server) stop() {
	s.mu.Lock()
	run, conns := s.run, slices.Collect(maps.Keys(s.conns))
	s.run = nil
	s.mu.Unlock()
	if run == nil {
		return
	}
	if s.config().Virtual {
		// Shutdown sleeps under a lock of the server's when a consumer has a pull
		// request; a client's request that comes then and waits for that lock would
		// stop virtual time for good. So the clients go first, and what they have
		// asked for ends. (The server's own clients, of mirrors and sources, stay: a
		// request of theirs that falls into that moment is for the watchdog of bubbles.)
		for _, c := range conns {
			c.Close() //nolint:errcheck // it is thrown away
		}
		time.Sleep(settle)
	}
	run.Shutdown()
	run.WaitForShutdown()
	s.release()
}

// Restart stops the server, if it runs, and starts it on the same store and
// port. change, when not nil, may edit the configuration first (its Store and
// Listen are fixed).
func (s *Server) Restart(change func(*Config)) error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.stop()
	if change != nil {
		before := s.config()
		cfg := before
		change(&cfg)
		cfg.Store, cfg.Listen, cfg.Virtual = before.Store, before.Listen, before.Virtual
		if err := cfg.validate(); err != nil {
			return fmt.Errorf("configuring embedded server: %w", err)
		}
		s.mu.Lock()
		s.cfg = cfg
		s.mu.Unlock()
	}
	return s.start()
}

// URL is where clients connect, e.g. "nats://127.0.0.1:41234"; empty without a
// listener. It is the same after a restart.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cfg.Listen == "" {
		return ""
	}
	host := s.host
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = "127.0.0.1" // listens on every address: loopback is one of them
	}
	return "nats://" + net.JoinHostPort(host, strconv.Itoa(s.port))
}

// Store is the folder of the JetStream data.
func (s *Server) Store() string { return s.config().Store }

func (s *Server) config() Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg
}

// InProcess opens a connection that does not use the network. It returns
// [ErrStopped] while the server is stopped, stops or starts, so that a client's
// reconnect loop sees what it would see on a network.
func (s *Server) InProcess() (net.Conn, error) {
	s.mu.Lock()
	run := s.run
	s.mu.Unlock()
	if run == nil {
		return nil, ErrStopped
	}
	opened, err := run.InProcessConn()
	if err != nil {
		return nil, fmt.Errorf("connecting to embedded server: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.cfg.Virtual {
		return opened, nil
	}
	if s.run != run {
		opened.Close() //nolint:errcheck // it is thrown away
		return nil, ErrStopped
	}
	c := &conn{opened, s}
	s.conns[c] = true
	return c, nil
}

// start needs the turn, or to be alone.
func (s *Server) start() (err error) {
	release := func() {}
	s.mu.Lock()
	cfg, port := s.cfg, s.port
	s.mu.Unlock()
	if !cfg.Virtual {
		if release, err = clock.Shared(clockPatience); err != nil {
			return fmt.Errorf("starting embedded server: %w", err)
		}
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	run, err := server.NewServer(cfg.options(s.host, port))
	if err != nil {
		return fmt.Errorf("creating embedded server: %w", err)
	}
	// A fatal condition, e.g. a port that is taken, reaches us through the
	// logger only: the server has no other way to say so.
	failed := newLogger(cfg.Logger)
	run.SetLoggerV2(failed, false, false, false)
	// Start returns early after a fatal condition and otherwise when the accept
	// loop runs, so it is safe to look at the outcome afterwards.
	run.Start()
	if err := failed.fatal(); err != nil {
		run.Shutdown()
		run.WaitForShutdown()
		return fmt.Errorf("starting embedded server: %w", err)
	}
	if !run.ReadyForConnections(readyTimeout) {
		run.Shutdown()
		run.WaitForShutdown()
		return fmt.Errorf("starting embedded server: not ready after %v", readyTimeout)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if addr, ok := run.Addr().(*net.TCPAddr); ok {
		s.port = addr.Port
	}
	s.run, s.release = run, release
	return nil
}
