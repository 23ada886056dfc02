package bus

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"natsflow/testenv"
)

// BenchmarkSink_Publish publishes groups of 300 results of 200 bytes from several tasks to a server in a process of its
// own. The count of the benchmark is messages.
func BenchmarkSink_Publish(b *testing.B) {
	for _, name := range []string{"fast and fenced", "fenced", "ids"} {
		for _, tasks := range []int{1, 4, 8} {
			b.Run(fmt.Sprintf("%s/%d", name, tasks), func(b *testing.B) {
				c := tcp(b)
				s := sink(b, c, sinkKinds[name])
				benchPublish(b, s, tasks)
			})
		}
	}
}

// tcp connects to a server in a process of its own.
func tcp(b *testing.B) *Conn {
	b.Helper()
	c, err := Connect(b.Context(), Config{URL: testenv.StartProcess(b).URL(), Trusted: func() bool { return true }})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.Close)
	return c
}

func benchPublish(b *testing.B, s *Sink, tasks int) {
	const size = 300
	outs := make([]Out, size)
	for i := range outs {
		outs[i] = Out{Subject: fmt.Sprintf("out.%d", i%100), Data: make([]byte, 200)}
	}
	groups := (b.N + size - 1) / size
	b.ReportAllocs()
	b.ResetTimer()
	var next atomic.Int64
	var wg sync.WaitGroup
	for task := range tasks {
		wg.Go(func() {
			g := Group{Flow: "flow", Task: fmt.Sprintf("0.%d", task), Outs: outs}
			for n := next.Add(1); n <= int64(groups); n = next.Add(1) {
				g.N = uint64(n)
				if _, err := s.Publish(b.Context(), g); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(groups*size)/b.Elapsed().Seconds(), "msg/s")
}

// BenchmarkSink_Latency publishes groups of one.
func BenchmarkSink_Latency(b *testing.B) {
	for _, name := range []string{"fast and fenced", "ids"} {
		b.Run(name, func(b *testing.B) {
			s := sink(b, tcp(b), sinkKinds[name])
			g := group(0, 0, 1)
			for b.Loop() {
				g.N++
				if _, err := s.Publish(b.Context(), g); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkCursor reads a stream of 500,000 messages of 200 bytes.
func BenchmarkCursor(b *testing.B) {
	c := tcp(b)
	stream(b, c)
	const n = 500_000
	f := c.NewFeeder(8000)
	for i := range n {
		if err := f.Publish(fmt.Sprintf("s.%d", i%1000), "", make([]byte, 200)); err != nil {
			b.Fatal(err)
		}
	}
	if err := f.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		cu, err := c.OpenCursor(b.Context(), CursorConfig{Stream: "S"})
		if err != nil {
			b.Fatal(err)
		}
		err = cu.Run(b.Context(), func(m *Msg) error {
			if m.Seq == n {
				return errEnough
			}
			return nil
		})
		if !errors.Is(err, errEnough) {
			b.Fatal(err)
		}
		if err := cu.Close(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)*n/b.Elapsed().Seconds(), "msg/s")
}

// BenchmarkBucket_Append appends entries of 2 KB to 16 logs at once.
func BenchmarkBucket_Append(b *testing.B) {
	bu := bucket(b, tcp(b), BucketConfig{})
	value := make([]byte, 2<<10)
	b.ResetTimer()
	var next atomic.Int64
	var wg sync.WaitGroup
	for log := range 16 {
		wg.Go(func() {
			filter, last := fmt.Sprintf("log.0.%d.>", log), uint64(0)
			for n := next.Add(1); n <= int64(b.N); n = next.Add(1) {
				seq, err := bu.Append(b.Context(), fmt.Sprintf("log.0.%d.%d", log, n), value, filter, last)
				if err != nil {
					b.Error(err)
					return
				}
				last = seq
				if n%500 == 0 {
					if err := bu.Purge(b.Context(), filter, last); err != nil {
						b.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "appends/s")
}
