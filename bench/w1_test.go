package bench

import (
	"regexp"
	"slices"
	"testing"
	"time"

	"natsflow/flow"
)

// variant is one way to do W1. It starts the work and returns how to end it.
type variant struct {
	name   string
	before bool // the sink stream is there before
	start  func(r *rig, out string) (stop func())
}

func flowVariant(name string, before bool, build func(testing.TB, string, string) *flow.Flow) variant {
	return variant{name: name, before: before, start: func(r *rig, out string) func() {
		id := r.next("w")
		w := r.run(build(r.tb, id, out), nil)
		return func() {
			r.stop(w)
			r.forget(id)
		}
	}}
}

const twoStagesName = "YAML, two stages"

func variants() []variant {
	return []variant{
		{"hand-written loop", true, func(r *rig, out string) func() { return r.handLoop(out) }},
		flowVariant("YAML, sink made by natsflow", false, yamlFlow),
		flowVariant("Go lazy, sink made by natsflow", false, goFlow),
		flowVariant(twoStagesName, false, twoStages),
		flowVariant("YAML, sink there before", true, yamlFlow),
		flowVariant("Go lazy, sink there before", true, goFlow),
	}
}

// BenchmarkW1 measures the throughput of W1. Each round does every variant once,
// so that the ratios are of one time; the medians are reported.
func BenchmarkW1(b *testing.B) {
	wanted, err := regexp.Compile(*only)
	if err != nil {
		b.Fatal(err)
	}
	for range b.N {
		r := newRig(b)
		r.feed(0, *messages, payload)
		// A benchmark shows ten lines at most, hence the medians only.
		rates, cpus := map[string][]float64{}, map[string][]float64{}
		for range *rounds {
			for _, v := range variants() {
				if !wanted.MatchString(v.name) {
					continue
				}
				out := r.next("OUT")
				if v.before {
					r.stream(out, out+".>")
				}
				client, server := r.cpu()
				began := time.Now()
				stop := v.start(r, out)
				r.awaitMessages(out, uint64(*messages))
				took := time.Since(began)
				client2, server2 := r.cpu()
				stop()
				r.drop(out)
				rate := float64(*messages) / took.Seconds()
				rates[v.name] = append(rates[v.name], rate)
				client, server = client2-client, server2-server
				cpus[v.name] = append(cpus[v.name], float64((client+server).Nanoseconds())/1e3/float64(*messages))
			}
		}
		hand := median(rates["hand-written loop"])
		for _, v := range variants() {
			m := median(rates[v.name])
			b.Logf("%-32s %8.0f msg/s  %.2f x, CPU %.1f us a message, client and server", v.name, m, m/hand, median(cpus[v.name]))
		}
	}
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	if len(s) == 0 {
		return 0
	}
	if len(s)%2 == 0 {
		return (s[len(s)/2-1] + s[len(s)/2]) / 2
	}
	return s[len(s)/2]
}
