package worker

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
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
// published or acked beyond the last one, the status says so, a drain waits and says
// so, and a worker that stops then ends with an error. When there is room again it
// goes on by itself, exactly.
func TestBucketFull(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		admin := l.srv.Admin()
		bucket, err := l.conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "natsflow_count", MaxBytes: 512 << 10})
		if err != nil {
			t.Fatal(err)
		}
		f := countFlow{}.build(t)
		p := l.start(f, Config{MaxPending: 16 << 10, StopTimeout: 3 * time.Second}, nil)
		l.more(300)
		l.awaitResults(p, 300)
		// The first positions are recorded by idle commits, too.
		l.pass(10 * time.Second)

		empty := fill(l, bucket)
		// More than the lanes take while nothing is committed.
		l.more(20_000)
		l.await("trouble", func() bool { return strings.Contains(p.at().Trouble, "cannot commit") })
		l.pass(30 * time.Second)
		published := l.count("OUT")
		if published > 400 {
			t.Errorf("%d results are out", published)
		}
		if at := p.at(); at.Sources["IN"].Committed > 300 || at.Sources["IN"].Read == uint64(len(l.keys)) {
			t.Errorf("read up to %d, committed up to %d", at.Sources["IN"].Read, at.Sources["IN"].Committed)
		}
		if _, unacked, _ := cursors(l, admin); unacked == 0 {
			t.Error("all is acked")
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

// There is room for commits and none for a base: the flow goes on without one.
func TestBucketFull_base(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		bucket, err := l.conn.EnsureBucket(l.ctx, bus.BucketConfig{Name: "natsflow_big", MaxBytes: 2 << 20})
		if err != nil {
			t.Fatal(err)
		}
		// Bases are as large as the state: nearly all of the room there is.
		f := bigFlow(t)
		p := l.start(f, Config{}, nil)
		l.awaitPhase(p, "running")
		for i := range 4 {
			l.putBig(fmt.Sprintf("a%d", i), 100_000)
			l.pass(time.Second)
		}
		empty := fill(l, bucket)
		l.pass(time.Minute)
		empty()
		for i := range 60 {
			l.putBig(fmt.Sprintf("a%d", i%4), 100_000+i)
			l.pass(500 * time.Millisecond)
		}
		l.await("all committed", func() bool { return p.at().Sources["IN"].Committed == 64 })
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
	})
}
