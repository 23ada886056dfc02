package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// headerRoom is what a message needs beside its payload: more than bus keeps for
// its headers.
const headerRoom = 512

// deadStream holds the dead letters of all flows.
const deadStream = "NATSFLOW_DLQ"

// target is a stream that results go to; several sinks may share it.
type target struct {
	index int
	name  string
	// subject is that of a control request; other outputs bring their own.
	subject string
	// dead: it takes the dead letters.
	dead bool
	sink *bus.Sink
	// created tells the stream from another one of the same name.
	created time.Time
	// seq is a sequence of the stream that was seen; what is published from now
	// on stands behind it.
	seq atomic.Uint64
}

func (t *target) advance(seq uint64) {
	for {
		was := t.seq.Load()
		if seq <= was || t.seq.CompareAndSwap(was, seq) {
			return
		}
	}
}

// session is the time between claiming the tasks of a flow and releasing them.
type session struct {
	cfg      *Config
	flow     *flow.Flow
	sources  []flow.SourceInfo
	interval time.Duration
	log      *slog.Logger
	metrics  *Metrics

	conn *bus.Conn // reads and commits
	out  *bus.Conn // publishes; guarded by the lease
	ctl  *control.Control
	// controlStream holds the commands; a flow can ask for its own drain there.
	controlStream string
	store         *kvsnap.Store
	// bucket holds the task logs.
	bucket *bus.Bucket

	// ctx ends when the session is over, with its cause.
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	epoch   uint64
	targets []*target
	bySink  []*target
	tasks   []*task
	lanes   []*lane
	readers []*reader
	// readersLeft and lanesLeft count those that run; readersDone and lanesDone
	// are closed when none is left.
	readersLeft, lanesLeft atomic.Int32
	readersDone, lanesDone chan struct{}
	// reading is closed when the readers may begin.
	reading chan struct{}
	letRead func()
	// unstored numbers outboxes that are published without being stored.
	unstored atomic.Uint64

	// low[lane][source] is the position that the lane has committed and
	// published.
	low [][]atomic.Uint64

	// released counts the tasks that are done, results and deadLetters what the
	// tasks have made since the flow's creation.
	released             atomic.Int32
	results, deadLetters atomic.Uint64
	// keys is the number of keys with state at the start.
	keys int

	began time.Time

	mu sync.Mutex
	// troubles are the waits that have been complained about.
	troubles map[*patience]string
}

func newSession(term context.Context, w *worker, rec control.Record) *session {
	s := &session{
		cfg: &w.cfg, flow: w.flow, sources: w.flow.Sources(), interval: w.flow.Options().CommitInterval,
		log: w.log, metrics: w.metrics, conn: w.conn, ctl: w.ctl, controlStream: rec.Control.Stream, epoch: rec.Epoch, began: time.Now(),
		readersDone: make(chan struct{}), lanesDone: make(chan struct{}), reading: make(chan struct{}), troubles: map[*patience]string{},
	}
	s.ctx, s.cancel = context.WithCancelCause(term)
	s.letRead = sync.OnceFunc(func() { close(s.reading) })
	s.unstored.Store(uint64(time.Now().UnixNano()))
	return s
}

// open claims the tasks, loads them and publishes what was left unpublished.
func (s *session) open(member *control.Member) (err error) {
	outCfg := s.cfg.Bus
	outCfg.Trusted = member.Trusted
	outCfg.Name += " (results)"
	if s.out, err = bus.Connect(s.ctx, outCfg); err != nil {
		if !s.conn.Connected() {
			// The other connection waits for the server, too.
			err = fmt.Errorf("%w: %w", errAway, err)
		}
		return fmt.Errorf("connect for results: %w", err)
	}
	if err := s.openTargets(s.ctx); err != nil {
		return err
	}
	name := "natsflow_" + s.flow.Name()
	s.bucket, err = s.conn.EnsureBucket(s.ctx, bus.BucketConfig{
		Name: name, Replicas: s.cfg.Replicas, Description: "snapshots of the natsflow flow " + s.flow.Name(),
	})
	if err != nil {
		return fmt.Errorf("bucket %s: %w", name, err)
	}
	s.store = kvsnap.New(kvsnap.Config{
		Bucket: s.bucket, Flow: s.flow.Name(), Owner: s.cfg.Name, Logger: s.log,
		Probe: func(ctx context.Context, point string, t kvsnap.TaskID) error {
			return s.cfg.reached(ctx, point, t.String())
		},
	})
	left, err := s.claim(s.ctx)
	if err != nil {
		return err
	}
	return s.publishLeft(s.ctx, left)
}

