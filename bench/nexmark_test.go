package bench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"natsflow/examples/nexmark/gen"
	"natsflow/worker"
)

// nexmarkStream is the source of the queries.
const nexmarkStream = "NEXMARK"

// nexmarkSeconds is how long the events go on, by their own time.
const nexmarkSeconds = 100

// BenchmarkNexmark measures queries of examples/nexmark over -messages events. A million
// of them is 10,000 a second by their own time, the usual configuration of their
// generator. The time is that from the start of a worker to its end, drained at the head
// of the stream: when all that comes of the events is committed and published. The
// medians of -rounds are reported.
func BenchmarkNexmark(b *testing.B) {
	for _, query := range []string{"q5", "q7"} {
		b.Run(query, func(b *testing.B) {
			for range b.N {
				r := newRig(b)
				r.stream(nexmarkStream, "nexmark.>")
				r.feedNexmark(*messages)
				var rates, cpus []float64
				var results uint64
				for range *rounds {
					client, server := r.cpu()
					began := time.Now()
					n := r.runNexmark(query)
					took := time.Since(began)
					client2, server2 := r.cpu()
					rates = append(rates, float64(*messages)/took.Seconds())
					cpus = append(cpus, float64((client2-client+server2-server).Nanoseconds())/1e3/float64(*messages))
					if results != 0 && n != results {
						b.Fatalf("%d results, and %d in another round", n, results)
					}
					if results = n; n == 0 {
						b.Fatal("no results")
					}
				}
				b.ReportMetric(median(rates), "events/s")
				b.Logf("%s: %8.0f events/s, CPU %.1f us an event, client and server; %d results", query, median(rates), median(cpus), results)
			}
		})
	}
}

// feedNexmark publishes n events.
func (r *rig) feedNexmark(n int) {
	r.tb.Helper()
	g, err := gen.New(gen.Config{Seed: 1, Rate: max(n/nexmarkSeconds, 1)})
	if err != nil {
		r.tb.Fatal(err)
	}
	for i := range n {
		e := g.Event(i)
		if _, err := r.js.PublishAsync(e.Subject(), e.JSON(), jetstream.WithStallWait(time.Minute)); err != nil {
			r.tb.Fatal(err)
		}
	}
	<-r.js.PublishAsyncComplete()
}

// runNexmark runs a query until it is drained at the head of the stream, and returns the
// number of its results.
func (r *rig) runNexmark(query string) uint64 {
	r.tb.Helper()
	text, err := os.ReadFile(filepath.Join("..", "examples", "nexmark", query, "flow.yaml"))
	if err != nil {
		r.tb.Fatal(err)
	}
	// Each run is a flow of its own.
	name := r.next("nexmark")
	f := parsed(r.tb, strings.Replace(string(text), "flow: nexmark-"+query, "flow: "+name, 1))
	if f.Name() != name {
		r.tb.Fatalf("the flow of %s is named %s", query, f.Name())
	}
	asked := false
	w := r.run(f, func(c *worker.Config) {
		c.OnStatus = func(s worker.Status) {
			if asked || s.Phase != "running" {
				return
			}
			asked = true
			if _, err := r.js.Publish(r.ctx, "control.drain."+name, []byte(`{"at":"head"}`)); err != nil {
				r.tb.Error(err)
			}
		}
	})
	if err := <-w.done; err != nil {
		r.tb.Fatal(err)
	}
	w.cancel()
	out := strings.ToUpper(nexmarkStream + "_" + query)
	s, err := r.js.Stream(r.ctx, out)
	if err != nil {
		r.tb.Fatal(err)
	}
	n := s.CachedInfo().State.Msgs
	r.drop(out)
	r.forget(name)
	return n
}
