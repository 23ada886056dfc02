package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
	"natsflow/testenv"
)

// ownIN is the intake of the flow "count" for the stream "IN".
const ownIN = "NATSFLOW_Q_count_IN"

// queued makes the source "IN" anew, with a retention.
func (l *lab) queued(retention string) {
	l.tb.Helper()
	if err := l.conn.DeleteStream(l.ctx, "IN"); err != nil {
		l.tb.Fatal(err)
	}
	if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN", Subjects: []string{"in.>"}, Retention: retention}); err != nil {
		l.tb.Fatal(err)
	}
}

func (l *lab) stream(name string) bus.StreamInfo {
	l.tb.Helper()
	info, err := l.conn.Stream(l.ctx, name)
	if err != nil {
		l.tb.Fatal(err)
	}
	return info
}

// holds waits until a stream holds n messages.
func (l *lab) holds(stream string, n uint64) {
	l.tb.Helper()
	l.await(fmt.Sprintf("%d messages in %s", n, stream), func() bool { return l.stream(stream).Msgs == n })
}

// judgeIntake says that nothing is left in the source, and the last message in the
// intake.
func (l *lab) judgeIntake() {
	l.tb.Helper()
	l.holds("IN", 0)
	if info := l.stream(ownIN); info.FirstSeq != info.LastSeq || info.LastSeq != l.seq {
		l.tb.Fatalf("the intake has %d to %d, of %d that were fed", info.FirstSeq, info.LastSeq, l.seq)
	}
}

// feeding is the name of the consumer that brings messages over.
func (l *lab) feeding() string {
	l.tb.Helper()
	for _, c := range l.srv.Admin().Consumers("IN") {
		if strings.HasPrefix(c.Name, "natsflow-count-") {
			return c.Name
		}
	}
	l.tb.Fatal("the source has no consumer of the flow")
	return ""
}

// paused stops the consumer that brings messages over for a while, or no longer.
func (l *lab) paused(d time.Duration) {
	l.tb.Helper()
	body, err := json.Marshal(map[string]time.Time{"pause_until": time.Now().Add(d).UTC()})
	if err != nil {
		l.tb.Fatal(err)
	}
	answers := l.srv.Admin().Ask("$JS.API.CONSUMER.PAUSE.IN."+l.feeding(), body, 1, time.Minute)
	if len(answers) != 1 || strings.Contains(string(answers[0].Data), `"error"`) {
		l.tb.Fatalf("pausing: %s", answers)
	}
}

// retentions are those for which a flow has an intake.
func retentions(t *testing.T, run func(t *testing.T, l *lab)) {
	for _, retention := range []string{"workqueue", "interest"} {
		t.Run(retention, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				l.queued(retention)
				run(t, l)
			})
		})
	}
}

func TestIntakeName(t *testing.T) {
	seen := map[string]bool{}
	long := strings.Repeat("f", 100)
	for _, tc := range []struct{ flow, source, want string }{
		{"jobs", "JOBS", "NATSFLOW_Q_jobs_JOBS"},
		{"a", "b_c", "NATSFLOW_Q_a_b_c"},
		{long, strings.Repeat("S", 255), ""},
		{long, strings.Repeat("S", 254), ""},
		{long[:99], strings.Repeat("S", 255), ""},
		{long[:99], "f_" + strings.Repeat("S", 253), ""},
	} {
		name := intakeName(tc.flow, tc.source)
		if tc.want != "" && name != tc.want || len(name) > maxIntakeName || seen[name] {
			t.Errorf("%s of %s: %s", tc.source, tc.flow, name)
		}
		seen[name] = true
	}
}

