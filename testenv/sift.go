package testenv

import (
	"bytes"
	"slices"
	"strconv"
)

// sieve takes NATS messages out of the bytes of one direction of a connection.
type sieve struct {
	// part is the beginning of a line or message that has not come whole.
	part []byte
}

// sift returns what has come whole, without the messages that keep refuses.
func (s *sieve) sift(data []byte, keep func(subject string) bool) []byte {
	data = slices.Concat(s.part, data)
	kept := make([]byte, 0, len(data))
	for {
		n, subject := frame(data)
		if n == 0 {
			break
		}
		if subject == "" || keep == nil || keep(subject) {
			kept = append(kept, data[:n]...)
		}
		data = data[n:]
	}
	s.part = slices.Clone(data)
	return kept
}

// frame returns the length of the line at the beginning of data, with its payload if
// it is of a message, and the subject of that. The length is 0 if it has not come
// whole.
func frame(data []byte) (n int, subject string) {
	end := bytes.Index(data, []byte("\r\n"))
	if end < 0 {
		return 0, ""
	}
	n = end + 2
	fields := bytes.Fields(data[:end])
	if len(fields) < 3 {
		return n, ""
	}
	switch string(bytes.ToUpper(fields[0])) {
	case "PUB", "HPUB", "MSG", "HMSG":
	default:
		return n, ""
	}
	size, err := strconv.Atoi(string(fields[len(fields)-1]))
	if err != nil {
		return n, "" // it is for the receiver to complain
	}
	if n += size + 2; n > len(data) {
		return 0, ""
	}
	return n, string(fields[1])
}
