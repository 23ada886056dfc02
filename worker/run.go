package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
)

var (
	// errRestart ends a session so that the next one starts in the same process.
	errRestart = errors.New("start again")
	// errLeft ends a session that has not read anything yet.
	errLeft = errors.New("left before the first record")
	// errStopped ends a session whose flow was drained without it.
	errStopped = errors.New("the flow was drained by another process")
	// errAway is wrapped by what goes away when the server is back.
	errAway = errors.New("the server is away")
)

// Bounds of the wait before a worker that lost its place, or could not start,
// tries again.
const (
	rejoinWait    = 500 * time.Millisecond
	maxRejoinWait = 5 * time.Second
	// standByGrace is how long a worker waits for tasks before it says that it
	// stands by.
	standByGrace = 300 * time.Millisecond
	// settled is how long a session lasts after which the waits are short again.
	settled = time.Minute
)

// worker is a process that runs a flow or stands by for it.
type worker struct {
	cfg     Config
	flow    *flow.Flow
	log     *slog.Logger
	metrics *Metrics
	conn    *bus.Conn // reads and commits
	side    *bus.Conn // lease and record: their answers must not stand behind what is read
	ctl     *control.Control
	records *mailbox
	status  *reporter
	// taskNames are the names of all tasks of the flow.
	taskNames []string
	// interrupted: the last session ended with tasks in hand.
	interrupted bool
}

// Run runs the flow until it is drained, or until ctx ends, which makes the worker
// leave: it commits, publishes and releases what it has read. It returns
// nil after either. Workers of one flow share its tasks; one that has none stands
// by.
//
// Errors: [ErrStopTimeout], [ErrGap], [ErrSource], [flow.ErrState],
// [kvsnap.ErrSnapshotCorrupt], [control.ErrReplaced], [control.ErrDefinition], a
// *[flow.StepError] of a flow that stops on errors, and those of [bus.Connect].
// After an error, as after a kill, the next start goes on from the last commit.
func Run(ctx context.Context, f *flow.Flow, cfg Config) error {
	cfg = cfg.withDefaults(f.Options().Partitions)
	if err := cfg.validate(); err != nil {
		return err
	}
	metrics, err := NewMetrics(cfg.Registerer, f.Name())
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	w := &worker{cfg: cfg, flow: f, log: cfg.Logger.With("flow", f.Name(), "worker", cfg.Name), metrics: metrics, records: newMailbox()}
	for stage := range f.Stages() {
		w.taskNames = append(w.taskNames, namesOf(f, stage)...)
	}
	// Everything but the wish to leave outlives ctx, by the stop timeout at most.
	hard, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		select {
		case <-ctx.Done():
		case <-hard.Done():
			return
		}
		t := time.NewTimer(cfg.StopTimeout)
		defer t.Stop()
		select {
		case <-t.C:
			cancel(fmt.Errorf("%w: more than %v", ErrStopTimeout, cfg.StopTimeout))
		case <-hard.Done():
		}
	})
	return w.run(ctx, hard)
}

func (w *worker) run(ctx, hard context.Context) (err error) {
	side := w.cfg.Bus
	side.Name += " (control)"
	for _, c := range []struct {
		conn **bus.Conn
		cfg  bus.Config
	}{{&w.conn, w.cfg.Bus}, {&w.side, side}} {
		if *c.conn, err = bus.Connect(ctx, c.cfg); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		defer func() { closeConn(*c.conn, err) }()
	}
	w.status = newReporter(w)
	err = w.retry(ctx, "start", func() error { return w.prepare(ctx) })
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	back, cancel := context.WithCancelCause(hard)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		if err := w.ctl.Run(back, w.records.put); err != nil && back.Err() == nil {
			w.records.fail(fmt.Errorf("control: %w", err))
		}
	})
	wg.Go(func() { w.status.run(back) })
	defer w.serve(back)()
	for {
		err := w.join(ctx, back)
		switch {
		case !errors.Is(err, errRestart):
			return err
		case ctx.Err() != nil:
			return nil
		}
		if err := pause(ctx, rejoinWait); err != nil {
			return nil
		}
	}
}

