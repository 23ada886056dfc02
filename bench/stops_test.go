package bench

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/tidwall/gjson"

	"github.com/prometheus/client_golang/prometheus"
	"natsflow/flow"
	"natsflow/worker"
)

// bigState is a flow that keeps 100 bytes for each key.
func bigState(tb testing.TB, name, out string) *flow.Flow {
	type hundred [100]byte
	b := flow.New(name, flow.Options{})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeBytes())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v []byte) (string, error) { return gjson.GetBytes(v, "key").Str, nil })
	kept := flow.Stateful(keyed, "big", flow.StateCodec[hundred]{
		Append: func(dst []byte, s *hundred) ([]byte, error) { return append(dst, s[:]...), nil },
		Decode: func(data []byte, s *hundred) error {
			if copy(s[:], data) != len(s) {
				return fmt.Errorf("%d bytes of state", len(data))
			}
			return nil
		},
	}, func(m *flow.Meta, s *hundred, _ []byte, emit func(uint64)) error {
		// Bytes that do not compress well.
		x := m.Seq*0x9E3779B97F4A7C15 + 1
		for i := range s {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			s[i] = byte(x)
		}
		if m.Seq%100 == 0 || m.Key == "probe" {
			emit(m.Seq)
		}
		return nil
	})
	flow.To(kept, flow.Sink[uint64]{
		Stream: out, Subjects: []string{out + ".*"}, Subject: flow.KeySubject[uint64](out + "."),
		Encode: func(dst []byte, _ *flow.Meta, n uint64) ([]byte, error) { return strconv.AppendUint(dst, n, 10), nil },
	})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// BenchmarkStops measures, with a million keys of 100 bytes (or -messages): the
// restart to the first new result, the drain under load, and what was written to
// the bucket for each byte of changed state.
func BenchmarkStops(b *testing.B) {
	for range b.N {
		r := newRig(b)
		out, id := r.next("OUT"), r.next("s")
		data := func(i int) []byte { return fmt.Appendf(nil, `{"key":"key-%07d"}`, i%*messages) }
		f := bigState(b, id, out)
		registry := prometheus.NewRegistry()
		withMetrics := func(c *worker.Config) { c.Registerer = registry }
		w := r.run(f, withMetrics)
		r.feed(0, *messages, data)
		r.awaitMessages(out, uint64(*messages/100))
		// The same keys again, so that bases and deltas find their balance.
		r.feed(0, *messages, data)
		r.awaitMessages(out, uint64(2**messages/100))
		r.stop(w)
		r.reportBytes(registry)

		sub, err := r.nc.SubscribeSync(out + ".probe")
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.js.Publish(r.ctx, "in.m", []byte(`{"key":"probe"}`)); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		w = r.run(f, nil)
		if _, err := sub.NextMsg(time.Minute); err != nil {
			b.Fatal(err)
		}
		b.Logf("restart with %d keys of 100 bytes: %v to the first new result", *messages, time.Since(began).Round(time.Millisecond))

		stopFeed := r.load(data)
		began = time.Now()
		if _, err := r.js.Publish(r.ctx, "control.drain."+id, []byte(`{"at":"now"}`)); err != nil {
			b.Fatal(err)
		}
		if err := <-w.done; err != nil {
			b.Fatal(err)
		}
		b.Logf("drain (now) under load: %v from the command to the end of the worker", time.Since(began).Round(time.Millisecond))
		w.cancel()
		stopFeed()
	}
}

// load publishes as fast as it goes, for two seconds before it returns and then
// until it is stopped.
func (r *rig) load(data func(int) []byte) (stop func()) {
	nc, err := nats.Connect(r.srv.URL())
	if err != nil {
		r.tb.Fatal(err)
	}
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			default:
			}
			// Groups with an answer at their end keep the publisher at the
			// server's pace.
			for range 500 {
				if err := nc.Publish("in.m", data(i)); err != nil {
					return
				}
				i++
			}
			if _, err := nc.Request("in.m", data(i), 10*time.Second); err != nil {
				return
			}
		}
	}()
	timer := time.NewTimer(2 * time.Second)
	<-timer.C
	return func() {
		close(end)
		<-done
		nc.Close()
	}
}

// reportBytes tells how much was written for each byte of changed state.
func (r *rig) reportBytes(g prometheus.Gatherer) {
	r.tb.Helper()
	families, err := g.Gather()
	if err != nil {
		r.tb.Fatal(err)
	}
	sum := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				if l.GetName() == "kind" {
					name += " " + l.GetValue()
				}
			}
			sum[name] += m.GetCounter().GetValue()
		}
	}
	changed := sum["natsflow_state_delta_bytes_total"]
	var all float64
	for _, kind := range []string{"delta", "base", "outbox", "header"} {
		n := sum["natsflow_snapshot_written_bytes_total "+kind]
		all += n
		r.tb.Logf("bucket: %-6s %12.0f bytes, %.2f for each changed byte of state", kind, n, n/changed)
	}
	r.tb.Logf("bucket: in all %12.0f bytes, %.2f for each changed byte of state", all, all/changed)
}
