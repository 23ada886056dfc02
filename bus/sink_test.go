package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

// sinkKinds are the ways to publish: the settings of the stream "OUT".
var sinkKinds = map[string]func(*jetstream.StreamConfig){
	"fast and fenced": func(*jetstream.StreamConfig) {},
	"fenced":          func(c *jetstream.StreamConfig) { c.AllowBatchPublish = false },
	"ids":             func(c *jetstream.StreamConfig) { c.Subjects, c.AllowBatchPublish = c.Subjects[:1], false },
	"fast, no fence":  func(c *jetstream.StreamConfig) { c.Subjects = c.Subjects[:1] },
}

func sink(tb testing.TB, c *Conn, change ...func(*jetstream.StreamConfig)) *Sink {
	tb.Helper()
	cfg := sinkStream("OUT", []string{"out.>"}, SinkConfig{Flow: "f"})
	for _, ch := range change {
		ch(&cfg)
	}
	if _, err := c.createStream(tb.Context(), cfg); err != nil {
		tb.Fatal(err)
	}
	s, err := c.OpenSink(tb.Context(), "OUT")
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func group(n uint64, fence uint64, size int) Group {
	g := Group{Flow: "f", Task: "0.3", N: n, Fence: fence, Outs: make([]Out, size)}
	for i := range g.Outs {
		g.Outs[i] = Out{Subject: fmt.Sprintf("out.%d", i%3), Data: []byte(fmt.Sprintf("%d-%d", n, i))}
	}
	return g
}

// stored are the messages of out.> in their order, as position and data.
func stored(tb testing.TB, c *Conn, header string) (got []string) {
	tb.Helper()
	p := newPuller(c, pullConfig{stream: "OUT", subjects: []string{"out.>"}, name: "test"})
	// A silence is not the end: a busy server may be slow.
	err := p.read(limited(tb), must(c.Stream(limited(tb), "OUT")).LastSeq, func(m *Msg) error {
		got = append(got, strings.Join(m.Header[header], ",")+" "+m.Subject+" "+string(m.Data))
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return got
}

func positionHeader(s *Sink) string {
	if s.Fenced() {
		return PositionHeader
	}
	return hdrMsgID
}

func TestSink_Publish(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change)
			ctx := limited(t)
			var fence uint64
			if s.Fenced() {
				fence = must(s.WriteFence(ctx, "f", "0.3"))
			}
			var want []string
			for n, size := range []int{1, 2, 1000, 5000, 0, 499, 500, 501} {
				g := group(uint64(n), fence, size)
				last, err := s.Publish(ctx, g)
				if err != nil {
					t.Fatalf("group of %d: %v", size, err)
				}
				if info := must(c.Stream(ctx, "OUT")); size > 0 && last != info.LastSeq {
					t.Errorf("group of %d: last is %d, the stream's %d", size, last, info.LastSeq)
				}
				for i, o := range g.Outs {
					want = append(want, FormatPosition("f", "0.3", uint64(n), i)+" "+o.Subject+" "+string(o.Data))
				}
			}
			if d := cmp.Diff(want, stored(t, c, positionHeader(s))); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestSink_HeadersAndIndex(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change)
			ctx := limited(t)
			g := group(7, 0, 4)
			g.Index = []int{3, 5, 8, 13}
			g.Outs[1].Header = []HeaderField{{"K", "v"}, {"K", "w"}, {PositionHeader, "forged"}, {hdrMsgID, "forged"}}
			if _, err := s.Publish(ctx, g); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff([]string{"f/0.3/7/3", "f/0.3/7/5", "f/0.3/7/8", "f/0.3/7/13"}, firsts(stored(t, c, positionHeader(s)))); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff([]string{"", "v,w", "", ""}, firsts(stored(t, c, "K"))); d != "" {
				t.Error(d)
			}
			g.Index = g.Index[:2]
			if _, err := s.Publish(ctx, g); err == nil {
				t.Error("an index that is too short was taken")
			}
		})
	}
}

func firsts(lines []string) (out []string) {
	for _, l := range lines {
		first, _, _ := strings.Cut(l, " ")
		out = append(out, first)
	}
	return out
}

