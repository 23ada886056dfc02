package bus

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

// mirrorOf is the config of a mirror of "S" that has the subjects' last token in
// front.
func mirrorOf(name string) MirrorConfig {
	return MirrorConfig{Name: name, Origin: "S", Transforms: []Transform{
		{"s.*", "{{wildcard(1)}}.s.{{wildcard(1)}}"},
		{"s.*.>", "{{wildcard(1)}}.s.{{wildcard(1)}}.>"},
	}}
}

// awaitLast waits until a stream ends at a sequence, and returns what is known of
// it.
func awaitLast(t *testing.T, c *Conn, stream string, seq uint64) StreamInfo {
	t.Helper()
	ctx := limited(t)
	for {
		info, err := c.Stream(ctx, stream)
		if err != nil {
			t.Fatal(err)
		}
		if info.LastSeq == seq {
			return info
		}
		if err := sleep(ctx, time.Millisecond); err != nil {
			t.Fatalf("the stream %s ends at %d, want %d", stream, info.LastSeq, seq)
		}
	}
}

// A mirror has the sequences and the times of its origin, other subjects, and
// limits that follow those of the origin.
func TestConn_EnsureMirror(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	stream(t, c)
	feed(t, c, 0, 10)
	must(c.Publish(ctx, "s.9.x.y", nil, nil))
	for i := range 2 {
		info, created, err := c.EnsureMirror(ctx, mirrorOf("M"))
		if err != nil || created != (i == 0) || !info.Mirror || info.MaxAge != 0 || info.MaxBytes != -1 || info.MaxMsgs != -1 {
			t.Fatalf("%d: %+v %v %v", i, info, created, err)
		}
	}
	awaitLast(t, c, "M", 11)
	for _, seq := range []uint64{1, 10, 11} {
		is := must(c.nextMsg(ctx, "S", ">", seq))
		m := must(c.nextMsg(ctx, "M", ">", seq))
		want := is.Subject[2:3] + "." + is.Subject
		if m.Seq != seq || m.Subject != want || !m.Time.Equal(is.Time) {
			t.Errorf("sequence %d: %+v, want subject %s", seq, m, want)
		}
	}
	origin := must(c.js.Stream(ctx, "S")).CachedInfo().Config
	origin.MaxAge, origin.MaxBytes, origin.MaxMsgs, origin.MaxMsgsPerSubject = 30*time.Second, 1<<20, 5000, 700
	origin.Duplicates = 20 * time.Second
	must(c.js.UpdateStream(ctx, origin))
	info, created, err := c.EnsureMirror(ctx, mirrorOf("M"))
	if err != nil || created || info.MaxAge != 90*time.Second || info.MaxBytes != 5<<18 || info.MaxMsgs != 5000 || info.LastSeq != 11 {
		t.Fatalf("with limits: %+v %v %v", info, created, err)
	}
	// The same limits from the beginning.
	if info, created, err = c.EnsureMirror(ctx, mirrorOf("M2")); err != nil || !created || info.MaxAge != 90*time.Second || info.MaxMsgs != 5000 {
		t.Fatalf("another one: %+v %v %v", info, created, err)
	}
	other := mirrorOf("M")
	other.Transforms = other.Transforms[:1]
	if _, _, err := c.EnsureMirror(ctx, other); !errors.Is(err, ErrExists) {
		t.Errorf("other transforms: %v", err)
	}
	if _, _, err := c.EnsureMirror(ctx, mirrorOf("S")); !errors.Is(err, ErrExists) {
		t.Errorf("no mirror: %v", err)
	}
	none := mirrorOf("M3")
	none.Origin = "NONE"
	if _, _, err := c.EnsureMirror(ctx, none); !errors.Is(err, ErrNotFound) {
		t.Errorf("no origin: %v", err)
	}
}

// This is why a source that allows direct gets is refused: its mirror answers
// some of them, and its subjects are others.
func TestConn_EnsureMirror_answersDirectGets(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	must(c.js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, AllowDirect: true}))
	feed(t, c, 0, 10)
	if _, _, err := c.EnsureMirror(ctx, mirrorOf("M")); err != nil {
		t.Fatal(err)
	}
	awaitLast(t, c, "M", 10)
	s := must(c.js.Stream(ctx, "S"))
	wrong := 0
	for range 200 {
		if m, err := s.GetMsg(ctx, 1); err != nil || m.Subject != "s.0" {
			wrong++
		}
	}
	if wrong == 0 {
		t.Error("the server does not do this any more: sources with direct gets need not be refused")
	}
}

func TestConn_LastMatching(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	stream(t, c)
	if last, err := c.LastMatching(ctx, "S", nil); last != 0 || err != nil {
		t.Errorf("of an empty stream: %d %v", last, err)
	}
	feed(t, c, 0, 10) // s.0 to s.3 by turns
	for _, w := range []struct {
		filters []string
		want    uint64
	}{{nil, 10}, {[]string{"s.3"}, 8}, {[]string{"s.2", "s.3"}, 8}, {[]string{"s.0", "s.3"}, 9}, {[]string{"s.x"}, 0}} {
		if last, err := c.LastMatching(ctx, "S", w.filters); last != w.want || err != nil {
			t.Errorf("%v: %d %v, want %d", w.filters, last, err, w.want)
		}
	}
	if _, err := c.LastMatching(ctx, "NONE", nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("no stream: %v", err)
	}
}

func TestConn_StreamNames(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	if names, err := c.StreamNames(ctx, ""); len(names) > 0 || err != nil {
		t.Errorf("of none: %v %v", names, err)
	}
	var want []string
	for i := range 5 {
		name := fmt.Sprintf("A_%d", i)
		must(c.CreateStream(ctx, StreamConfig{Name: name, Subjects: []string{name}}))
		want = append(want, name)
	}
	must(c.CreateStream(ctx, StreamConfig{Name: "B_A_", Subjects: []string{"b"}}))
	names, err := c.StreamNames(ctx, "A_")
	slices.Sort(names)
	if !slices.Equal(names, want) || err != nil {
		t.Errorf("%v %v", names, err)
	}
}
