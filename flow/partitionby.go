package flow

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxPartitionToken bounds the positions of [Source.PartitionBy].
const maxPartitionToken = 32

// functionRE finds tokens that are functions in the destination of a transform.
var functionRE = regexp.MustCompile(`^(\{\{|\$[0-9])`)

// Transform is a subject transform of the server: what matches Source is stored
// under Destination (ADR-36).
type Transform struct{ Source, Destination string }

// Transforms returns what a mirror of the source has to do so that each record is
// under its partition and its own subject: <partition>.<subject>. It returns none
// without PartitionBy, and an error when the server's transforms cannot do that.
//
// The server can only hash tokens that are a "*" of a filter. So a ">" is unrolled
// to filters that have a "*" where a partition token is. What is too short to have
// all the tokens is in partition 0.
func (s SourceInfo) Transforms(partitions int) ([]Transform, error) {
	if len(s.PartitionBy) == 0 {
		return nil, nil
	}
	for i, n := range s.PartitionBy {
		if n < 1 || n > maxPartitionToken {
			return nil, fmt.Errorf("partition by token %d: the tokens of a subject count from 1, at most %d", n, maxPartitionToken)
		}
		if slices.Contains(s.PartitionBy[:i], n) {
			return nil, fmt.Errorf("partition by token %d: it is named twice", n)
		}
	}
	subjects := s.Subjects
	if len(subjects) == 0 {
		subjects = []string{">"}
	}
	var all []Transform
	for _, subject := range subjects {
		filters, err := unroll(subject, slices.Max(s.PartitionBy))
		if err != nil {
			return nil, err
		}
		for _, filter := range filters {
			t, err := transform(filter, s.PartitionBy, partitions)
			if err != nil {
				return nil, err
			}
			all = append(all, t)
		}
	}
	return all, nil
}

// unroll returns filters that together are the given one, and of which those for
// subjects of that many tokens have each of them before a ">".
func unroll(filter string, tokens int) ([][]string, error) {
	have := strings.Split(filter, ".")
	last := len(have) - 1
	if have[last] != ">" {
		if len(have) < tokens {
			return nil, fmt.Errorf("partition by token %d: the subjects of the filter %q have only %d tokens", tokens, filter, len(have))
		}
		return [][]string{have}, nil
	}
	if last >= tokens {
		return [][]string{have}, nil
	}
	var filters [][]string
	stem := have[:last:last]
	for len(stem) < tokens {
		stem = append(slices.Clone(stem), "*")
		filters = append(filters, stem)
	}
	return append(filters, append(slices.Clone(stem), ">")), nil
}

// transform makes the transform of an unrolled filter.
func transform(filter []string, by []int, partitions int) (Transform, error) {
	source := strings.Join(filter, ".")
	wildcards := make([]int, len(filter))
	destination := make([]string, len(filter))
	n := 0
	for i, token := range filter {
		destination[i] = token
		switch {
		case token == "*":
			n++
			wildcards[i] = n
			destination[i] = fmt.Sprintf("{{wildcard(%d)}}", n)
		case functionRE.MatchString(token):
			return Transform{}, fmt.Errorf("partition by tokens: the filter %q has the token %q, which is a function in a transform of the server", source, token)
		}
	}
	partition, err := partitionToken(filter, wildcards, by, partitions)
	return Transform{source, partition + "." + strings.Join(destination, ".")}, err
}

// partitionToken returns the first token of a destination.
func partitionToken(filter []string, wildcards, by []int, partitions int) (string, error) {
	var args, literals strings.Builder
	for _, n := range by {
		if n > len(filter) {
			return "0", nil
		}
		if w := wildcards[n-1]; w > 0 {
			fmt.Fprintf(&args, ",%d", w)
		} else {
			literals.WriteString(filter[n-1])
		}
	}
	switch {
	case args.Len() == 0:
		return strconv.Itoa(Partition(literals.String(), partitions)), nil
	case literals.Len() > 0:
		return "", fmt.Errorf("partition by tokens %v: in the filter %q some of them are fixed and some wildcards, and the server can hash wildcards only: leave out the fixed ones (and out of the key)", by, strings.Join(filter, "."))
	}
	return fmt.Sprintf("{{partition(%d%s)}}", partitions, args.String()), nil
}

// PartitionFilter is the filter for the records of one partition in a mirror that
// has [SourceInfo.Transforms].
func PartitionFilter(partition int) string { return strconv.Itoa(partition) + ".>" }

// cutPartition takes the subject in a mirror apart.
func cutPartition(mirrored string, partitions int) (partition int, subject string, err error) {
	token, subject, ok := strings.Cut(mirrored, ".")
	partition, err = strconv.Atoi(token)
	if !ok || err != nil || partition < 0 || partition >= partitions {
		return 0, "", fmt.Errorf("the subject %q does not begin with a partition: the stream is not the mirror that natsflow made", mirrored)
	}
	return partition, subject, nil
}