// TestSink_Concurrent: groups of many tasks in flight at once, of many sizes.
func TestSink_Concurrent(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change)
			ctx := limited(t)
			sizes := []int{1, 3, 400, 50, 1100, 2}
			var wg sync.WaitGroup
			for task := range 6 {
				wg.Go(func() {
					for n := range sizes {
						g := group(uint64(n), 0, sizes[(n+task)%len(sizes)])
						g.Task = fmt.Sprintf("0.%d", task)
						if _, err := s.Publish(ctx, g); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			next := make(map[string]string)
			count := 0
			for _, p := range firsts(stored(t, c, positionHeader(s))) {
				_, task, n, i, ok := ParsePosition(p)
				if !ok {
					t.Fatalf("position %q", p)
				}
				if i == 0 {
					next[task] = fmt.Sprint(n, 0)
				}
				if want := next[task]; want != fmt.Sprint(n, i) {
					t.Fatalf("task %s: %d/%d came, want %s", task, n, i, want)
				}
				next[task] = fmt.Sprint(n, i+1)
				count++
			}
			if want := 6 * (1 + 3 + 400 + 50 + 1100 + 2); count != want {
				t.Errorf("%d messages, want %d", count, want)
			}
		})
	}
}

// TestSink_Fenced: a group of a former owner is refused as a whole.
func TestSink_Fenced(t *testing.T) {
	for _, name := range []string{"fast and fenced", "fenced"} {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, sinkKinds[name])
			ctx := limited(t)
			if got := must(s.LastFence(ctx, "f", "0.3")); got != 0 {
				t.Fatalf("LastFence of none: %d", got)
			}
			old := must(s.WriteFence(ctx, "f", "0.3"))
			if got := must(s.LastFence(ctx, "f", "0.3")); got != old {
				t.Fatalf("LastFence: %d, want %d", got, old)
			}
			if _, err := s.Publish(ctx, group(1, old, 5)); err != nil {
				t.Fatal(err)
			}
			fence := must(s.WriteFence(ctx, "f", "0.3"))
			must(s.WriteFence(ctx, "f", "0.4")) // another task's
			for _, size := range []int{1, 2, 3000} {
				for _, stale := range []uint64{old, 0, fence + 100} {
					before := must(c.Stream(ctx, "OUT")).LastSeq
					_, err := s.Publish(ctx, group(2, stale, size))
					var api *APIError
					if !errors.Is(err, ErrFenced) || errors.Is(err, ErrUnknownOutcome) || Retryable(err) || !errors.As(err, &api) {
						t.Fatalf("group of %d with fence %d: %v", size, stale, err)
					}
					if err := c.nc.Flush(); err != nil {
						t.Fatal(err)
					}
					if after := must(c.Stream(ctx, "OUT")).LastSeq; after != before {
						t.Fatalf("group of %d with fence %d: %d messages were stored", size, stale, after-before)
					}
				}
			}
			if _, err := s.Publish(ctx, group(2, fence, 5)); err != nil {
				t.Fatal(err)
			}
			if info := must(c.Stream(ctx, "OUT")); info.Msgs != 12 { // 10 results, a fence message for each task
				t.Errorf("%d messages", info.Msgs)
			}
		})
	}
}

// TestSink_FenceEndsOpenBatch: a former owner is stopped in the middle of a group.
func TestSink_FenceEndsOpenBatch(t *testing.T) {
	srv := testenv.StartServer(t)
	c := connect(t, srv)
	s := sink(t, c)
	ctx := limited(t)
	for _, crashed := range []bool{false, true} {
		fence := must(s.WriteFence(ctx, "f", "0.3"))
		before := must(c.Stream(ctx, "OUT")).LastSeq
		send := beginBatch(t, c, s, fence)
		send(1, opStart)
		send(2, opAppend)
		if crashed {
			// A claimant that dies after its first step; its successor ends what it has not.
			must(s.putFence(ctx, "f", "0.3", fence, []uint64{fence}))
		}
		newer := must(s.WriteFence(ctx, "f", "0.3"))
		last, err := s.Scan(ctx, before, "f", func(Held) {})
		if err != nil {
			t.Fatal(err)
		}
		send(3, opAppend)
		send(4, opCommit)
		send(1, opStart)
		if got := settled(t, ctx, c); got != last {
			t.Errorf("crashed %v: %d messages were stored after the scan", crashed, got-last)
		}
		if _, err := s.Publish(ctx, group(2, newer, 3)); err != nil {
			t.Error(err)
		}
	}
}

