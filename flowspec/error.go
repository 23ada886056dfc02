package flowspec

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Error is one mistake in a flow file. [Load] and [Parse] report all that they
// find together, by errors.Join.
type Error struct {
	// File as given to Load or Parse.
	File string
	// Line and Column of the mistake, from 1; the column counts characters.
	Line, Column int
	// Msg says what is wrong.
	Msg string
	// Hint says what may have been meant; may be empty.
	Hint string
}

// Error returns "file:line:column: message; hint".
func (e *Error) Error() string {
	s := fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Msg)
	if e.Hint != "" {
		s += "; " + e.Hint
	}
	return s
}

// maxErrors bounds how many mistakes of one file are reported.
const maxErrors = 50

// position is a place in the file, line and column from 1.
type position struct{ line, column int }

func (p position) compare(q position) int {
	return cmp.Or(cmp.Compare(p.line, q.line), cmp.Compare(p.column, q.column))
}

// reporter collects the mistakes of a file.
type reporter struct {
	file   string
	errors []*Error
}

func (r *reporter) errorf(at position, hint, format string, args ...any) {
	e := &Error{File: r.file, Line: at.line, Column: at.column, Msg: fmt.Sprintf(format, args...), Hint: hint}
	for _, have := range r.errors {
		if *have == *e {
			return
		}
	}
	r.errors = append(r.errors, e)
}

// err joins what was collected, in the order of the file.
func (r *reporter) err() error {
	slices.SortStableFunc(r.errors, func(a, b *Error) int {
		return position{a.Line, a.Column}.compare(position{b.Line, b.Column})
	})
	var errs []error
	for i, e := range r.errors {
		if i == maxErrors {
			errs = append(errs, fmt.Errorf("%s: and %d more", r.file, len(r.errors)-i))
			break
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// didYouMean suggests the nearest of the possible words, or lists them when none
// is near and they are few.
func didYouMean(word string, possible []string) string {
	if best := nearest(word, possible); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	if n := len(possible); n == 0 || n > 10 {
		return ""
	}
	return "possible: " + strings.Join(possible, ", ")
}

// nearest returns the word with the smallest edit distance, "" if none is near.
func nearest(word string, possible []string) string {
	best, least := "", max(1, len(word)/3)+1
	for _, p := range possible {
		if d := editDistance(strings.ToLower(word), strings.ToLower(p)); d < least {
			best, least = p, d
		}
	}
	return best
}

// editDistance counts the insertions, deletions, replacements and swaps of
// neighbours that turn a into b (the restricted Damerau-Levenshtein distance).
func editDistance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	var before, last, row [65]int
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
