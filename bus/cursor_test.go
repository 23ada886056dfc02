package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

var errEnough = errors.New("enough")

// readTo runs cu until the message with sequence through has been handled, and returns all sequences.
func readTo(t *testing.T, ctx context.Context, cu *Cursor, through uint64) (seqs []uint64) {
	t.Helper()
	err := cu.Run(ctx, func(m *Msg) error {
		seqs = append(seqs, m.Seq)
		if m.Seq >= through {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("Run: %v, after %d messages", err, len(seqs))
	}
	return seqs
}

func upTo(from, to uint64) (seqs []uint64) {
	for s := from; s <= to; s++ {
		seqs = append(seqs, s)
	}
	return seqs
}

// ended waits for the end of a Run whose ctx was cancelled.
func ended(t *testing.T, done <-chan error) {
	t.Helper()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v", err)
	}
}

func open(t *testing.T, c *Conn, cfg CursorConfig) *Cursor {
	t.Helper()
	cfg.Stream = "S"
	cu, err := c.OpenCursor(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cu.Close(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrUnknownOutcome) {
			t.Error(err)
		}
	})
	return cu
}

func TestCursor_Run(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	feed(t, c, 0, 1000)
	must(c.Publish(t.Context(), "s.h", map[string]string{"K": "v"}, []byte("data")))
	ctx := limited(t)
	t.Run("all", func(t *testing.T) {
		var last Msg
		n := uint64(0)
		err := open(t, c, CursorConfig{Name: "all", MaxMessages: 50}).Run(ctx, func(m *Msg) error {
			if n++; m.Seq != n || m.Pending != 1001-n {
				return fmt.Errorf("message %d has sequence %d, pending %d", n, m.Seq, m.Pending)
			}
			if last = *m; n == 1001 {
				return errEnough
			}
			return nil
		})
		if !errors.Is(err, errEnough) {
			t.Fatal(err)
		}
		if last.Subject != "s.h" || string(last.Data) != "data" || !slices.Equal(last.Header["K"], []string{"v"}) ||
			time.Since(time.Unix(0, last.Time)) > time.Minute {
			t.Errorf("%+v", last)
		}
	})
	t.Run("from", func(t *testing.T) {
		if d := cmp.Diff(upTo(990, 1001), readTo(t, ctx, open(t, c, CursorConfig{From: 990}), 1001)); d != "" {
			t.Error(d)
		}
	})
	t.Run("subjects", func(t *testing.T) {
		got := readTo(t, ctx, open(t, c, CursorConfig{Subjects: []string{"s.1", "s.3"}}), 12)
		if d := cmp.Diff([]uint64{2, 4, 6, 8, 10, 12}, got); d != "" {
			t.Error(d)
		}
		got = readTo(t, ctx, open(t, c, CursorConfig{Subjects: []string{"s.1"}}), 10)
		if d := cmp.Diff([]uint64{2, 6, 10}, got); d != "" {
			t.Error(d)
		}
	})
	t.Run("again", func(t *testing.T) {
		cu := open(t, c, CursorConfig{})
		got := readTo(t, ctx, cu, 500) // the handler refused 500
		if cu.Last() != 499 {
			t.Errorf("Last is %d", cu.Last())
		}
		if got = append(got[:499], readTo(t, ctx, cu, 1001)...); !slices.Equal(got, upTo(1, 1001)) {
			t.Errorf("got %v", got)
		}
	})
	t.Run("ends", func(t *testing.T) {
		bye := errors.New("bye")
		ctx, cancel := context.WithCancelCause(ctx)
		cu := open(t, c, CursorConfig{From: 1002})
		time.AfterFunc(20*time.Millisecond, func() { cancel(bye) })
		if err := cu.Run(ctx, func(*Msg) error { return errEnough }); !errors.Is(err, bye) {
			t.Errorf("Run: %v", err)
		}
	})
	if _, err := c.OpenCursor(ctx, CursorConfig{Stream: "none"}); !errors.Is(err, ErrNotFound) {
		t.Errorf("no stream: %v", err)
	}
	if _, err := c.OpenCursor(ctx, CursorConfig{Stream: "S", Name: "a.b"}); err == nil {
		t.Error("a bad name was taken")
	}
}

