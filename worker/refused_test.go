package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
	"natsflow/testenv"
)

// room is the largest payload that a result of the flow "count" may have in a sink.
func (l *lab) room(stream string) int {
	l.tb.Helper()
	sink, err := l.conn.OpenSink(l.ctx, stream)
	if err != nil {
		l.tb.Fatal(err)
	}
	return sink.MaxData("count", "0.0")
}

// without is the subjects of the keys k0 to k7 without one.
func without(key string, more ...string) []string {
	var subjects []string
	for i := range 8 {
		if k := fmt.Sprintf("k%d", i); k != key {
			subjects = append(subjects, "out."+k)
		}
	}
	return append(subjects, more...)
}

// awaitTrouble waits until the status says all of it.
func (l *lab) awaitTrouble(p *process, texts ...string) {
	l.tb.Helper()
	l.await(fmt.Sprintf("trouble with %q", texts), func() bool {
		if p.ended() {
			l.tb.Fatalf("the worker ended: %v", p.err)
		}
		for _, text := range texts {
			if !strings.Contains(p.at().Trouble, text) {
				return false
			}
		}
		return true
	})
}

// A sink stops taking a subject while the flow runs. What is committed for it waits
// and the status says what to do, while the worker runs and at a start; a worker
// that is asked to leave does so at once; and when the sink takes the subject
// again, everything is published exactly once, in order.
func TestSink_stopsTakingSubject(t *testing.T) {
	for _, kind := range sinkKinds {
		for _, delivery := range []flow.Delivery{flow.ExactlyOnce, flow.AtLeastOnce} {
			t.Run(fmt.Sprintf("%s/%v", kind.name, delivery), func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					admin := l.srv.Admin()
					kind.make(l)
					f := countFlow{options: flow.Options{Partitions: 4, Delivery: delivery}}.build(t)
					// So little may wait that the lane stops taking records.
					p := l.start(f, Config{Lanes: 1, MaxPending: 500}, nil)
					l.more(200)
					l.awaitResults(p, 200)
					before, err := l.conn.Stream(l.ctx, "OUT")
					if err != nil {
						t.Fatal(err)
					}

					admin.Edit("OUT", map[string]any{"subjects": without("k3", "natsflow.fence.OUT.>")})
					l.more(1000)
					remedy := "nats stream edit OUT --subjects '" + strings.Join(without("k3"), ",")
					if before.Subjects[0] == "out.>" || before.Subjects[0] == "out.*" {
						// What the flow publishes on covers what is there.
						remedy = "nats stream edit OUT --subjects 'natsflow.fence.OUT.>,out.*'"
					}
					l.awaitTrouble(p, "OUT", `"out.k3"`, "step to", remedy)
					l.pass(time.Minute)
					began := time.Now()
					if err := p.leave(); err != nil {
						t.Fatalf("left with %v", err)
					}
					if took := time.Since(began); took > 10*time.Second {
						t.Errorf("leaving took %v", took)
					}
					if delivery == flow.ExactlyOnce {
						// Nothing can be read before it is published.
						p = l.start(f, Config{}, nil)
						l.awaitTrouble(p, "OUT", `"out.k3"`, remedy)
						l.pass(time.Minute)
						if err := p.leave(); err != nil {
							t.Fatalf("left at the start with %v", err)
						}
						p = l.start(f, Config{}, nil)
						l.awaitTrouble(p, "OUT", `"out.k3"`, remedy)
						admin.Edit("OUT", map[string]any{"subjects": before.Subjects})
					} else {
						admin.Edit("OUT", map[string]any{"subjects": before.Subjects})
						p = l.start(f, Config{}, nil)
					}
					l.more(100)
					l.awaitResults(p, len(l.keys))
					l.await("no trouble", func() bool { return p.at().Trouble == "" })
					if err := p.leave(); err != nil {
						t.Fatal(err)
					}
					if delivery == flow.AtLeastOnce {
						l.drain(f, Config{})
						l.judgeAtLeast("OUT")
						return
					}
					l.judge("OUT")
				})
			})
		}
	}
}

