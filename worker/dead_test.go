package worker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"natsflow/bus"
	"natsflow/control"

	"natsflow/flow"
	"natsflow/testenv"
)

// faulty is a flow that fails in each of its parts on records that say so.
func faulty(options flow.Options) countFlow {
	fail := func(word string) func(*flow.Meta, string) error {
		return func(_ *flow.Meta, v string) error {
			switch {
			case strings.HasSuffix(v, " panic-"+word):
				panic("out of " + word)
			case strings.HasSuffix(v, " bad-"+word):
				return errors.New("bad " + word)
			}
			return nil
		}
	}
	return countFlow{decode: fail("decode"), key: fail("key"), step: fail("step"), options: options}
}

// faults has one record for each way to fail, and the step and error that the dead
// letter names.
var faults = []struct{ text, step, err string }{
	{"k1 bad-decode", "from-IN", "bad decode"},
	{"k1 panic-decode", "from-IN", "step panicked: out of decode"},
	{"nokey", "key-IN", "no key"},
	{"k2 bad-key", "key-IN", "bad key"},
	{"k2 panic-key", "key-IN", "step panicked: out of key"},
	{"k3 bad-step", "count", "bad step"},
	{"k3 panic-step", "count", "step panicked: out of step"},
}

// judgeDead says that the dead-letter stream holds exactly the given records, with the
// bytes, and the headers that tell where they come from and why.
func (l *lab) judgeDead(want map[uint64]int) {
	l.tb.Helper()
	got := map[uint64]bool{}
	for _, m := range l.read(deadStream) {
		h := func(name string) string { return strings.Join(m.header[name], ",") }
		seq, err := strconv.ParseUint(h(flow.HeaderDeadSeq), 10, 64)
		if err != nil {
			l.tb.Fatalf("dead letter %d: sequence: %v", m.seq, err)
		}
		fault, ok := want[seq]
		if !ok || got[seq] {
			l.tb.Fatalf("dead letter of sequence %d: expected %v, there before %v", seq, ok, got[seq])
		}
		got[seq] = true
		w := faults[fault]
		if string(m.data) != w.text || h(flow.HeaderDeadStep) != w.step || !strings.Contains(h(flow.HeaderDeadError), w.err) ||
			h(flow.HeaderDeadFlow) != "count" || h(flow.HeaderDeadStream) != "IN" || h(flow.HeaderDeadSubject) != "in.x" ||
			m.subject != "natsflow.dlq.count" {
			l.tb.Errorf("dead letter of %q: %q on %s, headers %v", w.text, m.data, m.subject, m.header)
		}
	}
	if len(got) != len(want) {
		l.tb.Fatalf("%d dead letters, want %d", len(got), len(want))
	}
}

// A record that cannot be decoded, whose key or step fails or panics, goes to the
// dead-letter stream, also when it is the last one before the cut of a drain.
func TestDeadLetters(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := faulty(flow.Options{}).build(t)
		want := map[uint64]int{}
		for i, fault := range faults {
			l.more(20)
			want[l.put(fault.text)] = i
			l.drain(f, Config{Resume: true})
			if cut := l.record().Report.Cut["IN"]; cut != l.seq {
				t.Errorf("cut %d, want %d", cut, l.seq)
			}
			l.judgeDead(want)
			l.judge("OUT")
		}
		if r := l.record().Report; r.DeadLetters != uint64(len(faults)) || r.Results != uint64(len(faults)*20) {
			t.Errorf("report %+v", r)
		}
	})
}

// Dead letters through crashes at seeded points: each exactly once.
func TestDeadLetters_crashes(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				rng := rand.New(rand.NewPCG(seed, 11))
				f := faulty(flow.Options{Partitions: 4}).build(t)
				want := map[uint64]int{}
				for range 3 {
					for range 30 {
						l.feed(rng, rng.IntN(6), 8)
						i := rng.IntN(len(faults))
						want[l.put(faults[i].text)] = i
					}
					c := &crasher{point: points[rng.IntN(8)], left: 1 + rng.IntN(12)}
					p := l.start(f, Config{}, c.probe)
					for range 200 {
						l.pass(10 * time.Millisecond)
						if p.ended() {
							break
						}
					}
					_ = p.leave()
				}
				l.drain(f, Config{})
				l.judge("OUT")
				l.judgeDead(want)
			})
		})
	}
}

