package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// TestRun_manyWorkers lets one to five workers of a flow come, leave, die, freeze
// for longer than lease and duplicate window, and lose the server, while records
// come; drains at a random moment to a random cut, while that goes on; and judges:
// the results are those of one run, in order, over the records up to the cut.
// Then the flow is resumed, and drained at its head.
func TestRun_manyWorkers(t *testing.T) {
	runHistories(t, sinkKinds, 4, 40, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		manyHistory(t, srv, kind, seed, manySource{})
	})
}

// TestRun_manyWorkersStages is that for flows of two and of three stages, of which the
// exchange is trimmed all the time.
func TestRun_manyWorkersStages(t *testing.T) {
	runHistories(t, sinkKinds[:2], 3, 20, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		manyHistory(t, srv, kind, seed, manySource{stages: 2 + int(seed%2)})
	})
}

// crew are the workers of a history.
type crew struct {
	*lab
	rng *rand.Rand
	f   *flow.Flow
	// alive are the ones that were not killed and did not end by themselves;
	// frozen the ones of them that nothing gets through to.
	alive, frozen []*process
	all           []*process
	started       int
	// lossy: what the network holds is lost and does not come late. A sink without
	// a fence is not protected from that beyond its duplicate window; in a network,
	// TCP_USER_TIMEOUT sees to it.
	lossy bool
	// source is the stream that the sequences are of.
	source string
}

// manySource is the source of a history.
type manySource struct {
	partitionBy []int
	// retention is limits if it is empty.
	retention string
	// stages of the flow, 0 for one.
	stages int
}

func manyHistory(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64, src manySource) {
	rng := rand.New(rand.NewPCG(seed, 11))
	l := newLab(t, srv)
	kind.make(l)
	w := &crew{lab: l, rng: rng, lossy: kind.forgets, source: "IN", f: countFlow{stages: src.stages, partitionBy: src.partitionBy, options: flow.Options{Partitions: 8, CommitInterval: 20 * time.Millisecond}}.build(t)}
	l.stages = src.stages
	if src.retention != "" {
		l.queued(src.retention)
		w.source = ownIN
	}
	// The flow is there: a drain that comes before it does not count.
	first := w.start(w.f, Config{Name: "first", LeaseTTL: 2 * time.Second, trimEvery: manyTrim}, nil)
	w.alive, w.all = []*process{first}, []*process{first}
	l.awaitPhase(first, "running")
	for range 6 + rng.IntN(10) {
		w.event()
	}
	at, reach := w.randomCut()
	rec, refused := w.untilDrained(w.send("control.drain.count", fmt.Sprintf(`{"at":%s}`, at)))
	if refused {
		// A time or a sequence that a worker had read beyond before it knew.
		rec, _ = w.untilDrained(w.send("control.drain.count", ""))
	}
	cut := rec.Report.Cut[w.source]
	if cut < reach && !refused {
		t.Fatalf("drained at %d, asked for %s, which is at least %d", cut, at, reach)
	}
	w.release()
	w.end()
	w.judgeThrough("OUT", min(cut, l.seq))
	w.join(Config{Resume: true})
	w.awaitRecord("the resume", func(rec control.Record) bool {
		if rec.State == control.StateRunning {
			return true
		}
		if w.all[len(w.all)-1].ended() {
			w.join(Config{Resume: true}) // it crashed before it could say so
		}
		return false
	})
	for range rng.IntN(4) {
		w.event()
	}
	w.untilDrained(w.send("control.drain.count", `{"at":"head"}`))
	w.release()
	w.end()
	w.judgeThrough("OUT", w.record().Report.Cut[w.source])
	w.drain(w.f, Config{Name: "last", Resume: true})
	w.judge("OUT")
	if src.retention != "" {
		w.judgeIntake()
	}
	if src.stages > 1 {
		w.judgeExchange()
	}
}

// manyTrim is how often intakes are trimmed in histories: often.
const manyTrim = 150 * time.Millisecond

// join starts a worker; sometimes under the name of one that was there before.
func (w *crew) join(cfg Config) {
	cfg.Name = fmt.Sprintf("w%d", w.started)
	if w.started > 0 && w.rng.IntN(5) == 0 {
		cfg.Name = fmt.Sprintf("w%d", w.rng.IntN(w.started))
	}
	w.started++
	cfg.LeaseTTL, cfg.trimEvery = 2*time.Second, manyTrim
	c := &crasher{}
	if w.rng.IntN(3) == 0 {
		c.point, c.left = manyPoints[w.rng.IntN(len(manyPoints))], 1+w.rng.IntN(30)
	}
	probe := c.probe
	if w.rng.IntN(2) == 0 {
		probe = w.slow(probe)
	}
	p := w.start(w.f, cfg, probe)
	w.alive = append(w.alive, p)
	w.all = append(w.all, p)
}

