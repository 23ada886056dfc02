package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/flowspec"
	"natsflow/testenv"
)

var (
	killCount = flag.Int("kills", 30, "how often TestKill kills a worker")
	killSeed  = flag.Uint64("seed", 0, "seed of TestKill; 0 takes one from the clock")
)

// delays is a result of the example flow.
type delays struct {
	Key     string  `json:"key"`
	Flights int     `json:"flights"`
	Late    int     `json:"late"`
	Avg     float64 `json:"avg_delay"`
	Worst   int     `json:"worst"`
}

// TestKill feeds the flights to a worker, the real binary on a nats-server of its
// own, that is killed again and again at random moments and started again under
// the same name; now and then one is frozen, and woken when another has taken its
// place. The judge computes the results from the file, naively.
func TestKill(t *testing.T) {
	k := newKiller(t)
	feeding := k.feed(1.4)
	for n := range *killCount {
		k.round(n)
	}
	feeding()
	w := k.start("w")
	k.drain(w)
	judge(t, k.conn, k.flow)
}

// TestKill_three is TestKill with three workers that share the tasks: at random
// moments a random one of them is killed, told to leave, frozen, or replaced by a
// process of its name, and started again at once or after its lease has run out.
// In the end all three drain.
func TestKill_three(t *testing.T) {
	k := newKiller(t)
	feeding := k.feed(2.2)
	workers := map[string]*workerProc{}
	names := []string{"a", "b", "c"}
	for _, name := range names {
		workers[name] = k.start(name)
	}
	for n := range *killCount {
		name := names[k.rand.IntN(len(names))]
		workers[name] = k.disturb(name, workers[name])
		if info, err := k.conn.Stream(t.Context(), "DELAYS"); err == nil {
			t.Logf("disturbance %d, of %s: %d messages in DELAYS", n+1, name, info.LastSeq)
		}
	}
	feeding()
	k.drain(workers["a"], workers["b"], workers["c"])
	judge(t, k.conn, k.flow)
}

// newKiller starts a server.
func newKiller(t *testing.T) *killer {
	t.Helper()
	seed := *killSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test ./cmd/natsflow -run '^%s$' -seed %d -kills %d", t.Name(), seed, *killCount)
	k := &killer{t: t, rand: rand.New(rand.NewPCG(seed, 1)), bin: testenv.Build(t, "./cmd/natsflow"), flow: flightsDir(t)}
	k.url = testenv.StartProcess(t).URL()
	var err error
	if k.conn, err = bus.Connect(t.Context(), bus.Config{URL: k.url}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.conn.Close)
	return k
}

// feed feeds the flights, so slowly that they last until the last kill if each
// takes so many seconds. The returned function feeds the rest and waits for it.
func (k *killer) feed(secondsEach float64) (finish func()) {
	k.t.Helper()
	f := openFlights(k.t, k.conn, k.flow, secondsEach*float64(max(*killCount, 1)))
	ctx, cancel := context.WithCancel(k.t.Context())
	fed := make(chan error, 1)
	var wg sync.WaitGroup
	k.t.Cleanup(wg.Wait)
	k.t.Cleanup(cancel)
	wg.Go(func() { fed <- f.run(ctx, k.conn) })
	return func() {
		k.t.Helper()
		k.t.Logf("%d of %d flights were fed while workers were disturbed", f.done.Load(), f.total)
		f.limit.SetLimit(rate.Inf)
		if err := <-fed; err != nil {
			k.t.Fatal(err)
		}
	}
}

