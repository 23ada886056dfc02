package kvsnap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"natsflow/bus"
)

const (
	// smallEntry bounds the entries that Tasks reads wherever they are. It must
	// find the bases, whose entries are no more than a header: some hundred
	// bytes, and some tens for each source and sink of the flow.
	smallEntry = 8 << 10
	// worthSkipping: with less than this to be left out it reads all entries,
	// which takes fewer requests.
	worthSkipping = 4 << 20
	// keysAtATime is the number of entries that one read names.
	keysAtATime = 256
	// settleTries bounds how often a log that looks damaged is read again because
	// its owner goes on writing.
	settleTries = 3
)

// Tasks lists the tasks that have a log, by stage and partition. It reads the
// sizes of all entries and chunks, but the values only of the last entry of each
// task and of small ones, so that it does not cost what reading the state does. A
// damaged log is listed with its Problem; damage in the middle of a large log
// may show only in [Store.Entries].
func (s *Store) Tasks(ctx context.Context) ([]TaskInfo, error) {
	if s.err != nil {
		return nil, s.err
	}
	list, err := s.tasks(ctx)
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	slices.SortFunc(list, func(a, b TaskInfo) int {
		return cmp.Or(cmp.Compare(a.Task.Stage, b.Task.Stage), cmp.Compare(a.Task.Partition, b.Task.Partition))
	})
	return list, nil
}

func (s *Store) tasks(ctx context.Context) ([]TaskInfo, error) {
	scans := taskScans{}
	if err := s.bucket.Stats(ctx, []string{logPrefix + ">", chunkPrefix + ">"}, scans.note); err != nil {
		return nil, err
	}
	if err := s.readTelling(ctx, scans); err != nil {
		return nil, err
	}
	list := make([]TaskInfo, 0, len(scans))
	for t, scan := range scans {
		if !scan.sound() {
			var err error
			if scan, err = s.settle(ctx, t); err != nil {
				return nil, err
			}
		}
		if scan.info.Entries > 0 { // and not only chunks
			list = append(list, scan.info)
		}
	}
	return list, nil
}

// readTelling reads the entries that tell about their tasks.
func (s *Store) readTelling(ctx context.Context, scans taskScans) error {
	telling, skipped := scans.telling()
	if len(telling) == 0 {
		return nil
	}
	var size int64
	for _, st := range telling {
		size += st.Size
	}
	visit := func(item bus.Item) error {
		if t, _, ok := parseEntryKey(item.Key); ok && scans[t] != nil {
			e, damage := s.decodeItem(item)
			scans[t].add(e, damage)
		}
		return nil
	}
	last := telling[len(telling)-1].Seq
	if skipped < max(size, worthSkipping) {
		return s.bucket.Read(ctx, []string{logPrefix + ">"}, 0, last, visit)
	}
	for batch := range slices.Chunk(telling, keysAtATime) {
		keys := make([]string, len(batch))
		for i, st := range batch {
			keys[i] = st.Key
		}
		if err := s.bucket.Read(ctx, keys, batch[0].Seq, batch[len(batch)-1].Seq, visit); err != nil {
			return err
		}
	}
	return nil
}

// settle reads the whole log of a task that does not look sound: all of it has to
// be seen to say what is wrong, and it may only have changed under our hands, by
// a commit, or by a base that made entries superfluous which had been listed.
func (s *Store) settle(ctx context.Context, t TaskID) (*taskScan, error) {
	for try := 1; ; try++ {
		scans := taskScans{}
		scan := scans.of(t)
		if err := s.bucket.Stats(ctx, []string{t.chunkFilter()}, scans.note); err != nil {
			return nil, err
		}
		err := s.readLog(ctx, t.logFilter(), func(_ TaskID, item bus.Item, e *entry, damage error) {
			_ = scans.note(bus.Stat{Key: item.Key, Seq: item.Seq, Size: int64(len(item.Value))}) // readLog knows the key
			scan.add(e, damage)
		})
		if err != nil || scan.sound() || try == settleTries {
			return scan, err
		}
		last, err := s.bucket.Last(ctx, t.logFilter())
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return nil, err
		}
		if last.Seq == scan.last().Seq {
			return scan, nil
		}
	}
}

// taskScans gather what is found of each task.
type taskScans map[TaskID]*taskScan

func (ts taskScans) of(t TaskID) *taskScan {
	if ts[t] == nil {
		ts[t] = &taskScan{info: TaskInfo{Task: t}}
	}
	return ts[t]
}

// note counts an entry or a chunk.
func (ts taskScans) note(st bus.Stat) error {
	if t, _, _, ok := parseChunkKey(st.Key); ok {
		i := &ts.of(t).info
		i.Chunks++
		i.Bytes += st.Size
	} else if t, n, ok := parseEntryKey(st.Key); ok {
		ts.of(t).note(n, st)
	} else if strings.HasPrefix(st.Key, logPrefix) {
		return strangeKey(st.Key)
	}
	return nil
}

// telling lists, in their order, the last entry of each task and the small ones,
// and says how many bytes the others have.
func (ts taskScans) telling() (list []bus.Stat, skipped int64) {
	for _, scan := range ts {
		for i, e := range scan.logged {
			if e.Size <= smallEntry || i == len(scan.logged)-1 {
				list = append(list, e.Stat)
			} else {
				skipped += e.Size
			}
		}
	}
	slices.SortFunc(list, func(a, b bus.Stat) int { return cmp.Compare(a.Seq, b.Seq) })
	return list, skipped
}

// taskScan gathers what is found of one task: its entries are noted, and some of
// them added.
type taskScan struct {
	info   TaskInfo
	logged []loggedEntry
	floor  uint64 // of the last base
}

type loggedEntry struct {
	n uint64
	bus.Stat
}

func (t *taskScan) note(n uint64, st bus.Stat) {
	i := &t.info
	if last := t.last(); last.Key == st.Key {
		// A release took the place of a claim meanwhile: it is listed at both.
		i.Entries--
		i.Bytes -= last.Size
		t.logged = t.logged[:len(t.logged)-1]
	}
	i.Entries++
	i.Bytes += st.Size
	t.logged = append(t.logged, loggedEntry{n, st})
}

// last is the last entry that was noted.
func (t *taskScan) last() loggedEntry {
	if len(t.logged) == 0 {
		return loggedEntry{}
	}
	return t.logged[len(t.logged)-1]
}

func (t *taskScan) add(e *entry, damage error) {
	i := &t.info
	if damage != nil {
		i.Problem = damage.Error()
		return
	}
	i.Kind, i.N, i.Generation, i.Owner, i.Time, i.Head = e.Kind, e.N, e.Generation, e.Owner, e.Time, e.Head
	if e.Kind == KindBase {
		i.Base, i.BaseBytes, t.floor = e.N, e.Sections[0].Stored, e.Floor
	}
}

// sound tells that no problem was met, that no entry behind the floor is missing,
// which becomes the problem otherwise, and that there is a last entry and it was
// seen.
func (t *taskScan) sound() bool {
	next := t.floor + 1
	for _, e := range t.logged {
		if e.n < next {
			continue
		}
		if e.n > next && t.info.Problem == "" {
			t.info.Problem = corrupt(t.info.Task.entryKey(next), "entry is missing").Error()
		}
		next = e.n + 1
	}
	return t.info.Problem == "" && t.info.N > 0 && t.info.N == t.last().n
}
