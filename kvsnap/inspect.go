package kvsnap

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"natsflow/bus"
)

// TaskInfo is what the log of a task says, without its state being read.
type TaskInfo struct {
	Task TaskID
	// Kind, N, Generation, Owner, Time and Head of the last entry.
	Kind       string
	N          uint64
	Generation uint64
	Owner      string
	Time       time.Time
	Head       Head
	// Entries and Chunks of the task in the bucket, and Bytes of both. Chunks of
	// a base that is being written, or was given up, are among them.
	Entries int
	Bytes   int64
	Chunks  int
	// Base is the number of the last base, 0 if there is none, and BaseBytes
	// its size as stored.
	Base      uint64
	BaseBytes int64
	// Problem is what is wrong with the log, "" if nothing that can be seen
	// without the chunks and without large entries before the last one.
	Problem string
}

// EntryInfo is one entry of a log.
type EntryInfo struct {
	Key        string
	Kind       string
	N          uint64
	Generation uint64
	Owner      string
	Time       time.Time
	Head       Head
	// Outputs of a commit.
	Outputs int
	// From and Floor of a base.
	From, Floor uint64
	// Bytes of the value in the bucket.
	Bytes int64
	// Sections of bodies, in the entry or in chunks.
	Sections []SectionInfo
	// Problem is what is wrong with the entry, "" if nothing; the rest is
	// empty then, except Key and Bytes.
	Problem string
}

// SectionInfo is a body of an entry.
type SectionInfo struct {
	// Name is "delta", "outbox" or "base".
	Name string
	// Raw and Stored are its sizes in bytes before and after compression.
	Raw, Stored int64
	// Chunks is the number of its chunks and Set their name; 0 and "" if it is
	// in the entry.
	Chunks int
	Set    string
}

// Head returns what the log of a task says last, from the last entry alone. A later
// call never returns lower positions. It returns bus.ErrNotFound if the task has no
// log.
func (s *Store) Head(ctx context.Context, t TaskID) (Head, error) {
	if s.err != nil {
		return Head{}, s.err
	}
	item, err := s.bucket.Last(ctx, t.logFilter())
	if err != nil {
		return Head{}, fmt.Errorf("read the head of task %s: %w", t, err)
	}
	e, err := s.decodeItem(item)
	if err != nil {
		return Head{}, fmt.Errorf("read the head of task %s: %w", t, err)
	}
	return e.Head, nil
}

// Entries lists the entries of one task, ascending. It returns bus.ErrNotFound
// if the task has no log. A damaged entry is listed with its Problem.
func (s *Store) Entries(ctx context.Context, t TaskID) ([]EntryInfo, error) {
	if err := errors.Join(s.err, t.validate()); err != nil {
		return nil, err
	}
	var list []EntryInfo
	err := s.readLog(ctx, t.logFilter(), func(_ TaskID, item bus.Item, e *entry, damage error) {
		list = append(list, entryInfo(item, e, damage))
	})
	if err == nil && len(list) == 0 {
		err = bus.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("list entries of task %s: %w", t, err)
	}
	return list, nil
}

func entryInfo(item bus.Item, e *entry, damage error) EntryInfo {
	info := EntryInfo{Key: item.Key, Bytes: int64(len(item.Value))}
	if damage != nil {
		info.Problem = damage.Error()
		return info
	}
	info.Kind, info.N, info.Generation, info.Owner, info.Time = e.Kind, e.N, e.Generation, e.Owner, e.Time
	info.Head, info.Outputs, info.From, info.Floor = e.Head, e.Outputs, e.From, e.Floor
	for _, s := range e.Sections {
		info.Sections = append(info.Sections, SectionInfo{Name: s.Name, Raw: s.Raw, Stored: s.Stored, Chunks: s.Chunks, Set: s.Set})
	}
	return info
}

// readLog reads the entries of filter up to the one that is last now.
func (s *Store) readLog(ctx context.Context, filter string, fn func(t TaskID, item bus.Item, e *entry, damage error)) error {
	last, err := s.bucket.Last(ctx, filter)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return s.bucket.Read(ctx, []string{filter}, 0, last.Seq, func(item bus.Item) error {
		t, _, ok := parseEntryKey(item.Key)
		if !ok {
			return strangeKey(item.Key)
		}
		e, damage := s.decodeItem(item)
		fn(t, item, e, damage)
		return nil
	})
}

func strangeKey(key string) error {
	return fmt.Errorf("%q in the log is not a key of natsflow", strings.ToValidUTF8(key, "?"))
}
