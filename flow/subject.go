package flow

import (
	"errors"
	"fmt"
	"strings"
)

// maxSubject bounds the subject of a result. A subject is a part of a line of
// the NATS protocol, of which a server takes 4,096 bytes; beyond that it closes
// the connection.
const maxSubject = 2048

var (
	errNoSubject  = errors.New("empty subject")
	errNotKVKey   = errors.New("not a key of a bucket: letters, digits and -/_=. are possible")
	errBadSubject = errors.New("not a subject to publish on: no empty tokens, wildcards, blanks and control characters, at most 2048 bytes")
	errNotTaken   = errors.New("the sink's Subjects do not have it")
)

// checkSubject finds the subject that no stream would take. A result is stored
// before it is published, so that one which can never be published would stop
// the flow for good; as an error of its record it becomes a dead letter.
func checkSubject(subject []byte) error {
	n := len(subject)
	if n > maxSubject {
		return fmt.Errorf("subject %q...: %w", subject[:64], errBadSubject)
	}
	start := 0
	for i := 0; i <= n; i++ {
		if i < n && subject[i] != '.' {
			if c := subject[i]; c <= ' ' || c == 0x7f {
				return fmt.Errorf("subject %q: %w", subject, errBadSubject)
			}
			continue
		}
		if i == start || i == start+1 && (subject[start] == '*' || subject[start] == '>') {
			return fmt.Errorf("subject %q: %w", subject, errBadSubject)
		}
		start = i + 1
	}
	return nil
}

// checkStreamSubject is [checkSubject] for a sink that takes what matches one of
// the patterns.
func checkStreamSubject(patterns []string) func(subject []byte) error {
	// Nearly all sinks have one pattern, a prefix and a token.
	prefix, oneToken := strings.CutSuffix(patterns[0], "*")
	oneToken = oneToken && strings.HasSuffix(prefix, ".") && !strings.ContainsAny(prefix, "*>")
	return func(subject []byte) error {
		if n := len(prefix); oneToken && len(subject) <= maxSubject && len(subject) > n &&
			string(subject[:n]) == prefix && isToken(subject[n:]) {
			return nil
		}
		if err := checkSubject(subject); err != nil {
			return err
		}
		for _, p := range patterns {
			if matches(p, subject) {
				return nil
			}
		}
		return fmt.Errorf("subject %q: %w", subject, errNotTaken)
	}
}

// isToken reports whether t, which is not empty, is one token of a subject to
// publish on.
func isToken(t []byte) bool {
	for _, c := range t {
		if c <= ' ' || c == '.' || c == 0x7f {
			return false
		}
	}
	return len(t) > 1 || t[0] != '*' && t[0] != '>'
}

// checkKVSubject is [checkSubject] for the key that follows a prefix.
func checkKVSubject(prefix string) func(subject []byte) error {
	return func(subject []byte) error {
		if err := checkSubject(subject); err != nil {
			return err
		}
		for _, c := range subject[len(prefix):] {
			if !kvByte(c) && c != '=' && c != '.' {
				return fmt.Errorf("key %q: %w", subject[len(prefix):], errNotKVKey)
			}
		}
		return nil
	}
}

// matches reports whether a pattern takes a subject. Both are valid.
func matches(pattern string, subject []byte) bool {
	p, s := 0, 0
	for p < len(pattern) {
		end := p == len(pattern)-1 || pattern[p+1] == '.'
		switch {
		case pattern[p] == '>' && end && (p == 0 || pattern[p-1] == '.'):
			return s < len(subject)
		case pattern[p] == '*' && end && (p == 0 || pattern[p-1] == '.'):
			for s < len(subject) && subject[s] != '.' {
				s++
			}
			p++
		case s < len(subject) && subject[s] == pattern[p]:
			p, s = p+1, s+1
		default:
			return false
		}
	}
	return s == len(subject)
}

// validPattern reports whether p is a subject, maybe with wildcards.
func validPattern(p string) bool {
	tokens := strings.Split(p, ".")
	for i, t := range tokens {
		if t == "*" || t == ">" && i == len(tokens)-1 {
			tokens[i] = "w"
		}
	}
	return checkSubject([]byte(strings.Join(tokens, "."))) == nil
}

// validBucket reports whether a KV bucket can have the name.
func validBucket(name string) bool {
	for i := range len(name) {
		if c := name[i]; !kvByte(c) || c == '/' {
			return false
		}
	}
	return name != ""
}

// validStream reports whether a stream can have the name.
func validStream(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r == 0x7f || strings.ContainsRune(".*>/\\", r)
	})
}
