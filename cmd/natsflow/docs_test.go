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
	"strings"
	"syscall"
	"testing"
	"time"

	"natsflow/testenv"
)

// testCommand is run by .ci/run and not by a test of its own.
const testCommand = "go test ./..."

var (
	shBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")
	// waits are commands that need what a command in the background does first; a
	// person would repeat them.
	waits = regexp.MustCompile(`^(natsflow (status|drain|snapshots|resume)|nats stream get) `)
)

// TestDocs_commands runs the sh blocks of every document, in order, in a copy of
// the repository and against a server of its own.
func TestDocs_commands(t *testing.T) {
	root := filepath.Join("..", "..")
	docs, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob(filepath.Join(root, "examples", "*", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	for _, doc := range append(append([]string{filepath.Join(root, "README.md")}, docs...), more...) {
		text, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		script := docScript(t, root, string(text))
		if script == "" {
			continue
		}
		ran++
		name, err := filepath.Rel(root, doc)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(strings.ReplaceAll(name, string(filepath.Separator), "_"), func(t *testing.T) { runDocScript(t, root, script) })
	}
	if ran == 0 {
		t.Fatal("no document has a command")
	}
}

// docScript makes a bash script of the commands of a document.
func docScript(t *testing.T, root, text string) string {
	t.Helper()
	var b strings.Builder
	for _, block := range shBlock.FindAllStringSubmatch(text, -1) {
		for line := range strings.Lines(block[1]) {
			line = strings.TrimSpace(line)
			switch {
			case line == "":
			case line == testCommand:
				ci, err := os.ReadFile(filepath.Join(root, ".ci", "run"))
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Contains(ci, []byte(testCommand)) {
					t.Errorf(".ci/run does not run %q", testCommand)
				}
			case waits.MatchString(line):
				fmt.Fprintf(&b, "again %s\n", shellQuote(line))
			default:
				fmt.Fprintln(&b, line)
			}
		}
	}
	return b.String()
}

func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

const docPrelude = `set -eu
again() {
	for _ in $(seq 60); do
		if eval "$1"; then return; fi
		sleep 0.5
	done
	return 1
}
set -x
`

func runDocScript(t *testing.T, root, script string) {
	dir := copyRepository(t, root)
	srv := testenv.StartProcess(t)
	gocache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.Symlink(testenv.NatsCLI(t), filepath.Join(bin, "nats")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", docPrelude+script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(),
		"NATS_URL="+srv.URL(), "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"),
		"GOCACHE="+strings.TrimSpace(string(gocache)), "XDG_CACHE_HOME="+t.TempDir(), "XDG_CONFIG_HOME="+t.TempDir())
	// The workers in the background end with the script.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	// A file and not a pipe: a worker that is left in the background would keep the
	// pipe open.
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = out, out
	err = cmd.Run()
	if kerr := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); kerr != nil && !errors.Is(kerr, syscall.ESRCH) {
		t.Error(kerr)
	}
	if err != nil {
		text, rerr := os.ReadFile(out.Name())
		t.Fatalf("%v %v\n%s", err, rerr, text)
	}
}

// copyRepository copies the files of the module, so that commands may write.
func copyRepository(t *testing.T, root string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"go.mod", "go.sum", "cmd", "flowspec", "worker", "control", "kvsnap", "flow", "bus", "testenv", "examples"} {
		out, err := exec.Command("cp", "-r", filepath.Join(root, name), dir).CombinedOutput()
		if err != nil {
			t.Fatalf("copy %s: %v\n%s", name, err, out)
		}
	}
	return dir
}
