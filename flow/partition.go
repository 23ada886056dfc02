package flow

import "unicode/utf8"

// Partition returns the key group of a key: FNV-1a (32 bit) of its bytes modulo
// n. It is the same function as the {{partition(n,tokens)}} mapping of
// nats-server, so that a stream partitioned by the server and one partitioned
// here agree.
//
// n must be positive.
func Partition(key string, n int) int {
	const (
		offset = 2166136261
		prime  = 16777619
	)
	h := uint32(offset)
	for i := range len(key) {
		h ^= uint32(key[i])
		h *= prime
	}
	return int(h % uint32(n))
}

// AppendToken appends s to dst as one token of a NATS subject. Bytes that a
// token cannot hold (dots, wildcards, white space, control bytes) and '=' are
// written as '=' and two hexadecimal digits; an empty string is written as a
// lone '='. So are bytes that are not valid UTF-8, which tools could not show or
// put into JSON. Distinct strings give distinct tokens.
func AppendToken(dst []byte, s string) []byte {
	n := 0
	for n < len(s) && s[n] < utf8.RuneSelf && subjectByte(s[n]) {
		n++
	}
	if n > 0 && n == len(s) {
		return append(dst, s...)
	}
	return appendEscaped(dst, s, subjectByte)
}

// AppendKVKey appends s to dst as one token of a key of a NATS KV bucket, whose
// alphabet is smaller than that of a subject: bytes other than letters, digits,
// '-', '_' and '/' are escaped as by [AppendToken].
func AppendKVKey(dst []byte, s string) []byte {
	return appendEscaped(dst, s, kvByte)
}

func appendEscaped(dst []byte, s string, ok func(byte) bool) []byte {
	const hex = "0123456789ABCDEF"
	if s == "" {
		return append(dst, '=')
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= utf8.RuneSelf && ok(c) {
			if _, n := utf8.DecodeRuneInString(s[i:]); n > 1 {
				dst = append(dst, s[i:i+n]...)
				i += n - 1
				continue
			}
		} else if ok(c) {
			dst = append(dst, c)
			continue
		}
		dst = append(dst, '=', hex[c>>4], hex[c&15])
	}
	return dst
}

func subjectByte(c byte) bool {
	switch c {
	case '.', '*', '>', '=', 0x7f:
		return false
	}
	return c > ' '
}

func kvByte(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	return c == '-' || c == '_' || c == '/'
}