// A flow reads such a source through a stream of its own. At the end the source is
// empty, and the own stream too, but for the last message.
func TestIntake(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.more(1000)
		l.awaitResults(p, 1000)
		l.holds("IN", 0)
		l.holds(ownIN, 1)
		l.more(500)
		l.send("control.drain.count", `{"at":"head"}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		rec := l.record()
		if rec.State != control.StateDrained || rec.Report.Cut[ownIN] != 1500 || rec.Report.Records[ownIN] != 1500 || rec.Sources[ownIN].Origin != "IN" {
			t.Errorf("%+v %+v", rec.Sources, rec.Report)
		}
		// Trimmed by the drain, before it was recorded.
		if info := l.stream(ownIN); info.Msgs != 1 {
			t.Errorf("%d messages are left", info.Msgs)
		}
		l.judge("OUT")
		l.judgeIntake()
	})
}

// Scenario 11: drain a flow on an Interest stream, publish 100, resume. All 100 are
// processed. They are brought over while nobody runs.
func TestIntake_drainPublishResume(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.more(50)
		l.awaitResults(p, 50)
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.more(100)
		l.srv.Restart()
		l.holds("IN", 0)
		if l.count("OUT") != 50 {
			t.Fatalf("%d results of a drained flow", l.count("OUT"))
		}
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
		l.judgeIntake()
	})
}

// Scenario 12: WorkQueue: SIGKILL between snapshots. Nothing lost, at any point of
// the protocol, also of those where the intake is made and trimmed.
func TestIntake_crash(t *testing.T) {
	for _, point := range append([]string{"intake-consumer", "intake-created", "trim", "trimmed"}, points...) {
		if point == "chunk-written" || point == "purged" || point == "base-written" {
			continue // not with so little state
		}
		t.Run(point, func(t *testing.T) {
			retentions(t, func(t *testing.T, l *lab) {
				f := countFlow{options: flow.Options{Partitions: 4, CommitInterval: 20 * time.Millisecond}}.build(t)
				if strings.HasPrefix(point, "intake-") {
					if err := l.start(f, Config{}, (&crasher{point: point, left: 1}).probe).wait(); !errors.Is(err, errCrash) {
						t.Fatalf("%v", err)
					}
					if point == "intake-consumer" && l.missing(ownIN) != nil {
						t.Fatal("the intake is there")
					}
					l.more(100) // kept for the consumer already
				}
				for _, left := range []int{1, 2} {
					c := &crasher{point: point, left: left}
					p := l.start(f, Config{trimEvery: 500 * time.Millisecond, idleCommit: time.Second, Resume: true}, c.probe)
					l.await("the worker runs", func() bool { return p.ended() || p.at().Phase == "running" })
					l.more(300)
					for n := 0; n < 60 && !p.ended(); n++ {
						l.pass(100 * time.Millisecond)
					}
					if !p.ended() {
						l.send("control.drain.count", `{"at":"head"}`)
						l.await("the end", p.ended)
					}
					if !c.struck && left == 1 && !strings.HasPrefix(point, "intake-") {
						t.Error("it never crashed")
					}
					l.more(50)
					l.finish(f)
				}
				l.judge("OUT")
				l.judgeIntake()
			})
		})
	}
}

// finish lets a worker go on after a crash until everything is processed, and drains.
// What was under way when the crash came may be a drain: that ends first.
func (l *lab) finish(f *flow.Flow) {
	l.tb.Helper()
	for range 2 {
		p := l.start(f, Config{Resume: true}, nil)
		l.await("everything", func() bool { return p.ended() || l.count("OUT") == int(l.seq) })
		if !p.ended() {
			l.send("control.drain.count", `{"at":"head"}`)
		}
		if err := p.wait(); err != nil {
			l.tb.Fatal(err)
		}
		if l.count("OUT") == int(l.seq) {
			return
		}
	}
}

// missing returns an error if a stream is there.
func (l *lab) missing(stream string) error {
	l.tb.Helper()
	_, err := l.conn.Stream(l.ctx, stream)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	return fmt.Errorf("stream %s is there (%w)", stream, err)
}

// What is not processed stays though others are far ahead: a task that nobody has
// holds all of it.
func TestIntake_trimsOnlyWhatAllHave(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
		p := l.start(f, Config{trimEvery: time.Second}, nil)
		l.awaitPhase(p, "running")
		l.more(100)
		l.awaitResults(p, 100)
		l.holds(ownIN, 1)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		// A session as a worker has it, asked by hand.
		bucket, err := l.conn.OpenBucket(l.ctx, "natsflow_count")
		if err != nil {
			t.Fatal(err)
		}
		s := &session{
			cfg: &Config{}, conn: l.conn, log: l.log, sources: []flow.SourceInfo{{Stream: ownIN}}, inputs: []input{{stream: ownIN}}, flow: countFlow{options: flow.Options{Partitions: 4}}.build(t),
			intakes: []*intake{{name: ownIN, created: l.stream(ownIN).Created}}, mirrors: []*mirror{nil},
			store: kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: "count", Owner: "judge"}),
		}
		if low, err := s.logged(l.ctx, 0); low != 100 || err != nil {
			t.Fatalf("all are at %d, %v", low, err)
		}
		// Behind the position of all is a gap, or one who has lost its tasks.
		if err := s.overtaken(l.ctx, 0, 99); !errors.Is(err, bus.ErrFenced) {
			t.Errorf("a position that nobody is at any more: %v", err)
		}
		if err := s.overtaken(l.ctx, 0, 100); err != nil {
			t.Errorf("the position of all: %v", err)
		}
		l.more(10)
		l.holds(ownIN, 11)
		if err := s.trim(l.ctx, 0, 110); err != nil {
			t.Fatal(err)
		}
		if info := l.stream(ownIN); info.FirstSeq != 101 {
			t.Errorf("begins at %d", info.FirstSeq)
		}
		// Another stream of the name is left alone, and so is one of which a task has no
		// position.
		s.intakes[0].created = time.Now()
		if err := bucket.Purge(l.ctx, "log.0.2.>", 0); err != nil {
			t.Fatal(err)
		}
		if low, err := s.logged(l.ctx, 0); low != 0 || err != nil {
			t.Errorf("with a task that has no log: %d, %v", low, err)
		}
	})
}

// The partitioned mirror of an intake is trimmed with it.
func TestIntake_partitioned(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		team := l.team(countFlow{partitionBy: byKey}.build(t), 2, Config{trimEvery: time.Second})
		l.more(500)
		l.awaitResults(team[0], 500)
		l.holds(ownIN, 1)
		l.holds(l.mirrored(), 1)
		l.more(100)
		l.send("control.drain.count", `{"at":"head"}`)
		for _, p := range team {
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
		}
		l.judge("OUT")
		l.judgeIntake()
		l.holds(l.mirrored(), 1)
	})
}

// A head is that of the source: what is in it comes over first.
func TestIntake_head(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{subjects: []string{"in.*", "in.more.>"}}.build(t)
		team := l.team(f, 2, Config{})
		l.paused(10 * time.Second)
		l.more(5000)
		if n := l.stream("IN").Msgs; n < 4000 {
			t.Fatalf("%d are in the source", n)
		}
		l.send("control.drain.count", `{"at":"head"}`)
		for _, p := range team {
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
		}
		if rec := l.record(); rec.Report.Cut[ownIN] != 5000 {
			t.Errorf("drained at %d", rec.Report.Cut[ownIN])
		}
		l.judge("OUT")
		l.judgeIntake()
	})
}

// A drain does not wait for ever for what does not come over. It comes after the
// resume.
func TestIntake_headWaitsInVain(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		logged := l.logTo()
		f := countFlow{}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.paused(time.Hour)
		l.more(100)
		began := time.Now()
		l.send("control.drain.count", `{"at":"head"}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < intakeWait || took > intakeWait+5*time.Second {
			t.Errorf("drained after %v", took)
		}
		if logged.count("the drain does not wait any longer for what is still in the source") != 1 || logged.count("head=100") != 1 {
			t.Error("no word of what is left")
		}
		if n := l.count("OUT"); n > 0 {
			t.Errorf("%d results", n)
		}
		l.paused(0)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
		l.judgeIntake()
	})
}

