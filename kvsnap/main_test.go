package kvsnap

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

var testTask = TaskID{Stage: 0, Partition: 3}

// state is a keyed state as a worker would have it. A delta and a slice of a
// base are the same: (key, value) pairs, an empty value deletes.
type state map[string]string

func (s state) load(body []byte) error {
	for len(body) > 0 {
		k, n := cutString(body)
		v, m := cutString(body[n:])
		if n == 0 || m == 0 {
			return fmt.Errorf("bad pair in a body of %d bytes", len(body))
		}
		body = body[n+m:]
		if v == "" {
			delete(s, k)
		} else {
			s[k] = v
		}
	}
	return nil
}

func cutString(p []byte) (string, int) {
	n, used := binary.Uvarint(p)
	if used <= 0 || uint64(len(p)-used) < n {
		return "", 0
	}
	return string(p[used : used+int(n)]), used + int(n)
}

func pair(dst []byte, k, v string) []byte {
	dst = append(binary.AppendUvarint(dst, uint64(len(k))), k...)
	return append(binary.AppendUvarint(dst, uint64(len(v))), v...)
}

func pairs(m map[string]string) []byte {
	var out []byte
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = pair(out, k, m[k])
	}
	return out
}

// addTo adds the state to a base in slices of about size bytes.
func (s state) addTo(b *Base, size int) {
	var body []byte
	for _, k := range slices.Sorted(maps.Keys(s)) {
		if body = pair(body, k, s[k]); len(body) >= size {
			b.Add(body)
			body = body[:0]
		}
	}
	if len(body) > 0 {
		b.Add(body)
	}
}

// noise is n bytes that do not compress, the same for the same seed.
func noise(seed uint64, n int) []byte {
	out := make([]byte, 0, n+8)
	for x := seed*0x9e3779b97f4a7c15 + 1; len(out) < n; {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		out = binary.LittleEndian.AppendUint64(out, x)
	}
	return out[:n]
}

func testConfig() Config {
	return Config{Flow: "orders", Owner: "w1", ChunkSize: 1000, MinBaseBytes: 2000, MaxEntries: 20}
}

func mustClaim(t testing.TB, s *Store, id TaskID) (*Log, Recovered, state) {
	t.Helper()
	st := state{}
	l, r, err := s.Claim(t.Context(), id, st.load)
	if err != nil {
		t.Fatalf("Claim: %v", err)
	}
	return l, r, st
}

func mustAppend(t testing.TB, l *Log, c Commit) uint64 {
	t.Helper()
	n, err := l.Append(t.Context(), c)
	if err != nil {
		t.Fatalf("Append: %v", err)
	}
	return n
}

func mustBase(t testing.TB, l *Log, s state, h Head) {
	t.Helper()
	b := l.BeginBase()
	s.addTo(b, 300)
	if err := b.Finish(t.Context(), h); err != nil {
		t.Fatalf("Finish: %v", err)
	}
}

// testHead is a head with everything in it.
func testHead(seq uint64) Head {
	return Head{
		Offsets: map[string]uint64{"ORDERS": seq}, Watermarks: map[string]int64{"ORDERS": int64(seq) * 1e9},
		Epoch: 2, Sinks: map[string]uint64{"TOTALS": seq / 2}, Records: seq, Results: seq, DeadLetters: 1,
	}
}

// probeAt fails at the pass of a point after nth others.
func probeAt(point string, nth int, err error) func(context.Context, string, TaskID) error {
	var passed atomic.Int64
	return func(_ context.Context, p string, _ TaskID) error {
		if p == point && passed.Add(1) == int64(nth)+1 {
			return err
		}
		return nil
	}
}

func equalBytes(a, b []byte) bool { return bytes.Equal(a, b) }
