package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"
)

// FencePrefix begins the subjects that carry fences: natsflow.fence.<stream>.<flow>.<task>.
const FencePrefix = "natsflow.fence."

// StreamInfo is what natsflow wants to know of a stream.
type StreamInfo struct {
	Name     string
	Created  time.Time
	Subjects []string
	// FirstSeq and LastSeq are the sequences of the first and the last message. After a purge, FirstSeq is LastSeq+1.
	FirstSeq, LastSeq uint64
	Msgs, Bytes       uint64
	// NumSubjects is how many subjects have messages.
	NumSubjects uint64
	// FirstTime and LastTime are the timestamps of these messages; zero if there is none.
	FirstTime, LastTime time.Time
	// Retention is limits, interest or workqueue.
	Retention string
	// Mirror: it is a mirror of another stream, with that stream's sequences.
	Mirror bool
	// AllowDirect: every replica answers gets, and so do mirrors of the stream.
	AllowDirect bool
	// AllowBatch: fast ingest is allowed (ADR-50).
	AllowBatch bool
	// Fence: it has the subject natsflow.fence.<name>.>, and rollups, which the fence messages need.
	Fence bool
	// Duplicates is the window in which message ids are remembered.
	Duplicates time.Duration
	// MaxMsgs and MaxBytes are limits, -1 for none; MaxAge is zero for none.
	MaxMsgs, MaxBytes int64
	MaxAge            time.Duration
	// DiscardNew: at MaxMsgs and MaxBytes new messages are refused, instead of the oldest ones being dropped.
	DiscardNew bool
	// MaxMsgSize is the largest message, headers included, and MaxMsgsPerSubject how many a subject keeps; -1 for none.
	MaxMsgSize, MaxMsgsPerSubject int64
	Replicas                      int
	Metadata                      map[string]string
	// AsOf is the time of all this, by the server's clock.
	AsOf time.Time
}

// StreamConfig is a plain stream to be created.
type StreamConfig struct {
	Name     string
	Subjects []string
	// Replicas defaults to 1.
	Replicas int
	// Retention is limits (the default), interest or workqueue.
	Retention string
	// Duplicates is the window in which message ids are remembered; defaults to the server's (2 minutes).
	Duplicates time.Duration
	// MaxAge, MaxMsgs and MaxBytes are limits; zero for none.
	MaxAge            time.Duration
	MaxMsgs, MaxBytes int64
	Description       string
	Metadata          map[string]string
}

// Stream asks for a stream. It waits briefly for a leader. It returns ErrNotFound if there is none of that name.
func (c *Conn) Stream(ctx context.Context, name string) (StreamInfo, error) {
	info, err := c.streamInfo(ctx, name)
	if err != nil {
		return StreamInfo{}, classify("looking at stream "+name, err)
	}
	return streamInfo(info), nil
}

func (c *Conn) streamInfo(ctx context.Context, name string) (*jetstream.StreamInfo, error) {
	if !validName(name) {
		return nil, fmt.Errorf("%q is not a name of a stream", name)
	}
	var info jetstream.StreamInfo
	if err := c.ask(ctx, "STREAM.INFO."+name, struct{}{}, &info); err != nil {
		return nil, err
	}
	return &info, nil
}

// createdStream looks for a stream that has just been created, or is just being created by somebody else: in a cluster,
// the server that answers may have to hear of it first.
func (c *Conn) createdStream(ctx context.Context, name string) (info *jetstream.StreamInfo, err error) {
	err = c.retry(ctx, func(ctx context.Context) error {
		if info, err = c.streamInfo(ctx, name); errors.Is(classOf(err), ErrNotFound) {
			return &classed{doing: "looking for stream " + name + ", which has been created", class: ErrConflict, err: err}
		}
		return err
	})
	return info, err
}

// CreateStream creates a stream with file storage, of which only the leader answers gets. It is no error if it is there
// with the very same settings; ErrExists if they differ.
func (c *Conn) CreateStream(ctx context.Context, cfg StreamConfig) (StreamInfo, error) {
	retention, err := retentionOf(cfg.Retention)
	if err != nil {
		return StreamInfo{}, fmt.Errorf("creating stream %s: %w", cfg.Name, err)
	}
	return c.createStream(ctx, jetstream.StreamConfig{
		Name: cfg.Name, Subjects: cfg.Subjects, Retention: retention, Replicas: max(cfg.Replicas, 1), Duplicates: cfg.Duplicates,
		MaxAge: cfg.MaxAge, MaxMsgs: orNone(cfg.MaxMsgs), MaxBytes: orNone(cfg.MaxBytes), MaxMsgsPerSubject: -1, MaxMsgSize: -1,
		Description: cfg.Description, Metadata: cfg.Metadata, Storage: jetstream.FileStorage,
	})
}