// What somebody has removed from the intake is a gap, what was trimmed is none.
func TestIntake_gap(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		p := l.start(f, Config{trimEvery: time.Second}, nil)
		l.awaitPhase(p, "running")
		l.more(100)
		l.awaitResults(p, 100)
		l.holds(ownIN, 1)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		fed := map[string]int{}
		for key, n := range l.fed {
			fed[key] = n
		}
		l.more(20)
		l.holds(ownIN, 21)
		l.srv.Admin().Purge(ownIN, 121)
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "up to 20 messages are missing") || !strings.Contains(err.Error(), ownIN) {
			t.Fatalf("a purged intake: %v", err)
		}
		l.fed = fed
		l.more(30)
		l.drain(f, Config{AcceptGap: true})
		l.judge("OUT")
	})
}

// Somebody deletes the intake. Nobody makes it anew without being told to, and when
// they do, positions go on behind the former ones.
func TestIntake_deleted(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.more(100)
		l.awaitResults(p, 100)
		l.holds("IN", 0)
		if err := l.conn.DeleteStream(l.ctx, ownIN); err != nil {
			t.Fatal(err)
		}
		if err := p.wait(); !errors.Is(err, bus.ErrNotFound) || !strings.Contains(err.Error(), ownIN) || !strings.Contains(err.Error(), "start the worker again") {
			t.Fatalf("deleted under a worker: %v", err)
		}
		l.more(20) // they stay in the source
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), ownIN) || !strings.Contains(err.Error(), "--accept-gap") {
			t.Fatalf("started without it: %v", err)
		}
		if err := l.missing(ownIN); err != nil {
			t.Fatal(err)
		}
		l.drain(f, Config{AcceptGap: true})
		if info := l.stream(ownIN); info.LastSeq != 120 {
			t.Errorf("ends at %d", info.LastSeq)
		}
		l.judge("OUT")
		l.more(20)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
		l.judgeIntake()
	})
}

