package main

import (
	"errors"
	"fmt"
	"io"

	"natsflow/flow"
	"natsflow/flowspec"
)

// flowFileError is a flow file with mistakes.
type flowFileError struct {
	path  string
	count int
	err   error
}

// Error is the line that comes behind the mistakes.
func (e *flowFileError) Error() string {
	return fmt.Sprintf("%s: %s", e.path, plural(e.count, "mistake"))
}

// Unwrap returns the mistakes.
func (e *flowFileError) Unwrap() error { return e.err }

// print writes one mistake a line, "file:line:column: what".
func (e *flowFileError) print(w io.Writer) { _, _ = fmt.Fprintln(w, e.err) }

// loadFlow reads and builds a flow. Mistakes in the file are a *flowFileError.
func loadFlow(path string) (*flowspec.Spec, *flow.Flow, error) {
	spec, err := flowspec.Load(path)
	if err != nil {
		var mistake *flowspec.Error
		if !errors.As(err, &mistake) {
			return nil, nil, err
		}
		n := 1
		if joined, ok := err.(interface{ Unwrap() []error }); ok {
			n = len(joined.Unwrap())
		}
		return nil, nil, &flowFileError{path: mistake.File, count: n, err: err}
	}
	f, err := spec.Build()
	return spec, f, err
}
