package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/testenv"
)

// The flow under test counts the records of each key and publishes each count:
// whatever happens, the results of a key must be 1..n, in order.
type counted struct {
	Key string `json:"key"`
	N   int    `json:"n"`
	Seq uint64 `json:"seq"`
}

type countFlow struct {
	name     string
	sink     string
	bucket   string
	options  flow.Options
	stopAt   int
	slow     func()
	badValue string
}

func (c countFlow) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	if c.name == "" {
		c.name = "count"
	}
	if c.sink == "" {
		c.sink = "OUT"
	}
	b := flow.New(c.name, c.options)
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v string) (string, error) {
		key, _, ok := strings.Cut(v, " ")
		if !ok {
			return "", errors.New("no key")
		}
		return key, nil
	})
	counts := flow.Stateful(keyed, "count", flow.JSONState[int](1, nil),
		func(m *flow.Meta, n *int, v string, emit func(counted)) error {
			if c.slow != nil {
				c.slow()
			}
			if c.badValue != "" && strings.HasSuffix(v, c.badValue) {
				return errors.New("a bad value")
			}
			*n++
			emit(counted{m.Key, *n, m.Seq})
			return nil
		})
	flow.To(counts, flow.Sink[counted]{
		Stream: c.sink, Subjects: []string{strings.ToLower(c.sink) + ".*"},
		Subject: flow.KeySubject[counted](strings.ToLower(c.sink) + "."), Encode: flow.EncodeJSON[counted](),
	})
	if c.bucket != "" {
		flow.ToKV(counts, flow.KVSink[counted]{Bucket: c.bucket, Encode: flow.EncodeJSON[counted]()})
	}
	if c.stopAt > 0 {
		flow.StopWhen(counts, func(_ *flow.Meta, r counted) (bool, error) { return r.N == c.stopAt, nil })
	}
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// lab is a server with a source stream, and what was put into it.
type lab struct {
	tb   testing.TB
	ctx  context.Context
	srv  *testenv.Server
	conn *bus.Conn
	// fed counts the records of each key.
	fed map[string]int
	seq uint64
	log *slog.Logger
}

func newLab(tb testing.TB, srv *testenv.Server) *lab {
	tb.Helper()
	l := &lab{tb: tb, ctx: tb.Context(), srv: srv, fed: map[string]int{}, log: slog.New(slog.DiscardHandler)}
	if testing.Verbose() {
		l.log = slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
	}
	var err error
	if l.conn, err = bus.Connect(l.ctx, bus.Config{InProcess: srv.InProcess, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(l.conn.Close)
	if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN", Subjects: []string{"in.>"}}); err != nil {
		tb.Fatal(err)
	}
	return l
}

// feed puts n records into the source, over the given number of keys.
func (l *lab) feed(rng *rand.Rand, n, keys int) {
	l.tb.Helper()
	f := l.conn.NewFeeder(1000)
	for range n {
		key := fmt.Sprintf("k%d", rng.IntN(keys))
		l.fed[key]++
		l.seq++
		if err := f.Publish("in."+key, "", fmt.Appendf(nil, "%s v%d", key, l.seq)); err != nil {
			l.tb.Fatal(err)
		}
	}
	if err := f.Flush(l.ctx); err != nil {
		l.tb.Fatal(err)
	}
}

// message is one message of a stream.
type message struct {
	subject string
	header  map[string][]string
	data    []byte
	seq     uint64
}

// read returns all messages of a stream, fences left out.
func (l *lab) read(stream string) []message {
	l.tb.Helper()
	info, err := l.conn.Stream(l.ctx, stream)
	if err != nil {
		l.tb.Fatal(err)
	}
	var all []message
	if info.LastSeq == 0 {
		return nil
	}
	cu, err := l.conn.OpenCursor(l.ctx, bus.CursorConfig{Stream: stream, From: 1, Name: "judge"})
	if err != nil {
		l.tb.Fatal(err)
	}
	done := errors.New("done")
	err = cu.Run(l.ctx, func(m *bus.Msg) error {
		if !strings.HasPrefix(m.Subject, "natsflow.fence.") {
			all = append(all, message{m.Subject, m.Header, slices.Clone(m.Data), m.Seq})
		}
		if m.Seq >= info.LastSeq {
			return done
		}
		return nil
	})
	if !errors.Is(err, done) {
		l.tb.Fatal(err)
	}
	if err := cu.Close(l.ctx); err != nil {
		l.tb.Fatal(err)
	}
	return all
}

// judge is the naive model: per key, the results are exactly 1..n, in order.
func (l *lab) judge(stream string) {
	l.tb.Helper()
	got := map[string]int{}
	for _, m := range l.read(stream) {
		var r counted
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatalf("%s sequence %d: %v", stream, m.seq, err)
		}
		if r.N != got[r.Key]+1 {
			l.tb.Fatalf("%s sequence %d: key %s: result %d follows %d; header %v", stream, m.seq, r.Key, r.N, got[r.Key], m.header)
		}
		got[r.Key] = r.N
	}
	for key, n := range l.fed {
		if got[key] != n {
			l.tb.Fatalf("%s: key %s has %d results of %d", stream, key, got[key], n)
		}
	}
}

