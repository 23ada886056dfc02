package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
)

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
	// makers are what publishes to it, subjects those that they publish on.
	makers, subjects []string
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

// session is the time in which a worker has tasks. Which ones may change.
type session struct {
	cfg     *Config
	flow    *flow.Flow
	sources []flow.SourceInfo
	// known is what the flow record has of the sources.
	known map[string]control.SourceRecord
	// inputs are what the readers read: the sources, in their order, and behind them the
	// exchange for each later stage.
	inputs   []input
	interval time.Duration
	// tellEvery is how often a task commits for its watermark alone, elsewhere what the
	// other workers have said of what is due.
	tellEvery time.Duration
	elsewhere dueElsewhere
	// leftOver are the steps whose state was given up.
	leftOver []string
	log      *slog.Logger
	metrics  *Metrics

	conn *bus.Conn // reads and commits
	out  *bus.Conn // publishes; guarded by the lease
	side *bus.Conn // tells the other workers what is due
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

	// epoch is the flow's.
	epoch   atomic.Uint64
	targets []*target
	// bySink are the targets by the index of the sink, and names what they are called
	// in a commit.
	bySink  []*target
	names   []string
	lanes   []*lane
	readers []*reader
	// mirrors are, by source, what is read in its place, nil as a rule; intakes what
	// stands for it.
	mirrors []*mirror
	intakes []*intake
	// tables are what the flow looks keys up in, nil if it does not.
	tables *tables
	// taskNames are all tasks of the flow. trimmer: this worker trims the intakes.
	taskNames []string
	trimmer   atomic.Bool
	// exchange is the target of what goes on to a later stage, nil with one stage.
	exchange *target
	// trimmedTo is the sequence before which its frames have been removed here.
	trimmedTo atomic.Uint64
	// released gets the tasks that a lane has committed and released.
	released chan *task
	// woken asks the conductor to look.
	woken chan struct{}
	// unstored numbers outboxes that are published without being stored.
	unstored atomic.Uint64

	// low[lane][source] is the position that the lane has committed and
	// published.
	low [][]atomic.Uint64

	// owned is the number of tasks here, done how many were released for a drain.
	owned, done atomic.Int32
	// results and deadLetters are what the tasks have made since the flow's
	// creation, late counts late records, keys the number of keys with state,
	// stateBytes what they take in the bucket.
	results, deadLetters, late, keys, stateBytes atomic.Int64
	// lastCommit is when a task committed last, in nanoseconds since 1970.
	lastCommit atomic.Int64

	began time.Time

	mu sync.Mutex
	// troubles are the waits that have been complained about.
	troubles map[*patience]string
	// warnings of sources that are about to drop messages.
	warnings map[string]string
	// generations of the tasks here, by name.
	generations map[string]uint64

	refusals
	halting
}

func newSession(term context.Context, w *worker, rec control.Record) *session {
	s := &session{
		cfg: &w.cfg, flow: w.flow, sources: w.flow.Sources(), interval: w.flow.Options().CommitInterval, leftOver: rec.LeftOver, known: rec.Sources,
		log: w.log, metrics: w.metrics, conn: w.conn, side: w.side, ctl: w.ctl, tellEvery: tellPeriod(w.flow), controlStream: rec.Control.Stream, began: time.Now(),
		released: make(chan *task, len(w.taskNames)), woken: make(chan struct{}, 1), troubles: map[*patience]string{}, warnings: map[string]string{}, generations: map[string]uint64{},
		refusals: newRefusals(), taskNames: w.taskNames,
	}
	s.ctx, s.cancel = context.WithCancelCause(term)
	s.epoch.Store(rec.Epoch)
	s.unstored.Store(uint64(time.Now().UnixNano()))
	return s
}

// took notes that a task came, gave that it went.
func (s *session) took(t *task) {
	s.owned.Add(1)
	s.results.Add(int64(t.head.Results))
	s.deadLetters.Add(int64(t.head.DeadLetters))
	s.late.Add(int64(t.head.Late))
	s.measure(t)
	s.mu.Lock()
	s.generations[t.id.String()] = t.log.Generation()
	s.mu.Unlock()
}

