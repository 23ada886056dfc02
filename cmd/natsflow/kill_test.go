package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"os/exec"
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
	firstSeed = flag.Uint64("seed", 0, "seed of TestKill and of the first history; 0 takes one from the clock")
)

// TestKill feeds the flights to a worker, the real binary on a nats-server of its
// own, that is killed again and again at random moments and started again under
// the same name; now and then one is frozen, and woken when another has taken its
// place. The judge computes the results from the file, naively.
func TestKill(t *testing.T) {
	k := newKiller(t)
	fd := k.feed(1.4 * float64(max(*killCount, 1)))
	for n := range *killCount {
		k.round(n)
	}
	fd.finish()
	w := k.start("w")
	k.drain(w)
	judge(t, k.conn, naive(t, fileLines(t, k.flow)))
}

// TestKill_three is TestKill with three workers that share the tasks: at random
// moments a random one of them is killed, told to leave, frozen, or replaced by a
// process of its name, and started again at once or after its lease has run out.
// In the end all three drain.
func TestKill_three(t *testing.T) {
	k := newKiller(t)
	fd := k.feed(2.2 * float64(max(*killCount, 1)))
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
	fd.finish()
	k.drain(workers["a"], workers["b"], workers["c"])
	judge(t, k.conn, naive(t, fileLines(t, k.flow)))
}

// newKiller starts a server.
func newKiller(t *testing.T) *killer {
	t.Helper()
	seed := chooseSeed()
	t.Logf("go test ./cmd/natsflow -run '^%s$' -seed %d -kills %d", t.Name(), seed, *killCount)
	k := &killer{t: t, rand: rand.New(rand.NewPCG(seed, 1)), bin: testenv.Build(t, "./cmd/natsflow"), flow: flightsDir(t)}
	k.connect(testenv.StartProcess(t).URL())
	return k
}

// chooseSeed returns the seed of the flag, or a new one.
func chooseSeed() uint64 {
	if *firstSeed != 0 {
		return *firstSeed
	}
	return uint64(time.Now().UnixNano())
}

// connect makes the test's own connection to a server, which workers use too.
func (k *killer) connect(url string) {
	k.t.Helper()
	k.url = url
	conn, err := bus.Connect(k.t.Context(), bus.Config{URL: url})
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(conn.Close)
	k.conn = conn
}

// feeding is a feed of flights that is under way.
type feeding struct {
	t     *testing.T
	limit *rate.Limiter
	stop  context.CancelFunc
	ended chan error
}

// feed feeds the flights, so slowly that they last so many seconds: each fault is to
// hit workers that have something to do. It goes on when servers were away.
func (k *killer) feed(seconds float64) *feeding {
	k.t.Helper()
	spec, err := flowspec.Load(k.flow)
	if err != nil {
		k.t.Fatal(err)
	}
	const flights = 20_000
	perSecond := max(int(flights/seconds), 1)
	open := func(ctx context.Context) (*feed, error) {
		return openFeed(ctx, k.conn, spec.Sources, "FLIGHTS", spec.Dev.Feed["FLIGHTS"], perSecond)
	}
	f, err := open(k.t.Context())
	if err != nil {
		k.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(k.t.Context())
	fd := &feeding{t: k.t, limit: f.limit, stop: cancel, ended: make(chan error, 1)}
	var wg sync.WaitGroup
	k.t.Cleanup(wg.Wait)
	k.t.Cleanup(cancel)
	wg.Go(func() {
		err := f.run(ctx, k.conn)
		for ctx.Err() == nil && bus.Retryable(err) {
			// What was stored is found in the stream.
			var again *feed
			if again, err = open(ctx); err == nil {
				again.limit = fd.limit
				err = again.run(ctx, k.conn)
			}
		}
		fd.ended <- err
	})
	return fd
}

// halt ends the feed where it is, and returns when nothing more is on its way.
func (fd *feeding) halt() {
	fd.t.Helper()
	fd.stop()
	if err := <-fd.ended; err != nil && !errors.Is(err, context.Canceled) {
		fd.t.Fatal(err)
	}
}

// finish feeds the rest at once.
func (fd *feeding) finish() {
	fd.t.Helper()
	fd.limit.SetLimit(rate.Inf)
	if err := <-fd.ended; err != nil {
		fd.t.Fatal(err)
	}
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
	name string
	cmd  *exec.Cmd
	out  *output
	done chan struct{} // closed when it has ended
	err  error         // of its end
}

// wait waits for the end of the process.
func (w *workerProc) wait() error {
	<-w.done
	return w.err
}

// ended says whether the process has ended.
func (w *workerProc) ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// endedBy says whether a signal has ended the process.
func (w *workerProc) endedBy(sig syscall.Signal) bool {
	var exit *exec.ExitError
	return errors.As(w.wait(), &exit) && exit.Sys().(syscall.WaitStatus).Signal() == sig
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
func (k *killer) start(name string, flags ...string) *workerProc {
	k.t.Helper()
	return k.startAt(k.url, name, flags...)
}

// startAt starts a worker that connects to a URL of its own.
func (k *killer) startAt(url, name string, flags ...string) *workerProc {
	k.t.Helper()
	w := &workerProc{name: name, out: &output{joined: make(chan struct{})}, done: make(chan struct{})}
	args := append([]string{"worker", k.flow, "-s", url, "--name", name, "--lease-ttl", "2s"}, flags...)
	w.cmd = exec.Command(k.bin, args...) //nolint:noctx // it is killed
	w.cmd.Stdout, w.cmd.Stderr = w.out, w.out
	if err := w.cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	go func() {
		defer close(w.done)
		w.err = w.cmd.Wait()
	}()
	k.t.Cleanup(func() {
		_ = w.cmd.Process.Kill() // it has ended, unless the test has failed
		_ = w.wait()
		if k.t.Failed() {
			k.t.Logf("worker %s, process %d:\n%s", name, w.cmd.Process.Pid, w.out)
		}
	})
	return w
}

// kill ends a worker with SIGKILL; it must not have ended by itself before.
func (k *killer) kill(w *workerProc) {
	k.t.Helper()
	if err := w.cmd.Process.Kill(); err != nil {
		k.t.Fatalf("kill: %v\n%s", err, w.out)
	}
	if !w.endedBy(syscall.SIGKILL) {
		k.t.Fatalf("a worker ended by itself: %v\n%s", w.err, w.out)
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
	_ = w.wait()
	return next
}

// left waits for the end of a worker that was told to leave.
func (k *killer) left(w *workerProc) {
	k.t.Helper()
	switch err := w.wait(); {
	case err == nil:
	case w.endedBy(syscall.SIGTERM) && w.out.String() == "":
		// It was so young that it did not listen to signals yet.
	case strings.Contains(w.out.String(), control.ErrLeaseLost.Error()):
		// One that has just lost its lease, on a busy machine or after a freeze, has
		// nothing left to give away, and says so.
	default:
		k.t.Fatalf("worker %s was told to leave: %v\n%s", w.name, err, w.out)
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
		k.left(w)
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
			_ = w.wait()
			out = append(out, w.out.String()...)
		}
		k.t.Fatalf("drain: %v\n%s", err, out)
	}
	k.t.Logf("%s", out)
	for _, w := range workers {
		if err := w.wait(); err != nil {
			k.t.Fatalf("a worker at the end: %v\n%s", err, w.out)
		}
	}
}
