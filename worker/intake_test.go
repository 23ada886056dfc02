package worker

import (
	"fmt"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// queued makes the source "IN" anew with a retention.
func (l *lab) queued(retention string) {
	l.tb.Helper()
	if err := l.conn.DeleteStream(l.ctx, "IN"); err != nil {
		l.tb.Fatal(err)
	}
	if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN", Subjects: []string{"in.>"}, Retention: retention}); err != nil {
		l.tb.Fatal(err)
	}
}

const ownIN = "NATSFLOW_Q_count_IN"

// holds waits until a stream holds n messages.
func (l *lab) holds(stream string, n uint64) {
	l.tb.Helper()
	l.await(fmt.Sprintf("%d messages in %s", n, stream), func() bool { return l.stream(stream).Msgs == n })
}

func (l *lab) stream(name string) bus.StreamInfo {
	l.tb.Helper()
	info, err := l.conn.Stream(l.ctx, name)
	if err != nil {
		l.tb.Fatal(err)
	}
	return info
}

// A flow reads a work queue through a stream of its own, which is empty but for one
// message when all is done, as is the work queue.
func TestIntake(t *testing.T) {
	for _, retention := range []string{"workqueue", "interest"} {
		t.Run(retention, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				l.queued(retention)
				f := countFlow{options: flow.Options{Partitions: 4}}.build(t)
				p := l.start(f, Config{}, nil)
				l.awaitPhase(p, "running")
				l.more(1000)
				l.awaitResults(p, 1000)
				l.holds("IN", 0)
				l.holds(ownIN, 1)
				l.more(500)
				l.send("control.drain.count", `{"at":"head"}`)
				if err := p.wait(); err != nil {
					t.Fatal(err)
				}
				rec := l.record()
				if rec.State != control.StateDrained || rec.Report.Cut[ownIN] != 1500 || rec.Report.Records[ownIN] != 1500 {
					t.Errorf("%+v", rec.Report)
				}
				l.judge("OUT")
				l.holds(ownIN, 1)
				l.pass(2 * time.Second)
				l.holds("IN", 0)
			})
		})
	}
}

// judgeIntake says that nothing is left in the source, and the last message in the
// intake.
func (l *lab) judgeIntake() {
	l.tb.Helper()
	l.holds("IN", 0)
	if info := l.stream(ownIN); info.FirstSeq != info.LastSeq || info.LastSeq != l.seq {
		l.tb.Fatalf("the intake has %d to %d, of %d that were fed", info.FirstSeq, info.LastSeq, l.seq)
	}
}

// TestRun_manyWorkersQueue is TestRun_manyWorkers with a work queue, or a source with
// interest retention, that is trimmed all the time.
func TestRun_manyWorkersQueue(t *testing.T) {
	for name, src := range map[string]manySource{
		"workqueue": {retention: "workqueue"}, "interest": {retention: "interest"}, "partitioned": {retention: "workqueue", partitionBy: byKey},
	} {
		t.Run(name, func(t *testing.T) {
			runHistories(t, sinkKinds[:1], 5, 40, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
				manyHistory(t, srv, kind, seed, src)
			})
		})
	}
}
