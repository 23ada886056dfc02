package testenv

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"natsflow/testenv/internal/clock"
)

const (
	processReady   = 60 * time.Second      // until a child process accepts clients
	processPoll    = 10 * time.Millisecond // between looks at a child that starts
	processRestart = 20 * time.Second      // how long a restart retries when the port is taken
	sharePatience  = 5 * time.Minute       // until bubbles of other tests have ended
)

// Process is a nats-server as a child process. Its methods fail the test when
// they cannot do what they say. They must not be called concurrently with each
// other, except URL, Store and PID.
type Process struct {
	tb     testing.TB
	bin    string
	name   string
	config string // file
	store  string
	ports  string // folder where the server says which port it got

	mu      sync.Mutex
	port    string // of the first start
	monitor string // address of the monitoring, if the configuration has it; another one at each start
	run     *child
}

// child is one run of the program.
type child struct {
	cmd  *exec.Cmd
	out  *tail
	done chan struct{} // closed when it has ended and been waited for
}

// StartProcess starts a nats-server with JetStream as a child process on a free
// loopback port. config are lines of its configuration file, e.g.
// "max_payload: 2MB"; none are needed. The server is killed when the test ends
// and, on Linux, when the test's process dies.
func StartProcess(tb testing.TB, config ...string) *Process {
	tb.Helper()
	release, err := clock.Shared(sharePatience)
	if err != nil {
		tb.Fatalf("testenv: starting nats-server: %v", err)
	}
	tb.Cleanup(release)
	p := newProcess(tb, "testenv", config)
	if err := p.start(); err != nil {
		tb.Fatalf("testenv: %v", err)
	}
	return p
}

// newProcess prepares a server and does not start it yet. It is killed when the
// test ends.
func newProcess(tb testing.TB, name string, config []string) *Process {
	tb.Helper()
	p := &Process{tb: tb, bin: NatsServer(tb), name: name, store: tb.TempDir(), ports: tb.TempDir(), port: "-1"}
	p.config = filepath.Join(p.ports, "nats.conf")
	if err := os.WriteFile(p.config, []byte(strings.Join(config, "\n")+"\n"), 0o600); err != nil {
		tb.Fatalf("testenv: writing nats-server's configuration: %v", err)
	}
	tb.Cleanup(p.Kill)
	return p
}

// URL is where clients connect. It outlives restarts.
func (p *Process) URL() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return "nats://" + net.JoinHostPort("127.0.0.1", p.port)
}

// Store is the folder of the JetStream data.
func (p *Process) Store() string { return p.store }

// PID is the process id of the server that runs, or 0.
func (p *Process) PID() int {
	if c := p.current(); c != nil {
		return c.cmd.Process.Pid
	}
	return 0
}

// Kill ends the server with SIGKILL, whatever it does, and waits until it is
// gone. What the operating system was told to write stays written. A server
// that has ended already is left alone.
func (p *Process) Kill() {
	p.tb.Helper()
	p.end(syscall.SIGKILL)
}

// Stop ends the server with SIGTERM and waits until it is gone.
func (p *Process) Stop() {
	p.tb.Helper()
	p.end(syscall.SIGTERM)
}

// LameDuck tells the server to get rid of its clients and leaders and to end, with
// SIGUSR2, and waits until it is gone. The server takes up to a second for each client.
func (p *Process) LameDuck() {
	p.tb.Helper()
	p.end(syscall.SIGUSR2)
}

// Freeze stops the server's execution with SIGSTOP: connections stay open, and
// nothing answers. It returns when the server stands still.
func (p *Process) Freeze() {
	p.tb.Helper()
	p.signal(syscall.SIGSTOP)
	deadline := time.Now().Add(processRestart)
	for pid := p.PID(); !stopped(pid); {
		if time.Now().After(deadline) {
			p.tb.Fatalf("testenv: nats-server still runs %v after SIGSTOP", processRestart)
		}
		time.Sleep(time.Millisecond)
	}
}

// Thaw lets a frozen server go on, with SIGCONT.
func (p *Process) Thaw() {
	p.tb.Helper()
	p.signal(syscall.SIGCONT)
}

// Restart kills the server, if it runs, and starts it on the same store and
// port. It returns when the server accepts clients.
func (p *Process) Restart() {
	p.tb.Helper()
	p.Kill()
	deadline := time.Now().Add(processRestart)
	for {
		err := p.start()
		if err == nil {
			return
		}
		// Nothing reserves the port while the server is down. An outgoing
		// connection of some other process may have it for a moment.
		if !errors.Is(err, errPortTaken) || time.Now().After(deadline) {
			p.tb.Fatalf("testenv: %v", err)
		}
		time.Sleep(processPoll)
	}
}

