package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// Records that change their key cross to the tasks of the next stage by the exchange, a
// stream of the flow's own. A frame with them is a result of the producing task's commit
// and so is published exactly once, in order; for the receiving tasks the stream is a
// source like any other: a position in it is a part of each of their commits.

// input is what a reader reads for the tasks of one stage.
type input struct {
	stream string
	// stage is 0 for a source, and above for the exchange.
	stage int
	// name for logs and metrics.
	name string
	// subjects filter a source.
	subjects []string
}

func inputsOf(f *flow.Flow, sources []flow.SourceInfo) []input {
	var inputs []input
	for _, src := range sources {
		inputs = append(inputs, input{stream: src.Stream, name: src.Stream, subjects: src.Subjects})
	}
	for stage := 1; stage < f.Stages(); stage++ {
		stream := flow.ExchangeStream(f.Name())
		inputs = append(inputs, input{stream: stream, stage: stage, name: stream + "/" + strconv.Itoa(stage)})
	}
	return inputs
}

// namesOf are the names of the tasks of a stage.
func namesOf(f *flow.Flow, stage int) []string {
	var names []string
	for p := range f.Options().Partitions {
		names = append(names, kvsnap.TaskID{Stage: stage, Partition: p}.String())
	}
	return names
}

// filtered reports that the cursor of the reader reads some partitions only.
func (r *reader) filtered() bool { return r.mirror != nil || r.stage > 0 }

// idle reports that the reader has no tasks to read for.
func (r *reader) idle() bool { return !slices.Contains(r.owned, true) }

// exchangeFilters are the filters for the frames of partitions, and for the watermarks of
// all tasks of the stage before.
func exchangeFilters(f *flow.Flow, stage int, owned []bool) []string {
	if !slices.Contains(owned, false) {
		return []string{flow.ExchangeSubjects(f.Name(), stage)}
	}
	var filters []string
	for p, is := range owned {
		if is {
			filters = append(filters, flow.ExchangeSubject(f.Name(), stage, p))
		}
	}
	if f.TimedStage(stage) {
		filters = append(filters, flow.ExchangeMarks(f.Name(), stage))
	}
	return filters
}

// isMark reports that a message of the exchange has a watermark and no records.
func isMark(subject string) bool {
	p, err := flow.ExchangePartition(subject)
	return err == nil && p == flow.AllPartitions
}

// routeFrame routes a message of the exchange.
func (r *reader) routeFrame(m *bus.Msg) error {
	p, err := flow.ExchangePartition(m.Subject)
	if err != nil {
		return fmt.Errorf("sequence %d: %w", m.Seq, err)
	}
	return r.router.RouteFrame(p, m.Seq, m.Data)
}

// checkExchange refuses an exchange that would lose frames, or take one twice.
func checkExchange(at bus.StreamInfo) error {
	remedy := "delete it if the flow is drained (nats stream rm " + at.Name + "), it is made anew"
	switch {
	case !at.Fence || !at.AllowBatch:
		return fmt.Errorf("%w: the stream %s, by which records go from one stage of the flow to the next, was not made by natsflow: %s", ErrSource, at.Name, remedy)
	case at.Retention != "limits" || at.MaxAge > 0 || at.MaxMsgsPerSubject > 0 || at.MaxMsgs > 0 || at.MaxBytes > 0:
		return fmt.Errorf("%w: the stream %s, by which records go from one stage of the flow to the next, has limits, by which it would drop what nobody has read, or, if it is full, wait for ever for what is behind that: take them away (nats stream edit %s --max-age 0 --max-msgs=-1 --max-bytes=-1 --max-msgs-per-subject=-1), or %s",
			ErrSource, at.Name, at.Name, remedy)
	}
	return nil
}

