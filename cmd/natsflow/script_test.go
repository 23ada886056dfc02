package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"natsflow/bus"
	"natsflow/flowspec"
	"natsflow/testenv"
	"natsflow/testenv/embed"
)

// scriptPatience bounds every wait of a script.
const scriptPatience = 30 * time.Second

// script is what the commands of one script share.
type script struct {
	t     *testing.T
	procs map[string]*scriptProc
}

type scriptKey struct{}

func newScript(t *testing.T, env *testscript.Env) {
	s := &script{t: t, procs: map[string]*scriptProc{}}
	env.Values[scriptKey{}] = s
	env.Defer(func() {
		for _, p := range s.procs {
			_ = p.cmd.Process.Kill() // most have ended
			<-p.done
		}
	})
}

// scriptCommands are the commands that scripts have besides those of testscript.
func scriptCommands() map[string]func(ts *testscript.TestScript, neg bool, args []string) {
	return map[string]func(ts *testscript.TestScript, neg bool, args []string){
		"server":     cmdServer,
		"start":      cmdStart,
		"await":      cmdAwait,
		"signal":     cmdSignal,
		"ended":      cmdEnded,
		"exits":      cmdExits,
		"eventually": cmdEventually,
		"feed":       cmdFeed,
	}
}

// cmdServer: "server embedded|child" starts a nats-server and sets NATS_URL.
func cmdServer(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: server embedded|child")
	}
	s := ts.Value(scriptKey{}).(*script)
	switch args[0] {
	case "embedded":
		srv, err := embed.Start(embed.Config{Store: ts.MkAbs("nats-data"), Listen: "127.0.0.1:0"})
		ts.Check(err)
		ts.Defer(srv.Stop)
		ts.Setenv("NATS_URL", srv.URL())
	case "child":
		ts.Setenv("NATS_URL", testenv.StartProcess(s.t).URL())
	default:
		ts.Fatalf("usage: server embedded|child")
	}
}

// scriptProc is a program in the background whose output is watched.
type scriptProc struct {
	cmd  *exec.Cmd
	done chan struct{}

	mu      sync.Mutex
	out     bytes.Buffer
	seen    int           // up to where an await has matched
	changed chan struct{} // closed at the next output
}

// Write implements io.Writer.
func (p *scriptProc) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out.Write(b)
	close(p.changed)
	p.changed = make(chan struct{})
	return len(b), nil
}

func (p *scriptProc) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// match looks for re behind what was matched before.
func (p *scriptProc) match(re *regexp.Regexp) (ok bool, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if loc := re.FindIndex(p.out.Bytes()[p.seen:]); loc != nil {
		p.seen += loc[1]
		return true, nil
	}
	return false, p.changed
}