// The same while the worker goes on running, to the end.
func TestSink_takesSubjectAgain(t *testing.T) {
	for _, kind := range sinkKinds {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				admin := l.srv.Admin()
				kind.make(l)
				p := l.start(countFlow{options: flow.Options{Partitions: 4}}.build(t), Config{}, nil)
				l.more(200)
				l.awaitResults(p, 200)
				for _, key := range []string{"k3", "k5"} {
					// The fence subject goes, too, as when somebody edits without care.
					admin.Edit("OUT", map[string]any{"subjects": without(key)})
					l.more(300)
					l.awaitTrouble(p, `"out.`+key+`"`)
					l.pass(time.Minute)
					admin.Edit("OUT", map[string]any{"subjects": []string{"out.>"}})
					l.awaitResults(p, len(l.keys))
				}
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judge("OUT")
			})
		})
	}
}

// A drain waits for a sink that refuses results; a worker that is asked to leave
// meanwhile does not end the drain, and the next one does.
func TestSink_refusesDuringDrain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
		p := l.start(f, Config{}, nil)
		l.more(200)
		l.awaitResults(p, 200)
		admin.Edit("OUT", map[string]any{"subjects": without("k3", "natsflow.fence.OUT.>")})
		l.more(200)
		l.awaitTrouble(p, `"out.k3"`)
		l.send("control.drain.count", `{"at":"head"}`)
		l.await("draining", func() bool { return p.at().Phase == "draining" })
		l.pass(time.Minute)
		if err := p.leave(); err != nil {
			t.Fatalf("left with %v", err)
		}
		if rec := l.record(); rec.State != control.StateDraining {
			t.Fatalf("the flow is %s", rec.State)
		}
		p = l.start(f, Config{}, nil)
		l.awaitTrouble(p, `"out.k3"`)
		admin.Edit("OUT", map[string]any{"subjects": []string{"out.*", "natsflow.fence.OUT.>"}})
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if rec := l.record(); !drained(rec) || rec.Report.Cut["IN"] != 400 {
			t.Errorf("record %+v", rec)
		}
		l.judge("OUT")
	})
}

// The limit of a sink for the size of messages is lowered below what is committed:
// it waits, with the command that raises it. Smaller results of the same commit
// may be there already.
func TestSink_lowersMaxMsgSize(t *testing.T) {
	for _, kind := range sinkKinds {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				admin := l.srv.Admin()
				kind.make(l)
				f := sizes(t, "OUT")
				p := l.start(f, Config{}, nil)
				l.put("10")
				l.awaitResults(p, 1)
				admin.Edit("OUT", map[string]any{"max_msg_size": 1000})
				var want []int
				for i := range 40 {
					size := 100 + i
					if i%7 == 3 {
						size = 2000 + i
					}
					l.put(fmt.Sprint(size))
					want = append(want, size)
				}
				l.awaitTrouble(p, "OUT", "message too large", "step to", "nats stream edit OUT --max-msg-size 2")
				l.pass(time.Minute)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				p = l.start(f, Config{}, nil)
				l.awaitTrouble(p, "message too large", "nats stream edit OUT --max-msg-size 2")
				admin.Edit("OUT", map[string]any{"max_msg_size": -1})
				l.await("all", func() bool { return p.at().Sources["IN"].Committed == 41 })
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				got, large := map[int]int{}, 0
				for _, m := range l.read("OUT") {
					got[len(m.data)]++
					if len(m.data) > 1000 {
						large++
					}
				}
				if large == 0 {
					t.Error("nothing that was committed before the restart is there")
				}
				if _, err := l.conn.Stream(l.ctx, deadStream); err == nil {
					// What was not committed then was found too large for what the sink
					// took at the restart.
					for _, m := range l.read(deadStream) {
						size, _ := strconv.Atoi(string(m.data))
						got[size]++
					}
				}
				for _, size := range append(want, 10) {
					if got[size] != 1 {
						t.Errorf("%d results and dead letters of %d bytes", got[size], size)
					}
				}
			})
		})
	}
}

