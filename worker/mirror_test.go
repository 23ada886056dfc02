package worker

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/testenv"
)

// The records of the lab are on in.<key>.
var byKey = []int{2}

// TestRun_manyWorkersPartitioned is TestRun_manyWorkers with a source that the
// server partitions.
func TestRun_manyWorkersPartitioned(t *testing.T) {
	runHistories(t, sinkKinds[:1], 5, 40, func(t *testing.T, srv *testenv.Server, kind sinkKind, seed uint64) {
		manyHistory(t, srv, kind, seed, manySource{partitionBy: byKey})
	})
}

// mirrors are the names of the mirrors of the flow "count".
func (l *lab) mirrors() []string {
	l.tb.Helper()
	names, err := l.conn.StreamNames(l.ctx, mirrorPrefix+"count_")
	if err != nil {
		l.tb.Fatal(err)
	}
	return names
}

// mirrored waits until there is the mirror, and returns its name.
func (l *lab) mirrored() string {
	l.tb.Helper()
	l.await("one mirror", func() bool { return len(l.mirrors()) == 1 })
	return l.mirrors()[0]
}

// team starts n workers and waits until each has its part of the tasks.
func (l *lab) team(f *flow.Flow, n int, cfg Config) []*process {
	l.tb.Helper()
	var team []*process
	for i := range n {
		cfg.Name = fmt.Sprintf("w%d", i+1)
		team = append(team, l.start(f, cfg, nil))
	}
	l.await("the tasks are shared out", func() bool {
		tasks, err := l.control().Tasks(l.ctx)
		if err != nil {
			l.tb.Fatal(err)
		}
		owned := map[string]int{}
		for _, rec := range tasks {
			owned[rec.Owner]++
		}
		return len(owned) == n && owned[""] == 0 && !slices.ContainsFunc(team, func(p *process) bool { return p.at().Phase != "running" })
	})
	return team
}

// drainTeam drains at the head and waits for all workers.
func (l *lab) drainTeam(team []*process) {
	l.tb.Helper()
	l.send("control.drain.count", `{"at":"head"}`)
	for _, p := range team {
		if err := p.wait(); err != nil {
			l.tb.Fatalf("drain: %v", err)
		}
	}
	if rec := l.record(); rec.State != control.StateDrained || rec.Report.Cut["IN"] != l.seq {
		l.tb.Fatalf("drained: the record says %s, %s, report %+v", rec.State, rec.LastError, rec.Report)
	}
}

// Four workers get each record about once, and not four times.
func TestMirror_deliveries(t *testing.T) {
	for name, by := range map[string][]int{"shared": nil, "partitioned": byKey} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				admin := l.srv.Admin()
				team := l.team(countFlow{partitionBy: by}.build(t), 4, Config{})
				for range 20 {
					l.feed(l.rng, 500, 100)
					l.pass(100 * time.Millisecond)
				}
				l.awaitResults(team[0], 10_000)
				stream := "IN"
				if by != nil {
					stream = l.mirrored()
				}
				var delivered uint64
				cursors := 0
				for _, c := range admin.Consumers(stream) {
					if strings.HasPrefix(c.Name, "natsflow-count-w") {
						cursors++
						delivered += c.Delivered.Consumer
					}
				}
				if cursors != 4 {
					t.Errorf("%d cursors, want one for each worker", cursors)
				}
				if each := float64(delivered) / 10_000; by == nil && each < 3.9 || by != nil && each > 1.1 {
					t.Errorf("each record was delivered %.2f times", each)
				}
				l.drainTeam(team)
				l.judge("OUT")
			})
		})
	}
}

// A drained flow goes on with a mirror, with one of another kind, and without one;
// the former mirror goes. A flow that is not drained does not.
func TestMirror_switched(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		two := countFlow{partitionBy: byKey}
		shared := countFlow{}.build(t)
		l.more(200)
		l.drainTeam(l.team(shared, 2, Config{}))
		last := ""
		for i, c := range []countFlow{two, {}, two, {partitionBy: byKey, subjects: []string{"in.*"}}, {}} {
			l.more(200)
			team := l.team(c.build(t), 2, Config{Resume: true})
			l.more(200)
			if c.partitionBy == nil {
				l.await("no mirror", func() bool { return len(l.mirrors()) == 0 })
				last = ""
			} else {
				name := l.mirrored()
				if name == last {
					t.Errorf("%d: the mirror is still %s", i, name)
				}
				last = name
			}
			if i == 2 {
				// Left, and not drained.
				for _, p := range team {
					if err := p.leave(); err != nil {
						t.Fatal(err)
					}
				}
				err := l.start(shared, Config{}, nil).wait()
				if !errors.Is(err, control.ErrDefinition) || !strings.Contains(err.Error(), "drain the flow") {
					t.Fatalf("another partitioning of a running flow: %v", err)
				}
				team = l.team(c.build(t), 2, Config{})
			}
			l.drainTeam(team)
			l.judge("OUT")
		}
	})
}

