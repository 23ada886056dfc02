package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	// intakeSubject begins the subjects on which the server hands messages from one stream to the other.
	intakeSubject = "natsflow.intake."
	// intakePending is how many messages may be on their way: stored in the intake, and not yet acked in the origin.
	intakePending = 10_000
)

// IntakeConfig is a stream into which the server brings over the messages of another one, the origin. The origin may
// delete what has been brought over (retention workqueue or interest), and does so only when the intake holds it.
//
// A plain source of a stream reads with a consumer without acks: with such an origin a message is deleted when it is
// sent, and is lost if a server dies before it is stored. An intake reads with a durable consumer of the origin, which
// the server acks when the messages are stored (ADR-58: ack policy flow_control, nats-server 2.14).
type IntakeConfig struct {
	Name   string
	Origin string
	// Consumer is the name of the durable consumer of the origin. It must be another one when the origin was deleted and
	// created again: the server would take messages of the new stream for those that it has had of the former one, and
	// ack them.
	Consumer string
	// Subjects filter the messages; all if there are none.
	Subjects []string
	// Replicas of the intake. Defaults to 1.
	Replicas int
	// FirstSeq is the first sequence of an intake that is created. Defaults to 1.
	FirstSeq    uint64
	Description string
	Metadata    map[string]string
}

// Intake is what is known of an intake.
type Intake struct {
	StreamInfo
	// Origin is the last sequence of the origin that is stored here, 0 if none is.
	Origin uint64
	// From and Consumer are the origin and its consumer.
	From, Consumer string
	// Lag is how many messages of the origin were still to come when the last one came.
	Lag uint64
	// Silent is for how long nothing has been heard of the origin, which says something each second; negative if
	// nothing ever was.
	Silent time.Duration
	// Problem is what the server says is wrong, empty if nothing is.
	Problem string
}

// EnsureIntakeConsumer looks for the durable consumer of an intake and creates it if there is none. Messages that
// come to an origin with interest retention from then on are kept for it. Its filters are changed to those of cfg.
// Errors: ErrNotFound if there is no origin, ErrTaken if a consumer of a work queue has the same messages, ErrExists
// if there is another consumer of that name.
func (c *Conn) EnsureIntakeConsumer(ctx context.Context, cfg IntakeConfig) (created bool, err error) {
	doing := fmt.Sprintf("consumer %s of stream %s", cfg.Consumer, cfg.Origin)
	var is jetstream.ConsumerInfo
	err = c.ask(ctx, "CONSUMER.INFO."+cfg.Origin+"."+cfg.Consumer, struct{}{}, &is)
	if errors.Is(classOf(err), ErrNotFound) && !isStreamGone(err) {
		err = c.putIntakeConsumer(ctx, cfg, "create")
		if !errors.Is(classOf(err), ErrExists) {
			return err == nil, intakeError("creating "+doing, err)
		}
		// Somebody was faster; what they have created counts.
		err = c.ask(ctx, "CONSUMER.INFO."+cfg.Origin+"."+cfg.Consumer, struct{}{}, &is)
	}
	if err != nil {
		return false, classify("looking at "+doing, err)
	}
	if is.Config.AckPolicy != jetstream.AckFlowControlPolicy || is.Config.DeliverSubject != cfg.deliver() {
		return false, fmt.Errorf("%w: %s is not the one of stream %s that is needed: it has ack policy %v and delivers to %q",
			ErrExists, doing, cfg.Name, is.Config.AckPolicy, is.Config.DeliverSubject)
	}
	if slices.Equal(consumerFilters(is.Config), sorted(cfg.Subjects)) {
		return false, nil
	}
	if err := c.mayWiden(ctx, cfg, is); err != nil {
		return false, err
	}
	return false, intakeError("changing the filters of "+doing, c.putIntakeConsumer(ctx, cfg, "update"))
}

// mayWiden refuses subjects more if the consumer has passed messages that they have: it would never come back to
// them, and nobody else gets them from a work queue.
func (c *Conn) mayWiden(ctx context.Context, cfg IntakeConfig, is jetstream.ConsumerInfo) error {
	had := consumerFilters(is.Config)
	if len(had) == 0 {
		return nil // all
	}
	var more []string
	for _, s := range cfg.Subjects {
		if !slices.ContainsFunc(had, func(p string) bool { return subjectMatches(p, s) }) {
			more = append(more, s)
		}
	}
	if len(more) == 0 && len(cfg.Subjects) > 0 {
		return nil
	}
	seq, _, err := c.FirstFrom(ctx, cfg.Origin, more, 1)
	switch {
	case errors.Is(err, ErrNotFound), err == nil && seq > is.Delivered.Stream:
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w: consumer %s has read stream %s up to sequence %d without the subjects that come to it now, and would never read what is there before, from sequence %d on: let another flow or consumer process that first, or give the flow another name",
		ErrExists, cfg.Consumer, cfg.Origin, is.Delivered.Stream, seq)
}

func consumerFilters(cfg jetstream.ConsumerConfig) []string {
	if cfg.FilterSubject != "" {
		return []string{cfg.FilterSubject}
	}
	return sorted(cfg.FilterSubjects)
}