// firstOfExchange returns the first sequence that the exchange is to have if it has to
// be made, 0 for any. It refuses one that is there with what is not of this flow.
// Somebody may have deleted one that the flow had, with what was on its way; then
// positions go on behind the former ones, if the loss is accepted.
func (s *session) firstOfExchange(ctx context.Context, name string) (uint64, error) {
	info, err := s.conn.Stream(ctx, name)
	there := err == nil
	if !there && !errors.Is(err, bus.ErrNotFound) {
		return 0, err
	}
	// Before the logs are read: an entry is there before its frames.
	var last uint64
	if there && info.LastSeq > 0 {
		last, err = s.conn.LastMatching(ctx, name, []string{flow.ExchangeAll(s.flow.Name())})
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return 0, err
		}
	}
	bucket, err := s.conn.OpenBucket(ctx, "natsflow_"+s.flow.Name())
	var heads map[string]kvsnap.Head
	if err == nil {
		heads, err = headsOf(ctx, kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: s.flow.Name(), Owner: s.cfg.Name, Logger: s.log}), s.taskNames)
	} else if errors.Is(err, bus.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return 0, err
	}
	var highest uint64
	known := false
	for _, h := range heads {
		highest = max(highest, h.Offsets[name], h.Sinks[name])
		_, ok := h.Sinks[name]
		known = known || ok || h.Offsets[name] > 0
	}
	switch {
	case there && !known && last > 0:
		// Its frames would be taken for those of this one.
		return 0, fmt.Errorf("%w: the stream %s, by which records go from one stage of the flow to the next, has records up to sequence %d, and no task of the flow knows of them: they are of a former flow of that name: delete it (nats stream rm %s), it is made anew",
			ErrSource, name, last, name)
	case there, highest == 0:
		return 0, nil
	case !s.cfg.AcceptGap:
		return 0, fmt.Errorf("%w: the stream %s, by which records go from one stage of the flow to the next, was deleted at sequence %d or later, and with it what the later stage had not processed: start with --accept-gap to make it anew and go on without that",
			ErrSource, name, highest)
	}
	s.log.Warn("making the exchange of the flow anew; what was in it and not processed is lost", "stream", name, "from", highest+1)
	return highest + 1, nil
}

// lookAtExchange notes where the exchange is. What this worker commits from now on says
// that its frames are behind that, so that what is before can be trimmed, also when this
// worker has not published any for long.
func (s *session) lookAtExchange(ctx context.Context) error {
	if s.exchange == nil {
		return nil
	}
	info, err := s.conn.Stream(ctx, s.exchange.name)
	if err == nil && info.Created.Equal(s.exchange.created) {
		s.exchange.advance(info.LastSeq)
	}
	return err
}

// trimExchange removes the frames from the exchange that nobody needs any more. The last
// message stays: it says, after a crash of the server, where the stream was.
func (s *session) trimExchange(ctx context.Context) error {
	if s.exchange == nil {
		return nil
	}
	x := s.exchange
	info, err := s.conn.Stream(ctx, x.name)
	if err != nil || !info.Created.Equal(x.created) || info.LastSeq == 0 {
		return err
	}
	// Fences stay where they are, so that the stream may begin before what was trimmed.
	first := max(info.FirstSeq, s.trimmedTo.Load())
	if low, ok := s.crossedHere(); ok && min(low+1, info.LastSeq) <= first {
		return nil
	}
	low, err := s.crossed(ctx)
	end := min(low+1, info.LastSeq)
	if err != nil || end <= first {
		return err
	}
	if err := s.cfg.reached(ctx, "trim", ""); err != nil {
		s.cancel(err)
		return err
	}
	// The fences stay, which are in the stream, too.
	if err := s.conn.PurgeBefore(ctx, x.name, end, flow.ExchangeAll(s.flow.Name())); err != nil {
		return err
	}
	s.trimmedTo.Store(end)
	s.log.Debug("trimmed", "stream", x.name, "from", end)
	if err := s.cfg.reached(ctx, "trimmed", ""); err != nil {
		s.cancel(err)
		return err
	}
	return nil
}

// crossedHere is a position of the exchange that crossed does not exceed, if this worker
// has tasks that read it.
func (s *session) crossedHere() (low uint64, ok bool) {
	for i, in := range s.inputs {
		if in.stage == 0 {
			continue
		}
		if at, some := s.committed(i); some && (!ok || at < low) {
			low, ok = at, true
		}
	}
	return low, ok
}

// crossed returns a sequence of the exchange such that no frame at or before it is
// needed any more, as the logs of all tasks say, whoever has them:
//
//   - All tasks of later stages have committed behind it.
//   - It is before the results of each entry that is not known to be published: whoever
//     takes that task over looks for them, and would publish again what is gone.
//
// The receivers come first: an entry that a producer makes after its log was read here
// has its frames behind every position that was read before.
func (s *session) crossed(ctx context.Context) (uint64, error) {
	name, low := s.exchange.name, ^uint64(0)
	for stage := 1; stage < s.flow.Stages(); stage++ {
		names := namesOf(s.flow, stage)
		heads, err := headsOf(ctx, s.store, names)
		if err != nil || len(heads) < len(names) {
			return 0, err
		}
		for _, h := range heads {
			low = min(low, h.Offsets[name])
		}
	}
	for stage := range s.flow.Stages() - 1 {
		names := namesOf(s.flow, stage)
		heads, err := headsOf(ctx, s.store, names)
		if err != nil || len(heads) < len(names) {
			return 0, err
		}
		for _, h := range heads {
			// The final entry of a drain says that all is published.
			if !h.Final {
				low = min(low, h.Sinks[name])
			}
		}
	}
	return low, nil
}
