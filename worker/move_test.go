package worker

import (
	"testing"
	"time"

	"natsflow/flow"
)

// A task is given away while its commit is on its way, and reading goes on for the
// other one: its release says where it stood, not how far the lane has come
// meanwhile. Otherwise its next owner would skip what came in between.
func TestMove_commitInFlight(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{options: flow.Options{Partitions: 2}}.build(t)
		g := newGate("committed")
		g.skip.Store(2) // the claims
		a := l.start(f, Config{Name: "a"}, g.probe)
		l.awaitPhase(a, "running")
		l.more(50)
		<-g.reached
		b := l.start(f, Config{Name: "b"}, nil)
		l.await("a to give a task away", func() bool {
			_, assigned, err := l.control().Members(l.ctx)
			return err == nil && len(assigned.Owners["b"]) == 1
		})
		l.pass(time.Second)
		l.more(200)
		l.await("a to read on", func() bool { return a.at().Sources["IN"].Read == l.seq })
		l.pass(time.Second)
		close(g.open)
		l.awaitResults(b, 250)
		for _, p := range []*process{a, b} {
			if err := p.leave(); err != nil {
				t.Error(err)
			}
		}
		l.judge("OUT")
	})
}

// Tasks that come make the reader go back to where they are; what the tasks that
// were there have applied is not applied again, however often that happens.
func TestMove_backAndForth(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
		a := l.start(f, Config{Name: "a", LeaseTTL: 2 * time.Second}, nil)
		l.awaitPhase(a, "running")
		for range 4 {
			b := l.start(f, Config{Name: "b", LeaseTTL: 2 * time.Second}, nil)
			l.awaitPhase(b, "running")
			l.more(100)
			// b stands still, a reads on: then it has to go back for b's tasks.
			b.link.Cut()
			l.more(100)
			l.awaitResults(a, len(l.keys))
			_ = b.leave()
		}
		if err := a.leave(); err != nil {
			t.Error(err)
		}
		l.judge("OUT")
	})
}

// Only the tasks that have to move do, and none is without an owner for long.
func TestMove_sticky(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{}.build(t)
		var crew []*process
		for i := range 4 {
			p := l.start(f, Config{Name: string(rune('a' + i))}, nil)
			crew = append(crew, p)
			began := time.Now()
			l.await("a share of the tasks", func() bool { return p.at().Phase == "running" && p.at().Tasks == 16/(i+1) })
			if took := time.Since(began); took > time.Second {
				t.Errorf("worker %d had its tasks after %v", i, took)
			}
			l.more(100)
			l.awaitResults(p, len(l.keys))
		}
		before, err := l.control().Tasks(l.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := crew[3].leave(); err != nil {
			t.Error(err)
		}
		l.await("the others to have its tasks", func() bool {
			now, err := l.control().Tasks(l.ctx)
			if err != nil {
				t.Fatal(err)
			}
			for name, rec := range now {
				if rec.Free() {
					return false
				}
				if was := before[name].Owner; was != "d" && rec.Owner != was {
					t.Fatalf("task %s moved from %s to %s", name, was, rec.Owner)
				}
			}
			return true
		})
		l.more(100)
		l.awaitResults(crew[0], len(l.keys))
		l.judge("OUT")
	})
}
