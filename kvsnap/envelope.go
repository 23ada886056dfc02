package kvsnap

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
)

// Every value in the bucket is an envelope:
//
//	{"nf1":"<checksum>","kind":"commit", ... }\n<bodies>
//
// "nf1" is format and version. The checksum, 16 lower-case hexadecimal digits,
// is the CRC-64 (ECMA-182) of everything after it. So any flipped bit shows: in
// the magic as an unknown format, in the digits or behind them as a mismatch.
const (
	magic    = `{"nf1":"`
	sumDigit = 16
	sumEnd   = len(magic) + sumDigit // of the digits, and start of what they cover
	joint    = `",`
	// minEnvelope is the magic, the sum, the joint, "}" and the newline.
	minEnvelope = sumEnd + len(joint) + 2
)

func checksum(p []byte) uint64 {
	return crc64.Checksum(p, crc64.MakeTable(crc64.ECMA))
}

// seal makes an envelope of a JSON object, which must have members, and bodies.
func seal(header []byte, bodies ...[]byte) (value []byte, sum uint64) {
	size := sumEnd + len(joint) + len(header)
	for _, b := range bodies {
		size += len(b)
	}
	value = make([]byte, sumEnd, size)
	value = append(value, joint...)
	value = append(value, header[1:]...)
	value = append(value, '\n')
	for _, b := range bodies {
		value = append(value, b...)
	}
	sum = checksum(value[sumEnd:])
	copy(value, magic)
	putSum(value[len(magic):sumEnd], sum)
	return value, sum
}

func putSum(dst []byte, sum uint64) {
	var raw [8]byte
	for i := range raw {
		raw[i] = byte(sum >> (56 - 8*i))
	}
	hex.Encode(dst, raw[:])
}

func formatSum(sum uint64) string {
	var digits [sumDigit]byte
	putSum(digits[:], sum)
	return string(digits[:])
}

// unseal checks an envelope and returns its JSON object and what follows it.
// body is a part of value.
func unseal(value []byte) (header, body []byte, sum uint64, err error) {
	if len(value) < minEnvelope {
		return nil, nil, 0, fmt.Errorf("truncated: only %d bytes", len(value))
	}
	if !bytes.HasPrefix(value, []byte(magic)) {
		return nil, nil, 0, fmt.Errorf("unknown format or version, starts with %q", value[:len(magic)])
	}
	sum = checksum(value[sumEnd:])
	if got := string(value[len(magic):sumEnd]); got != formatSum(sum) {
		return nil, nil, 0, fmt.Errorf("checksum mismatch: says %q, is %s (damaged or truncated)", got, formatSum(sum))
	}
	end := bytes.IndexByte(value, '\n')
	if end < sumEnd+len(joint) || !bytes.HasPrefix(value[sumEnd:], []byte(joint)) {
		return nil, nil, 0, errors.New("header is not a line of JSON")
	}
	header = make([]byte, 0, end)
	header = append(header, '{')
	header = append(header, value[sumEnd+len(joint):end]...)
	return header, value[end+1:], sum, nil
}

// unmarshalStrict refuses members that this version does not know: they may
// change the meaning of those that it knows.
func unmarshalStrict(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("header: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("header: more than one JSON value")
	}
	return nil
}
