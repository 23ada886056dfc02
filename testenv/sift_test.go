package testenv

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// Whatever way the bytes are cut up, exactly the messages that are not kept are gone.
func TestSieve(t *testing.T) {
	t.Parallel()
	const (
		connect = "CONNECT {\"verbose\":false}\r\nPING\r\nSUB _INBOX.1.* 1\r\n"
		plain   = "PUB keep.a 5\r\nhe\r\no\r\n"
		lost    = "PUB lose.a _INBOX.1.2 0\r\n\r\n"
		headers = "hpub keep.b _INBOX.1.3 14 19\r\nNATS/1.0\r\n\r\nx\r\nPUB lo\r\n"
		lost2   = "HPUB lose.b 12 15\r\nNATS/1.0\r\n\r\nxyz\r\n"
		answer  = "MSG keep.c 1 3\r\nabc\r\nHMSG lose.c 1 _R_ 12 12\r\nNATS/1.0\r\n\r\n\r\n-ERR 'x'\r\n"
		want    = connect + plain + headers + "MSG keep.c 1 3\r\nabc\r\n-ERR 'x'\r\n"
	)
	all := connect + plain + lost + headers + lost2 + answer
	keep := func(subject string) bool { return strings.HasPrefix(subject, "keep.") }
	for size := 1; size <= len(all); size++ {
		s, got := &sieve{}, ""
		for rest := all; rest != ""; {
			n := min(size, len(rest))
			got += string(s.sift([]byte(rest[:n]), keep))
			rest = rest[n:]
		}
		if got != want {
			t.Fatalf("by %d bytes: got %q, want %q", size, got, want)
		}
	}
	if got := string((&sieve{}).sift([]byte(all), nil)); got != all {
		t.Errorf("without a rule: got %q", got)
	}
}

// Messages are lost, in either direction, and the connection lasts.
func TestLink_Sift(t *testing.T) {
	t.Parallel()
	s, l := StartServer(t), NewLink(t)
	var lose atomic.Value
	lose.Store("-")
	keep := func(subject string) bool { return !strings.HasPrefix(subject, lose.Load().(string)) }
	l.Sift(Both, keep)
	nc, js := connect(t, l.Proxy(s.URL()))
	direct, _ := connect(t, s.URL())
	mustStream(t, js)
	mustPublish(t, js, "1")
	sub, err := nc.SubscribeSync("to.client.*")
	if err != nil {
		t.Fatal(err)
	}
	flush := func(nc *nats.Conn) {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	publish := func(nc *nats.Conn, subject string) {
		if err := nc.Publish(subject, []byte(subject)); err != nil {
			t.Fatal(err)
		}
		flush(nc)
	}
	flush(nc)
	lose.Store("s.lost")
	publish(nc, "s.lost")
	lose.Store("to.client.lost")
	publish(direct, "to.client.lost")
	publish(direct, "to.client.kept")
	m, err := sub.NextMsg(time.Minute)
	if err != nil || m.Subject != "to.client.kept" {
		t.Errorf("received %v, %v", m, err)
	}
	mustPublish(t, js, "2")
	wantMsgs(t, js, 2)
	if l.Conns() != 1 || l.Dials() != 1 {
		t.Errorf("%d of %d connections, want 1 of 1", l.Conns(), l.Dials())
	}
}