// A drain ends though there is no message at its cut, or none in the mirror: the
// last ones of the source are of other subjects, or deleted.
func TestMirror_cutWithoutMessage(t *testing.T) {
	for _, c := range []struct {
		name string
		tail func(l *lab)
	}{
		{"other subjects", func(l *lab) {
			for range 50 {
				if _, err := l.conn.Publish(l.ctx, "in.other.x", nil, []byte("x 1")); err != nil {
					l.tb.Fatal(err)
				}
				l.seq++
			}
		}},
		{"purged", func(l *lab) {
			l.pass(time.Second)
			l.srv.Admin().Purge("IN", l.seq+1)
		}},
		{"deleted before the mirror had it", func(l *lab) {
			for range 3 {
				if _, err := l.conn.Publish(l.ctx, "in.gone", nil, []byte("gone 1")); err != nil {
					l.tb.Fatal(err)
				}
				l.seq++
				l.srv.Admin().DeleteMsg("IN", l.seq)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				f := countFlow{partitionBy: byKey, subjects: []string{"in.*"}}.build(t)
				l.more(100)
				team := l.team(f, 3, Config{})
				l.awaitResults(team[0], 100)
				c.tail(l)
				l.drainTeam(team)
				if c.name != "deleted before the mirror had it" {
					l.judge("OUT")
					return
				}
				// It had some of them before, or none.
				got := l.count("OUT")
				if got < 100 || got > 103 {
					t.Errorf("%d results", got)
				}
			})
		})
	}
}

// The mirror is far behind when a drain asks for all that the source has.
func TestMirror_lags(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{partitionBy: byKey}.build(t)
		l.feed(l.rng, 20_000, 50)
		team := l.team(f, 2, Config{})
		l.feed(l.rng, 20_000, 50)
		l.drainTeam(team)
		l.judge("OUT")
	})
}

// Each dead letter is published once, by the task whose worker sees the record,
// with the subject that the record has in the source; also that of a record whose
// key is not what it is partitioned by.
func TestMirror_deadLetters(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := faulty(flow.Options{})
		f.partitionBy = byKey
		team := l.team(f.build(t), 4, Config{})
		want := map[uint64]string{}
		put := func(subject, text, err string) {
			seq, perr := l.conn.Publish(l.ctx, subject, nil, []byte(text))
			if perr != nil {
				t.Fatal(perr)
			}
			l.seq++
			want[seq] = subject + ": " + err
		}
		for i := range 40 {
			l.more(5)
			key := fmt.Sprintf("k%d", i)
			put("in."+key, key+" bad-decode", "bad decode")
			put("in."+key, "nokey", "no key")
			put("in."+key, key+" bad-step", "bad step")
			other := key + "x"
			if flow.Partition(other, 16) == flow.Partition(key, 16) {
				other += "y"
			}
			put("in."+key, other+" v", "belongs to partition")
			put("in."+key+".more", key+" bad-key", "bad key")
		}
		l.drainTeam(team)
		for _, m := range l.read(deadStream) {
			text := strings.Join(m.header[flow.HeaderDeadSubject], "") + ": " + strings.Join(m.header[flow.HeaderDeadError], "")
			var seq uint64
			if _, err := fmt.Sscan(m.header[flow.HeaderDeadSeq][0], &seq); err != nil {
				t.Fatal(err)
			}
			subject, reason, _ := strings.Cut(want[seq], ": ")
			if want[seq] == "" || !strings.HasPrefix(text, subject+": ") || !strings.Contains(text, reason) {
				t.Errorf("dead letter of %d: %q, want %q", seq, text, want[seq])
			}
			delete(want, seq)
		}
		if len(want) > 0 {
			t.Errorf("without a dead letter: %v", want)
		}
		l.judge("OUT")
	})
}

