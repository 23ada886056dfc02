package bench

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/tidwall/gjson"
)

// latencyRate and latencyCount make ten seconds at 1,000 messages a second.
const (
	latencyRate  = 1000
	latencyCount = 10 * latencyRate
)

// BenchmarkLatency measures the time from publishing a message to receiving its
// result, at 1,000 messages a second, for the loop and for the YAML flow.
func BenchmarkLatency(b *testing.B) {
	for range b.N {
		r := newRig(b)
		type figures struct{ p50, p99 time.Duration }
		measure := func(v variant) figures {
			out := r.next("OUT")
			if v.before {
				r.stream(out, out+".>")
			}
			stop := v.start(r, out)
			f := figures{}
			f.p50, f.p99 = r.latency(out)
			stop()
			r.drop(out)
			b.Logf("%-32s p50 %v, p99 %v", v.name, f.p50, f.p99)
			return f
		}
		vs := variants()
		hand := measure(vs[0])
		for _, v := range vs[1:] {
			f := measure(v)
			b.Logf("%-32s p50 %.1f x, p99 %.1f x", v.name, float64(f.p50)/float64(hand.p50), float64(f.p99)/float64(hand.p99))
		}
		if err := r.js.DeleteStream(r.ctx, "IN"); err != nil {
			b.Fatal(err)
		}
	}
}

// latency publishes at the rate, each message with a key of its own, and returns
// the median and the 99th percentile of the times until the results came.
func (r *rig) latency(out string) (p50, p99 time.Duration) {
	r.tb.Helper()
	var mu sync.Mutex
	sent := map[string]time.Time{}
	var took []time.Duration
	done := make(chan struct{})
	run := r.next("l")
	sub, err := r.nc.Subscribe(out+".>", func(m *nats.Msg) {
		now := time.Now()
		key := gjson.GetBytes(m.Data, "key").Str
		mu.Lock()
		defer mu.Unlock()
		at, ok := sent[key]
		if !ok {
			return
		}
		delete(sent, key)
		took = append(took, now.Sub(at))
		if len(took) == latencyCount {
			close(done)
		}
	})
	if err != nil {
		r.tb.Fatal(err)
	}
	defer func() {
		if err := sub.Unsubscribe(); err != nil {
			r.tb.Fatal(err)
		}
	}()
	// One message first, and all that earlier runs left, so that everything runs
	// and nothing is behind.
	ack, err := r.js.Publish(r.ctx, "in.m", []byte(`{"key":"first"}`))
	if err != nil {
		r.tb.Fatal(err)
	}
	r.awaitMessages(out, ack.Sequence)
	tick := time.NewTicker(time.Second / latencyRate)
	defer tick.Stop()
	for i := range latencyCount {
		<-tick.C
		key := run + "-" + strconv.Itoa(i)
		mu.Lock()
		sent[key] = time.Now()
		mu.Unlock()
		if _, err := r.js.PublishAsync("in.m", fmt.Appendf(nil, `{"key":"%s"}`, key)); err != nil {
			r.tb.Fatal(err)
		}
	}
	select {
	case <-done:
	case <-time.After(time.Minute):
		mu.Lock()
		defer mu.Unlock()
		r.tb.Fatalf("%d of %d results came", len(took), latencyCount)
	}
	slices.Sort(took)
	return took[len(took)/2], took[len(took)*99/100]
}
