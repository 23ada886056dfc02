package worker

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/testenv"
)

// histories is the number of seeded histories for each kind of sink.
var (
	histories = flag.Int("histories", 0, "seeded histories for each kind of sink (fewer with the race detector)")
	firstSeed = flag.Uint64("seed", 1, "seed of the first history")
)

// points are the places at which a worker is stopped dead.
var points = []string{
	"read", "processed", "chunk-written", "entry-appended-unacked", "committed", "half-published", "published", "noted",
	"base-written", "purged", "cut-chosen", "cut-fixed", "released", "drained-unrecorded",
}

type sinkKind struct {
	name string
	make func(l *lab)
	// forgets: it has no fence, and forgets message ids soon.
	forgets bool
}

var sinkKinds = []sinkKind{
	{"made by natsflow", func(*lab) {}, false},
	{"there before", func(l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "OUT", Subjects: []string{"out.>"}}); err != nil {
			l.tb.Fatal(err)
		}
	}, false},
	{"there before, duplicate window of 1s", func(l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "OUT", Subjects: []string{"out.>"}, Duplicates: time.Second}); err != nil {
			l.tb.Fatal(err)
		}
	}, true},
}

// TestRun_crashHistories stops workers dead at seeded points while records come,
// starts them again, drains at the end, and judges the results.
func TestRun_crashHistories(t *testing.T) {
	hit := map[string]int{}
	n := runHistories(t, sinkKinds, 8, 60, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		crashHistory(t, srv, kind, seed, hit)
	})
	if n < 60 || t.Failed() {
		return
	}
	for _, p := range points {
		if hit[p] == 0 {
			t.Errorf("no history stopped a worker at %q", p)
		}
	}
}

// runHistories runs histories of seeds in virtual time, for each kind of sink as many
// as the flag says, or by default raced with the race detector and usual without it.
// It returns how many.
func runHistories(t *testing.T, kinds []sinkKind, raced, usual int, run func(*testing.T, *testenv.Server, sinkKind, uint64)) int {
	n := *histories
	switch {
	case n > 0:
	case raceDetector:
		n = raced
	default:
		n = usual
	}
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			for i := range n {
				seed := *firstSeed + uint64(i)
				t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
					t.Cleanup(func() {
						if t.Failed() {
							top, _, _ := strings.Cut(t.Name(), "/")
							t.Logf("repeat it with: go test ./worker -run '%s/%s' -histories 1 -seed %d", top, kind.name, seed)
						}
					})
					testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) { run(t, srv, kind, seed) })
				})
			}
		})
	}
	return n
}

func crashHistory(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64, hit map[string]int) {
	rng := rand.New(rand.NewPCG(seed, 7))
	l := newLab(t, srv)
	kind.make(l)
	f := countFlow{bucket: "LATEST", options: flow.Options{Partitions: 4, CommitInterval: 20 * time.Millisecond}}.build(t)
	for range 2 + rng.IntN(4) {
		l.feed(rng, 20+rng.IntN(300), 8)
		c := &crasher{point: points[rng.IntN(10)], left: 1 + rng.IntN(20)}
		p := l.start(f, Config{Lanes: 2}, c.probe)
		// The worker runs into its crash, or is done and is stopped dead or asked
		// to leave.
		timer := time.NewTimer(time.Duration(rng.IntN(3000)) * time.Millisecond)
		select {
		case <-p.done:
		case <-timer.C:
			if rng.IntN(2) == 0 {
				c.mu.Lock()
				c.struck = true
				c.mu.Unlock()
				p.link.Cut()
			}
			p.cancel()
		}
		timer.Stop()
		_ = p.wait()
		if c.struck {
			hit[c.point]++
		}
		if rng.IntN(3) == 0 {
			// Beyond the duplicate window of one of the sinks.
			pause := time.NewTimer(1500 * time.Millisecond)
			<-pause.C
		}
	}
	l.drainThroughCrashes(rng, f, hit)
	l.judge("OUT")
	l.judgeLatest("KV_LATEST")
}

// drainThroughCrashes drains the flow at the head, crashing on the way.
func (l *lab) drainThroughCrashes(rng *rand.Rand, f *flow.Flow, hit map[string]int) {
	l.send("control.drain.count", `{"at":"head"}`)
	for try := range 50 {
		c := &crasher{point: points[rng.IntN(len(points))], left: 1 + rng.IntN(4)}
		if rng.IntN(2) == 0 {
			// The points of a drain are passed once each.
			c.point, c.left = points[len(points)-1-rng.IntN(4)], 1
		}
		if try > 5 {
			c.point = ""
		}
		p := l.start(f, Config{Lanes: 2}, c.probe)
		l.await("the drain or the crash", func() bool {
			select {
			case <-p.done:
				return true
			default:
			}
			s := p.status.Load()
			if s != nil && s.Phase == "drained" {
				p.cancel()
			}
			return false
		})
		err := p.wait()
		if c.struck {
			hit[c.point]++
			continue
		}
		if err != nil && !errors.Is(err, errCrash) {
			l.tb.Fatalf("drain: %v", err)
		}
		return
	}
	l.tb.Fatal("the drain never ended")
}
