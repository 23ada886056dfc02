package kvsnap

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// FuzzDecodeEntry gives the decoder values as they are, and again with a right
// checksum, so that what lies behind the checksum is reached, too. Whatever is
// accepted must survive being encoded again.
func FuzzDecodeEntry(f *testing.F) {
	key := testTask.entryKey(17)
	f.Add(encodeTest(f, testHeader(), []byte("delta")))
	claim := &header{Kind: KindClaim, Flow: "orders", Task: "0.3", N: 17, Generation: 4, Nonce: "00", Fresh: true}
	f.Add(encodeTest(f, claim))
	base := &header{
		Kind: KindBase, Flow: "orders", Task: "0.3", N: 17, Generation: 4, From: 15, Floor: 12, Head: testHead(9),
		Sections: []section{{Name: sectionBase, Raw: 10, Stored: 10, Set: "16-4-1", Chunks: 1, Sums: "0123456789abcdef"}},
	}
	f.Add(encodeTest(f, base))
	f.Add([]byte{})
	f.Add([]byte(magic))
	f.Add([]byte(`{"nf1":"0123456789abcdef","kind":"commit","sections":[{"stored":9223372036854775807}]}` + "\n"))
	f.Fuzz(func(t *testing.T, value []byte) {
		checkEntry(t, key, value)
		if len(value) >= minEnvelope {
			whole := bytes.Clone(value)
			copy(whole, magic)
			copy(whole[sumEnd:], joint)
			putSum(whole[len(magic):sumEnd], checksum(whole[sumEnd:]))
			checkEntry(t, key, whole)
		}
	})
}

func checkEntry(t *testing.T, key string, value []byte) {
	t.Helper()
	e, err := decodeEntry("orders", key, value)
	if err != nil {
		var damage *CorruptError
		if !errors.As(err, &damage) || damage.Key != key {
			t.Fatalf("error without a key: %v", err)
		}
		return
	}
	again, err := encodeEntry(&e.header, e.bodies...)
	if err != nil {
		t.Fatal(err)
	}
	e2, err := decodeEntry("orders", key, again)
	if err != nil {
		t.Fatalf("accepted once only: %v", err)
	}
	if diff := cmp.Diff(e.header, e2.header, cmpopts.EquateEmpty()); diff != "" {
		t.Fatal(diff)
	}
}

// FuzzDecodeChunk does the same for chunks.
func FuzzDecodeChunk(f *testing.F) {
	s := newStore(newFake(), testConfig())
	for _, piece := range [][]byte{{}, []byte("a"), bytes.Repeat([]byte("abc"), 300), noise(1, 300)} {
		item, err := s.encodeChunk(testTask, "17-3-1", &chunkSet{}, piece)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(item.Value)
	}
	f.Add([]byte(`{"nf1":"0123456789abcdef","kind":"chunk","flow":"orders","task":"0.3","set":"17-3-1","i":0,"raw":99999999999,"enc":"zstd"}` + "\n"))
	key := testTask.chunkKey("17-3-1", 0)
	check := func(t *testing.T, value []byte) {
		t.Helper()
		var set chunkSet
		raw, err := decodeChunk(s.codec, "orders", key, value, &set)
		var damage *CorruptError
		switch {
		case err != nil && (!errors.As(err, &damage) || damage.Key != key):
			t.Fatalf("error without a key: %v", err)
		case err != nil && set != chunkSet{}:
			t.Fatal("a bad chunk was counted")
		case err == nil && (set.count != 1 || set.raw != int64(len(raw)) || len(raw) > maxPiece):
			t.Fatalf("%d bytes, counted as %+v", len(raw), set)
		}
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		check(t, value)
		if len(value) >= minEnvelope {
			whole := bytes.Clone(value)
			copy(whole, magic)
			copy(whole[sumEnd:], joint)
			putSum(whole[len(magic):sumEnd], checksum(whole[sumEnd:]))
			check(t, whole)
		}
	})
}
