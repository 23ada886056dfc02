package worker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
)

const (
	// intakePrefix begins the names of the intakes, followed by flow and source.
	intakePrefix = "NATSFLOW_Q_"
	// maxIntakeName leaves room for the name of a mirror of the intake, which has its
	// name and once more the flow's, in the 255 bytes of a name of a stream.
	maxIntakeName = 130
	// intakeSilence is after how long without a word from its origin an intake is
	// warned about. The origin says something each second.
	intakeSilence = 15 * time.Second
	// intakeWait bounds how long a drain at the head waits for what is still in the
	// origin.
	intakeWait = 30 * time.Second
)

// intake is the stream of the flow's own through which it reads a source that
// deletes what a consumer acks: a work queue, or a stream with interest retention.
// The server brings the messages over. It is the source for all that has to do
// with sequences: positions, cuts, gaps, dead letters are of the intake, and never
// of the origin.
type intake struct {
	name string
	// created tells the stream from another one of the same name.
	created time.Time
	// src is the source as the flow has it.
	src flow.SourceInfo
	// left is the first message of the source that has come over and is still there,
	// as the last look found it; told that somebody was told.
	left uint64
	told bool
}

// intakeName is the name of the intake of a source. Names of flows have no
// underscores, so that it cannot be that of another flow.
func intakeName(flow, source string) string {
	name := intakePrefix + flow + "_" + source
	if len(name) > maxIntakeName {
		sum := sha256.Sum256([]byte(source))
		name = name[:maxIntakeName-17] + "_" + hex.EncodeToString(sum[:8])
	}
	return name
}

func intakeConfig(f *flow.Flow, src flow.SourceInfo, replicas int, origin bus.StreamInfo) bus.IntakeConfig {
	return bus.IntakeConfig{
		Name: intakeName(f.Name(), src.Stream), Origin: src.Stream, Subjects: src.Subjects, Replicas: replicas,
		// The time of creation tells a stream from a later one of the same name.
		Consumer:    fmt.Sprintf("natsflow-%s-%x", f.Name(), origin.Created.UnixMilli()),
		Description: "what the natsflow flow " + f.Name() + " takes from " + src.Stream,
		Metadata:    map[string]string{"natsflow": "intake", "natsflow-flow": f.Name()},
	}
}

// definitionOf returns what the record has of a source: of its intake, if it needs
// one or has one. A flow that has an intake stays with it, whatever becomes of the
// retention of the source: what it has not processed is there, and not in the
// source. The time of creation is missing if the intake is still to be created.
func definitionOf(ctx context.Context, conn *bus.Conn, f *flow.Flow, src flow.SourceInfo, origin bus.StreamInfo) (name string, rec control.SourceRecord, err error) {
	rec = control.SourceRecord{Subjects: src.Subjects, PartitionBy: src.PartitionBy, Created: origin.Created}
	cfg := intakeConfig(f, src, 0, origin)
	is, err := conn.CheckIntake(ctx, cfg)
	switch {
	case err == nil:
		rec.Origin, rec.Created = src.Stream, is.Created
		return cfg.Name, rec, nil
	case !errors.Is(err, bus.ErrNotFound):
		return "", rec, fmt.Errorf("source %s: %w", src.Stream, adviseIntake(cfg, err))
	case origin.Retention != "limits":
		rec.Origin, rec.Created = src.Stream, time.Time{}
		return cfg.Name, rec, nil
	}
	return src.Stream, rec, nil
}

// createIntakes creates the intakes that are not there yet, and completes the
// definition with their times of creation.
func (w *worker) createIntakes(ctx context.Context, def control.Definition) error {
	for _, src := range w.flow.Sources() {
		rec, ok := def.Sources[intakeName(w.flow.Name(), src.Stream)]
		if !ok || !rec.Created.IsZero() {
			continue
		}
		origin, err := w.conn.Stream(ctx, src.Stream)
		if err != nil {
			return fmt.Errorf("source %s: %w", src.Stream, err)
		}
		cfg := intakeConfig(w.flow, src, w.cfg.Replicas, origin)
		first, err := w.firstOfIntake(ctx, def, cfg)
		if err != nil {
			return err
		}
		cfg.FirstSeq = first
		info, err := w.createIntake(ctx, cfg)
		if err != nil {
			return fmt.Errorf("source %s: %w", src.Stream, err)
		}
		rec.Created = info.Created
		def.Sources[cfg.Name] = rec
	}
	return nil
}

