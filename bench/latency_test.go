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

// latencyRate and latencyCount make five seconds at 1,000 messages a second.
const (
	latencyRate   = 1000
	latencyCount  = 5 * latencyRate
	latencyRounds = 3
)

// BenchmarkLatency measures the time from publishing a message to receiving its
// result, at 1,000 messages a second, for the loop and for the flows. Each round
// does every variant once, since one busy moment of the machine decides the 99th
// percentile of a variant; the medians of the rounds are reported. Each variant
// begins with an empty source and so with an empty state.
func BenchmarkLatency(b *testing.B) {
	for range b.N {
		r := newRig(b)
		p50s, p99s := map[string][]float64{}, map[string][]float64{}
		for range latencyRounds {
			for _, v := range keyedAlike() {
				r.empty("IN")
				out := r.next("OUT")
				if v.before {
					r.stream(out, out+".>")
				}
				stop := v.start(r, out)
				p50, p99 := r.latency(out)
				stop()
				r.drop(out)
				p50s[v.name] = append(p50s[v.name], float64(p50.Microseconds()))
				p99s[v.name] = append(p99s[v.name], float64(p99.Microseconds()))
			}
		}
		hand := variants()[0].name
		for _, v := range keyedAlike() {
			p50, p99 := median(p50s[v.name]), median(p99s[v.name])
			b.Logf("%-32s p50 %5.0f us, %.1f x; p99 %5.0f us, %.1f x", v.name, p50, p50/median(p50s[hand]), p99, p99/median(p99s[hand]))
		}
		if err := r.js.DeleteStream(r.ctx, "IN"); err != nil {
			b.Fatal(err)
		}
	}
}

// keyedAlike are the variants whose results have the keys of the messages.
func keyedAlike() []variant {
	return slices.DeleteFunc(variants(), func(v variant) bool { return v.name == twoStagesName })
}

// empty removes the messages of a stream.
func (r *rig) empty(name string) {
	r.tb.Helper()
	s, err := r.js.Stream(r.ctx, name)
	if err != nil {
		r.tb.Fatal(err)
	}
	if err := s.Purge(r.ctx); err != nil {
		r.tb.Fatal(err)
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
	// One message first, so that everything runs.
	if _, err := r.js.Publish(r.ctx, "in.m", []byte(`{"key":"first"}`)); err != nil {
		r.tb.Fatal(err)
	}
	r.awaitMessages(out, 1)
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