func (p *Process) current() *child {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

func (p *Process) signal(sig syscall.Signal) {
	p.tb.Helper()
	c := p.current()
	if c == nil {
		p.tb.Fatalf("testenv: sending %v to nats-server: it does not run", sig)
	}
	if err := c.cmd.Process.Signal(sig); err != nil {
		p.tb.Fatalf("testenv: sending %v to nats-server: %v\n%s", sig, err, c.out)
	}
}

func (p *Process) end(sig syscall.Signal) {
	p.tb.Helper()
	p.mu.Lock()
	c := p.run
	p.run = nil
	p.mu.Unlock()
	if c == nil {
		return
	}
	if err := c.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.tb.Errorf("testenv: sending %v to nats-server: %v", sig, err)
	}
	<-c.done
}

// errPortTaken is returned by start when something else has the port.
var errPortTaken = errors.New("port is taken")

func (p *Process) start() error {
	p.mu.Lock()
	port := p.port
	p.mu.Unlock()
	c := &child{out: &tail{}, done: make(chan struct{})}
	// Without a context: it lives until Kill.
	c.cmd = exec.Command(p.bin, "--config", p.config, "--addr", "127.0.0.1", "--port", port,
		"--jetstream", "--store_dir", p.store, "--ports_file_dir", p.ports, "--name", p.name)
	c.cmd.Stdout, c.cmd.Stderr = c.out, c.out
	c.cmd.SysProcAttr = dieWithParent()
	if err := c.cmd.Start(); err != nil {
		return fmt.Errorf("starting nats-server: %w", err)
	}
	go func() {
		defer close(c.done)
		_ = c.cmd.Wait() // how it ended is of no interest: tests end it in every way
	}()
	got, err := p.await(c, port)
	if err != nil {
		_ = c.cmd.Process.Kill() // it may have ended by itself
		<-c.done
		return err
	}
	p.mu.Lock()
	p.port, p.monitor, p.run = got.nats, got.monitor, c
	p.mu.Unlock()
	return nil
}

// listeners are the client port, and the address of the monitoring.
type listeners struct{ nats, monitor string }

// await returns the listeners when the child accepts clients. It waits for the file
// that names them also when the port is known: the monitoring has a new one.
func (p *Process) await(c *child, port string) (listeners, error) {
	deadline := time.NewTimer(processReady)
	defer deadline.Stop()
	poll := time.NewTicker(processPoll)
	defer poll.Stop()
	for {
		got, ok := p.readPorts(c.cmd.Process.Pid)
		if ok && (port == "-1" || got.nats == port) && greets(net.JoinHostPort("127.0.0.1", got.nats)) {
			select {
			case <-c.done: // somebody else's server greeted us
			default:
				return got, nil
			}
		}
		select {
		case <-poll.C:
		case <-c.done:
			err := errors.New("it ended by itself")
			if bytes.Contains(c.out.Bytes(), []byte("address already in use")) {
				err = errPortTaken
			}
			return got, fmt.Errorf("starting nats-server: %w\n%s", err, c.out)
		case <-deadline.C:
			return got, fmt.Errorf("starting nats-server: not ready after %v\n%s", processReady, c.out)
		}
	}
}

// readPorts reads the file in which the server names its listeners.
func (p *Process) readPorts(pid int) (listeners, bool) {
	files, err := filepath.Glob(filepath.Join(p.ports, fmt.Sprintf("*_%d.ports", pid)))
	if err != nil || len(files) != 1 {
		return listeners{}, false
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		return listeners{}, false
	}
	var ports struct {
		Nats       []string `json:"nats"`
		Monitoring []string `json:"monitoring"`
	}
	if err := json.Unmarshal(data, &ports); err != nil || len(ports.Nats) == 0 {
		return listeners{}, false // half written: the next look will see all of it
	}
	u, err := url.Parse(ports.Nats[0])
	if err != nil {
		return listeners{}, false
	}
	got := listeners{nats: u.Port()}
	if len(ports.Monitoring) > 0 {
		got.monitor = ports.Monitoring[0]
	}
	return got, true
}

// greets says whether a nats-server greets those who connect to addr.
// JetStream is up before the server listens.
func greets(addr string) bool {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	defer conn.Close() //nolint:errcheck // nothing was written
	if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return false
	}
	line, err := bufio.NewReader(conn).ReadSlice(' ')
	return err == nil && string(line) == "INFO "
}

// tail keeps the last output of a child, for the message of a failure.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 16 << 10

// Write implements io.Writer and never fails.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - tailSize; over > 0 {
		t.buf = slices.Delete(t.buf, 0, over)
	}
	return len(b), nil
}

// Bytes returns a copy of what is kept.
func (t *tail) Bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.buf)
}

// String is what is kept, as text.
func (t *tail) String() string { return string(t.Bytes()) }
