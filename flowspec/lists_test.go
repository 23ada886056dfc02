package flowspec

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// graphFlow has branches and merges before and behind the key.
const graphFlow = `
flow: graph
partitions: 4
sources:
  air: {stream: FLIGHTS}
  rail: {stream: TRAINS}
steps:
  numbered:
    from: [counts, even]
    steps:
      - aggregate: {results: count(), even: count(half), last: last(trips)}
      - to: {stream: NUMBERED, subject: "numbered.{key}"}
  even:
    from: counts
    steps:
      - filter: trips % 2 == 0
      - map: {trips: trips, half: trips / 2}
  counts:
    from: [by-air, by-rail]
    steps:
      - aggregate: {trips: count(), air: count_if(stream == "FLIGHTS"), delays: sum(delay), waits: sum(wait), last: last(seq)}
      - to: {stream: TRIPS, subject: "trips.{key}"}
  by-air:
    from: air
    steps:
      - filter: delay != nil
      - key: place
      - dedupe: {by: id, for: 20s}
      - map: {delay: delay, stream: _stream, seq: _seq}
  by-rail:
    from: rail
    steps:
      - key: place
      - map: {wait: wait, stream: _stream, seq: _seq}
  ids:
    from: [air, rail]
    steps:
      - map: {id: id, stream: _stream}
      - key: id
      - aggregate: {n: count(), last: last(stream)}
      - to: {stream: IDS, subject: "ids.{key}"}
`

// graphInput is a record of one of the sources.
type graphInput struct {
	source int
	seq    int
	nanos  int64
	place  string
	id     int
	delay  *int64
	wait   int64
}

func (in *graphInput) payload() []byte {
	members := map[string]any{"place": in.place, "id": fmt.Sprint(in.id)}
	if in.source == 1 {
		members["wait"] = in.wait
	} else if in.delay != nil {
		members["delay"] = *in.delay
	}
	data, err := json.Marshal(members)
	if err != nil {
		panic(err)
	}
	return data
}

func randomGraphInputs(rng *rand.Rand, source, n int) []graphInput {
	now := start
	inputs := make([]graphInput, n)
	for i := range inputs {
		now = now.Add(time.Duration(rng.IntN(4)) * time.Second)
		in := graphInput{
			source: source, seq: i + 1, nanos: now.UnixNano(), place: fmt.Sprintf("p%d", rng.IntN(5)), id: rng.IntN(6), wait: rng.Int64N(100),
		}
		if d := rng.Int64N(100); d > 10 {
			in.delay = &d
		}
		inputs[i] = in
	}
	return inputs
}

// graphModel is what graphFlow does, in plain Go: the results by their subjects.
func graphModel(inputs []graphInput) map[string][]string {
	type counted struct{ trips, air, delays, waits, waited, results, even int }
	out := map[string][]string{}
	places, ids := map[string]*counted{}, map[int]int{}
	passed := map[string]int64{}
	result := func(name, key, format string, args ...any) {
		subject := name + "." + key
		out[subject] = append(out[subject], `{"key":"`+key+`",`+fmt.Sprintf(format, args...)+"}")
	}
	sum := func(sum, n int) string {
		if n == 0 {
			return "null"
		}
		return fmt.Sprint(sum)
	}
	for _, in := range inputs {
		stream := []string{"FLIGHTS", "TRAINS"}[in.source]
		ids[in.id]++
		result("ids", fmt.Sprint(in.id), `"n":%d,"last":%q`, ids[in.id], stream)
		c := places[in.place]
		if c == nil {
			c = &counted{}
			places[in.place] = c
		}
		if in.source == 0 {
			if in.delay == nil {
				continue
			}
			identity := fmt.Sprint(in.place, " ", in.id)
			if last, ok := passed[identity]; ok && in.nanos-last < int64(20*time.Second) {
				continue
			}
			passed[identity] = in.nanos
			c.air++
			c.delays += int(*in.delay)
		} else {
			c.waited++
			c.waits += int(in.wait)
		}
		c.trips++
		result("trips", in.place, `"trips":%d,"air":%d,"delays":%s,"waits":%s,"last":%d`,
			c.trips, c.air, sum(c.delays, c.air), sum(c.waits, c.waited), in.seq)
		// Which of the two ways comes first is the flow's own business, but always
		// the same: see the test.
		if c.trips%2 == 0 {
			c.results++
			c.even++
			result("numbered", in.place, `"results":%d,"even":%d,"last":%d`, c.results, c.even, c.trips)
		}
		c.results++
		result("numbered", in.place, `"results":%d,"even":%d,"last":%d`, c.results, c.even, c.trips)
	}
	return out
}