// A work queue gives each message to one consumer.
func TestIntake_taken(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.queued("workqueue")
		f := countFlow{subjects: []string{"in.>"}}.build(t)
		other := countFlow{name: "other", subjects: []string{"in.k1"}}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		err := l.start(other, Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !errors.Is(err, bus.ErrTaken) || !strings.Contains(err.Error(), "stream IN is a work queue") || !strings.Contains(err.Error(), "nats consumer ls IN") {
			t.Fatalf("%v", err)
		}
		if err := l.missing("NATSFLOW_Q_other_IN"); err != nil {
			t.Error(err)
		}
	})
}

// A stream in the way is not taken for the intake.
func TestIntake_differs(t *testing.T) {
	retentions(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: ownIN, Subjects: []string{"own.>"}}); err != nil {
			t.Fatal(err)
		}
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "it takes messages on own.>") {
			t.Fatalf("another stream of the name: %v", err)
		}
		if n := len(l.srv.Admin().Consumers("IN")); n > 0 {
			t.Errorf("%d consumers were made for it", n)
		}
		if err := l.conn.DeleteStream(l.ctx, ownIN); err != nil {
			t.Fatal(err)
		}
		l.drain(f, Config{})
		l.srv.Admin().Edit(ownIN, map[string]any{"max_age": time.Hour})
		err = l.start(f, Config{Resume: true}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "it drops messages after 1h0m0s") {
			t.Fatalf("one that was edited: %v", err)
		}
	})
}

