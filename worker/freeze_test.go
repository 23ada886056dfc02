//go:build unix

package worker

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"natsflow/bus"
	"natsflow/flow"
	"natsflow/testenv"
)

// frozenURL tells the test binary that it is the process to be frozen.
const frozenURL = "NATSFLOW_TEST_FROZEN_URL"

// frozenOptions: few tasks, so that the results of each are many.
var frozenOptions = flow.Options{Partitions: 2}

// TestFrozenProcess is the worker of TestTakeover_stoppedProcess, in a process of its
// own; it does nothing otherwise. At its first commit it says so, and stays there until
// it was frozen: then it goes on in the same instant, before any timer of its own can
// tell it that its lease is over.
func TestFrozenProcess(t *testing.T) {
	url := os.Getenv(frozenURL)
	if url == "" {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var claims atomic.Int64
	err := Run(ctx, countFlow{options: frozenOptions}.build(t), Config{
		Bus: bus.Config{URL: url}, Name: "frozen", LeaseTTL: 2 * time.Second, Lanes: 1,
		probe: func(ctx context.Context, point, _ string) error {
			switch n := claims.Load(); {
			case point != "committed":
			case n < int64(frozenOptions.Partitions):
				claims.Add(1)
			case claims.CompareAndSwap(n, n+1) && n == int64(frozenOptions.Partitions):
				_, _ = os.Stdout.WriteString("\ncommitted\n")
				awaitFreeze(ctx)
			}
			return nil
		},
	})
	if err != nil {
		t.Error(err)
	}
}

// awaitFreeze returns when the process has not run for a second. It does not sleep: it
// is to be running when that is over.
func awaitFreeze(ctx context.Context) {
	for last := time.Now(); ctx.Err() == nil; {
		now := time.Now()
		if now.Sub(last) > time.Second {
			return
		}
		last = now
		runtime.Gosched()
	}
}

// A process is stopped between a commit and its publishing, and goes on long after its
// successor has published that: nothing more comes from it, and it joins again. A sink that knows ids for
// one second only is protected by nothing but the guard of the connection then.
func TestTakeover_stoppedProcess(t *testing.T) {
	for _, kind := range []sinkKind{sinkKinds[0], sinkKinds[2]} {
		t.Run(kind.name, func(t *testing.T) {
			srv := testenv.StartServer(t)
			l := newLab(t, srv)
			kind.make(l)
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFrozenProcess$") //nolint:gosec // itself
			child.Env = append(os.Environ(), frozenURL+"="+srv.URL())
			out, err := child.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			drained := make(chan struct{})
			t.Cleanup(func() {
				_ = child.Process.Kill()
				<-drained
				_ = child.Wait()
			})
			l.more(1)
			l.await("the sink", func() bool {
				_, err := l.conn.Stream(l.ctx, "KV_natsflow_count")
				return !errors.Is(err, bus.ErrNotFound)
			})
			l.more(500)
			reached := make(chan struct{})
			go func() {
				defer close(drained)
				lines := bufio.NewScanner(out)
				for once := true; lines.Scan(); {
					if once && strings.Contains(lines.Text(), "committed") {
						once = false
						close(reached)
					}
				}
			}()
			l.await("the commit", func() bool { return isClosed(reached) })
			freeze := func(sig os.Signal) {
				if err := child.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
			freeze(syscall.SIGSTOP)
			p := l.start(countFlow{options: frozenOptions}.build(t), Config{Name: "successor", LeaseTTL: 2 * time.Second}, nil)
			l.awaitResults(p, 501)
			l.pass(1500 * time.Millisecond)
			freeze(syscall.SIGCONT)
			l.pass(time.Second)
			l.more(100)
			l.awaitResults(p, 601)
			l.await("it to join again", func() bool {
				_, assigned, err := l.control().Members(l.ctx)
				return err == nil && len(assigned.Owners["frozen"]) == 1 && l.holders()["frozen"] == 1
			})
			l.more(100)
			l.awaitResults(p, 701)
			if err := p.leave(); err != nil {
				t.Fatal(err)
			}
			l.judge("OUT")
		})
	}
}
