package kvsnap

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
)

// naiveTask tells of a task what Tasks does, by reading everything.
func naiveTask(t *testing.T, b *fakeBucket, id TaskID) TaskInfo {
	t.Helper()
	info := TaskInfo{Task: id}
	for _, item := range b.sorted(id.logFilter()) {
		e, err := decodeEntry("orders", item.Key, item.Value)
		if err != nil {
			t.Fatal(err)
		}
		info.Kind, info.N, info.Generation, info.Owner, info.Time, info.Head = e.Kind, e.N, e.Generation, e.Owner, e.Time, e.Head
		if e.Kind == KindBase {
			info.Base, info.BaseBytes = e.N, e.Sections[0].Stored
		}
		info.Entries++
		info.Bytes += int64(len(item.Value))
	}
	for _, item := range b.sorted(id.chunkFilter()) {
		info.Chunks++
		info.Bytes += int64(len(item.Value))
	}
	return info
}

// countingBucket counts the bytes of the values that are read from it.
type countingBucket struct {
	*fakeBucket
	read int
}

func (b *countingBucket) Read(ctx context.Context, filters []string, from, through uint64, fn func(bus.Item) error) error {
	return b.fakeBucket.Read(ctx, filters, from, through, func(item bus.Item) error {
		b.read += len(item.Value)
		return fn(item)
	})
}

// counted lists the tasks and says how many bytes that took.
func counted(t *testing.T, s *Store) (tasks []TaskInfo, read int) {
	t.Helper()
	b := &countingBucket{fakeBucket: s.bucket.(*fakeBucket)}
	tasks, err := newStore(b, s.cfg).Tasks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return tasks, b.read
}

// largeLogs makes a store with a task of large entries, one of small ones and one
// that has only been claimed.
func largeLogs(t *testing.T) (*Store, *fakeBucket, []TaskID) {
	t.Helper()
	s, b := fakeStore(Config{Flow: "orders", Owner: "w1"})
	tasks := []TaskID{{0, 1}, {0, 2}, {1, 0}}
	large, _, _ := mustClaim(t, s, tasks[0])
	st := state{}
	for i := range 30 {
		body := string(noise(uint64(i), 300_000))
		st[fmt.Sprint("k", i)] = body
		mustAppend(t, large, Commit{Head: testHead(uint64(i + 1)), Delta: pair(nil, fmt.Sprint("k", i), body)})
		switch i {
		case 4, 11:
			mustBase(t, large, st, Head{Published: large.N() - 1})
		case 20:
			mustAppend(t, large, Commit{Head: testHead(uint64(i + 1)), Delta: noise(99, 2<<20)}) // in chunks
		}
	}
	small, _, _ := mustClaim(t, s, tasks[1])
	for i := range 10 {
		mustAppend(t, small, Commit{Head: testHead(uint64(i + 1)), Delta: pair(nil, "k", "v")})
	}
	mustBase(t, small, state{}, Head{}) // of nothing
	mustAppend(t, small, Commit{Head: testHead(11)})
	mustClaim(t, s, tasks[2])
	return s, b, tasks
}

