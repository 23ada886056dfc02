package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// A sink that natsflow did not make, or that an operator has edited, may refuse
// what was committed for it: it does not take the subject any more, or takes
// smaller messages only. That is neither lost nor skipped, since state, positions
// and later results build upon it. It waits in the log until the sink takes it,
// and the worker says so all the time, while it runs and when it starts. What
// is known to be too large before the commit becomes a dead letter instead.

// errKept ends the wait for a sink when the worker is asked to leave: the results
// stay in the log, and the next start publishes them.
var errKept = errors.New("results that a sink refuses stay stored; the next start publishes them when the sink takes them")

// refusals is the part of a session that deals with them.
type refusals struct {
	// leaving is closed when the worker is asked to leave.
	leaving chan struct{}
	letGo   func()
	// kept counts the tasks that left with results unpublished.
	kept atomic.Int32
	// misfits are sinks that did not take their subjects when they were opened.
	misfits []bus.SinkConfig
}

func newRefusals() refusals {
	leaving := make(chan struct{})
	return refusals{leaving: leaving, letGo: sync.OnceFunc(func() { close(leaving) })}
}

// refused reports whether a sink will refuse the same results as long as nobody
// changes it. An error that comes with an unknown outcome is not one yet: the next
// try looks at the settings of the sink first.
func refused(err error) bool {
	var out *bus.OutError
	var api *bus.APIError
	switch {
	case err == nil, errors.Is(err, bus.ErrFenced), passing(err):
		return false
	case errors.As(err, &out):
		return errors.Is(err, bus.ErrNotTaken) || errors.Is(err, bus.ErrTooLarge)
	}
	return errors.Is(err, bus.ErrTooLarge) || errors.As(err, &api)
}

// passing reports whether publishing may succeed without a change of the sink's
// settings.
func passing(err error) bool {
	return bus.Retryable(err) || errors.Is(err, bus.ErrNoSpace) || errors.Is(err, bus.ErrNotFound)
}

// use notes that a sink of the flow publishes to the target.
func (t *target) use(info flow.SinkInfo, subjects []string) {
	maker := "step " + info.Step
	switch info.Kind {
	case flow.SinkBucket:
		subjects = []string{"$KV." + info.Name + ".>"}
	case flow.SinkDead:
		maker = "the dead letters"
	case flow.SinkExchange:
		maker = "the changes of key"
	case flow.SinkControl:
		maker = "stop_when"
	}
	t.makers = append(t.makers, maker)
	t.subjects = append(t.subjects, subjects...)
}

// room is how many bytes of payload a result of a task may have in the target.
func (t *target) room(f *flow.Flow, task kvsnap.TaskID) int {
	return t.sink.MaxData(f.Name(), task.String())
}

// advise says of a refusal what is refused and what to do about it.
func (t *target) advise(err error) error {
	remedy := "look at its settings: nats stream info " + t.name
	var out *bus.OutError
	if errors.As(err, &out) {
		switch {
		case errors.Is(err, bus.ErrNotTaken):
			remedy = editSubjects(t.name, bus.SubjectsWith(t.sink.Subjects(), t.subjects))
		case out.Size > t.sink.MaxPayload():
			remedy = fmt.Sprintf("raise max_payload of the server to %d", out.Size)
		default:
			remedy = fmt.Sprintf("nats stream edit %s --max-msg-size %d", t.name, out.Size)
		}
	}
	return fmt.Errorf("stream %s refuses results of %s, which wait: %w; to go on: %s", t.name, strings.Join(t.makers, ", "), err, remedy)
}

func editSubjects(stream string, subjects []string) string {
	return fmt.Sprintf("nats stream edit %s --subjects '%s'", stream, strings.Join(subjects, ","))
}

// refit refuses the sinks that still do not take their subjects. It comes after
// the results that earlier sessions had left, which wait for the sink. When there
// are none it is better to end at once: nothing but the flow's definition or the
// stream's can be wrong.
func (s *session) refit(ctx context.Context) error {
	for _, cfg := range s.misfits {
		info, _, err := s.conn.EnsureSink(ctx, cfg)
		if err == nil {
			continue
		}
		if errors.Is(err, bus.ErrNotTaken) {
			err = fmt.Errorf("%w; change the flow, or the stream: %s", err, editSubjects(info.Name, bus.SubjectsWith(info.Subjects, cfg.Subjects)))
		}
		return fmt.Errorf("sink %s%s: %w", cfg.Stream, cfg.Bucket, err)
	}
	return nil
}
