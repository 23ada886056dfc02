package kvsnap

import (
	"encoding/binary"
	"encoding/json"
	"fmt"

	"natsflow/bus"
)

const kindChunk = "chunk"

// chunkHeader is the first line of a chunk, as JSON.
type chunkHeader struct {
	Kind     string `json:"kind"`
	Flow     string `json:"flow"`
	Task     string `json:"task"`
	Set      string `json:"set"`
	I        int    `json:"i"`
	Raw      int64  `json:"raw"`
	Encoding string `json:"enc"`
}

// chunkSet sums up the chunks of one set while they are made or read.
type chunkSet struct {
	count       int
	raw, stored int64
	sums        uint64 // the checksums of the chunks, folded
}

func (c *chunkSet) add(raw, stored int, sum uint64) {
	c.count++
	c.raw += int64(raw)
	c.stored += int64(stored)
	var fold [16]byte
	binary.BigEndian.PutUint64(fold[:8], c.sums)
	binary.BigEndian.PutUint64(fold[8:], sum)
	c.sums = checksum(fold[:])
}

// section describes the finished set.
func (c *chunkSet) section(name, set string) section {
	if c.count == 0 {
		return section{Name: name, Encoding: encodingNone}
	}
	return section{Name: name, Raw: c.raw, Stored: c.stored, Set: set, Chunks: c.count, Sums: formatSum(c.sums)}
}

// matches tells whether the set that was read is the one that was written.
func (c *chunkSet) matches(s section) bool {
	return c.count == s.Chunks && c.raw == s.Raw && c.stored == s.Stored && formatSum(c.sums) == s.Sums
}

// encodeChunk makes the next chunk of a set. The item does not refer to piece.
func (s *Store) encodeChunk(t TaskID, set string, c *chunkSet, piece []byte) (bus.Item, error) {
	packed, encoding := s.codec.appendPacked(nil, piece)
	line, err := json.Marshal(chunkHeader{
		Kind: kindChunk, Flow: s.cfg.Flow, Task: t.String(), Set: set, I: c.count,
		Raw: int64(len(piece)), Encoding: encoding,
	})
	if err != nil {
		return bus.Item{}, fmt.Errorf("encode chunk %s: %w", t.chunkKey(set, c.count), err)
	}
	value, sum := seal(line, packed)
	item := bus.Item{Key: t.chunkKey(set, c.count), Value: value}
	c.add(len(piece), len(packed), sum)
	return item, nil
}

// decodeChunk checks the value of a chunk's key and adds it to its set. It must
// be the next one of the set. Every error is a *CorruptError.
func decodeChunk(codec *codec, flow, key string, value []byte, c *chunkSet) ([]byte, error) {
	task, set, i, ok := parseChunkKey(key)
	if !ok {
		return nil, corrupt(key, "not the key of a chunk")
	}
	line, body, sum, err := unseal(value)
	if err != nil {
		return nil, corrupt(key, "%v", err)
	}
	var h chunkHeader
	if err := unmarshalStrict(line, &h); err != nil {
		return nil, corrupt(key, "%v", err)
	}
	switch {
	case h.Kind != kindChunk:
		return nil, corrupt(key, "unknown kind %q", h.Kind)
	case h.Flow != flow || h.Task != task.String() || h.Set != set || h.I != i:
		return nil, corrupt(key, "is chunk %d of set %q of task %q of flow %q", h.I, h.Set, h.Task, h.Flow)
	case i != c.count:
		return nil, corrupt(key, "read where chunk %d was expected", c.count)
	}
	raw, err := codec.unpack(body, h.Encoding, h.Raw)
	if err != nil {
		return nil, corrupt(key, "%v", err)
	}
	c.add(len(raw), len(body), sum)
	return raw, nil
}