// slow makes commits and publishing take a while, so that much else happens
// meanwhile.
func (w *crew) slow(next probe) probe {
	var passed atomic.Int64
	return func(p *process, ctx context.Context, point, task string) error {
		if point == "committed" || point == "published" {
			w.pass(time.Duration(passed.Add(7)%31) * time.Millisecond)
		}
		return next(p, ctx, point, task)
	}
}

// manyPoints are the places where a worker may die here.
var manyPoints = append(slices.Clone(points), "acquired", "adopted", "handed-over", "stop-told", "stage-ends", "trim", "trimmed")

// event lets something happen.
func (w *crew) event() {
	w.alive = slices.DeleteFunc(w.alive, (*process).ended)
	w.frozen = slices.DeleteFunc(w.frozen, (*process).ended)
	switch w.rng.IntN(9) {
	case 0, 1:
		if len(w.alive) < 5 {
			w.join(Config{})
		}
	case 2:
		if p := w.pick(); p != nil {
			p.cancel()
		}
	case 3:
		if p := w.pick(); p != nil {
			p.link.Cut()
			p.cancel()
		}
	case 4:
		if p := w.pick(); p != nil {
			p.link.Hold(testenv.Both)
			w.frozen = append(w.frozen, p)
		}
	case 5:
		w.release()
	default:
		w.feed(w.rng, 20+w.rng.IntN(200), 8)
	}
	w.pass(time.Duration(w.rng.IntN(1500)) * time.Millisecond)
}

// pick chooses one of the workers that can still be harmed.
func (w *crew) pick() *process {
	if len(w.alive) == 0 {
		return nil
	}
	i := w.rng.IntN(len(w.alive))
	p := w.alive[i]
	w.alive = slices.Delete(w.alive, i, i+1)
	return p
}

// release wakes the frozen ones.
func (w *crew) release() {
	for _, p := range w.frozen {
		if w.lossy {
			p.link.Cut()
			p.link.Heal()
		}
		p.link.Release(testenv.Both)
		w.alive = append(w.alive, p)
	}
	w.frozen = nil
}

// randomCut returns an "at" of a command, and the least cut that it means.
func (w *crew) randomCut() (at string, reach uint64) {
	switch w.rng.IntN(4) {
	case 0:
		return `"now"`, 0
	case 1:
		return `"head"`, w.seq
	case 2:
		// Records that are still to come.
		w.feed(w.rng, 1+w.rng.IntN(50), 8)
		return fmt.Sprintf(`{"seq":{"%s":%d}}`, w.source, w.seq), w.seq
	}
	b, err := json.Marshal(time.Now().Add(time.Duration(w.rng.IntN(3000)) * time.Millisecond).UTC())
	if err != nil {
		w.tb.Fatal(err)
	}
	if w.source != "IN" {
		return fmt.Sprintf(`{"time":%s}`, b), 0 // what was fed before may have come over later
	}
	return fmt.Sprintf(`{"time":%s}`, b), w.seq
}

// untilDrained lets more happen until the flow is drained, or the drain that a
// command asked for refused.
func (w *crew) untilDrained(command uint64) (rec control.Record, refused bool) {
	for range w.rng.IntN(4) {
		w.event()
	}
	for range 40 {
		rec = w.record()
		if rec.State.Stopped() && rec.LastCommand >= command {
			return rec, false
		}
		if rec.State == control.StateRunning && rec.LastErrorCommand == command {
			if !strings.Contains(rec.LastError, "is behind what has been processed") {
				w.tb.Fatalf("refused: %s", rec.LastError)
			}
			return rec, true
		}
		w.alive = slices.DeleteFunc(w.alive, (*process).ended)
		if len(w.alive) == 0 {
			w.join(Config{})
		}
		w.pass(3 * time.Second)
	}
	w.tb.Fatalf("the drain never ended: %+v", rec)
	return rec, false
}

// end waits until all workers have ended.
func (w *crew) end() {
	for _, p := range w.all {
		p.cancel()
		_ = p.wait()
	}
	w.all, w.alive = nil, nil
}

// throughDrains lets workers of a flow come, leave, die and freeze, and drains and resumes
// it in between, twice. more is called with each event. None of them is left.
func (l *lab) throughDrains(rng *rand.Rand, f *flow.Flow, more func()) {
	l.tb.Helper()
	c := &crew{lab: l, rng: rng, f: f}
	first := c.start(c.f, Config{Name: "first", LeaseTTL: 2 * time.Second}, nil)
	c.alive, c.all = []*process{first}, []*process{first}
	l.awaitPhase(first, "running")
	for range 2 {
		for range 4 + rng.IntN(8) {
			c.event()
			more()
		}
		c.untilDrained(c.send("control.drain.count", `{"at":"head"}`))
		c.release()
		c.end()
		c.join(Config{Resume: true})
		c.awaitRecord("the resume", func(rec control.Record) bool {
			if rec.State == control.StateRunning {
				return true
			}
			if c.all[len(c.all)-1].ended() {
				c.join(Config{Resume: true})
			}
			return false
		})
	}
	c.release()
	c.end()
}
