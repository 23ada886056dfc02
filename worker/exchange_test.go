package worker

import (
	"context"
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

const crossCount = "NATSFLOW_X_count"

// staged is the flow under test with several stages.
func (l *lab) staged(stages int, change ...func(*countFlow)) *flow.Flow {
	l.stages = stages
	c := countFlow{stages: stages, options: flow.Options{Partitions: 4, CommitInterval: 20 * time.Millisecond}}
	for _, fn := range change {
		fn(&c)
	}
	return c.build(l.tb)
}

// judgeExchange says that of a drained flow nothing is on its way. The last message
// stays.
func (l *lab) judgeExchange() {
	l.tb.Helper()
	if frames := l.read(crossCount); len(frames) > 1 {
		l.tb.Fatalf("there are %d frames in the exchange of a drained flow, the first at sequence %d", len(frames), frames[0].seq)
	}
}

func TestExchange_stages(t *testing.T) {
	for _, stages := range []int{2, 3} {
		bubble(t, func(t *testing.T, l *lab) {
			f := l.staged(stages)
			l.more(500)
			l.drain(f, Config{Lanes: 3})
			l.judge("OUT")
			l.judgeExchange()
			rec := l.record()
			if r := rec.Report; r.Results != 500 || r.Tasks != 4*stages || r.Records["IN"] != 500 || len(r.Cut) != 1 {
				t.Errorf("the report of %d stages: %+v", stages, r)
			}
			if rec.Stages != stages {
				t.Errorf("the record has %d stages", rec.Stages)
			}
			// On from there, by another worker.
			l.more(300)
			l.drain(f, Config{Name: "w2", Resume: true})
			l.judge("OUT")
			if r := l.record().Report; r.Results != 800 || r.Records["IN"] != 300 {
				t.Errorf("the second report of %d stages: %+v", stages, r)
			}
		})
	}
}

// TestExchange_emptyDrain: stages end one behind the other, and soon.
func TestExchange_emptyDrain(t *testing.T) {
	for _, workers := range []int{1, 3} {
		bubble(t, func(t *testing.T, l *lab) {
			f := l.staged(3)
			var all []*process
			for i := range workers {
				all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i), LeaseTTL: 2 * time.Second}, nil))
			}
			for _, p := range all {
				l.awaitPhase(p, "running")
			}
			l.pass(3 * time.Second)
			began := time.Now()
			l.send("control.drain.count", "")
			l.awaitRecord("the drain", drained)
			if took := time.Since(began); took > time.Second {
				t.Errorf("with %d workers the drain of an empty flow took %v", workers, took)
			}
			for _, p := range all {
				if err := p.wait(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestExchange_cuts drains to every kind of cut, with records behind it.
func TestExchange_cuts(t *testing.T) {
	for _, at := range []string{`"now"`, `"head"`, `{"seq":{"IN":150}}`, `{"time":%q}`} {
		bubble(t, func(t *testing.T, l *lab) {
			f := l.staged(2)
			l.more(100)
			p := l.start(f, Config{}, nil)
			l.awaitResults(p, 100)
			if strings.Contains(at, "%q") {
				at = fmt.Sprintf(at, time.Now().Add(2*time.Second).Format(time.RFC3339Nano))
			}
			l.send("control.drain.count", fmt.Sprintf(`{"at":%s}`, at))
			l.awaitRecord("the drain", func(r control.Record) bool { return draining(r) || drained(r) })
			l.more(60)
			l.pass(3 * time.Second)
			l.more(40)
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
			cut := l.record().Report.Cut["IN"]
			if strings.Contains(at, "150") && cut != 150 || strings.Contains(at, "time") && cut != 160 || cut < 100 {
				t.Errorf("%s: the cut is %d", at, cut)
			}
			l.judgeThrough("OUT", cut)
			l.judgeExchange()
			l.drain(f, Config{Resume: true})
			l.judge("OUT")
		})
	}
}

func TestExchange_stopWhen(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2, func(c *countFlow) { c.stopAt = 40 })
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		for range 30 {
			if p.ended() {
				break
			}
			l.more(10)
			l.pass(200 * time.Millisecond)
		}
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		rec := l.record()
		if !drained(rec) || !strings.Contains(rec.Report.Reason, "stop_when held at IN sequence") {
			t.Fatalf("state %s, reason %q", rec.State, rec.Report.Reason)
		}
		l.judgeThrough("OUT", rec.Report.Cut["IN"])
	})
}