// openTargets creates the sinks that are not there and opens all of them.
func (s *session) openTargets(ctx context.Context) error {
	s.targets, s.bySink = nil, nil
	byName := map[string]*target{}
	for _, info := range s.flow.Sinks() {
		cfg := bus.SinkConfig{Stream: info.Name, Subjects: info.Subjects, Replicas: s.cfg.Replicas, Flow: s.flow.Name()}
		subject := ""
		switch info.Kind {
		case flow.SinkBucket:
			cfg.Stream, cfg.Bucket, cfg.Subjects = "", info.Name, nil
		case flow.SinkDead:
			cfg.Stream, cfg.Subjects = deadStream, []string{"natsflow.dlq.*"}
		case flow.SinkControl:
			cmd := control.Command{Kind: control.KindDrain, Flow: s.flow.Name()}
			subject = cmd.Subject(s.cfg.ControlPrefix)
			cfg.Stream, cfg.Subjects = s.controlStream, []string{subject}
		}
		at, created, err := s.conn.EnsureSink(ctx, cfg)
		if err != nil {
			return fmt.Errorf("sink %s: %w", info.Name, err)
		}
		if created {
			s.log.Info("created the sink", "stream", at.Name, "subjects", at.Subjects)
		}
		key := at.Name + " " + subject
		to := byName[key]
		if to == nil {
			sink, err := s.out.OpenSink(ctx, at.Name)
			if err != nil {
				return fmt.Errorf("sink %s: %w", at.Name, err)
			}
			to = &target{index: len(s.targets), name: at.Name, subject: subject, dead: info.Kind == flow.SinkDead, created: at.Created, sink: sink}
			byName[key] = to
			s.targets = append(s.targets, to)
		}
		s.bySink = append(s.bySink, to)
	}
	return nil
}

// leftover is an entry whose outbox a former session may not have published.
type leftover struct {
	task    *task
	pending kvsnap.Pending
}