// createIntake creates an intake. The consumer comes first: from then on the origin
// keeps what comes.
func (w *worker) createIntake(ctx context.Context, cfg bus.IntakeConfig) (bus.Intake, error) {
	if _, err := w.conn.EnsureIntakeConsumer(ctx, cfg); err != nil {
		return bus.Intake{}, adviseIntake(cfg, err)
	}
	if err := w.cfg.reached(ctx, "intake-consumer", ""); err != nil {
		return bus.Intake{}, err
	}
	info, created, err := w.conn.EnsureIntake(ctx, cfg)
	if err != nil {
		return info, adviseIntake(cfg, err)
	}
	if created {
		w.log.Info("created the stream through which the flow reads the source", "source", cfg.Origin, "stream", cfg.Name)
	}
	return info, w.cfg.reached(ctx, "intake-created", "")
}

// adviseIntake says what to do about an intake that cannot be used.
func adviseIntake(cfg bus.IntakeConfig, err error) error {
	switch {
	case errors.Is(err, bus.ErrTaken):
		return fmt.Errorf("%w: stream %s is a work queue, which gives each message to one consumer, and another consumer has those of this flow: delete that one (nats consumer ls %s), or give the flow subjects that no other consumer has: %w",
			ErrSource, cfg.Origin, cfg.Origin, err)
	case errors.Is(err, bus.ErrExists):
		return fmt.Errorf("%w: %w: edit it, or delete what is in the way if nothing in it is needed", ErrSource, err)
	}
	return err
}

// firstOfIntake returns the first sequence that a new intake is to have. The flow
// may have had one that somebody has deleted: then positions go on behind those of
// the tasks, if the loss is accepted.
func (w *worker) firstOfIntake(ctx context.Context, def control.Definition, cfg bus.IntakeConfig) (uint64, error) {
	rec, err := w.ctl.Record(ctx)
	if errors.Is(err, control.ErrNoFlow) {
		return 1, nil
	}
	if err != nil {
		return 0, err
	}
	if _, was := rec.Sources[cfg.Name]; !was {
		if _, was = rec.FormerSources[cfg.Name]; !was {
			return 1, rec.Fits(def)
		}
	}
	// The record names an intake only when that is there. Another worker may have
	// made both since we looked.
	if _, err := w.conn.CheckIntake(ctx, cfg); !errors.Is(err, bus.ErrNotFound) {
		return 1, err
	}
	if !w.cfg.AcceptGap {
		return 0, fmt.Errorf("%w: the stream %s, through which flow %s reads %s, was deleted, and with it all that was not processed: start with --accept-gap to make it anew and go on without that",
			ErrSource, cfg.Name, w.flow.Name(), cfg.Origin)
	}
	heads, err := w.heads(ctx)
	if err != nil {
		return 0, err
	}
	var highest uint64
	for _, h := range heads {
		highest = max(highest, h.Offsets[cfg.Name])
	}
	w.log.Warn("making the stream through which the flow reads the source anew; what was in it and not processed is lost", "source", cfg.Origin, "stream", cfg.Name, "from", highest+1)
	return highest + 1, nil
}

// heads reads what the logs of all tasks say last; a task without a log is not
// among them.
func (w *worker) heads(ctx context.Context) (map[string]kvsnap.Head, error) {
	bucket, err := w.conn.OpenBucket(ctx, "natsflow_"+w.flow.Name())
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return headsOf(ctx, kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: w.flow.Name(), Owner: w.cfg.Name, Logger: w.log}), w.taskNames)
}

func headsOf(ctx context.Context, store *kvsnap.Store, names []string) (map[string]kvsnap.Head, error) {
	heads := make(map[string]kvsnap.Head, len(names))
	for _, name := range names {
		id, err := kvsnap.ParseTaskID(name)
		if err != nil {
			return nil, err
		}
		head, err := store.Head(ctx, id)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		heads[name] = head
	}
	return heads, nil
}

