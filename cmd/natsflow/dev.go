package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/flowspec"
	"natsflow/kvsnap"
	"natsflow/testenv/embed"
	"natsflow/worker"
)

// devName is the worker's name: always the same, so that after a crash the next
// one takes its place at once.
const devName = "dev"

// DevCmd runs a flow with a server of its own.
type DevCmd struct {
	File   string `arg:"" help:"Folder with a flow.yaml, or a flow file."`
	Listen string `placeholder:"[HOST:]PORT" help:"Where the server listens (default: a free port of the loopback address)."`
	Store  string `type:"path" placeholder:"DIR" help:"Folder for the server's data (default: one for the flow in the user's cache folder)."`
	Once   bool   `help:"Stop when the feed has been processed: drain at the head, print the final table and the report."`
	Rate   int    `placeholder:"N" help:"Feed at most N lines a second (default: as fast as it goes)."`
	LogFlags
}

// Validate checks the flags.
func (cmd *DevCmd) Validate() error {
	var errs []error
	if _, err := cmd.listen(); err != nil {
		errs = append(errs, err)
	}
	if cmd.Rate < 0 {
		errs = append(errs, fmt.Errorf("--rate=%d is negative", cmd.Rate))
	}
	return errors.Join(errs...)
}

func (cmd *DevCmd) listen() (string, error) {
	return hostPort("--listen", cmp.Or(cmd.Listen, "0"))
}

// devRun is one run of DevCmd.
type devRun struct {
	cmd   *DevCmd
	c     *Console
	spec  *flowspec.Spec
	flow  *flow.Flow
	store *devStore
	srv   *embed.Server
	conn  *bus.Conn
	feeds []*feed

	// before is the flow as it was found; zero if it is new.
	before control.Record
	view   devView
	state  devState
	// logTo is the view while it shows something, so that a line does not break
	// it.
	logTo *redirect
	// fed: all that is to be fed is in the streams. asked: the drain of --once
	// was asked for.
	fed, asked bool

	mu     sync.Mutex
	status worker.Status
	poke   chan struct{} // the status has changed
}

// Run runs the flow until it is drained or ctx ends.
func (cmd *DevCmd) Run(ctx context.Context, c *Console) error {
	spec, f, err := loadFlow(cmd.File)
	if err != nil {
		return err
	}
	d := &devRun{cmd: cmd, c: c, spec: spec, flow: f, poke: make(chan struct{}, 1), logTo: &redirect{to: c.Err}}
	if d.store, err = openStoreDir(cmd.Store, f.Name()); err != nil {
		return err
	}
	defer d.store.unlock()
	listen, err := cmd.listen()
	if err != nil {
		return err
	}
	// After a crash the server warns of each file that it has to read again, which
	// is nothing to worry about.
	d.srv, err = embed.Start(embed.Config{Store: d.store.dir, Listen: listen, Logger: notes(d.logTo, slog.LevelError)})
	if err != nil {
		return err
	}
	defer d.srv.Stop()
	if d.conn, err = bus.Connect(ctx, bus.Config{InProcess: d.srv.InProcess, Name: "natsflow dev", Logger: notes(d.logTo, slog.LevelWarn)}); err != nil {
		return err
	}
	defer d.conn.Close()
	err = d.run(ctx)
	for _, about := range []error{control.ErrDefinition, control.ErrSourceRecreated, worker.ErrSource, worker.ErrGap, kvsnap.ErrSnapshotCorrupt, flow.ErrState} {
		if errors.Is(err, about) {
			return fmt.Errorf("%w (to start afresh, delete %s)", err, d.store.dir)
		}
	}
	return err
}

func (d *devRun) run(ctx context.Context) error {
	if err := d.greet(ctx); err != nil {
		return err
	}
	if err := d.openSources(ctx); err != nil {
		return d.interrupted(ctx, err)
	}
	d.view = newDevView(d.c)
	d.logTo.set(d.view.log())
	d.state = devState{heads: map[string]uint64{}, once: d.cmd.Once}
	for _, sink := range d.sinks() {
		r := newResults(sink)
		unsubscribe, err := r.subscribe(d.conn)
		if err != nil {
			return err
		}
		defer unsubscribe()
		d.state.results = append(d.state.results, r)
	}
	err := d.work(ctx)
	d.view.end(!d.cmd.Once)
	d.logTo.set(d.c.Err)
	if err != nil {
		return d.interrupted(ctx, err)
	}
	// What was asked for is done; printing what came of it must not be cut short
	// by the signal that ended it.
	patience := 2 * time.Second
	if d.cmd.Once {
		patience = time.Minute
	}
	after, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	return d.conclude(after)
}

