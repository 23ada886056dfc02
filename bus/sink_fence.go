package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// maxOpenFences bounds the list of predecessors in a fence message; the server forgets their batches after 10 s.
	maxOpenFences = 32
	fenceAttempts = 12
	// closingSeq is the place in a batch that no message of it has: the server ends a batch that it is sent for.
	closingSeq = ".1.fail.4611686018427387904.1.$FI"
)

func fenceSubject(stream, flow, task string) string {
	return FencePrefix + stream + "." + flow + "." + task
}

// WriteFence writes the fence of a task and returns its sequence: from then on no group with an older fence can be
// stored, nor the rest of one that is under way. It may take over from another claimant at the same time; the last one
// wins.
//
// A batch is fenced by its first message only, so one that its owner has begun would go on. Its id is made of the
// fence, so it can be ended: (1) write the fence, by compare-and-set, with the list of the older ones whose batches may
// be open; (2) end those batches, by a message that they have no place for; (3) write the fence again. The server has
// answered (3) after everything that it had taken before (2), so a Scan that begins afterwards sees all there will ever
// be. Whoever finds the list of a predecessor that did not get to (3) ends these batches too.
func (s *Sink) WriteFence(ctx context.Context, flow, task string) (seq uint64, err error) {
	doing := "writing the fence of " + flow + "/" + task + " on stream " + s.name
	info := s.infoNow()
	if !info.Fence {
		return 0, fmt.Errorf("%s: the stream has no fence subject", doing)
	}
	if subject := fenceSubject(s.name, flow, task); !validSubject(subject) {
		return 0, fmt.Errorf("%s: %q is not a subject", doing, subject)
	}
	for attempt := range fenceAttempts {
		if seq, err = s.writeFence(ctx, flow, task, info.AllowBatch); err == nil {
			return seq, nil
		}
		class := classOf(err)
		if !errors.Is(class, ErrFenced) && !errors.Is(class, ErrConflict) && !errors.Is(class, ErrUnknownOutcome) || ctx.Err() != nil {
			break
		}
		if sleep(ctx, jitter(min(5*time.Millisecond<<attempt, time.Second), rand.Float64)) != nil {
			break
		}
	}
	if errors.Is(classOf(err), ErrFenced) {
		// Only other claimants' doing, not a fence against this one.
		return 0, &classed{doing: doing, class: ErrConflict, err: err}
	}
	return 0, s.explain(ctx, fmt.Errorf("%s: %w", doing, err))
}

func (s *Sink) writeFence(ctx context.Context, flow, task string, fast bool) (uint64, error) {
	prev, open, err := s.readFence(ctx, flow, task)
	if err != nil {
		return 0, err
	}
	if !fast {
		return s.putFence(ctx, flow, task, prev, nil)
	}
	open = append(open, prev)
	open = open[max(0, len(open)-maxOpenFences):]
	seq, err := s.putFence(ctx, flow, task, prev, open)
	if err != nil {
		return 0, err
	}
	for _, old := range open {
		if err := s.endBatch(ctx, flow, task, old); err != nil {
			return 0, err
		}
	}
	return s.putFence(ctx, flow, task, seq, nil)
}

// putFence writes the fence message if the last one is prev; open is the list of fences whose batches may be open.
func (s *Sink) putFence(ctx context.Context, flow, task string, prev uint64, open []uint64) (uint64, error) {
	var body []byte
	for _, f := range open {
		body = append(strconv.AppendUint(body, f, 10), ' ')
	}
	ack, err := s.c.publish(ctx, &nats.Msg{
		Subject: fenceSubject(s.name, flow, task), Data: body,
		Header: nats.Header{hdrRollup: {"sub"}, hdrExpectedSeq: {strconv.FormatUint(prev, 10)}},
	})
	return ack.seq, err
}

// endBatch ends the batch of a fence if there is one. Whatever the server answers, it has none afterwards.
func (s *Sink) endBatch(ctx context.Context, flow, task string, fence uint64) error {
	_, err := s.c.callWith(ctx, &nats.Msg{Subject: fenceSubject(s.name, flow, task)}, "."+batchID(flow, task, fence)+closingSeq)
	return err
}

// readFence reads the last fence message from the leader: its sequence, 0 if there is none, and its list.
func (s *Sink) readFence(ctx context.Context, flow, task string) (seq uint64, open []uint64, err error) {
	m, err := s.c.lastMsg(ctx, s.name, fenceSubject(s.name, flow, task))
	if errors.Is(classOf(err), ErrNotFound) {
		if _, serr := s.c.Stream(ctx, s.name); serr != nil {
			return 0, nil, serr
		}
		return 0, nil, nil
	}
	if err != nil {
		return 0, nil, err
	}
	for f := range strings.FieldsSeq(string(m.Data)) {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, nil, fmt.Errorf("fence message %d of stream %s: %w", m.Seq, s.name, err)
		}
		open = append(open, n)
	}
	return m.Seq, open, nil
}

// LastFence is the sequence of the task's last fence message, read from the leader; 0 when there is none.
func (s *Sink) LastFence(ctx context.Context, flow, task string) (seq uint64, err error) {
	seq, _, err = s.readFence(ctx, flow, task)
	return seq, classify("reading the fence of "+flow+"/"+task+" on stream "+s.name, err)
}

// Held is a result that a sink holds.
type Held struct {
	Task string
	// N is the number of its commit, I its place in the outbox.
	N uint64
	I int
	// Seq and Subject are its place in the stream.
	Seq     uint64
	Subject string
	// Batched: it was published in a batch, so that all results before it in its group were stored, too. One that was
	// published by itself says nothing of others: the server may have refused one and taken what was on its way behind it.
	Batched bool
}

// Scan looks at the headers of all messages with sequences above from, up to the stream's last one at the call, which
// it returns, and calls want for each result of the flow, in order. What was published by anybody else is passed over.
// After WriteFence it sees all that a former owner of the task has ever published there.
func (s *Sink) Scan(ctx context.Context, from uint64, flow string, want func(Held)) (last uint64, err error) {
	info, err := s.c.Stream(ctx, s.name)
	if err != nil {
		return 0, err
	}
	last = info.LastSeq
	if last <= from || info.Msgs == 0 {
		return last, nil
	}
	p := newPuller(s.c, pullConfig{stream: s.name, from: from + 1, name: "natsflow-scan", headersOnly: true})
	err = p.read(ctx, last, func(m *Msg) error {
		if f, task, n, i, ok := positionOf(m); ok && f == flow {
			want(Held{Task: task, N: n, I: i, Seq: m.Seq, Subject: m.Subject, Batched: len(m.Header[hdrMsgID]) == 0})
		}
		return nil
	})
	return last, classify("scanning stream "+s.name, err)
}

// positionOf is the position of a result, from our header or else from its message id.
func positionOf(m *Msg) (flow, task string, n uint64, i int, ok bool) {
	for _, name := range []string{PositionHeader, hdrMsgID} {
		if v := m.Header[name]; len(v) > 0 {
			if flow, task, n, i, ok = ParsePosition(v[0]); ok {
				return flow, task, n, i, true
			}
		}
	}
	return "", "", 0, 0, false
}