// TestExchange_leave: a worker that leaves gives the tasks of all stages away.
func TestExchange_leave(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(3)
		p := l.start(f, Config{Name: "a"}, nil)
		l.awaitPhase(p, "running")
		q := l.start(f, Config{Name: "b"}, nil)
		l.await("both have tasks", func() bool { return p.at().Tasks == 6 && q.at().Tasks == 6 })
		for i := range 10 {
			l.more(50)
			l.pass(30 * time.Millisecond)
			if i == 5 {
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
			}
		}
		l.await("the other has all tasks", func() bool { return q.at().Tasks == 12 })
		l.awaitResults(q, 500)
		l.judge("OUT")
		if err := q.leave(); err != nil {
			t.Fatal(err)
		}
		l.drain(f, Config{})
		l.judge("OUT")
		l.judgeExchange()
	})
}

// TestExchange_allDieBetweenStages: the first stage has ended, the second one not, and
// all workers die. Those that come next finish the drain.
func TestExchange_allDieBetweenStages(t *testing.T) {
	for _, die := range []string{"stage-ends", "handed-over", "drained-unrecorded"} {
		for _, left := range []int{1, 3, 5, 7} {
			bubble(t, func(t *testing.T, l *lab) {
				f := l.staged(3)
				l.more(200)
				c := &crasher{point: die, left: left}
				p := l.start(f, Config{Name: "first", LeaseTTL: 2 * time.Second}, c.probe)
				l.awaitResults(p, 100)
				l.send("control.drain.count", `{"at":"head"}`)
				l.more(100) // behind the cut, or in it
				l.await("the end of the first worker", p.ended)
				p.cancel()
				if !c.struck && left == 1 {
					t.Fatalf("%s was never reached", die)
				}
				if rec := l.record(); c.struck && !draining(rec) {
					t.Fatalf("the flow is %s", rec.State)
				}
				var next []*process
				for i := range 2 {
					next = append(next, l.start(f, Config{Name: fmt.Sprintf("next-%d", i), LeaseTTL: 2 * time.Second}, nil))
				}
				rec := l.awaitRecord("the drain", drained)
				l.judgeThrough("OUT", rec.Report.Cut["IN"])
				for _, q := range next {
					_ = q.leave()
				}
				l.drain(f, Config{Name: "last", Resume: true})
				l.judge("OUT")
				l.judgeExchange()
			})
		}
	}
}

// TestExchange_cancelled: a drain is cancelled when the tasks of the first stage have
// ended, and those of the second have not.
func TestExchange_cancelled(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		g := newGate("stage-ends")
		p := l.start(f, Config{LeaseTTL: time.Minute}, g.probe)
		l.more(100)
		l.awaitResults(p, 100)
		l.send("control.drain.count", "")
		<-g.reached
		l.send("control.resume.count", "")
		l.awaitRecord("the resume", func(r control.Record) bool { return r.State == control.StateRunning })
		close(g.open)
		l.more(200)
		l.awaitResults(p, 300)
		l.judge("OUT")
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestExchange_trim: frames go when every receiver has them, and not before.
func TestExchange_trim(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		p := l.start(f, Config{trimEvery: time.Second}, nil)
		for range 20 {
			l.more(50)
			l.pass(time.Second)
		}
		l.awaitResults(p, 1000)
		l.pass(20 * time.Second)
		if n := len(l.read(crossCount)); n > 1 {
			t.Errorf("%d frames are left, in a flow that has done all", n)
		}
		// A task of the second stage that nobody has keeps what is for it.
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		var stands atomic.Bool
		p = l.start(f, Config{trimEvery: time.Second}, func(_ *process, ctx context.Context, point, task string) error {
			if stands.Load() && point == "committed" && task == "1.0" {
				<-ctx.Done()
			}
			return nil
		})
		l.awaitPhase(p, "running")
		stands.Store(true)
		for range 10 {
			l.more(50)
			l.pass(time.Second)
		}
		l.pass(20 * time.Second)
		if n := len(l.read(crossCount)); n < 5 {
			t.Errorf("%d frames are left though a task stands still", n)
		}
		p.link.Cut()
		p.cancel()
		_ = p.wait()
		l.drain(f, Config{Name: "last"})
		l.judge("OUT")
		l.judgeExchange()
	})
}

