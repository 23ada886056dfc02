package kvsnap

import (
	"encoding/binary"

	"natsflow/bus"
)

// setReader puts the chunks of one set into order and feeds their raw bytes on.
type setReader struct {
	store *Store
	task  TaskID
	sec   section
	feed  func(raw []byte) error
	read  chunkSet
	// ahead has chunks that came before an earlier one: a batch that was sent
	// twice because the first answer was lost may be stored out of order.
	ahead map[int]bus.Item
}

func newSetReader(r *recovery, sec section, feed func([]byte) error) *setReader {
	return &setReader{store: r.store, task: r.task, sec: sec, feed: feed, ahead: map[int]bus.Item{}}
}

// take accepts chunk i, in any order.
func (s *setReader) take(i int, item bus.Item) error {
	switch {
	case i >= s.sec.Chunks:
		return corrupt(item.Key, "the set has only %d chunks", s.sec.Chunks)
	case i < s.read.count:
		return nil // stored twice, the bytes are the same
	case i > s.read.count:
		s.ahead[i] = item
		return nil
	}
	for ok := true; ok; item, ok = s.ahead[s.read.count] {
		delete(s.ahead, s.read.count)
		raw, err := decodeChunk(s.store.codec, s.store.cfg.Flow, item.Key, item.Value, &s.read)
		if err != nil {
			return err
		}
		if err := s.feed(raw); err != nil {
			return err
		}
	}
	return nil
}

// end sees that the set was complete.
func (s *setReader) end() error {
	if s.read.count < s.sec.Chunks {
		return corrupt(s.task.chunkKey(s.sec.Set, s.read.count), "chunk is missing, the set has %d", s.sec.Chunks)
	}
	if !s.read.matches(s.sec) {
		return corrupt(s.task.chunkKey(s.sec.Set, 0), "the chunks of this set are not the ones that were written")
	}
	return nil
}

// splitter cuts the raw bytes of a base into the bodies that were added. Each is
// written as its length, a uvarint, and its bytes; pieces end anywhere.
type splitter struct {
	key    string // of the base, for errors
	limit  int64  // no body is longer
	emit   func(body []byte) error
	length []byte // of a uvarint that is not complete
	body   []byte // that is not complete
	want   int    // its length
	inBody bool
}

func (s *splitter) empty() bool { return !s.inBody && len(s.length) == 0 }

func (s *splitter) feed(p []byte) error {
	for len(p) > 0 {
		if !s.inBody {
			n, used, err := s.uvarint(p)
			if err != nil {
				return err
			}
			if p = p[used:]; n < 0 {
				return nil // the rest comes with the next piece
			}
			s.want, s.inBody = n, true
		}
		var body []byte
		switch missing := s.want - len(s.body); {
		case missing > len(p):
			if s.body == nil {
				s.body = make([]byte, 0, s.want)
			}
			s.body = append(s.body, p...)
			return nil
		case s.body == nil: // whole in this piece: no copy
			body, p = p[:missing:missing], p[missing:]
		default:
			body, p = append(s.body, p[:missing]...), p[missing:]
		}
		s.body, s.inBody = nil, false
		if err := s.emit(body); err != nil {
			return err
		}
	}
	return nil
}

// uvarint reads a length, which may have begun in an earlier piece; -1 if it
// does not end in this one.
func (s *splitter) uvarint(p []byte) (n, used int, err error) {
	for used < len(p) && len(s.length) < binary.MaxVarintLen64 {
		c := p[used]
		used++
		s.length = append(s.length, c)
		if c < 0x80 {
			v, k := binary.Uvarint(s.length)
			if k <= 0 || v > uint64(s.limit) {
				return 0, 0, corrupt(s.key, "a body of %d bytes in a base of %d", v, s.limit)
			}
			s.length = s.length[:0]
			return int(v), used, nil
		}
	}
	if len(s.length) == binary.MaxVarintLen64 {
		return 0, 0, corrupt(s.key, "endless length of a body")
	}
	return -1, used, nil
}