func sorted(s []string) []string { return slices.Sorted(slices.Values(s)) }

func (c *Conn) putIntakeConsumer(ctx context.Context, cfg IntakeConfig, action string) error {
	cc := jetstream.ConsumerConfig{
		Durable: cfg.Consumer, Name: cfg.Consumer, DeliverSubject: cfg.deliver(), DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy: jetstream.AckFlowControlPolicy, FlowControl: true, IdleHeartbeat: time.Second, MaxAckPending: intakePending,
		Description: cfg.Description, Metadata: cfg.Metadata,
	}
	subject := "CONSUMER.CREATE." + cfg.Origin + "." + cfg.Consumer
	switch len(cfg.Subjects) {
	case 0:
	case 1:
		cc.FilterSubject = cfg.Subjects[0]
		subject += "." + cc.FilterSubject
	default:
		cc.FilterSubjects = cfg.Subjects
	}
	request := struct {
		Stream string                   `json:"stream_name"`
		Config jetstream.ConsumerConfig `json:"config"`
		Action string                   `json:"action"`
	}{cfg.Origin, cc, action}
	return c.ask(ctx, subject, request, nil)
}

// intakeError classifies what the server says of such a consumer.
func intakeError(doing string, err error) error {
	var api *APIError
	if errors.As(err, &api) && (api.ErrorCode == codeQueueUnfiltered || api.ErrorCode == codeQueueNotUnique) {
		return &classed{doing: doing, class: ErrTaken, err: err}
	}
	return classify(doing, err)
}

// isStreamGone tells a stream that is not there from a consumer that is not.
func isStreamGone(err error) bool {
	var api *APIError
	return errors.As(err, &api) && api.ErrorCode == codeStreamNotFound
}

func (cfg IntakeConfig) deliver() string { return intakeSubject + cfg.Name + "." + cfg.Consumer }

// EnsureIntake looks for the intake and creates it if there is none; [Conn.EnsureIntakeConsumer] comes before. It has
// limits retention and file storage and keeps all until it is purged. It returns ErrExists if there is another stream of
// that name, with what differs.
func (c *Conn) EnsureIntake(ctx context.Context, cfg IntakeConfig) (info Intake, created bool, err error) {
	return c.intake(ctx, cfg, true, true)
}

// FeedIntake makes an intake read with the consumer of cfg if it reads with a former one. It returns ErrNotFound if
// there is none of that name, and ErrExists as [Conn.EnsureIntake] does.
func (c *Conn) FeedIntake(ctx context.Context, cfg IntakeConfig) (Intake, error) {
	info, _, err := c.intake(ctx, cfg, false, true)
	return info, err
}

// CheckIntake is [Conn.FeedIntake] without a change: it may read with a former consumer.
func (c *Conn) CheckIntake(ctx context.Context, cfg IntakeConfig) (Intake, error) {
	info, _, err := c.intake(ctx, cfg, false, false)
	return info, err
}

func (c *Conn) intake(ctx context.Context, cfg IntakeConfig, create, change bool) (info Intake, created bool, err error) {
	want := intakeStream(cfg)
	is, err := c.streamInfo(ctx, cfg.Name)
	if errors.Is(classOf(err), ErrNotFound) && create {
		_, err = c.createStream(ctx, want)
		if err != nil && !isClass(err, ErrExists) {
			return info, false, err
		}
		created = err == nil
		// If somebody was faster, what they have created counts.
		is, err = c.streamInfo(ctx, cfg.Name)
	}
	if err != nil {
		return info, false, classify("looking at stream "+cfg.Name, err)
	}
	have := is.Config
	former := formerSource(have, cfg)
	if former {
		have.Sources = want.Sources
	}
	if diff := intakeDiff(have, want); len(diff) > 0 {
		return info, false, fmt.Errorf("%w: stream %s is not the one that takes over what is on %s: %s", ErrExists, cfg.Name, cfg.Origin, strings.Join(diff, "; "))
	}
	if former && change {
		var updated jetstream.StreamInfo
		if err := c.ask(ctx, "STREAM.UPDATE."+cfg.Name, have, &updated); err != nil {
			return info, false, classify("changing the consumer that stream "+cfg.Name+" reads with", err)
		}
		is = &updated
	}
	return intakeInfo(is), created, nil
}

// formerSource reports that a stream is the intake and reads with another consumer.
func formerSource(have jetstream.StreamConfig, cfg IntakeConfig) bool {
	if len(have.Sources) != 1 || have.Sources[0].Name != cfg.Origin || have.Sources[0].Consumer == nil {
		return false
	}
	was := have.Sources[0].Consumer
	return was.Name != cfg.Consumer && was.DeliverSubject == intakeSubject+cfg.Name+"."+was.Name
}