// interrupted is err, or nil when it is only that ctx has ended.
func (d *devRun) interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, bus.ErrUnknownOutcome)) {
		d.c.notef("stopped before anything was done\n")
		return nil
	}
	return err
}

// greet says what runs where, and what is there from before.
func (d *devRun) greet(ctx context.Context) error {
	c := d.c
	c.notef("flow    %s (%s)\n", c.style(styleBold, d.flow.Name()), d.spec.File)
	c.notef("server  %s   try: nats -s %s stream ls\n", d.srv.URL(), d.srv.URL())
	note := "delete it to start afresh"
	if d.store.fresh {
		note = "new"
	}
	c.notef("data    %s   (%s)\n", d.store.dir, note)
	recs, err := control.Flows(ctx, d.conn)
	if err != nil {
		return err
	}
	for _, rec := range recs {
		if rec.Flow == d.flow.Name() {
			d.before = rec
		}
	}
	if d.before.Flow == "" {
		return nil
	}
	p, err := storedProgress(ctx, d.conn, d.flow.Name(), d.before.Partitions)
	if err != nil {
		return err
	}
	line := "starting at the beginning"
	if len(p.Offsets) > 0 {
		line = fmt.Sprintf("going on behind %s, with %s of state (%s) and %s so far", control.FormatCut(p.Offsets), plural(p.Tasks, "task"), size(p.Bytes), plural(p.Results, "result"))
	}
	switch {
	case d.before.State.Stopped():
		line = fmt.Sprintf("it was %s at epoch %d; resuming it, ", d.before.State, d.before.Epoch) + line
	case d.before.State == control.StateDraining:
		line = fmt.Sprintf("a drain (epoch %d) was under way; ending that first, then ", d.before.Epoch) + line
	}
	c.notef("state   %s\n", line)
	return nil
}

// openSources makes sure that the source streams are there and looks for what is
// to be fed.
func (d *devRun) openSources(ctx context.Context) error {
	for _, stream := range sortedKeys(d.spec.Dev.Feed) {
		f, err := openFeed(ctx, d.conn, d.spec.Sources, stream, d.spec.Dev.Feed[stream], d.cmd.Rate)
		if err != nil {
			return err
		}
		switch missing := f.total - f.before; {
		case missing == 0:
			d.c.notef("feed    %s is in stream %s, all %s\n", f.spec.File, stream, plural(f.total, "line"))
		case f.before > 0:
			d.c.notef("feed    %s: %s of %s are in stream %s; feeding the other %s\n", f.spec.File, count(f.before), plural(f.total, "line"), stream, count(missing))
		default:
			d.c.notef("feed    %s: %s into stream %s\n", f.spec.File, plural(f.total, "line"), stream)
		}
		d.feeds = append(d.feeds, f)
	}
	for _, src := range d.spec.Sources {
		if _, fed := d.spec.Dev.Feed[src.Stream]; fed || len(src.Subjects) == 0 {
			continue
		}
		if src.Bucket != "" {
			if err := d.openBucket(ctx, src.Bucket, "feed"); err != nil {
				return err
			}
			continue
		}
		if _, err := ensureStream(ctx, d.conn, src.Stream, src.Subjects); err != nil {
			return err
		}
		none := "none"
		if len(d.spec.Sources) > 1 {
			none = "none for stream " + src.Stream
		}
		d.c.notef("feed    %s; publish to %s\n", none, strings.Join(src.Subjects, ", "))
	}
	return d.openTables(ctx)
}

// openTables makes sure that the buckets are there in which the flow looks keys up.
func (d *devRun) openTables(ctx context.Context) error {
	seen := map[string]bool{}
	for _, l := range d.flow.Lookups() {
		if seen[l.Bucket] {
			continue
		}
		seen[l.Bucket] = true
		if err := d.openBucket(ctx, l.Bucket, "table"); err != nil {
			return err
		}
	}
	return nil
}

// openBucket makes sure that a bucket is there, and says how to fill it.
func (d *devRun) openBucket(ctx context.Context, name, what string) error {
	b, err := d.conn.EnsureBucket(ctx, bus.BucketConfig{Name: name, Description: "made by natsflow dev", Kind: "data"})
	if err != nil {
		return err
	}
	keys := 0
	err = b.Stats(ctx, nil, func(bus.Stat) error {
		keys++
		return nil
	})
	if err != nil {
		return err
	}
	d.c.notef("%-7s bucket %s, %s; nats kv put %s KEY VALUE\n", what, name, plural(keys, "key"), name)
	return nil
}