func TestCursor_DeletedMessages(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	feed(t, c, 0, 100)
	ctx := limited(t)
	st := must(c.js.Stream(ctx, "S"))
	if err := st.Purge(ctx, jetstream.WithPurgeSequence(41)); err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{50, 51, 60, 100} {
		if err := st.DeleteMsg(ctx, seq); err != nil {
			t.Fatal(err)
		}
	}
	var want []uint64
	for s := uint64(41); s < 100; s++ {
		if s != 50 && s != 51 && s != 60 {
			want = append(want, s)
		}
	}
	cu := open(t, c, CursorConfig{From: 3})
	ctx, cancel := context.WithCancel(ctx)
	var got []uint64
	done := make(chan error, 1)
	caught := make(chan struct{})
	go func() {
		done <- cu.Run(ctx, func(m *Msg) error {
			if got = append(got, m.Seq); len(got) == len(want) {
				close(caught)
			}
			return nil
		})
	}()
	<-caught
	through := uint64(0)
	for through < 100 && ctx.Err() == nil { // the message counts when the handler has returned
		through = must(cu.CaughtUp(ctx))
	}
	if through != 100 {
		t.Errorf("caught up through %d", through)
	}
	cancel()
	ended(t, done)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// TestCursor_Recreated: the consumer is deleted again and again while it is read; nothing is repeated or missed.
func TestCursor_Recreated(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	stream(t, c)
	const n = 20000
	feed(t, c, 0, n/2)
	ctx := limited(t)
	cu := open(t, c, CursorConfig{Name: "mine", MaxMessages: 500})
	other := connect(t, s)
	go func() {
		f := other.NewFeeder(100)
		for i := n / 2; i < n; i++ {
			if f.Publish("s.x", "", []byte("x")) != nil {
				return
			}
		}
		_ = f.Flush(ctx)
	}()
	next, killed := uint64(1), 0
	err := cu.Run(ctx, func(m *Msg) error {
		if m.Seq != next {
			return fmt.Errorf("got %d, want %d", m.Seq, next)
		}
		next++
		if m.Seq == n {
			return errEnough
		}
		if m.Seq%3000 == 0 {
			cu.p.mu.Lock()
			name := cu.p.consumer
			cu.p.mu.Unlock()
			killed++
			return other.js.DeleteConsumer(ctx, "S", name)
		}
		return nil
	})
	if !errors.Is(err, errEnough) || killed < 6 {
		t.Fatalf("Run: %v, consumer deleted %d times", err, killed)
	}
}

// TestCursor_Disturbed: what others may do to the consumer costs nothing but time.
func TestCursor_Disturbed(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	stream(t, c)
	feed(t, c, 0, 1000)
	ctx := limited(t)
	other := connect(t, s)
	// A foreign consumer with our prefix, and one that steals from ours.
	if _, err := other.js.CreateConsumer(ctx, "S", jetstream.ConsumerConfig{Name: "mine-1", Durable: "mine-1", AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
		t.Fatal(err)
	}
	cu := open(t, c, CursorConfig{Name: "mine", MaxMessages: 50})
	next := uint64(1)
	err := cu.Run(ctx, func(m *Msg) error {
		if m.Seq != next {
			return fmt.Errorf("got %d, want %d", m.Seq, next)
		}
		cu.p.mu.Lock()
		name := cu.p.consumer
		cu.p.mu.Unlock()
		switch next++; m.Seq {
		case 200:
			mine := must(other.js.Consumer(ctx, "S", name))
			batch := must(mine.Fetch(10))
			for range batch.Messages() {
			}
		case 600:
			if err := other.ask(ctx, "CONSUMER.RESET.S."+name, struct{}{}, nil); err != nil {
				return err
			}
		case 1000:
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatal(err)
	}
	if err := cu.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if info := must(c.streamInfo(ctx, "S")); info.State.Consumers != 1 {
		t.Errorf("%d consumers, only the foreign one should be there", info.State.Consumers)
	}
}

func TestCursor_SurvivesRestart(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	stream(t, c)
	feed(t, c, 0, 1000)
	ctx := limited(t)
	cu := open(t, c, CursorConfig{MaxMessages: 100})
	next := uint64(1)
	err := cu.Run(ctx, func(m *Msg) error {
		if m.Seq != next {
			return fmt.Errorf("got %d, want %d", m.Seq, next)
		}
		switch next++; m.Seq {
		case 500:
			s.Restart()
		case 1000:
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatal(err)
	}
}

func TestCursor_StreamDeleted(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	feed(t, c, 0, 10)
	ctx := limited(t)
	cu := open(t, c, CursorConfig{})
	err := cu.Run(ctx, func(m *Msg) error {
		if m.Seq == 10 {
			return c.DeleteStream(ctx, "S")
		}
		return nil
	})
	if !errors.Is(err, ErrNotFound) {
		t.Fatalf("Run: %v", err)
	}
}

// TestCursor_BlockingHandler: a handler that takes an hour is not a lost heartbeat, and holds nothing up but the reading.
func TestCursor_BlockingHandler(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		stream(t, c)
		feed(t, c, 0, 100)
		ctx, cancel := context.WithCancel(t.Context())
		cu := must(c.OpenCursor(ctx, CursorConfig{Stream: "S", MaxMessages: 10}))
		var got []uint64
		done := make(chan error, 1)
		go func() {
			done <- cu.Run(ctx, func(m *Msg) error {
				switch got = append(got, m.Seq); m.Seq {
				case 3:
					time.Sleep(20 * time.Second)
				case 50:
					time.Sleep(time.Minute)
				case 70:
					time.Sleep(time.Hour)
				}
				return nil
			})
		}()
		time.Sleep(10 * time.Second)
		if through := must(cu.CaughtUp(ctx)); through != 2 {
			t.Errorf("caught up through %d", through)
		}
		time.Sleep(70 * time.Second)
		if sessions := cu.p.session.Load(); sessions != 1 {
			t.Errorf("%d consumers were needed", sessions)
		}
		time.Sleep(2 * time.Hour)
		if through := must(cu.CaughtUp(ctx)); through != 100 {
			t.Errorf("caught up through %d", through)
		}
		// The server has forgotten the consumer during the hour.
		if sessions := cu.p.session.Load(); sessions != 2 {
			t.Errorf("%d consumers were needed", sessions)
		}
		// Hours of silence are bridged by heartbeats and renewed requests.
		sessions := cu.p.session.Load()
		time.Sleep(3 * time.Hour)
		must(c.Publish(ctx, "s.x", nil, nil))
		synctest.Wait()
		if through := must(cu.CaughtUp(ctx)); through != 101 || cu.p.session.Load() != sessions {
			t.Errorf("caught up through %d, %d consumers more", through, cu.p.session.Load()-sessions)
		}
		cancel()
		ended(t, done)
		if d := cmp.Diff(upTo(1, 101), got); d != "" {
			t.Error(d)
		}
	})
}

// reads begins to read stream S and notes the sequences in got, which may be looked at when the reader waits.
func reads(ctx context.Context, c *Conn, got *[]uint64) (cu *Cursor, done chan error) {
	cu, done = must(c.OpenCursor(ctx, CursorConfig{Stream: "S"})), make(chan error, 1)
	go func() {
		done <- cu.Run(ctx, func(m *Msg) error { *got = append(*got, m.Seq); return nil })
	}()
	return cu, done
}

// TestCursor_LostTail: the last message is lost on its way and no other follows, so that no gap shows: a heartbeat says
// that it was delivered.
func TestCursor_LostTail(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		link := testenv.NewLink(t)
		var lose, lost atomic.Bool
		link.Sift(testenv.ToClient, func(subject string) bool {
			if subject == "s.x" && lose.Load() {
				lost.Store(true)
				return false
			}
			return true
		})
		c := connect(t, s, func(cfg *Config) { cfg.InProcess = link.Dialer(s.InProcess) })
		stream(t, c)
		ctx, cancel := context.WithCancel(t.Context())
		var got []uint64
		cu, done := reads(ctx, c, &got)
		must(c.Publish(ctx, "s.x", nil, nil))
		synctest.Wait()
		lose.Store(true)
		must(c.Publish(ctx, "s.x", nil, nil))
		synctest.Wait()
		lose.Store(false)
		if !lost.Load() {
			t.Error("nothing was lost")
		}
		time.Sleep(2 * pullHeartbeat)
		if through := must(cu.CaughtUp(ctx)); through != 2 {
			t.Errorf("caught up through %d", through)
		}
		cancel()
		ended(t, done)
		if d := cmp.Diff(upTo(1, 2), got); d != "" {
			t.Error(d)
		}
	})
}

// TestCursor_SilentServer: a server that says nothing, not even heartbeats, is noticed in about the time that a
// cluster takes to elect another leader.
func TestCursor_SilentServer(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		stream(t, c)
		ctx, cancel := context.WithCancel(t.Context())
		var got []uint64
		cu, done := reads(ctx, c, &got)
		synctest.Wait()
		// The server drops a request when nobody listens on its inbox.
		if err := cu.p.sub.Unsubscribe(); err != nil {
			t.Fatal(err)
		}
		must(c.Publish(ctx, "s.x", nil, nil))
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if !slices.Equal(got, []uint64{1}) {
			t.Errorf("got %v", got)
		}
		cancel()
		ended(t, done)
	})
}