// bySubject sorts outputs out by their subjects, which keep their order.
func bySubject(t *testing.T, out []string) map[string][]string {
	t.Helper()
	by := map[string][]string{}
	for _, line := range out {
		words := strings.SplitN(line, " ", 3)
		if words[0] == "DEAD" || len(words) < 3 {
			t.Fatal(line)
		}
		by[words[1]] = append(by[words[1]], words[2])
	}
	return by
}

// TestLists_Model plays two sources in random turns, with commits and crashes. A
// crash loses what came after the last commit, of both sources; what is read
// again comes in other turns. The results are those of the model for the turns
// that were committed.
func TestLists_Model(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 2))
			sources := [][]graphInput{randomGraphInputs(rng, 0, 80), randomGraphInputs(rng, 1, 60)}
			p := newPlayer(t, graphFlow)
			log := &stored{images: make([][][]byte, len(p.tasks))}
			var played []graphInput
			committed, crashes, others := 0, 0, 0
			commit := func() {
				log.commit(p)
				committed = len(played)
				if rng.IntN(4) == 0 {
					log.base(t, p)
				}
			}
			read := []int{0, 0}
			for read[0] < len(sources[0]) || read[1] < len(sources[1]) {
				s := rng.IntN(2)
				if read[s] == len(sources[s]) {
					s = 1 - s
				}
				in := sources[s][read[s]]
				read[s]++
				p.playFrom(s, input{"in", in.nanos, in.payload()})
				played = append(played, in)
				switch {
				case rng.IntN(5) == 0:
					commit()
				case rng.IntN(12) == 0 && crashes < 40:
					crashes++
					others += len(played) - committed
					log.restore(t, p)
					played = played[:committed]
					read[0], read[1] = 0, 0
					for _, in := range played {
						read[in.source]++
					}
					p.seqs[0], p.seqs[1] = uint64(read[0]), uint64(read[1])
				}
			}
			commit()
			if diff := cmp.Diff(graphModel(played), bySubject(t, p.out)); diff != "" {
				t.Errorf("(-model +flow):\n%s", diff)
			}
			if crashes == 0 || others == 0 || len(p.out) < 300 {
				t.Errorf("%d crashes lost %d records, %d results", crashes, others, len(p.out))
			}
		})
	}
}

// TestLists_Hash checks that a flow with another graph is another flow.
func TestLists_Hash(t *testing.T) {
	hash := func(src string) string {
		t.Helper()
		return newPlayer(t, src).flow.Hash()
	}
	const base = `
flow: f
sources: {a: {stream: A}, b: {stream: B}}
steps:
  one: {from: a, steps: [{filter: x}]}
  two: {from: [one, b], steps: [{map: {y: y}}]}
  end: {from: two, steps: [{to: {stream: OUT, subject: out}}]}
  side: {from: one, steps: [{to: {stream: SIDE, subject: side}}]}
`
	same := strings.Replace(base, "{from: [one, b], steps: [{map: {y: y}}]}", "\n    steps:\n    # y\n    - map:\n        y: 'y'\n    from: [one, b]", 1)
	if hash(same) != hash(base) {
		t.Errorf("another hash:\n%s", same)
	}
	seen := map[string]string{hash(base): base}
	for _, change := range [][2]string{
		{"side: {from: one", "side: {from: two"},
		{"side: {from: one", "side: {from: [one, two]"},
		{"side: {from: one", "side: {from: [two, one]"},
		{"[one, b]", "[b, one]"},
		{"side: ", "aside: "},
		{"{stream: B}", "{stream: B2}"},
		{"{stream: B}", "{stream: B, subjects: [b.>]}"},
		{"filter: x", "filter: y"},
	} {
		src := strings.Replace(base, change[0], change[1], 1)
		if other, ok := seen[hash(src)]; ok {
			t.Errorf("one hash for\n%s\nand\n%s", src, other)
		}
		seen[hash(src)] = src
	}
}

