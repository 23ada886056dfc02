package flow_test

import (
	"hash/fnv"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"natsflow/flow"
)

// The standard library's FNV-1a is what nats-server uses for {{partition(n)}}.
func TestPartition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key := anyString().Draw(t, "key")
		n := rapid.IntRange(1, flow.MaxPartitions).Draw(t, "n")
		h := fnv.New32a()
		_, _ = h.Write([]byte(key))
		if got, want := flow.Partition(key, n), int(h.Sum32()%uint32(n)); got != want {
			t.Fatalf("Partition(%q, %d) = %d, want %d", key, n, got, want)
		}
	})
}

// Partitions are stored: a key must never move.
func TestPartition_IsStable(t *testing.T) {
	for key, want := range map[string]int{"": 5, "ATL": 12, "ORD": 0, "customer-1": 7, "ä": 2} {
		if got := flow.Partition(key, 16); got != want {
			t.Errorf("Partition(%q, 16) = %d, want %d", key, got, want)
		}
	}
}

func TestAppendToken(t *testing.T) {
	for in, want := range map[string][2]string{
		"":         {"=", "="},
		"ATL":      {"ATL", "ATL"},
		"a.b":      {"a=2Eb", "a=2Eb"},
		"=":        {"=3D", "=3D"},
		"a b\n":    {"a=20b=0A", "a=20b=0A"},
		"*":        {"=2A", "=2A"},
		">":        {"=3E", "=3E"},
		"$a/b_c-d": {"$a/b_c-d", "=24a/b_c-d"},
		"ä":        {"ä", "=C3=A4"},
		"a\xffä":   {"a=FFä", "a=FF=C3=A4"},
		"\xc3":     {"=C3", "=C3"},
		"�":        {"�", "=EF=BF=BD"},
		"\x00\x7f": {"=00=7F", "=00=7F"},
	} {
		if got := string(flow.AppendToken(nil, in)); got != want[0] {
			t.Errorf("AppendToken(%q) = %q, want %q", in, got, want[0])
		}
		if got := string(flow.AppendKVKey([]byte("x."), in)); got != "x."+want[1] {
			t.Errorf("AppendKVKey(%q) = %q, want %q", in, got, want[1])
		}
	}
}

// Distinct strings have distinct tokens, since a token can be read back; and each
// is a token.
func TestAppendToken_Injective(t *testing.T) {
	kvKey := regexp.MustCompile(`^[-/_=a-zA-Z0-9]+$`)
	rapid.Check(t, func(t *rapid.T) {
		a, b := anyString().Draw(t, "a"), anyString().Draw(t, "b")
		for name, appendTo := range map[string]func([]byte, string) []byte{"AppendToken": flow.AppendToken, "AppendKVKey": flow.AppendKVKey} {
			ta, tb := string(appendTo(nil, a)), string(appendTo(nil, b))
			if (ta == tb) != (a == b) {
				t.Fatalf("%s: %q is %q, %q is %q", name, a, ta, b, tb)
			}
			if got := unescape(t, ta); got != a {
				t.Fatalf("%s(%q) = %q, which reads back as %q", name, a, ta, got)
			}
			if ta == "" || strings.ContainsAny(ta, ".*> \t\r\n\x00\x7f") || !utf8.ValidString(ta) {
				t.Fatalf("%s(%q) = %q is not a token", name, a, ta)
			}
			if name == "AppendKVKey" && !kvKey.MatchString(ta) {
				t.Fatalf("%s(%q) = %q is not a key of a bucket", name, a, ta)
			}
		}
	})
}

// anyString has any bytes, and often those that matter here.
func anyString() *rapid.Generator[string] {
	special := rapid.StringOfN(rapid.RuneFrom([]rune(`=.*>23AEa0 ä`)), 0, 6, -1)
	return rapid.OneOf(special, rapid.String(), rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
}

func unescape(t *rapid.T, s string) string {
	if s == "=" {
		return ""
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '=' {
			b.WriteByte(s[i])
			continue
		}
		c, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			t.Fatalf("token %q: %v", s, err)
		}
		b.WriteByte(byte(c))
		i += 2
	}
	return b.String()
}
