package flow

import (
	"errors"
	"fmt"
	"path"
	"runtime"
	"strings"
)

// ErrPanic is wrapped by the error of a record whose step panicked.
var ErrPanic = errors.New("step panicked")

// PanicError is a panic of a step, as an error; errors.Is finds [ErrPanic] in it.
// Its text is one that fits a header and a line of a log: the stack is apart.
type PanicError struct {
	// Value that the step panicked with.
	Value any
	// At is the place of the panic: of its first frame outside the standard
	// library (in a build with -trimpath: outside the runtime), the file with its
	// folder, and the line, such as "orders/flow.go:31". "" if there is none.
	At string

	frames []runtime.Frame
}

// maxFrames bounds the stack that is kept of a panic.
const maxFrames = 64

// panicError makes an error of what was recovered. It is called by a deferred
// function, while the frames of the panic are still on the stack.
func panicError(p any) error {
	pcs := make([]uintptr, maxFrames)
	frames, library := panicked(pcs[:runtime.Callers(2, pcs)])
	e := &PanicError{Value: p, frames: frames}
	for _, f := range frames {
		if library == "" || !strings.HasPrefix(f.File, library) {
			folder, file := path.Split(f.File)
			e.At = fmt.Sprintf("%s:%d", path.Join(path.Base(folder), file), f.Line)
			break
		}
	}
	return e
}

// panicked returns the frames from the function that panicked on: those above are
// of the recovery, and of the runtime on its way to it. library is the folder of
// the standard library's sources; a build with -trimpath does not name it. Of a
// panic in a function that was deferred to an earlier one, both are there, and the
// later one, whose value it is, is first.
func panicked(pcs []uintptr) (frames []runtime.Frame, library string) {
	raised := false
	for each := runtime.CallersFrames(pcs); ; {
		f, more := each.Next()
		if f.Function == "runtime.gopanic" && !raised {
			raised, library = true, strings.TrimSuffix(f.File, "runtime/panic.go")
		}
		if raised && (len(frames) > 0 || !strings.HasPrefix(f.Function, "runtime.")) {
			frames = append(frames, f)
		}
		if !more {
			return frames, library
		}
	}
}

// Error names the value and the place.
func (e *PanicError) Error() string {
	text := fmt.Sprintf("%v: %v", ErrPanic, e.Value)
	if e.At != "" {
		text += " (at " + e.At + ")"
	}
	return text
}

// Unwrap returns [ErrPanic].
func (e *PanicError) Unwrap() error { return ErrPanic }

// Stack returns the frames from the function that panicked on, each as two lines
// like those of the runtime: the function, and its file and line.
func (e *PanicError) Stack() string {
	var b strings.Builder
	for _, f := range e.frames {
		fmt.Fprintf(&b, "%s\n\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}
