package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// The flow under test counts the records of each key and publishes each count:
// whatever happens, the results of a key must be 1..n, in order.
type counted struct {
	Key string `json:"key"`
	N   int    `json:"n"`
	Seq uint64 `json:"seq"`
	// Of and OfN are key and number of the first stage, in a result of a later one.
	Of  string `json:"of,omitempty"`
	OfN int    `json:"of_n,omitempty"`
}

// groupOf is the key that the records of a key have in a later stage.
func groupOf(key string, stage int) string {
	n, err := strconv.Atoi(strings.TrimPrefix(key, "k"))
	if err != nil {
		n = len(key)
	}
	return fmt.Sprintf("g%d", n%(5-stage))
}

type countFlow struct {
	name    string
	sources []string
	// subjects and partitionBy are those of the sources.
	subjects    []string
	partitionBy []int
	sink        string
	bucket      string
	options     flow.Options
	// stages is the number of stages, 0 for one. Each later one counts the results of
	// the one before by group.
	stages int
	// stopAt asks for a drain when a key has that many records.
	stopAt int
	// decode, key and step are called with each record; they may block, fail or
	// panic.
	decode, key, step func(m *flow.Meta, v string) error
	// spread redistributes the records, calls costly with each of them in its task, and
	// counts them in the second stage.
	spread bool
	costly func(m *flow.Meta, v string) error
	// late is called with each record of a later stage.
	late func(m *flow.Meta, r counted) error
	// version of the stored state.
	version int
}

func (c countFlow) build(tb testing.TB) *flow.Flow {
	tb.Helper()
	if c.name == "" {
		c.name = "count"
	}
	if c.sink == "" {
		c.sink = "OUT"
	}
	if len(c.sources) == 0 {
		c.sources = []string{"IN"}
	}
	if c.version == 0 {
		c.version = 1
	}
	call := func(fn func(*flow.Meta, string) error, m *flow.Meta, v string) error {
		if fn == nil {
			return nil
		}
		return fn(m, v)
	}
	b := flow.New(c.name, c.options)
	var keyed []flow.Stream[string]
	for _, source := range c.sources {
		src := flow.From(b, flow.Source{Stream: source, Subjects: c.subjects, PartitionBy: c.partitionBy}, func(m *flow.Meta, data []byte) (string, error) {
			return string(data), call(c.decode, m, string(data))
		}, flow.ID("from-"+source))
		by := func(m *flow.Meta, v string) (string, error) {
			key, _, ok := strings.Cut(v, " ")
			if !ok {
				return "", errors.New("no key")
			}
			return key, call(c.key, m, v)
		}
		if c.spread {
			src = flow.Map(flow.Redistribute(src), func(m *flow.Meta, v string) (string, error) { return v, call(c.costly, m, v) }, flow.ID("costly-"+source))
			keyed = append(keyed, flow.Rekey(src, by, flow.TextCodec(), flow.ID("key-"+source)))
			continue
		}
		keyed = append(keyed, flow.KeyBy(src, by, flow.ID("key-"+source)))
	}
	all := keyed[0]
	if len(keyed) > 1 {
		all = flow.Merge(keyed[0], keyed[1:]...)
	}
	counts := flow.Stateful(all, "count", flow.JSONState[int](c.version, nil),
		func(m *flow.Meta, n *int, v string, emit func(counted)) error {
			if err := call(c.step, m, v); err != nil {
				return err
			}
			*n++
			emit(counted{Key: m.Key, N: *n, Seq: m.Seq})
			return nil
		})
	first := counts
	for stage := 1; stage < c.stages; stage++ {
		crossed := flow.Rekey(counts, func(_ *flow.Meta, r counted) (string, error) {
			if stage == 1 {
				return groupOf(r.Key, stage), nil
			}
			return groupOf(r.Of, stage), nil
		}, flow.JSONCodec[counted](), flow.ID(fmt.Sprintf("cross-%d", stage)))
		counts = flow.Stateful(crossed, fmt.Sprintf("count-%d", stage), flow.JSONState[int](c.version, nil),
			func(m *flow.Meta, n *int, r counted, emit func(counted)) error {
				if c.late != nil {
					if err := c.late(m, r); err != nil {
						return err
					}
				}
				*n++
				next := counted{Key: m.Key, N: *n, Seq: m.Seq, Of: r.Key, OfN: r.N}
				if r.Of != "" {
					next.Of, next.OfN = r.Of, r.OfN
				}
				emit(next)
				return nil
			})
	}
	flow.To(counts, flow.Sink[counted]{
		Stream: c.sink, Subjects: []string{strings.ToLower(c.sink) + ".*"},
		Subject: flow.KeySubject[counted](strings.ToLower(c.sink) + "."), Encode: flow.EncodeJSON[counted](),
	})
	if c.bucket != "" {
		flow.ToKV(first, flow.KVSink[counted]{Bucket: c.bucket, Encode: flow.EncodeJSON[counted]()})
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

// bubble runs fn with a lab in virtual time.
func bubble(t *testing.T, fn func(t *testing.T, l *lab), opts ...testenv.Option) {
	t.Helper()
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) { fn(t, newLab(t, srv)) }, opts...)
}

