package bus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// The classes that callers branch on with errors.Is. An error that came from the server also wraps its [APIError].
var (
	// ErrFenced: the expected last sequence is not the last one (10071). Somebody else has written: stop.
	ErrFenced = errors.New("fenced: another writer was there")
	// ErrConflict: refused for a passing reason, nothing was written: a write to the same subject (10164) or with the
	// same message id (10158) is in flight, or the server is busy or without a leader. Read again and retry.
	ErrConflict = errors.New("conflict")
	// ErrUnknownOutcome: no answer (timeout, no responders, connection lost). A write may have been made or not.
	ErrUnknownOutcome = errors.New("unknown outcome")
	// ErrNotFound: no such stream, bucket, consumer, key or message.
	ErrNotFound = errors.New("not found")
	// ErrExists: a key that is there, or a stream with other settings.
	ErrExists = errors.New("already exists")
	// ErrTaken: another consumer of a work queue takes the same messages.
	ErrTaken = errors.New("taken by another consumer")
	// ErrNoSpace: a limit of the stream, bucket, account or disk is reached; the write was not made.
	ErrNoSpace = errors.New("no space")
	// ErrTooLarge: larger than the server or the stream takes as one message.
	ErrTooLarge = errors.New("message too large")
	// ErrServerTooOld: the server is older than 2.15.
	ErrServerTooOld = errors.New("server too old")
	// ErrNoJetStream: JetStream is not enabled on the server or for the account.
	ErrNoJetStream = errors.New("JetStream is not enabled")
	// ErrClosed: this side has closed the connection.
	ErrClosed = errors.New("connection closed")
	// ErrUntrusted: the guard of the connection does not trust its lease any more; nothing was sent.
	ErrUntrusted = errors.New("lease is not trusted any more")
)

// APIError is an error answer of the JetStream API, with the server's own code.
type APIError = jetstream.APIError

// Codes of the JetStream API that are classified here (server/errors.json of nats-server v2.15.3).
const (
	codeAccountResources    = 10002
	codeClusterNotAvail     = 10008
	codeClusterNoPeers      = 10005
	codeConsumerExists      = 10013
	codeConsumerNotFound    = 10014
	codeInsufficient        = 10023
	codeMaxConsumers        = 10026
	codeMaxStreams          = 10027
	codeMemoryResources     = 10028
	codeNoMessage           = 10037
	codeNotEnabledAccount   = 10039
	codeSequenceNotFound    = 10043
	codeStorageResources    = 10047
	codeMsgTooLarge         = 10054
	codeStreamExists        = 10058
	codeStreamNotFound      = 10059
	codeWrongLastSeq        = 10071
	codeNotEnabled          = 10076
	codeStoreFailed         = 10077
	codeHeaderTooLarge      = 10097
	codeQueueUnfiltered     = 10099
	codeQueueNotUnique      = 10100
	codeMaxBytesExceeded    = 10122
	codeConsumerExists2     = 10148
	codeDuplicateInProcess  = 10158
	codeExpectedNotReady    = 10163
	codeWrongLastSeqNoValue = 10164
	codeTooManyRequests     = 10167
	codeBatchUnknownID      = 10208
	codeBatchInflight       = 10211
)

// Retryable reports whether the same call may succeed later without anything being changed: a conflict, an unknown
// outcome (after a look at what is stored), or no space. It is false for nil.
func Retryable(err error) bool {
	if errors.Is(err, ErrClosed) || errors.Is(err, ErrUntrusted) {
		return false
	}
	return errors.Is(err, ErrConflict) || errors.Is(err, ErrUnknownOutcome) || errors.Is(err, ErrNoSpace)
}

// classed is an error with its class, or two of them.
type classed struct {
	doing string
	class error
	err   error
}

// Error says what was being done, the class, and what the server or the connection said.
func (e *classed) Error() string {
	if e.err == nil || errors.Is(e.class, e.err) {
		return e.doing + ": " + e.class.Error()
	}
	return e.doing + ": " + e.class.Error() + ": " + e.err.Error()
}

// Unwrap lets errors.Is find the class and errors.As the server's error.
func (e *classed) Unwrap() []error {
	if e.err == nil {
		return []error{e.class}
	}
	return []error{e.class, e.err}
}

// classify wraps err with its class; an error of no class is only given the context of what was being done.
func classify(doing string, err error) error {
	if err == nil {
		return nil
	}
	var done *classed
	if errors.As(err, &done) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if class := classOf(err); class != nil {
		return &classed{doing: doing, class: class, err: err}
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// unknown makes an error of class ErrUnknownOutcome.
func unknown(doing string, err error) error {
	return &classed{doing: doing, class: ErrUnknownOutcome, err: err}
}

func classOf(err error) error {
	var done *classed
	if errors.As(err, &done) {
		return done.class
	}
	var api *APIError
	if errors.As(err, &api) {
		return classOfCode(api)
	}
	for _, class := range []error{ErrFenced, ErrConflict, ErrUnknownOutcome, ErrNotFound, ErrExists, ErrNoSpace, ErrUntrusted, ErrClosed} {
		if errors.Is(err, class) {
			return class
		}
	}
	return classOfClient(err)
}

func classOfCode(api *APIError) error {
	switch int(api.ErrorCode) {
	case codeWrongLastSeq:
		return ErrFenced
	case codeWrongLastSeqNoValue, codeExpectedNotReady, codeTooManyRequests, codeBatchInflight, codeClusterNotAvail, codeClusterNoPeers,
		codeDuplicateInProcess:
		return ErrConflict
	case codeStreamNotFound, codeNoMessage, codeConsumerNotFound, codeSequenceNotFound:
		return ErrNotFound
	case codeStreamExists, codeConsumerExists, codeConsumerExists2:
		return ErrExists
	case codeStoreFailed, codeAccountResources, codeInsufficient, codeMemoryResources, codeStorageResources, codeMaxBytesExceeded,
		codeMaxStreams, codeMaxConsumers:
		return ErrNoSpace
	case codeMsgTooLarge, codeHeaderTooLarge:
		return ErrTooLarge
	case codeNotEnabled, codeNotEnabledAccount:
		return ErrNoJetStream
	}
	if api.Code == 429 || api.Code == 503 {
		return ErrConflict
	}
	return nil
}

// classOfClient classifies what nats.go and the network say.
func classOfClient(err error) error {
	switch {
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		return ErrClosed
	case errors.Is(err, nats.ErrMaxPayload):
		return ErrTooLarge
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrMsgNotFound), errors.Is(err, jetstream.ErrConsumerNotFound):
		return ErrNotFound
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		return ErrNoJetStream
	case errors.Is(err, nats.ErrTimeout), errors.Is(err, nats.ErrNoResponders), errors.Is(err, nats.ErrDisconnected),
		errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, jetstream.ErrNoStreamResponse),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed):
		return ErrUnknownOutcome
	}
	var ne net.Error
	if errors.As(err, &ne) {
		return ErrUnknownOutcome
	}
	return nil
}