// judgeLatest judges a bucket: it holds the last result of each key.
func (l *lab) judgeLatest(stream string) {
	l.tb.Helper()
	got := map[string]int{}
	for _, m := range l.read(stream) {
		var r counted
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatalf("%s sequence %d: %v", stream, m.seq, err)
		}
		got[r.Key] = r.N
	}
	if diff := cmp.Diff(l.fed, got); diff != "" {
		l.tb.Fatalf("%s: results of each key (-want +got):\n%s", stream, diff)
	}
}

// process is one run of a worker, as a process would be.
type process struct {
	link   *testenv.Link
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	status atomic.Pointer[Status]
}

var errCrash = errors.New("crashed")

// start runs a worker. The probe is told the process, so that it can crash it.
func (l *lab) start(f *flow.Flow, cfg Config, probe func(p *process, ctx context.Context, point, task string) error) *process {
	ctx, cancel := context.WithCancel(l.ctx)
	p := &process{link: testenv.NewLink(l.tb), cancel: cancel, done: make(chan struct{})}
	cfg.Bus = bus.Config{InProcess: p.link.Dialer(l.srv.InProcess), ConnectTimeout: time.Minute}
	cfg.Logger = l.log
	cfg.OnStatus = func(s Status) { p.status.Store(&s) }
	if cfg.Name == "" {
		cfg.Name = "w1"
	}
	if probe != nil {
		cfg.probe = func(ctx context.Context, point, task string) error { return probe(p, ctx, point, task) }
	}
	go func() {
		defer close(p.done)
		p.err = Run(ctx, f, cfg)
	}()
	return p
}

// wait returns how the process ended.
func (p *process) wait() error {
	<-p.done
	p.cancel()
	return p.err
}

// crasher stops a worker dead at the n-th passage of one point: its connections
// are cut, and whatever it does afterwards reaches nobody.
type crasher struct {
	mu     sync.Mutex
	point  string
	left   int
	struck bool
	passed map[string]int
}

func (c *crasher) probe(p *process, _ context.Context, point, _ string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.passed == nil {
		c.passed = map[string]int{}
	}
	c.passed[point]++
	if c.struck {
		return errCrash
	}
	if point != c.point {
		return nil
	}
	c.left--
	if c.left > 0 {
		return nil
	}
	c.struck = true
	p.link.Cut()
	return errCrash
}

// await polls in virtual time until ok holds.
func (l *lab) await(what string, ok func() bool) {
	l.tb.Helper()
	for range 100_000 {
		if ok() {
			return
		}
		t := time.NewTimer(10 * time.Millisecond)
		<-t.C
	}
	l.tb.Fatalf("waited in vain: %s", what)
}

// send publishes a control command.
func (l *lab) send(subject, body string) uint64 {
	l.tb.Helper()
	seq, err := l.conn.Publish(l.ctx, subject, nil, []byte(body))
	if err != nil {
		l.tb.Fatal(err)
	}
	return seq
}