func (s *session) gave(t *task) {
	s.results.Add(-int64(t.head.Results))
	s.deadLetters.Add(-int64(t.head.DeadLetters))
	s.late.Add(-int64(t.head.Late))
	s.keys.Add(-int64(t.keys))
	s.stateBytes.Add(-int64(t.stateBytes))
	s.mu.Lock()
	delete(s.generations, t.id.String())
	s.mu.Unlock()
}

// measure looks how large the state of a task is. Only whoever runs the task may
// call it.
func (s *session) measure(t *task) {
	keys, bytes := t.flow.Keys(), t.log.StateBytes()
	s.keys.Add(int64(keys - t.keys))
	s.stateBytes.Add(int64(bytes) - int64(t.stateBytes))
	t.keys, t.stateBytes = keys, bytes
}

// wake asks the conductor to look.
func (s *session) wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

// open connects, opens the sinks and the snapshots, and starts the lanes, which
// have no tasks yet.
func (s *session) open(rec control.Record, trusted func() bool) (err error) {
	outCfg := s.cfg.Bus
	outCfg.Trusted = trusted
	outCfg.Name += " (results)"
	if s.out, err = bus.Connect(s.ctx, outCfg); err != nil {
		if !s.conn.Connected() {
			// The other connection waits for the server, too.
			err = fmt.Errorf("%w: %w", errAway, err)
		}
		return fmt.Errorf("connect for results: %w", err)
	}
	if err := s.openIntakes(s.ctx, rec); err != nil {
		return err
	}
	s.inputs = inputsOf(s.flow, s.sources)
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
	if err := s.openMirrors(s.ctx); err != nil {
		return err
	}
	if err := s.openTables(s.ctx); err != nil {
		return err
	}
	s.makeLanes()
	return nil
}

// openTargets creates the sinks that are not there and opens all of them.
func (s *session) openTargets(ctx context.Context) error {
	s.targets, s.bySink, s.names = nil, nil, nil
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
		case flow.SinkExchange:
			var err error
			if cfg.FirstSeq, err = s.firstOfExchange(ctx, info.Name); err != nil {
				return err
			}
		}
		at, created, err := s.conn.EnsureSink(ctx, cfg)
		if errors.Is(err, bus.ErrNotTaken) {
			s.misfits = append(s.misfits, cfg)
		} else if err != nil {
			return fmt.Errorf("sink %s: %w", info.Name, err)
		}
		if info.Kind == flow.SinkExchange {
			if err := checkExchange(at); err != nil {
				return err
			}
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
		to.use(info, cfg.Subjects)
		if info.Kind == flow.SinkExchange {
			s.exchange = to
		}
		name := at.Name
		if info.Kind == flow.SinkControl {
			name = controlTarget
		}
		s.bySink, s.names = append(s.bySink, to), append(s.names, name)
	}
	return nil
}

// leftover is an entry whose outbox a former session may not have published.
type leftover struct {
	task    *task
	pending kvsnap.Pending
}

// openTasks takes tasks over, loads their state and publishes what was left
// unpublished.
func (s *session) openTasks(ctx context.Context, ids []kvsnap.TaskID) ([]*task, error) {
	tasks := make([]*task, len(ids))
	recovered := make([]kvsnap.Recovered, len(ids))
	err := each(ctx, len(ids), 8, func(ctx context.Context, i int) (err error) {
		tasks[i], recovered[i], err = s.claim(ctx, ids[i])
		return err
	})
	if err != nil {
		return nil, err
	}
	var left []leftover
	for i, r := range recovered {
		for _, pending := range r.Unpublished {
			left = append(left, leftover{tasks[i], pending})
		}
	}
	if err := s.publishLeft(ctx, left); err != nil {
		return nil, err
	}
	return tasks, s.refit(ctx)
}

