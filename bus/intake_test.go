package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"natsflow/testenv"
)

// intakeOf is the intake "Q" of the stream "S".
func intakeOf(subjects ...string) IntakeConfig {
	return IntakeConfig{Name: "Q", Origin: "S", Consumer: "natsflow-f", Subjects: subjects}
}

// openIntake makes an intake.
func openIntake(t *testing.T, c *Conn, cfg IntakeConfig) Intake {
	t.Helper()
	if _, err := c.EnsureIntakeConsumer(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	return must3(t)(c.EnsureIntake(t.Context(), cfg))
}

func must3(t *testing.T) func(in Intake, _ bool, err error) Intake {
	return func(in Intake, _ bool, err error) Intake {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return in
	}
}

// awaitIntake waits until an intake is as it should be.
func awaitIntake(t *testing.T, c *Conn, what string, ok func(Intake) bool) Intake {
	t.Helper()
	ctx := limited(t)
	for {
		in, err := c.Intake(ctx, "Q")
		if err == nil && ok(in) {
			return in
		}
		if sleep(ctx, time.Millisecond) != nil {
			t.Fatalf("waited in vain: %s: %+v, %v", what, in, err)
		}
	}
}

// awaitMsgs waits until a stream holds n messages.
func awaitMsgs(t *testing.T, c *Conn, stream string, n uint64) {
	t.Helper()
	ctx := limited(t)
	var last StreamInfo
	for {
		info, err := c.Stream(ctx, stream)
		if err == nil {
			last = info
		}
		if err == nil && info.Msgs == n {
			return
		}
		if sleep(ctx, time.Millisecond) != nil {
			t.Fatalf("stream %s holds %d messages, %d to %d, want %d (%v)", stream, last.Msgs, last.FirstSeq, last.LastSeq, n, err)
		}
	}
}

func queue(t *testing.T, c *Conn, retention string) {
	t.Helper()
	if _, err := c.CreateStream(t.Context(), StreamConfig{Name: "S", Subjects: []string{"s.>"}, Retention: retention}); err != nil {
		t.Fatal(err)
	}
}

// What an intake has stored goes from the origin, and nothing before that.
func TestConn_EnsureIntake(t *testing.T) {
	for _, retention := range []string{"workqueue", "interest", "limits"} {
		t.Run(retention, func(t *testing.T) {
			c := connect(t, testenv.StartServer(t))
			ctx := limited(t)
			queue(t, c, retention)
			feed(t, c, 0, 10)
			cfg := intakeOf()
			if _, err := c.CheckIntake(ctx, cfg); !errors.Is(err, ErrNotFound) {
				t.Fatalf("none yet: %v", err)
			}
			for i := range 2 {
				created, err := c.EnsureIntakeConsumer(ctx, cfg)
				if err != nil || created != (i == 0) {
					t.Fatalf("consumer %d: %v %v", i, created, err)
				}
				in, created, err := c.EnsureIntake(ctx, cfg)
				if err != nil || created != (i == 0) || in.Retention != "limits" || in.Duplicates != 0 {
					t.Fatalf("intake %d: %+v %v %v", i, in, created, err)
				}
			}
			first := 0
			if retention == "interest" {
				first = 10 // nobody wanted what came before
			}
			feed(t, c, 10, 10)
			in := awaitIntake(t, c, "all", func(in Intake) bool { return in.LastSeq == uint64(20-first) })
			if in.Origin != 20 || in.Lag != 0 || in.Problem != "" || in.Silent < 0 {
				t.Errorf("%+v", in)
			}
			left := uint64(0)
			if retention == "limits" {
				left = 20
			}
			awaitMsgs(t, c, "S", left)
			for i := range 20 - first {
				m := must(c.nextMsg(ctx, "Q", ">", uint64(i+1)))
				if string(m.Data) != strconv.Itoa(first+i) || m.Subject != fmt.Sprintf("s.%d", (first+i)%4) {
					t.Errorf("message %d is %q on %s", i+1, m.Data, m.Subject)
				}
			}
		})
	}
}

// The consumer of a work queue is the only one of its messages.
func TestConn_EnsureIntakeConsumer_taken(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	queue(t, c, "workqueue")
	if _, err := c.EnsureIntakeConsumer(ctx, intakeOf("s.0", "s.1")); err != nil {
		t.Fatal(err)
	}
	for _, c2 := range []struct {
		subjects []string
		taken    bool
	}{{nil, true}, {[]string{"s.1"}, true}, {[]string{"s.2", "s.1"}, true}, {[]string{"s.2", "s.3"}, false}} {
		cfg := intakeOf(c2.subjects...)
		cfg.Name, cfg.Consumer = "Q2", "natsflow-g"
		if _, err := c.EnsureIntakeConsumer(ctx, cfg); errors.Is(err, ErrTaken) != c2.taken || !c2.taken && err != nil {
			t.Errorf("%v: %v", c2.subjects, err)
		}
	}
	// The filters follow the flow, on a live consumer.
	openIntake(t, c, intakeOf("s.0", "s.1"))
	if created, err := c.EnsureIntakeConsumer(ctx, intakeOf("s.1", "s.0")); created || err != nil {
		t.Errorf("in another order: %v %v", created, err)
	}
	if _, err := c.EnsureIntakeConsumer(ctx, intakeOf("s.0")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.EnsureIntakeConsumer(ctx, intakeOf("s.0", "s.2")); !errors.Is(err, ErrTaken) {
		t.Errorf("a filter that another one has: %v", err)
	}
	feed(t, c, 0, 8)
	awaitIntake(t, c, "those of s.0", func(in Intake) bool { return in.LastSeq == 2 })
	awaitMsgs(t, c, "S", 6)
	missing := intakeOf()
	missing.Origin = "NONE"
	if _, err := c.EnsureIntakeConsumer(ctx, missing); !errors.Is(err, ErrNotFound) {
		t.Errorf("no origin: %v", err)
	}
}

// A stream that would lose messages, or is somebody else's, is not taken for the
// intake, and the error says what differs.
func TestConn_EnsureIntake_differs(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	ctx := limited(t)
	queue(t, c, "workqueue")
	if _, err := c.CreateStream(ctx, StreamConfig{Name: "Q", Subjects: []string{"q.>"}}); err != nil {
		t.Fatal(err)
	}
	_, _, err := c.EnsureIntake(ctx, intakeOf())
	if !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "it takes messages on q.>") || !strings.Contains(err.Error(), "its source is not stream S by the consumer natsflow-f") {
		t.Fatalf("a plain stream: %v", err)
	}
	if err := c.DeleteStream(ctx, "Q"); err != nil {
		t.Fatal(err)
	}
	openIntake(t, c, intakeOf())
	for _, tc := range []struct {
		change, back map[string]any
		want         string
	}{
		{map[string]any{"max_age": time.Hour}, map[string]any{"max_age": 0}, "it drops messages after 1h0m0s"},
		{map[string]any{"max_msgs": 5}, map[string]any{"max_msgs": -1}, "at its limits it discards the oldest messages"},
		{map[string]any{"max_bytes": 5000}, map[string]any{"max_bytes": -1}, "at its limits it discards the oldest messages"},
		{map[string]any{"max_msgs_per_subject": 1}, map[string]any{"max_msgs_per_subject": -1}, "it keeps 1 messages of a subject"},
		{map[string]any{"duplicate_window": time.Minute}, map[string]any{"duplicate_window": 0}, "duplicate window of 1m0s"},
		{map[string]any{"retention": "interest"}, map[string]any{"retention": "limits"}, "its retention is Interest, not limits"},
		{map[string]any{"allow_rollup_hdrs": true}, map[string]any{"allow_rollup_hdrs": false}, "removed by headers"},
		{map[string]any{"subjects": []string{"q.>"}}, map[string]any{"subjects": []string{}}, "it takes messages on q.>"},
		{map[string]any{"discard": "new", "max_msgs": 5}, map[string]any{"discard": "old", "max_msgs": -1}, ""},
	} {
		s.Admin().Edit("Q", tc.change)
		_, created, err := c.EnsureIntake(ctx, intakeOf())
		switch {
		case tc.want == "" && (err != nil || created):
			t.Errorf("%v: %v", tc.change, err)
		case tc.want != "" && (!errors.Is(err, ErrExists) || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%v: %v", tc.change, err)
		}
		s.Admin().Edit("Q", tc.back)
	}
	if _, _, err := c.EnsureIntake(ctx, intakeOf()); err != nil {
		t.Fatal(err)
	}
}

// Messages with one id, with rollups, with a TTL are messages like others in the
// intake.
func TestConn_EnsureIntake_headers(t *testing.T) {
	s := testenv.StartServer(t)
	c := connect(t, s)
	ctx := limited(t)
	if _, err := c.createStream(ctx, jetstream.StreamConfig{
		Name: "S", Subjects: []string{"s.>"}, Retention: jetstream.WorkQueuePolicy, MaxMsgs: -1, MaxBytes: -1, MaxMsgSize: -1, MaxMsgsPerSubject: -1,
		Replicas: 1, AllowRollup: true, AllowMsgTTL: true, AllowAtomicPublish: true, Duplicates: 100 * time.Millisecond, Storage: jetstream.FileStorage,
	}); err != nil {
		t.Fatal(err)
	}
	put := func(header ...string) {
		h := map[string]string{}
		for i := 0; i < len(header); i += 2 {
			h[header[i]] = header[i+1]
		}
		if _, err := c.Publish(ctx, "s.a", h, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	put(hdrMsgID, "one")
	put(hdrTTL, "1h")
	put("Nats-Expected-Stream", "S")
	put(hdrExpectedSeq, "3")
	if err := sleep(ctx, 150*time.Millisecond); err != nil { // beyond the window of the origin
		t.Fatal(err)
	}
	put(hdrMsgID, "one")
	openIntake(t, c, intakeOf())
	awaitIntake(t, c, "all five", func(in Intake) bool { return in.LastSeq == 5 && in.Origin == 5 })
	put(hdrRollup, "sub")
	awaitIntake(t, c, "a rollup", func(in Intake) bool { return in.LastSeq == 6 })
	put(hdrRollup, "all")
	in := awaitIntake(t, c, "another rollup", func(in Intake) bool { return in.LastSeq == 7 })
	if in.Msgs != 7 || in.Problem != "" {
		t.Errorf("%+v", in)
	}
	awaitMsgs(t, c, "S", 0)
}

func TestConn_PurgeBefore(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	stream(t, c)
	feed(t, c, 0, 10)
	for _, tc := range []struct{ seq, first, last uint64 }{{0, 1, 10}, {1, 1, 10}, {4, 4, 10}, {3, 4, 10}, {10, 10, 10}, {11, 11, 10}} {
		if err := c.PurgeBefore(ctx, "S", tc.seq); err != nil {
			t.Fatal(err)
		}
		if info := must(c.Stream(ctx, "S")); info.FirstSeq != tc.first || info.LastSeq != tc.last {
			t.Errorf("before %d: %d to %d", tc.seq, info.FirstSeq, info.LastSeq)
		}
	}
	if err := c.PurgeBefore(ctx, "NONE", 5); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// The server is killed again and again while messages go from a work queue into the
// intake, which is trimmed meanwhile to its last message: all of them come, once, in
// order.
func TestIntake_kill(t *testing.T) {
	const n = 30_000
	p := testenv.StartProcess(t)
	c := must(Connect(t.Context(), Config{URL: p.URL()}))
	t.Cleanup(c.Close)
	ctx := limited(t)
	queue(t, c, "workqueue")
	f := c.NewFeeder(1000)
	for i := range n {
		if err := f.Publish("s.a", "", fmt.Appendf(nil, "%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	openIntake(t, c, intakeOf())
	next := 0
	// take reads what is in the intake and trims it.
	take := func(ctx context.Context) error {
		in, err := c.Intake(ctx, "Q")
		if err != nil || in.LastSeq == 0 || in.LastSeq < uint64(next) {
			return err
		}
		for seq := uint64(next) + 1; seq <= in.LastSeq; seq++ {
			m, err := c.nextMsg(ctx, "Q", ">", seq)
			if err != nil {
				return err
			}
			if m.Seq != seq || string(m.Data) != strconv.Itoa(next) {
				t.Fatalf("sequence %d is %d and holds %s, want %d", seq, m.Seq, m.Data, next)
			}
			next++
		}
		return c.PurgeBefore(ctx, "Q", in.LastSeq)
	}
	for kills := 0; next < n; {
		before := next
		if err := take(ctx); err != nil && !Retryable(err) {
			t.Fatal(err)
		}
		if next > before && kills < 6 && next > kills*n/8 {
			kills++
			p.Kill()
			p.Restart()
		}
		if sleep(ctx, time.Millisecond) != nil {
			t.Fatalf("%d of %d came", next, n)
		}
	}
	// What has come over may stay in the origin after a kill: the acks may pass what is not
	// sent again. It does not come again, and what is new does.
	if _, err := c.Publish(ctx, "s.a", nil, []byte("last")); err != nil {
		t.Fatal(err)
	}
	in := awaitIntake(t, c, "one more", func(in Intake) bool { return in.LastSeq > n })
	if in.LastSeq != n+1 || in.Origin != n+1 || in.Msgs != 2 {
		t.Errorf("%+v", in)
	}
	if m := must(c.nextMsg(ctx, "Q", ">", n+1)); string(m.Data) != "last" {
		t.Errorf("%q came again", m.Data)
	}
}

// The origin is deleted and created again. The intake goes on with the new stream by
// another consumer, and has all that is in it.
func TestConn_FeedIntake(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	queue(t, c, "workqueue")
	cfg := intakeOf()
	if _, err := c.FeedIntake(ctx, cfg); !errors.Is(err, ErrNotFound) {
		t.Fatalf("there is none: %v", err)
	}
	openIntake(t, c, cfg)
	feed(t, c, 0, 100)
	awaitIntake(t, c, "the first ones", func(in Intake) bool { return in.Origin == 100 })
	if err := c.DeleteStream(ctx, "S"); err != nil {
		t.Fatal(err)
	}
	queue(t, c, "workqueue")
	feed(t, c, 100, 50)
	cfg.Consumer = "natsflow-g"
	if in, err := c.CheckIntake(ctx, cfg); err != nil || in.Consumer != "natsflow-f" {
		t.Fatalf("only looked at: %+v %v", in, err)
	}
	if _, err := c.EnsureIntakeConsumer(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if in, err := c.FeedIntake(ctx, cfg); err != nil || in.Consumer != "natsflow-g" {
		t.Fatalf("%+v %v", in, err)
	}
	in := awaitIntake(t, c, "the new ones", func(in Intake) bool { return in.LastSeq == 150 && in.Origin == 50 })
	for seq := range in.LastSeq {
		if m := must(c.nextMsg(ctx, "Q", ">", seq+1)); string(m.Data) != strconv.FormatUint(seq, 10) {
			t.Errorf("sequence %d holds %s", seq+1, m.Data)
		}
	}
	awaitMsgs(t, c, "S", 0)
	if n := must(c.Waiting(ctx, in)); n != 0 {
		t.Errorf("%d are to come", n)
	}
}

// Subjects more than a consumer had are refused once it has passed messages that they
// have: nobody would read these.
func TestConn_EnsureIntakeConsumer_wider(t *testing.T) {
	c := connect(t, testenv.StartServer(t))
	ctx := limited(t)
	must(c.CreateStream(ctx, StreamConfig{Name: "S", Subjects: []string{"s.>"}, Retention: "workqueue"}))
	cfg := intakeOf("s.a")
	openIntake(t, c, cfg)
	publish := func(subject string) {
		t.Helper()
		if _, err := c.js.Publish(ctx, subject, nil); err != nil {
			t.Fatal(err)
		}
	}
	// Nothing is there of what comes to it.
	cfg.Subjects = []string{"s.a", "s.b"}
	if _, err := c.EnsureIntakeConsumer(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	publish("s.c")
	publish("s.b")
	awaitIntake(t, c, "that of s.b", func(in Intake) bool { return in.Origin == 2 })
	for _, subjects := range [][]string{{"s.a", "s.b", "s.c"}, nil} {
		cfg.Subjects = subjects
		if _, err := c.EnsureIntakeConsumer(ctx, cfg); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "from sequence 1 on") {
			t.Errorf("%q: %v", subjects, err)
		}
	}
	// Fewer are nothing new.
	cfg.Subjects = []string{"s.b"}
	if _, err := c.EnsureIntakeConsumer(ctx, cfg); err != nil {
		t.Error(err)
	}
}