// createStream may be repeated: creating a stream again with the same settings is a success.
func (c *Conn) createStream(ctx context.Context, cfg jetstream.StreamConfig) (StreamInfo, error) {
	var info jetstream.StreamInfo
	err := fmt.Errorf("%q is not a name of a stream", cfg.Name)
	if validName(cfg.Name) {
		err = c.ask(ctx, "STREAM.CREATE."+cfg.Name, cfg, &info)
	}
	if err != nil {
		return StreamInfo{}, classify("creating stream "+cfg.Name, err)
	}
	return streamInfo(&info), nil
}

// DeleteStream deletes a stream with all its messages. It returns ErrNotFound if there is none of that name.
func (c *Conn) DeleteStream(ctx context.Context, name string) error {
	return classify("deleting stream "+name, c.ask(ctx, "STREAM.DELETE."+name, struct{}{}, nil))
}

// SinkConfig names a stream, or a KV bucket, that results are to be published to.
type SinkConfig struct {
	// Stream or Bucket: one of them.
	Stream, Bucket string
	// Subjects that will be published to; for a stream that is created, the subjects that it takes. For a bucket they
	// default to all its keys.
	Subjects []string
	// Replicas of what is created. Defaults to 1.
	Replicas int
	// Flow that it is created for; kept in its metadata.
	Flow string
	// FirstSeq is the first sequence of a stream that is created. Defaults to 1.
	FirstSeq uint64
}

// EnsureSink looks for a sink stream, and creates it with a fence subject and fast ingest if there is none. A stream
// that is there is left as it is; it returns ErrNotTaken, together with info, if it does not take the subjects.
func (c *Conn) EnsureSink(ctx context.Context, cfg SinkConfig) (info StreamInfo, created bool, err error) {
	if (cfg.Stream == "") == (cfg.Bucket == "") {
		return info, false, fmt.Errorf("opening sink: name a stream or a bucket")
	}
	name, subjects := cfg.Stream, cfg.Subjects
	if cfg.Bucket != "" {
		name = bucketStream(cfg.Bucket)
		if len(subjects) == 0 {
			subjects = []string{bucketPrefix(cfg.Bucket) + ">"}
		}
	}
	if len(subjects) == 0 {
		return info, false, fmt.Errorf("opening sink %s: no subjects", name)
	}
	info, err = c.Stream(ctx, name)
	switch {
	case err == nil:
		return info, false, covered(info, subjects)
	case !isClass(err, ErrNotFound):
		return info, false, err
	}
	info, err = c.createStream(ctx, sinkStream(name, subjects, cfg))
	if isClass(err, ErrExists) {
		// Somebody was faster; what they have created counts.
		is, err := c.createdStream(ctx, name)
		if err != nil {
			return info, false, classify("looking at stream "+name, err)
		}
		info = streamInfo(is)
		return info, false, covered(info, subjects)
	}
	return info, err == nil, err
}

func sinkStream(name string, subjects []string, cfg SinkConfig) jetstream.StreamConfig {
	sc := jetstream.StreamConfig{
		Name: name, Subjects: append(slices.Clone(subjects), fenceFilter(name)), Storage: jetstream.FileStorage,
		Replicas: max(cfg.Replicas, 1), MaxMsgs: -1, MaxBytes: -1, MaxMsgsPerSubject: -1, MaxMsgSize: -1, FirstSeq: cfg.FirstSeq,
		AllowRollup: true, AllowDirect: true, AllowBatchPublish: true, Duplicates: 2 * time.Minute,
		Metadata: map[string]string{"natsflow": "sink", "natsflow-flow": cfg.Flow},
	}
	if cfg.Bucket != "" {
		sc.Subjects = []string{bucketPrefix(cfg.Bucket) + ">", fenceFilter(name)}
		sc.MaxMsgsPerSubject, sc.Discard, sc.DenyDelete = 1, jetstream.DiscardNew, true
	}
	return sc
}

// covered checks that the stream takes every one of subjects.
func covered(info StreamInfo, subjects []string) error {
	if info.Mirror {
		return fmt.Errorf("opening sink: stream %s is a mirror and takes no messages", info.Name)
	}
	for _, s := range subjects {
		if !slices.ContainsFunc(info.Subjects, func(p string) bool { return subjectMatches(p, s) }) {
			return fmt.Errorf("opening sink: stream %s takes %s and not %s: %w", info.Name, strings.Join(info.Subjects, ", "), s, ErrNotTaken)
		}
	}
	return nil
}

