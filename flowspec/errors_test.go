package flowspec

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestErrors checks the message and the place of each kind of mistake.
func TestErrors(t *testing.T) {
	const file = "testdata/errors.txtar"
	a := readArchive(t, file)
	for i := 0; i+1 < len(a.files); i += 2 {
		yaml, want := a.files[i], &a.files[i+1]
		t.Run(strings.TrimSuffix(yaml.name, ".yaml"), func(t *testing.T) {
			_, err := Parse(yaml.name, []byte(yaml.data))
			if err == nil {
				t.Fatal("no error")
			}
			if *update {
				want.data = err.Error() + "\n"
			}
			if diff := cmp.Diff(want.data, err.Error()+"\n"); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			checkErrors(t, []byte(yaml.data), err)
		})
	}
	if *update {
		if err := os.WriteFile(file, []byte(a.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// checkErrors checks that every error has its place in the file.
func checkErrors(tb testing.TB, src []byte, err error) {
	tb.Helper()
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		tb.Fatalf("%T is not joined", err)
	}
	lines := strings.Count(string(src), "\n") + 1
	for i, e := range joined.Unwrap() {
		var mistake *Error
		if !errors.As(e, &mistake) {
			if i == maxErrors {
				continue
			}
			tb.Fatalf("%v is a %T", e, e)
		}
		if mistake.Line < 1 || mistake.Line > lines || mistake.Column < 1 || mistake.Msg == "" {
			tb.Errorf("%+v in a file of %d lines", mistake, lines)
		}
	}
}

func TestParse_ManyErrors(t *testing.T) {
	var src strings.Builder
	for i := range maxErrors + 10 {
		src.WriteString(strings.Repeat("x", i+1) + ": 1\n")
	}
	_, err := Parse("many.yaml", []byte(src.String()))
	if n := strings.Count(err.Error(), "\n") + 1; n != maxErrors+1 {
		t.Errorf("%d lines of errors", n)
	}
	if !strings.HasSuffix(err.Error(), "many.yaml: and 13 more") {
		t.Errorf("%s", err)
	}
	checkErrors(t, []byte(src.String()), err)
}

func TestParse_TooLarge(t *testing.T) {
	for _, src := range []string{
		strings.Repeat("#", maxFile+1),
		strings.Repeat("[", maxFile),
		strings.Repeat("{", maxFile),
		strings.Repeat("- ", maxFile/2),
		strings.Repeat("? ", maxFile/2),
		strings.Repeat("!a ", maxFile/3),
		strings.Repeat("&a ", maxFile/3),
		"flow: f\nsource: {stream: IN}\nsteps:\n  - filter: '" + strings.Repeat("(", maxExpression+1) + "'\n",
		"flow: f\nsource: {stream: IN}\nsteps:\n  - filter: '" + strings.Repeat("(", maxExpression-1) + "'\n",
		"flow: f\nsource: {stream: IN}\nsteps:\n  - filter: '" + strings.Repeat("-", maxExpression-1) + "'\n",
		"flow: f\nsource: {stream: IN}\nsteps:\n  - filter: '" + strings.Repeat("not ", maxExpression/4-1) + "x'\n",
		"flow: f\nsource: {stream: IN}\nsteps:\n  - filter: 'x" + strings.Repeat("+x", maxExpression/2-1) + "'\n",
	} {
		_, err := Parse("large.yaml", []byte(src))
		if err == nil {
			t.Fatalf("%.80q: no error", src)
		}
		checkErrors(t, []byte(src), err)
	}
}

func TestEditDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"a", "", 1},
		{"", "abc", 3},
		{"flights", "fligths", 1},
		{"kitten", "sitting", 3},
		{"stream", "strem", 1},
		{"ca", "abc", 3},
		{strings.Repeat("x", 65), "x", 64},
	} {
		if got := editDistance(c.a, c.b); got != c.want {
			t.Errorf("editDistance(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