// openFlights makes a feed that is slow enough to last until the last kill, so
// that each hits a worker that has something to do.
func openFlights(t *testing.T, conn *bus.Conn, dir string, seconds float64) *feed {
	t.Helper()
	const flights = 20_000
	spec, err := flowspec.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	perSecond := int(flights / seconds)
	f, err := openFeed(t.Context(), conn, spec.Sources, "FLIGHTS", spec.Dev.Feed["FLIGHTS"], max(perSecond, 1))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

type killer struct {
	t         *testing.T
	rand      *rand.Rand
	bin       string
	flow, url string
	conn      *bus.Conn
}

// workerProc is a worker process and what it printed.
type workerProc struct {
	cmd *exec.Cmd
	out *output
}

// output is what a worker printed. joined is closed when it says that it is a member.
type output struct {
	joined chan struct{}
	once   sync.Once
	mu     sync.Mutex
	text   bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.text.Write(p)
	if bytes.Contains(o.text.Bytes(), []byte(`"msg":"assigned"`)) {
		o.once.Do(func() { close(o.joined) })
	}
	return n, err
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// start starts a worker. It ends with the test at the latest.
func (k *killer) start(name string) *workerProc {
	k.t.Helper()
	w := &workerProc{out: &output{joined: make(chan struct{})}}
	w.cmd = exec.Command(k.bin, "worker", k.flow, "-s", k.url, "--name", name, "--lease-ttl", "2s") //nolint:noctx // it is killed
	w.cmd.Stdout, w.cmd.Stderr = w.out, w.out
	if err := w.cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() { _ = w.cmd.Process.Kill() }) // it has ended, unless the test has failed
	return w
}

// kill ends a worker with SIGKILL; it must not have ended by itself before.
func (k *killer) kill(w *workerProc) {
	k.t.Helper()
	if err := w.cmd.Process.Kill(); err != nil {
		k.t.Fatalf("kill: %v\n%s", err, w.out)
	}
	err := w.cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		k.t.Fatalf("a worker ended by itself: %v\n%s", err, w.out)
	}
}

func (k *killer) signal(w *workerProc, sig syscall.Signal) {
	k.t.Helper()
	if err := w.cmd.Process.Signal(sig); err != nil {
		k.t.Fatalf("%v: %v\n%s", sig, err, w.out)
	}
}

// wait lets real time pass: the moment of the fault is what is random here.
func (k *killer) wait(from, to time.Duration) {
	<-time.After(from + time.Duration(k.rand.Int64N(int64(to-from))))
}

// round is one worker from its start to its end.
func (k *killer) round(n int) {
	w := k.start("w")
	switch {
	case n%10 == 4:
		k.wait(200*time.Millisecond, time.Second)
		k.freeze(w)
	case n%10 == 9:
		k.wait(200*time.Millisecond, time.Second)
		w = k.replace("w", w)
	case k.rand.IntN(5) == 0:
		k.wait(0, 150*time.Millisecond) // while it starts
	default:
		k.wait(150*time.Millisecond, 900*time.Millisecond)
	}
	k.kill(w)
	if info, err := k.conn.Stream(k.t.Context(), "DELAYS"); err == nil {
		k.t.Logf("kill %d: %d messages in DELAYS", n+1, info.LastSeq)
	}
}

// freeze stops a worker for about as long as its lease lasts, so that it goes on
// by itself, with the lease or without.
func (k *killer) freeze(w *workerProc) {
	k.signal(w, syscall.SIGSTOP)
	k.wait(500*time.Millisecond, 2500*time.Millisecond)
	k.signal(w, syscall.SIGCONT)
	k.wait(100*time.Millisecond, time.Second)
}

// replace freezes a worker, and wakes it when another process has its name and
// has worked. It returns that one, which stays: it is the younger of the two. One
// that is frozen before it has joined would join last, and be the younger.
func (k *killer) replace(name string, w *workerProc) *workerProc {
	select {
	case <-w.out.joined:
	case <-time.After(time.Minute):
		k.t.Fatalf("worker %s has not joined:\n%s", name, w.out)
	}
	k.signal(w, syscall.SIGSTOP)
	next := k.start(name)
	k.wait(time.Second, 2500*time.Millisecond)
	k.signal(w, syscall.SIGCONT)
	k.wait(50*time.Millisecond, 500*time.Millisecond)
	_ = w.cmd.Process.Kill() // it may have seen by now that it was replaced
	_ = w.cmd.Wait()
	return next
}

// left waits for the end of a worker that was told to leave.
func (k *killer) left(name string, w *workerProc) {
	err := w.cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGTERM && w.out.String() == "":
		// It was so young that it did not listen to signals yet.
	case strings.Contains(w.out.String(), control.ErrLeaseLost.Error()):
		// One that has just lost its lease, on a busy machine or after a freeze, has
		// nothing left to give away, and says so.
	default:
		k.t.Fatalf("worker %s was told to leave: %v\n%s", name, err, w.out)
	}
}

