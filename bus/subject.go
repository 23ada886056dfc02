package bus

import (
	"errors"
	"strings"
)

// isClass is errors.Is under a name that reads well in conditions on classes.
func isClass(err, class error) bool { return errors.Is(err, class) }

// subjectMatches reports whether every subject that s stands for is taken by pattern; both may have wildcards.
func subjectMatches(pattern, s string) bool {
	for {
		p, prest, pmore := strings.Cut(pattern, ".")
		t, trest, tmore := strings.Cut(s, ".")
		if p == ">" {
			return t != ""
		}
		if t == ">" || p != "*" && p != t {
			return false
		}
		if pmore != tmore {
			return false
		}
		if !pmore {
			return true
		}
		pattern, s = prest, trest
	}
}

// validSubject reports whether a message can be published to s: tokens that are not empty, no wildcards, no blanks or
// control characters, which would break the protocol.
func validSubject(s string) bool {
	if s == "" || s[0] == '.' || s[len(s)-1] == '.' {
		return false
	}
	start := 0
	for i := 0; i <= len(s); i++ {
		if i < len(s) && s[i] != '.' {
			if s[i] <= ' ' || s[i] == 0x7f {
				return false
			}
			continue
		}
		if i == start || i == start+1 && (s[start] == '*' || s[start] == '>') {
			return false
		}
		start = i + 1
	}
	return true
}
