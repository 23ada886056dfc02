package flowspec

import (
	"fmt"
	"testing"

	"natsflow/flow"
)

const benchW1 = `
flow: w1
source: {stream: IN}
steps:
  - key: key
  - aggregate: {n: count()}
  - to: {stream: OUT, subject: "out.{key}"}
`

const benchFlights = `
flow: flights
source: {stream: IN}
steps:
  - filter: delay != nil
  - map: {origin: origin, delay: delay, late: delay > 15}
  - key: origin
  - aggregate: {flights: count(), late: count_if(delay > 15), avg_delay: avg(delay), worst: max(delay)}
  - to: {stream: OUT, subject: "out.{key}"}
`

// BenchmarkW1 is the work W1 without NATS: 200 bytes of JSON, 10,000 keys, a
// count, one result a record. The figure covers router and task.
func BenchmarkW1(b *testing.B) {
	payloads := make([][]byte, 10000)
	for i := range payloads {
		payloads[i] = fmt.Appendf(nil, `{"key":"key-%06d","seq":%d,"ts":1700000000000,"value":42.5,"status":"active","region":"eu-west-1","note":"%0*d"}`, i, 1000000+i, 80, i)
	}
	if n := len(payloads[0]); n < 190 || n > 210 {
		b.Fatalf("%d bytes", n)
	}
	benchmark(b, benchW1, payloads)
}

// BenchmarkFlights is the example: filter, map and four aggregates.
func BenchmarkFlights(b *testing.B) {
	payloads := make([][]byte, 220)
	for i := range payloads {
		payloads[i] = fmt.Appendf(nil, `{"date":"2001-01-01T01:24:00Z","delay":%d,"distance":407,"origin":"A%02d","destination":"OAK"}`, i%60-20, i)
	}
	benchmark(b, benchFlights, payloads)
}

func benchmark(b *testing.B, src string, payloads [][]byte) {
	s, err := Parse("flow.yaml", []byte(src))
	if err != nil {
		b.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		b.Fatal(err)
	}
	router := f.Router(0)
	tasks := make([]*flow.Task, f.Options().Partitions)
	for i := range tasks {
		tasks[i] = f.Task(i)
	}
	play := func(batch *flow.Batch) {
		if err := tasks[batch.Partition].Play(batch); err != nil {
			b.Fatal(err)
		}
		batch.Release()
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if err := router.Route("in", uint64(i+1), int64(i), payloads[i%len(payloads)]); err != nil {
			b.Fatal(err)
		}
		if i%512 == 511 {
			router.Take(play)
		}
		if i%8192 == 8191 {
			for _, t := range tasks {
				if _, err := t.Seal(); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
}
