package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

func drained(r control.Record) bool  { return r.State == control.StateDrained }
func draining(r control.Record) bool { return r.State == control.StateDraining }

// A drain of a stream without messages, and of a flow that has been idle, is done in
// well under a second.
func TestDrain_emptyAndIdle(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		for _, records := range []int{0, 200} {
			p := l.start(f, Config{Resume: true}, nil)
			l.awaitPhase(p, "running")
			l.more(records)
			l.awaitResults(p, len(l.keys))
			l.pass(time.Minute)
			began := time.Now()
			l.send("control.drain", "")
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("a drain of %d records took %v", records, took)
			}
			if rec := l.record(); !drained(rec) || rec.Drain.Cut["IN"] != uint64(records) || rec.Report.Tasks != 16 {
				t.Errorf("record %+v", rec)
			}
		}
		l.judge("OUT")
	})
}

// An empty command cuts where reading has got to: state and results are those of
// exactly the records up to the cut.
func TestDrain_now(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var calls atomic.Int64
		f := countFlow{step: slowStep(&calls, time.Millisecond)}.build(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		// Little enough at a time that reading is not done at once.
		for range 60 {
			l.more(100)
			l.pass(5 * time.Millisecond)
		}
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		rec := l.record()
		cut := rec.Report.Cut["IN"]
		if cut == 0 {
			t.Errorf("cut at %d of %d", cut, len(l.keys))
		}
		l.judgeThrough("OUT", cut)
		if rec.Report.Results != cut {
			t.Errorf("the report has %d results, the cut is at %d", rec.Report.Results, cut)
		}
		l.more(10)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
	})
}

