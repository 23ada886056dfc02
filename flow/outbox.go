package flow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ErrOutbox says that bytes which should be an outbox are not one.
var ErrOutbox = errors.New("not an outbox")

// Output is one element of an outbox: a message that a commit publishes.
type Output struct {
	// Sink is the index of the sink in [Flow.Sinks].
	Sink int
	// Subject to publish on. Empty for a control sink, whose subject depends
	// on the worker's configuration.
	Subject []byte
	// Headers are alternating names and values.
	Headers []string
	// Data is the payload.
	Data []byte
}

// The outbox is a byte string from the moment a result is made: it is stored
// with the commit and published from the same bytes.
//
//	output = uvarint sink | uvarint n, subject | uvarint headers { uvarint n, text } | uvarint n, payload
func appendOutputHead(dst []byte, sink int, subject []byte, headers ...string) []byte {
	dst = binary.AppendUvarint(dst, uint64(sink))
	dst = binary.AppendUvarint(dst, uint64(len(subject)))
	dst = append(dst, subject...)
	dst = binary.AppendUvarint(dst, uint64(len(headers)))
	for _, h := range headers {
		dst = binary.AppendUvarint(dst, uint64(len(h)))
		dst = append(dst, h...)
	}
	return dst
}

// maxHeaders bounds the names and values of one output.
const maxHeaders = 64

// Outputs calls fn for each output of an outbox, in order. The byte slices of
// the output point into the outbox. It returns an error that wraps [ErrOutbox]
// when the bytes are not an outbox, and fn's error.
func Outputs(outbox []byte, fn func(i int, o Output) error) error {
	r := reader{data: outbox}
	for i := 0; len(r.data) > 0; i++ {
		var o Output
		sink := r.uvarint()
		o.Sink = int(sink)
		o.Subject = r.bytes()
		n := r.uvarint()
		if sink > math.MaxInt32 || n > maxHeaders {
			r.bad = true
		}
		for j := uint64(0); j < n && !r.bad; j++ {
			o.Headers = append(o.Headers, string(r.bytes()))
		}
		o.Data = r.bytes()
		if r.bad || len(o.Headers)%2 != 0 {
			return fmt.Errorf("output %d: %w", i, ErrOutbox)
		}
		if err := fn(i, o); err != nil {
			return err
		}
	}
	return nil
}

// reader takes length-prefixed fields off a byte string. After the first bad
// field all further ones are empty.
type reader struct {
	data []byte
	bad  bool
}

func (r *reader) uvarint() uint64 {
	if r.bad {
		return 0
	}
	v, n := binary.Uvarint(r.data)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.data = r.data[n:]
	return v
}

func (r *reader) varint() int64 {
	if r.bad {
		return 0
	}
	v, n := binary.Varint(r.data)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.data = r.data[n:]
	return v
}

func (r *reader) take(n uint64) []byte {
	if r.bad || n > uint64(len(r.data)) {
		r.bad = true
		return nil
	}
	b := r.data[:n:n]
	r.data = r.data[n:]
	return b
}

func (r *reader) bytes() []byte { return r.take(r.uvarint()) }
