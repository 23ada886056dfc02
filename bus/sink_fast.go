package bus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unsafe"

	"github.com/nats-io/nats.go"
)

// Fast ingest (ADR-50; nats-server v2.15.3, server/stream.go: getFastBatch and processJetStreamFastBatchMsg). Every
// message of a batch has a reply subject <prefix>.<batch>.<flow>.<gap mode>.<sequence>.<operation>.$FI. The server
// answers with flow acks {"type":"ack","seq","msgs"}, every <flow> messages at most; {"type":"gap"} and {"type":"err"}
// when something is wrong; and a PubAck with the count of stored messages at the commit. In gap mode "fail" it stores a
// prefix of the batch and nothing behind the first message that is missing or refused.
const (
	opStart  = '0'
	opAppend = '1'
	opCommit = '2'
	opPing   = '4' // asks for a flow ack; never stored

	fastFlow      = 500     // messages between flow acks; the server's own maximum
	fastFlowBytes = 2 << 20 // and about so many bytes
)

// batchID names the batches of one owner of a task: whoever knows the fence can end a batch that its predecessor left
// open (see WriteFence).
func batchID(flow, task string, fence uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%d", flow, task, fence))
	return hex.EncodeToString(sum[:16])
}

// batch is one group in flight.
type batch struct {
	waiter
	total uint64
}

// publishFast publishes a group as one batch. Its first message carries the fence: if that is refused, the rest
// belongs to no batch and is refused too.
func (s *Sink) publishFast(ctx context.Context, g Group, st *stencil) (uint64, error) {
	b := &batch{total: uint64(len(g.Outs))}
	if err := b.init(ctx, s.c); err != nil {
		return 0, err
	}
	defer b.timer.Stop()
	key, reply := s.c.acks.add(b)
	defer s.c.acks.remove(key)

	flow := flowOf(g.Outs)
	st.position(PositionHeader)
	st.set(hdrExpectedSeq, strconv.FormatUint(g.Fence, 10))
	st.set(hdrExpectedSubject, fenceSubject(s.name, g.Flow, g.Task))
	st.reply = append(append(append(st.reply[:0], reply...), '.'), batchID(g.Flow, g.Task, g.Fence)...)
	st.reply = strconv.AppendUint(append(st.reply, '.'), flow, 10)
	st.reply = append(st.reply, ".fail."...)
	prefix := len(st.reply)
	sent := uint64(0)
	b.ping = func() error {
		reply := fmt.Sprintf("%s%d.%c.$FI", st.reply[:prefix], sent, opPing)
		return s.c.nc.PublishMsg(&nats.Msg{Subject: g.Outs[0].Subject, Reply: reply})
	}

	for i := range g.Outs {
		n := uint64(i) + 1
		// At most two flow acks are outstanding; the server never waits for more before it sends one.
		if n > 2*flow {
			if err := b.await(ctx, n-2*flow, true); err != nil {
				return 0, b.failure(err)
			}
		}
		op := byte(opAppend)
		switch n {
		case b.total:
			op = opCommit
		case 1:
			op = opStart
		}
		st.reply = append(append(strconv.AppendUint(st.reply[:prefix], n, 10), '.', op), ".$FI"...)
		st.msg.Reply = unsafe.String(unsafe.SliceData(st.reply), len(st.reply))
		m := st.fill(g, i)
		if i%64 == 0 && b.gone() {
			return 0, b.failure(nats.ErrDisconnected)
		}
		if err := s.c.nc.PublishMsg(m); err != nil {
			return 0, b.failure(err)
		}
		st.unfill(g, i)
		if sent = n; i == 0 {
			delete(st.msg.Header, hdrExpectedSeq)
			delete(st.msg.Header, hdrExpectedSubject)
		}
	}
	if err := b.await(ctx, b.total, true); err != nil {
		return 0, b.failure(err)
	}
	return b.last, nil
}

// flowOf is the number of messages between flow acks: fewer if they are large.
func flowOf(outs []Out) uint64 {
	size := 0
	for i := range outs {
		size += len(outs[i].Data) + 200
	}
	return uint64(min(max(fastFlowBytes/(size/len(outs)), 1), fastFlow))
}

// refused is a refusal of the server to store the first message, and so anything, of a batch.
type refused struct{ error }

func (r refused) Unwrap() error { return r.error }

// failure makes the error of a group: what the server refused as a whole keeps its class, all else is unknown.
func (b *batch) failure(err error) error {
	var whole refused
	if errors.As(err, &whole) || errors.Is(classOf(err), ErrUnknownOutcome) {
		return err
	}
	return &classed{doing: "in the middle of a group", class: ErrUnknownOutcome, err: classify("publishing", err)}
}

var (
	typeAck = []byte(`{"type":"ack"`)
	typeGap = []byte(`{"type":"gap"`)
	typeErr = []byte(`{"type":"err"`)
)

// receive implements receiver.
func (b *batch) receive(m *nats.Msg) {
	switch {
	case isNoResponders(m):
		b.report(0, 0, nats.ErrNoResponders, true)
	case bytes.HasPrefix(m.Data, typeAck):
		seq, _ := numberAfter(m.Data, seqField)
		// The last message is acknowledged by the PubAck only, which has the count.
		b.report(min(seq, b.total-1), 0, nil, false)
	case bytes.HasPrefix(m.Data, typeGap):
		b.report(0, 0, unknown("batch", errors.New("the server has missed a message")), true)
	case bytes.HasPrefix(m.Data, typeErr):
		var failed struct {
			Seq   uint64    `json:"seq"`
			Error *APIError `json:"error"`
		}
		if err := json.Unmarshal(m.Data, &failed); err != nil || failed.Error == nil {
			b.report(0, 0, unknown("batch", fmt.Errorf("answer %q: %w", m.Data, err)), true)
			return
		}
		b.refuse(failed.Seq, failed.Error)
	default:
		b.commit(m)
	}
}

// refuse ends the batch with the server's refusal of one message. If it is the first one, nothing is stored: the rest
// belongs to no batch. Except when writing to disk failed, as then the batch had begun.
func (b *batch) refuse(seq uint64, api *APIError) {
	// "Unknown batch" answers a ping: the batch is over, and how it ended is not known.
	if seq == 1 && api.ErrorCode != codeBatchUnknownID && (b.total == 1 || api.ErrorCode != codeStoreFailed) {
		b.report(0, 0, refused{api}, true)
		return
	}
	b.report(0, 0, api, true)
}

// commit reads the PubAck, which also tells of a refusal. A batch that was ended early gets one with a smaller count.
func (b *batch) commit(m *nats.Msg) {
	ack, err := parsePubAck(m.Data)
	var api *APIError
	switch {
	case errors.As(err, &api):
		b.refuse(batchSeq(m.Subject), api)
	case err != nil:
		b.report(0, 0, unknown("batch", err), true)
	case ack.count != b.total:
		b.report(0, ack.seq, unknown("batch", fmt.Errorf("%d of %d messages are stored", ack.count, b.total)), true)
	default:
		b.report(b.total, ack.seq, nil, false)
	}
}

// batchSeq is the place in the batch of the message that the server answers: the third token from the end of its reply
// subject.
func batchSeq(subject string) uint64 {
	end := len(subject)
	for range 2 {
		if end = strings.LastIndexByte(subject[:end], '.'); end < 0 {
			return 0
		}
	}
	n, err := strconv.ParseUint(subject[strings.LastIndexByte(subject[:end], '.')+1:end], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