// A drain at the head takes all there is at the moment of the command.
func TestDrain_head(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(5000)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.send("control.drain.count", `{"at":"head","reason":"deploy"}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
		if r := l.record().Report; r.Cut["IN"] != 5000 || r.Reason != "deploy" || r.Records["IN"] != 5000 || r.Results != 5000 {
			t.Errorf("report %+v", r)
		}
	})
}

// A cut behind what has been processed is refused, the record says which would be the
// lowest, and the flow goes on.
func TestDrain_pastRefused(t *testing.T) {
	for name, body := range map[string]func(at time.Time) string{
		"seq":  func(time.Time) string { return `{"at":{"seq":{"IN":50}}}` },
		"time": func(at time.Time) string { return fmt.Sprintf(`{"at":{"time":%q}}`, at.Format(time.RFC3339Nano)) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				l.more(50)
				l.pass(time.Second)
				at := time.Now()
				l.pass(time.Second)
				l.more(50)
				p := l.start(countFlow{}.build(t), Config{}, nil)
				l.awaitResults(p, 100)
				l.send("control.drain.count", body(at))
				rec := l.awaitRecord("the refusal", func(r control.Record) bool { return r.LastError != "" })
				if rec.State != control.StateRunning || !strings.Contains(rec.LastError, "IN:50") || !strings.Contains(rec.LastError, "lowest possible is IN:100") {
					t.Errorf("state %s, error %q", rec.State, rec.LastError)
				}
				l.more(100)
				l.awaitResults(p, 200)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judge("OUT")
			})
		})
	}
}

// A refused cut of one source must not leave another one stopped.
func TestDrain_pastRefusedTwoSources(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN2", Subjects: []string{"two.>"}}); err != nil {
			t.Fatal(err)
		}
		l.more(100)
		p := l.start(countFlow{sources: []string{"IN", "IN2"}}.build(t), Config{}, func(_ *process, _ context.Context, point, _ string) error {
			if point == "cut-chosen" {
				// The other source meets its limit before the refusal.
				l.feedTo("two.", l.rng, 10, 8)
				l.pass(200 * time.Millisecond)
			}
			return nil
		})
		l.awaitResults(p, 100)
		for i := range 5 {
			l.feedTo("two.", l.rng, 10, 8)
			l.awaitResults(p, len(l.keys))
			l.send("control.drain.count", `{"at":{"seq":{"IN":50}}}`)
			l.awaitRecord("the refusal", func(r control.Record) bool {
				return r.State == control.StateRunning && r.Epoch == uint64(i)+1
			})
			l.feedTo("two.", l.rng, 10, 8)
			l.awaitResults(p, len(l.keys))
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// A cut that is still to come is waited for, and then kept exactly.
func TestDrain_future(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 100)
		l.send("control.drain.count", `{"at":{"seq":{"IN":150}}}`)
		l.awaitRecord("the cut", func(r control.Record) bool { return draining(r) && r.Drain.Cut["IN"] == 150 })
		l.more(40)
		l.awaitResults(p, 140)
		l.pass(time.Minute)
		if p.ended() || drained(l.record()) {
			t.Error("drained before the cut")
		}
		l.more(100)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.judgeThrough("OUT", 150)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
	})
}

// A cut by time takes the last record at or before it, whether it has come already or
// is still to come.
func TestDrain_time(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		p := l.start(f, Config{}, nil)
		l.more(30)
		l.awaitResults(p, 30)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.more(50)
		l.pass(time.Second)
		past := time.Now().UTC().Format(time.RFC3339Nano)
		l.pass(time.Second)
		l.more(50)
		l.send("control.drain.count", fmt.Sprintf(`{"at":{"time":%q}}`, past))
		// Reading is quicker than finding the cut, and must wait for it.
		p = l.start(f, Config{}, nil)
		p.link.Delay(testenv.ToClient, 20*time.Millisecond)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.judgeThrough("OUT", 80)

		p = l.start(f, Config{Resume: true}, nil)
		l.awaitResults(p, 130)
		future := time.Now().Add(time.Minute).UTC().Format(time.RFC3339Nano)
		l.send("control.drain.count", fmt.Sprintf(`{"at":{"time":%q}}`, future))
		l.pass(30 * time.Second)
		l.more(20)
		l.awaitResults(p, 150)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if cut := l.record().Report.Cut["IN"]; cut != 150 {
			t.Errorf("cut at %d, want 150", cut)
		}
		l.judge("OUT")
	})
}

// A second drain that asks for the same joins the first one; one that contradicts it is
// refused and changes nothing.
func TestDrain_joinAndContradiction(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.more(10)
		p := l.start(countFlow{}.build(t), Config{}, nil)
		l.awaitResults(p, 10)
		l.send("control.drain.count", `{"at":{"seq":{"IN":20}}}`)
		l.send("control.drain.count", `{"at":{"seq":{"IN":20}},"reason":"me too"}`)
		l.send("control.drain.count", `{"at":"head"}`)
		rec := l.awaitRecord("all commands", func(r control.Record) bool { return len(r.History) == 3 })
		if !draining(rec) || rec.Epoch != 1 || !strings.Contains(rec.History[1].Outcome, "joined") ||
			!strings.Contains(rec.LastError, "contradicts") {
			t.Errorf("record %+v", rec)
		}
		l.more(30)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if rec := l.record(); !drained(rec) || rec.Epoch != 1 {
			t.Errorf("record %+v", rec)
		}
		l.judgeThrough("OUT", 20)
	})
}

// A resume during a drain cancels it, before the cut is reached and when the readers
// have stopped at it already; the results stay exact.
func TestDrain_cancelled(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		p := l.start(f, Config{}, nil)
		for range 4 {
			l.more(50)
			l.awaitResults(p, len(l.keys))
			l.send("control.drain.count", fmt.Sprintf(`{"at":{"seq":{"IN":%d}}}`, len(l.keys)+10))
			l.awaitRecord("the cut", func(r control.Record) bool { return draining(r) && r.Drain.Cut != nil })
			l.more(5)
			l.awaitResults(p, len(l.keys))
			l.send("control.resume.count", "")
			l.awaitRecord("running", func(r control.Record) bool { return r.State == control.StateRunning })
			l.more(50)
			l.awaitResults(p, len(l.keys))
		}
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
		if e := l.record().Epoch; e != 4 {
			t.Errorf("epoch %d, want 4", e)
		}
	})
}

// A resume that comes when every task is done already and only the record is not
// written: the drain did not happen, and the flow goes on.
func TestDrain_cancelledLate(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		g := newGate("drained-unrecorded")
		p := l.start(countFlow{}.build(t), Config{}, g.probe)
		l.more(100)
		l.awaitResults(p, 100)
		l.send("control.drain.count", "")
		<-g.reached
		l.send("control.resume.count", "")
		l.awaitRecord("running", func(r control.Record) bool { return r.State == control.StateRunning })
		close(g.open)
		l.more(100)
		l.awaitResults(p, 200)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// Mode finish ends in finished; a resume goes on from there.
func TestDrain_finish(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		l.send("control.drain.count", `{"mode":"finish","at":"head"}`)
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if rec := l.record(); rec.State != control.StateFinished || rec.Report.Mode != control.ModeFinish {
			t.Errorf("record %+v", rec)
		}
		l.more(50)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
	})
}

// A command that is not understood is refused, in the record too, and changes nothing.
func TestDrain_malformed(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		p := l.start(countFlow{}.build(t), Config{}, nil)
		l.awaitPhase(p, "running")
		for _, c := range []struct{ subject, body, want string }{
			{"control.drain.count", `{"at":"haed"}`, "head"},
			{"control.drain.count", `{"att":"head"}`, "at"},
			{"control.drain.count", `{`, "malformed"},
			{"control.drain.count", `{"at":{"seq":{"OUTT":5}}}`, "OUTT"},
			{"control.drian.count", ``, "drain"},
		} {
			seq := l.send(c.subject, c.body)
			rec := l.awaitRecord("the refusal", func(r control.Record) bool { return r.LastCommand == seq })
			if rec.State != control.StateRunning || rec.Epoch != 0 || rec.LastErrorCommand != seq || !strings.Contains(rec.LastError, c.want) {
				t.Errorf("%s %s: state %s, epoch %d, error %q", c.subject, c.body, rec.State, rec.Epoch, rec.LastError)
			}
		}
		l.more(20)
		l.awaitResults(p, 20)
	})
}

// A drained flow stays drained when its process is started again, as a supervisor
// would, until it is resumed by command or by the configuration.
func TestDrain_staysDrained(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		l.drain(f, Config{})
		l.more(100)
		for range 3 {
			p := l.start(f, Config{}, nil)
			l.awaitPhase(p, "drained")
			l.pass(time.Minute)
			if n := l.count("OUT"); n != 100 {
				t.Fatalf("%d results: it went on", n)
			}
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "drained")
		l.send("control.resume.count", "")
		l.awaitResults(p, 200)
		// A drain in the time of a process ends it, also if it was started to resume.
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.more(50)
		p = l.start(f, Config{Resume: true}, nil)
		l.awaitResults(p, 250)
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		if !drained(l.record()) {
			t.Error("not drained")
		}
		l.judge("OUT")
	})
}

// A process that is started to resume does so also when another one is active and waits.
func TestDrain_resumeBehindAnother(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		l.more(100)
		l.drain(f, Config{})
		a := l.start(f, Config{Name: "a"}, nil)
		l.awaitPhase(a, "drained")
		l.more(100)
		b := l.start(f, Config{Name: "b", Resume: true}, nil)
		l.awaitResults(a, 200)
		l.awaitPhase(b, "running")
		// A drain ends both.
		l.send("control.drain.count", "")
		for _, p := range []*process{a, b} {
			if err := p.wait(); err != nil {
				t.Error(err)
			}
		}
		if !drained(l.record()) {
			t.Error("not drained")
		}
		l.judge("OUT")
	})
}

// A drain that was asked for while nobody ran, or that a worker left before its end, is
// finished by the next one before anything else.
func TestDrain_finishedByTheNext(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var calls atomic.Int64
		f := countFlow{step: slowStep(&calls, 5*time.Millisecond)}.build(t)
		l.more(10)
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 10)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.send("control.drain.count", `{"at":{"seq":{"IN":1500}}}`)
		l.more(1000)
		p = l.start(f, Config{}, nil)
		l.awaitRecord("the cut", func(r control.Record) bool { return draining(r) && r.Drain.Cut != nil })
		l.await("some records", func() bool { return calls.Load() > 100 })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if !draining(l.record()) {
			t.Errorf("state %s", l.record().State)
		}
		l.more(1000)
		if err := l.start(f, Config{}, nil).wait(); err != nil {
			t.Fatal(err)
		}
		if !drained(l.record()) {
			t.Errorf("state %s", l.record().State)
		}
		l.judgeThrough("OUT", 1500)
	})
}

// Drains at "now" through crashes: whatever was committed by which task before, state
// and results are those of the records up to the cut, of all tasks.
func TestDrain_nowThroughCrashes(t *testing.T) {
	for seed := range uint64(15) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				rng := rand.New(rand.NewPCG(seed, 3))
				var calls atomic.Int64
				f := countFlow{step: slowStep(&calls, 300*time.Microsecond), options: flow.Options{Partitions: 8}}.build(t)
				l.feed(rng, 600, 20)
				c := &crasher{point: points[4+rng.IntN(4)], left: 1 + rng.IntN(25)}
				p := l.start(f, Config{}, c.probe)
				l.pass(time.Duration(50+rng.IntN(200)) * time.Millisecond)
				l.send("control.drain.count", "")
				if rng.IntN(2) == 0 {
					// Not before it has read anything, as a rule.
					c.mu.Lock()
					c.struck = true
					c.mu.Unlock()
					p.link.Cut()
					p.cancel()
				}
				l.await("the crash or the drain", p.ended)
				for try := 0; !drained(l.record()); try++ {
					c := &crasher{point: points[rng.IntN(len(points))], left: 1 + rng.IntN(2)}
					if try > 4 {
						c.point = ""
					}
					p := l.start(f, Config{}, c.probe)
					l.await("the crash or the drain", func() bool {
						if p.at().Phase == "drained" {
							p.cancel()
						}
						return p.ended()
					})
				}
				l.judgeThrough("OUT", l.record().Report.Cut["IN"])
				l.drain(f, Config{Resume: true})
				l.judge("OUT")
			})
		})
	}
}

// A step asks for the drain when its predicate holds: the flow stops at the first
// coherent cut at or after the record, once, and goes on after a resume.
func TestDrain_stopWhen(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{stopAt: 30}.build(t)
		l.put("k0 first") // k0 counts too, in the judge's eyes
		l.keys[0] = "k0"
		l.fed["k0"]++
		p := l.start(f, Config{}, nil)
		l.awaitResults(p, 1)
		for !p.ended() {
			l.feed(l.rng, 1, 1)
			l.pass(50 * time.Millisecond)
			if len(l.keys) > 100 {
				t.Fatal("it does not stop")
			}
		}
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		rec := l.record()
		if cut := rec.Report.Cut["IN"]; cut < 30 || !strings.Contains(rec.Report.Reason, "sequence 30") {
			t.Errorf("cut %d, reason %q", cut, rec.Report.Reason)
		}
		l.judgeThrough("OUT", rec.Report.Cut["IN"])
		l.more(50)
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
	})
}

// The request for a drain is part of a commit: a crash between the commit and its
// publishing does not lose it, and one after it does not repeat it.
func TestDrain_stopWhenThroughCrashes(t *testing.T) {
	for _, point := range []string{"entry-appended-unacked", "committed", "half-published", "published", "noted", "cut-chosen"} {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := countFlow{stopAt: 100, options: flow.Options{Partitions: 1}}.build(t)
				l.feed(l.rng, 99, 1)
				p := l.start(f, Config{}, nil)
				l.awaitResults(p, 99)
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				// The 100th record comes with others, in one commit.
				l.feed(l.rng, 20, 1)
				c := &crasher{point: point, left: 1}
				if point == "committed" || point == "entry-appended-unacked" {
					c.left = 2 // after the claim
				}
				if err := l.start(f, Config{}, c.probe).wait(); !errors.Is(err, errCrash) {
					t.Fatalf("got %v, want a crash", err)
				}
				l.pass(5 * time.Second)
				p = l.start(f, Config{}, nil)
				l.await("the drain", func() bool { return p.ended() || p.at().Phase == "drained" })
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				rec := l.record()
				if !drained(rec) || rec.Epoch != 1 || rec.Report.Cut["IN"] < 100 {
					t.Fatalf("record %+v", rec)
				}
				l.judgeThrough("OUT", rec.Report.Cut["IN"])
				var requests int
				for _, m := range l.read(control.StreamName) {
					var body struct{ Reason string }
					if json.Unmarshal(m.data, &body) == nil && strings.Contains(body.Reason, "stop_when") {
						requests++
					}
				}
				if requests != 1 {
					t.Errorf("%d requests were published, want 1", requests)
				}
				l.drain(f, Config{Resume: true})
				l.judge("OUT")
			})
		})
	}
}

// Ten drains and resumes under load, at changing places: exact all the way.
func TestDrain_againAndAgain(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{bucket: "LATEST"}.build(t)
		for i := range 10 {
			l.more(100 + 10*i)
			p := l.start(f, Config{Resume: true}, nil)
			l.awaitPhase(p, "running")
			l.more(50)
			l.pass(time.Duration(i) * 3 * time.Millisecond)
			l.send("control.drain.count", []string{"", `{"at":"head"}`}[i%2])
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
			l.judgeThrough("OUT", l.record().Report.Cut["IN"])
		}
		l.drain(f, Config{Resume: true})
		l.judge("OUT")
		l.judgeLatest("KV_LATEST")
	}, testenv.DontListen())
}