// openIntakes looks at the intakes of the sources, and makes the session read them
// in place of the sources.
func (s *session) openIntakes(ctx context.Context, rec control.Record) error {
	s.sources = slices.Clone(s.sources)
	s.intakes = make([]*intake, len(s.sources))
	for i, src := range s.sources {
		name := intakeName(s.flow.Name(), src.Stream)
		is, ok := rec.Sources[name]
		if !ok {
			continue
		}
		in := &intake{name: name, created: is.Created, src: src}
		_, err := s.conn.Stream(ctx, name)
		if errors.Is(err, bus.ErrNotFound) {
			return in.deleted(s.flow.Name(), err)
		}
		if err == nil {
			_, err = s.feedIntake(ctx, in)
		}
		if errors.Is(err, bus.ErrNotFound) {
			// What is in the intake is processed all the same.
			s.log.Warn("the source is not there", "source", src.Stream, "err", err)
		} else if err != nil {
			return fmt.Errorf("source %s: %w", src.Stream, err)
		}
		s.intakes[i], s.sources[i].Stream = in, name
	}
	return s.lookForFormerIntakes(ctx)
}

// lookForFormerIntakes warns of intakes of sources that the flow does not read any
// more: the server goes on taking messages from these, which nobody processes. They
// are not deleted: what is in them was taken, and may be wanted.
func (s *session) lookForFormerIntakes(ctx context.Context) error {
	names, err := s.conn.StreamNames(ctx, intakePrefix+s.flow.Name()+"_")
	if err != nil {
		return err
	}
	for _, name := range names {
		if slices.ContainsFunc(s.intakes, func(in *intake) bool { return in != nil && in.name == name }) {
			continue
		}
		is, err := s.conn.Intake(ctx, name)
		if errors.Is(err, bus.ErrNotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return err
		}
		remove := "nats stream rm " + name
		if is.Consumer != "" {
			remove = fmt.Sprintf("nats consumer rm %s %s; %s", is.From, is.Consumer, remove)
		}
		s.log.Warn("the flow does not read a source any more, and the server still brings its messages over; if what is there is of no use, delete both",
			"source", is.From, "stream", name, "messages", is.Msgs, "delete", remove)
	}
	return nil
}

// feedIntake sees to it that the server brings over what is in the source. The
// consumer is made anew if somebody has deleted it, and so if the source was created
// anew.
func (s *session) feedIntake(ctx context.Context, in *intake) (bus.Intake, error) {
	origin, err := s.conn.Stream(ctx, in.src.Stream)
	if err != nil {
		return bus.Intake{}, err
	}
	cfg := intakeConfig(s.flow, in.src, s.cfg.Replicas, origin)
	created, err := s.conn.EnsureIntakeConsumer(ctx, cfg)
	if err != nil {
		return bus.Intake{}, adviseIntake(cfg, err)
	}
	if created {
		s.log.Warn("the consumer that brings messages over to the flow was gone, alone or with its stream, and was made anew; what was deleted meanwhile is lost",
			"source", cfg.Origin, "consumer", cfg.Consumer, "stream", cfg.Name)
	}
	is, err := s.conn.FeedIntake(ctx, cfg)
	if err != nil {
		return is, adviseIntake(cfg, err)
	}
	return is, s.notRestored(ctx, in, origin, is.Origin)
}

// notRestored refuses an origin that ends before what has come over from it.
func (s *session) notRestored(ctx context.Context, in *intake, origin bus.StreamInfo, over uint64) error {
	if origin.LastSeq >= over {
		return nil
	}
	// More may have come meanwhile.
	now, err := s.conn.Stream(ctx, origin.Name)
	if err != nil || now.LastSeq >= over || !now.Created.Equal(origin.Created) {
		return err
	}
	return fmt.Errorf("%w: stream %s ends at sequence %d, and %s has it up to %d: it was restored from a backup, and what comes to it up to there would be lost: delete it and create it anew, and publish again what the backup held and is needed",
		ErrSource, origin.Name, now.LastSeq, in.name, over)
}