// With on_error: stop the flow ends before a record with a key of another
// partition, and says what to do.
func TestMirror_keyStops(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{partitionBy: byKey, options: flow.Options{OnError: flow.Stop}}.build(t)
		p := l.start(f, Config{}, nil)
		l.more(50)
		l.put("k1 v")
		var step *flow.StepError
		if err := p.wait(); !errors.As(err, &step) || step.Seq != 51 || !strings.Contains(err.Error(), "leave out PartitionBy") {
			t.Fatalf("got %v", err)
		}
		l.keys = l.keys[:50]
		l.judge("OUT")
	})
}

// Records that do not get a key may be partitioned by any tokens.
func TestMirror_withoutKey(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		b := flow.New("count", flow.Options{})
		src := flow.From(b, flow.Source{Stream: "IN", PartitionBy: byKey}, func(_ *flow.Meta, data []byte) (string, error) { return string(data), nil })
		flow.To(src, flow.Sink[string]{
			Stream: "OUT", Subjects: []string{"out.>"}, Encode: flow.EncodeText(),
			Subject: func(dst []byte, m *flow.Meta, _ string) ([]byte, error) {
				return append(append(dst, "out."...), m.Subject...), nil
			},
		})
		f, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		l.more(500)
		l.drainTeam(l.team(f, 3, Config{}))
		got := map[string]int{}
		for _, m := range l.read("OUT") {
			got[strings.TrimPrefix(m.subject, "out.in.")]++
		}
		for key, n := range l.fed {
			if got[key] != n {
				t.Errorf("%d results of %s, want %d", got[key], key, n)
			}
		}
	})
}

// Unprocessed messages that the source has lost are a gap, also when the mirror
// has them still. Messages that only the mirror has lost are found.
func TestMirror_gap(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{partitionBy: byKey}.build(t)
		l.more(100)
		for _, p := range l.team(f, 2, Config{}) {
			l.await("100 results", func() bool { return l.count("OUT") == 100 })
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
		mirror := l.mirrored()
		l.more(100)
		l.pass(time.Second)
		l.srv.Admin().Purge(mirror, 151)
		err := l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "nats stream rm "+mirror) {
			t.Fatalf("messages lost by the mirror: %v", err)
		}
		if err := l.conn.DeleteStream(l.ctx, mirror); err != nil {
			t.Fatal(err)
		}
		l.srv.Admin().Purge("IN", 181)
		err = l.start(f, Config{}, nil).wait()
		if !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "181") {
			t.Fatalf("messages lost by the source: %v", err)
		}
		l.drainTeam([]*process{l.start(f, Config{AcceptGap: true}, nil)})
		if n := l.count("OUT"); n < 120 || n > 200 {
			t.Errorf("%d results, want at least those of what the source has", n)
		}
	})
}

// A worker whose partitions get no messages is not held to have missed what the
// source has dropped meanwhile.
func TestMirror_idleWorkerAdvances(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{partitionBy: byKey}.build(t)
		l.more(100)
		l.drainTeam(l.team(f, 4, Config{}))
		team := l.team(f, 4, Config{Resume: true})
		// One key only: three workers have nothing to do.
		l.feed(l.rng, 500, 1)
		l.awaitResults(team[0], 600)
		l.await("all are at the end", func() bool {
			return !slices.ContainsFunc(team, func(p *process) bool { return p.at().Sources["IN"].Committed < 600 })
		})
		l.srv.Admin().Purge("IN", 601)
		l.more(10)
		if err := team[3].leave(); err != nil {
			t.Fatal(err)
		}
		l.drainTeam(team[:3])
		l.judge("OUT")
	})
}

// The mirror is deleted while it is read: it is made anew.
func TestMirror_deleted(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		team := l.team(countFlow{partitionBy: byKey}.build(t), 2, Config{})
		l.more(200)
		l.awaitResults(team[0], 200)
		if err := l.conn.DeleteStream(l.ctx, l.mirrored()); err != nil {
			t.Fatal(err)
		}
		l.more(200)
		l.awaitResults(team[0], 400)
		l.drainTeam(team)
		l.judge("OUT")
	})
}

// Of a source that allows direct gets the server would let the mirror answer them.
func TestMirror_refusesDirect(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, _, err := l.conn.EnsureSink(l.ctx, bus.SinkConfig{Stream: "DIRECT", Subjects: []string{"direct.*"}}); err != nil {
			t.Fatal(err)
		}
		err := l.start(countFlow{sources: []string{"DIRECT"}, partitionBy: byKey}.build(t), Config{}, nil).wait()
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), "nats stream edit DIRECT --no-allow-direct") {
			t.Fatalf("got %v", err)
		}
		if names := l.mirrors(); len(names) > 0 {
			t.Errorf("there is a mirror: %v", names)
		}
	})
}