// sizes is a flow that publishes results of the size that a record says to sinks.
func sizes(tb testing.TB, sinks ...string) *flow.Flow {
	tb.Helper()
	b := flow.New("count", flow.Options{Partitions: 1})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
	for _, sink := range sinks {
		subject := strings.ToLower(sink) + "."
		flow.To(src, flow.Sink[string]{
			Stream: sink, Subjects: []string{subject + "*"}, Subject: flow.KeySubject[string](subject),
			Encode: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) {
				var size int
				_, err := fmt.Sscan(v, &size)
				return append(dst, make([]byte, max(size, 0))...), err
			},
		}, flow.ID("to-"+sink))
	}
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// A sink takes messages up to a size of its own: a result that is larger is found
// before the commit and is a dead letter. That of another sink is not concerned.
func TestDeadLetters_largerThanSinkTakes(t *testing.T) {
	for _, fence := range []bool{false, true} {
		t.Run(fmt.Sprintf("fence=%v", fence), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				cfg := bus.StreamConfig{Name: "OUT", Subjects: []string{"out.*"}}
				settings := map[string]any{"max_msg_size": 1000}
				if fence {
					cfg.Subjects = append(cfg.Subjects, "natsflow.fence.OUT.>")
					settings["allow_rollup_hdrs"] = true
				}
				if _, err := l.conn.CreateStream(l.ctx, cfg); err != nil {
					t.Fatal(err)
				}
				l.srv.Admin().Edit("OUT", settings)
				room := l.room("OUT")
				if room < 600 || room > 1000 {
					t.Fatalf("a result may have %d bytes", room)
				}
				f := sizes(t, "OUT", "ALL")
				for _, size := range []int{10, room, room + 1, 20} {
					l.put(fmt.Sprint(size))
				}
				l.drain(f, Config{})
				for stream, want := range map[string][]int{"OUT": {10, room, 20}, "ALL": {10, room, room + 1, 20}} {
					var got []int
					for _, m := range l.read(stream) {
						got = append(got, len(m.data))
					}
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("sizes in %s (-want +got):\n%s", stream, diff)
					}
				}
				dead := l.read(deadStream)
				if len(dead) != 1 || string(dead[0].data) != fmt.Sprint(room+1) || dead[0].header[flow.HeaderDeadStep][0] != "to-OUT" {
					t.Errorf("dead letters %v", dead)
				}
			})
		})
	}
}

// A start that is refused since the sink does not fit can be repeated as often as
// one likes: the logs get no longer.
func TestSink_doesNotFitAgain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "OUT", Subjects: []string{"elsewhere.>", "out.k1"}}); err != nil {
			t.Fatal(err)
		}
		f := countFlow{}.build(t)
		l.more(10)
		var msgs []uint64
		for range 3 {
			err := l.start(f, Config{}, nil).wait()
			if !errors.Is(err, bus.ErrNotTaken) || !strings.Contains(err.Error(), "nats stream edit OUT --subjects 'elsewhere.>,out.*'") {
				t.Fatalf("got %v", err)
			}
			info, err := l.conn.Stream(l.ctx, "KV_natsflow_count")
			if err != nil {
				t.Fatal(err)
			}
			msgs = append(msgs, info.Msgs)
		}
		if msgs[2] > msgs[0] {
			t.Errorf("messages in the bucket of the snapshots: %d", msgs)
		}
		if n := l.count("OUT"); n != 0 {
			t.Errorf("%d results", n)
		}
	})
}

// The sink is deleted and made anew, shorter, between two commits, and nothing
// failed meanwhile: the worker notices by the sequence that its results get, and
// starts a new session, since sequences that it remembers say nothing any more.
func TestSink_sequenceGoesBack(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var log record
		l.log = slog.New(slog.NewTextHandler(&log, nil))
		there := func() {
			if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "OUT", Subjects: []string{"out.>"}}); err != nil {
				t.Fatal(err)
			}
		}
		there()
		f := countFlow{options: flow.Options{Partitions: 1}}.build(t)
		p := l.start(f, Config{}, nil)
		l.feed(l.rng, 200, 1)
		l.awaitResults(p, 200)
		l.pass(10 * time.Second) // an idle commit says that all is published
		if err := l.conn.DeleteStream(l.ctx, "OUT"); err != nil {
			t.Fatal(err)
		}
		there()
		l.feed(l.rng, 100, 1)
		l.await("notices", func() bool { return strings.Contains(log.String(), "was created anew") })
		if strings.Contains(log.String(), "trying again, nothing is lost") {
			t.Errorf("it was noticed by a failure and not by the sequence")
		}
		l.awaitResults(p, 100)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		results := l.read("OUT")
		for i, m := range results {
			if want := fmt.Sprintf(`"n":%d,`, 201+i); !strings.Contains(string(m.data), want) {
				t.Fatalf("result %d is %s", i, m.data)
			}
		}
		if len(results) != 100 {
			t.Errorf("%d results", len(results))
		}
	})
}

