package testenv

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
)

// ends returns the two ends of a connection over l, made by the given means.
type ends func(t *testing.T, l *Link) (client, server net.Conn)

func pipeEnds(t *testing.T, l *Link) (client, server net.Conn) {
	t.Helper()
	far, server := net.Pipe()
	client, err := l.Dialer(func() (net.Conn, error) { return far, nil })()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, client, server) })
	return client, server
}

func tcpEnds(t *testing.T, l *Link) (client, server net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(t, ln)
	addr := strings.TrimPrefix(l.Proxy("nats://"+ln.Addr().String()), "nats://")
	client, err = net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	server, err = ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, client, server) })
	// The proxy joins the two after both have been accepted; a fault that came
	// before would refuse the connection.
	send(t, client, "hello")
	expect(t, server, "hello")
	return client, server
}

func closeAll(t *testing.T, cs ...io.Closer) {
	t.Helper()
	for _, c := range cs {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

func send(t *testing.T, conn net.Conn, s string) {
	t.Helper()
	if err := conn.SetWriteDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, s); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, conn net.Conn, want string) {
	t.Helper()
	if want == "" {
		return
	}
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if n, err := io.ReadFull(conn, got); err != nil || string(got) != want {
		t.Fatalf("read %q, %v, want %q", got[:n], err, want)
	}
}

// expectNothing reads for a while and must get nothing.
func expectNothing(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read %d bytes, %v, want none before the deadline", n, err)
	}
}

// expectEnd must find the connection closed, before anything else arrives.
func expectEnd(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return // a pipe says so already here
	}
	n, err := conn.Read(make([]byte, 1))
	if n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read %d bytes, %v, want the connection's end", n, err)
	}
}

func TestLink(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]ends{"pipe": pipeEnds, "tcp": tcpEnds} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testLink(t, ends)
		})
	}
}

func testLink(t *testing.T, ends ends) {
	t.Helper()
	t.Run("carries bytes and the end", func(t *testing.T) {
		t.Parallel()
		l := NewLink(t)
		client, server := ends(t, l)
		send(t, client, "ping")
		expect(t, server, "ping")
		send(t, server, "pong")
		expect(t, client, "pong")
		if l.Conns() != 1 || l.Dials() != 1 {
			t.Fatalf("got %d of %d connections, want 1 of 1", l.Conns(), l.Dials())
		}
	})
	t.Run("hold, release", func(t *testing.T) {
		t.Parallel()
		l := NewLink(t)
		client, server := ends(t, l)
		l.Hold(ToServer)
		big := strings.Repeat("x", 1<<20) // more than an idle link would take
		send(t, client, "late"+big)
		expectNothing(t, server)
		send(t, server, "other way")
		expect(t, client, "other way")
		l.Release(Both)
		expect(t, server, "late"+big)
	})
	t.Run("freeze, thaw", func(t *testing.T) {
		t.Parallel()
		l := NewLink(t)
		client, server := ends(t, l)
		l.Freeze(ToClient)
		send(t, server, "x") // a buffer takes it
		expectNothing(t, client)
		if err := server.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		n, err := server.Write(make([]byte, 64<<20))
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("wrote %d bytes, %v, want the sender to block", n, err)
		}
		l.Thaw(Both)
		expect(t, client, "x"+strings.Repeat("\x00", n))
	})
	t.Run("cut loses what is held, heal", func(t *testing.T) {
		t.Parallel()
		l := NewLink(t)
		client, server := ends(t, l)
		l.Hold(ToServer)
		send(t, client, "lost")
		expectNothing(t, server)
		l.Cut()
		expectEnd(t, server)
		expectEnd(t, client)
		if _, err := l.Dialer(nil)(); !errors.Is(err, ErrCut) {
			t.Fatalf("got %v, want ErrCut", err)
		}
		l.Release(ToServer)
		l.Heal()
		client, server = ends(t, l)
		send(t, client, "again")
		expect(t, server, "again")
	})
	t.Run("drop", func(t *testing.T) {
		t.Parallel()
		l := NewLink(t)
		client, server := ends(t, l)
		l.Drop()
		expectEnd(t, client)
		expectEnd(t, server)
		client, server = ends(t, l)
		send(t, client, "again")
		expect(t, server, "again")
	})
	t.Run("cut after some bytes", func(t *testing.T) {
		t.Parallel()
		for n, want := range []string{"", "1", "12", "123"} {
			l := NewLink(t)
			client, server := ends(t, l)
			l.CutAfter(ToServer, int64(n))
			_, _ = io.WriteString(client, "1234") // may see the cut or not
			expect(t, server, want)
			expectEnd(t, server)
			expectEnd(t, client)
		}
	})
}

func TestLink_Delay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink(t)
		client, server := pipeEnds(t, l)
		l.Delay(ToServer, time.Second)
		start := time.Now()
		for _, s := range []string{"a", "b", "c"} {
			send(t, client, s)
			time.Sleep(100 * time.Millisecond)
		}
		for i, s := range []string{"a", "b", "c"} {
			expect(t, server, s)
			if got, want := time.Since(start), time.Second+time.Duration(i)*100*time.Millisecond; got != want {
				t.Fatalf("%s arrived after %v, want %v", s, got, want)
			}
		}
	})
}

func TestLink_Server(t *testing.T) {
	t.Run("proxy", func(t *testing.T) {
		t.Parallel()
		s, l := StartServer(t), NewLink(t)
		nc, js := connect(t, l.Proxy(s.URL()))
		mustStream(t, js)
		mustPublish(t, js, "1")
		back := make(chan struct{}, 1)
		nc.SetReconnectHandler(func(*nats.Conn) { back <- struct{}{} })
		l.Cut()
		l.Heal()
		<-back
		mustPublish(t, js, "2")
		wantMsgs(t, js, 2)
	})
	t.Run("bubble", func(t *testing.T) {
		Bubble(t, func(t *testing.T, s *Server) {
			l := NewLink(t)
			_, js := connect(t, "", nats.InProcessServer(inProcess(l.Dialer(s.InProcess))))
			_, direct := connect(t, "", nats.InProcessServer(inProcess(s.InProcess)))
			mustStream(t, js)
			l.Hold(ToServer)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			start := time.Now()
			if _, err := js.Publish(ctx, "s.a", []byte("late")); err == nil {
				t.Fatal("a message was acknowledged that cannot have arrived")
			}
			if d := time.Since(start); d != 10*time.Minute {
				t.Fatalf("gave up after %v, want 10m", d)
			}
			wantMsgs(t, direct, 0)
			l.Release(ToServer)
			time.Sleep(10 * time.Second)
			wantMsgs(t, direct, 0) // the client lost patience and reconnected: the bytes went with the connection
			l.Hold(ToServer)
			if err := js.Conn().Publish("s.a", []byte("late")); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			wantMsgs(t, direct, 0)
			l.Release(ToServer)
			synctest.Wait()
			wantMsgs(t, direct, 1)
		})
	})
}
