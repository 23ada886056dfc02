package testenv

import (
	"context"
	"net"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// adminTimeout bounds one request of an [Admin].
const adminTimeout = 10 * time.Second

// Admin does to a server's streams what an operator may do to them behind the
// back of a running flow. A failure ends the test.
type Admin struct {
	s  *Server
	js jetstream.JetStream
}

// Admin connects to the server; the connection ends with the test.
func (s *Server) Admin() *Admin {
	s.tb.Helper()
	nc, err := nats.Connect("", nats.InProcessServer(dialer(s.InProcess)))
	if err != nil {
		s.tb.Fatalf("testenv: connecting an admin: %v", err)
	}
	s.tb.Cleanup(func() {
		closed := make(chan struct{})
		nc.SetClosedHandler(func(*nats.Conn) { close(closed) })
		nc.Close()
		<-closed
	})
	js, err := jetstream.New(nc)
	if err != nil {
		s.tb.Fatalf("testenv: connecting an admin: %v", err)
	}
	return &Admin{s: s, js: js}
}

func (a *Admin) do(what string, fn func(ctx context.Context) error) {
	a.s.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), adminTimeout)
	defer cancel()
	if err := fn(ctx); err != nil {
		a.s.tb.Fatalf("testenv: %s: %v", what, err)
	}
}

// Consumers returns the consumers of a stream.
func (a *Admin) Consumers(stream string) []*jetstream.ConsumerInfo {
	a.s.tb.Helper()
	var all []*jetstream.ConsumerInfo
	a.do("listing consumers of "+stream, func(ctx context.Context) error {
		s, err := a.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		list := s.ListConsumers(ctx)
		for info := range list.Info() {
			all = append(all, info)
		}
		return list.Err()
	})
	return all
}

// DeleteConsumer deletes a consumer.
func (a *Admin) DeleteConsumer(stream, name string) {
	a.s.tb.Helper()
	a.do("deleting consumer "+name, func(ctx context.Context) error { return a.js.DeleteConsumer(ctx, stream, name) })
}

// CreateConsumer creates a durable consumer that acknowledges each message by
// itself and begins at a sequence.
func (a *Admin) CreateConsumer(stream, name string, from uint64) {
	a.s.tb.Helper()
	a.do("creating consumer "+name, func(ctx context.Context) error {
		_, err := a.js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
			Name: name, Durable: name, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Second, MaxAckPending: 10,
			DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		})
		return err
	})
}

// Purge removes the messages of a stream before a sequence.
func (a *Admin) Purge(stream string, before uint64) {
	a.s.tb.Helper()
	a.do("purging "+stream, func(ctx context.Context) error {
		s, err := a.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		return s.Purge(ctx, jetstream.WithPurgeSequence(before))
	})
}

// DeleteMsg removes one message of a stream.
func (a *Admin) DeleteMsg(stream string, seq uint64) {
	a.s.tb.Helper()
	a.do("deleting a message of "+stream, func(ctx context.Context) error {
		s, err := a.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		return s.DeleteMsg(ctx, seq)
	})
}

// dialer makes a [nats.InProcessConnProvider] of a function.
type dialer func() (net.Conn, error)

// InProcessConn implements nats.InProcessConnProvider.
func (d dialer) InProcessConn() (net.Conn, error) { return d() }