// TestLists_OneSource checks that a flow with one named source and a plain list is
// the one with a source without a name: its state is found.
func TestLists_OneSource(t *testing.T) {
	const steps = "steps:\n  - key: k\n  - aggregate: {n: count()}\n  - to: {stream: OUT, subject: out}\n"
	a := newPlayer(t, "flow: f\nsource: {stream: IN}\n"+steps)
	b := newPlayer(t, "flow: f\nsources: {orders: {stream: IN}}\n"+steps)
	if a.flow.Hash() != b.flow.Hash() {
		t.Errorf("hashes %s and %s", a.flow.Hash(), b.flow.Hash())
	}
	if diff := cmp.Diff(a.flow.Steps(), b.flow.Steps()); diff != "" {
		t.Error(diff)
	}
}

// TestLists_Names checks that the id of a step, under which its state is stored,
// does not depend on other lists or on where its list stands.
func TestLists_Names(t *testing.T) {
	ids := func(src string) (ids []string) {
		t.Helper()
		for _, s := range newPlayer(t, src).flow.Steps() {
			if s.Stateful {
				ids = append(ids, s.ID)
			}
		}
		return ids
	}
	const head = "flow: f\nsources: {a: {stream: A}, b: {stream: B}}\nsteps:\n"
	const one = "  one:\n    from: a\n    steps:\n      - key: k\n      - aggregate: {n: count()}\n      - dedupe: {by: n, for: 1h}\n      - aggregate: {m: count()}\n        id: mine\n      - aggregate: {m: count()}\n      - to: {stream: OUT, subject: out}\n"
	const two = "  two:\n    from: b\n    steps:\n      - to: {stream: OUT, subject: out}\n      - key: k\n      - aggregate: {n: count()}\n      - to: {stream: OUT, subject: out}\n"
	want := []string{"one.aggregate-1", "one.dedupe-1", "mine", "one.aggregate-3", "two.aggregate-1"}
	if diff := cmp.Diff(want, ids(head+one+two)); diff != "" {
		t.Error(diff)
	}
	want = append(want[4:], want[:4]...)
	if diff := cmp.Diff(want, ids(head+two+one)); diff != "" {
		t.Error(diff)
	}
}

// TestStepID_madeByTheFlow checks that an id of the file may be one that package
// flow gives to a step without one.
func TestStepID_madeByTheFlow(t *testing.T) {
	for n := range 8 {
		id := fmt.Sprintf("key-%d", n)
		for _, src := range []string{
			"flow: f\nsource: {stream: IN}\nsteps:\n  - to: {stream: OUT, subject: out}\n    stop_when: x\n  - filter: x\n  - to: {stream: OUT, subject: out}\n    id: " + id + "\n",
			"flow: f\nsources: {a: {stream: A}, b: {stream: B}}\nsteps:\n  one:\n    from: [a, b]\n    steps:\n      - to: {stream: OUT, subject: out}\n      - filter: x\n        id: " + id + "\n      - to: {stream: OUT, subject: out}\n",
		} {
			if got := newPlayer(t, src).flow.Steps(); len(got) == 0 {
				t.Error("no steps")
			}
		}
	}
}
