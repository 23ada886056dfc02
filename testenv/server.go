package testenv

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"natsflow/testenv/embed"
)

// Option changes how a server for tests is configured.
type Option func(*embed.Config)

// DontListen leaves the network listener out: only [Server.InProcess] connects.
func DontListen() Option { return func(c *embed.Config) { c.Listen = "" } }

// Store puts the JetStream data in dir instead of a folder of the test's own,
// e.g. to start a second server on what a first one left.
func Store(dir string) Option { return func(c *embed.Config) { c.Store = dir } }

// LimitStore limits what JetStream may store in files, in bytes. A full store
// refuses writes as one on a full disk does. The server compares the limit with
// what it holds before it adds a message, so the last one may exceed it.
func LimitStore(bytes int64) Option { return func(c *embed.Config) { c.MaxStore = bytes } }

// MaxPayload limits the size of a message, in bytes, headers included.
func MaxPayload(bytes int32) Option { return func(c *embed.Config) { c.MaxPayload = bytes } }

// NoJetStream starts a server with JetStream off.
func NoJetStream() Option { return func(c *embed.Config) { c.NoJetStream = true } }

// LogTo sends the server's warnings and errors to logger.
func LogTo(logger *slog.Logger) Option { return func(c *embed.Config) { c.Logger = logger } }

// Configure has the last word on the server's own options, e.g. for TLS or
// users; several of them apply in turn. Only packages that may import nats-server
// can use it.
func Configure(change func(*server.Options)) Option {
	return func(c *embed.Config) {
		before := c.Configure
		c.Configure = func(o *server.Options) {
			if before != nil {
				before(o)
			}
			change(o)
		}
	}
}

// Server is a nats-server inside the test's process. It is safe for concurrent use.
type Server struct {
	tb  testing.TB
	run *embed.Server
}

// StartServer starts a nats-server with JetStream on a free loopback port. Its
// store is a temporary folder of the test. It stops when the test ends.
func StartServer(tb testing.TB, opts ...Option) *Server {
	tb.Helper()
	return startServer(tb, embed.Config{Listen: "127.0.0.1:0"}, opts)
}

func startServer(tb testing.TB, cfg embed.Config, opts []Option) *Server {
	tb.Helper()
	for _, opt := range opts {
		opt(&cfg)
	}
	if cfg.Store == "" {
		cfg.Store = tb.TempDir()
	}
	run, err := embed.Start(cfg)
	if err != nil {
		tb.Fatalf("testenv: %v", err)
	}
	tb.Cleanup(run.Stop)
	return &Server{tb: tb, run: run}
}

// URL is where clients connect; empty without a listener. It outlives restarts.
func (s *Server) URL() string { return s.run.URL() }

// Store is the folder of the JetStream data.
func (s *Server) Store() string { return s.run.Store() }

// InProcess opens a connection that does not use the network, to whichever
// server runs now; it returns [embed.ErrStopped] when none does.
func (s *Server) InProcess() (net.Conn, error) { return s.run.InProcess() }

// Stop shuts the server down as SIGTERM would, and waits for it.
func (s *Server) Stop() { s.run.Stop() }

// Restart stops the server, if it runs, and starts it on the same store and
// port. Options apply on top of those it had; [Store], [DontListen] do not.
func (s *Server) Restart(opts ...Option) {
	s.tb.Helper()
	err := s.run.Restart(func(c *embed.Config) {
		for _, opt := range opts {
			opt(c)
		}
	})
	if err != nil {
		s.tb.Fatalf("testenv: %v", err)
	}
}

// LoseMessages stops the server, removes the messages of a stream from its store, as a
// crash of a machine or an old backup can, and starts it again. The stream is the same,
// with the same time of creation, and counts from 1 again.
func (s *Server) LoseMessages(stream string) {
	s.tb.Helper()
	s.Stop()
	dir := filepath.Join(s.Store(), "jetstream", "$G", "streams", stream)
	if _, err := os.Stat(filepath.Join(dir, "meta.inf")); err != nil {
		s.tb.Fatalf("testenv: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "msgs")); err != nil {
		s.tb.Fatalf("testenv: %v", err)
	}
	s.Restart()
}
