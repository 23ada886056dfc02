package worker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// Bounds of the waits between two tries.
const (
	firstBackoff = 20 * time.Millisecond
	maxBackoff   = 2 * time.Second
	// complainEvery is how often a wait that does not end is logged.
	complainEvery = 10 * time.Second
)

// job is what a lane gives to the committer of a task: a commit, a base to
// finish, or the release.
type job struct {
	sealed    flow.Sealed
	base      *kvsnap.Base
	release   bool
	head      kvsnap.Head
	positions []uint64
}

// result tells the lane that a job is done.
type result struct {
	task      *task
	positions []uint64
	released  bool
	// refused: there was no room for the base.
	refused bool
	// kept: the task leaves with results that its sink refuses.
	kept bool
}

// commitJobs does the jobs of a task, one at a time, until its release.
func (s *session) commitJobs(ctx context.Context, t *task, done chan<- result) error {
	for {
		select {
		case j := <-t.jobs:
			r := result{task: t, positions: j.positions, released: j.release}
			was := t.log.Stats()
			err := s.commitJob(ctx, t, j)
			s.metrics.wrote(was, t.log.Stats())
			if j.base != nil && errors.Is(err, bus.ErrNoSpace) {
				// The log is good without it, only longer.
				s.log.Warn("no room for a base; the next try is later", "task", t.id, "err", err)
				r.refused, err = true, nil
			}
			if errors.Is(err, errKept) {
				s.kept.Add(1)
				done <- result{task: t, kept: true}
				return nil
			}
			if err != nil {
				return fmt.Errorf("task %v: %w", t.id, err)
			}
			// The channel has room for a result of every task.
			done <- r
			if j.release {
				return nil
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *session) commitJob(ctx context.Context, t *task, j job) error {
	// Everything before has been published: a task has one job at a time.
	j.head.Published = t.log.N()
	j.head.Sinks = s.sinkPositions()
	switch {
	case j.release:
		if err := s.persist(ctx, "release", func() error { return t.log.Release(ctx, j.head) }); err != nil {
			return err
		}
		return s.cfg.reached(ctx, "released", t.id.String())
	case j.base != nil:
		return j.base.Finish(ctx, j.head)
	}
	outbox := j.sealed.Outbox
	// What goes on to another stage is never published twice.
	if s.flow.Options().Delivery == flow.AtLeastOnce && j.sealed.Frames == 0 {
		if err := s.publish(ctx, t, s.unstored.Add(1), outbox, j.head.Sinks); err != nil {
			return err
		}
		outbox = nil
	}
	var n uint64
	err := s.persist(ctx, "commit", func() (err error) {
		n, err = t.log.Append(ctx, kvsnap.Commit{Head: j.head, Delta: j.sealed.Delta, Outbox: outbox, Outputs: j.sealed.Outputs, Targets: s.targetNames(outbox)})
		return err
	})
	if err != nil {
		return err
	}
	s.lastCommit.Store(time.Now().UnixNano())
	s.metrics.committed(j.sealed)
	s.results.Add(int64(results(j.sealed)))
	s.deadLetters.Add(int64(j.sealed.DeadLetters))
	s.late.Add(int64(j.sealed.Late))
	if err := s.publish(ctx, t, n, outbox, j.head.Sinks); err != nil {
		return err
	}
	return s.cfg.reached(ctx, "published", t.id.String())
}

// results is the number of results in a commit: dead letters, and what goes on to
// another stage, are none.
func results(s flow.Sealed) int { return s.Outputs - s.DeadLetters - s.Frames }

// persist repeats a write to the log while the bucket has no room. Nothing is
// noted as published meanwhile, and the lanes stop at their bounds. While the server is away
// the log itself waits; when it gives up, it is of no use any more, since what it
// wrote last may be there or not.
func (s *session) persist(ctx context.Context, what string, write func() error) error {
	wait := newPatience(s, what)
	for {
		err := write()
		if err == nil {
			wait.over()
			return nil
		}
		if !errors.Is(err, bus.ErrNoSpace) || errors.Is(err, bus.ErrFenced) {
			return err
		}
		if err := wait.next(ctx, err); err != nil {
			return err
		}
	}
}

// publish publishes an outbox that the log holds as entry n, whatever it takes.
// from says, for each sink, a sequence before all results of the entry.
func (s *session) publish(ctx context.Context, t *task, n uint64, outbox []byte, from map[string]uint64) error {
	if len(outbox) == 0 {
		return nil
	}
	groups, err := s.groups(t, n, outbox, s.bySink)
	if err != nil {
		return err
	}
	wait := newPatience(s, "publish")
	for i := range groups {
		if err := s.publishAll(ctx, t, &groups[i], from[groups[i].to.name], wait); err != nil {
			return err
		}
	}
	wait.over()
	return nil
}

// publishAll publishes a group, none of whose results stands at or before from. It
// waits for a sink that is away or full, and for one that refuses the results, but
// for that one not when the worker is to leave: [errKept].
func (s *session) publishAll(ctx context.Context, t *task, g *group, from uint64, wait *patience) error {
	err := s.publishGroup(ctx, t, g, from)
	for err != nil {
		wait.until = nil
		switch {
		case refused(err):
			err, wait.until = g.to.advise(err), s.leaving
		case errors.Is(err, bus.ErrFenced) || !passing(err):
			return fmt.Errorf("publish to stream %s: %w", g.to.name, err)
		default:
			err = fmt.Errorf("stream %s: %w", g.to.name, err)
		}
		if err := s.sameSink(ctx, g.to); err != nil {
			return err
		}
		if err := wait.next(ctx, err); err != nil {
			return err
		}
		// A part of the group may be there: look before publishing the rest.
		err = s.publishRest(ctx, t, g, from)
	}
	return nil
}

// group is the part of an outbox that goes to one stream.
type group struct {
	to    *target
	entry uint64
	outs  []bus.Out
	index []int
}

// groups sorts an outbox by stream, in the order of its outputs. sinks are the
// targets that the numbers in it stand for.
func (s *session) groups(t *task, n uint64, outbox []byte, sinks []*target) ([]group, error) {
	// Counted first: growing the slices would cost more than all the rest here.
	counts := make([]int, len(sinks))
	err := flow.Outputs(outbox, func(i int, o flow.Output) error {
		if o.Sink < 0 || o.Sink >= len(sinks) {
			return fmt.Errorf("output %d of entry %d is for sink %d, which the flow does not have", i, n, o.Sink)
		}
		counts[o.Sink]++
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("task %v, entry %d: %w", t.id, n, err)
	}
	var groups []group
	at := make(map[*target]int, 2)
	err = flow.Outputs(outbox, func(i int, o flow.Output) error {
		to := sinks[o.Sink]
		k, ok := at[to]
		if !ok {
			k = len(groups)
			at[to] = k
			groups = append(groups, group{
				to: to, entry: n, outs: make([]bus.Out, 0, counts[o.Sink]), index: make([]int, 0, counts[o.Sink]),
			})
		}
		g := &groups[k]
		out := bus.Out{Subject: string(o.Subject), Data: o.Data}
		if to.subject != "" {
			out.Subject = to.subject
		}
		for h := 0; h+1 < len(o.Headers); h += 2 {
			out.Header = append(out.Header, bus.HeaderField{Name: o.Headers[h], Value: o.Headers[h+1]})
		}
		if to.dead {
			shorten(&out, to.room(s.flow, t.id))
		}
		g.outs = append(g.outs, out)
		g.index = append(g.index, i)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("task %v, entry %d: %w", t.id, n, err)
	}
	return groups, nil
}

// headerTruncated of a dead letter says how many bytes the record has when not
// all of them fit beside the headers.
const headerTruncated = "Natsflow-Truncated"

// shorten makes a dead letter fit into a message. A record may be as large as a
// message can be; with the headers that say why it failed it would be larger.
func shorten(out *bus.Out, room int) {
	size := func(h bus.HeaderField) int { return len(h.Name) + len(h.Value) + 4 }
	for _, h := range out.Header {
		room -= size(h)
	}
	if len(out.Data) <= room {
		return
	}
	h := bus.HeaderField{Name: headerTruncated, Value: strconv.Itoa(len(out.Data))}
	out.Header = append(out.Header, h)
	out.Data = out.Data[:max(room-size(h), 0)]
}

// errSinkChanged ends a session that has a sink stream in hand which was deleted
// and created again.
var errSinkChanged = fmt.Errorf("the sink stream was created anew: %w", errAway)

// sameSink makes sure, after a failure, that the sink is still the same stream:
// another one has sequences that say nothing. If it is, its settings may be others.
func (s *session) sameSink(ctx context.Context, to *target) error {
	info, err := to.sink.Refresh(ctx)
	if err == nil && !info.Created.Equal(to.created) {
		return fmt.Errorf("stream %s: %w", to.name, errSinkChanged)
	}
	return nil // not there, or it cannot be told: the next try will
}

func (s *session) publishGroup(ctx context.Context, t *task, g *group, from uint64) error {
	if s.cfg.probe != nil && len(g.outs) > 1 {
		// Only under test: a place to stop in the middle of a group.
		half := *g
		half.outs, half.index = g.outs[:len(g.outs)/2], g.index[:len(g.outs)/2]
		if err := s.send(ctx, t, &half, from); err != nil {
			return err
		}
		if err := s.cfg.reached(ctx, "half-published", t.id.String()); err != nil {
			return err
		}
		g.outs, g.index = g.outs[len(half.outs):], g.index[len(half.index):]
	}
	return s.send(ctx, t, g, from)
}

// send publishes a group whose results cannot stand at or before from.
func (s *session) send(ctx context.Context, t *task, g *group, from uint64) error {
	last, err := g.to.sink.Publish(ctx, bus.Group{
		Flow: s.flow.Name(), Task: t.id.String(), N: g.entry,
		Fence: t.fences[g.to.index], Outs: g.outs, Index: g.index,
	})
	if err != nil {
		return err
	}
	if last <= from {
		return fmt.Errorf("stream %s: sequence %d came after %d: %w", g.to.name, last, from, errSinkChanged)
	}
	g.to.advance(last)
	s.metrics.published(len(g.outs))
	return nil
}

// publishRest publishes what the sink does not hold yet of a group whose fate is
// unknown. The fence comes first: what is still on its way of an earlier try,
// ours or a former owner's, is refused from there on, so that the look that
// follows sees all there will ever be.
func (s *session) publishRest(ctx context.Context, t *task, g *group, from uint64) error {
	if g.to.sink.Fenced() {
		seq, err := g.to.sink.WriteFence(ctx, s.flow.Name(), t.id.String())
		if err != nil {
			return err
		}
		t.fences[g.to.index] = seq
	}
	held := heldOuts{}
	held.want(t, g.entry)
	if err := s.held(ctx, g.to, from, held); err != nil {
		return err
	}
	g.drop(held[position{t.id.String(), g.entry}])
	if len(g.outs) == 0 {
		return nil
	}
	return s.send(ctx, t, g, from)
}

// drop removes the outputs that the sink holds, or has replaced by later ones.
func (g *group) drop(held *heldEntry) {
	if held == nil {
		return
	}
	outs, index := g.outs[:0], g.index[:0]
	for k, i := range g.index {
		last, ok := held.latest[g.outs[k].Subject]
		superseded := g.to.sink.KeepsLatest() && ok && last > i
		if i >= held.batched && !held.single[i] && !superseded {
			outs, index = append(outs, g.outs[k]), append(index, i)
		}
	}
	g.outs, g.index = outs, index
}

// position names an entry of a task.
type position struct {
	task  string
	entry uint64
}

// heldOuts says what a sink holds of some entries.
type heldOuts map[position]*heldEntry

// heldEntry says which outputs of an entry a sink holds.
type heldEntry struct {
	// batched is one more than the highest index that was published in a batch:
	// those before it are there, or were until a limit of the sink removed them.
	batched int
	// single are those that were published each by itself. A sink without fast
	// ingest may have refused one, for its subject or size or for want of room, and
	// taken those that were on their way behind it.
	single map[int]bool
	// latest is the highest index of single for each subject. A sink that keeps
	// the latest of each, such as a bucket, has had those before it or does not
	// want them any more.
	latest map[string]int
}

func (h heldOuts) want(t *task, entry uint64) {
	h[position{t.id.String(), entry}] = &heldEntry{single: map[int]bool{}, latest: map[string]int{}}
}

// held looks which outputs of the entries in held a sink holds after a sequence.
func (s *session) held(ctx context.Context, to *target, from uint64, held heldOuts) error {
	note := func(h bus.Held) {
		e, ok := held[position{h.Task, h.N}]
		switch {
		case !ok:
		case h.Batched:
			e.batched = max(e.batched, h.I+1)
		default:
			e.single[h.I] = true
			e.latest[h.Subject] = max(e.latest[h.Subject], h.I)
		}
	}
	last, err := to.sink.Scan(ctx, from, s.flow.Name(), note)
	if err == nil && last < from {
		// The stream was created anew: its sequences began again.
		last, err = to.sink.Scan(ctx, 0, s.flow.Name(), note)
	}
	if err != nil {
		return fmt.Errorf("look for results in stream %s after sequence %d: %w", to.name, from, err)
	}
	to.advance(last)
	return nil
}

// patience waits between tries, longer each time, and complains now and then.
type patience struct {
	s          *session
	what       string
	backoff    time.Duration
	began      time.Time
	complained time.Time
	// until, if not nil, ends the wait when it is closed. It is set for a refusal,
	// of which is complained at once, since what to do about it is in the error.
	until   <-chan struct{}
	refused bool
}

func newPatience(s *session, what string) *patience { return &patience{s: s, what: what} }

func (p *patience) next(ctx context.Context, err error) error {
	now := time.Now()
	if p.began.IsZero() {
		p.began = now
		p.backoff = firstBackoff
	}
	news := (p.until != nil) != p.refused
	if p.refused = p.until != nil; news || now.Sub(p.complained) >= complainEvery {
		p.complained = now
		p.s.log.Warn("cannot "+p.what+"; trying again, nothing is lost", "for", now.Sub(p.began).Round(time.Second), "err", err)
		p.s.setTrouble(p, fmt.Sprintf("cannot %s: %v", p.what, err))
	}
	t := time.NewTimer(p.backoff + rand.N(p.backoff))
	defer t.Stop()
	p.backoff = min(2*p.backoff, maxBackoff)
	select {
	case <-t.C:
		return nil
	case <-p.until:
		return fmt.Errorf("%w: %w", errKept, err)
	case <-ctx.Done():
		p.s.setTrouble(p, "")
		return fmt.Errorf("%w (last error: %w)", context.Cause(ctx), err)
	}
}

func (p *patience) over() {
	if !p.complained.IsZero() {
		p.s.log.Info("can "+p.what+" again", "after", time.Since(p.began).Round(time.Millisecond))
		p.s.setTrouble(p, "")
	}
}
