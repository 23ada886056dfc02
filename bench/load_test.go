package bench

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/tidwall/gjson"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/flowspec"
	"natsflow/testenv"
	"natsflow/worker"
)

var (
	messages = flag.Int("messages", 1_000_000, "messages of the work W1")
	only     = flag.String("only", "", "regular expression of the names of the variants of W1 to run")
	rounds   = flag.Int("rounds", 2, "rounds of each variant of W1")
)

const keys = 10_000

// payload is a message of W1: 200 bytes of JSON.
func payload(i int) []byte {
	p := fmt.Appendf(nil, `{"key":"key-%06d","seq":%d,"ts":1700000000000,"value":42.5,"status":"active","region":"eu-west-1","note":"`, (i*7919)%keys, 1_000_000+i)
	for len(p) < 198 {
		p = append(p, 'x')
	}
	return append(p, '"', '}')
}

// rig is a server with the source stream of W1.
type rig struct {
	tb   testing.TB
	ctx  context.Context
	srv  *testenv.Process
	nc   *nats.Conn
	js   jetstream.JetStream
	runs int
}

func newRig(tb testing.TB) *rig {
	tb.Helper()
	r := &rig{tb: tb, ctx: tb.Context(), srv: testenv.StartProcess(tb)}
	var err error
	if r.nc, err = nats.Connect(r.srv.URL()); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.nc.Close)
	if r.js, err = jetstream.New(r.nc, jetstream.WithPublishAsyncMaxPending(8192)); err != nil {
		tb.Fatal(err)
	}
	r.stream("IN", "in.>")
	return r
}

func (r *rig) stream(name, subject string) {
	r.tb.Helper()
	_, err := r.js.CreateStream(r.ctx, jetstream.StreamConfig{Name: name, Subjects: []string{subject}})
	if err != nil {
		r.tb.Fatal(err)
	}
}

func (r *rig) drop(name string) {
	if err := r.js.DeleteStream(r.ctx, name); err != nil {
		r.tb.Fatal(err)
	}
}

// feed publishes messages first..first+n-1.
func (r *rig) feed(first, n int, data func(int) []byte) {
	r.tb.Helper()
	for i := first; i < first+n; i++ {
		if _, err := r.js.PublishAsync("in.m", data(i), jetstream.WithStallWait(time.Minute)); err != nil {
			r.tb.Fatal(err)
		}
	}
	<-r.js.PublishAsyncComplete()
}

// awaitMessages waits until a stream has n messages.
func (r *rig) awaitMessages(name string, n uint64) {
	r.tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for range tick.C {
		s, err := r.js.Stream(r.ctx, name)
		if err != nil {
			continue
		}
		if s.CachedInfo().State.Msgs >= n {
			return
		}
	}
}

// handLoop is the yardstick: consume, decode, count in a map, publish
// asynchronously, ack after the PubAck. Its state is in memory only.
func (r *rig) handLoop(out string) (stop func()) {
	nc, err := nats.Connect(r.srv.URL())
	if err != nil {
		r.tb.Fatal(err)
	}
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(8192))
	if err != nil {
		r.tb.Fatal(err)
	}
	cons, err := js.CreateConsumer(r.ctx, "IN", jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1})
	if err != nil {
		r.tb.Fatal(err)
	}
	type in struct {
		Key string `json:"key"`
	}
	type result struct {
		Key string `json:"key"`
		N   int    `json:"n"`
	}
	type flight struct {
		msg jetstream.Msg
		ack jetstream.PubAckFuture
	}
	flights := make(chan flight, 16384)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for f := range flights {
			select {
			case <-f.ack.Ok():
				if err := f.msg.Ack(); err != nil {
					return
				}
			case err := <-f.ack.Err():
				r.tb.Error(err)
			}
		}
	}()
	counts := map[string]int{}
	cc, err := cons.Consume(func(m jetstream.Msg) {
		var v in
		if err := json.Unmarshal(m.Data(), &v); err != nil {
			return
		}
		counts[v.Key]++
		data, err := json.Marshal(result{v.Key, counts[v.Key]})
		if err != nil {
			return
		}
		f, err := js.PublishAsync(out+"."+v.Key, data, jetstream.WithStallWait(time.Minute))
		if err != nil {
			return
		}
		flights <- flight{m, f}
	}, jetstream.PullMaxMessages(20000))
	if err != nil {
		r.tb.Fatal(err)
	}
	return func() {
		cc.Stop()
		<-cc.Closed()
		close(flights)
		<-done
		nc.Close()
	}
}

