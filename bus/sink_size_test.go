package bus

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

// A result of the size that MaxData says is taken by a stream with a limit for the
// size of messages, whatever the numbers in its position, and one byte more is
// refused before anything is sent.
func TestSink_MaxData(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change, func(cfg *jetstream.StreamConfig) { cfg.MaxMsgSize = 2000 })
			ctx := limited(t)
			most := s.MaxData("f", "0.3")
			if most < 1500 || most > 1950 {
				t.Fatalf("%d bytes of data", most)
			}
			g := group(math.MaxUint64, 0, 3)
			g.Index = []int{math.MaxInt - 2, math.MaxInt - 1, math.MaxInt}
			g.Outs[0].Data = make([]byte, most)
			if _, err := s.Publish(ctx, g); err != nil {
				t.Fatal(err)
			}
			g = group(1, 0, 3)
			g.Outs[1].Data = make([]byte, most+1)
			_, err := s.Publish(ctx, g)
			var oe *OutError
			if !errors.As(err, &oe) || !errors.Is(err, ErrTooLarge) || oe.Index != 1 || oe.Size != 2001 {
				t.Errorf("got %v", err)
			}
			if n := must(c.Stream(ctx, "OUT")).Msgs; n != 3 {
				t.Errorf("%d messages are stored", n)
			}

			// The limit is lowered behind our back: the server refuses, and after a
			// look at the stream the check does.
			cfg := must(c.streamInfo(ctx, "OUT")).Config
			cfg.MaxMsgSize = 1000
			if _, err := c.js.UpdateStream(ctx, cfg); err != nil {
				t.Fatal(err)
			}
			g.Outs[1].Data = make([]byte, 1200)
			if _, err = s.Publish(ctx, g); err == nil || errors.As(err, &oe) {
				t.Errorf("the server took it: %v", err)
			}
			if _, err := s.Refresh(ctx); err != nil {
				t.Fatal(err)
			}
			if _, err = s.Publish(ctx, g); !errors.As(err, &oe) || !errors.Is(err, ErrTooLarge) || oe.Index != 1 {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestSubjectsWith(t *testing.T) {
	for _, c := range []struct{ has, add, want []string }{
		{[]string{"a.*"}, []string{"a.b"}, []string{"a.*"}},
		{[]string{"a.b", "x"}, []string{"a.*"}, []string{"x", "a.*"}},
		{[]string{"a.b"}, []string{"a.c", "a.c"}, []string{"a.b", "a.c"}},
		{nil, []string{"a"}, []string{"a"}},
	} {
		if diff := cmp.Diff(c.want, SubjectsWith(c.has, c.add)); diff != "" {
			t.Errorf("%q with %q (-want +got):\n%s", c.has, c.add, diff)
		}
	}
}

func TestStreamInfo_ReadsAll(t *testing.T) {
	for _, c := range []struct {
		subjects, filters []string
		want              bool
	}{
		{[]string{"a.>"}, nil, true},
		{[]string{"a.>"}, []string{"a.>"}, true},
		{[]string{"a.>"}, []string{"a.b"}, false},
		{[]string{"a.b", "a.c"}, []string{"a.*"}, true},
		{[]string{"a.b", "c"}, []string{"a.*"}, false},
		{nil, []string{"a.*"}, false},
		{nil, []string{">"}, true},
	} {
		if got := (StreamInfo{Subjects: c.subjects}).ReadsAll(c.filters); got != c.want {
			t.Errorf("%q of %q: %v", c.filters, c.subjects, got)
		}
	}
}
