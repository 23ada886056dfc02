package kvsnap

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func testCodec(t testing.TB) *codec {
	t.Helper()
	c, err := newCodec()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func testHeader() *header {
	return &header{
		Kind: KindCommit, Flow: "orders", Task: testTask.String(), N: 17, Generation: 3, Owner: "w1",
		Time: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Head: testHead(123), Outputs: 2,
		Sections: []section{
			{Name: sectionDelta, Raw: 5, Stored: 5, Encoding: encodingNone},
			{Name: sectionOutbox, Raw: 3000, Stored: 2900, Set: "17-3-1", Chunks: 3, Sums: strings.Repeat("a", sumDigit)},
		},
	}
}

func encodeTest(t testing.TB, h *header, bodies ...[]byte) []byte {
	t.Helper()
	value, err := encodeEntry(h, bodies...)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestEntry_roundTrip(t *testing.T) {
	h := testHeader()
	value := encodeTest(t, h, []byte("delta"))
	e, err := decodeEntry("orders", testTask.entryKey(17), value)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*h, e.header); diff != "" {
		t.Error(diff)
	}
	if string(e.bodies[0]) != "delta" || e.bodies[1] != nil {
		t.Errorf("bodies are %q", e.bodies)
	}
	line, _, _ := bytes.Cut(value, []byte("\n"))
	if !json.Valid(line) {
		t.Errorf("header is not JSON: %s", line)
	}
}

func TestEntry_anyFlippedBitShows(t *testing.T) {
	value := encodeTest(t, testHeader(), []byte("delta"))
	for i := range value {
		for bit := range 8 {
			bad := bytes.Clone(value)
			bad[i] ^= 1 << bit
			_ = assertCorrupt(t, "log.0.3.17", bad)
		}
	}
	for n := range value {
		_ = assertCorrupt(t, "log.0.3.17", value[:n])
	}
	_ = assertCorrupt(t, "log.0.3.17", append(bytes.Clone(value), 0))
}

func assertCorrupt(t *testing.T, key string, value []byte) *CorruptError {
	t.Helper()
	_, err := decodeEntry("orders", key, value)
	var damage *CorruptError
	if !errors.As(err, &damage) || damage.Key != key || !errors.Is(err, ErrSnapshotCorrupt) {
		t.Fatalf("decode of %q: got %v, want a CorruptError", value, err)
	}
	return damage
}

// A value that is whole but does not belong where it is, or says what this
// version does not know.
func TestEntry_refuses(t *testing.T) {
	change := func(f func(*header)) []byte {
		h := testHeader()
		f(h)
		return encodeTest(t, h, []byte("delta"))
	}
	raw := func(line, body string) []byte {
		value, _ := seal([]byte(line), []byte(body))
		return value
	}
	good := `{"kind":"claim","flow":"orders","task":"0.3","n":17,"generation":1,"owner":"","time":"2026-01-02T03:04:05Z","head":{}`
	if _, err := decodeEntry("orders", "log.0.3.17", raw(good+"}", "")); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		key    string
		value  []byte
		reason string
	}{
		"newer version":       {value: bytes.Replace(raw(good+"}", ""), []byte("nf1"), []byte("nf2"), 1), reason: "unknown format or version"},
		"unknown member":      {value: raw(good+`,"extra":1}`, ""), reason: "extra"},
		"unknown in head":     {value: raw(strings.Replace(good, `{}`, `{"extra":1}`, 1)+"}", ""), reason: "extra"},
		"two values":          {value: raw(good+"}{}", ""), reason: "more than one"},
		"no newline":          {value: bytes.TrimSuffix(raw(good+"}", ""), []byte("\n")), reason: "checksum"},
		"another key":         {key: "log.0.3.18", value: raw(good+"}", ""), reason: "is entry 17"},
		"another task":        {key: "log.0.4.17", value: raw(good+"}", ""), reason: `task "0.3"`},
		"no key":              {key: "log.0.3.017", value: raw(good+"}", ""), reason: "not the key"},
		"negative task":       {key: "log.0.-3.17", value: raw(good+"}", ""), reason: "not the key"},
		"body of a claim":     {value: raw(good+"}", "x"), reason: "behind the last section"},
		"another flow":        {value: change(func(h *header) { h.Flow = "other" }), reason: `flow "other"`},
		"unknown kind":        {value: change(func(h *header) { h.Kind = "merge" }), reason: `kind "merge"`},
		"generation 0":        {value: change(func(h *header) { h.Generation = 0 }), reason: "generation 0"},
		"published beyond":    {value: change(func(h *header) { h.Head.Published = 18 }), reason: "published 18"},
		"section twice":       {value: change(func(h *header) { h.Sections[1] = h.Sections[0] }), reason: "repeated"},
		"section unknown":     {value: change(func(h *header) { h.Sections[0].Name = "index" }), reason: `"index"`},
		"section of a base":   {value: change(func(h *header) { h.Sections[0].Name = sectionBase }), reason: `"base"`},
		"order":               {value: change(func(h *header) { h.Sections[0], h.Sections[1] = h.Sections[1], h.Sections[0] }), reason: "order"},
		"more than is there":  {value: change(func(h *header) { h.Sections[0].Stored = 6 }), reason: "only 5 are there"},
		"less than is there":  {value: change(func(h *header) { h.Sections[0].Stored = 4 }), reason: "1 bytes behind"},
		"negative size":       {value: change(func(h *header) { h.Sections[0].Stored = -1 }), reason: "negative"},
		"raw beyond bounds":   {value: change(func(h *header) { h.Sections[0].Raw = maxPiece + 1 }), reason: "neither"},
		"chunks out of bound": {value: change(func(h *header) { h.Sections[1].Raw = 3*maxPiece + 1 }), reason: "out of bounds"},
		"base beyond itself": {value: change(func(h *header) {
			h.Kind, h.From, h.Sections = KindBase, 17, []section{{Name: sectionBase}}
		}), reason: "base of entries up to 17"},
		"base with floor beyond from": {value: change(func(h *header) {
			h.Kind, h.From, h.Floor, h.Sections = KindBase, 5, 6, []section{{Name: sectionBase}}
		}), reason: "floor 6"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.key == "" {
				tt.key = "log.0.3.17"
			}
			if damage := assertCorrupt(t, tt.key, tt.value); !strings.Contains(damage.Reason, tt.reason) {
				t.Errorf("reason is %q, want one with %q", damage.Reason, tt.reason)
			}
		})
	}
}

