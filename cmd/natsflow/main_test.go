package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"natsflow/testenv"
)

var update = flag.Bool("update", false, "rewrite the expected output in testdata/script")

func TestMain(m *testing.M) {
	testscript.Main(leakCheck{m}, map[string]func(){"natsflow": main})
}

// leakCheck looks for goroutines that the tests have left.
type leakCheck struct{ m *testing.M }

// Run implements testscript.TestingM.
func (l leakCheck) Run() int {
	code := l.m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// flightsDir is the folder of the example that most tests run.
func flightsDir(tb testing.TB) string {
	tb.Helper()
	dir, err := filepath.Abs("../../examples/flights")
	if err != nil {
		tb.Fatal(err)
	}
	return dir
}

func TestScripts(t *testing.T) {
	bin := t.TempDir()
	if err := os.Symlink(testenv.NatsCLI(t), filepath.Join(bin, "nats")); err != nil {
		t.Fatal(err)
	}
	examples := filepath.Dir(flightsDir(t))
	testscript.Run(t, testscript.Params{
		Dir:           "testdata/script",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", bin+string(filepath.ListSeparator)+env.Getenv("PATH"))
			env.Setenv("EXAMPLES", examples)
			for _, name := range []string{"HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"} {
				env.Setenv(name, filepath.Join(env.WorkDir, ".home"))
			}
			env.Setenv("NATS_URL", "")
			newScript(t, env)
			return nil
		},
		Cmds: scriptCommands(),
	})
}
