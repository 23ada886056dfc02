package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// fill leaves no room in a bucket; empty makes it again.
func fill(l *lab, b *bus.Bucket) (empty func()) {
	l.tb.Helper()
	n := 0
	for size := 16 << 10; size >= 1; {
		_, err := b.Put(l.ctx, fmt.Sprintf("filler.%d", n), make([]byte, size), 0)
		switch {
		case err == nil:
			n++
		case errors.Is(err, bus.ErrNoSpace):
			size /= 2
		default:
			l.tb.Fatal(err)
		}
	}
	return func() {
		if err := b.Purge(l.ctx, "filler.>", 0); err != nil {
			l.tb.Fatal(err)
		}
	}
}

// The bucket of the snapshots is full while the flow runs: commits fail, nothing is
// published beyond the last one, the status says so, a drain waits and says
// so, and a worker that stops then ends with an error. When there is room again it
// goes on by itself, exactly.
func TestBucketFull(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		bucket, err := l.conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "natsflow_count", MaxBytes: 512 << 10})
		if err != nil {
			t.Fatal(err)
		}
		f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
		p := l.start(f, Config{MaxPending: 16 << 10, StopTimeout: 3 * time.Second, Lanes: 1}, nil)
		l.more(300)
		l.awaitResults(p, 300)
		// The first positions are recorded by idle commits, too.
		l.pass(10 * time.Second)

		empty := fill(l, bucket)
		// More than the lanes take while nothing is committed.
		l.more(10_000)
		l.await("trouble", func() bool { return strings.Contains(p.at().Trouble, "cannot commit") })
		l.pass(30 * time.Second)
		published := l.count("OUT")
		if published > 400 {
			t.Errorf("%d results are out", published)
		}
		if at := p.at(); at.Sources["IN"].Committed > 300 || at.Sources["IN"].Read == uint64(len(l.keys)) {
			t.Errorf("read up to %d, committed up to %d", at.Sources["IN"].Read, at.Sources["IN"].Committed)
		}
		l.send("control.drain.count", "")
		l.await("the drain waits and says why", func() bool { return p.at().Phase == "draining" && p.at().Trouble != "" })
		l.pass(time.Minute)
		if rec := l.record(); rec.State != control.StateDraining || p.ended() {
			t.Errorf("state %s", rec.State)
		}
		empty()
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		l.judgeThrough("OUT", l.record().Report.Cut["IN"])

		p = l.start(f, Config{Resume: true, MaxPending: 16 << 10, StopTimeout: 3 * time.Second}, nil)
		l.awaitPhase(p, "running")
		empty = fill(l, bucket)
		l.more(5000)
		l.await("trouble", func() bool { return strings.Contains(p.at().Trouble, "cannot commit") })
		if err := p.leave(); !errors.Is(err, ErrStopTimeout) {
			t.Errorf("a stop with a full bucket ended with %v", err)
		}
		// Nor can a worker start, but it waits for it.
		p = l.start(f, Config{}, nil)
		l.await("trouble at the start", func() bool { return p.at().Trouble != "" })
		l.pass(time.Minute)
		if p.ended() {
			t.Errorf("ended with %v", p.err)
		}
		empty()
		l.awaitResults(p, len(l.keys))
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// There is room for commits and none for a base: the flow goes on without one, and
// tries again now and then.
func TestBucketFull_base(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		var log record
		l.log = slog.New(slog.NewTextHandler(&log, nil))
		if _, err := l.conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "natsflow_big", MaxBytes: 1_600_000}); err != nil {
			t.Fatal(err)
		}
		f := bigFlow(t, 1)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		// Once in a delta, and there is no room for the base that is due then.
		l.putBig("large", 1_000_000)
		for i := range 60 {
			l.putBig(fmt.Sprintf("small%d", i), 100)
			l.pass(time.Second)
		}
		l.await("all committed", func() bool { return p.at().Sources["IN"].Committed == 61 })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(log.String(), "no room for a base"); n < 2 || n > 10 {
			t.Errorf("%d times in the log that there is no room for a base", n)
		}
		p = l.start(f, Config{}, nil)
		l.tell("large")
		l.awaitResults(p, 1)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}

// record is a log in memory.
type record struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.String()
}

// The server is away in the middle of a base, whose upload holds up the lane, when the
// worker is asked to stop: the stop is bounded all the same.
func TestStop_inTheMiddleOfABase(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := bigFlow(t, 1)
		var batches atomic.Int64
		p := l.start(f, Config{StopTimeout: 3 * time.Second, LeaseTTL: time.Minute}, func(p *process, _ context.Context, point, _ string) error {
			// The delta has five batches of chunks; then comes the base.
			if point == "chunk-written" && batches.Add(1) == 6 {
				p.link.Hold(testenv.ToServer)
			}
			return nil
		})
		l.awaitPhase(p, "running")
		l.putBig("large", 10_000_000)
		l.await("the base", func() bool { return batches.Load() >= 6 })
		l.pass(time.Second)
		began := time.Now()
		if err := p.leave(); !errors.Is(err, ErrStopTimeout) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the stop took %v", took)
		}
		p = l.start(f, Config{}, nil)
		l.tell("large")
		l.awaitResults(p, 1)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}