// yamlFlow is W1 as YAML.
func yamlFlow(tb testing.TB, name, out string) *flow.Flow {
	src := fmt.Sprintf("flow: %s\nsource: {stream: IN}\nsteps:\n  - key: key\n  - aggregate: {n: count()}\n    id: count\n  - to: {stream: %s, subject: \"%s.{key}\"}\n", name, out, out)
	return parsed(tb, src)
}

// parsed is a flow in YAML.
func parsed(tb testing.TB, src string) *flow.Flow {
	tb.Helper()
	spec, err := flowspec.Parse("w1.yaml", []byte(src))
	if err != nil {
		tb.Fatal(err)
	}
	f, err := spec.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// twoStages counts by key, and the results of that by a part of the key: each record
// crosses once.
func twoStages(tb testing.TB, name, out string) *flow.Flow {
	src := fmt.Sprintf("flow: %s\nsource: {stream: IN}\nsteps:\n  - key: key\n  - aggregate: {n: count()}\n    id: count\n  - key: {expr: 'n %% 100'}\n  - aggregate: {n: count()}\n    id: again\n  - to: {stream: %s, subject: \"%s.{key}\"}\n", name, out, out)
	return parsed(tb, src)
}

// goFlow is W1 in Go with a lazy codec.
func goFlow(tb testing.TB, name, out string) *flow.Flow {
	type result struct {
		key string
		n   int64
	}
	b := flow.New(name, flow.Options{})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeBytes())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v []byte) (string, error) { return gjson.GetBytes(v, "key").Str, nil })
	counts := flow.Stateful(keyed, "count", flow.StateCodec[int64]{
		Append: func(dst []byte, n *int64) ([]byte, error) { return strconv.AppendInt(dst, *n, 10), nil },
		Decode: func(data []byte, n *int64) (err error) { *n, err = strconv.ParseInt(string(data), 10, 64); return err },
	}, func(m *flow.Meta, n *int64, _ []byte, emit func(result)) error {
		*n++
		emit(result{m.Key, *n})
		return nil
	})
	flow.To(counts, flow.Sink[result]{
		Stream: out, Subjects: []string{out + ".*"}, Subject: flow.KeySubject[result](out + "."),
		Encode: func(dst []byte, _ *flow.Meta, r result) ([]byte, error) {
			dst = append(append(append(dst, `{"key":"`...), r.key...), `","n":`...)
			return append(strconv.AppendInt(dst, r.n, 10), '}'), nil
		},
	})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// running is a worker under measurement.
type running struct {
	cancel context.CancelFunc
	done   chan error
	status atomic.Pointer[worker.Status]
}

func (r *rig) run(f *flow.Flow, change func(*worker.Config)) *running {
	ctx, cancel := context.WithCancel(r.ctx)
	w := &running{cancel: cancel, done: make(chan error, 1)}
	cfg := worker.Config{Bus: bus.Config{URL: r.srv.URL()}, Name: "bench", Logger: slog.New(slog.DiscardHandler), OnStatus: func(s worker.Status) { w.status.Store(&s) }}
	if change != nil {
		change(&cfg)
	}
	go func() { w.done <- worker.Run(ctx, f, cfg) }()
	return w
}

func (r *rig) stop(w *running) {
	r.tb.Helper()
	w.cancel()
	if err := <-w.done; err != nil {
		r.tb.Fatal(err)
	}
}

// next returns a name that no run has used.
func (r *rig) next(prefix string) string {
	r.runs++
	return fmt.Sprintf("%s%d", prefix, r.runs)
}

func (r *rig) forget(flowName string) {
	r.drop("KV_natsflow_" + flowName)
	if _, err := r.js.Stream(r.ctx, flow.ExchangeStream(flowName)); err == nil {
		r.drop(flow.ExchangeStream(flowName))
	}
}
