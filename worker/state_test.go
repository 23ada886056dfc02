package worker

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/kvsnap"
	"natsflow/testenv"
)

// bigFlow keeps, for each key, as many bytes as its last record says, and tells their
// checksum and number when it is asked to.
func bigFlow(tb testing.TB, partitions int) *flow.Flow {
	tb.Helper()
	b := flow.New("big", flow.Options{Partitions: partitions})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	codec := flow.StateCodec[[]byte]{
		Version: 1,
		Append:  func(dst []byte, s *[]byte) ([]byte, error) { return append(dst, *s...), nil },
		Decode:  func(data []byte, s *[]byte) error { *s = bytes.Clone(data); return nil },
	}
	told := flow.Stateful(keyed, "bytes", codec, func(m *flow.Meta, s *[]byte, v string, emit func(string)) error {
		_, what, _ := strings.Cut(v, " ")
		if what == "tell" {
			emit(fmt.Sprintf("%s %d %08x", m.Key, len(*s), crc32.ChecksumIEEE(*s)))
			m.Unchanged()
			return nil
		}
		n, err := strconv.Atoi(what)
		if err != nil {
			return err
		}
		*s = noise(m.Key, n)
		return nil
	})
	flow.To(told, flow.Sink[string]{
		Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."), Encode: flow.EncodeText(),
	})
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// noise is n bytes that do not compress, and belong to a key.
func noise(key string, n int) []byte {
	data := make([]byte, n)
	x := uint64(crc32.ChecksumIEEE([]byte(key)))<<32 | uint64(n)*2654435761 | 1
	for i := range data {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		data[i] = byte(x >> 32)
	}
	return data
}

func (l *lab) putBig(key string, n int) {
	l.tb.Helper()
	if _, err := l.conn.Publish(l.ctx, "in."+key, nil, fmt.Appendf(nil, "%s %d", key, n)); err != nil {
		l.tb.Fatal(err)
	}
}

// tell asks for what is kept of a key.
func (l *lab) tell(key string) {
	l.tb.Helper()
	if _, err := l.conn.Publish(l.ctx, "in.x", nil, []byte(key+" tell")); err != nil {
		l.tb.Fatal(err)
	}
}

// State that the step's codec cannot read stops the worker with a clear error, and
// stays as it is: with the codec that wrote it the flow goes on.
func TestState_undecodable(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(200)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 200)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.more(100)
		other := countFlow{version: 2}.build(t)
		for range 2 {
			err := l.start(other, Config{}, nil).wait()
			if !errors.Is(err, flow.ErrState) || !strings.Contains(err.Error(), `step "count"`) {
				t.Fatalf("got %v", err)
			}
		}
		l.drain(f, Config{})
		l.judge("OUT")
	})
}

// contents returns the items of a bucket that have a body: all but claims and releases,
// which every start replaces.
func contents(l *lab, b *bus.Bucket) map[string]string {
	l.tb.Helper()
	items, err := b.List(l.ctx, ">")
	if err != nil {
		l.tb.Fatal(err)
	}
	all := map[string]string{}
	for _, item := range items {
		head, _, _ := bytes.Cut(item.Value, []byte("\n"))
		if bytes.Contains(head, []byte(`"kind":"claim"`)) || bytes.Contains(head, []byte(`"kind":"release"`)) {
			continue
		}
		all[item.Key] = string(item.Value)
	}
	return all
}

