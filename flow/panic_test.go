package flow_test

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"natsflow/flow"
)

// panicsWith runs a flow whose step calls fn, and returns its failure and the text
// of the dead letter of the same record.
func panicsWith(t *testing.T, fn func()) (*flow.PanicError, string) {
	t.Helper()
	step := func(b *flow.Builder) *flow.Builder {
		textTo(flow.Map(keyed(b), func(_ *flow.Meta, v string) (string, error) {
			fn()
			return v, nil
		}, flow.ID("falls")))
		return b
	}
	err := run(t, step(newFlow(stopOnError))).play(record{data: "k a"})
	var failed *flow.StepError
	var p *flow.PanicError
	if !errors.As(err, &failed) || failed.Step != "falls" || !errors.As(err, &p) || !errors.Is(err, flow.ErrPanic) {
		t.Fatalf("the error is %v", err)
	}
	r := run(t, step(newFlow()))
	r.feed("k a")
	letters := r.seal()
	if len(letters) != 1 {
		t.Fatalf("outputs %+v", letters)
	}
	text := letters[0].Headers[flow.HeaderDeadError]
	if text != p.Error() {
		t.Errorf("the dead letter says %q, the error %q", text, p)
	}
	return p, text
}

func fallsOver() { panic(fmt.Errorf("as told")) }

// The text of a panic has its value and its place, and nothing of the stack.
func TestPanicError(t *testing.T) {
	var none map[string]int
	for name, c := range map[string]struct {
		fn   func()
		want string // of the text
		top  string // function at the top of the stack
	}{
		"by a call":       {fallsOver, `step panicked: as told \(at flow/panic_test\.go:\d+\)`, "natsflow/flow_test.fallsOver"},
		"of the runtime":  {func() { none["x"]++ }, `step panicked: assignment to entry in nil map \(at flow/panic_test\.go:\d+\)`, ""},
		"nil":             {func() { _ = (*record)(nil).data }, `step panicked: runtime error: invalid memory .* \(at flow/panic_test\.go:\d+\)`, ""},
		"of the library":  {func() { _ = strings.Repeat("x", -1) }, `step panicked: strings: negative Repeat count \(at flow/panic_test\.go:\d+\)`, "strings.Repeat"},
		"while unwinding": {func() { defer fallsOver(); panic("first") }, `step panicked: as told \(at flow/panic_test\.go:\d+\)`, "natsflow/flow_test.fallsOver"},
	} {
		t.Run(name, func(t *testing.T) {
			p, text := panicsWith(t, c.fn)
			if !regexp.MustCompile("^" + c.want + "$").MatchString(text) {
				t.Errorf("the text is %q", text)
			}
			stack := p.Stack()
			if !strings.HasPrefix(stack, c.top) || !strings.Contains(stack, p.At+"\n") || strings.Contains(stack, "panicError") {
				t.Errorf("place %s, stack:\n%s", p.At, stack)
			}
		})
	}
}
