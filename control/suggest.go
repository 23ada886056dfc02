package control

import (
	"fmt"
	"strings"
)

// didYouMean returns " (did you mean "x"?)" for the candidate nearest to word,
// or "" when none is near. A member that differs only in case is always near:
// JSON members are matched exactly, which surprises users of encoding/json.
func didYouMean(word string, candidates []string) string {
	best, bestDist := "", len(word)
	limit := 1 + len(word)/4
	for _, c := range candidates {
		if strings.EqualFold(word, c) {
			return fmt.Sprintf(" (did you mean %q?)", c)
		}
		if d := distance(word, c); d <= limit && d < bestDist {
			best, bestDist = c, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %q?)", best)
}

// distance is the optimal string alignment distance: insertions, deletions,
// substitutions and exchanges of neighbours each count one.
func distance(a, b string) int {
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}

// quoted is a list of words for an error message: "a", "b".
func quoted(words []string) string {
	var sb strings.Builder
	for i, w := range words {
		if i > 0 {
			sb.WriteString(", ")
		}
		fmt.Fprintf(&sb, "%q", w)
	}
	return sb.String()
}

// bounded cuts text that may repeat what somebody sent: the record has to stay
// small whatever is published on the control subject.
func bounded(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "…"
}
