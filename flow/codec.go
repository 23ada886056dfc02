package flow

import (
	"encoding/json"
	"fmt"
)

// Decoder turns the payload of a source record into a value. The payload may be
// kept but not modified. An error makes the record a dead letter.
type Decoder[T any] func(m *Meta, data []byte) (T, error)

// Encoder appends the payload of a result to dst. An error makes the record a
// dead letter.
type Encoder[T any] func(dst []byte, m *Meta, v T) ([]byte, error)

// DecodeJSON returns a decoder by encoding/json. Of a member that is there
// twice, the last counts.
func DecodeJSON[T any]() Decoder[T] {
	return func(_ *Meta, data []byte) (T, error) {
		var v T
		err := json.Unmarshal(data, &v)
		return v, err
	}
}

// DecodeBytes returns a decoder that hands the payload on as it is: the lazy
// codec, with which a step looks only at what it needs.
func DecodeBytes() Decoder[[]byte] {
	return func(_ *Meta, data []byte) ([]byte, error) { return data, nil }
}

// DecodeText returns a decoder that takes the payload as text.
func DecodeText() Decoder[string] {
	return func(_ *Meta, data []byte) (string, error) { return string(data), nil }
}

// EncodeJSON returns an encoder by encoding/json.
func EncodeJSON[T any]() Encoder[T] {
	return func(dst []byte, _ *Meta, v T) ([]byte, error) {
		data, err := json.Marshal(v)
		return append(dst, data...), err
	}
}

// EncodeBytes returns an encoder that publishes the bytes as they are.
func EncodeBytes() Encoder[[]byte] {
	return func(dst []byte, _ *Meta, v []byte) ([]byte, error) { return append(dst, v...), nil }
}

// EncodeText returns an encoder that publishes the string's bytes.
func EncodeText() Encoder[string] {
	return func(dst []byte, _ *Meta, v string) ([]byte, error) { return append(dst, v...), nil }
}

// StateCodec says how the state of a step is stored. The stored bytes carry
// Version, so that a later version of the program can tell what it reads.
type StateCodec[S any] struct {
	// Version of the encoding; 0 and up. Raise it when the meaning of the
	// bytes changes.
	Version int
	// Append appends the encoding of *s to dst. It is called after a batch as
	// well as at a seal, so that not all that it makes is stored.
	Append func(dst []byte, s *S) ([]byte, error)
	// Decode reads what Append of the same version wrote into *s, which is the
	// zero value. It must not keep data.
	Decode func(data []byte, s *S) error
	// Migrate reads what another version wrote. Without it, or when it returns
	// an error, the task does not start; what is stored stays as it is.
	Migrate func(version int, data []byte, s *S) error

	// read, if it is there, reads all versions.
	read func(version int, data []byte, s *S) error
}

// JSONState returns the default codec, by encoding/json. migrate may be nil.
func JSONState[S any](version int, migrate func(version int, data []byte, s *S) error) StateCodec[S] {
	return StateCodec[S]{
		Version: version,
		Append: func(dst []byte, s *S) ([]byte, error) {
			data, err := json.Marshal(s)
			return append(dst, data...), err
		},
		Decode:  func(data []byte, s *S) error { return json.Unmarshal(data, s) },
		Migrate: migrate,
	}
}

func (c StateCodec[S]) usable() bool { return c.Append != nil && c.Decode != nil }

func (c StateCodec[S]) decode(version int, data []byte, s *S) error {
	switch {
	case c.read != nil:
		return c.read(version, data, s)
	case version == c.Version:
		return c.Decode(data, s)
	case version&withHead != 0:
		// The step had timers or a TTL.
		plain, data, err := plainState(version, data)
		if err != nil {
			return err
		}
		return c.decode(plain, data, s)
	}
	if c.Migrate == nil {
		return fmt.Errorf("state of version %d, the step has version %d and no Migrate", version, c.Version)
	}
	if err := c.Migrate(version, data, s); err != nil {
		return fmt.Errorf("migrate state of version %d to %d: %w", version, c.Version, err)
	}
	return nil
}
