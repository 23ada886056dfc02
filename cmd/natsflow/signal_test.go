//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"natsflow/bus"
	"natsflow/testenv"
)

// openTerminal opens a pseudo-terminal of a given size: what a program writes to
// the file can be read from the other end.
func openTerminal(t *testing.T, columns, rows uint16) (end, file *os.File) {
	t.Helper()
	end, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = end.Close() }) // nothing depends on it
	n, err := unix.IoctlGetInt(int(end.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(end.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(end.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows})
	}
	if err == nil {
		file, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return end, file
}

// On a terminal dev shows a table, and Ctrl-C leaves quickly and gives the cursor
// back.
func TestDev_terminal(t *testing.T) {
	end, file := openTerminal(t, 60, 20)
	cmd := exec.Command("natsflow", "dev", flightsDir(t), "--store", t.TempDir(), "--rate", "4000") //nolint:noctx // ended below
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = file.Close() // the program has it now
	defer cmd.Process.Kill()
	patience := time.AfterFunc(scriptPatience, func() { _ = cmd.Process.Kill() })
	defer patience.Stop()

	var out bytes.Buffer
	table := regexp.MustCompile(`(?s)\x1b\[\?25l.*\nkey +flights +late +avg_delay +worst.*\n[A-Z]{3} +\d+`)
	plain := regexp.MustCompile(`\x1b\[\d*[mK]|\r`)
	var asked time.Time
	for buf := make([]byte, 4096); ; {
		n, err := end.Read(buf)
		if err != nil {
			break // the program has closed its end
		}
		out.Write(buf[:n])
		if asked.IsZero() && table.Match(plain.ReplaceAll(out.Bytes(), nil)) {
			asked = time.Now()
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if asked.IsZero() {
		t.Fatalf("no table:\n%q", out.String())
	}
	t.Logf("left within %v", time.Since(asked))
	if took := time.Since(asked); took > 5*time.Second {
		t.Errorf("it took %v to leave", took)
	}
	text := plain.ReplaceAllString(out.String(), "")
	if !regexp.MustCompile(`(?s)\x1b\[\?25h(stopped  behind sequence .* of .* in stream FLIGHTS.*saved .*)$`).MatchString(text) {
		t.Errorf("the end is %q", text[max(0, len(text)-600):])
	}
	if bytes.Count(out.Bytes(), []byte("\x1b[?25h")) != 1 {
		t.Error("the cursor is not given back exactly once")
	}
}

// startFrozen starts a worker with a server that is frozen when the worker runs, and
// tells it to leave. What its end was comes on the channel.
func startFrozen(t *testing.T, args ...string) (cmd *exec.Cmd, out *scriptProc, ended <-chan error) {
	t.Helper()
	server := testenv.StartProcess(t)
	conn, err := bus.Connect(t.Context(), bus.Config{URL: server.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	if err := feedFlights(t.Context(), conn, flightsDir(t), 100); err != nil {
		t.Fatal(err)
	}
	out = &scriptProc{changed: make(chan struct{})}
	cmd = exec.Command("natsflow", append([]string{"worker", flightsDir(t), "-s", server.URL()}, args...)...) //nolint:noctx // ended below
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	deadline := time.After(scriptPatience)
	for running := regexp.MustCompile(`"msg":"running"`); ; {
		ok, changed := out.match(running)
		if ok {
			break
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("it does not run:\n%s", out.output())
		}
	}
	server.Freeze()
	t.Cleanup(server.Thaw)
	result := make(chan error, 1)
	go func() { result <- cmd.Wait() }()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	return cmd, out, result
}

// A worker whose server does not answer when it is told to leave ends by itself, when
// the time for that is over, and not as if all were well.
func TestWorker_stopTimeout(t *testing.T) {
	_, out, ended := startFrozen(t, "--stop-timeout", "1s", "--lease-ttl", "60s")
	select {
	case err := <-ended:
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitFailed {
			t.Errorf("got %v, want exit code 1", err)
		}
	case <-time.After(scriptPatience):
		t.Error("it did not end")
	}
	if ok, _ := out.match(regexp.MustCompile(`(?m)^natsflow: the stop took too long: more than 1s; nothing is lost`)); !ok {
		t.Errorf("it printed\n%s", out.output())
	}
}

// A second signal ends a worker that cannot leave since its server is frozen.
func TestWorker_secondSignal(t *testing.T) {
	cmd, out, ended := startFrozen(t)
	select {
	case err := <-ended:
		t.Fatalf("it ended at the first signal: %v\n%s", err, out.output())
	case <-time.After(2 * oneSignal):
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitFailed {
			t.Errorf("got %v, want exit code 1\n%s", err, out.output())
		}
	case <-time.After(5 * time.Second):
		t.Errorf("it did not end at the second signal\n%s", out.output())
	}
}
