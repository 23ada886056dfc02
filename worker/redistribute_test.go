package worker

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/flow"
	"natsflow/testenv"
)

// spreadFlow is the flow under test behind a Redistribute.
func (l *lab) spreadFlow(costly func(m *flow.Meta, v string) error) *flow.Flow {
	c := countFlow{spread: true, costly: costly, options: flow.Options{Partitions: 4, CommitInterval: 20 * time.Millisecond}}
	return c.build(l.tb)
}

// TestRedistribute_workers: of three workers, each of which reads all records, one runs the
// costly step on a record.
func TestRedistribute_workers(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var runs atomic.Int64
		f := l.spreadFlow(func(*flow.Meta, string) error { runs.Add(1); return nil })
		var all []*process
		for i := range 3 {
			all = append(all, l.start(f, Config{Name: fmt.Sprintf("w%d", i)}, nil))
		}
		for _, p := range all {
			l.awaitPhase(p, "running")
		}
		// Until the tasks have stopped moving.
		l.pass(5 * time.Second)
		l.more(400)
		l.awaitResults(all[0], 400)
		if got := runs.Load(); got != 400 {
			t.Errorf("the costly step ran %d times on 400 records", got)
		}
		l.send("control.drain.count", "")
		l.awaitRecord("the drain", drained)
		for _, p := range all {
			if err := p.wait(); err != nil {
				t.Error(err)
			}
		}
		l.judge("OUT")
		l.judgeExchange()
		if r := l.record().Report; r.Records["IN"] != 400 || r.Results != 400 {
			t.Errorf("the report: %+v", r)
		}
	})
}

// TestRedistribute_dead: a record that fails behind it is one dead letter, with its payload.
func TestRedistribute_dead(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := l.spreadFlow(func(_ *flow.Meta, v string) error {
			if strings.HasPrefix(v, "bad") {
				return errors.New("as told")
			}
			return nil
		})
		l.more(50)
		seq := l.put("bad 1")
		l.more(50)
		l.drain(f, Config{})
		delete(l.fed, "bad")
		l.judge("OUT")
		dead := l.read("NATSFLOW_DLQ")
		if len(dead) != 1 || string(dead[0].data) != "bad 1" || !slices.Equal(dead[0].header[flow.HeaderDeadSeq], []string{fmt.Sprint(seq)}) || !slices.Equal(dead[0].header[flow.HeaderDeadStep], []string{"costly-IN"}) {
			t.Errorf("dead letters: %+v", dead)
		}
	})
}

// TestRedistribute_crash stops workers dead at random points: each record counts once.
func TestRedistribute_crash(t *testing.T) {
	runHistories(t, sinkKinds[:2], 2, 10, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 23))
		l := newLab(t, srv)
		kind.make(l)
		f := l.spreadFlow(nil)
		hit := map[string]int{}
		for range 2 + rng.IntN(3) {
			l.feed(rng, 20+rng.IntN(200), 8)
			c := &crasher{point: points[rng.IntN(10)], left: 1 + rng.IntN(20)}
			p := l.start(f, Config{idleCommit: 50 * time.Millisecond}, c.probe)
			timer := time.NewTimer(time.Duration(rng.IntN(4000)) * time.Millisecond)
			select {
			case <-p.done:
			case <-timer.C:
				p.link.Cut()
				p.cancel()
			}
			timer.Stop()
			_ = p.wait()
		}
		l.drainThroughCrashes(rng, f, hit)
		l.judge("OUT")
	})
}
