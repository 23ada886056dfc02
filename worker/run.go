package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
)

// errRestart ends a session so that the next one starts in the same process.
var errRestart = errors.New("start again")

// rejoinWait bounds the wait before a worker that lost its place joins again.
const rejoinWait = 500 * time.Millisecond

// worker is a process that runs a flow or stands by for it.
type worker struct {
	cfg     Config
	flow    *flow.Flow
	log     *slog.Logger
	metrics *Metrics
	conn    *bus.Conn
	ctl     *control.Control
	records *mailbox
	status  *reporter
	// resumed: the resume that the configuration asks for has been made.
	resumed bool
}

// Run runs the flow until it is drained, or until ctx ends, which makes the worker
// leave: it commits, publishes, acks and releases what it has read. It returns
// nil after either. While another worker of the flow is active it stands by.
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
	if w.conn, err = bus.Connect(ctx, w.cfg.Bus); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer w.conn.Close()
	def, err := w.definition(ctx)
	if err != nil {
		return err
	}
	w.ctl, err = control.Open(ctx, control.Config{
		Conn: w.conn, Flow: w.flow.Name(), Prefix: w.cfg.ControlPrefix, Replicas: w.cfg.Replicas,
		Logger: w.log, LeaseTTL: w.cfg.LeaseTTL, Name: w.cfg.Name,
	})
	if err != nil {
		return fmt.Errorf("open control: %w", err)
	}
	if _, err := w.ctl.Define(ctx, def); err != nil {
		return err
	}
	// What was asked for while nobody ran is seen before the first record is.
	rec, err := w.ctl.CatchUp(ctx)
	if err != nil {
		return fmt.Errorf("look for commands: %w", err)
	}
	w.records.put(rec)
	w.status = newReporter(w)

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

// definition is what the flow record must know, after a look at the sources.
func (w *worker) definition(ctx context.Context) (control.Definition, error) {
	def := control.Definition{
		Partitions: w.flow.Options().Partitions, Hash: w.flow.Hash(),
		Sources: map[string]control.SourceRecord{}, AcceptRecreated: w.cfg.AcceptGap,
	}
	for _, s := range w.flow.Steps() {
		if s.Stateful {
			def.Steps = append(def.Steps, control.StepRecord{ID: s.ID, Kind: s.Kind, Version: s.Version})
		}
	}
	for _, src := range w.flow.Sources() {
		info, err := w.conn.Stream(ctx, src.Stream)
		if errors.Is(err, bus.ErrNotFound) {
			return def, fmt.Errorf("%w: there is no stream %s; create it first, for example: nats stream add %s --subjects '%s.>' --defaults",
				ErrSource, src.Stream, src.Stream, src.Stream)
		}
		if err != nil {
			return def, fmt.Errorf("source %s: %w", src.Stream, err)
		}
		// Only the retention matters here; the positions are looked at later.
		if _, _, err := checkSource(info, 0, true); err != nil {
			return def, err
		}
		def.Sources[src.Stream] = control.SourceRecord{Created: info.Created, Subjects: src.Subjects}
	}
	return def, nil
}

