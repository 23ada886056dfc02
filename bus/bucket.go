package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// BucketConfig is a bucket of our own.
type BucketConfig struct {
	// Name: letters, digits, - and _.
	Name string
	// Replicas of its stream. Defaults to 1.
	Replicas int
	// MarkerTTL, if not zero, allows a TTL per key, and is how long the marker of an expired or deleted key is kept for
	// those who watch; at least a second. Defaults to no TTLs.
	MarkerTTL time.Duration
	// MaxBytes bounds it; a write beyond is ErrNoSpace. Defaults to no bound.
	MaxBytes int64
	// Description is shown by `nats kv`.
	Description string
	// Kind is what it is for natsflow, kept in its metadata. Defaults to "state".
	Kind string
}

// putWindow and putWindowBytes bound what PutMany has outstanding.
const putWindow, putWindowBytes = 2000, 16 << 20

// Bucket is a KV bucket (ADR-8), readable by the `nats kv` command. Its stream is created by us, for the settings that
// a KV API does not give: no direct gets, so that every read is answered by the leader and is never stale.
type Bucket struct {
	c         *Conn
	name      string
	stream    string
	prefix    string // of subjects, with the dot
	markerTTL time.Duration
}

// Item is one value of a bucket, or the mark of its end.
type Item struct {
	Key   string
	Value []byte
	// Seq is its revision: the sequence in the bucket's stream.
	Seq  uint64
	Time time.Time
	// Deleted: the key was deleted, purged, or has expired.
	Deleted bool
}

func bucketStream(bucket string) string { return "KV_" + bucket }
func bucketPrefix(bucket string) string { return "$KV." + bucket + "." }

// EnsureBucket opens a bucket and creates it if it is not there. One that is there keeps its settings; it is an error
// if it has no TTLs and they are asked for.
func (c *Conn) EnsureBucket(ctx context.Context, cfg BucketConfig) (*Bucket, error) {
	if !validName(cfg.Name) {
		return nil, fmt.Errorf("opening bucket: %q is not a name of a bucket", cfg.Name)
	}
	info, err := c.streamInfo(ctx, bucketStream(cfg.Name))
	if !errors.Is(classOf(err), ErrNotFound) {
		return c.bucketOf(cfg.Name, info, err, cfg.MarkerTTL > 0)
	}
	sc := jetstream.StreamConfig{
		Name: bucketStream(cfg.Name), Subjects: []string{bucketPrefix(cfg.Name) + ">"}, Description: cfg.Description,
		Storage: jetstream.FileStorage, Replicas: max(cfg.Replicas, 1), Discard: jetstream.DiscardNew,
		MaxMsgsPerSubject: 1, MaxMsgs: -1, MaxBytes: orNone(cfg.MaxBytes), MaxMsgSize: -1,
		AllowRollup: true, DenyDelete: true, AllowDirect: false, Duplicates: time.Second,
		Metadata: map[string]string{"natsflow": cmp.Or(cfg.Kind, "state")},
	}
	if cfg.MarkerTTL > 0 {
		sc.AllowMsgTTL, sc.SubjectDeleteMarkerTTL = true, wholeSeconds(cfg.MarkerTTL)
	}
	if _, err := c.createStream(ctx, sc); err != nil && !isClass(err, ErrExists) {
		return nil, err
	}
	info, err = c.createdStream(ctx, bucketStream(cfg.Name))
	return c.bucketOf(cfg.Name, info, err, cfg.MarkerTTL > 0)
}

// OpenBucket opens a bucket. It returns ErrNotFound if there is none of that name.
func (c *Conn) OpenBucket(ctx context.Context, name string) (*Bucket, error) {
	info, err := c.streamInfo(ctx, bucketStream(name))
	return c.bucketOf(name, info, err, false)
}

// bucketOf is the bucket of a stream that was looked for.
func (c *Conn) bucketOf(name string, info *jetstream.StreamInfo, err error, needTTL bool) (*Bucket, error) {
	if err != nil {
		return nil, classify("opening bucket "+name, err)
	}
	if needTTL && !info.Config.AllowMsgTTL {
		return nil, fmt.Errorf("opening bucket %s: it was created without TTLs per key", name)
	}
	b := &Bucket{c: c, name: name, stream: bucketStream(name), prefix: bucketPrefix(name)}
	if info.Config.AllowMsgTTL {
		b.markerTTL = info.Config.SubjectDeleteMarkerTTL
	}
	return b, nil
}