// closeConn closes a connection at the end of what has ended with err. When a stop
// took too long, the server has had its time.
func closeConn(conn *bus.Conn, err error) {
	if errors.Is(err, ErrStopTimeout) {
		conn.Abort()
		return
	}
	conn.Close()
}

// retry repeats what fails because the server is away or has no room.
func (w *worker) retry(ctx context.Context, what string, try func() error) error {
	for wait := rejoinWait; ; wait = min(2*wait, maxRejoinWait) {
		err := try()
		if err == nil || ctx.Err() != nil || !w.temporary(err) {
			return err
		}
		w.log.Warn("cannot "+what+"; trying again", "err", err)
		if pause(ctx, wait) != nil {
			return err
		}
	}
}

// prepare defines the flow and applies the commands that were given while nobody
// ran, so that they are seen before the first record is.
func (w *worker) prepare(ctx context.Context) error {
	if err := w.conn.RequireJetStream(ctx); err != nil {
		return err
	}
	def, err := Definition(ctx, w.conn, w.flow)
	if err != nil {
		return err
	}
	def.AcceptRecreated, def.AcceptChanges = w.cfg.AcceptGap, w.cfg.AcceptChanges
	w.ctl, err = control.Open(ctx, control.Config{
		Conn: w.side, Flow: w.flow.Name(), Prefix: w.cfg.ControlPrefix, Replicas: w.cfg.Replicas,
		Logger: w.cfg.Logger.With("worker", w.cfg.Name), LeaseTTL: w.cfg.LeaseTTL, Name: w.cfg.Name,
		Tasks: w.taskNames, Hash: def.Hash,
	})
	if err != nil {
		return fmt.Errorf("open control: %w", err)
	}
	if err := w.createIntakes(ctx, def); err != nil {
		return err
	}
	if _, err := w.ctl.Define(ctx, def); err != nil {
		return err
	}
	rec, err := w.ctl.CatchUp(ctx)
	if err != nil {
		return fmt.Errorf("look for commands: %w", err)
	}
	if w.cfg.AcceptChanges && len(rec.LeftOver) > 0 {
		w.log.Warn("going on without the state of steps that are gone", "steps", strings.Join(rec.LeftOver, ", "))
	}
	if w.cfg.Resume && rec.State.Stopped() {
		// Here and not when this worker becomes the active one: a drain that comes
		// later counts, and the active worker may be waiting for the resume.
		rec, err = w.ctl.Resume(ctx, "worker "+w.cfg.Name+" was started with resume")
		if err != nil {
			return fmt.Errorf("resume: %w", err)
		}
	}
	w.records.put(rec)
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Definition is what the flow record must know of a flow, after a look at its
// sources. A source that is read through a stream of the flow's own is there under
// the name of that one; if it is still to be made, without a time of creation. Errors:
// [ErrSource], for a source that is not there or cannot be one; the definition is then
// complete except for the time of creation of that stream and of those behind it. The
// same error says that a bucket is not there in which the flow looks keys up.
func Definition(ctx context.Context, conn *bus.Conn, f *flow.Flow) (control.Definition, error) {
	def := control.Definition{Partitions: f.Options().Partitions, Stages: f.Stages(), Hash: f.Hash(), Sources: map[string]control.SourceRecord{}}
	for _, s := range f.Steps() {
		if s.Stateful {
			def.Steps = append(def.Steps, control.StepRecord{ID: s.ID, Kind: s.Kind, Version: s.Version, Stage: s.Stage})
		}
	}
	for _, src := range f.Sources() {
		def.Sources[src.Stream] = control.SourceRecord{Subjects: src.Subjects, PartitionBy: src.PartitionBy}
	}
	for _, src := range f.Sources() {
		info, err := conn.Stream(ctx, src.Stream)
		if src.Bucket != "" && (errors.Is(err, bus.ErrNotFound) || err == nil) {
			if err := checkBucket(src, info, err); err != nil {
				return def, err
			}
		}
		if errors.Is(err, bus.ErrNotFound) {
			return def, fmt.Errorf("%w: there is no stream %s; create it first, for example: nats stream add %s --subjects '%s.>' --defaults",
				ErrSource, src.Stream, src.Stream, src.Stream)
		}
		if err != nil {
			return def, fmt.Errorf("source %s: %w", src.Stream, err)
		}
		name, rec, err := definitionOf(ctx, conn, f, src, info)
		if err != nil {
			return def, err
		}
		if rec.Origin == "" {
			// Only the retention matters here; the positions are looked at later.
			if _, _, err := checkSource(info, 0, true); err != nil {
				return def, err
			}
			if err := checkMirrored(src, info); err != nil {
				return def, err
			}
		}
		delete(def.Sources, src.Stream)
		def.Sources[name] = rec
	}
	return def, checkTables(ctx, conn, f)
}

// checkBucket refuses a bucket that is not there or cannot be a source. missing is the
// error of a look at its stream, nil if it is there.
func checkBucket(src flow.SourceInfo, info bus.StreamInfo, missing error) error {
	switch {
	case missing != nil:
		return fmt.Errorf("%w: there is no bucket %s; create it first, for example: nats kv add %s", ErrSource, src.Bucket, src.Bucket)
	case info.Mirror:
		return fmt.Errorf("%w: bucket %s is a mirror of another one and has the subjects of that: read that one, or the stream %s with these subjects", ErrSource, src.Bucket, src.Stream)
	case info.Retention != "limits":
		return fmt.Errorf("%w: stream %s of bucket %s has %s retention, which deletes values that a consumer has had: a bucket has limits retention", ErrSource, src.Stream, src.Bucket, info.Retention)
	}
	return nil
}

// join makes the worker a member, waits until it has tasks and works. It
// returns errRestart when it lost its place, which is no error of the flow.
func (w *worker) join(ctx, hard context.Context) error {
	member, err := w.ctl.Join(ctx, control.WithSameName{Immediate: w.sinksKeepLateResultsOut(ctx)})
	switch {
	case ctx.Err() != nil:
		if err == nil {
			w.giveBack(hard, member)
		}
		return nil
	case err != nil && w.temporary(err):
		w.log.Warn("cannot join; trying again", "err", err)
		return errRestart
	case err != nil:
		return fmt.Errorf("join: %w", err)
	}
	term, cancel := context.WithCancelCause(hard)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		if err := member.Run(term); err != nil && term.Err() == nil {
			cancel(err)
		}
	})
	w.status.use(member)
	defer w.status.use(nil)
	err = w.term(ctx, term, member)
	if cause := context.Cause(term); err != nil && cause != nil {
		err = cause
	}
	if errors.Is(err, control.ErrReplaced) || errors.Is(err, ErrStopTimeout) {
		return err
	}
	w.giveBack(hard, member)
	if errors.Is(err, control.ErrLeaseLost) || errors.Is(err, bus.ErrFenced) || errors.Is(err, bus.ErrUntrusted) {
		if ctx.Err() != nil && w.interrupted {
			return fmt.Errorf("the stop was not completed, the next start goes on from the last commit: %w", err)
		}
		w.log.Warn("lost the place in the flow; joining again", "err", err)
		return errRestart
	}
	return err
}