// beginBatch returns a function that sends single messages of a batch, as a slow owner would.
func beginBatch(t *testing.T, c *Conn, s *Sink, fence uint64) func(n int, op byte) {
	t.Helper()
	inbox := c.nc.NewInbox()
	return func(n int, op byte) {
		t.Helper()
		m := &nats.Msg{Subject: "out.x", Reply: fmt.Sprintf("%s.%s.500.fail.%d.%c.$FI", inbox, batchID("f", "0.3", fence), n, op), Header: nats.Header{}}
		if n == 1 {
			m.Header[hdrExpectedSeq] = []string{strconv.FormatUint(fence, 10)}
			m.Header[hdrExpectedSubject] = []string{fenceSubject(s.name, "f", "0.3")}
		}
		if err := c.nc.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSink_WriteFenceRace: of several claimants at once, the last one's fence is the one that holds.
func TestSink_WriteFenceRace(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	s := sink(t, c)
	ctx := limited(t)
	fences := make([]uint64, 4)
	var wg sync.WaitGroup
	for i := range fences {
		wg.Go(func() {
			f, err := s.WriteFence(ctx, "f", "0.3")
			if err != nil && !Retryable(err) {
				t.Error(err)
			}
			fences[i] = f
		})
	}
	wg.Wait()
	last := must(s.LastFence(ctx, "f", "0.3"))
	good := 0
	for _, f := range fences {
		_, err := s.Publish(ctx, group(1, f, 2))
		switch {
		case err == nil && f == last:
			good++
		case !errors.Is(err, ErrFenced):
			t.Errorf("fence %d, last %d: %v", f, last, err)
		}
	}
	if good != 1 {
		t.Errorf("%d claimants may publish", good)
	}
}

// TestSink_Duplicates: with ids, what is stored already counts as stored.
func TestSink_Duplicates(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	s := sink(t, c, sinkKinds["ids"])
	ctx := limited(t)
	if s.Duplicates() != 2*time.Minute || s.Fenced() || s.Fast() || s.Stream() != "OUT" {
		t.Errorf("%s %v %v", s.Duplicates(), s.Fenced(), s.Fast())
	}
	if _, err := s.WriteFence(ctx, "f", "0.3"); err == nil {
		t.Error("a fence without a fence subject")
	}
	g := group(1, 0, 300)
	first := g
	first.Outs = g.Outs[:100]
	if _, err := s.Publish(ctx, first); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if last, err := s.Publish(ctx, g); err != nil || last != 300 {
			t.Fatalf("last %d, %v", last, err)
		}
	}
	if got := len(stored(t, c, hdrMsgID)); got != 300 {
		t.Errorf("%d messages", got)
	}
}

func TestSink_Scan(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change)
			ctx := limited(t)
			scan := func(from uint64) (last uint64, got []string) {
				t.Helper()
				last, err := s.Scan(ctx, from, "f", func(h Held) {
					if h.Batched != (s.Fenced() && s.Fast()) {
						t.Errorf("%+v", h)
					}
					got = append(got, fmt.Sprintf("%s/%d/%d@%d", h.Task, h.N, h.I, h.Seq))
				})
				if err != nil {
					t.Fatal(err)
				}
				return last, got
			}
			if last, got := scan(0); last != 0 || got != nil {
				t.Errorf("empty: %d %v", last, got)
			}
			must(s.Publish(ctx, group(1, 0, 2)))
			other := group(1, 0, 1)
			other.Flow = "g"
			must(s.Publish(ctx, other))
			must(c.Publish(ctx, "out.foreign", map[string]string{"Nats-Msg-Id": "x"}, []byte("x")))
			g := group(2, 0, 1)
			g.Task = "0.5"
			must(s.Publish(ctx, g))
			must(c.Publish(ctx, "out.foreign", nil, []byte("x")))
			last, got := scan(0)
			if d := cmp.Diff([]string{"0.3/1/0@1", "0.3/1/1@2", "0.5/2/0@5"}, got); d != "" || last != 6 {
				t.Errorf("%d %s", last, d)
			}
			if last, got = scan(1); last != 6 || len(got) != 2 {
				t.Errorf("from 1: %d %v", last, got)
			}
			if last, got = scan(6); last != 6 || got != nil {
				t.Errorf("from 6: %d %v", last, got)
			}
			// The end of the stream may have been deleted.
			st := must(c.js.Stream(ctx, "OUT"))
			for seq := uint64(4); seq <= 6; seq++ {
				if err := st.DeleteMsg(ctx, seq); err != nil {
					t.Fatal(err)
				}
			}
			if last, got = scan(0); last != 6 || len(got) != 2 {
				t.Errorf("deleted: %d %v", last, got)
			}
		})
	}
}