// The retention of a source changes. A flow that has an intake stays with it; one
// that has none does not go on.
func TestIntake_retentionChanges(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.queued("interest")
		f := countFlow{}.build(t)
		l.drain(f, Config{})
		l.more(50)
		l.srv.Admin().Edit("IN", map[string]any{"retention": "limits"})
		l.more(50)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
		if rec := l.record(); rec.Report.Cut[ownIN] != 100 {
			t.Errorf("%+v", rec.Report)
		}
		if err := l.conn.DeleteStream(l.ctx, ownIN); err != nil {
			t.Fatal(err)
		}
		err := l.start(f, Config{Resume: true}, nil).wait()
		if !errors.Is(err, control.ErrDefinition) || !strings.Contains(err.Error(), "flow count reads IN through the stream "+ownIN+", which was deleted") {
			t.Fatalf("%v", err)
		}
	})
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(50)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 50)
		l.srv.Admin().Edit("IN", map[string]any{"retention": "interest"})
		if err := p.wait(); !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "has interest retention now") {
			t.Fatalf("under a worker: %v", err)
		}
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, control.ErrDefinition) || !strings.Contains(err.Error(), "stream IN had limits retention when flow count began to read it") {
			t.Fatalf("at the start: %v", err)
		}
		if err := l.missing(ownIN); err != nil {
			t.Error(err)
		}
		l.srv.Admin().Edit("IN", map[string]any{"retention": "limits"})
	})
}