// giveBack lets another worker take over at once.
func (w *worker) giveBack(ctx context.Context, member *control.Member) {
	bounded, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	if err := member.Leave(bounded); err != nil {
		w.log.Warn("the lease was not given back; it runs out by itself", "err", err)
	}
}

// sinksKeepLateResultsOut reports whether what a former process of this worker's
// name may still publish can do no harm: each sink has a fence, or a duplicate
// window well above the lease. If in doubt the answer is no.
func (w *worker) sinksKeepLateResultsOut(ctx context.Context) bool {
	for _, sink := range w.flow.Sinks() {
		name := sink.Name
		switch sink.Kind {
		case flow.SinkBucket:
			name = "KV_" + name
		case flow.SinkDead:
			name = deadStream
		case flow.SinkControl:
			// The control stream was made by natsflow and has a fence.
			continue
		}
		info, err := w.conn.Stream(ctx, name)
		switch {
		case errors.Is(err, bus.ErrNotFound):
			// It will be created with a fence.
		case err != nil || !info.Fence && info.Duplicates < 2*w.cfg.LeaseTTL:
			return false
		}
	}
	return true
}

// term runs sessions, whenever there are tasks for the worker, until the flow or
// the worker stops.
func (w *worker) term(ctx, term context.Context, member *control.Member) error {
	failed := failure{flow: w.flow.Name()}
	wait := rejoinWait
	for ctx.Err() == nil {
		rec, err := w.runnable(ctx, term)
		if err != nil || rec.State.Stopped() || ctx.Err() != nil {
			return err
		}
		if failed.err == nil {
			if stop, err := w.standBy(ctx, term, member); stop || err != nil {
				return err
			}
		}
		began := time.Now()
		err = w.session(ctx, term, member, rec, failed.limits)
		var step *flow.StepError
		switch {
		case errors.As(err, &step) && failed.narrow(step):
			// The records before the failing one count: read up to there, commit
			// that, and stop.
			w.log.Error("a record failed and on_error is stop; stopping before it", "err", step)
			continue
		case errors.Is(err, errIdle) && failed.err == nil:
			continue
		case errors.Is(err, errIdle):
			return failed.err
		case errors.Is(err, errStopped):
			w.log.Info("the flow was drained by the other workers")
			return nil
		case err == nil && failed.err != nil:
			return failed.err
		case w.temporary(err) && term.Err() == nil && ctx.Err() == nil:
			if time.Since(began) > settled {
				wait = rejoinWait
			}
			w.log.Warn("the session ended; starting it again", "in", wait, "err", err)
			w.status.trouble(err.Error())
			if pause(ctx, wait) != nil {
				return nil //nolint:nilerr // asked to leave while there was nothing to leave
			}
			wait = min(2*wait, maxRejoinWait)
			continue
		}
		return err
	}
	if failed.err != nil {
		return failed.err
	}
	return nil
}