func TestSink_StreamDeleted(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change)
			ctx := limited(t)
			if err := c.DeleteStream(ctx, "OUT"); err != nil {
				t.Fatal(err)
			}
			for _, size := range []int{1, 10, 5000} {
				if _, err := s.Publish(ctx, group(1, 0, size)); !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnknownOutcome) {
					t.Errorf("group of %d: %v", size, err)
				}
			}
			if _, err := s.Scan(ctx, 0, "f", nil); !errors.Is(err, ErrNotFound) {
				t.Errorf("Scan: %v", err)
			}
			if _, err := s.LastFence(ctx, "f", "0.3"); !errors.Is(err, ErrNotFound) {
				t.Errorf("LastFence: %v", err)
			}
			if _, err := s.WriteFence(ctx, "f", "0.3"); s.Fenced() && !errors.Is(err, ErrNotFound) {
				t.Errorf("WriteFence: %v", err)
			}
		})
	}
}

// TestSink_BadOuts: what can never be published is refused before anything is sent.
func TestSink_BadOuts(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change)
			ctx := limited(t)
			for _, bad := range []Out{
				{Subject: "out.a b"},
				{Subject: "out.*"},
				{Subject: ""},
				{Subject: "elsewhere.a"},
				{Subject: "out.a\r\nPUB x 0"},
				{Subject: "out.a", Data: make([]byte, 1<<20)},
				{Subject: "out.a", Header: []HeaderField{{"a b", "c"}}},
				{Subject: "out.a", Header: []HeaderField{{"", "c"}}},
			} {
				g := group(1, 0, 3)
				g.Outs[1] = bad
				_, err := s.Publish(ctx, g)
				var oe *OutError
				if !errors.As(err, &oe) || oe.Index != 1 || Retryable(err) {
					t.Errorf("%q: %v", bad.Subject, err)
				}
			}
			if n := must(c.Stream(ctx, "OUT")).Msgs; n != 0 {
				t.Errorf("%d messages were stored", n)
			}
			// The stream has got one more subject since it was opened.
			if _, err := c.js.UpdateStream(ctx, func() jetstream.StreamConfig {
				cfg := must(c.streamInfo(ctx, "OUT")).Config
				cfg.Subjects = append(cfg.Subjects, "new.a")
				return cfg
			}()); err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			s.asked = time.Time{}
			s.mu.Unlock()
			if _, err := s.Publish(ctx, Group{Flow: "f", Task: "0.0", Outs: []Out{{Subject: "new.a"}}}); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSink_NoSpace(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			s := sink(t, c, change, func(cfg *jetstream.StreamConfig) { cfg.Discard, cfg.MaxMsgs = jetstream.DiscardNew, 10 })
			ctx := limited(t)
			if _, err := s.Publish(ctx, group(1, 0, 8)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Publish(ctx, group(2, 0, 1000)); !errors.Is(err, ErrNoSpace) || !errors.Is(err, ErrUnknownOutcome) {
				t.Errorf("a part fits: %v", err)
			}
			if _, err := s.Publish(ctx, group(3, 0, 1)); !errors.Is(err, ErrNoSpace) || errors.Is(err, ErrUnknownOutcome) {
				t.Errorf("nothing fits: %v", err)
			}
			if got := firsts(stored(t, c, positionHeader(s))); len(got) != 10 || got[9] != "f/0.3/2/1" {
				t.Errorf("stored: %v", got)
			}
		})
	}
}

