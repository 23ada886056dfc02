package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/nats-io/nats.go"
)

const (
	// sinkGroups bounds the groups in flight, and with the window of each what the server has to queue for a stream
	// (it refuses what goes beyond 100,000 messages or 128 MB).
	sinkGroups = 8
	// idWindow and idWindowBytes bound the outstanding messages of a group that is published with ids.
	idWindow, idWindowBytes = 2000, 8 << 20
)

// HeaderField is one header of a result.
type HeaderField struct{ Name, Value string }

// Out is one result.
type Out struct {
	Subject string
	Header  []HeaderField
	Data    []byte
}

// Group is the outbox of one commit, or the part of it that goes to one sink.
type Group struct {
	Flow string
	// Task is the task's text, "0.3".
	Task string
	// N is the number of the commit in the task's log.
	N uint64
	// Fence is the last sequence of the task's fence subject, as WriteFence or LastFence gave it; for fenced sinks.
	Fence uint64
	Outs  []Out
	// Index is the place of each of Outs within the commit's outbox. Nil: 0, 1, 2, …
	Index []int
}

// ErrNotTaken says that a stream takes messages, and not on this subject.
var ErrNotTaken = errors.New("the stream does not take the subject")

// OutError says which of the results of a group cannot be published, by its nature, as long as the stream is as it is.
// Nothing of the group was sent.
type OutError struct {
	Index   int // in Group.Outs
	Subject string
	// Size is that of the message with all its headers, for ErrTooLarge; 0 otherwise.
	Size int
	Err  error
}

// Error implements error.
func (e *OutError) Error() string {
	return fmt.Sprintf("publishing to %q: %v", e.Subject, e.Err)
}

// Unwrap returns the reason: ErrTooLarge, ErrNotTaken, or what is wrong with a subject or header.
func (e *OutError) Unwrap() error { return e.Err }

// Sink publishes groups of results to one stream. On streams with fast ingest and a fence subject it publishes a group
// as one fast batch, fenced by its first message, each message with its position in a header; on others each message
// carries its position as message id. It is safe for concurrent use; groups of one task must not overlap.
type Sink struct {
	c     *Conn
	name  string
	slots chan struct{}
	pool  sync.Pool

	mu    sync.Mutex
	info  StreamInfo
	asked time.Time
}

// OpenSink looks at the stream and opens it as a sink. It returns ErrNotFound if there is none of that name.
func (c *Conn) OpenSink(ctx context.Context, stream string) (*Sink, error) {
	info, err := c.Stream(ctx, stream)
	if err != nil {
		return nil, err
	}
	if info.Mirror {
		return nil, fmt.Errorf("opening sink: stream %s is a mirror and takes no messages", stream)
	}
	s := &Sink{c: c, name: stream, info: info, asked: time.Now(), slots: make(chan struct{}, sinkGroups)}
	s.pool.New = func() any { return newStencil() }
	return s, nil
}

// Fenced reports whether the stream has a fence subject.
func (s *Sink) Fenced() bool { return s.infoNow().Fence }

// Fast reports whether the stream allows fast ingest.
func (s *Sink) Fast() bool { return s.infoNow().AllowBatch }

// Stream is the name of the stream.
func (s *Sink) Stream() string { return s.name }

// Duplicates is the stream's window for message ids.
func (s *Sink) Duplicates() time.Duration { return s.infoNow().Duplicates }

// MaxData is the number of bytes that a result of a task may have, with headers of its own: what the server and the
// stream take as one message, less the headers that Publish adds. It may be negative for a stream that takes tiny
// messages only. What has more is refused with ErrTooLarge.
func (s *Sink) MaxData(flow, task string) int {
	info := s.infoNow()
	most, _ := s.maxMsg(&info)
	return most - overhead(&info, flow, task)
}

// MaxPayload is what the server takes as one message, headers included.
func (s *Sink) MaxPayload() int { return int(s.c.MaxPayload()) }

// maxMsg is the size of the largest message, headers included, and who says so.
func (s *Sink) maxMsg(info *StreamInfo) (most int, by string) {
	most = s.MaxPayload()
	if info.MaxMsgSize > 0 && int(info.MaxMsgSize) < most {
		return int(info.MaxMsgSize), "stream " + s.name
	}
	return most, "the server"
}

// overhead bounds the size of the header block of a result without headers of its own.
func overhead(info *StreamInfo, flow, task string) int {
	const digits, block = len("18446744073709551615"), len("NATS/1.0\r\n\r\n")
	field := func(name string, value int) int { return len(name) + len(": \r\n") + value }
	position := len(flow) + len(task) + 2*digits + 3
	size := block
	if info.Fence {
		size += field(PositionHeader, position) + field(hdrExpectedSeq, digits) +
			field(hdrExpectedSubject, len(fenceSubject(info.Name, flow, task)))
	}
	if !info.Fence || !info.AllowBatch {
		size += field(hdrMsgID, position)
	}
	return size
}