// TestExchange_trimUnconfirmed: a producer dies when its frames are published, and no
// entry of its log says so. The receivers have applied them, and they are trimmed as far
// as possible. Who takes the producer over does not publish them again.
func TestExchange_trimUnconfirmed(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		// The task stops behind its first frames for good.
		g := newGate("published")
		var at atomic.Bool
		p := l.start(f, Config{Name: "a", LeaseTTL: time.Hour, trimEvery: 100 * time.Millisecond, idleCommit: 100 * time.Millisecond}, func(p *process, ctx context.Context, point, task string) error {
			if task == "0.1" && at.Load() {
				return g.probe(p, ctx, point, task)
			}
			return nil
		})
		l.more(100)
		l.awaitResults(p, 100)
		l.pass(5 * time.Second)
		at.Store(true)
		for l.through(l.seq)["k1"] == 0 || !isClosed(g.reached) {
			l.more(10)
			l.pass(100 * time.Millisecond)
		}
		l.pass(30 * time.Second)
		p.link.Cut()
		p.cancel()
		close(g.open)
		_ = p.wait()
		q := l.start(f, Config{Name: "a", trimEvery: 100 * time.Millisecond}, (&crasher{}).probe)
		l.awaitPhase(q, "running")
		l.more(100) // so that every task commits, and says what came twice
		l.send("control.drain.count", `{"at":"head"}`)
		if err := q.wait(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// TestExchange_purged: frames that somebody has removed are missed.
func TestExchange_purged(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		p := l.start(f, Config{}, nil)
		l.more(100)
		l.awaitResults(p, 100)
		l.pass(10 * time.Second)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		// The second stage commits once, and then stands still.
		var stands atomic.Bool
		p = l.start(f, Config{}, func(_ *process, ctx context.Context, point, task string) error {
			if stands.Load() && point == "committed" && task[0] == '1' {
				<-ctx.Done()
			}
			return nil
		})
		l.awaitPhase(p, "running")
		stands.Store(true)
		for range 5 {
			l.more(50)
			l.pass(10 * time.Second)
		}
		p.link.Cut()
		p.cancel()
		_ = p.wait()
		info, err := l.conn.Stream(l.ctx, crossCount)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.conn.PurgeBefore(l.ctx, crossCount, info.LastSeq-5); err != nil {
			t.Fatal(err)
		}
		err = l.start(f, Config{LeaseTTL: 2 * time.Second}, nil).wait()
		if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "from task 0.") || !strings.Contains(err.Error(), "--accept-gap") {
			t.Fatalf("error %v", err)
		}
		q := l.start(f, Config{AcceptGap: true}, nil)
		l.awaitPhase(q, "running")
		l.send("control.drain.count", `{"at":"head"}`)
		if err := q.wait(); err != nil {
			t.Fatal(err)
		}
		if n := l.count("OUT"); n <= 100 || n >= 350 {
			t.Errorf("%d results of 350 records, with a gap", n)
		}
	})
}

// TestExchange_ofAFormerFlow: the snapshots were deleted, the exchange was not.
func TestExchange_ofAFormerFlow(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		l.more(100)
		l.drain(f, Config{})
		if err := l.conn.DeleteStream(l.ctx, "KV_natsflow_count"); err != nil {
			t.Fatal(err)
		}
		err := l.start(f, Config{Resume: true}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "of a former flow of that name") {
			t.Fatalf("error %v", err)
		}
	})
}