// Messages that do not come over are warned about; a consumer that was deleted is
// made anew.
func TestIntake_warnings(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.queued("workqueue")
		logged := l.logTo()
		p := l.start(countFlow{}.build(t), Config{}, nil)
		l.awaitPhase(p, "running")
		l.srv.Admin().DeleteConsumer("IN", l.feeding())
		l.more(100)
		l.awaitResults(p, 100)
		if logged.count("the consumer that brings messages over to the flow was gone") != 1 {
			t.Error("no word of the consumer")
		}
		l.srv.Admin().Edit("IN", map[string]any{"max_msgs": 100})
		l.paused(time.Hour)
		l.more(95)
		warning := ""
		l.await("a warning", func() bool { warning = strings.Join(p.at().Warnings, "; "); return warning != "" })
		if warning != "stream IN drops messages that are not processed after 5 more (MaxMsgs)" {
			t.Errorf("warning %q", warning)
		}
		l.paused(0)
		l.awaitResults(p, 195)
		l.await("no warning", func() bool { return len(p.at().Warnings) == 0 })
		// The source goes, and a consumer has it.
		if err := l.conn.DeleteStream(l.ctx, "IN"); err != nil {
			t.Fatal(err)
		}
		l.await("a warning", func() bool { warning = strings.Join(p.at().Warnings, "; "); return warning != "" })
		if !strings.HasPrefix(warning, "nothing comes over from stream IN to "+ownIN) {
			t.Errorf("warning %q", warning)
		}
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN", Subjects: []string{"in.>"}, Retention: "workqueue"}); err != nil {
			t.Fatal(err)
		}
		l.more(100)
		l.awaitResults(p, 295)
		l.await("no warning", func() bool { return len(p.at().Warnings) == 0 })
		l.send("control.drain.count", `{"at":"head"}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
		l.judgeIntake()
	})
}

// A dead letter, and a stop on an error, name the stream that the sequence is of.
func TestIntake_failingRecord(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.queued("workqueue")
		bad := func(m *flow.Meta, v string) error {
			if strings.HasSuffix(v, "bad") {
				return fmt.Errorf("bad record of %s", m.Stream)
			}
			return nil
		}
		p := l.start(countFlow{step: bad}.build(t), Config{trimEvery: time.Second}, nil)
		l.awaitPhase(p, "running")
		l.more(10)
		l.put("k1 bad")
		l.await("a dead letter", func() bool { return l.missing(deadStream) != nil && len(l.read(deadStream)) == 1 })
		m := l.read(deadStream)[0]
		if m.header[flow.HeaderDeadStream][0] != ownIN || m.header[flow.HeaderDeadSeq][0] != "11" || m.header[flow.HeaderDeadError][0] != "bad record of "+ownIN {
			t.Errorf("%v", m.header)
		}
		l.awaitResults(p, 10)
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		stops := countFlow{step: bad, options: flow.Options{OnError: flow.Stop}}.build(t)
		l.more(10)
		l.put("k2 bad")
		l.more(10)
		err := l.start(stops, Config{Resume: true, trimEvery: 500 * time.Millisecond}, nil).wait()
		var step *flow.StepError
		if !errors.As(err, &step) || step.Stream != ownIN || step.Seq != 22 {
			t.Fatalf("%v", err)
		}
		// It is still there for a version that can process it.
		l.drain(countFlow{}.build(t), Config{})
		if info := l.stream(ownIN); info.FirstSeq != 32 || info.LastSeq != 32 {
			t.Errorf("%d to %d", info.FirstSeq, info.LastSeq)
		}
		if n := l.count("OUT"); n != 31 {
			t.Errorf("%d results", n)
		}
	})
}

// TestRun_manyWorkersQueue is TestRun_manyWorkers with a work queue, or a source with
// interest retention, that is trimmed all the time.
func TestRun_manyWorkersQueue(t *testing.T) {
	for name, src := range map[string]manySource{
		"workqueue": {retention: "workqueue"}, "interest": {retention: "interest"}, "partitioned": {retention: "workqueue", partitionBy: byKey},
	} {
		t.Run(name, func(t *testing.T) {
			runHistories(t, sinkKinds[:1], 2, 15, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
				manyHistory(t, srv, kind, seed, src)
			})
		})
	}
}

// Messages that have come over and stay in a work queue are told of once, with the
// sequences.
func TestIntake_left(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		logged := l.logTo()
		s := &session{conn: l.conn, log: l.log}
		look := func(in *intake, over uint64) int {
			s.lookForLeft(l.ctx, in, bus.Intake{Origin: over})
			return logged.count("are still in the source")
		}
		for _, tc := range []struct {
			retention string
			told      int
		}{{"limits", 0}, {"workqueue", 1}} {
			l.queued(tc.retention)
			l.more(10)
			in := &intake{src: flow.SourceInfo{Stream: "IN"}}
			for i, want := range []int{0, tc.told, tc.told} {
				if n := look(in, 7); n != want {
					t.Errorf("%s: told of %d times at look %d, want %d", tc.retention, n, i+1, want)
				}
			}
		}
		if logged.count("from=1 through=7") != 1 {
			t.Error("the sequences are not told")
		}
		in := &intake{src: flow.SourceInfo{Stream: "IN"}, left: 1, told: true}
		l.srv.Admin().Purge("IN", 8)
		if look(in, 7); in.told || in.left != 0 {
			t.Errorf("they were purged: %+v", in)
		}
	})
}

// The intake of a source that the flow does not read any more goes on taking its
// messages.
func TestIntake_former(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		origin, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "OLD", Subjects: []string{"old.>"}, Retention: "workqueue"})
		if err != nil {
			t.Fatal(err)
		}
		f := countFlow{}.build(t)
		cfg := intakeConfig(f, flow.SourceInfo{Stream: "OLD"}, 1, origin)
		if _, err := l.conn.EnsureIntakeConsumer(l.ctx, cfg); err != nil {
			t.Fatal(err)
		}
		if _, _, err := l.conn.EnsureIntake(l.ctx, cfg); err != nil {
			t.Fatal(err)
		}
		logged := l.logTo()
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		want := fmt.Sprintf("nats consumer rm OLD %s; nats stream rm NATSFLOW_Q_count_OLD", cfg.Consumer)
		if logged.count("the flow does not read a source any more") != 1 || logged.count(want) != 1 {
			t.Errorf("no word of %s", want)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// The source loses its end. The server would take what comes next for what it has
// brought over before. (With interest retention it goes on behind what its consumers
// have had.)
func TestIntake_originShorter(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.queued("workqueue")
		f := countFlow{}.build(t)
		l.more(100)
		l.drain(f, Config{})
		l.srv.LoseMessages("IN")
		err := l.start(f, Config{Resume: true}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "stream IN ends at sequence 0, and "+ownIN+" has it up to 100") {
			t.Fatalf("got %v", err)
		}
		if n := l.count("OUT"); n != 100 {
			t.Errorf("%d results, want 100", n)
		}
	})
}