// failure is where a flow stops that stops on errors.
type failure struct {
	err *flow.StepError
	// limits are the last sequences to read, of the exchange too.
	limits map[string]uint64
	// flow is its name.
	flow string
}

// narrow takes a failing record into account. It reports false for one that is
// not before the limits: then there is no use in trying again. Tasks run one
// beside the other, so that a record may fail before one that failed earlier.
func (f *failure) narrow(step *flow.StepError) bool {
	stream, seq := step.Stream, step.Seq
	if step.Frame > 0 {
		// A frame is read whole or not at all.
		stream, seq = flow.ExchangeStream(f.flow), step.Frame
	}
	if seq == 0 {
		return false // a window that closes: there is no record to stop before
	}
	limit, ok := f.limits[stream]
	if ok && seq > limit {
		return false
	}
	if f.limits == nil {
		f.limits = map[string]uint64{}
	}
	f.err, f.limits[stream] = step, seq-1
	return true
}

// temporary reports whether an error goes away by waiting.
func (w *worker) temporary(err error) bool {
	return bus.Retryable(err) || errors.Is(err, bus.ErrNoSpace) || errors.Is(err, errAway)
}

// standBy waits until there are tasks for this worker, or a drain to finish. It
// reports stop when there is nothing left to wait for.
func (w *worker) standBy(ctx, term context.Context, member *control.Member) (stop bool, err error) {
	// Getting tasks that are free takes a moment.
	grace := time.NewTimer(standByGrace)
	defer grace.Stop()
	for {
		rec, changed := w.records.get()
		if err := w.records.failure(); err != nil {
			return true, err
		}
		if rec.State.Stopped() && w.records.ran() {
			w.log.Info("the flow was drained", "epoch", rec.Epoch)
			return true, nil
		}
		wanted, moved := member.Wanted()
		if wanted != nil {
			if err := w.letGo(term, member, wanted); err != nil {
				return true, err
			}
		}
		if len(wanted) > 0 {
			return false, w.refresh(term)
		}
		select {
		case <-moved:
		case <-grace.C:
			w.log.Info("the other workers have all tasks; standing by")
			w.status.phase("standing by")
		case <-changed:
		case <-ctx.Done():
			return true, nil
		case <-term.Done():
			return true, context.Cause(term)
		}
	}
}

