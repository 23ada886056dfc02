package main

import (
	"fmt"
	"strings"
)

// hint says what may have been meant by the name of a flow that is not there.
func hint(name string, names []string, server string) string {
	if len(names) == 0 {
		return fmt.Sprintf(": there is no flow on %s; natsflow worker FLOW.yaml starts one", server)
	}
	best, least := "", max(2, len(name)/3)+1
	for _, n := range names {
		if d := distance(name, n); d < least {
			best, least = n, d
		}
	}
	if best != "" {
		return fmt.Sprintf(" (did you mean %q?)", best)
	}
	const most = 10
	more := ""
	if len(names) > most {
		names, more = names[:most], ", …"
	}
	return fmt.Sprintf(": there are %s%s", strings.Join(names, ", "), more)
}

// distance counts the insertions, deletions and replacements between two names
// (Levenshtein). Names of flows are short.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