// claim takes one task over and loads its state.
func (s *session) claim(ctx context.Context, id kvsnap.TaskID) (*task, kvsnap.Recovered, error) {
	t := &task{
		id: id, flow: s.flow.StageTask(id.Stage, id.Partition), jobs: make(chan job, 1),
		floor: make([]uint64, len(s.inputs)), fences: make([]uint64, len(s.targets)), lastCommit: time.Now(),
	}
	for i, to := range s.bySink {
		t.flow.LimitResults(i, max(to.room(s.flow, id), 1))
	}
	t.flow.LeaveOut(s.leftOver...)
	if s.tables != nil {
		t.flow.UseTables(s.tables)
	}
	if s.cfg.AcceptGap {
		t.flow.AcceptLostFrames()
	}
	log, r, err := s.store.Claim(ctx, id, t.flow.Load)
	if err != nil {
		return nil, r, fmt.Errorf("claim task %v: %w", id, err)
	}
	t.flow.Loaded()
	t.log, t.head = log, r.Head
	t.restoreClocks(s.sources, len(s.inputs))
	for i, in := range s.inputs {
		if in.stage == id.Stage {
			t.floor[i] = r.Head.Offsets[in.stream]
		}
	}
	t.confirmed, t.seen = slices.Clone(t.floor), slices.Clone(t.floor)
	// The fences are read behind the claim and before any commit: a later
	// owner that publishes for us raises them first.
	for i, to := range s.targets {
		if !to.sink.Fenced() || len(r.Unpublished) > 0 {
			continue
		}
		if t.fences[i], err = to.sink.LastFence(ctx, s.flow.Name(), id.String()); err != nil {
			return nil, r, fmt.Errorf("fence of task %v in stream %s: %w", id, to.name, err)
		}
	}
	return t, r, nil
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
			if len(l.pending.Targets) > 0 && !slices.Contains(l.pending.Targets, s.nameOf(to)) {
				continue // it has no results of that entry
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
	held := map[*target]heldOuts{}
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
		held[to] = heldOuts{}
		for _, l := range left {
			held[to].want(l.task, l.pending.N)
		}
		if err := s.held(ctx, to, at, held[to]); err != nil {
			return err
		}
	}
	published, wait := 0, newPatience(s, "publish what was left")
	for _, l := range left {
		sinks, err := s.sinksOf(l)
		if err != nil {
			return err
		}
		groups, err := s.groups(l.task, l.pending.N, l.pending.Outbox, sinks)
		if err != nil {
			return err
		}
		for i := range groups {
			g := &groups[i]
			g.drop(held[g.to][position{l.task.id.String(), l.pending.N}])
			if len(g.outs) == 0 {
				continue
			}
			published += len(g.outs)
			// All of it will stand behind what the look into the sink has seen.
			if err := s.publishAll(ctx, l.task, g, g.to.seq.Load(), wait); err != nil {
				return err
			}
		}
	}
	wait.over()
	if published > 0 {
		s.log.Info("published the results that an earlier worker had committed", "results", published)
	}
	return nil
}

// nameOf is what a target is called in a commit.
func (s *session) nameOf(to *target) string { return s.names[slices.Index(s.bySink, to)] }

// controlTarget is the name of the control stream in a commit: which one that is
// depends on the configuration. No stream can have it.
const controlTarget = "control commands"

// targetNames are the streams that the numbers in an outbox stand for.
func (s *session) targetNames(outbox []byte) []string {
	if len(outbox) == 0 {
		return nil
	}
	return s.names
}

// sinksOf returns the targets that the numbers in an outbox stand for. The flow that
// made it may have had other sinks, or had them in another order.
func (s *session) sinksOf(l leftover) ([]*target, error) {
	if len(l.pending.Targets) == 0 || slices.Equal(l.pending.Targets, s.names) {
		return s.bySink, nil
	}
	sinks := make([]*target, len(l.pending.Targets))
	for i, name := range l.pending.Targets {
		k := slices.Index(s.names, name)
		if k < 0 {
			return nil, fmt.Errorf("%w: entry %d of task %v has results for stream %s that are not published yet, and this definition of the flow has no such sink: start the former definition until they are (stop it with SIGTERM or natsflow drain %s), then this one",
				control.ErrDefinition, l.pending.N, l.task.id, name, s.flow.Name())
		}
		sinks[i] = s.bySink[k]
	}
	return sinks, nil
}

