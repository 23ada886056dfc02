package bench

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"natsflow/flow"
)

// windowMessages is how many messages of timed have times in one window.
const windowMessages = 60_000

// timed is a message of W1 whose time goes on by a millisecond with each.
func timed(i int) []byte {
	p := payload(i)
	copy(p[len(`{"key":"key-000000","seq":1000000,"ts":`):], strconv.Itoa(1_700_000_040_000+i))
	return p
}

// windowed counts by key and minute, by the time in the payload.
func windowed(tb testing.TB, name, out string) *flow.Flow {
	return parsed(tb, fmt.Sprintf("flow: %s\nsource: {stream: IN, time: {path: ts, format: unix_ms}}\nsteps:\n  - key: key\n  - aggregate: {n: count()}\n    window: {tumbling: 1m}\n    id: count\n  - to: {stream: %s, subject: \"%s.{key}\"}\n", name, out, out))
}

// BenchmarkWindows measures a tumbling window of event time on the messages of W1,
// against the hand-written loop, which counts them without windows. The loop publishes a
// result for each message, the flow one for each key and window. The time of the flow is
// that until all windows but the last are published; the messages of that one do not
// count. The medians of -rounds are reported.
func BenchmarkWindows(b *testing.B) {
	for range b.N {
		r := newRig(b)
		r.feed(0, *messages, timed)
		closed := (*messages - 1) / windowMessages
		perWindow := map[int]bool{}
		for i := range windowMessages {
			perWindow[(i*7919)%keys] = true
		}
		if closed == 0 {
			b.Fatalf("%d messages are one window", *messages)
		}
		var hand, windows []float64
		for range *rounds {
			out := r.next("OUT")
			r.stream(out, out+".>")
			began := time.Now()
			stop := r.handLoop(out)
			r.awaitMessages(out, uint64(*messages))
			hand = append(hand, float64(*messages)/time.Since(began).Seconds())
			stop()
			r.drop(out)

			id, out := r.next("w"), r.next("OUT")
			began = time.Now()
			w := r.run(windowed(b, id, out), nil)
			r.awaitMessages(out, uint64(closed*len(perWindow)))
			windows = append(windows, float64(closed*windowMessages)/time.Since(began).Seconds())
			r.stop(w)
			r.forget(id)
			r.drop(out)
		}
		b.Logf("hand-written loop %.0f msg/s, tumbling windows %.0f msg/s, %.2f x", median(hand), median(windows), median(windows)/median(hand))
	}
}