// Tasks reads little of a large log, and tells the same as who reads all of it.
func TestStore_Tasks(t *testing.T) {
	s, b, ids := largeLogs(t)
	got, read := counted(t, s)
	var want []TaskInfo
	var all int64
	for _, id := range ids {
		want = append(want, naiveTask(t, b, id))
		all += want[len(want)-1].Bytes
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if want[0].Base == 0 || want[1].Base == 0 || want[0].Entries < 20 || want[0].Chunks < 10 {
		t.Errorf("the logs are not what they are meant to be: %+v", want)
	}
	if read > 500_000 || all < 8_000_000 {
		t.Errorf("read %d of %d bytes", read, all)
	}
}

// Many small entries are named in several reads, or all is read when they are the
// larger part.
func TestStore_Tasks_manySmall(t *testing.T) {
	s, b := fakeStore(Config{Flow: "orders", Owner: "w1"})
	l, _, _ := mustClaim(t, s, testTask)
	grow := func(entries, size int) {
		for i := range entries {
			mustAppend(t, l, Commit{Head: testHead(l.N()), Delta: noise(uint64(i), size)})
		}
	}
	grow(600, 1000)
	grow(15, 400_000)
	got, read := counted(t, s)
	want := naiveTask(t, b, testTask)
	if diff := cmp.Diff([]TaskInfo{want}, got); diff != "" {
		t.Error(diff)
	}
	if read > 1_500_000 {
		t.Errorf("read %d of %d bytes", read, want.Bytes)
	}
	grow(1500, 6000)
	got, read = counted(t, s)
	want = naiveTask(t, b, testTask)
	if diff := cmp.Diff([]TaskInfo{want}, got); diff != "" {
		t.Error(diff)
	}
	if int64(read) != want.Bytes {
		t.Errorf("read %d of %d bytes", read, want.Bytes)
	}
}

// The entry of a base of a flow with very many sources and sinks is still small.
func TestStore_Tasks_baseIsSmall(t *testing.T) {
	s, b := fakeStore(Config{Flow: "orders", Owner: strings.Repeat("host", 16)})
	l, _, _ := mustClaim(t, s, testTask)
	h := Head{Offsets: map[string]uint64{}, Watermarks: map[string]int64{}, Sinks: map[string]uint64{}}
	for i := range 50 {
		name := fmt.Sprintf("A_STREAM_OF_THE_SHOP_%d", i)
		h.Offsets[name], h.Watermarks[name], h.Sinks[name] = 1<<40, 1<<60, 1<<40
	}
	mustAppend(t, l, Commit{Head: h})
	mustBase(t, l, state{"a": "1"}, h)
	if size := len(b.items[testTask.entryKey(l.N())].Value); size > smallEntry {
		t.Errorf("the entry of a base has %d bytes, Tasks looks at those of up to %d", size, smallEntry)
	}
}

// A base that is written, and purges, while Tasks reads is no damage.
func TestStore_Tasks_whileABaseIsWritten(t *testing.T) {
	s, b := fakeStore(Config{Flow: "orders", Owner: "w1"})
	l, _, _ := mustClaim(t, s, testTask)
	for i := range 5 {
		mustAppend(t, l, Commit{Head: testHead(uint64(i + 1)), Delta: pair(nil, "k", "v")})
	}
	rebase := func() {
		mustBase(t, l, state{"k": "v"}, Head{Published: l.N()})
		mustAppend(t, l, Commit{Head: testHead(9), Delta: pair(nil, "k", "w")})
	}
	// All entries that were listed go before the second one is read.
	reads, looks := 0, 0
	b.onRead = func(bus.Item) {
		if reads++; reads == 1 {
			rebase()
		}
	}
	// And again in the second look, after it was told which one is the last.
	b.onLast = func() (*bus.Item, error) {
		looks++
		if looks > 1 {
			return nil, nil
		}
		last, _ := b.lastOf(testTask.logFilter())
		rebase()
		return &last, nil
	}
	got, err := s.Tasks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if reads != 3 || looks != 3 {
		t.Errorf("%d entries were read, with %d looks at the last", reads, looks)
	}
	if diff := cmp.Diff([]TaskInfo{naiveTask(t, b, testTask)}, got); diff != "" {
		t.Error(diff)
	}
}

func TestStore_Tasks_problems(t *testing.T) {
	spoil := func(b *fakeBucket, key string) {
		item := b.items[key]
		item.Value = append([]byte(nil), item.Value...)
		item.Value[len(item.Value)-1] ^= 1
		b.items[key] = item
	}
	s, whole, ids := largeLogs(t)
	id := ids[0]
	last := naiveTask(t, whole, id).N
	for name, c := range map[string]struct {
		damage func(b *fakeBucket, last uint64)
		want   string // with %s for the last entry's key
	}{
		"none":          {func(*fakeBucket, uint64) {}, ""},
		"last entry":    {func(b *fakeBucket, last uint64) { spoil(b, id.entryKey(last)) }, "%s"},
		"missing entry": {func(b *fakeBucket, _ uint64) { delete(b.items, id.entryKey(20)) }, id.entryKey(20)},
		"small entry":   {func(b *fakeBucket, _ uint64) { spoil(b, TaskID{0, 2}.entryKey(5)) }, TaskID{0, 2}.entryKey(5)},
		// It would take the reading of all of the log.
		"large entry in the middle": {func(b *fakeBucket, _ uint64) { spoil(b, id.entryKey(20)) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := whole.copyOf()
			c.damage(b, last)
			tasks, err := newStore(b, s.cfg).Tasks(t.Context())
			if err != nil || len(tasks) != len(ids) {
				t.Fatalf("%d tasks, %v", len(tasks), err)
			}
			problems := ""
			for _, info := range tasks {
				problems += info.Problem
			}
			want := strings.ReplaceAll(c.want, "%s", id.entryKey(last))
			if (problems == "") != (want == "") || !strings.Contains(problems, want) {
				t.Errorf("problems %q, want %q", problems, want)
			}
		})
	}
}

// Chunks that are left of a log that is gone are no task.
func TestStore_Tasks_onlyChunks(t *testing.T) {
	s, b, ids := largeLogs(t)
	if err := b.Purge(t.Context(), ids[0].logFilter(), 0); err != nil {
		t.Fatal(err)
	}
	got, err := s.Tasks(t.Context())
	if err != nil || len(got) != 2 || got[0].Task != ids[1] {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := b.Append(t.Context(), "log.x", nil, "log.x", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Tasks(t.Context()); err == nil || !strings.Contains(err.Error(), `"log.x" in the log is not a key of natsflow`) {
		t.Errorf("a strange key: %v", err)
	}
}

// A claim whose place a release takes between the two listings counts once.
func TestTaskScans_replaced(t *testing.T) {
	scans := taskScans{}
	for _, st := range []bus.Stat{{Key: "log.0.3.1", Seq: 1, Size: 10}, {Key: "log.0.3.2", Seq: 2, Size: 20}, {Key: "log.0.3.2", Seq: 3, Size: 30}} {
		if err := scans.note(st); err != nil {
			t.Fatal(err)
		}
	}
	scan := scans.of(testTask)
	if scan.info.Entries != 2 || scan.info.Bytes != 40 || scan.last().Seq != 3 {
		t.Errorf("%+v", scan)
	}
}

// Head tells what the last entry does.
func TestStore_Head(t *testing.T) {
	s, b, ids := largeLogs(t)
	for _, id := range ids {
		head, err := s.Head(t.Context(), id)
		if diff := cmp.Diff(naiveTask(t, b, id).Head, head); err != nil || diff != "" {
			t.Errorf("task %v: %v %s", id, err, diff)
		}
	}
	if _, err := s.Head(t.Context(), TaskID{Partition: 4000}); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("a task without a log: %v", err)
	}
}