func intakeStream(cfg IntakeConfig) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: cfg.Name, Storage: jetstream.FileStorage, Replicas: max(cfg.Replicas, 1), FirstSeq: cfg.FirstSeq,
		MaxMsgs: -1, MaxBytes: -1, MaxMsgsPerSubject: -1, MaxMsgSize: -1, Description: cfg.Description, Metadata: cfg.Metadata,
		// No duplicate window, which is the server's default for a stream with sources: two messages of the origin with
		// one id are two, however fast they come over.
		Sources: []*jetstream.StreamSource{{
			Name: cfg.Origin, Consumer: &jetstream.StreamConsumerSource{Name: cfg.Consumer, DeliverSubject: cfg.deliver()},
		}},
	}
}

// intakeDiff says in what a stream differs from an intake so that messages could be lost, or come twice.
func intakeDiff(have, want jetstream.StreamConfig) (diff []string) {
	note := func(bad bool, format string, args ...any) {
		if bad {
			diff = append(diff, fmt.Sprintf(format, args...))
		}
	}
	note(have.Retention != jetstream.LimitsPolicy, "its retention is %v, not limits", have.Retention)
	note(have.Mirror != nil, "it is a mirror")
	note(len(have.Subjects) > 0, "it takes messages on %s, it must take none", strings.Join(have.Subjects, ", "))
	note(!sameSource(have.Sources, want.Sources), "its source is not stream %s by the consumer %s", want.Sources[0].Name, want.Sources[0].Consumer.Name)
	note(have.Storage != jetstream.FileStorage, "its storage is %v, not file", have.Storage)
	note(have.Duplicates > 0, "it has a duplicate window of %v, it must have none", have.Duplicates)
	note(have.MaxAge > 0, "it drops messages after %v", have.MaxAge)
	note(have.MaxMsgsPerSubject > 0, "it keeps %d messages of a subject", have.MaxMsgsPerSubject)
	// A limit at which new messages wait in the origin does no harm.
	note((have.MaxMsgs > 0 || have.MaxBytes > 0) && have.Discard == jetstream.DiscardOld, "at its limits it discards the oldest messages")
	note(have.DenyPurge, "it cannot be purged")
	note(have.AllowRollup || have.AllowMsgTTL, "its messages can be removed by headers (rollup, TTL)")
	note(have.SubjectTransform != nil, "it changes subjects")
	note(have.Sealed, "it is sealed")
	return diff
}

func sameSource(have, want []*jetstream.StreamSource) bool {
	if len(have) != 1 {
		return false
	}
	h, w := have[0], want[0]
	return h.Name == w.Name && h.External == nil && h.Consumer != nil && *h.Consumer == *w.Consumer && h.FilterSubject == "" && len(h.SubjectTransforms) == 0
}

// Intake asks for an intake. It returns ErrNotFound if there is none of that name.
func (c *Conn) Intake(ctx context.Context, name string) (Intake, error) {
	is, err := c.streamInfo(ctx, name)
	if err != nil {
		return Intake{}, classify("looking at stream "+name, err)
	}
	return intakeInfo(is), nil
}

func intakeInfo(is *jetstream.StreamInfo) Intake {
	in := Intake{StreamInfo: streamInfo(is), Silent: -1}
	of := is.Config.Sources
	if len(of) != 1 || of[0].Consumer == nil {
		in.Problem = "the stream has not the source any more that it was made with"
		return in
	}
	in.From, in.Consumer = of[0].Name, of[0].Consumer.Name
	if len(is.Sources) != 1 || is.Sources[0] == nil {
		return in // not started yet
	}
	src := is.Sources[0]
	in.Origin, in.Lag, in.Silent = src.Seq, src.Lag, src.Active
	if src.Error != nil {
		in.Problem = src.Error.Error()
	}
	return in
}

// Waiting is how many messages of the origin of an intake are still to come, about: what is on its way is counted by
// sequences.
func (c *Conn) Waiting(ctx context.Context, in Intake) (uint64, error) {
	var is jetstream.ConsumerInfo
	if err := c.ask(ctx, "CONSUMER.INFO."+in.From+"."+in.Consumer, struct{}{}, &is); err != nil {
		return 0, classify(fmt.Sprintf("looking at consumer %s of stream %s", in.Consumer, in.From), err)
	}
	n := is.NumPending
	if sent := is.Delivered.Stream; sent > in.Origin {
		n += min(uint64(is.NumAckPending), sent-in.Origin)
	}
	return n, nil
}

// PurgeBefore removes the messages of a stream that stand before a sequence; with
// subjects, those that match.
func (c *Conn) PurgeBefore(ctx context.Context, stream string, seq uint64, subjects ...string) error {
	if len(subjects) > 1 {
		for _, s := range subjects {
			if err := c.PurgeBefore(ctx, stream, seq, s); err != nil {
				return err
			}
		}
		return nil
	}
	if seq <= 1 {
		return nil // 0 would be all
	}
	request := struct {
		Filter string `json:"filter,omitempty"`
		Seq    uint64 `json:"seq"`
	}{strings.Join(subjects, ""), seq}
	return classify(fmt.Sprintf("purging stream %s before sequence %d", stream, seq), c.ask(ctx, "STREAM.PURGE."+stream, request, nil))
}