// TestSink_LargeOuts: the size outstanding is bounded, and the server takes it.
func TestSink_LargeOuts(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	s := sink(t, c)
	g := group(1, 0, 60)
	for i := range g.Outs {
		g.Outs[i].Data = make([]byte, 700<<10)
	}
	if f := flowOf(g.Outs); f != 2 {
		t.Errorf("flow %d", f)
	}
	if _, err := s.Publish(limited(t), g); err != nil {
		t.Fatal(err)
	}
}

// TestSink_Cut: the connection is lost in the middle of groups; recovery by fence and scan loses and doubles nothing.
func TestSink_Cut(t *testing.T) {
	for _, name := range []string{"fast and fenced", "ids", "fenced"} {
		t.Run(name, func(t *testing.T) {
			srv := testenv.StartServer(t)
			var p tap
			c := connect(t, srv, func(cfg *Config) { cfg.InProcess = p.dial(cfg.InProcess) })
			s := sink(t, c, sinkKinds[name])
			ctx := limited(t)
			const n, size = 8, 2000
			var want []string
			fence, unknowns := uint64(0), 0
			for k := range n {
				g := group(uint64(k), fence, size)
				for i := range g.Outs {
					want = append(want, FormatPosition("f", "0.3", g.N, i))
				}
				if k%3 == 0 {
					time.AfterFunc(time.Duration(k)*700*time.Microsecond, p.cut)
				}
				from := uint64(0)
				for {
					_, err := s.Publish(ctx, g)
					if err == nil {
						break
					}
					if !errors.Is(err, ErrUnknownOutcome) {
						t.Fatal(err)
					}
					unknowns++
					if !s.Fenced() {
						continue
					}
					if g, err = recoverGroup(ctx, s, g, from, size); err != nil {
						t.Fatal(err)
					}
					fence = g.Fence
				}
			}
			if d := cmp.Diff(want, firsts(stored(t, c, positionHeader(s)))); d != "" && name != "ids" {
				t.Error(d)
			}
			t.Logf("%d groups were cut", unknowns)
			if got := len(stored(t, c, positionHeader(s))); got != n*size {
				t.Errorf("%d messages, want %d", got, n*size)
			}
		})
	}
}

// recoverGroup does what a worker does after an unknown outcome: fence, scan, and leave the rest to be published.
func recoverGroup(ctx context.Context, s *Sink, g Group, from uint64, size int) (Group, error) {
	fence, err := s.WriteFence(ctx, g.Flow, g.Task)
	for Retryable(err) {
		fence, err = s.WriteFence(ctx, g.Flow, g.Task)
	}
	if err != nil {
		return g, err
	}
	have := make(map[int]bool)
	if _, err := s.Scan(ctx, from, g.Flow, func(h Held) {
		if h.N == g.N {
			have[h.I] = true
		}
	}); err != nil {
		return g, err
	}
	rest := Group{Flow: g.Flow, Task: g.Task, N: g.N, Fence: fence, Index: []int{}}
	all := group(g.N, fence, size)
	for i := range all.Outs {
		if !have[i] {
			rest.Outs, rest.Index = append(rest.Outs, all.Outs[i]), append(rest.Index, i)
		}
	}
	return rest, nil
}

