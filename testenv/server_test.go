package testenv

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv/embed"
)

// connect returns a JetStream client of s, by its URL or in process.
func connect(t *testing.T, url string, opts ...nats.Option) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(url, append(opts, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// inProcess is the dialer that nats.go wants for a server without a network.
type inProcess func() (net.Conn, error)

func (f inProcess) InProcessConn() (net.Conn, error) { return f() }

func mustStream(t *testing.T, js jetstream.JetStream) jetstream.Stream {
	t.Helper()
	str, err := js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
	if err != nil {
		t.Fatal(err)
	}
	return str
}

func mustPublish(t *testing.T, js jetstream.JetStream, data string) {
	t.Helper()
	if _, err := js.Publish(t.Context(), "s.a", []byte(data)); err != nil {
		t.Fatal(err)
	}
}

func wantMsgs(t *testing.T, js jetstream.JetStream, want uint64) {
	t.Helper()
	str, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if got := str.CachedInfo().State.Msgs; got != want {
		t.Fatalf("stream holds %d messages, want %d", got, want)
	}
}

func TestStartServer(t *testing.T) {
	t.Parallel()
	t.Run("restart keeps port and store", func(t *testing.T) {
		t.Parallel()
		s := StartServer(t)
		url := s.URL()
		nc, js := connect(t, url)
		mustStream(t, js)
		mustPublish(t, js, "1")
		gone, back := make(chan struct{}, 10), make(chan struct{}, 10)
		nc.SetDisconnectErrHandler(func(*nats.Conn, error) { gone <- struct{}{} })
		nc.SetReconnectHandler(func(*nats.Conn) { back <- struct{}{} })
		s.Stop()
		s.Stop() // stopping twice is harmless
		<-gone
		if _, err := s.InProcess(); !errors.Is(err, embed.ErrStopped) {
			t.Fatalf("got %v, want ErrStopped", err)
		}
		s.Restart()
		<-back
		if s.URL() != url {
			t.Fatalf("URL changed from %s to %s", url, s.URL())
		}
		wantMsgs(t, js, 1)
	})
	t.Run("without listener", func(t *testing.T) {
		t.Parallel()
		s := StartServer(t, DontListen())
		if s.URL() != "" {
			t.Fatalf("got URL %s of a server that does not listen", s.URL())
		}
		_, js := connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
		mustStream(t, js)
		mustPublish(t, js, "1")
		s.Restart()
		_, js = connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
		wantMsgs(t, js, 1)
	})
	t.Run("store limit", func(t *testing.T) {
		t.Parallel()
		s := StartServer(t, LimitStore(64<<10))
		_, js := connect(t, s.URL())
		mustStream(t, js)
		big := strings.Repeat("x", 40<<10)
		mustPublish(t, js, big)
		mustPublish(t, js, big) // the server looks at what it holds before it adds to it
		var api *jetstream.APIError
		if _, err := js.Publish(t.Context(), "s.a", []byte(big)); !errors.As(err, &api) {
			t.Fatalf("got %v, want the server's refusal", err)
		}
		s.Restart(LimitStore(1 << 20))
		_, js = connect(t, s.URL()) // the former connection may not have noticed yet
		mustPublish(t, js, big)
		wantMsgs(t, js, 3)
	})
}