// A record as large as a message can be still becomes a dead letter, though that has
// headers: shortened, with its size.
func TestDeadLetters_largest(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := faulty(flow.Options{}).build(t)
		text := strings.Repeat("x", int(l.conn.MaxPayload())-2000) + strings.Repeat("y", 1990)
		l.put(text)
		l.more(20)
		l.drain(f, Config{})
		l.judge("OUT")
		dead := l.read(deadStream)
		if len(dead) != 1 {
			t.Fatalf("%d dead letters", len(dead))
		}
		if got := dead[0].header[headerTruncated]; len(got) != 1 || got[0] != strconv.Itoa(len(text)) || !strings.HasPrefix(text, string(dead[0].data)) {
			t.Errorf("header %v, %d bytes", got, len(dead[0].data))
		}
	})
}

// A result that no message can hold is found before the commit: its record is a
// dead letter, and the flow goes on, now and after a restart.
func TestDeadLetters_resultTooLarge(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		most := 0
		b := flow.New("count", flow.Options{Partitions: 1})
		src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
		flow.To(src, flow.Sink[string]{
			Stream: "OUT", Subjects: []string{"out.*"}, Subject: flow.KeySubject[string]("out."),
			Encode: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) {
				size := len(v)
				switch v {
				case "fits":
					size = most
				case "too large":
					size = most + 1
				}
				return append(dst, strings.Repeat("x", size)...), nil
			},
		})
		f, err := b.Build()
		if err != nil {
			t.Fatal(err)
		}
		l.put("before")
		l.drain(f, Config{})
		l.send("control.resume.count", "")
		most = l.room("OUT")
		l.put("too large")
		l.put("fits")
		l.drain(f, Config{})
		l.send("control.resume.count", "")
		l.put("after")
		l.drain(f, Config{})
		var sizes []int
		for _, m := range l.read("OUT") {
			sizes = append(sizes, len(m.data))
		}
		if diff := cmp.Diff([]int{len("before"), most, len("after")}, sizes); diff != "" {
			t.Errorf("sizes of the results (-want +got):\n%s", diff)
		}
		dead := l.read(deadStream)
		if len(dead) != 1 || string(dead[0].data) != "too large" || !strings.Contains(dead[0].header[flow.HeaderDeadError][0], flow.ErrResultTooLarge.Error()) {
			t.Errorf("dead letters %v", dead)
		}
	})
}

// With on_error stop the flow stops before the first record that fails: everything
// before is committed and published, nothing of it and behind it is. The error names
// step, stream and sequence. A flow that is mended goes on exactly.
func TestStopOnError(t *testing.T) {
	for i, fault := range faults {
		t.Run(fault.text, func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				options := flow.Options{OnError: flow.Stop, Partitions: 1}
				broken := faulty(options).build(t)
				l.more(50 + i)
				seq := l.put(fault.text)
				l.more(100)
				for range 2 {
					err := l.start(broken, Config{}, nil).wait()
					var step *flow.StepError
					if !errors.As(err, &step) || step.Step != fault.step || step.Stream != "IN" || step.Seq != seq || !strings.Contains(err.Error(), fault.err) {
						t.Fatalf("got %v, want step %s at sequence %d", err, fault.step, seq)
					}
					l.judgeThrough("OUT", seq-1)
				}
				mended := countFlow{options: options}.build(t)
				if fault.text == "nokey" {
					// A mended flow gives it a key.
					mended = countFlow{options: flow.Options{Partitions: 1}}.build(t)
				} else {
					key, _, _ := strings.Cut(fault.text, " ")
					l.keys[seq-1] = key
					l.fed[key]++
				}
				l.drain(mended, Config{})
				l.judge("OUT")
			})
		})
	}
}

