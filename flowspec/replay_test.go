package flowspec

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow"
)

const replayFlow = `
flow: replay
partitions: 4
source: {stream: IN}
steps:
  - filter: v == nil or v != "drop"
  - expand: legs
  - map: {k: k, id: id, v: v, big: upper(string(v ?? "none"))}
  - key: k
  - dedupe: {by: id, for: 40s}
  - to: {stream: ACCEPTED, subject: "accepted.{key}"}
  - aggregate:
      n: count()
      have: count(v)
      high: count_if(v > 10)
      sum: sum(v)
      avg: avg(v)
      first: first(v)
      last: last(big)
    id: numbers
  - filter: n % 3 != 0
  - to: {kv: LATEST, key: "{key}"}
  - aggregate: {results: count(), low: min(sum), text: max(last)}
    id: results
  - to: {stream: OUT, subject: "out.{key}.{results}"}
    stop_when: results == 7
`

// randomInputs makes records with repeats, nulls, failures and several types.
func randomInputs(rng *rand.Rand, n int) []input {
	values := []string{
		"1", "-7", "0.1", "0.2", "1e300", "9223372036854775807", "18446744073709551615", "null", `"drop"`, `"text"`,
		"true", `[1,{"a":2}]`, "11", "12.5", "1e999",
	}
	now := start
	var inputs []input
	for range n {
		now = now.Add(time.Duration(rng.IntN(10)) * time.Second)
		legs := make([]string, rng.IntN(3))
		for i := range legs {
			legs[i] = fmt.Sprintf(`{"k":"key-%d","id":%d,"v":%s}`, rng.IntN(7), rng.IntN(12), values[rng.IntN(len(values))])
		}
		data := fmt.Sprintf(`{"legs": [%s]}`, strings.Join(legs, " , "))
		switch rng.IntN(20) {
		case 0:
			data = data[:len(data)-1]
		case 1:
			data = `{"legs":5}`
		case 2:
			data = `{"legs":[{"id":1}]}`
		}
		inputs = append(inputs, input{fmt.Sprintf("in.%d", rng.IntN(3)), now.UnixNano(), []byte(data)})
	}
	return inputs
}

// stored is what a task's log would hold.
type stored struct{ images [][][]byte }

func (s *stored) commit(p *player) {
	for i, delta := range p.seal() {
		if delta != nil {
			s.images[i] = append(s.images[i], delta)
		}
	}
}

// base replaces the deltas by an image of the whole state.
func (s *stored) base(t *testing.T, p *player) {
	t.Helper()
	for i, task := range p.tasks {
		task.BeginImage()
		s.images[i] = nil
		for more := true; more; {
			part, next, err := task.NextImage(2)
			if err != nil {
				t.Fatal(err)
			}
			s.images[i] = append(s.images[i], part)
			more = next
		}
	}
}

func (s *stored) restore(t *testing.T, p *player) {
	t.Helper()
	for i := range p.tasks {
		p.tasks[i] = p.flow.Task(i)
		for _, image := range s.images[i] {
			if err := p.tasks[i].Load(image); err != nil {
				t.Fatal(err)
			}
		}
		p.tasks[i].Loaded()
	}
}

// TestReplay_Equivalence stops at random points, loads what was sealed into new
// tasks and goes on after the last commit: the outputs are those of a run
// without a stop.
func TestReplay_Equivalence(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			inputs := randomInputs(rng, 150)
			// Commits are at fixed places: a stop_when makes one request a commit.
			commits := map[int]bool{len(inputs) - 1: true}
			for i := range inputs {
				commits[i] = commits[i] || rng.IntN(5) == 0
			}
			calm := newPlayer(t, replayFlow)
			for i, in := range inputs {
				calm.play(in)
				if commits[i] {
					calm.seal()
				}
			}
			crashed := newPlayer(t, replayFlow)
			log := &stored{images: make([][][]byte, len(crashed.tasks))}
			committed, crashes := 0, 40
			for i := 0; i < len(inputs); i++ {
				crashed.play(inputs[i])
				if commits[i] {
					log.commit(crashed)
					committed = i + 1
					if rng.IntN(4) == 0 {
						log.base(t, crashed)
					}
				}
				if rng.IntN(6) == 0 && crashes > 0 {
					crashes--
					log.restore(t, crashed)
					crashed.seqs[0] = uint64(committed)
					i = committed - 1
				}
			}
			if diff := cmp.Diff(calm.out, crashed.out); diff != "" {
				t.Errorf("(-calm +crashed):\n%s", diff)
			}
			if len(calm.out) < 50 {
				t.Errorf("only %d outputs", len(calm.out))
			}
		})
	}
}