// deleted says what it means that the intake is not there.
func (in *intake) deleted(flow string, err error) error {
	return fmt.Errorf("%w: the stream %s, through which flow %s reads %s, was deleted: start the worker again, it says what to do: %w",
		ErrSource, in.name, flow, in.src.Stream, err)
}

// logged returns the position of an input up to which all tasks of the flow that read
// it have committed, whoever has them, as their logs say; 0 if one of them has no
// position. A restart of any task needs nothing up to it, and it never goes back.
func (s *session) logged(ctx context.Context, source int) (uint64, error) {
	names := namesOf(s.flow, s.inputs[source].stage)
	heads, err := headsOf(ctx, s.store, names)
	if err != nil {
		return 0, err
	}
	if len(heads) < len(names) {
		return 0, nil
	}
	low := ^uint64(0)
	for h := range maps.Values(heads) {
		low = min(low, h.Offsets[s.inputs[source].stream])
	}
	return low, nil
}

// trims removes from the intakes, now and then, what is processed, if this worker
// has the first task of the flow. It would do no harm if several did, or one that has
// lost its tasks.
func (s *session) trims(ctx context.Context) {
	t := time.NewTicker(s.cfg.trimEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := s.lookAtExchange(ctx); err != nil {
			s.log.Debug("the exchange was not looked at; the next time is soon", "err", err)
		}
		if !s.trimmer.Load() {
			continue
		}
		if err := s.trimExchange(ctx); err != nil {
			s.log.Debug("the exchange was not trimmed; the next time is soon", "err", err)
		}
		for i := range s.intakes {
			low, ok := s.committed(i)
			if !ok {
				continue
			}
			if err := s.trim(ctx, i, low); err != nil {
				s.log.Debug("an intake was not trimmed; the next time is soon", "stream", s.sources[i].Stream, "err", err)
			}
		}
	}
}

// trim removes from an intake what every task has committed past. committed is no
// less than that, as far as is known without asking. The last message stays: it
// says, after a crash of the server, how far the origin has been brought over.
func (s *session) trim(ctx context.Context, source int, committed uint64) error {
	in := s.intakes[source]
	if in == nil {
		return nil
	}
	info, err := s.conn.Stream(ctx, in.name)
	if err != nil {
		return err
	}
	end := func(low uint64) uint64 { return min(low+1, info.LastSeq) }
	if !info.Created.Equal(in.created) || end(committed) <= info.FirstSeq {
		return nil
	}
	low, err := s.logged(ctx, source)
	if err != nil || end(low) <= info.FirstSeq {
		return err
	}
	if err := s.cfg.reached(ctx, "trim", ""); err != nil {
		s.cancel(err)
		return err
	}
	if err := s.conn.PurgeBefore(ctx, in.name, end(low)); err != nil {
		return err
	}
	if err := s.trimMirror(ctx, s.mirrors[source], low); err != nil {
		return err
	}
	s.log.Debug("trimmed", "stream", in.name, "from", end(low))
	if err := s.cfg.reached(ctx, "trimmed", ""); err != nil {
		s.cancel(err)
		return err
	}
	return nil
}

// trimMirror trims the mirror of an intake. A mirror keeps what its origin has
// purged.
func (s *session) trimMirror(ctx context.Context, m *mirror, low uint64) error {
	if m == nil {
		return nil
	}
	info, err := s.conn.Stream(ctx, m.name)
	if err != nil || info.LastSeq == 0 {
		return err
	}
	return s.conn.PurgeBefore(ctx, m.name, min(low+1, info.LastSeq))
}

// overtaken returns an error if an intake begins behind a position of this session
// because others have processed and trimmed what was there: the session has lost its
// tasks and does not know it yet. A gap that is one is left to the caller.
func (s *session) overtaken(ctx context.Context, source int, at uint64) error {
	if source >= len(s.intakes) || s.intakes[source] == nil {
		return nil
	}
	low, err := s.logged(ctx, source)
	if err != nil {
		return fmt.Errorf("look for the position of the flow in stream %s: %w", s.inputs[source].stream, err)
	}
	// With a task of this session it could not be more: what is not read is not
	// committed.
	if low > at {
		return fmt.Errorf("%w: all tasks of the flow are at sequence %d of stream %s, and this worker at %d", bus.ErrFenced, low, s.inputs[source].stream, at)
	}
	return nil
}