func TestCursor_CaughtUp(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	ctx, cancel := context.WithCancel(limited(t))
	cu := open(t, c, CursorConfig{Subjects: []string{"s.1"}})
	gate, done := make(chan struct{}), make(chan error, 1)
	if through := must(cu.CaughtUp(ctx)); through != 0 {
		t.Errorf("empty stream: %d", through)
	}
	go func() {
		done <- cu.Run(ctx, func(*Msg) error { <-gate; return nil })
	}()
	await := func(want uint64) {
		t.Helper()
		for {
			through, err := cu.CaughtUp(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if through == want {
				return
			}
			if through > want {
				t.Fatalf("caught up through %d, want %d", through, want)
			}
		}
	}
	must(c.Publish(ctx, "s.0", nil, nil))
	await(1) // nothing matches
	must(c.Publish(ctx, "s.1", nil, nil))
	must(c.Publish(ctx, "s.1", nil, nil))
	must(c.Publish(ctx, "s.0", nil, nil))
	for range 20 {
		if through := must(cu.CaughtUp(ctx)); through > 0 {
			t.Fatalf("caught up through %d while 2 is not handled", through)
		}
	}
	gate <- struct{}{}
	await(2)
	gate <- struct{}{}
	await(4)
	cancel()
	ended(t, done)
}

// TestCursor_LargeMessages: the byte bound is kept, and messages near the largest size pass.
func TestCursor_LargeMessages(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	ctx := limited(t)
	for i := range 30 {
		must(c.Publish(ctx, "s.large", nil, make([]byte, 1<<20-i)))
	}
	cu := open(t, c, CursorConfig{MaxBytes: 1})
	most := 0
	next := uint64(1)
	err := cu.Run(ctx, func(m *Msg) error {
		if m.Seq != next {
			return fmt.Errorf("got %d, want %d", m.Seq, next)
		}
		most = max(most, len(cu.p.ch))
		if next++; m.Seq == 30 {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) || most > 3 {
		t.Fatalf("Run: %v, %d messages were waiting", err, most)
	}
}

// TestPuller_Status: statuses of the server that end a session, and those that do not.
func TestPuller_Status(t *testing.T) {
	p := puller{cfg: pullConfig{maxMessages: 100, maxBytes: 1000}}
	for _, tc := range []struct {
		header nats.Header
		lost   bool
	}{
		{nats.Header{hdrStatus: {"100"}}, false},
		{nats.Header{hdrStatus: {"100"}, hdrLastConsumer: {"0"}}, false},
		{nats.Header{hdrStatus: {"100"}, hdrLastConsumer: {"1"}}, true},
		{nats.Header{hdrStatus: {"408"}, hdrPendingMsgs: {"10"}, hdrPendingBytes: {"100"}}, false},
		{nats.Header{hdrStatus: {"409"}, hdrDescription: {"Batch Completed"}, hdrPendingMsgs: {"10"}, hdrPendingBytes: {"100"}}, false},
		{nats.Header{hdrStatus: {"409"}, hdrDescription: {"Consumer Deleted"}}, true},
		{nats.Header{hdrStatus: {"409"}, hdrDescription: {"Leadership Change"}}, true},
		{nats.Header{hdrStatus: {"503"}}, true},
		{nil, true},
	} {
		p.wantMsgs, p.wantBytes = 50, 500
		if err := p.status(&nats.Msg{Header: tc.header}); errors.Is(err, errLost) != tc.lost {
			t.Errorf("%v: %v", tc.header, err)
		}
		if n := tc.header.Get(hdrPendingMsgs); n != "" && (p.wantMsgs != 40 || p.wantBytes != 400) {
			t.Errorf("%v: wants %d, %d", tc.header, p.wantMsgs, p.wantBytes)
		}
	}
}

// TestPuller_NotYet: a consumer that knows of no more is not believed as long as the leader does.
func TestPuller_NotYet(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, s *testenv.Server) {
		c := connect(t, s)
		stream(t, c)
		feed(t, c, 0, 10)
		ctx := t.Context()
		p := newPuller(c, pullConfig{stream: "S", name: "test"})
		start, asked, next := time.Now(), 0, uint64(1)
		err := p.run(ctx, func(m *Msg) error {
			if m.Seq != next {
				return fmt.Errorf("got %d, want %d", m.Seq, next)
			}
			next++
			return nil
		}, func() error {
			switch asked++; asked {
			case 50:
				must(c.Publish(ctx, "s.x", nil, nil))
			case 400:
				return errDone
			}
			return errNotYet
		})
		p.finish(ctx)
		if d := time.Since(start); !errors.Is(err, errDone) || next != 12 || d < 39*time.Second || d > 41*time.Second {
			t.Errorf("%v after %s, next is %d", err, d, next)
		}
		if p.session.Load() != 1 {
			t.Errorf("%d consumers were needed", p.session.Load())
		}
	})
}

func TestPuller_Reached(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	stream(t, c)
	feed(t, c, 0, 10)
	ctx := limited(t)
	for _, tc := range []struct {
		subjects         []string
		handled, through uint64
		want             error
	}{
		{nil, 9, 10, errNotYet},
		{nil, 10, 10, nil},
		{nil, 10, 99, nil},
		{[]string{"s.1"}, 9, 10, errNotYet},
		{[]string{"s.1"}, 9, 9, nil},
		{[]string{"s.3"}, 8, 10, nil},
		{[]string{"s.3", "s.1"}, 8, 10, errNotYet},
		{[]string{"none"}, 0, 10, nil},
	} {
		p := newPuller(c, pullConfig{stream: "S", name: "test", subjects: tc.subjects, from: tc.handled + 1})
		if err := p.reached(ctx, tc.through); !errors.Is(err, tc.want) {
			t.Errorf("%v: %v", tc, err)
		}
	}
	p := newPuller(c, pullConfig{stream: "none", name: "test"})
	if err := p.reached(ctx, 1); !errors.Is(err, ErrNotFound) {
		t.Errorf("no stream: %v", err)
	}
}

// A message that the handler refused comes again at the next run, also when none
// comes after it.
func TestCursor_refusedMessageComesAgain(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		ctx, c := t.Context(), connect(t, srv)
		if _, err := c.CreateStream(ctx, StreamConfig{Name: "IN", Subjects: []string{"in"}}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Publish(ctx, "in", nil, []byte("x")); err != nil {
			t.Fatal(err)
		}
		cu, err := c.OpenCursor(ctx, CursorConfig{Stream: "IN"})
		if err != nil {
			t.Fatal(err)
		}
		refused, taken := errors.New("refused"), errors.New("taken")
		for _, answer := range []error{refused, refused, taken} {
			if err := cu.Run(ctx, func(*Msg) error { return answer }); !errors.Is(err, answer) {
				t.Fatalf("run ended with %v, want %v", err, answer)
			}
		}
		if cu.Last() != 0 {
			t.Errorf("last is %d", cu.Last())
		}
		if err := cu.Close(ctx); err != nil {
			t.Error(err)
		}
	})
}