// disturb does something to one worker of several and returns the process that
// has its name then.
func (k *killer) disturb(name string, w *workerProc) *workerProc {
	k.wait(0, 700*time.Millisecond)
	switch k.rand.IntN(8) {
	case 0:
		k.freeze(w)
		return w
	case 1:
		return k.replace(name, w)
	case 2:
		k.signal(w, syscall.SIGTERM)
		k.left(name, w)
	case 3:
		// The others take its tasks before it is back.
		k.kill(w)
		k.wait(1500*time.Millisecond, 3500*time.Millisecond)
	default:
		k.kill(w)
	}
	return k.start(name)
}

// drain lets the workers process the rest and stop at the head.
func (k *killer) drain(workers ...*workerProc) {
	k.t.Helper()
	out, err := exec.Command(k.bin, "drain", "flights", "-s", k.url, "--at", "head", "--wait", "30s").CombinedOutput() //nolint:noctx // bounded by --wait
	if err != nil {
		for _, w := range workers {
			_ = w.cmd.Process.Kill() // what it has printed is complete then
			_ = w.cmd.Wait()
			out = append(out, w.out.String()...)
		}
		k.t.Fatalf("drain: %v\n%s", err, out)
	}
	k.t.Logf("%s", out)
	for _, w := range workers {
		if err := w.cmd.Wait(); err != nil {
			k.t.Fatalf("a worker at the end: %v\n%s", err, w.out)
		}
	}
}

// judge compares the results in DELAYS with a naive computation over the file.
func judge(t *testing.T, conn *bus.Conn, dir string) {
	t.Helper()
	want := naive(t, filepath.Join(dir, "flights.ndjson.gz"))
	got := map[string][]delays{}
	total := 0
	err := readStream(t.Context(), conn, bus.CursorConfig{Stream: "DELAYS", Subjects: []string{"delays.*"}}, func(m *bus.Msg) {
		var d delays
		if err := json.Unmarshal(m.Data, &d); err != nil {
			t.Errorf("result %d is not JSON: %v", m.Seq, err)
		}
		if m.Subject != "delays."+d.Key {
			t.Errorf("result %d of key %s has subject %s", m.Seq, d.Key, m.Subject)
		}
		got[d.Key] = append(got[d.Key], d)
		total++
	})
	if err != nil {
		t.Fatal(err)
	}
	for key, results := range want {
		if err := compare(results, got[key]); err != nil {
			t.Errorf("key %s: %v", key, err)
		}
		delete(got, key)
	}
	for key := range got {
		t.Errorf("key %s has results and no flights", key)
	}
	t.Logf("%d results of %d keys", total, len(want))
}

// naive computes all results, by key, in order.
func naive(t *testing.T, file string) map[string][]delays {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]delays{}
	sums := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var flight struct {
			Origin string
			Delay  *int
		}
		if err := json.Unmarshal([]byte(line), &flight); err != nil {
			t.Fatal(err)
		}
		if flight.Delay == nil {
			continue
		}
		d := delays{Key: flight.Origin, Worst: math.MinInt}
		if before := all[d.Key]; len(before) > 0 {
			d = before[len(before)-1]
		}
		d.Flights++
		if *flight.Delay > 15 {
			d.Late++
		}
		sums[d.Key] += *flight.Delay
		d.Avg = float64(sums[d.Key]) / float64(d.Flights)
		d.Worst = max(d.Worst, *flight.Delay)
		all[d.Key] = append(all[d.Key], d)
	}
	return all
}

// compare looks for the first result that differs.
func compare(want, got []delays) error {
	for i, w := range want {
		if i == len(got) {
			return fmt.Errorf("%d results are missing after %+v", len(want)-i, w)
		}
		g := got[i]
		if math.Abs(g.Avg-w.Avg) < 1e-9 {
			g.Avg = w.Avg
		}
		if g != w {
			return fmt.Errorf("result %d is %+v, want %+v", i+1, g, w)
		}
	}
	if len(got) > len(want) {
		return fmt.Errorf("%d results too many, from %+v", len(got)-len(want), got[len(want)])
	}
	return nil
}