// A snapshot with a flipped bit is found and named, at each start, and nothing of it is
// overwritten.
func TestState_corrupt(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
		l.more(200)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 200)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		bucket, err := l.conn.OpenBucket(l.ctx, "natsflow_count")
		if err != nil {
			t.Fatal(err)
		}
		items, err := bucket.List(l.ctx, "log.0.2.>")
		if err != nil {
			t.Fatal(err)
		}
		var hit bus.Item
		for _, item := range items {
			if bytes.Contains(item.Value, []byte(`"kind":"commit"`)) {
				hit = item
				break
			}
		}
		if hit.Key == "" {
			t.Fatalf("no commit among %d entries", len(items))
		}
		hit.Value[len(hit.Value)-3] ^= 4
		if _, err := bucket.Put(l.ctx, hit.Key, hit.Value, 0); err != nil {
			t.Fatal(err)
		}
		before := contents(l, bucket)
		for range 3 {
			err = l.start(f, Config{}, nil).wait()
			if !errors.Is(err, kvsnap.ErrSnapshotCorrupt) || !strings.Contains(err.Error(), hit.Key) {
				t.Fatalf("got %v, want it to name %s", err, hit.Key)
			}
		}
		if diff := cmp.Diff(before, contents(l, bucket)); diff != "" {
			t.Errorf("the bucket changed (-before +after):\n%s", diff)
		}
		if n := l.count("OUT"); n != 200 {
			t.Errorf("%d results", n)
		}
	})
}

// State larger than a message: one key of 5 MB, and a great number of keys, are
// snapshotted, and are there after a restart.
func TestState_large(t *testing.T) {
	keys := 200_000
	if testing.Short() || raceDetector {
		keys = 20_000
	}
	l := newLab(t, testenv.StartServer(t, testenv.DontListen()))
	f := bigFlow(t, 16)
	p := l.start(f, Config{}, nil)
	feeder := l.conn.NewFeeder(0)
	want := map[string]string{}
	size := func(i int) int { return 20 + i%50 }
	for i := range keys {
		key := fmt.Sprintf("k%d", i)
		if err := feeder.Publish("in.x", "", fmt.Appendf(nil, "%s %d", key, size(i))); err != nil {
			t.Fatal(err)
		}
	}
	// The large one changes a few times, so that a base and deltas hold it.
	for i := range 3 {
		if err := feeder.Publish("in.x", "", fmt.Appendf(nil, "large %d", 5_000_000+i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := feeder.Flush(l.ctx); err != nil {
		t.Fatal(err)
	}
	l.await("all committed", func() bool { return p.at().Sources["IN"].Committed == uint64(keys)+3 })
	l.await("all keys counted", func() bool { return p.at().StateKeys == keys+1 })
	at := p.at()
	if at.StateBytes < 3_000_000 || at.LastCommit.IsZero() || at.LastCommit.After(time.Now()) {
		t.Errorf("%d bytes of state, the last commit was at %v", at.StateBytes, at.LastCommit)
	}
	for task, n := range at.Generations {
		if n != 1 {
			t.Errorf("task %s has generation %d when it was claimed for the first time", task, n)
		}
	}
	if len(at.Generations) != at.Tasks || at.Tasks == 0 {
		t.Errorf("%d generations of %d tasks", len(at.Generations), at.Tasks)
	}
	if err := p.leave(); err != nil {
		t.Fatal(err)
	}
	tell := func(key string, n int) {
		data := noise(key, n)
		want[key] = fmt.Sprintf("%s %d %08x", key, n, crc32.ChecksumIEEE(data))
		l.tell(key)
	}
	tell("large", 5_000_002)
	for i := 0; i < keys; i += keys / 100 {
		tell(fmt.Sprintf("k%d", i), size(i))
	}
	p = l.start(f, Config{}, nil)
	l.awaitResults(p, len(want))
	if n := p.at().StateKeys; n != keys+1 {
		t.Errorf("%d keys of state after the restart, want %d", n, keys+1)
	}
	for task, n := range p.at().Generations {
		if n != 2 {
			t.Errorf("task %s has generation %d when it was claimed for the second time", task, n)
		}
	}
	if err := p.leave(); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range l.read("OUT") {
		key, _, _ := strings.Cut(string(m.data), " ")
		got[key] = string(m.data)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("state after the restart (-want +got):\n%s", diff)
	}
}