// TestSink_Guarded: once untrusted, nothing of a group is stored, not even of one that is under way.
func TestSink_Guarded(t *testing.T) {
	guarded(t, func(t *testing.T, srv *testenv.Server, c *Conn, trusted *atomic.Bool, _ func() int) {
		s := sink(t, c)
		ctx := limited(t)
		must(s.Publish(ctx, group(1, 0, 1000)))
		stop := make(chan struct{})
		go func() {
			defer close(stop)
			_ = sleep(ctx, 20*time.Millisecond)
			trusted.Store(false)
		}()
		var err error
		for n := uint64(2); err == nil; n++ {
			_, err = s.Publish(ctx, group(n, 0, 3000))
		}
		if !errors.Is(err, ErrUnknownOutcome) {
			t.Errorf("Publish: %v", err)
		}
		<-stop
		other := connect(t, srv)
		// What had left before is still on its way through proxy and server.
		last := settled(t, ctx, other)
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		if _, err := s.Publish(short, group(1e6, 0, 10)); err == nil {
			t.Error("published without trust")
		}
		if got := settled(t, ctx, other); got != last {
			t.Errorf("%d messages were stored", got-last)
		}
	})
}

// settled is the last sequence of "OUT" once it has stopped to rise.
func settled(t *testing.T, ctx context.Context, c *Conn) (last uint64) {
	t.Helper()
	for same := 0; same < 10; same++ {
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if now := must(c.Stream(ctx, "OUT")).LastSeq; now != last {
			last, same = now, 0
		}
	}
	return last
}

// TestSink_Ends: a server that does not answer, and a ctx that ends, are no hang.
func TestSink_Ends(t *testing.T) {
	for name, change := range sinkKinds {
		t.Run(name, func(t *testing.T) {
			testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
				var p tap
				c := connect(t, srv, func(cfg *Config) { cfg.InProcess = p.dial(cfg.InProcess) })
				s := sink(t, c, change)
				must(s.Publish(t.Context(), group(1, 0, 10)))
				p.setSwallow(true)
				start := time.Now()
				for _, size := range []int{1, 5000} { // at the third the connection would be given up
					if _, err := s.Publish(t.Context(), group(2, 0, size)); !errors.Is(err, ErrUnknownOutcome) {
						t.Errorf("Publish: %v", err)
					}
				}
				if d := time.Since(start); d > 2*stallTimeout+time.Second {
					t.Errorf("it took %s", d)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := s.Publish(ctx, group(2, 0, 10)); !errors.Is(err, ErrUnknownOutcome) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Publish: %v", err)
				}
				p.setSwallow(false)
				p.cut()
				time.Sleep(time.Minute)
				synctest.Wait()
				g := group(3, 0, 10)
				if s.Fenced() {
					g.Fence = must(s.WriteFence(t.Context(), "f", "0.3"))
				}
				if _, err := s.Publish(t.Context(), g); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestSink_TooManyRequests: a server that queues little makes itself heard; the outcome is never taken for a success.
func TestSink_TooManyRequests(t *testing.T) {
	c := connect(t, testenv.StartServer(t, testenv.Configure(func(o *server.Options) { o.StreamMaxBufferedMsgs = 50 })))
	s := sink(t, c)
	ctx := limited(t)
	fence, good := uint64(0), uint64(0)
	for n := range uint64(20) {
		before := must(c.Stream(ctx, "OUT")).LastSeq
		last, err := s.Publish(ctx, group(n, fence, 2000))
		switch {
		case err == nil && last != before+2000:
			t.Errorf("group %d: %d of 2000 messages are stored", n, last-before)
		case err == nil:
			good++
		case !errors.Is(err, ErrUnknownOutcome) && !errors.Is(err, ErrConflict):
			t.Errorf("group %d: %v", n, err)
		default:
			eventually(t, ctx, func() (err error) {
				fence, err = s.WriteFence(ctx, "f", "0.3")
				return err
			})
		}
	}
	t.Logf("%d of 20 groups passed", good)
}

func TestBatchSeq(t *testing.T) {
	for s, want := range map[string]uint64{"_INBOX.a.b.id.500.fail.17.1.$FI": 17, "x": 0, "": 0, "a.b.c": 0, "1.2.$FI": 1} {
		if got := batchSeq(s); got != want {
			t.Errorf("%q: %d", s, got)
		}
	}
}
