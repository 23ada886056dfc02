package layout

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "natsflow"

// room says what the packages of one folder may import.
type room struct {
	ours    []string // of this module, itself apart
	test    []string // of this module, in tests only, in addition
	nats    bool     // nats.go and nats-server
	natsT   bool     // the same, in tests only
	stdOnly bool     // nothing but the standard library, tests apart
}

// rooms are all of them, from the bottom up: imports go down only. The longest
// prefix of a folder's path is its room.
var rooms = map[string]room{
	// What to import and what to hide from: nothing in flow knows where records
	// come from.
	"flow":          {stdOnly: true},
	"flow/flowtest": {ours: []string{"flow"}},
	"bus":           {nats: true, test: []string{"testenv"}},

	"kvsnap":   {ours: []string{"bus"}, test: []string{"testenv"}},
	"control":  {ours: []string{"bus"}, test: []string{"testenv"}},
	"flowspec": {ours: []string{"flow"}},
	"worker":   {ours: []string{"flow", "control", "kvsnap", "bus"}, test: []string{"testenv"}},

	"cmd":      {ours: []string{"flowspec", "flow", "worker", "control", "kvsnap", "bus", "testenv/embed"}, test: []string{"testenv"}},
	"examples": {ours: []string{"flowspec", "flow", "worker", "control", "bus"}, test: []string{"testenv"}},

	// Servers for tests. The yardstick of the benchmarks is a hand-written loop
	// on nats.go.
	"testenv":         {nats: true},
	"bench":           {ours: []string{"flowspec", "flow", "worker", "control", "kvsnap", "bus", "examples/nexmark/gen"}, test: []string{"testenv"}, natsT: true},
	"internal/layout": {stdOnly: true},
}

func TestImports(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	seen := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || d.Name() == "tools" || (path != root && strings.HasPrefix(d.Name(), "."))):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		seen++
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if why := forbidden(filepath.ToSlash(rel), imported); why != "" {
				t.Errorf("%s imports %s: %s", rel, imported, why)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 10 {
		t.Fatalf("looked at %d files in %s, so not at the module", seen, root)
	}
}

// forbidden says why a file, named from the module's root, may not import a
// package, or nothing.
func forbidden(file, imported string) string {
	name, r, ok := roomOf(file)
	if !ok {
		return "its folder is not in the table of rooms"
	}
	test := strings.HasSuffix(file, "_test.go")
	first, _, _ := strings.Cut(imported, "/")
	switch {
	case first == module:
		target := strings.TrimPrefix(imported, module+"/")
		allowed := append([]string{name}, r.ours...)
		if test {
			allowed = append(allowed, r.test...)
		}
		if !slices.ContainsFunc(allowed, func(a string) bool { return target == a || strings.HasPrefix(target, a+"/") }) {
			return name + " may import of ours: " + strings.Join(allowed, ", ")
		}
	case !strings.Contains(first, "."):
		// The standard library.
	case strings.HasPrefix(imported, "github.com/nats-io/"):
		if !r.nats && (!test || !r.natsT) {
			return "only bus and testenv talk to NATS"
		}
	case r.stdOnly && !test:
		return name + " is made of the standard library only"
	}
	return ""
}

// roomOf returns the room with the longest name that a file is in.
func roomOf(file string) (name string, r room, ok bool) {
	for n, candidate := range rooms {
		if strings.HasPrefix(file, n+"/") && len(n) > len(name) {
			name, r, ok = n, candidate, true
		}
	}
	return name, r, ok
}

func TestForbidden(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		file, imported string
		want           bool
	}{
		{"flow/a.go", "strings", false},
		{"flow/a.go", "github.com/google/uuid", true},
		{"flow/a_test.go", "github.com/google/go-cmp/cmp", false},
		{"flow/a_test.go", "natsflow/bus", true},
		{"bus/a.go", "github.com/nats-io/nats.go", false},
		{"bus/a.go", "natsflow/testenv", true},
		{"bus/a_test.go", "natsflow/testenv", false},
		{"worker/a_test.go", "github.com/nats-io/nats.go", true},
		{"worker/a.go", "natsflow/flowspec", true},
		{"kvsnap/a.go", "natsflow/control", true},
		{"cmd/natsflow/a.go", "natsflow/testenv/embed", false},
		{"cmd/natsflow/a.go", "natsflow/testenv", true},
		{"testenv/process.go", "natsflow/testenv/internal/clock", false},
		{"testenv/process.go", "natsflow/bus", true},
		{"bench/w1_test.go", "github.com/nats-io/nats.go", false},
		{"bench/doc.go", "github.com/nats-io/nats.go", true},
		{"util/a.go", "strings", true},
	} {
		if why := forbidden(tc.file, tc.imported); (why != "") != tc.want {
			t.Errorf("%s importing %s: forbidden is %q, want %v", tc.file, tc.imported, why, tc.want)
		}
	}
}

// TestBinary keeps package testing, with its flags, out of the command.
func TestBinary(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/...")
	cmd.Dir, cmd.Stderr = filepath.Join("..", ".."), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(strings.Fields(string(out)), "testing") {
		t.Fatal("the command links package testing: does it import testenv instead of testenv/embed?")
	}
}
