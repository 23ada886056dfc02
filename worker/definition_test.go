package worker

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flow"
	"natsflow/kvsnap"
)

// twoCounts counts the records of each key in two steps, the results of which go to
// OUT and OUT2. The ids of the steps are those given; without the second there is
// one.
func twoCounts(tb testing.TB, partitions int, first, second string) *flow.Flow {
	tb.Helper()
	b := flow.New("count", flow.Options{Partitions: partitions})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	for i, id := range []string{first, second} {
		if id == "" {
			continue
		}
		counts := flow.Stateful(keyed, id, flow.JSONState[int](1, nil),
			func(m *flow.Meta, n *int, _ string, emit func(counted)) error {
				*n++
				emit(counted{Key: m.Key, N: *n, Seq: m.Seq})
				return nil
			})
		sink := []string{"OUT", "OUT2"}[i]
		flow.To(counts, flow.Sink[counted]{
			Stream: sink, Subjects: []string{strings.ToLower(sink) + ".*"},
			Subject: flow.KeySubject[counted](strings.ToLower(sink) + "."), Encode: flow.EncodeJSON[counted](),
		})
	}
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// judgeAnew says that the results in a stream are those of one count up to a
// sequence of the source, and of one that began there.
func (l *lab) judgeAnew(stream string, seq uint64) {
	l.tb.Helper()
	want := map[string][]int{}
	n := map[string]int{}
	for i, key := range l.keys {
		if uint64(i) == seq {
			clear(n)
		}
		n[key]++
		want[key] = append(want[key], n[key])
	}
	got := map[string][]int{}
	for _, m := range l.read(stream) {
		var r counted
		if err := json.Unmarshal(m.data, &r); err != nil {
			l.tb.Fatal(err)
		}
		got[r.Key] = append(got[r.Key], r.N)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		l.tb.Fatalf("%s: results of each key (-want +got):\n%s", stream, diff)
	}
}

// refused starts a worker that must end with an ErrDefinition of these words.
func (l *lab) refused(f *flow.Flow, cfg Config, words ...string) {
	l.tb.Helper()
	err := l.start(f, cfg, nil).wait()
	if !errors.Is(err, control.ErrDefinition) {
		l.tb.Fatalf("got %v, want ErrDefinition", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			l.tb.Errorf("%q is not in %v", w, err)
		}
	}
}

// A worker of another definition does not join those that run, and does not disturb
// them. After a drain it goes on from there.
func TestDefinition_beside(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		old, next := twoCounts(t, 16, "count", ""), twoCounts(t, 16, "count", "total")
		l.more(100)
		p := l.start(old, Config{Name: "a"}, nil)
		l.awaitResults(p, 100)
		before, err := l.control().Tasks(l.ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"b", "b", "c"} {
			l.refused(next, Config{Name: name, Resume: true}, "member a of flow count", "runs definition "+old.Hash()[:12], "this process has "+next.Hash()[:12], "drain the flow", "--resume")
			l.more(50)
		}
		l.awaitResults(p, 250)
		if rec := l.record(); rec.Hash != old.Hash() || rec.LastError != "" {
			t.Errorf("record %+v", rec)
		}
		after, err := l.control().Tasks(l.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("tasks (-before +after):\n%s", diff)
		}
		l.send("control.drain.count", "")
		if err := p.wait(); err != nil {
			t.Fatal(err)
		}
		cut := l.record().Report.Cut["IN"]

		l.more(100)
		l.drain(next, Config{Name: "b", Resume: true})
		l.judge("OUT")
		got := map[string]int{}
		for _, key := range l.keys[cut:] {
			got[key]++
		}
		l.judgeResults(l.read("OUT2"), got)
	})
}

// A waiting worker of a drained flow keeps one of another definition away as one that
// runs does: a resume may come at any time.
func TestDefinition_besideOneThatWaits(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		old, next := twoCounts(t, 16, "count", ""), twoCounts(t, 16, "other", "")
		l.more(20)
		l.drain(old, Config{})
		p := l.start(old, Config{Name: "a"}, nil)
		l.awaitPhase(p, "drained")
		l.refused(next, Config{Name: "b", AcceptChanges: true, Resume: true}, "member a of flow count", "stop it if the flow is drained already")
		l.more(20)
		l.send("control.resume.count", "")
		l.awaitResults(p, 40)
		l.judge("OUT")
	})
}

