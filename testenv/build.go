package testenv

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/lockedfile"

	"natsflow/testenv/embed"
)

// modulePath is the module whose go.mod names the versions of what is built here.
const modulePath = "natsflow"

// NatsServer returns the path of the nats-server program, in the version that
// go.mod names. It is built at first use and kept in the user's cache folder.
func NatsServer(tb testing.TB) string {
	tb.Helper()
	root := moduleRoot(tb)
	key := "v" + embed.Version
	return must(tb)(cached("nats-server", key, root, "github.com/nats-io/nats-server/v2"))
}

// NatsCLI returns the path of the real nats command, in the version that
// tools/go.mod names. It is built at first use and kept in the user's cache folder.
func NatsCLI(tb testing.TB) string {
	tb.Helper()
	tools := filepath.Join(moduleRoot(tb), "tools")
	key, err := fileKey(filepath.Join(tools, "go.mod"), filepath.Join(tools, "go.sum"))
	if err != nil {
		tb.Fatalf("testenv: %v", err)
	}
	return must(tb)(cached("nats", key, tools, "github.com/nats-io/natscli/nats"))
}

// Build builds a program of this module, e.g. "./cmd/natsflow", with the given
// flags of `go build` (e.g. "-race") into a folder that goes away with the test.
// Tests of one package should share the result.
func Build(tb testing.TB, pkg string, flags ...string) string {
	tb.Helper()
	out := filepath.Join(tb.TempDir(), filepath.Base(pkg))
	if err := goBuild(moduleRoot(tb), out, pkg, flags...); err != nil {
		tb.Fatalf("testenv: %v", err)
	}
	return out
}

// must fails the test on an error. It is curried to take a call's two results.
func must(tb testing.TB) func(string, error) string {
	tb.Helper()
	return func(path string, err error) string {
		tb.Helper()
		if err != nil {
			tb.Fatalf("testenv: %v", err)
		}
		return path
	}
}

// cached returns the path of a program in the user's cache folder, which it
// builds there if need be. Test binaries run in parallel, so a lock file lets
// one of them build while the others wait; the rename makes sure that a build
// that is killed half way leaves nothing that looks complete.
func cached(name, key, dir, pkg string) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	name = fmt.Sprintf("%s-%s-%s-%s-%s", name, key, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	name = strings.ReplaceAll(name, " ", "-") // a development version of Go has some
	path := filepath.Join(cache, name)
	unlock, err := lockedfile.MutexAt(path + ".lock").Lock()
	if err != nil {
		return "", fmt.Errorf("locking %s: %w", path, err)
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	tmp := path + ".tmp" // we have the lock, so nobody else writes it
	if err := goBuild(dir, tmp, pkg); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", fmt.Errorf("moving built program into place: %w", err)
	}
	return path, nil
}

// cacheDir is where built programs are kept. A machine without a home, as some
// CI runners are, gets a folder under the temporary one.
func cacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		base = filepath.Join(os.TempDir(), fmt.Sprintf("cache-%d", os.Getuid()))
	}
	dir := filepath.Join(base, "natsflow-testenv")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("creating cache folder: %w", err)
	}
	return dir, nil
}

// goBuild runs go build in dir. The go command's own output is the error's text.
func goBuild(dir, out, pkg string, flags ...string) error {
	args := append([]string{"build", "-o", out}, flags...)
	cmd := exec.Command("go", append(args, pkg)...) // a build has no deadline but the test's
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PWD="+dir, "GOWORK=off", "GOFLAGS="+buildFlags(os.Getenv("GOFLAGS")))
	var msg bytes.Buffer
	cmd.Stdout, cmd.Stderr = &msg, &msg
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", pkg, err, bytes.TrimSpace(msg.Bytes()))
	}
	return nil
}

// buildFlags leaves out of GOFLAGS what is meant for the tests, not for the
// programs that they run: the race detector makes a server ten times slower, and
// what is built with it must not end up in the cache under the same name.
func buildFlags(goflags string) string {
	return strings.Join(slices.DeleteFunc(strings.Fields(goflags), func(flag string) bool {
		name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
		return slices.Contains([]string{"race", "msan", "asan", "cover", "covermode", "coverpkg"}, name)
	}), " ")
}

// moduleRoot is the folder of our go.mod, found upwards from the package whose
// test runs, or else from where this file was compiled.
func moduleRoot(tb testing.TB) string {
	tb.Helper()
	root, err := findRoot()
	if err != nil {
		tb.Fatalf("testenv: %v", err)
	}
	return root
}

// findRoot is a variable for the sake of OnceValues: the root does not move
// within a process.
var findRoot = sync.OnceValues(func() (string, error) {
	var starts []string
	if wd, err := os.Getwd(); err == nil {
		starts = append(starts, wd)
	}
	if _, file, _, ok := runtime.Caller(0); ok {
		starts = append(starts, filepath.Dir(file))
	}
	for _, dir := range starts {
		for ; ; dir = filepath.Dir(dir) {
			mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
			if err == nil && bytes.HasPrefix(mod, []byte("module "+modulePath+"\n")) {
				return dir, nil
			}
			if dir == filepath.Dir(dir) {
				break
			}
		}
	}
	return "", errors.New("finding the module's root: no go.mod of module " + modulePath + " above " + strings.Join(starts, " or "))
})

// fileKey is a short hash of the files' content.
func fileKey(paths ...string) (string, error) {
	h := sha256.New()
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("reading tool versions: %w", err)
		}
		h.Write(data)
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}