// join makes the worker a member, waits until it is the active one and works. It
// returns errRestart when it lost its place, which is no error of the flow.
func (w *worker) join(ctx, hard context.Context) error {
	member, err := w.ctl.Join(hard, control.JoinConfig{Immediate: w.sinksKeepLateResultsOut(hard)})
	if err != nil {
		if w.temporary(err) {
			w.log.Warn("cannot join; trying again", "err", err)
			return errRestart
		}
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
	if errors.Is(err, control.ErrLeaseLost) || errors.Is(err, bus.ErrFenced) {
		w.log.Warn("lost the place in the flow; joining again", "err", err)
		return errRestart
	}
	if errors.Is(err, control.ErrReplaced) || errors.Is(err, ErrStopTimeout) {
		return err
	}
	bounded, stop := context.WithTimeout(hard, 2*time.Second)
	defer stop()
	if lerr := member.Leave(bounded); lerr != nil && err == nil {
		w.log.Warn("the lease was not given back; it runs out by itself", "err", lerr)
	}
	return err
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

// term waits until the worker is active, then runs sessions until the flow or the
// worker stops.
func (w *worker) term(ctx, term context.Context, member *control.Member) error {
	w.status.phase("standing by")
	active := member.Active()
	select {
	case <-active:
	default:
		w.log.Info("another worker is active; standing by")
		if stop, err := w.standBy(ctx, term, active); stop || err != nil {
			return err
		}
	}
	limits := map[string]uint64{}
	var stopped *flow.StepError
	for ctx.Err() == nil {
		rec, err := w.runnable(ctx, term)
		if err != nil || rec.State.Stopped() || ctx.Err() != nil {
			return err
		}
		err = w.session(ctx, term, member, rec, limits)
		var step *flow.StepError
		switch {
		case errors.As(err, &step) && stopped == nil:
			// The records before the failing one count: read up to there, commit
			// that, and stop.
			w.log.Error("a record failed and on_error is stop; stopping before it", "err", step)
			stopped = step
			limits[step.Stream] = step.Seq - 1
			continue
		case errors.Is(err, errRestart):
			continue
		case err == nil && stopped != nil:
			return stopped
		case err != nil && w.temporary(err) && term.Err() == nil:
			w.log.Warn("the session ended; starting it again", "err", err)
			if pause(ctx, rejoinWait) != nil {
				return nil
			}
			continue
		}
		return err
	}
	return nil
}

// temporary reports whether an error goes away by waiting.
func (w *worker) temporary(err error) bool {
	return bus.Retryable(err) || errors.Is(err, bus.ErrNoSpace)
}

// standBy waits for the active worker to go. It reports stop when there is
// nothing left to wait for.
func (w *worker) standBy(ctx, term context.Context, active <-chan struct{}) (stop bool, err error) {
	began := w.records.latest().State
	for {
		rec, changed := w.records.get()
		if !began.Stopped() && rec.State.Stopped() {
			w.log.Info("the flow was drained", "epoch", rec.Epoch)
			return true, nil
		}
		began = rec.State
		select {
		case <-active:
			return false, nil
		case <-changed:
		case <-ctx.Done():
			return true, nil
		case <-term.Done():
			return true, context.Cause(term)
		}
		if err := w.records.failure(); err != nil {
			return true, err
		}
	}
}

// runnable waits while the flow is stopped.
func (w *worker) runnable(ctx, term context.Context) (control.Record, error) {
	for said := false; ; {
		rec, changed := w.records.get()
		if err := w.records.failure(); err != nil {
			return rec, err
		}
		if !rec.State.Stopped() {
			return rec, nil
		}
		if w.cfg.Resume && !w.resumed {
			w.resumed = true
			next, err := w.ctl.Resume(ctx, "worker "+w.cfg.Name+" was started with resume")
			if err != nil {
				return rec, fmt.Errorf("resume: %w", err)
			}
			w.records.put(next)
			continue
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
// drained, and errRestart when a drain was cancelled.
func (w *worker) session(ctx, term context.Context, member *control.Member, rec control.Record, limits map[string]uint64) (err error) {
	w.status.phase("starting")
	s := newSession(w, rec)
	defer func() {
		w.status.session(nil)
		s.close(err)
	}()
	if err := s.open(term, member); err != nil {
		return s.cause(err)
	}
	bounds := map[string]uint64{}
	for source, limit := range cutOf(rec) {
		bounds[source] = limit
	}
	for source, limit := range limits {
		bounds[source] = limit
	}
	if err := s.start(rec, bounds); err != nil {
		return s.cause(err)
	}
	w.status.session(s)
	w.status.phase("running")
	s.log.Info("running", "tasks", len(s.tasks), "epoch", rec.Epoch, "positions", control.FormatCut(s.positions()), "sinks", s.sinkNames())
	d := &drainer{w: w, s: s, limited: len(limits) > 0}
	return d.run(ctx)
}

// cause prefers what ended the session to what a part of it met then.
func (s *session) cause(err error) error {
	if s.ctx != nil {
		if cause := context.Cause(s.ctx); cause != nil {
			return cause
		}
	}
	return err
}

// mailbox holds the latest flow record.
type mailbox struct {
	mu      sync.Mutex
	rec     control.Record
	err     error
	changed chan struct{}
}

func newMailbox() *mailbox { return &mailbox{changed: make(chan struct{})} }

func (m *mailbox) put(rec control.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if rec.Revision < m.rec.Revision {
		return
	}
	m.rec = rec
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

func (m *mailbox) latest() control.Record {
	rec, _ := m.get()
	return rec
}

func (m *mailbox) failure() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}
