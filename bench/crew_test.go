package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"natsflow/testenv"
)

const (
	crewKeys  = 100_000
	probeKeys = 50
	// leaseTTL is the default of the workers.
	leaseTTL = 5 * time.Second
)

// BenchmarkCrew measures, with worker processes that share a flow with 100,000
// keys of state: how long results wait when a worker leaves (SIGTERM), when it is
// killed (SIGKILL), when one joins, and how long four workers take to drain. The
// load is 1,000 messages a second over 50 keys; the pause is the longest time from
// publishing a message to receiving its result.
func BenchmarkCrew(b *testing.B) {
	for range b.N {
		c := newCrew(b)
		a, second := c.start("a"), c.start("b")
		c.fed()
		stop := c.load()
		c.calm()
		b.Logf("%-36s %v", "nobody comes or goes", c.pause(func() {}))
		b.Logf("%-36s %v", "one of two leaves, SIGTERM", c.pause(func() {
			c.signal(a, syscall.SIGTERM)
			c.ended(a)
		}))
		b.Logf("%-36s %v", "a second one joins", c.pause(func() { a = c.start("a") }))
		b.Logf("%-36s %v, the lease is %v", "one of two is killed, SIGKILL", c.pause(func() {
			c.signal(a, syscall.SIGKILL)
			_ = a.cmd.Wait()
		}), leaseTTL)
		crew := []*crewWorker{second, c.start("c"), c.start("d"), c.start("e")}
		c.calm()
		began := time.Now()
		if err := c.r.nc.Publish("control.drain.crew", nil); err != nil {
			b.Fatal(err)
		}
		for _, w := range crew {
			c.ended(w)
		}
		b.Logf("%-36s %v from the command to the last exit", "drain (now) of four under load", time.Since(began).Round(time.Millisecond))
		stop()
	}
}

type crewWorker struct {
	cmd *exec.Cmd
	out bytes.Buffer
}

// crew is a flow that counts keys, and those who look at its results.
type crew struct {
	r         *rig
	bin, flow string

	mu sync.Mutex
	// sent holds, for each probe key, when its messages were published.
	sent map[string][]time.Time
	// worst is the longest wait of a message, and results their number, since these
	// were set to zero.
	worst   time.Duration
	results int
}

func newCrew(b *testing.B) *crew {
	b.Helper()
	c := &crew{r: newRig(b), bin: testenv.Build(b, "./cmd/natsflow"), flow: filepath.Join(b.TempDir(), "flow.yaml"), sent: map[string][]time.Time{}}
	text := "flow: crew\nsource: {stream: IN}\nsteps:\n  - key: key\n  - aggregate: {n: count()}\n    id: count\n  - to: {stream: CREW, subject: \"crew.{key}\"}\n"
	if err := os.WriteFile(c.flow, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	return c
}

func (c *crew) start(name string) *crewWorker {
	c.r.tb.Helper()
	w := &crewWorker{cmd: exec.Command(c.bin, "worker", c.flow, "-s", c.r.srv.URL(), "--name", name)} //nolint:noctx // it is ended
	w.cmd.Stdout, w.cmd.Stderr = &w.out, &w.out
	if err := w.cmd.Start(); err != nil {
		c.r.tb.Fatal(err)
	}
	c.r.tb.Cleanup(func() { _ = w.cmd.Process.Kill() })
	return w
}

func (c *crew) signal(w *crewWorker, sig syscall.Signal) {
	c.r.tb.Helper()
	if err := w.cmd.Process.Signal(sig); err != nil {
		c.r.tb.Fatal(err)
	}
}

// ended waits for the good end of a worker.
func (c *crew) ended(w *crewWorker) {
	c.r.tb.Helper()
	if err := w.cmd.Wait(); err != nil {
		c.r.tb.Fatalf("worker: %v\n%s", err, w.out.Bytes())
	}
}

// fed gives the flow its state.
func (c *crew) fed() {
	c.r.tb.Helper()
	c.r.feed(0, crewKeys, func(i int) []byte { return fmt.Appendf(nil, `{"key":"key-%07d"}`, i) })
	c.r.awaitMessages("CREW", crewKeys)
	sub, err := c.r.nc.Subscribe("crew.*", c.received)
	if err != nil {
		c.r.tb.Fatal(err)
	}
	c.r.tb.Cleanup(func() { _ = sub.Unsubscribe() })
}

// received looks at a result.
func (c *crew) received(m *nats.Msg) {
	now := time.Now()
	var v struct{ N int }
	if err := json.Unmarshal(m.Data, &v); err != nil || v.N < 1 {
		c.r.tb.Errorf("result %s: %v", m.Data, err)
		return
	}
	key := strings.TrimPrefix(m.Subject, "crew.")
	c.mu.Lock()
	defer c.mu.Unlock()
	if v.N > len(c.sent[key]) {
		c.r.tb.Errorf("result %d of %s, of which %d messages were published", v.N, key, len(c.sent[key]))
		return
	}
	c.worst = max(c.worst, now.Sub(c.sent[key][v.N-1]))
	c.results++
}

// load publishes 1,000 messages a second until it is stopped.
func (c *crew) load() (stop func()) {
	ctx, cancel := context.WithCancel(c.r.ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			key := fmt.Sprintf("probe-%d", i%probeKeys)
			c.mu.Lock()
			c.sent[key] = append(c.sent[key], time.Now())
			c.mu.Unlock()
			if err := c.r.nc.Publish("in.m", fmt.Appendf(nil, `{"key":"%s"}`, key)); err != nil {
				c.r.tb.Error(err)
				return
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// calm waits until the tasks are shared as they are to be, and results come.
func (c *crew) calm() {
	c.r.tb.Helper()
	// Two seconds without a longer wait than 100 ms.
	for range 60 {
		if longest, results := c.over(2 * time.Second); results > 0 && longest < 100*time.Millisecond {
			return
		}
	}
	c.r.tb.Fatal("it does not get calm")
}

// over returns the longest wait of the messages that got their results in a time,
// and how many these were.
func (c *crew) over(d time.Duration) (longest time.Duration, results int) {
	c.reset()
	timer := time.NewTimer(d)
	<-timer.C
	return c.waits()
}

func (c *crew) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.worst, c.results = 0, 0
}

func (c *crew) waits() (longest time.Duration, results int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.worst, c.results
}

// pause returns the longest wait while and after something is done.
func (c *crew) pause(do func()) time.Duration {
	c.r.tb.Helper()
	c.reset()
	do()
	timer := time.NewTimer(leaseTTL + 3*time.Second)
	<-timer.C
	worst, results := c.waits()
	if results == 0 {
		c.r.tb.Fatal("no results")
	}
	c.calm()
	return worst.Round(time.Millisecond)
}