// work runs the worker and the feeds and shows what they do, until the worker has
// ended: it left, or the flow was drained.
func (d *devRun) work(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	worked, fed := make(chan error, 1), make(chan error, 1)
	wg.Go(func() { worked <- d.runWorker(ctx) })
	wg.Go(func() { fed <- d.runFeeds(ctx) })
	tick := time.NewTicker(d.view.every())
	defer tick.Stop()
	for {
		select {
		case werr := <-worked:
			d.refresh(context.WithoutCancel(ctx))
			return errors.Join(err, werr)
		case ferr := <-fed:
			fed, d.fed = nil, ferr == nil
			if ferr != nil && ctx.Err() == nil {
				err = ferr
				cancel() // the worker leaves
			}
		case <-d.poke:
		case <-tick.C:
			d.refresh(ctx)
		}
		if serr := d.drainWhenFed(ctx); serr != nil {
			err = serr
			cancel()
		}
	}
}

// runWorker runs the flow; a drain that an earlier run left half done comes
// first.
func (d *devRun) runWorker(ctx context.Context) error {
	cfg := worker.Config{
		// There is no other worker, and the next run takes over under the same name at once:
		// a long lease outlasts a machine that is busy with other things.
		Bus: bus.Config{InProcess: d.srv.InProcess}, Name: devName, LeaseTTL: 30 * time.Second, Resume: d.before.State.Stopped(),
		StopTimeout: 10 * time.Second, Logger: d.cmd.logger(d.c, d.logTo, slog.LevelWarn), OnStatus: d.setStatus,
	}
	err := worker.Run(ctx, d.flow, cfg)
	if err != nil || ctx.Err() != nil || d.before.State != control.StateDraining {
		return err
	}
	cfg.Resume = true
	return worker.Run(ctx, d.flow, cfg)
}

func (d *devRun) runFeeds(ctx context.Context) error {
	for _, f := range d.feeds {
		if err := f.run(ctx, d.conn); err != nil {
			return err
		}
	}
	return nil
}

func (d *devRun) setStatus(st worker.Status) {
	d.mu.Lock()
	d.status = st
	d.mu.Unlock()
	select {
	case d.poke <- struct{}{}:
	default:
	}
}

// latest is what the worker said last.
func (d *devRun) latest() worker.Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status
}

// drainWhenFed asks for the drain of --once. It waits until the worker runs: the
// flow may still be drained from before, and then the command would do nothing.
func (d *devRun) drainWhenFed(ctx context.Context) error {
	if ended := ctx.Err() != nil; ended || !d.cmd.Once || !d.fed || d.asked || d.latest().Phase != "running" {
		return nil //nolint:nilerr // there is nothing to ask for at the end
	}
	d.asked = true
	ctl, err := control.Open(ctx, control.Config{Conn: d.conn, Flow: d.flow.Name()})
	if err != nil {
		return err
	}
	_, err = ctl.Send(ctx, control.Command{
		Kind: control.KindDrain, Flow: d.flow.Name(), At: control.At{Kind: control.AtHead}, Reason: "natsflow dev --once",
	})
	return err
}

// refresh gathers what the view shows.
func (d *devRun) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	st := &d.state
	// Between sessions there are no positions; the last ones stay.
	now := d.latest()
	if len(now.Sources) == 0 {
		now.Sources = st.status.Sources
	}
	// At the end of a drain the worker has no tasks any more, and counts no results.
	now.Results, now.DeadLetters = max(now.Results, st.status.Results), max(now.DeadLetters, st.status.DeadLetters)
	st.status, st.feeds, st.caughtUp = now, nil, d.fed
	for _, f := range d.feeds {
		st.feeds = append(st.feeds, feedState{stream: f.stream, done: f.done.Load(), total: f.total})
	}
	for _, src := range d.flow.Sources() {
		if info, err := d.conn.Stream(ctx, src.Stream); err == nil {
			st.heads[src.Stream] = info.LastSeq
		}
		at, ok := st.status.Sources[src.Stream]
		st.caughtUp = st.caughtUp && ok && at.Committed > 0 && at.Committed >= st.heads[src.Stream]
	}
	d.view.update(*st)
}