// Name is the bucket's name.
func (b *Bucket) Name() string { return b.name }

// Bytes is the size of the bucket on the server's disk.
func (b *Bucket) Bytes(ctx context.Context) (uint64, error) {
	info, err := b.c.Stream(ctx, b.stream)
	return info.Bytes, err
}

// Append writes key if the last sequence over all the keys of filter (which may have wildcards, "log.0.3.>") is last; 0
// for none. It returns ErrFenced if it is another, ErrConflict, ErrNoSpace, ErrTooLarge, or ErrUnknownOutcome.
func (b *Bucket) Append(ctx context.Context, key string, value []byte, filter string, last uint64) (seq uint64, err error) {
	return b.write(ctx, "appending", key, value, nats.Header{
		hdrExpectedSeq:     {strconv.FormatUint(last, 10)},
		hdrExpectedSubject: {b.prefix + filter},
	})
}

// Put writes key, whatever is there. A ttl of 0 is none; others are rounded up to whole seconds.
func (b *Bucket) Put(ctx context.Context, key string, value []byte, ttl time.Duration) (rev uint64, err error) {
	return b.write(ctx, "putting", key, value, withTTL(nil, ttl))
}

// Create writes key if it is not there, was deleted, or has expired; ErrExists if it is there.
func (b *Bucket) Create(ctx context.Context, key string, value []byte, ttl time.Duration) (rev uint64, err error) {
	// A marker that vanishes or is replaced between the two steps makes another round.
	for range 3 {
		if rev, err = b.Update(ctx, key, value, rev, ttl); !errors.Is(err, ErrFenced) {
			return rev, err
		}
		last, lerr := b.Last(ctx, key)
		switch {
		case errors.Is(lerr, ErrNotFound):
			rev = 0
		case lerr != nil:
			return 0, lerr
		case !last.Deleted:
			return 0, &classed{doing: "creating key " + key + " of bucket " + b.name, class: ErrExists}
		default:
			rev = last.Seq
		}
	}
	return 0, &classed{doing: "creating key " + key + " of bucket " + b.name, class: ErrConflict}
}

// Update writes key if its revision is rev (0: it must not be there). It returns ErrFenced if it is another. The key
// gets a new ttl; unlike the KV API of nats.go, which drops it.
func (b *Bucket) Update(ctx context.Context, key string, value []byte, rev uint64, ttl time.Duration) (uint64, error) {
	h := nats.Header{hdrExpectedSeq: {strconv.FormatUint(rev, 10)}}
	return b.write(ctx, "updating", key, value, withTTL(h, ttl))
}

// Delete marks key as deleted if its revision is rev (0: whatever it is). With TTLs in the bucket the mark goes by
// itself.
func (b *Bucket) Delete(ctx context.Context, key string, rev uint64) error {
	h := nats.Header{hdrKVOperation: {"DEL"}}
	if b.markerTTL > 0 {
		// A purge, as the server takes only that for a marker which needs no marker of its own when it expires.
		h = withTTL(nats.Header{hdrKVOperation: {"PURGE"}, hdrRollup: {"sub"}}, b.markerTTL)
	}
	if rev > 0 {
		h[hdrExpectedSeq] = []string{strconv.FormatUint(rev, 10)}
	}
	_, err := b.write(ctx, "deleting", key, nil, h)
	return err
}

func (b *Bucket) write(ctx context.Context, doing, key string, value []byte, h nats.Header) (uint64, error) {
	subject := b.prefix + key
	if !validSubject(subject) {
		return 0, fmt.Errorf("%s key %q of bucket %s: not a key", doing, key, b.name)
	}
	ack, err := b.c.publish(ctx, &nats.Msg{Subject: subject, Data: value, Header: h})
	if err != nil {
		return 0, classify(doing+" key "+key+" of bucket "+b.name, err)
	}
	return ack.seq, nil
}