// The state of a step that is gone is given up only when that is asked for and the
// flow is drained. What takes the step's place begins anew, the other step does not
// notice, and no later start asks again.
func TestDefinition_acceptChanges(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		old, next := twoCounts(t, 4, "count", "total"), twoCounts(t, 4, "fresh", "total")
		l.more(300)
		p := l.start(old, Config{}, nil)
		l.awaitResults(p, 300)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.refused(next, Config{AcceptChanges: true}, "flow count is running", `step "count"`, "drain it")
		l.drain(old, Config{})
		cut := l.record().Report.Cut["IN"]
		l.more(100)
		l.refused(next, Config{Resume: true}, `step "count"`, "it was "+old.Hash()[:12], "now "+next.Hash()[:12], "--accept-changes")
		if rec := l.record(); rec.Hash != old.Hash() || !drained(rec) {
			t.Fatalf("record %+v", rec)
		}

		p = l.start(next, Config{Resume: true, AcceptChanges: true}, nil)
		l.awaitResults(p, 400)
		// The logs still have entries of the step, and these workers load them: one that
		// takes over tasks, and one that starts after all have gone.
		q := l.start(next, Config{Name: "w2"}, nil)
		l.await("tasks of w2", func() bool { return q.at().Tasks == 2 })
		l.more(100)
		l.awaitResults(q, 500)
		for _, p := range []*process{p, q} {
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
		}
		l.more(100)
		l.drain(next, Config{})
		l.judgeAnew("OUT", cut)
		l.judge("OUT2")
		if diff := cmp.Diff([]string{"count"}, l.record().LeftOver); diff != "" {
			t.Error(diff)
		}

		// Under the former id, a step would find its state in some tasks.
		for _, accept := range []bool{false, true} {
			l.refused(twoCounts(t, 4, "count", "total"), Config{Resume: true, AcceptChanges: accept}, `id "count" of a new step`, "another id")
			l.refused(twoCounts(t, 8, "fresh", "total"), Config{Resume: true, AcceptChanges: accept}, "created with 4 partitions and is now defined with 8")
		}
		l.more(50)
		l.drain(next, Config{Resume: true})
		l.judgeAnew("OUT", cut)
		l.judge("OUT2")
	})
}

// The state that was given up stays in the logs until each task's next base, and is
// gone then.
func TestDefinition_givenUpUntilTheNextBase(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		old, next := twoCounts(t, 1, "count", "total"), twoCounts(t, 1, "fresh", "total")
		// manyCommits are enough for a base.
		manyCommits := func(p *process) {
			for range 550 {
				l.more(1)
				l.pass(10 * time.Millisecond)
			}
			l.awaitResults(p, len(l.keys))
			l.send("control.drain.count", "")
			if err := p.wait(); err != nil {
				t.Fatal(err)
			}
		}
		manyCommits(l.start(old, Config{}, nil))
		cut := l.record().Report.Cut["IN"]
		before := l.loadTask(next)
		if !errors.Is(before.err, flow.ErrState) || before.base == 0 {
			t.Fatalf("after the former definition: %+v", before)
		}
		l.more(1)
		l.drain(next, Config{Resume: true, AcceptChanges: true})
		if is := l.loadTask(next); !errors.Is(is.err, flow.ErrState) || is.base != before.base {
			t.Errorf("before the next base: %+v, and before that %+v", is, before)
		}
		manyCommits(l.start(next, Config{Resume: true}, nil))
		if is := l.loadTask(next); is.err != nil || is.base == before.base {
			t.Errorf("after the next base: %+v, and before that %+v", is, before)
		}
		l.more(1)
		l.drain(next, Config{Resume: true})
		l.judgeAnew("OUT", cut)
		l.judge("OUT2")
	})
}

// stateOf0 is the last base of task 0, and what comes of loading all of the task's
// state.
type stateOf0 struct {
	base uint64
	err  error
}

