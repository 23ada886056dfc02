package bus

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"
)

// receiver takes the replies to one request or one group of messages, on the hub's goroutine. It must not block.
type receiver interface {
	receive(m *nats.Msg)
}

// ackHub is the one inbox of a connection. Replies come to "<inbox>.<key>[.<anything>]" and go to the receiver of that
// key, so that a publish costs no subscription and no allocation of nats.go's own request machinery. What comes for an
// unknown key is late and is dropped.
type ackHub struct {
	conn  *Conn
	inbox string // with the dot
	sub   *nats.Subscription
	next  atomic.Uint64

	mu        sync.RWMutex
	receivers map[string]receiver
}

func newAckHub(c *Conn) *ackHub {
	return &ackHub{conn: c, receivers: make(map[string]receiver)}
}

func (h *ackHub) start() error {
	h.inbox = h.conn.nc.NewInbox() + "."
	sub, err := h.conn.nc.Subscribe(h.inbox+">", h.dispatch)
	if err != nil {
		return fmt.Errorf("subscribing to the inbox: %w", err)
	}
	// What may be outstanding is bounded by the windows of the publishers.
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return fmt.Errorf("subscribing to the inbox: %w", err)
	}
	h.sub = sub
	return nil
}

func (h *ackHub) dispatch(m *nats.Msg) {
	if len(m.Subject) <= len(h.inbox) {
		return
	}
	key := m.Subject[len(h.inbox):]
	if i := strings.IndexByte(key, '.'); i >= 0 {
		key = key[:i]
	}
	h.mu.RLock()
	r := h.receivers[key]
	h.mu.RUnlock()
	if r != nil {
		r.receive(m)
	}
}

// add registers r and returns its key and the subject to ask for replies on.
func (h *ackHub) add(r receiver) (key, reply string) {
	key = strconv.FormatUint(h.next.Add(1), 36)
	h.mu.Lock()
	h.receivers[key] = r
	h.mu.Unlock()
	return key, h.inbox + key
}

func (h *ackHub) remove(key string) {
	h.mu.Lock()
	delete(h.receivers, key)
	h.mu.Unlock()
}