func (s *session) laneOf(id kvsnap.TaskID) int { return (id.Stage + id.Partition) % s.cfg.Lanes }

// makeLanes makes the lanes and starts them, and makes the readers.
func (s *session) makeLanes() {
	s.lanes = make([]*lane, s.cfg.Lanes)
	s.low = make([][]atomic.Uint64, s.cfg.Lanes)
	for i := range s.lanes {
		s.lanes[i] = &lane{
			s: s, index: i, in: make(chan laneInput, laneQueue), byID: map[kvsnap.TaskID]*task{}, kept: map[kvsnap.TaskID]bool{}, pos: make([]uint64, len(s.inputs)), highest: slices.Repeat([]int64{noTime}, len(s.inputs)),
			// Room for a result of every task.
			done: make(chan result, len(s.taskNames)),
		}
		s.lanes[i].showDue()
		s.low[i] = make([]atomic.Uint64, len(s.inputs))
		for k := range s.low[i] {
			s.low[i][k].Store(math.MaxUint64)
		}
	}
	for i := range s.inputs {
		s.readers = append(s.readers, newReader(s, i))
	}
	for _, l := range s.lanes {
		s.wg.Go(func() {
			if err := l.run(s.ctx); err != nil {
				s.cancel(err)
			}
		})
	}
}

// close ends the session and waits for its goroutines.
func (s *session) close(cause error) {
	s.cancel(cause)
	s.wg.Wait()
	for _, l := range s.lanes {
		for _, t := range l.tasks {
			t.dropBase()
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), time.Second)
	defer cancel()
	for _, r := range s.readers {
		r.close(ctx)
	}
	if s.out != nil {
		closeConn(s.out, cause)
	}
}

// progress notes what every lane has committed and published.
func (s *session) progress(l *lane) {
	for i, r := range s.readers {
		s.low[l.index][i].Store(l.lowest(i))
		if low, ok := s.committed(i); ok {
			s.metrics.position.WithLabelValues(r.name).Set(float64(low))
		}
	}
	if err := s.cfg.reached(s.ctx, "noted", ""); err != nil {
		s.cancel(err)
	}
}

// tell gives every lane an input, made for its tasks.
func (s *session) tell(tasks []*task, input func(tasks []*task) laneInput) error {
	for i, l := range s.lanes {
		var own []*task
		for _, t := range tasks {
			if s.laneOf(t.id) == i {
				own = append(own, t)
			}
		}
		select {
		case l.in <- input(own):
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		}
	}
	return nil
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

// committed returns the position of a source that is committed and published by
// all tasks here, if there are any.
func (s *session) committed(source int) (low uint64, ok bool) {
	low = math.MaxUint64
	for k := range s.low {
		low = min(low, s.low[k][source].Load())
	}
	return low, low != math.MaxUint64
}

// positions returns how far each source, and each stage of the exchange, has been read.
func (s *session) positions() map[string]uint64 {
	at := make(map[string]uint64, len(s.readers))
	for _, r := range s.readers {
		at[r.name], _ = r.position()
	}
	return at
}

// about is what is logged of a session that runs.
func (s *session) about(tasks int) []any {
	about := []any{"tasks", tasks, "epoch", s.epoch.Load(), "positions", control.FormatCut(s.positions()), "sinks", s.sinkNames()}
	if s.tables != nil {
		about = append(about, "tables", s.tables.text())
	}
	return about
}

func (s *session) sinkNames() string {
	names := make([]string, 0, len(s.targets))
	for _, t := range s.targets {
		if t.name != deadStream && t.subject == "" && t != s.exchange {
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