// SeqAt is the last sequence of a stream whose timestamp is not after t; 0 if there is none that is still kept.
func (c *Conn) SeqAt(ctx context.Context, stream string, t time.Time) (uint64, error) {
	doing := fmt.Sprintf("finding the position of %s in stream %s", t.Format(time.RFC3339Nano), stream)
	info, err := c.streamInfo(ctx, stream)
	if err != nil {
		return 0, classify(doing, err)
	}
	if info.State.Msgs == 0 || !t.Before(info.State.LastTime) {
		return info.State.LastSeq, nil
	}
	// Timestamps never go back, so it can be searched for. A consumer by start time would give it in one step, but may
	// sit on a replica that is behind.
	low, high, best := info.State.FirstSeq, info.State.LastSeq, uint64(0)
	for low <= high {
		mid := low + (high-low)/2
		m, err := c.nextMsg(ctx, stream, ">", mid)
		switch {
		case err != nil && !errors.Is(classOf(err), ErrNotFound):
			return 0, classify(doing, err)
		case err != nil || m.Time.After(t):
			high = mid - 1
		default:
			best, low = m.Seq, m.Seq+1
		}
	}
	return best, nil
}

// FirstFrom returns sequence and timestamp of the first message of a stream from a sequence on that has one of the
// subjects, wildcards allowed; of any if there are none. It returns ErrNotFound when there is no such message.
func (c *Conn) FirstFrom(ctx context.Context, stream string, subjects []string, from uint64) (seq uint64, at time.Time, err error) {
	if len(subjects) == 0 {
		subjects = []string{">"}
	}
	doing := fmt.Sprintf("looking for the first message of stream %s from %d on", stream, from)
	for _, subject := range subjects {
		m, err := c.nextMsg(ctx, stream, subject, max(from, 1))
		switch {
		case err == nil && (seq == 0 || m.Seq < seq):
			seq, at = m.Seq, m.Time
		case err != nil && !errors.Is(classOf(err), ErrNotFound):
			return 0, time.Time{}, classify(doing, err)
		}
	}
	if seq == 0 {
		return 0, time.Time{}, fmt.Errorf("%s: %w", doing, ErrNotFound)
	}
	return seq, at, nil
}

// createConsumer creates a consumer whose name is new, so that a repetition after a lost answer finds its own one.
func (c *Conn) createConsumer(ctx context.Context, stream string, cfg jetstream.ConsumerConfig) (*jetstream.ConsumerInfo, error) {
	request := struct {
		Stream string                   `json:"stream_name"`
		Config jetstream.ConsumerConfig `json:"config"`
		Action string                   `json:"action"`
	}{stream, cfg, ""}
	subject := "CONSUMER.CREATE." + stream + "." + cfg.Name
	if cfg.FilterSubject != "" {
		subject += "." + cfg.FilterSubject
	}
	var info jetstream.ConsumerInfo
	if err := c.ask(ctx, subject, request, &info); err != nil {
		return nil, err
	}
	return &info, nil
}

func streamInfo(si *jetstream.StreamInfo) StreamInfo {
	cfg := si.Config
	info := StreamInfo{
		Name: cfg.Name, Created: si.Created, Subjects: cfg.Subjects,
		FirstSeq: si.State.FirstSeq, LastSeq: si.State.LastSeq, Msgs: si.State.Msgs, Bytes: si.State.Bytes, NumSubjects: si.State.NumSubjects,
		Retention: "limits", Mirror: cfg.Mirror != nil, AllowDirect: cfg.AllowDirect, AllowBatch: cfg.AllowBatchPublish,
		Fence:      cfg.AllowRollup && slices.Contains(cfg.Subjects, fenceFilter(cfg.Name)),
		Duplicates: cfg.Duplicates, MaxMsgs: cfg.MaxMsgs, MaxBytes: cfg.MaxBytes, MaxAge: cfg.MaxAge,
		MaxMsgSize: int64(cfg.MaxMsgSize), MaxMsgsPerSubject: cfg.MaxMsgsPerSubject,
		DiscardNew: cfg.Discard == jetstream.DiscardNew, Replicas: cfg.Replicas, Metadata: cfg.Metadata, AsOf: si.TimeStamp,
	}
	if si.State.Msgs > 0 {
		info.FirstTime, info.LastTime = si.State.FirstTime, si.State.LastTime
	}
	switch cfg.Retention {
	case jetstream.InterestPolicy:
		info.Retention = "interest"
	case jetstream.WorkQueuePolicy:
		info.Retention = "workqueue"
	}
	return info
}

func retentionOf(s string) (jetstream.RetentionPolicy, error) {
	switch s {
	case "", "limits":
		return jetstream.LimitsPolicy, nil
	case "interest":
		return jetstream.InterestPolicy, nil
	case "workqueue":
		return jetstream.WorkQueuePolicy, nil
	}
	return 0, fmt.Errorf("retention %q is none of limits, interest, workqueue", s)
}

func orNone(limit int64) int64 {
	if limit <= 0 {
		return -1
	}
	return limit
}

func fenceFilter(stream string) string { return FencePrefix + stream + ".>" }

func shortID() string { return strings.ReplaceAll(uuid.NewString(), "-", "")[:12] }

// validName reports whether s can name a stream or bucket: it becomes a token of API subjects.
func validName(s string) bool {
	return s != "" && !strings.ContainsAny(s, " .*>/\\\t\r\n\x00")
}