// The guard of the connection for results trusts the lease no more, a moment before
// the lease is known to be lost: the worker joins again.
func TestRun_untrusted(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var left atomic.Int64
		left.Store(3)
		p := l.start(countFlow{}.build(t), Config{}, func(_ *process, _ context.Context, point, _ string) error {
			if point == "published" && left.Add(-1) == 0 {
				return fmt.Errorf("publishing to stream OUT: %w", bus.ErrUntrusted)
			}
			return nil
		})
		l.more(300)
		l.awaitResults(p, 300)
		if n := left.Load(); n > 0 {
			t.Errorf("%d more to go", n)
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// A process that was active before fixes the cut of a drain when its successor has
// read beyond it: the drain is refused, which the record says, and the flow goes
// on. The next drain is done.
func TestDrain_cutFixedTooLate(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		g := newGate("cut-chosen")
		p := l.start(f, Config{}, g.probe)
		l.more(200)
		l.awaitResults(p, 200)
		l.send("control.drain.count", "")
		<-g.reached
		rec := l.record()
		if _, err := l.control().FixCut(l.ctx, rec.Epoch, map[string]uint64{"IN": 150}, map[string]uint64{"IN": 150}); err != nil {
			t.Fatal(err)
		}
		close(g.open)
		rec = l.awaitRecord("refused", func(r control.Record) bool { return r.State == control.StateRunning && r.LastError != "" })
		if !strings.Contains(rec.LastError, "IN:150") || !strings.Contains(rec.LastError, "not active any more") {
			t.Errorf("last error %q", rec.LastError)
		}
		l.more(100)
		l.awaitResults(p, 300)
		l.send("control.drain.count", `{"at":"head"}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if rec := l.record(); !drained(rec) || rec.Report.Cut["IN"] != 300 {
			t.Errorf("record %+v", rec)
		}
		l.judge("OUT")
	})
}

// A log that does not know what became of its last write is of no use any more:
// nothing is repeated on it. A write for which there was no room is.
func TestSession_persist(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		link := testenv.NewLink(t)
		conn, err := bus.Connect(l.ctx, bus.Config{InProcess: link.Dialer(l.srv.InProcess), Logger: l.log})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		bucket, err := conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "natsflow_count"})
		if err != nil {
			t.Fatal(err)
		}
		store := kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: "count", Owner: "w1", Logger: l.log})
		dead, _, err := store.Claim(l.ctx, kvsnap.TaskID{}, func([]byte) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		link.Hold(testenv.ToServer)
		short, cancel := context.WithTimeout(l.ctx, time.Second)
		defer cancel()
		if _, err := dead.Append(short, kvsnap.Commit{}); !errors.Is(err, bus.ErrUnknownOutcome) {
			t.Fatalf("got %v", err)
		}
		link.Release(testenv.ToServer)

		s := &session{log: l.log, troubles: map[*patience]string{}}
		ctx, cancel := context.WithTimeout(l.ctx, time.Minute)
		defer cancel()
		calls := 0
		err = s.persist(ctx, "commit", func() error {
			calls++
			_, err := dead.Append(ctx, kvsnap.Commit{})
			return err
		})
		if !errors.Is(err, bus.ErrUnknownOutcome) || ctx.Err() != nil || calls != 1 {
			t.Errorf("%d writes to a dead log, then %v", calls, err)
		}
		for _, give := range []error{errors.Join(bus.ErrFenced, bus.ErrNoSpace), bus.ErrTooLarge, bus.ErrUntrusted, kvsnap.ErrReleased} {
			calls = 0
			if err := s.persist(ctx, "commit", func() error { calls++; return give }); !errors.Is(err, give) || calls != 1 {
				t.Errorf("%d writes that failed with %v, then %v", calls, give, err)
			}
		}
		calls = 0
		err = s.persist(ctx, "commit", func() error {
			if calls++; calls < 4 {
				return bus.ErrNoSpace
			}
			return nil
		})
		if err != nil || calls != 4 {
			t.Errorf("%d writes without room, then %v", calls, err)
		}
	})
}