// Refresh looks at the stream again, whose settings may have been changed, and goes by what it finds from then on.
func (s *Sink) Refresh(ctx context.Context) (StreamInfo, error) {
	now, err := s.c.Stream(ctx, s.name)
	if err != nil {
		return StreamInfo{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info, s.asked = now, time.Now()
	return now, nil
}

// ReadsAll reports whether filters, or none at all, leave out no message of the stream.
func (i StreamInfo) ReadsAll(filters []string) bool {
	switch {
	case len(filters) == 0 || slices.Contains(filters, ">"):
		return true
	case len(i.Subjects) == 0:
		return false // what it gets from other streams may have any subject
	}
	return !slices.ContainsFunc(i.Subjects, func(s string) bool {
		return !slices.ContainsFunc(filters, func(p string) bool { return subjectMatches(p, s) })
	})
}

// Subjects that the stream takes.
func (s *Sink) Subjects() []string { return slices.Clone(s.infoNow().Subjects) }

// SubjectsWith is the list of subjects for a stream that has some and is to take those in add, too: none of it covers
// another one, which the server would not accept.
func SubjectsWith(has, add []string) []string {
	list := slices.Clone(has)
	for _, want := range add {
		if slices.ContainsFunc(list, func(p string) bool { return subjectMatches(p, want) }) {
			continue
		}
		list = slices.DeleteFunc(list, func(p string) bool { return subjectMatches(want, p) })
		list = append(list, want)
	}
	return list
}

// KeepsLatest reports whether the stream has a limit for the messages of each subject, as a bucket has.
func (s *Sink) KeepsLatest() bool { return s.infoNow().MaxMsgsPerSubject > 0 }

func (s *Sink) infoNow() StreamInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

// Publish publishes a group, in order, and waits until all of it is stored; last is the sequence of its last message.
//
// With ErrFenced nothing of the group is stored: another owner has written the fence (without fast ingest, a beginning
// of it may be, if that happened meanwhile). With *OutError nothing was sent, with ErrTooLarge alone nothing is stored. ErrNotFound: the stream is gone. ErrNoSpace or ErrConflict alone: nothing is stored. With
// ErrUnknownOutcome, which may come together with ErrNoSpace, a part of it may be stored: on a fenced sink write a new
// fence and Scan before publishing the rest, on others publish it again.
func (s *Sink) Publish(ctx context.Context, g Group) (last uint64, err error) {
	if len(g.Outs) == 0 {
		return 0, nil
	}
	if g.Index != nil && len(g.Index) != len(g.Outs) {
		return 0, fmt.Errorf("publishing to stream %s: %d results with %d places", s.name, len(g.Outs), len(g.Index))
	}
	info := s.infoNow()
	if err := s.check(ctx, &info, g); err != nil {
		return 0, err
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return 0, fmt.Errorf("publishing to stream %s: %w", s.name, context.Cause(ctx))
	}
	st := s.pool.Get().(*stencil)
	defer s.pool.Put(st)
	if info.Fence && info.AllowBatch {
		last, err = s.publishFast(ctx, g, st)
	} else {
		last, err = s.publishIDs(ctx, g, st, info.Fence)
	}
	st.reset()
	if err != nil {
		return 0, s.explain(ctx, err)
	}
	return last, nil
}

// explain classifies the failure of a group. Without a responder it asks whether the stream is still there.
func (s *Sink) explain(ctx context.Context, err error) error {
	doing := "publishing to stream " + s.name
	if errors.Is(err, nats.ErrNoResponders) {
		if _, ierr := s.c.Stream(ctx, s.name); errors.Is(ierr, ErrNotFound) {
			return &classed{doing: doing, class: ErrNotFound, err: ierr}
		}
	}
	return classify(doing, err)
}

// check finds the results that could never be published, before any of the group is sent.
func (s *Sink) check(ctx context.Context, info *StreamInfo, g Group) error {
	limit, by := s.maxMsg(info)
	ours, previous := overhead(info, g.Flow, g.Task), ""
	for i := range g.Outs {
		o := &g.Outs[i]
		size := len(o.Data) + ours
		for _, h := range o.Header {
			size += len(h.Name) + len(h.Value) + 4
			if !validHeader(h) {
				return &OutError{i, o.Subject, 0, fmt.Errorf("header %q is not one", h.Name)}
			}
		}
		if size > limit {
			return &OutError{i, o.Subject, size, fmt.Errorf("%w: %d bytes of at most %d that %s takes", ErrTooLarge, size, limit, by)}
		}
		if o.Subject == previous {
			continue
		}
		if !validSubject(o.Subject) {
			return &OutError{i, o.Subject, 0, errors.New("not a subject")}
		}
		if !s.takes(ctx, info, o.Subject) {
			return &OutError{i, o.Subject, 0, ErrNotTaken}
		}
		previous = o.Subject
	}
	return nil
}

// takes reports whether the stream has the subject. Its subjects may have been changed: they are asked for again, at
// most once a second.
func (s *Sink) takes(ctx context.Context, info *StreamInfo, subject string) bool {
	match := func(p string) bool { return subjectMatches(p, subject) }
	if slices.ContainsFunc(info.Subjects, match) {
		return true
	}
	s.mu.Lock()
	fresh := time.Since(s.asked) < time.Second
	s.mu.Unlock()
	if fresh {
		return false
	}
	now, err := s.Refresh(ctx)
	if err != nil {
		return true // it cannot be told; the server will refuse it
	}
	*info = now
	return slices.ContainsFunc(now.Subjects, match)
}

func validHeader(h HeaderField) bool {
	if h.Name == "" {
		return false
	}
	for i := range len(h.Name) {
		if c := h.Name[i]; c <= ' ' || c >= 0x7f || c == ':' {
			return false
		}
	}
	return true
}

// publishIDs publishes each message with its position as message id; a duplicate is as good as stored. With a fence,
// every message carries it, as no batch holds them together.
func (s *Sink) publishIDs(ctx context.Context, g Group, st *stencil, fence bool) (uint64, error) {
	w, err := s.c.newWindow(ctx, idWindow, idWindowBytes)
	if err != nil {
		return 0, err
	}
	defer w.close()
	w.failFast = true
	if fence {
		st.set(hdrExpectedSeq, strconv.FormatUint(g.Fence, 10))
		st.set(hdrExpectedSubject, fenceSubject(s.name, g.Flow, g.Task))
		st.position(PositionHeader)
	}
	st.position(hdrMsgID)
	st.msg.Reply = w.reply
	for i := range g.Outs {
		m := st.fill(g, i)
		if err = w.publish(ctx, m); err != nil {
			break
		}
		st.unfill(g, i)
	}
	if err == nil {
		err = w.flush(ctx)
	}
	if err == nil {
		return w.last, nil
	}
	class := classOf(err)
	if w.sent > 1 && !errors.Is(class, ErrUnknownOutcome) && !errors.Is(class, ErrFenced) {
		return 0, &classed{doing: "in the middle of a group", class: ErrUnknownOutcome, err: classify("publishing", err)}
	}
	return 0, err
}

// stencil is one message that is filled again for every result: nats.go copies all of it when it is published, so that
// the headers and their texts can be used again.
type stencil struct {
	msg   nats.Msg
	pos   []byte
	reply []byte
	text  []string // the one value of the position header, a view of pos
}

func newStencil() *stencil {
	return &stencil{msg: nats.Msg{Header: make(nats.Header, 8)}, text: make([]string, 1)}
}

func (st *stencil) reset() {
	clear(st.msg.Header)
	st.msg.Data = nil
	st.text[0], st.msg.Reply, st.msg.Subject = "", "", ""
}

func (st *stencil) set(name, value string) { st.msg.Header[name] = []string{value} }

// position puts the position of each message into the header called name.
func (st *stencil) position(name string) { st.msg.Header[name] = st.text }

// fill makes the message of result i.
func (st *stencil) fill(g Group, i int) *nats.Msg {
	o := &g.Outs[i]
	place := i
	if g.Index != nil {
		place = g.Index[i]
	}
	st.pos = AppendPosition(st.pos[:0], g.Flow, g.Task, g.N, place)
	st.text[0] = unsafe.String(unsafe.SliceData(st.pos), len(st.pos))
	st.msg.Subject, st.msg.Data = o.Subject, o.Data
	for _, h := range o.Header {
		if !reserved(h.Name) {
			st.msg.Header[h.Name] = append(st.msg.Header[h.Name], h.Value)
		}
	}
	return &st.msg
}

// unfill takes away what only result i has.
func (st *stencil) unfill(g Group, i int) {
	for _, h := range g.Outs[i].Header {
		if !reserved(h.Name) {
			delete(st.msg.Header, h.Name)
		}
	}
}

// reserved are the headers that are ours on a sink; a result cannot set them.
func reserved(name string) bool {
	switch name {
	case PositionHeader, hdrMsgID, hdrExpectedSeq, hdrExpectedSubject:
		return true
	}
	return false
}