func TestChunk_anyFlippedBitShows(t *testing.T) {
	s := newStore(newFake(), testConfig())
	var set chunkSet
	item, err := s.encodeChunk(testTask, "17-3-1", &set, bytes.Repeat([]byte("abc"), 100))
	if err != nil {
		t.Fatal(err)
	}
	var read chunkSet
	raw, err := decodeChunk(s.codec, "orders", item.Key, item.Value, &read)
	if err != nil || len(raw) != 300 || !read.matches(set.section("delta", "17-3-1")) {
		t.Fatalf("decode: %d bytes, %v", len(raw), err)
	}
	check := func(key string, value []byte) {
		t.Helper()
		var damage *CorruptError
		if _, err := decodeChunk(s.codec, "orders", key, value, &chunkSet{}); !errors.As(err, &damage) || damage.Key != key {
			t.Fatalf("decode of %q at %s: got %v, want a CorruptError", value, key, err)
		}
	}
	for i := range item.Value {
		for bit := range 8 {
			bad := bytes.Clone(item.Value)
			bad[i] ^= 1 << bit
			check(item.Key, bad)
		}
		check(item.Key, item.Value[:i])
	}
	for _, key := range []string{"chunk.0.3.17-3-1.1", "chunk.0.3.17-3-2.0", "chunk.0.4.17-3-1.0", "chunk.0.3.0", "log.0.3.17"} {
		check(key, item.Value)
	}
}