// loadTask loads task 0 of a flow that nobody runs, without leaving anything out.
func (l *lab) loadTask(f *flow.Flow) stateOf0 {
	l.tb.Helper()
	bucket, err := l.conn.OpenBucket(l.ctx, "natsflow_"+f.Name())
	if err != nil {
		l.tb.Fatal(err)
	}
	store := kvsnap.New(kvsnap.Config{Bucket: bucket, Flow: f.Name(), Owner: "judge"})
	tasks, err := store.Tasks(l.ctx)
	if err != nil || len(tasks) == 0 {
		l.tb.Fatalf("%d tasks: %v", len(tasks), err)
	}
	_, _, err = store.Claim(l.ctx, kvsnap.TaskID{}, f.Task(0).Load)
	return stateOf0{tasks[0].Base, err}
}

// A worker that was about to start when the state of one of its steps was given up
// does not begin.
func TestDefinition_givenUpWhileStarting(t *testing.T) {
	f := twoCounts(t, 4, "count", "total")
	w := &worker{flow: f}
	err := w.session(t.Context(), t.Context(), nil, control.Record{Flow: "count", Hash: "other", LeftOver: []string{"total"}}, nil)
	if !errors.Is(err, control.ErrDefinition) || !strings.Contains(err.Error(), `step "total"`) {
		t.Errorf("got %v", err)
	}
}

// A source that was left out of the flow for a while goes on from where it was.
func TestDefinition_sourceComesBack(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN2", Subjects: []string{"two.>"}}); err != nil {
			t.Fatal(err)
		}
		both := countFlow{sources: []string{"IN", "IN2"}}.build(t)
		one := countFlow{}.build(t)
		l.more(50)
		l.feedTo("two.", l.rng, 50, 8)
		l.drain(both, Config{})
		l.feedTo("two.", l.rng, 50, 8)
		l.more(50)
		l.drain(one, Config{Resume: true})
		if n := l.count("OUT"); n != 150 {
			t.Errorf("%d results without the second source, want 150", n)
		}
		l.pass(time.Second)
		l.drain(both, Config{Resume: true})
		l.judge("OUT")
		l.drain(one, Config{Resume: true})
		if err := l.conn.DeleteStream(l.ctx, "IN2"); err != nil {
			t.Fatal(err)
		}
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN2", Subjects: []string{"two.>"}}); err != nil {
			t.Fatal(err)
		}
		if err := l.start(both, Config{Resume: true}, nil).wait(); !errors.Is(err, control.ErrSourceRecreated) {
			t.Errorf("got %v", err)
		}
	})
}

// countTo counts the records of each key, to streams in that order.
func countTo(tb testing.TB, streams ...string) *flow.Flow {
	tb.Helper()
	b := flow.New("count", flow.Options{Partitions: 4})
	src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
	keyed := flow.KeyBy(src, func(_ *flow.Meta, v string) (string, error) {
		key, _, _ := strings.Cut(v, " ")
		return key, nil
	})
	counts := flow.Stateful(keyed, "count", flow.JSONState[int](1, nil),
		func(m *flow.Meta, n *int, _ string, emit func(counted)) error {
			*n++
			emit(counted{Key: m.Key, N: *n, Seq: m.Seq})
			return nil
		})
	for _, stream := range streams {
		flow.To(counts, flow.Sink[counted]{
			Stream: stream, Subjects: []string{strings.ToLower(stream) + ".*"},
			Subject: flow.KeySubject[counted](strings.ToLower(stream) + "."), Encode: flow.EncodeJSON[counted](),
		})
	}
	f, err := b.Build()
	if err != nil {
		tb.Fatal(err)
	}
	return f
}

// Results that were committed and not published when the workers died go where they
// were meant to, though the next definition has its sinks in another order. One that
// lacks such a sink is refused, and nothing is lost.
func TestDefinition_unpublished(t *testing.T) {
	for _, point := range []string{"committed", "half-published"} {
		t.Run(point, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				old := countTo(t, "OUT", "OUT2")
				l.more(100)
				c := &crasher{point: point, left: 1}
				if point == "committed" {
					c.left += 4 // the claims
				}
				if err := l.start(old, Config{}, c.probe).wait(); !errors.Is(err, errCrash) {
					t.Fatalf("got %v, want a crash", err)
				}
				l.refused(countTo(t, "OUT2"), Config{}, "results for stream OUT ", "start the former definition")
				l.refused(countTo(t, "OUT"), Config{}, "results for stream OUT2 ", "start the former definition")
				next := countTo(t, "OUT2", "OUT3", "OUT")
				l.more(100)
				l.drain(next, Config{})
				l.judge("OUT")
				l.judge("OUT2")
			})
		})
	}
}