// TestExchange_onErrorStop: a record that fails in the second stage stops the flow in
// front of its frame. All before is committed.
func TestExchange_onErrorStop(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		fails := true
		f := l.staged(2, func(c *countFlow) {
			c.options.OnError = flow.Stop
			c.late = func(_ *flow.Meta, r counted) error {
				if fails && r.Seq == 120 {
					return errors.New("will not do")
				}
				return nil
			}
		})
		p := l.start(f, Config{}, nil)
		l.more(100)
		l.awaitResults(p, 100)
		l.more(50)
		err := p.wait()
		var e *flow.StepError
		if !errors.As(err, &e) || e.Step != "count-1" || e.Seq != 120 || e.Stream != "IN" || e.Frame == 0 {
			t.Fatalf("error %v", err)
		}
		before := l.count("OUT")
		if before < 100 || before >= 150 {
			t.Errorf("%d results before the record", before)
		}
		// It fails again, and nothing comes twice.
		if err := l.start(f, Config{}, nil).wait(); !errors.As(err, &e) || e.Seq != 120 {
			t.Fatalf("error %v", err)
		}
		fails = false
		l.drain(f, Config{})
		l.judge("OUT")
	})
}

// TestExchange_damaged: a frame that cannot be read stops the flow, and nothing is lost.
func TestExchange_damaged(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		p := l.start(f, Config{}, nil)
		l.more(100)
		l.awaitResults(p, 100)
		l.pass(10 * time.Second) // all of that is known to be published
		seq, err := l.conn.Publish(l.ctx, flow.ExchangeSubject("count", 1, 2), nil, []byte("not a frame"))
		if err != nil {
			t.Fatal(err)
		}
		l.more(100)
		for range 2 {
			err = p.wait()
			if !errors.Is(err, flow.ErrFrame) || !strings.Contains(err.Error(), fmt.Sprintf("sequence %d: ", seq)) || !strings.Contains(err.Error(), crossCount) {
				t.Fatalf("error %v", err)
			}
			p = l.start(f, Config{}, nil)
		}
		_ = p.wait()
		if err := l.conn.PurgeBefore(l.ctx, crossCount, seq+1, flow.ExchangeSubject("count", 1, 2)); err != nil {
			t.Fatal(err)
		}
		// What is before it was applied.
		l.drain(f, Config{AcceptGap: true})
		l.judge("OUT")
	})
}

// TestExchange_deleted: with the exchange, what was on its way is gone.
func TestExchange_deleted(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.staged(2)
		p := l.start(f, Config{}, nil)
		l.more(100)
		l.awaitResults(p, 100)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		info, err := l.conn.Stream(l.ctx, crossCount)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.conn.DeleteStream(l.ctx, crossCount); err != nil {
			t.Fatal(err)
		}
		err = l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "was deleted at sequence") || !strings.Contains(err.Error(), "--accept-gap") {
			t.Fatalf("error %v", err)
		}
		l.more(100)
		l.drain(f, Config{AcceptGap: true})
		l.judge("OUT")
		if now, err := l.conn.Stream(l.ctx, crossCount); err != nil || now.LastSeq <= info.LastSeq {
			t.Errorf("the sequences go from %d to %d, %v", info.LastSeq, now.LastSeq, err)
		}
	})
}

func TestExchange_notOurs(t *testing.T) {
	for name, cfg := range map[string]bus.StreamConfig{
		"not made by natsflow": {},
		"has limits":           {MaxMsgs: 10},
	} {
		bubble(t, func(t *testing.T, l *lab) {
			f := l.staged(2)
			cfg.Name, cfg.Subjects = crossCount, []string{flow.ExchangeAll("count"), "natsflow.fence." + crossCount + ".>"}
			if _, err := l.conn.CreateStream(l.ctx, cfg); err != nil {
				t.Fatal(err)
			}
			err := l.start(f, Config{}, nil).wait()
			if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "nats stream rm "+crossCount) {
				t.Errorf("%s: error %v", name, err)
			}
		})
	}
}

