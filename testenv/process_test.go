package testenv

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func TestProcess(t *testing.T) {
	t.Parallel()
	p := StartProcess(t, "max_payload: 2MB")
	url := p.URL()
	nc, js := connect(t, url)
	if nc.ConnectedServerVersion() == "" || nc.MaxPayload() != 2<<20 {
		t.Fatalf("got server %q with max payload %d, want one with 2 MiB", nc.ConnectedServerVersion(), nc.MaxPayload())
	}
	mustStream(t, js)
	mustPublish(t, js, "1")

	p.Freeze()
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := js.Publish(short, "s.a", []byte("2")); err == nil {
		t.Fatal("a frozen server answered")
	}
	p.Thaw()
	mustPublish(t, js, "3") // ordered after the former, which was only late
	wantMsgs(t, js, 3)

	pid := p.PID()
	p.Kill()
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Fatalf("signalling a killed server: %v, want no such process", err)
	}
	if p.PID() != 0 {
		t.Fatal("a killed server has a PID")
	}
	p.Kill() // killing twice is harmless
	p.Restart()
	if p.URL() != url {
		t.Fatalf("URL changed from %s to %s", url, p.URL())
	}
	_, js = connect(t, url)
	wantMsgs(t, js, 3)

	p.Freeze()
	p.Restart() // a frozen server can be killed too
	p.Stop()
	if _, err := nats.Connect(url); err == nil {
		t.Fatal("connected to a server that was stopped")
	}
}

func TestProcess_diesWithParent(t *testing.T) {
	if os.Getenv("TESTENV_CHILD") != "" {
		p := StartProcess(t)
		if err := os.WriteFile(os.Getenv("TESTENV_CHILD"), []byte(p.URL()), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		select {}
	}
	if dieWithParent() == nil {
		t.Log("not on this system: children may outlive a test that panics")
		return
	}
	NatsServer(t) // so that the child finds it built
	file := filepath.Join(t.TempDir(), "url")
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestProcess_diesWithParent$")
	cmd.Env = append(os.Environ(), "TESTENV_CHILD="+file)
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Fatalf("the child ended well: %s", out)
	}
	url, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	addr := strings.TrimPrefix(string(url), "nats://")
	tick := time.NewTicker(processPoll)
	defer tick.Stop()
	for greets(addr) {
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("the server outlived its parent")
		}
	}
}

func TestNatsCLI(t *testing.T) {
	t.Parallel()
	s := StartServer(t)
	_, js := connect(t, s.URL())
	mustStream(t, js)
	cmd := exec.CommandContext(t.Context(), NatsCLI(t), "-s", s.URL(), "pub", "s.a", "hello", "--jetstream")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	wantMsgs(t, js, 1)
}

func TestBuild(t *testing.T) {
	t.Parallel()
	for range 2 {
		out := Build(t, "./testenv/testdata/hello")
		got, err := exec.CommandContext(t.Context(), out).Output()
		if err != nil || string(got) != "hello\n" {
			t.Fatalf("got %q, %v", got, err)
		}
	}
	err := goBuild(moduleRoot(t), filepath.Join(t.TempDir(), "x"), "./testenv/testdata/nothing")
	if err == nil || !strings.Contains(err.Error(), "testdata/nothing") {
		t.Fatalf("got %v, want the go command's complaint", err)
	}
}

func TestBuildFlags(t *testing.T) {
	t.Parallel()
	got := buildFlags("-race -timeout=60m --race=true -cover -mod=readonly")
	if want := "-timeout=60m -mod=readonly"; got != want {
		t.Fatalf("got %q, want %q", got, want)
	}
}
