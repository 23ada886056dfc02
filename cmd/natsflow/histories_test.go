package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/control"
	"natsflow/testenv"
)

var histories = flag.Int("histories", 2, "seeds that TestHistories takes, for each kind of sink")

// historySinks are the kinds of sinks that a history publishes to.
var historySinks = []struct {
	name string
	// window of the sink that is there before; zero for one that natsflow makes.
	window time.Duration
}{
	{"made by natsflow", 0},
	{"there before, duplicate window of 1s", time.Second},
}

const (
	historyPatience = 2 * time.Minute // until a drain has ended, a worker has ended, a flow runs
	historyWorkers  = 5               // at most, at a time
)

// TestHistories lets one to five worker processes of a flow come, leave, be killed, be
// frozen for longer than lease and duplicate window, and be cut off from the server,
// while flights come; drains at a random moment to a random cut, while that goes on;
// and judges: the results are those of the flights up to the cut, for each key in order.
// Then the flow is resumed, and drained at its head. It is worker's
// TestRun_manyWorkers with the binary, signals and a network, in real time.
func TestHistories(t *testing.T) {
	seed := chooseSeed()
	bin := testenv.Build(t, "./cmd/natsflow")
	for _, sink := range historySinks {
		t.Run(sink.name, func(t *testing.T) {
			t.Parallel()
			for i := range *histories {
				seed := seed + uint64(i)
				t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
					t.Parallel()
					t.Cleanup(func() {
						if t.Failed() {
							t.Logf("repeat it with: go test ./cmd/natsflow -run 'TestHistories/%s' -histories 1 -seed %d", sink.name, seed)
						}
					})
					newHistory(t, bin, seed, sink.window).run()
				})
			}
		})
	}
}

// history is a flow whose workers suffer.
type history struct {
	*killer
	feeding *feeding
	// lossy: what the network holds is lost and does not come late. A sink without a
	// fence is protected from that by its duplicate window, which is too short here; in
	// a network, TCP_USER_TIMEOUT sees to it.
	lossy bool
	// whole are the workers that can be harmed, harmed those that are frozen or cut off.
	whole, harmed []*sufferer
	all           []*sufferer
	started       map[string]int // processes of a name
}

// sufferer is a worker with a link of its own to the server.
type sufferer struct {
	*workerProc
	link *testenv.Link
	// killed and told to leave: it may end so.
	killed, told bool
	// heal undoes the harm, which is due at a time.
	heal func()
	due  time.Time
}