// Compressed bytes that unpack to more than the header says are refused without
// the memory being taken.
func TestCodec_boundsItsOutput(t *testing.T) {
	c := testCodec(t)
	bomb, encoding := c.appendPacked(nil, make([]byte, maxPiece))
	if encoding != encodingZstd || len(bomb) > 1<<14 {
		t.Fatalf("%d bytes, %s", len(bomb), encoding)
	}
	many := bytes.Repeat(bomb, 20)
	for _, size := range []int64{0, 100, 1 << 20, maxPiece - 1} {
		for _, stored := range [][]byte{bomb, many} {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if _, err := c.unpack(stored, encodingZstd, size); err == nil {
				t.Errorf("%d bytes unpacked where %d were announced", maxPiece, size)
			}
			runtime.ReadMemStats(&after)
			if got := after.TotalAlloc - before.TotalAlloc; got > uint64(size)+4<<20 {
				t.Errorf("took %d bytes for an announced size of %d", got, size)
			}
		}
	}
	if _, err := c.unpack(bomb, encodingZstd, maxPiece+1); err == nil {
		t.Error("size beyond the format's bound was accepted")
	}
	if _, err := c.unpack(bomb, "lz4", maxPiece); err == nil {
		t.Error("unknown encoding was accepted")
	}
	if raw, err := c.unpack(bomb, encodingZstd, maxPiece); err != nil || len(raw) != maxPiece {
		t.Errorf("got %d bytes, %v", len(raw), err)
	}
}

func TestCodec_compressesWhenItPays(t *testing.T) {
	c := testCodec(t)
	for _, tt := range []struct {
		raw  []byte
		want string
	}{
		{nil, encodingNone},
		{bytes.Repeat([]byte("a"), minCompress-1), encodingNone},
		{bytes.Repeat([]byte("a"), minCompress), encodingZstd},
		{noise(1, 10000), encodingNone},
	} {
		out, encoding := c.appendPacked([]byte("before"), tt.raw)
		if encoding != tt.want {
			t.Errorf("%d bytes: %s, want %s", len(tt.raw), encoding, tt.want)
		}
		raw, err := c.unpack(out[len("before"):], encoding, int64(len(tt.raw)))
		if err != nil || !bytes.Equal(raw, tt.raw) {
			t.Errorf("%d bytes: %v", len(tt.raw), err)
		}
	}
}

func TestSplitter(t *testing.T) {
	bodies := [][]byte{nil, []byte("a"), noise(1, 127), noise(2, 128), nil, noise(3, 20000), []byte("end"), nil}
	var stream []byte
	for _, b := range bodies {
		stream = append(stream, uvarint(len(b))...)
		stream = append(stream, b...)
	}
	for _, size := range []int{1, 2, 3, 128, 1000, len(stream)} {
		var got [][]byte
		s := splitter{limit: int64(len(stream)), emit: func(b []byte) error { got = append(got, b); return nil }}
		for p := stream; len(p) > 0; p = p[min(size, len(p)):] {
			if err := s.feed(p[:min(size, len(p))]); err != nil {
				t.Fatal(err)
			}
		}
		if !s.empty() || !cmp.Equal(got, bodies, cmp.Comparer(equalBytes)) {
			t.Errorf("pieces of %d: %d bodies, empty %v", size, len(got), s.empty())
		}
	}
	s := splitter{limit: 100, emit: func([]byte) error { return nil }}
	if err := s.feed(uvarint(101)); !errors.Is(err, ErrSnapshotCorrupt) {
		t.Errorf("body longer than its base: %v", err)
	}
	s = splitter{limit: 100}
	if err := s.feed(bytes.Repeat([]byte{0xff}, 20)); !errors.Is(err, ErrSnapshotCorrupt) {
		t.Errorf("endless length: %v", err)
	}
}

func uvarint(n int) []byte { return binary.AppendUvarint(nil, uint64(n)) }