// program makes a program of the script's environment.
func program(ts *testscript.TestScript, args []string) *exec.Cmd {
	path := args[0]
	for _, dir := range filepath.SplitList(ts.Getenv("PATH")) {
		if file := filepath.Join(dir, path); filepath.Base(path) == path && isProgram(file) {
			path = file
			break
		}
	}
	cmd := exec.Command(path, args[1:]...) //nolint:noctx // ended by the script
	cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"PATH", "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "NATS_URL", "NO_COLOR", "TMPDIR", "GOCOVERDIR"} {
		if v := ts.Getenv(name); v != "" {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	return cmd
}

func isProgram(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0
}

// cmdStart: "start NAME PROGRAM ARG..." runs a program in the background.
func cmdStart(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: start NAME PROGRAM ARG...")
	}
	s := ts.Value(scriptKey{}).(*script)
	if old := s.procs[args[0]]; old != nil {
		select {
		case <-old.done:
		default:
			ts.Fatalf("%s is running already", args[0])
		}
	}
	p := &scriptProc{cmd: program(ts, args[1:]), done: make(chan struct{}), changed: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p, p
	ts.Check(p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // the script looks at the exit code
	}()
	s.procs[args[0]] = p
}

func proc(ts *testscript.TestScript, name string) *scriptProc {
	p := ts.Value(scriptKey{}).(*script).procs[name]
	if p == nil {
		ts.Fatalf("no program was started as %s", name)
	}
	return p
}

// cmdAwait: "await NAME REGEXP" waits until the output of a program matches,
// behind what an earlier await has matched.
func cmdAwait(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 || neg {
		ts.Fatalf("usage: await NAME REGEXP")
	}
	p := proc(ts, args[0])
	re, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	deadline := time.NewTimer(scriptPatience)
	defer deadline.Stop()
	for ended := false; ; {
		ok, changed := p.match(re)
		if ok {
			return
		}
		if ended {
			ts.Fatalf("%s ended without printing %s:\n%s", args[0], args[1], p.output())
		}
		select {
		case <-changed:
		case <-p.done:
			ended = true
		case <-deadline.C:
			ts.Fatalf("%s did not print %s:\n%s", args[0], args[1], p.output())
		}
	}
}

// cmdSignal: "signal NAME INT|TERM|KILL|STOP|CONT".
func cmdSignal(ts *testscript.TestScript, _ bool, args []string) {
	signals := map[string]syscall.Signal{
		"INT": syscall.SIGINT, "TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL, "STOP": syscall.SIGSTOP, "CONT": syscall.SIGCONT,
	}
	if len(args) != 2 || signals[args[1]] == 0 {
		ts.Fatalf("usage: signal NAME INT|TERM|KILL|STOP|CONT")
	}
	ts.Check(proc(ts, args[0]).cmd.Process.Signal(signals[args[1]]))
}

// cmdEnded: "ended NAME CODE [WITHIN]" waits for the end of a program, and keeps
// its output in the file NAME.
func cmdEnded(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: ended NAME CODE [WITHIN]")
	}
	p := proc(ts, args[0])
	within := scriptPatience
	if len(args) == 3 {
		d, err := time.ParseDuration(args[2])
		ts.Check(err)
		within = d
	}
	select {
	case <-p.done:
	case <-time.After(within):
		ts.Fatalf("%s did not end within %v:\n%s", args[0], within, p.output())
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(p.output()), 0o600))
	if got := strconv.Itoa(p.cmd.ProcessState.ExitCode()); got != args[1] {
		ts.Fatalf("%s ended with code %s, want %s:\n%s", args[0], got, args[1], p.output())
	}
}

// cmdExits: "exits CODE PROGRAM ARG..." runs a program, checks its exit code and
// puts its output into the files out and err.
func cmdExits(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM ARG...")
	}
	var out, msg bytes.Buffer
	cmd := program(ts, args[1:])
	cmd.Stdout, cmd.Stderr = &out, &msg
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		ts.Check(err)
	}
	ts.Logf("%s%s", out.String(), msg.String())
	for name, b := range map[string][]byte{"out": out.Bytes(), "err": msg.Bytes()} {
		ts.Check(os.WriteFile(ts.MkAbs(name), b, 0o600))
	}
	if got := strconv.Itoa(cmd.ProcessState.ExitCode()); got != args[0] {
		ts.Fatalf("exit code %s, want %s", got, args[0])
	}
}

// cmdEventually: "eventually REGEXP PROGRAM ARG..." runs a program again and again
// until its standard output matches.
func cmdEventually(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: eventually REGEXP PROGRAM ARG...")
	}
	re, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	deadline := time.NewTimer(scriptPatience)
	defer deadline.Stop()
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	for {
		out, err := program(ts, args[1:]).CombinedOutput()
		if err == nil && re.Match(out) {
			ts.Logf("%s", out)
			return
		}
		select {
		case <-poll.C:
		case <-deadline.C:
			ts.Fatalf("no output that matches %s; the last: %v\n%s", args[0], err, out)
		}
	}
}

// cmdFeed: "feed N" publishes the first N flights that are missing to FLIGHTS,
// which it creates.
func cmdFeed(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: feed N")
	}
	n, err := strconv.ParseUint(args[0], 10, 64)
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), scriptPatience)
	defer cancel()
	conn, err := bus.Connect(ctx, bus.Config{URL: ts.Getenv("NATS_URL")})
	ts.Check(err)
	defer conn.Close()
	ts.Check(feedFlights(ctx, conn, ts.Getenv("EXAMPLES")+"/flights", n))
}

// feedFlights publishes flights until n of them are in the stream.
func feedFlights(ctx context.Context, conn *bus.Conn, dir string, n uint64) error {
	spec, err := flowspec.Load(dir)
	if err != nil {
		return err
	}
	f, err := openFeed(ctx, conn, spec.Sources, "FLIGHTS", spec.Dev.Feed["FLIGHTS"], 0)
	if err != nil {
		return err
	}
	if f.before >= n {
		return nil
	}
	f.most = n
	if err := f.run(ctx, conn); err != nil {
		return err
	}
	if got := f.done.Load(); got != n {
		return fmt.Errorf("fed %d flights, want %d", got, n)
	}
	return nil
}