// claim takes all tasks over and loads their state.
func (s *session) claim(ctx context.Context) ([]leftover, error) {
	partitions := s.flow.Options().Partitions
	s.tasks = make([]*task, partitions)
	recovered := make([]kvsnap.Recovered, partitions)
	err := each(ctx, partitions, 8, func(ctx context.Context, p int) error {
		t := &task{
			id: kvsnap.TaskID{Partition: p}, flow: s.flow.Task(p), jobs: make(chan job, 1),
			floor: make([]uint64, len(s.sources)), fences: make([]uint64, len(s.targets)), lastCommit: time.Now(),
		}
		t.flow.LimitResults(int(s.out.MaxPayload()) - headerRoom)
		log, r, err := s.store.Claim(ctx, t.id, t.flow.Load)
		if err != nil {
			return fmt.Errorf("claim task %v: %w", t.id, err)
		}
		t.flow.Loaded()
		t.log, t.head = log, r.Head
		for i, src := range s.sources {
			t.floor[i] = r.Head.Offsets[src.Stream]
		}
		t.confirmed = append([]uint64(nil), t.floor...)
		s.tasks[p], recovered[p] = t, r
		// The fences are read behind the claim and before any commit: a later
		// owner that publishes for us raises them first.
		for i, to := range s.targets {
			if !to.sink.Fenced() || len(r.Unpublished) > 0 {
				continue
			}
			if t.fences[i], err = to.sink.LastFence(ctx, s.flow.Name(), t.id.String()); err != nil {
				return fmt.Errorf("fence of task %v in stream %s: %w", t.id, to.name, err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var left []leftover
	for p, r := range recovered {
		s.keys += s.tasks[p].flow.Keys()
		s.results.Add(r.Head.Results)
		s.deadLetters.Add(r.Head.DeadLetters)
		for _, pending := range r.Unpublished {
			left = append(left, leftover{s.tasks[p], pending})
		}
	}
	return left, nil
}

// publishLeft publishes what former sessions committed and may not have
// published. All fences come first, then one look into each sink, then the rest.
func (s *session) publishLeft(ctx context.Context, left []leftover) error {
	type fence struct {
		t  *task
		to *target
	}
	var fences []fence
	seen := map[*task]bool{}
	from := map[*target]uint64{}
	for _, l := range left {
		for _, to := range s.targets {
			if !seen[l.task] && to.sink.Fenced() {
				fences = append(fences, fence{l.task, to})
			}
			if at, ok := from[to]; !ok || l.pending.Sinks[to.name] < at {
				from[to] = l.pending.Sinks[to.name]
			}
		}
		seen[l.task] = true
	}
	err := each(ctx, len(fences), 8, func(ctx context.Context, i int) (err error) {
		f := fences[i]
		f.t.fences[f.to.index], err = f.to.sink.WriteFence(ctx, s.flow.Name(), f.t.id.String())
		return err
	})
	if err != nil {
		return fmt.Errorf("raise a fence: %w", err)
	}
	held := map[*target]map[position]int{}
	for _, to := range s.targets {
		at, ok := from[to]
		if !ok {
			info, err := s.conn.Stream(ctx, to.name)
			if err != nil {
				return fmt.Errorf("sink %s: %w", to.name, err)
			}
			to.advance(info.LastSeq)
			continue
		}
		if held[to], err = s.held(ctx, to, at); err != nil {
			return err
		}
	}
	published := 0
	for _, l := range left {
		groups, err := s.groups(l.task, l.pending.N, l.pending.Outbox)
		if err != nil {
			return err
		}
		for i := range groups {
			g := &groups[i]
			g.drop(held[g.to][position{l.task.id.String(), l.pending.N}])
			if len(g.outs) == 0 {
				continue
			}
			if err := s.send(ctx, l.task, g, 0); err != nil {
				return fmt.Errorf("publish what was left, stream %s: %w", g.to.name, err)
			}
			published += len(g.outs)
		}
	}
	if published > 0 {
		s.log.Info("published the results that an earlier worker had committed", "results", published)
	}
	return nil
}

// start makes lanes and readers and runs them. limits, if there are any, hold the
// last sequences to read; sources that they leave out are not read then.
func (s *session) start(rec control.Record, limits map[string]uint64) error {
	s.makeLanes()
	for i, src := range s.sources {
		lowest, ahead := uint64(math.MaxUint64), uint64(0)
		for _, t := range s.tasks {
			lowest, ahead = min(lowest, t.floor[i]), max(ahead, t.floor[i])
		}
		info, err := s.conn.Stream(s.ctx, src.Stream)
		if err != nil {
			return fmt.Errorf("source %s: %w", src.Stream, err)
		}
		from, gap, err := checkSource(info, lowest, s.cfg.AcceptGap)
		if err != nil {
			return err
		}
		if gap > 0 {
			s.log.Warn("going on without messages that are gone from the source", "source", src.Stream, "missing", gap, "from", info.FirstSeq)
		}
		r := newReader(s, i, info, from, ahead)
		for _, t := range s.tasks {
			r.router.Seen(t.id.Partition, t.floor[i])
		}
		if limit, ok := limits[src.Stream]; ok || len(limits) > 0 {
			r.bound(limit)
		} else if cut, ok := cutOf(rec)[src.Stream]; ok {
			r.bound(cut)
		}
		r.cursor, err = s.conn.OpenCursor(s.ctx, bus.CursorConfig{
			Stream: src.Stream, Subjects: src.Subjects, From: from, Name: "natsflow-" + s.flow.Name() + "-" + s.cfg.Name, Logger: s.log,
		})
		if err != nil {
			return fmt.Errorf("source %s: %w", src.Stream, err)
		}
		s.readers = append(s.readers, r)
	}
	if len(cutOf(rec)) > 0 {
		s.log.Info("finishing a drain that was under way", "epoch", rec.Epoch, "cut", control.FormatCut(cutOf(rec)))
	}
	s.run()
	return nil
}

func (s *session) laneOf(partition int) int { return partition % s.cfg.Lanes }

func (s *session) makeLanes() {
	s.lanes = make([]*lane, s.cfg.Lanes)
	s.low = make([][]atomic.Uint64, s.cfg.Lanes)
	for i := range s.lanes {
		s.lanes[i] = &lane{s: s, in: make(chan laneInput, laneQueue), byPos: map[int]*task{}, pos: make([]uint64, len(s.sources))}
		s.low[i] = make([]atomic.Uint64, len(s.sources))
	}
	for _, t := range s.tasks {
		l := s.lanes[s.laneOf(t.id.Partition)]
		l.index = s.laneOf(t.id.Partition)
		l.tasks = append(l.tasks, t)
		l.byPos[t.id.Partition] = t
	}
	for _, l := range s.lanes {
		l.done = make(chan result, len(l.tasks))
		for i := range l.pos {
			l.pos[i] = math.MaxUint64
			for _, t := range l.tasks {
				l.pos[i] = min(l.pos[i], t.floor[i])
			}
			s.low[l.index][i].Store(l.pos[i])
		}
	}
}

// run starts the goroutines of the session. The first that fails ends it.
func (s *session) run() {
	s.readersLeft.Store(int32(len(s.readers)))
	s.lanesLeft.Store(int32(len(s.lanes)))
	for _, r := range s.readers {
		s.wg.Go(func() {
			if err := r.run(s.ctx); err != nil {
				s.cancel(fmt.Errorf("source %s: %w", r.stream, err))
				return
			}
			if s.readersLeft.Add(-1) == 0 {
				close(s.readersDone)
			}
		})
	}
	for _, l := range s.lanes {
		for _, t := range l.tasks {
			s.wg.Go(func() {
				if err := s.commitJobs(s.ctx, t, l.done); err != nil {
					s.cancel(err)
				}
			})
		}
		s.wg.Go(func() {
			if err := l.run(s.ctx); err != nil {
				s.cancel(err)
				return
			}
			if s.lanesLeft.Add(-1) == 0 {
				close(s.lanesDone)
			}
		})
	}
}

// close ends the session and waits for its goroutines. The cursors are removed
// when the server can be reached.
func (s *session) close(cause error) {
	s.cancel(cause)
	s.wg.Wait()
	for _, t := range s.tasks {
		if t != nil {
			t.dropBase()
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), time.Second)
	defer cancel()
	for _, r := range s.readers {
		if !s.conn.Connected() {
			break
		}
		if err := r.cursor.Close(ctx); err != nil {
			s.log.Debug("the cursor was not removed; it goes by itself", "source", r.stream, "err", err)
		}
	}
	if s.out != nil {
		s.out.Close()
	}
}

// progress acks what every lane has committed and published.
func (s *session) progress(l *lane) {
	for i, r := range s.readers {
		s.low[l.index][i].Store(l.lowest(i))
		if low := s.committed(i); low > 0 {
			r.cursor.Ack(low)
			s.metrics.position.WithLabelValues(r.stream).Set(float64(low))
		}
	}
	if err := s.cfg.reached(s.ctx, "acked", ""); err != nil {
		s.cancel(err)
	}
}

// end gives the lanes the end of their input.
func (s *session) end(e *ending) error {
	for _, l := range s.lanes {
		select {
		case l.in <- laneInput{end: e}:
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
	}
	return nil
}

// stopReaders stops them where they are and returns where that is, by source.
func (s *session) stopReaders() map[string]uint64 {
	at := make(map[string]uint64, len(s.readers))
	for _, r := range s.readers {
		at[r.stream] = r.stop()
	}
	return at
}

// finish waits until everything that was read is committed, published, acked
// and released, and ends the session. epoch is that of a drain, or 0.
func (s *session) finish(epoch uint64) (map[string]uint64, error) {
	select {
	case <-s.readersDone:
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
	e := &ending{epoch: epoch, positions: make([]uint64, len(s.readers))}
	at := make(map[string]uint64, len(s.readers))
	for i, r := range s.readers {
		e.positions[i], _ = r.position()
		at[r.stream] = e.positions[i]
	}
	if err := s.end(e); err != nil {
		return nil, err
	}
	select {
	case <-s.lanesDone:
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
	s.wg.Wait()
	if err := context.Cause(s.ctx); err != nil {
		return nil, err
	}
	return at, nil
}

// sinkPositions returns sequences of the sinks that results published from now on
// stand behind.
func (s *session) sinkPositions() map[string]uint64 {
	m := make(map[string]uint64, len(s.targets))
	for _, t := range s.targets {
		m[t.name] = t.seq.Load()
	}
	return m
}

// committed returns the position of a source that is committed and published.
func (s *session) committed(source int) uint64 {
	low := uint64(math.MaxUint64)
	for k := range s.low {
		low = min(low, s.low[k][source].Load())
	}
	return low
}

// positions returns how far each source has been read.
func (s *session) positions() map[string]uint64 {
	at := make(map[string]uint64, len(s.readers))
	for _, r := range s.readers {
		at[r.stream], _ = r.position()
	}
	return at
}

func (s *session) sinkNames() string {
	names := make([]string, 0, len(s.targets))
	for _, t := range s.targets {
		if t.name != deadStream && t.subject == "" {
			names = append(names, t.name)
		}
	}
	return strings.Join(names, ",")
}

// setTrouble notes what a wait is about; an empty text ends it.
func (s *session) setTrouble(p *patience, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "" {
		delete(s.troubles, p)
		return
	}
	s.troubles[p] = text
}

// troubled says what the session waits for: one thing of several, always the same.
func (s *session) troubled() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	least := ""
	for _, text := range s.troubles {
		if least == "" || text < least {
			least = text
		}
	}
	return least
}

// each runs fn for 0..n-1, at most width at a time, until one fails.
func each(ctx context.Context, n, width int, fn func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var next atomic.Int64
	for range min(width, n) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := fn(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return ctx.Err()
}