// TestExchange_atLeastOnce: what goes on to another stage is published once even so.
func TestExchange_atLeastOnce(t *testing.T) {
	testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
		l := newLab(t, srv)
		f := l.staged(2, func(c *countFlow) { c.options.Delivery = flow.AtLeastOnce })
		rng := rand.New(rand.NewPCG(3, 4))
		for range 12 {
			l.feed(rng, 50, 8)
			c := &crasher{point: points[2+rng.IntN(6)], left: 1 + rng.IntN(10)}
			p := l.start(f, Config{LeaseTTL: 2 * time.Second}, c.probe)
			l.pass(3 * time.Second)
			p.cancel()
			_ = p.wait()
		}
		l.drain(f, Config{})
		// Each result is the same however often it comes.
		l.stages = 0
		groups := map[string]int{}
		for key, n := range l.fed {
			groups[groupOf(key, 1)] += n
		}
		l.fed = groups
		l.judgeAtLeast("OUT")
	})
}

// TestExchange_redefined: another definition waits until nothing is on its way.
func TestExchange_redefined(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		l.more(100)
		l.drain(l.staged(1), Config{})
		l.judge("OUT")
		results := l.count("OUT")
		// A second stage begins without state.
		two := l.staged(2, func(c *countFlow) { c.sink = "OUT2" })
		p := l.start(two, Config{Resume: true}, nil)
		l.more(100)
		l.await("results of two stages", func() bool { return l.count("OUT2") == 100 })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if n := l.count("OUT"); n != results {
			t.Errorf("%d results more", n-results)
		}
		other := l.staged(2, func(c *countFlow) { c.sink = "OUT3" })
		err := l.start(other, Config{}, nil).wait()
		if !errors.Is(err, control.ErrDefinition) || !strings.Contains(err.Error(), "may still be on their way") {
			t.Fatalf("error %v", err)
		}
		l.drain(two, Config{})
		p = l.start(other, Config{Resume: true}, nil)
		l.more(50)
		l.await("results of the other definition", func() bool { return l.count("OUT3") == 50 })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		// One stage less leaves the state of its step behind.
		err = l.start(l.staged(1, func(c *countFlow) { c.sink = "OUT3" }), Config{}, nil).wait()
		if !errors.Is(err, control.ErrDefinition) || !strings.Contains(err.Error(), `step "count-1"`) {
			t.Fatalf("error %v", err)
		}
	})
}

// TestRun_crashStages is TestRun_crashHistories with two and three stages.
func TestRun_crashStages(t *testing.T) {
	hit := map[string]int{}
	n := runHistories(t, sinkKinds[:2], 4, 60, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 17))
		l := newLab(t, srv)
		kind.make(l)
		f := l.staged(2+int(seed%2), func(c *countFlow) { c.bucket = "LATEST" })
		crossing := append(points[:10:10], "trim", "trimmed")
		for range 2 + rng.IntN(4) {
			l.feed(rng, 20+rng.IntN(300), 8)
			c := &crasher{point: crossing[rng.IntN(len(crossing))], left: 1 + rng.IntN(20)}
			if c.point == "trim" || c.point == "trimmed" {
				c.left = 1 + rng.IntN(3)
			}
			p := l.start(f, Config{trimEvery: 50 * time.Millisecond, idleCommit: 50 * time.Millisecond}, c.probe)
			timer := time.NewTimer(time.Duration(rng.IntN(4000)) * time.Millisecond)
			select {
			case <-p.done:
			case <-timer.C:
				if rng.IntN(2) == 0 {
					p.link.Cut()
				}
				p.cancel()
			}
			timer.Stop()
			_ = p.wait()
			if c.struck {
				hit[c.point]++
			}
		}
		l.drainThroughCrashes(rng, f, hit)
		l.judge("OUT")
		for key, n := range l.fed {
			if n == 0 {
				delete(l.fed, key)
			}
		}
		l.stages = 0
		l.judgeLatest("KV_LATEST")
	})
	if n < 60 || t.Failed() {
		return
	}
	for _, p := range []string{"read", "processed", "entry-appended-unacked", "committed", "half-published", "published", "noted", "trim", "trimmed"} {
		if hit[p] == 0 {
			t.Errorf("no history stopped a worker at %q", p)
		}
	}
}