// Several failing records in tasks that run one beside the other, two sources, and a
// drain under way: the flow stops before the first of them, without waiting for the
// other source, and the drain is finished when it is mended.
func TestStopOnError_manyTasks(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		if _, err := l.conn.CreateStream(l.ctx, bus.StreamConfig{Name: "IN2", Subjects: []string{"two.>"}}); err != nil {
			t.Fatal(err)
		}
		options := flow.Options{OnError: flow.Stop}
		broken := faulty(options)
		broken.sources = []string{"IN", "IN2"}
		mended := countFlow{sources: broken.sources, options: options}.build(t)
		var first uint64
		for i := range 8 {
			l.more(30)
			if seq := l.put(fmt.Sprintf("k%d bad-step", 7-i)); first == 0 {
				first = seq
			}
			l.fed[fmt.Sprintf("k%d", 7-i)]++
		}
		l.feedTo("two.", l.rng, 200, 8)
		p := l.start(broken.build(t), Config{}, nil)
		err := p.wait()
		var step *flow.StepError
		if !errors.As(err, &step) || step.Seq != first {
			t.Fatalf("got %v, want the failure at sequence %d", err, first)
		}
		l.send("control.drain.count", `{"at":"head"}`)
		if err := l.start(broken.build(t), Config{}, nil).wait(); !errors.As(err, &step) {
			t.Fatalf("got %v", err)
		}
		if rec := l.record(); rec.State != control.StateDraining {
			t.Errorf("state %s", rec.State)
		}
		if err := l.start(mended, Config{}, nil).wait(); err != nil {
			t.Fatal(err)
		}
		if !drained(l.record()) {
			t.Error("not drained")
		}
		l.judge("OUT")
	})
}

// At least once: results are out before they are committed. A crash repeats some, and
// loses none.
func TestAtLeastOnce(t *testing.T) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			bubble(t, func(t *testing.T, l *lab) {
				rng := rand.New(rand.NewPCG(seed, 5))
				sinkKinds[seed%uint64(len(sinkKinds))].make(l)
				f := countFlow{options: flow.Options{Delivery: flow.AtLeastOnce, Partitions: 4}}.build(t)
				for range 3 {
					l.feed(rng, 100, 8)
					c := &crasher{point: points[1+rng.IntN(7)], left: 1 + rng.IntN(20)}
					p := l.start(f, Config{}, c.probe)
					for range 100 {
						l.pass(10 * time.Millisecond)
						if p.ended() {
							break
						}
					}
					_ = p.leave()
				}
				l.drain(f, Config{})
				l.judgeAtLeast("OUT")
			})
		})
	}
}

// Without crashes, at-least-once repeats nothing either, and results do not wait for
// the commit.
func TestAtLeastOnce_beforeTheCommit(t *testing.T) {
	bubble(t, func(t *testing.T, l *lab) {
		f := countFlow{options: flow.Options{Delivery: flow.AtLeastOnce}}.build(t)
		g := newGate("entry-appended-unacked")
		g.skip.Store(16)
		p := l.start(f, Config{}, g.probe)
		l.awaitPhase(p, "running")
		l.more(1)
		<-g.reached
		if n := l.count("OUT"); n != 1 {
			t.Errorf("%d results before the commit", n)
		}
		close(g.open)
		l.more(500)
		l.awaitResults(p, 501)
		if err := p.leave(); err != nil {
			t.Fatal(err)
		}
		l.judge("OUT")
	})
}

// A flow without state and without a key of its own: each record once, and the records
// of a subject in order.
func TestStateless(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			testenv.Bubble(t, func(t *testing.T, srv *testenv.Server) {
				l := newLab(t, srv)
				rng := rand.New(rand.NewPCG(seed, 9))
				b := flow.New("count", flow.Options{Partitions: 4})
				src := flow.From(b, flow.Source{Stream: "IN"}, flow.DecodeText())
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
				var calls atomic.Int64
				for range 3 {
					l.feed(rng, 150, 8)
					c := &crasher{point: points[2+rng.IntN(6)], left: 1 + rng.IntN(10)}
					p := l.start(f, Config{}, func(p *process, ctx context.Context, at, task string) error {
						calls.Add(1)
						return c.probe(p, ctx, at, task)
					})
					for range 100 {
						l.pass(10 * time.Millisecond)
						if p.ended() {
							break
						}
					}
					_ = p.leave()
				}
				l.drain(f, Config{})
				last := map[string]int{}
				results := l.read("OUT")
				for _, m := range results {
					_, v, _ := strings.Cut(string(m.data), " v")
					n, err := strconv.Atoi(v)
					if err != nil || n <= last[m.subject] {
						t.Fatalf("%s: %q after %d", m.subject, m.data, last[m.subject])
					}
					last[m.subject] = n
				}
				if len(results) != len(l.keys) {
					t.Fatalf("%d results of %d records", len(results), len(l.keys))
				}
			})
		})
	}
}