func newHistory(t *testing.T, bin string, seed uint64, window time.Duration) *history {
	t.Helper()
	h := &history{
		killer:  &killer{t: t, rand: rand.New(rand.NewPCG(seed, 3)), bin: bin, flow: flightsDir(t)},
		started: map[string]int{}, lossy: window > 0,
	}
	h.connect(testenv.StartProcess(t).URL())
	if window > 0 {
		if _, err := h.conn.CreateStream(t.Context(), bus.StreamConfig{Name: "DELAYS", Subjects: []string{"delays.>"}, Duplicates: window}); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func (h *history) run() {
	h.feeding = h.feed(60)
	h.join()
	// The flow is there: a drain that comes before it does not count.
	h.awaitState("the flow", control.StateRunning)
	for range 4 + h.rand.IntN(8) {
		h.event()
	}
	h.judgeAt(h.drainAnywhere())

	if h.rand.IntN(2) == 0 {
		if out, err := exec.Command(h.bin, "resume", "flights", "-s", h.url).CombinedOutput(); err != nil { //nolint:noctx // it gives up by itself
			h.t.Fatalf("resume: %v\n%s", err, out)
		}
		h.join()
	} else {
		h.join("--resume")
	}
	h.awaitState("the resume", control.StateRunning)
	for range h.rand.IntN(4) {
		h.event()
	}
	h.feeding.halt()
	out := h.drainAt("head")
	if !out.Drained {
		h.t.Fatalf("the drain at the head: %s", out.Error)
	}
	cut := out.Report.Cut["FLIGHTS"]
	if last := h.lastSeq(); cut != last {
		h.t.Errorf("drained at %d, not at the head, which is %d", cut, last)
	}
	h.judgeAt(cut)
}

// judgeAt ends all workers, the ones that were harmed after they have come to again,
// and judges the results up to a cut.
func (h *history) judgeAt(cut uint64) {
	h.t.Helper()
	for len(h.harmed) > 0 {
		h.healDue()
		h.wait(50*time.Millisecond, 100*time.Millisecond)
	}
	for _, w := range h.all {
		if !w.ended() && !w.told {
			h.tell(w)
		}
	}
	deadline := time.After(historyPatience)
	for _, w := range h.all {
		select {
		case <-w.done:
			h.fair(w)
		case <-deadline:
			h.t.Fatalf("worker %s does not end", w.name)
		}
		if n := w.link.Dials(); n == 0 && w.out.String() != "" {
			h.t.Errorf("worker %s has a link and does not use it", w.name)
		}
	}
	h.t.Logf("cut at %d of %d", cut, h.lastSeq())
	judge(h.t, h.conn, naive(h.t, storedLines(h.t, h.conn, cut)))
	if h.t.Failed() {
		h.t.Fatalf("the results up to %d are wrong", cut)
	}
	h.all, h.whole = nil, nil
}

// fair checks that a worker that has ended had a reason.
func (h *history) fair(w *sufferer) {
	h.t.Helper()
	out := w.out.String()
	switch {
	case w.killed && w.endedBy(syscall.SIGKILL):
	case h.started[w.name] > 1 && strings.Contains(out, control.ErrReplaced.Error()):
	case w.told:
		h.left(w.workerProc)
	case w.wait() == nil && strings.Contains(out, "drained"):
	default:
		h.t.Errorf("worker %s, process %d, ended by itself: %v", w.name, w.cmd.Process.Pid, w.wait())
	}
}

// join starts a worker; sometimes under the name of one that was there before.
func (h *history) join(flags ...string) {
	h.t.Helper()
	name := fmt.Sprintf("w%d", len(h.started))
	if n := len(h.started); n > 0 && h.rand.IntN(5) == 0 {
		name = fmt.Sprintf("w%d", h.rand.IntN(n))
	}
	h.started[name]++
	link := testenv.NewLink(h.t)
	w := &sufferer{link: link, workerProc: h.startAt(link.Proxy(h.url), name, flags...)}
	h.whole, h.all = append(h.whole, w), append(h.all, w)
	h.trace(w, strings.Join(append([]string{"started"}, flags...), " "))
}

// trace says what happens to a worker, by the clock that is in its output.
func (h *history) trace(w *sufferer, what string) {
	h.t.Helper()
	h.t.Logf("%s worker %s, process %d: %s", time.Now().UTC().Format("15:04:05.000"), w.name, w.cmd.Process.Pid, what)
}

// pick chooses one of the workers that are whole, or returns nil.
func (h *history) pick() *sufferer {
	h.whole = slices.DeleteFunc(h.whole, func(w *sufferer) bool { return w.ended() })
	if len(h.whole) == 0 {
		return nil
	}
	i := h.rand.IntN(len(h.whole))
	w := h.whole[i]
	h.whole = slices.Delete(h.whole, i, i+1)
	return w
}

// event lets something happen, and some time pass.
func (h *history) event() {
	h.t.Helper()
	h.healDue()
	what := h.rand.IntN(10)
	if what < 3 {
		if w := h.pick(); w == nil {
			h.join()
		} else if h.whole = append(h.whole, w); len(h.whole)+len(h.harmed) < historyWorkers {
			h.join()
		}
	} else if w := h.pick(); w != nil {
		h.harm(w, what)
	}
	h.wait(0, 1200*time.Millisecond)
}

// harm does something bad to a worker that is whole.
func (h *history) harm(w *sufferer, what int) {
	h.t.Helper()
	switch what {
	case 3:
		h.tell(w)
	case 4, 5:
		w.killed = true
		h.trace(w, "killed")
		h.to(w, syscall.SIGKILL)
	case 6, 7:
		h.to(w, syscall.SIGSTOP)
		h.until(w, "frozen", 2500*time.Millisecond, 6*time.Second, func() { h.to(w, syscall.SIGCONT) })
	case 8:
		w.link.Cut()
		h.until(w, "cut off", 0, 5*time.Second, w.link.Heal)
	default:
		dir := []testenv.Direction{testenv.ToServer, testenv.ToClient, testenv.Both}[h.rand.IntN(3)]
		w.link.Hold(dir)
		h.until(w, fmt.Sprintf("held in direction %d", dir), 0, 6*time.Second, func() {
			if h.lossy {
				w.link.Drop()
			}
			w.link.Release(dir)
		})
	}
}

// until lets the harm last for a random time.
func (h *history) until(w *sufferer, what string, from, to time.Duration, heal func()) {
	took := from + time.Duration(h.rand.Int64N(int64(to-from)))
	h.trace(w, fmt.Sprintf("%s for %v", what, took.Round(time.Millisecond)))
	w.due, w.heal = time.Now().Add(took), heal
	h.harmed = append(h.harmed, w)
}

// healDue heals the workers that have suffered for long enough.
func (h *history) healDue() {
	h.harmed = slices.DeleteFunc(h.harmed, func(w *sufferer) bool {
		if time.Now().Before(w.due) {
			return false
		}
		w.heal()
		h.whole = append(h.whole, w)
		return true
	})
}

// tell tells a worker to leave.
func (h *history) tell(w *sufferer) {
	h.t.Helper()
	w.told = true
	h.trace(w, "told to leave")
	h.to(w, syscall.SIGTERM)
}

// to sends a signal to a worker, unless it has just ended.
func (h *history) to(w *sufferer, sig syscall.Signal) {
	h.t.Helper()
	if err := w.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		h.t.Fatalf("%v to worker %s: %v", sig, w.name, err)
	}
}

// drainAnywhere drains the flow to a random cut and returns the cut.
func (h *history) drainAnywhere() uint64 {
	h.t.Helper()
	head := h.lastSeq()
	at, least, most := "now", uint64(0), uint64(0)
	var moment time.Time
	switch h.rand.IntN(4) {
	case 0:
	case 1:
		at, least = "head", head
	case 2:
		// Some of them were read already, and most are still to come.
		least = head - min(head, 100) + uint64(h.rand.IntN(1000))
		at, most = fmt.Sprintf("FLIGHTS:%d", least), least
	default:
		moment = time.Now().Add(time.Duration(h.rand.IntN(4000)-500) * time.Millisecond).UTC()
		at = moment.Format(time.RFC3339Nano)
	}
	out := h.drainAt(at)
	if !out.Drained {
		if most == 0 && moment.IsZero() || !strings.Contains(out.Error, "is behind what has been processed") {
			h.t.Fatalf("the drain at %s: %s", at, out.Error)
		}
		h.t.Logf("the drain at %s is refused", at)
		if out, least, most, moment = h.drainAt("now"), 0, 0, (time.Time{}); !out.Drained {
			h.t.Fatalf("the drain now: %s", out.Error)
		}
	}
	cut := out.Report.Cut["FLIGHTS"]
	if !moment.IsZero() {
		var err error
		if least, err = h.conn.SeqAt(h.t.Context(), "FLIGHTS", moment); err != nil {
			h.t.Fatal(err)
		}
		most = least
	}
	if cut < least || most > 0 && cut > most {
		h.t.Errorf("drained at %d, asked for %s, which is from %d on, to %d (0: anywhere)", cut, at, least, most)
	}
	return cut
}

// drainAt asks for a drain and lets more happen until it has ended.
func (h *history) drainAt(at string) (out drainOutcome) {
	h.t.Helper()
	cmd := exec.Command(h.bin, "drain", "flights", "-s", h.url, "--json", "--at", at, "--wait", historyPatience.String()) //nolint:noctx // bounded by --wait
	var errOut strings.Builder
	cmd.Stderr = &errOut
	ended := make(chan struct{})
	var text []byte
	go func() {
		defer close(ended)
		text, _ = cmd.Output() // that it failed is said in the outcome, too
	}()
	for range h.rand.IntN(4) {
		h.event()
	}
	for waiting := true; waiting; {
		select {
		case <-ended:
			waiting = false
		case <-time.After(100 * time.Millisecond):
			h.healDue()
			if w := h.pick(); w != nil {
				h.whole = append(h.whole, w)
			} else if len(h.harmed) == 0 {
				h.join()
			}
		}
	}
	if err := json.Unmarshal(text, &out); err != nil {
		h.t.Fatalf("the drain at %s: %v\n%s\n%s", at, err, text, errOut.String())
	}
	return out
}

// awaitState waits until the flow is in a state. It starts a worker when none is left.
func (h *history) awaitState(what string, want control.State) {
	h.t.Helper()
	await(h.t, what, historyPatience, func() error {
		recs, err := control.Flows(h.t.Context(), h.conn)
		switch {
		case err != nil:
			return err
		case len(recs) != 1:
			return fmt.Errorf("%d flows", len(recs))
		case recs[0].State != want:
			return fmt.Errorf("it is %s", recs[0].State)
		}
		return nil
	})
}

// lastSeq is the head of the source.
func (h *history) lastSeq() uint64 {
	h.t.Helper()
	info, err := h.conn.Stream(h.t.Context(), "FLIGHTS")
	if err != nil {
		h.t.Fatal(err)
	}
	return info.LastSeq
}