// TestFlow_Concurrent runs several copies of one flow at a time, as the lanes of
// a worker do: expressions are shared between them.
func TestFlow_Concurrent(t *testing.T) {
	s, err := Parse("flow.yaml", []byte(replayFlow))
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	inputs := randomInputs(rand.New(rand.NewPCG(7, 7)), 300)
	results := make([][]string, 4)
	var wg sync.WaitGroup
	for n := range results {
		wg.Go(func() {
			p := &player{tb: t, flow: f, routers: []*flow.Router{f.Router(0)}, seqs: []uint64{0}}
			for i := range f.Options().Partitions {
				p.tasks = append(p.tasks, f.Task(i))
			}
			for _, in := range inputs {
				p.play(in)
				p.seal()
			}
			results[n] = p.out
		})
	}
	wg.Wait()
	for _, got := range results[1:] {
		if diff := cmp.Diff(results[0], got); diff != "" {
			t.Fatal(diff)
		}
	}
}

// TestState_OtherStep checks that a state is not read as that of other
// functions, and that arguments and names may change.
func TestState_OtherStep(t *testing.T) {
	const head = "flow: f\npartitions: 1\nsource: {stream: IN}\nsteps:\n  - key: k\n  - aggregate: {"
	const tail = "}\n    id: agg\n  - to: {stream: OUT, subject: out}\n"
	p := newPlayer(t, head+"n: count(), a: sum(v), b: last(v)"+tail)
	p.play(input{"in", 1, []byte(`{"k":"x","v":5}`)})
	delta := p.seal()[0]
	for _, c := range []struct{ members, want string }{
		{"n: count(), a: sum(v), b: last(v)", ""},
		{"other: sum(w), b: last(w)", ""},
		{"a: last(v), b: sum(v)", "state cannot be read: step \"agg\": key \"x\": not the state of an aggregate of this step: what is stored is sum where the step has last(v); give the changed step another id"},
		{"a: sum(v)", "state cannot be read: step \"agg\": key \"x\": not the state of an aggregate of this step: it has more functions than the step; give the changed step another id"},
		{"a: sum(v), b: last(v), c: min(v)", "state cannot be read: step \"agg\": key \"x\": not the state of an aggregate: it ends before min(v)"},
	} {
		next := newPlayer(t, head+c.members+tail)
		err := next.tasks[0].Load(delta)
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("{%s}: %s, want %s", c.members, got, c.want)
		}
	}
}

// TestKeyIsCopied checks that the state does not keep a payload for its key.
func TestKeyIsCopied(t *testing.T) {
	p := newPlayer(t, "flow: f\npartitions: 1\nsource: {stream: IN}\nsteps:\n  - key: k\n  - aggregate: {n: count(), last: last(v)}\n  - to: {stream: OUT, subject: \"out.{key}\"}\n")
	data := []byte(`{"k":"key","v":"value"}`)
	p.play(input{"in", 1, data})
	clear(data)
	p.play(input{"in", 1, []byte(`{"k":"key"}`)})
	p.seal()
	if got, want := p.out[1], `OUT out.key {"key":"key","n":2,"last":"value"}`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestSpec_Stop(t *testing.T) {
	p := newPlayer(t, "flow: f\npartitions: 1\non_error: stop\nsource: {stream: IN}\nsteps:\n  - to: {stream: OUT, subject: \"out.{a}\"}\n")
	for _, s := range p.flow.Sinks() {
		if s.Kind == flow.SinkDead {
			t.Error("a flow that stops has a dead-letter sink")
		}
	}
}
