package worker

import (
	"errors"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/flow"
)

// The sink holds a part of an outbox, or all of it, or nothing, when the worker crashes
// before that is confirmed, and the duplicate window of one second is over when it
// starts again: no result is there twice, none is missing.
func TestSink_outboxHeldAfterDuplicateWindow(t *testing.T) {
	for _, kind := range sinkKinds {
		for _, point := range []string{"committed", "half-published", "published", "noted"} {
			t.Run(kind.name+"/"+point, func(t *testing.T) {
				bubble(t, func(t *testing.T, l *lab) {
					kind.make(l)
					f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
					for i := range 4 {
						l.more(200)
						c := &crasher{point: point, left: 1 + i}
						if point == "committed" {
							c.left += 4 // the claims
						}
						if err := l.start(f, Config{}, c.probe).wait(); !errors.Is(err, errCrash) {
							t.Fatalf("got %v, want a crash", err)
						}
						l.pass(time.Minute)
					}
					l.drain(f, Config{})
					l.judge("OUT")
				})
			})
		}
	}
}

// The answer to a publish is lost with the connection while the worker lives: it looks
// what is there before it publishes the rest, beyond the duplicate window too.
func TestSink_connectionLostWhilePublishing(t *testing.T) {
	for _, kind := range sinkKinds {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				kind.make(l)
				p := l.start(countFlow{}.build(t), Config{LeaseTTL: 10 * time.Second}, nil)
				l.awaitPhase(p, "running")
				for i := range 20 {
					l.more(60)
					l.pass(time.Duration(i%4) * time.Millisecond)
					p.link.Drop()
					l.pass(1500 * time.Millisecond)
				}
				l.awaitResults(p, len(l.keys))
				if err := p.leave(); err != nil {
					t.Fatal(err)
				}
				l.judge("OUT")
			})
		})
	}
}

// A KV bucket as a sink holds the last result of each key, whether natsflow made it or
// it was there.
func TestSink_bucket(t *testing.T) {
	for _, there := range []bool{false, true} {
		bubble(t, func(t *testing.T, l *lab) {
			if there {
				if _, err := l.conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "LATEST"}); err != nil {
					t.Fatal(err)
				}
			}
			f := countFlow{bucket: "LATEST"}.build(t)
			for i := range 3 {
				l.more(200)
				c := &crasher{point: "half-published", left: 3 + i}
				if err := l.start(f, Config{}, c.probe).wait(); !errors.Is(err, errCrash) {
					t.Fatalf("got %v, want a crash", err)
				}
			}
			l.drain(f, Config{})
			l.judge("OUT")
			l.judgeLatest("KV_LATEST")
		})
	}
}

// A sink that is there but does not take what the flow publishes is refused at the
// start.
func TestSink_doesNotFit(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "OUT", Subjects: []string{"elsewhere.>"}}); err != nil {
			t.Fatal(err)
		}
		if err := l.start(countFlow{}.build(t), Config{}, nil).wait(); err == nil {
			t.Fatal("it started")
		}
	})
}