// letGo lets others have the tasks that a former session of this process took and
// could not release, and that are not wanted here any more.
func (w *worker) letGo(ctx context.Context, member *control.Member, wanted []string) error {
	var tasks map[string]control.TaskRecord
	err := w.retry(ctx, "list the tasks", func() (err error) {
		tasks, err = w.ctl.Tasks(ctx)
		return err
	})
	if err != nil {
		return err
	}
	for name, rec := range tasks {
		if rec.Owner != member.Name() || rec.Instance != member.Instance() || slices.Contains(wanted, name) {
			continue
		}
		if err := member.Release(ctx, name, nil); err != nil {
			return err
		}
	}
	return nil
}

// refresh reads the flow record: tasks may be free because their owner has ended a
// drain, and what was heard of it here may be older.
func (w *worker) refresh(ctx context.Context) error {
	rec, err := w.ctl.Record(ctx)
	if err == nil {
		w.records.put(rec)
	} else if !w.temporary(err) {
		return err
	}
	return nil
}

// runnable waits while the flow is stopped. It returns the record of a stopped
// flow when that was drained in this worker's time: then the worker is to end.
func (w *worker) runnable(ctx, term context.Context) (control.Record, error) {
	for said := false; ; {
		rec, changed := w.records.get()
		if err := w.records.failure(); err != nil {
			return rec, err
		}
		if !rec.State.Stopped() {
			return rec, nil
		}
		if w.records.ran() {
			w.log.Info("the flow was drained", "epoch", rec.Epoch)
			return rec, nil
		}
		if !said {
			said = true
			w.status.phase(string(rec.State))
			w.log.Info(fmt.Sprintf("the flow is %s and stays so; waiting for a resume: natsflow resume %s", rec.State, w.flow.Name()),
				"epoch", rec.Epoch, "cut", control.FormatCut(cutOf(rec)))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return rec, nil
		case <-term.Done():
			return rec, context.Cause(term)
		}
	}
}

func cutOf(rec control.Record) map[string]uint64 {
	if rec.Drain == nil {
		return nil
	}
	return rec.Drain.Cut
}

// session runs one session. It returns nil when the worker left or the flow was
// drained. limits, if there are any, hold the last sequences to read: the session
// ends there, and does not read any other source.
func (w *worker) session(ctx, term context.Context, member *control.Member, rec control.Record, limits map[string]uint64) (err error) {
	for _, step := range w.flow.Steps() {
		if !step.Stateful {
			continue
		}
		if err := rec.Reuses(step.ID); err != nil {
			return err
		}
	}
	w.status.phase("starting")
	s := newSession(term, w, rec)
	defer func() {
		w.status.session(nil)
		s.close(err)
	}()
	// A stop while the sinks are opened has nothing to wait for.
	opened := context.AfterFunc(ctx, func() { s.cancel(errLeft) })
	err = s.open(rec, member.Trusted)
	if !opened() {
		return nil
	}
	if err != nil {
		return s.cause(err)
	}
	// The conductor may be waiting for lanes that wait for a sink that refuses.
	defer context.AfterFunc(ctx, s.letGo)()
	w.status.session(s)
	s.wg.Go(func() { s.watchLimits(s.ctx) })
	s.wg.Go(func() { s.trims(s.ctx) })
	s.wg.Go(func() { s.tellDue(s.ctx) })
	if cut := cutOf(rec); cut != nil {
		s.log.Info("finishing a drain that was under way", "epoch", rec.Epoch, "cut", control.FormatCut(cut))
	}
	c := newConductor(w, s, member, limits)
	err = s.cause(c.run(ctx))
	w.interrupted = len(c.held) > 0
	return err
}

// cause prefers what ended the session to what a part of it met then.
func (s *session) cause(err error) error {
	if cause := context.Cause(s.ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

// mailbox holds the latest flow record.
type mailbox struct {
	mu      sync.Mutex
	rec     control.Record
	err     error
	changed chan struct{}
	// running: the flow was not stopped at some time.
	running bool
}

func newMailbox() *mailbox { return &mailbox{changed: make(chan struct{})} }

func (m *mailbox) put(rec control.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if rec.Revision < m.rec.Revision {
		return
	}
	m.rec = rec
	m.running = m.running || !rec.State.Stopped()
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *mailbox) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *mailbox) get() (control.Record, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec, m.changed
}

// ran reports whether the flow was not stopped at some time that this process has
// seen: when it is stopped now, it was drained meanwhile.
func (m *mailbox) ran() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.running
}

func (m *mailbox) failure() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}