// checkIntake looks after the way of the messages into an intake, and warns when
// they do not come.
func (s *session) checkIntake(ctx context.Context, in *intake) {
	origin := in.src.Stream
	was := s.warning(origin)
	var warning string
	is, err := s.feedIntake(ctx, in)
	switch {
	case bus.Retryable(err):
		return
	case err != nil:
		warning = fmt.Sprintf("nothing comes over from stream %s to %s: %v", origin, in.name, err)
	case is.Problem != "":
		warning = fmt.Sprintf("nothing comes over from stream %s to %s: %s", origin, in.name, is.Problem)
	case is.Silent >= intakeSilence:
		warning = fmt.Sprintf("stream %s has not heard of stream %s for %v", in.name, origin, is.Silent.Round(time.Second))
	default:
		room, err := s.lookAtLimits(ctx, origin, in.src.Subjects, is.Origin)
		if err != nil {
			return
		}
		s.lookForLeft(ctx, in, is)
		if room.ratio < lowHeadroom || room.ratio < enoughHeadroom && was != "" {
			warning = room.describe(origin)
		}
	}
	switch {
	case warning != "" && was == "":
		s.log.Warn("messages of the source do not come over as they should", "source", origin, "stream", in.name, "why", warning)
	case warning == "" && was != "":
		s.log.Info("messages of the source come over again", "source", origin, "stream", in.name)
	}
	s.setWarning(origin, warning)
}

// lookForLeft tells once of messages that stay in a work queue though they have come
// over. The acks of the server may pass some after a crash, which it then does not send
// again, and does not delete.
func (s *session) lookForLeft(ctx context.Context, in *intake, is bus.Intake) {
	first, _, err := s.conn.FirstFrom(ctx, in.src.Stream, in.src.Subjects, 1)
	if err != nil || first > is.Origin {
		in.left, in.told = 0, false
		return
	}
	stays := first == in.left
	in.left = first
	if !stays || in.told {
		return
	}
	if info, err := s.conn.Stream(ctx, in.src.Stream); err != nil || info.Retention != "workqueue" {
		return // others may want them
	}
	in.told = true
	s.log.Warn("messages that the flow has are still in the source, since a server crashed; they are not processed again, and may be purged",
		"source", in.src.Stream, "from", first, "through", is.Origin)
}

// broughtOver is what a drain at the head waits for.
type broughtOver struct {
	// heads are the last sequences of the origins when the drain was first looked
	// at, by source.
	heads map[int]uint64
	until time.Time
}

// arrived reports whether all that the origins had when it was first asked is in
// the intakes. After a while it says so too, and what is missing is logged: it comes
// after the resume.
func (b *broughtOver) arrived(ctx context.Context, s *session) (bool, error) {
	if b.heads == nil {
		b.heads, b.until = map[int]uint64{}, time.Now().Add(intakeWait)
		for i, in := range s.intakes {
			if in == nil {
				continue
			}
			var err error
			if b.heads[i], err = s.conn.LastMatching(ctx, in.src.Stream, in.src.Subjects); err != nil && !errors.Is(err, bus.ErrNotFound) {
				b.heads = nil
				return false, err
			}
		}
	}
	for i, head := range b.heads {
		in := s.intakes[i]
		is, err := s.conn.Intake(ctx, in.name)
		if err != nil {
			return false, err
		}
		// What is gone from the origin by now is here, or nobody has it.
		last, err := s.conn.LastMatching(ctx, in.src.Stream, in.src.Subjects)
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return false, err
		}
		if is.Origin >= min(head, last) {
			continue
		}
		if time.Now().Before(b.until) {
			return false, nil
		}
		s.log.Warn("the drain does not wait any longer for what is still in the source; it is processed after the resume",
			"source", in.src.Stream, "stream", in.name, "through", is.Origin, "head", head, "waited", intakeWait)
		delete(b.heads, i)
	}
	return true, nil
}
