package control

import (
	"bytes"
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"natsflow/bus"
)

// meter counts what goes over connections: messages and bytes, both ways.
type meter struct {
	mu              sync.Mutex
	messages, bytes int
}

func (m *meter) add(messages, size int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.messages += messages
	m.bytes += size
}

// since is what was counted after an earlier state.
func (m *meter) since(messages, size int) (int, int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.messages - messages, m.bytes - size
}

// connect opens a connection that is counted.
func (m *meter) connect(s *site) *bus.Conn {
	s.t.Helper()
	conn, err := bus.Connect(s.ctx, bus.Config{InProcess: func() (net.Conn, error) {
		conn, err := s.srv.InProcess()
		if err != nil {
			return nil, err
		}
		return &metered{Conn: conn, in: protocol{m: m}, out: protocol{m: m}}, nil
	}})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(conn.Close)
	return conn
}

type metered struct {
	net.Conn
	in, out protocol
}

func (c *metered) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.in.count(b[:n])
	return n, err
}

func (c *metered) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.out.count(b[:n])
	return n, err
}

// protocol follows one direction of a connection of NATS.
type protocol struct {
	m    *meter
	line []byte
	skip int // of a payload
}

func (p *protocol) count(b []byte) {
	messages := 0
	for rest := b; len(rest) > 0; {
		if n := min(p.skip, len(rest)); n > 0 {
			p.skip -= n
			rest = rest[n:]
			continue
		}
		end := bytes.IndexByte(rest, '\n')
		if end < 0 {
			p.line = append(p.line, rest...)
			break
		}
		line := append(p.line, rest[:end]...)
		rest, p.line = rest[end+1:], nil
		fields := bytes.Fields(line)
		if len(fields) == 0 {
			continue
		}
		switch string(bytes.ToUpper(fields[0])) {
		case "PUB", "HPUB", "MSG", "HMSG":
			size, err := strconv.Atoi(string(fields[len(fields)-1]))
			if err != nil {
				panic(fmt.Sprintf("not the protocol of NATS: %q", line))
			}
			p.skip = size + 2
			messages++
		}
	}
	p.m.add(messages, len(b))
}

// TestMember_traffic measures what 64 members with 256 tasks send and get, over a
// server that really runs them all: at rest it is a bounded number of messages for
// each of them, however many they are.
func TestMember_traffic(t *testing.T) {
	const members, most = 64, 5.0
	tasks := taskNames(4, 64)
	bubble(t, func(s *site) {
		m := &meter{}
		join := func(i int) *process {
			return s.joinWith(func(c *Config) {
				c.Tasks, c.Conn = tasks, m.connect(s)
				joining(fmt.Sprintf("w%02d", i))(c)
			}, nil)
		}
		measure := func(what string, d time.Duration, members int) float64 {
			messages, size := m.since(0, 0)
			time.Sleep(d)
			messages, size = m.since(messages, size)
			rate := float64(messages) / d.Seconds() / float64(members)
			t.Logf("%s: %.2f messages and %.0f bytes a second and member", what, rate, float64(size)/d.Seconds()/float64(members))
			return rate
		}
		var all []*process
		for i := range members {
			all = append(all, join(i))
		}
		s.wantSharedTasks(0, 10*time.Second, tasks, all)
		time.Sleep(20 * time.Second)
		if rate := measure("members at rest", 2*time.Minute, members); rate >= most {
			t.Errorf("%.2f messages a second and member, want less than %v", rate, most)
		}

		messages, size := m.since(0, 0)
		all = append(all, join(members))
		s.wantSharedTasks(0, time.Second, tasks, all)
		messages, size = m.since(messages, size)
		t.Logf("one more joins: %d messages and %d bytes in all", messages, size)
		if limit := 20 * members; messages > limit {
			t.Errorf("%d messages when one joins, want at most %d", messages, limit)
		}

		messages, size = m.since(0, 0)
		all[10].kill()
		rest := append(append([]*process{}, all[:10]...), all[11:]...)
		s.wantSharedTasks(ttl/2, ttl+time.Second, tasks, rest, all[10])
		messages, size = m.since(messages, size)
		t.Logf("one dies: %d messages and %d bytes until its tasks are taken over", messages, size)

		// A worker also follows the commands and the record.
		s.define(rest[0].c)
		for _, p := range rest {
			s.run(p.c)
		}
		time.Sleep(20 * time.Second)
		if rate := measure("members and commands at rest", 2*time.Minute, members); rate >= most {
			t.Errorf("%.2f messages a second and worker, want less than %v", rate, most)
		}
	})
}