// PutMany writes all items (Key and Value), many at a time, and waits for all of them. All that failed is in the error,
// up to a bound.
func (b *Bucket) PutMany(ctx context.Context, items []Item) error {
	for _, it := range items {
		if !validSubject(b.prefix + it.Key) {
			return fmt.Errorf("putting key %q of bucket %s: not a key", it.Key, b.name)
		}
	}
	doing := fmt.Sprintf("putting %d keys of bucket %s", len(items), b.name)
	w, err := b.c.newWindow(ctx, putWindow, putWindowBytes)
	if err != nil {
		return classify(doing, err)
	}
	defer w.close()
	m := &nats.Msg{Reply: w.reply}
	for _, it := range items {
		m.Subject, m.Data = b.prefix+it.Key, it.Value
		if err := w.publish(ctx, m); err != nil {
			return classify(doing, err)
		}
	}
	return classify(doing, w.flush(ctx))
}

// Get reads key from the leader. A deleted or expired one is ErrNotFound.
func (b *Bucket) Get(ctx context.Context, key string) (Item, error) {
	it, err := b.Last(ctx, key)
	if err == nil && it.Deleted {
		return Item{}, &classed{doing: "getting key " + key + " of bucket " + b.name, class: ErrNotFound}
	}
	return it, err
}

// Last reads the last item over all keys of filter from the leader, be it a mark of deletion. ErrNotFound if none.
func (b *Bucket) Last(ctx context.Context, filter string) (Item, error) {
	m, err := b.c.lastMsg(ctx, b.stream, b.prefix+filter)
	if err != nil {
		return Item{}, classify("getting key "+filter+" of bucket "+b.name, err)
	}
	return Item{
		Key: strings.TrimPrefix(m.Subject, b.prefix), Value: m.Data, Seq: m.Seq, Time: m.Time, Deleted: isMarker(m.header),
	}, nil
}

// Purge removes all items of filter with a sequence below before (0: all), without leaving markers. It may be repeated.
// It is not fenced: purge only what nobody can need any more.
func (b *Bucket) Purge(ctx context.Context, filter string, before uint64) error {
	request := struct {
		Filter string `json:"filter"`
		Seq    uint64 `json:"seq,omitempty"`
	}{b.prefix + filter, before}
	return classify("purging keys "+filter+" of bucket "+b.name, b.c.ask(ctx, "STREAM.PURGE."+b.stream, request, nil))
}

// storedMsg is a message as STREAM.MSG.GET gives it.
type storedMsg struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Hdrs    []byte    `json:"hdrs"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
	header  nats.Header
}

// lastMsg reads the last message on a subject, which may have wildcards, from the leader of the stream.
func (c *Conn) lastMsg(ctx context.Context, stream, subject string) (*storedMsg, error) {
	return c.getMsg(ctx, stream, msgGet{LastFor: subject})
}

// nextMsg reads the first message on a subject, which may have wildcards, at or after a sequence, from the leader.
func (c *Conn) nextMsg(ctx context.Context, stream, subject string, seq uint64) (*storedMsg, error) {
	return c.getMsg(ctx, stream, msgGet{Seq: seq, NextFor: subject})
}

// msgGet is a request of STREAM.MSG.GET, which only the leader answers.
type msgGet struct {
	Seq     uint64 `json:"seq,omitempty"`
	LastFor string `json:"last_by_subj,omitempty"`
	NextFor string `json:"next_by_subj,omitempty"`
}

func (c *Conn) getMsg(ctx context.Context, stream string, request msgGet) (*storedMsg, error) {
	var answer struct {
		Message *storedMsg `json:"message"`
	}
	if err := c.ask(ctx, "STREAM.MSG.GET."+stream, request, &answer); err != nil {
		return nil, err
	}
	m := answer.Message
	if m == nil {
		return nil, fmt.Errorf("getting a message of stream %s: empty answer", stream)
	}
	if len(m.Hdrs) > 0 {
		var err error
		if m.header, err = nats.DecodeHeadersMsg(m.Hdrs); err != nil {
			return nil, fmt.Errorf("getting a message of stream %s: %w", stream, err)
		}
	}
	return m, nil
}

func isMarker(h map[string][]string) bool {
	if len(h) == 0 {
		return false
	}
	if v := h[hdrKVOperation]; len(v) > 0 && (v[0] == "DEL" || v[0] == "PURGE") {
		return true
	}
	return len(h[hdrMarkerReason]) > 0
}

func withTTL(h nats.Header, ttl time.Duration) nats.Header {
	if ttl <= 0 {
		return h
	}
	if h == nil {
		h = make(nats.Header, 1)
	}
	h[hdrTTL] = []string{strconv.FormatInt(int64(wholeSeconds(ttl)/time.Second), 10) + "s"}
	return h
}

func wholeSeconds(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}