// lab is a server with a source stream, and what was put into it.
type lab struct {
	tb   testing.TB
	ctx  context.Context
	srv  *testenv.Server
	conn *bus.Conn
	// rng chooses the keys.
	rng *rand.Rand
	// fed counts the records of each key, keys has the key of each record.
	fed  map[string]int
	keys []string
	seq  uint64
	log  *slog.Logger
	ctl  *control.Control
	// stages of the flow whose results are judged, 0 for one.
	stages int
	// counts are the last results of count.
	counts map[string]counting
}

func newLab(tb testing.TB, srv *testenv.Server) *lab {
	tb.Helper()
	l := &lab{tb: tb, ctx: tb.Context(), srv: srv, fed: map[string]int{}, counts: map[string]counting{}, rng: rand.New(rand.NewPCG(1, 2)), log: slog.New(slog.DiscardHandler)}
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
func (l *lab) feed(rng *rand.Rand, n, keys int) { l.feedTo("in.", rng, n, keys) }

func (l *lab) feedTo(prefix string, rng *rand.Rand, n, keys int) {
	l.tb.Helper()
	f := l.conn.NewFeeder(1000)
	for range n {
		key := fmt.Sprintf("k%d", rng.IntN(keys))
		l.fed[key]++
		l.keys = append(l.keys, key)
		l.seq++
		if err := f.Publish(prefix+key, "", fmt.Appendf(nil, "%s v%d", key, l.seq)); err != nil {
			l.tb.Fatal(err)
		}
	}
	if err := f.Flush(l.ctx); err != nil {
		l.tb.Fatal(err)
	}
}

// more puts n records of 8 keys into the source.
func (l *lab) more(n int) { l.feed(l.rng, n, 8) }

// put puts one record into the source that does not count.
func (l *lab) put(text string) uint64 {
	l.tb.Helper()
	seq, err := l.conn.Publish(l.ctx, "in.x", nil, []byte(text))
	if err != nil {
		l.tb.Fatal(err)
	}
	l.seq++
	l.keys = append(l.keys, "")
	return seq
}

// through is what the keys have up to a sequence of the source.
func (l *lab) through(seq uint64) map[string]int {
	fed := map[string]int{}
	for _, key := range l.keys[:seq] {
		if key != "" {
			fed[key]++
		}
	}
	return fed
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
	l.judgeResults(l.read(stream), l.fed)
}

// judgeThrough says that the results are those of the records up to a sequence.
func (l *lab) judgeThrough(stream string, seq uint64) {
	l.tb.Helper()
	l.judgeResults(l.read(stream), l.through(seq))
}

func (l *lab) judgeResults(results []message, fed map[string]int) {
	l.tb.Helper()
	got, of := map[string]int{}, map[string]int{}
	for _, m := range results {
		var r counted
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatalf("%s sequence %d: %v", m.subject, m.seq, err)
		}
		if r.N != got[r.Key]+1 {
			l.tb.Fatalf("%s sequence %d: result %d follows %d; header %v", m.subject, m.seq, r.N, got[r.Key], m.header)
		}
		got[r.Key] = r.N
		if l.stages < 2 {
			continue
		}
		if r.OfN != of[r.Of]+1 || r.Key != groupOf(r.Of, l.stages-1) {
			l.tb.Fatalf("%s sequence %d: result %d of key %s follows %d; header %v", m.subject, m.seq, r.OfN, r.Of, of[r.Of], m.header)
		}
		of[r.Of] = r.OfN
	}
	if l.stages > 1 {
		if diff := cmp.Diff(fed, of); diff != "" {
			l.tb.Fatalf("results of each key of the first stage (-want +got):\n%s", diff)
		}
		groups := map[string]int{}
		for key, n := range fed {
			groups[groupOf(key, l.stages-1)] += n
		}
		fed = groups
	}
	if diff := cmp.Diff(fed, got); diff != "" {
		l.tb.Fatalf("results of each key (-want +got):\n%s", diff)
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
	tb     testing.TB
	link   *testenv.Link
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	status atomic.Pointer[Status]
}

var errCrash = errors.New("crashed")

// probe is told at which point of the protocol which process is.
type probe func(p *process, ctx context.Context, point, task string) error

// start runs a worker. The probe is told the process, so that it can crash it.
func (l *lab) start(f *flow.Flow, cfg Config, probe probe) *process {
	return l.startOver(testenv.NewLink(l.tb), f, cfg, probe)
}

// startOver is start with a link to the server that was prepared for it.
func (l *lab) startOver(link *testenv.Link, f *flow.Flow, cfg Config, probe probe) *process {
	ctx, cancel := context.WithCancel(l.ctx)
	p := &process{tb: l.tb, link: link, cancel: cancel, done: make(chan struct{})}
	cfg.Bus = bus.Config{InProcess: p.link.Dialer(l.srv.InProcess), ConnectTimeout: time.Minute}
	cfg.Logger = l.log
	cfg.OnStatus = func(s Status) { p.status.Store(&s) }
	if cfg.Name == "" {
		cfg.Name = "w1"
	}
	if cfg.Lanes == 0 {
		cfg.Lanes = 2
	}
	if probe != nil {
		cfg.probe = func(ctx context.Context, point, task string) error {
			if point == "frames-repeated" {
				l.tb.Errorf("task %s: a frame was published twice", task)
			}
			return probe(p, ctx, point, task)
		}
	}
	go func() {
		defer close(p.done)
		p.err = Run(ctx, f, cfg)
	}()
	l.tb.Cleanup(func() {
		cancel()
		<-p.done
	})
	return p
}

// wait returns how the process ended.
func (p *process) wait() error {
	p.tb.Helper()
	t := time.NewTimer(5 * time.Minute)
	defer t.Stop()
	select {
	case <-p.done:
	case <-t.C:
		stacks := make([]byte, 1<<20)
		p.tb.Fatalf("the worker did not end\n%s", stacks[:runtime.Stack(stacks, true)])
	}
	p.cancel()
	return p.err
}

// leave asks the process to end and returns how it ended.
func (p *process) leave() error {
	p.tb.Helper()
	p.cancel()
	return p.wait()
}

// ended reports whether the process has ended.
func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// at returns the status of the process.
func (p *process) at() Status {
	if s := p.status.Load(); s != nil {
		return *s
	}
	return Status{}
}

// awaitPhase waits for a phase of the process.
func (l *lab) awaitPhase(p *process, phase string) {
	l.tb.Helper()
	l.await("phase "+phase, func() bool {
		if p.ended() {
			l.tb.Fatalf("the worker ended instead of being %s: %v", phase, p.err)
		}
		return p.at().Phase == phase
	})
}

// awaitResults waits until a sink holds the results of all that was fed, or n.
func (l *lab) awaitResults(p *process, n int) {
	l.tb.Helper()
	l.await(fmt.Sprintf("%d results", n), func() bool {
		if p.ended() {
			l.tb.Fatalf("the worker ended before there were %d results: %v", n, p.err)
		}
		return l.count("OUT") >= n
	})
}

// count counts the results in a stream.
func (l *lab) count(stream string) int {
	l.tb.Helper()
	info, err := l.conn.Stream(l.ctx, stream)
	if errors.Is(err, bus.ErrNotFound) || err == nil && info.LastSeq == 0 {
		return 0
	}
	if err != nil {
		l.tb.Fatal(err)
	}
	if was := l.counts[stream]; was.last == info.LastSeq && was.created.Equal(info.Created) {
		return was.n
	}
	n := len(l.read(stream))
	l.counts[stream] = counting{info.LastSeq, info.Created, n}
	return n
}

// counting remembers what count found.
type counting struct {
	last    uint64
	created time.Time
	n       int
}

// gate holds a process at a point of the protocol.
type gate struct {
	point string
	// skip is the number of passages that are let through before.
	skip    atomic.Int64
	open    chan struct{}
	reached chan struct{}
	once    sync.Once
}

func newGate(point string) *gate {
	return &gate{point: point, open: make(chan struct{}), reached: make(chan struct{})}
}

func (g *gate) probe(p *process, _ context.Context, point, _ string) error {
	if point != g.point || g.skip.Add(-1) >= 0 {
		return nil
	}
	g.once.Do(func() { close(g.reached) })
	// Not the session's context: a frozen process does not see its end.
	select {
	case <-g.open:
	case <-p.tb.Context().Done():
	}
	return nil
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

// await polls until ok holds, in virtual time as a rule.
func (l *lab) await(what string, ok func() bool) {
	l.tb.Helper()
	for range 12_000 {
		if ok() {
			return
		}
		l.pass(10 * time.Millisecond)
	}
	l.tb.Fatalf("waited in vain: %s", what)
}

// pass lets time go by.
func (l *lab) pass(d time.Duration) {
	t := time.NewTimer(d)
	<-t.C
}

// control opens the control of the flow "count".
func (l *lab) control() *control.Control {
	l.tb.Helper()
	if l.ctl == nil {
		var err error
		if l.ctl, err = control.Open(l.ctx, control.Config{Conn: l.conn, Flow: "count"}); err != nil {
			l.tb.Fatal(err)
		}
	}
	return l.ctl
}

// record reads the flow record.
func (l *lab) record() control.Record {
	l.tb.Helper()
	rec, err := l.control().Record(l.ctx)
	if err != nil {
		l.tb.Fatal(err)
	}
	return rec
}

// awaitRecord waits until the flow record is as it should be.
func (l *lab) awaitRecord(what string, ok func(control.Record) bool) control.Record {
	l.tb.Helper()
	var rec control.Record
	l.await(what, func() bool {
		rec = l.record()
		return ok(rec)
	})
	return rec
}

// drain drains the flow at the head by a worker of its own.
func (l *lab) drain(f *flow.Flow, cfg Config) {
	l.tb.Helper()
	p := l.start(f, cfg, nil)
	l.awaitPhase(p, "running")
	l.send("control.drain.count", `{"at":"head"}`)
	if err := p.wait(); err != nil {
		l.tb.Fatalf("drain: %v", err)
	}
	if rec := l.record(); rec.State != control.StateDrained {
		l.tb.Fatalf("drained: the record says %s, %s", rec.State, rec.LastError)
	}
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

// judgeAtLeast says that no result is missing, and that what is repeated is repeated
// as it was.
func (l *lab) judgeAtLeast(stream string) {
	l.tb.Helper()
	got := map[string]int{}
	for _, m := range l.read(stream) {
		var r counted
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatalf("%s sequence %d: %v", stream, m.seq, err)
		}
		if r.N > got[r.Key]+1 {
			l.tb.Fatalf("%s sequence %d: key %s: result %d follows %d", stream, m.seq, r.Key, r.N, got[r.Key])
		}
		got[r.Key] = max(got[r.Key], r.N)
	}
	if diff := cmp.Diff(l.fed, got); diff != "" {
		l.tb.Fatalf("%s: results of each key (-want +got):\n%s", stream, diff)
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
