package flow_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"natsflow/flow"
)

// decimalState stores a number.
var decimalState = flow.StateCodec[int64]{
	Version: 1,
	Append:  func(dst []byte, n *int64) ([]byte, error) { return binary.AppendVarint(dst, *n), nil },
	Decode: func(data []byte, n *int64) error {
		v, size := binary.Varint(data)
		if size <= 0 || size != len(data) {
			return errors.New("not a number")
		}
		*n = v
		return nil
	},
}

func build(tb testing.TB, b *flow.Builder) *flow.Flow {
	tb.Helper()
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// bytesTo publishes bytes as they are under the record's key.
func bytesTo(stream, prefix string) flow.Sink[[]byte] {
	return flow.Sink[[]byte]{
		Stream: stream, Subjects: []string{prefix + "*"},
		Subject: flow.KeySubject[[]byte](prefix), Encode: flow.EncodeBytes(),
	}
}
