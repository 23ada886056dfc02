package flow

import (
	"fmt"
	"slices"
	"strings"
)

// A KV bucket is a stream, KV_<bucket>, with the subjects $KV.<bucket>.<key> (ADR-8).
const (
	bucketStreamPrefix  = "KV_"
	bucketSubjectPrefix = "$KV."
)

// BucketStream is the name of the stream that holds a KV bucket.
func BucketStream(bucket string) string { return bucketStreamPrefix + bucket }

// BucketSubject is the subject of a key of a bucket, which may have wildcards.
func BucketSubject(bucket, key string) string { return bucketSubjectPrefix + bucket + "." + key }

// BucketKey returns the key under which the bucket that is the source of the record
// holds it; empty for a record of another source. It needs no KeyBy, and is known
// wherever [Meta.Subject] is.
func (m *Meta) BucketKey() string {
	rest, ok := strings.CutPrefix(m.Subject, bucketSubjectPrefix)
	if !ok {
		return ""
	}
	_, key, _ := strings.Cut(rest, ".")
	return key
}

// KVUpdate is a change of a key in a KV bucket.
type KVUpdate[T any] struct {
	// Key in the bucket.
	Key string
	// Deleted: the key was deleted or purged, has expired, or got an empty value, which
	// is the same here. Value is the zero value then.
	Deleted bool
	// Value that the key got.
	Value T
}

// DecodeKV makes a decoder for the source of a bucket, see [Source.Bucket], of one
// for its values. The deletion of a key has no payload, so that a decoder of values
// alone would fail at it.
func DecodeKV[T any](value Decoder[T]) Decoder[KVUpdate[T]] {
	if value == nil {
		return nil // which Build reports
	}
	return func(m *Meta, data []byte) (KVUpdate[T], error) {
		u := KVUpdate[T]{Key: m.BucketKey(), Deleted: len(data) == 0}
		if u.Deleted {
			return u, nil
		}
		var err error
		u.Value, err = value(m, data)
		return u, err
	}
}

// resolve checks what a source names, and returns it with the stream and the
// subjects of its bucket if it is one.
func (b *Builder) resolve(src Source) Source {
	src.Subjects = slices.Clone(src.Subjects)
	if src.Bucket == "" {
		if src.Stream == "" {
			b.errorf("source: neither a stream nor a bucket is named")
		}
		if len(src.Keys) > 0 {
			b.errorf("source %q: Keys are those of a Bucket, a stream has Subjects", src.Stream)
		}
		return src
	}
	what := fmt.Sprintf("source bucket %q", src.Bucket)
	if src.Stream != "" || len(src.Subjects) > 0 {
		b.errorf("%s: a source has a Stream with Subjects, or a Bucket with Keys, not both", what)
	}
	if !validBucket(src.Bucket) {
		b.errorf("%s: a bucket has letters, digits, - and _ in its name", what)
	}
	if len(src.PartitionBy) > 0 {
		b.errorf("%s: PartitionBy is for streams: the mirror that the server would sort the records into does not follow a bucket's replaced values", what)
	}
	keys := src.Keys
	if len(keys) == 0 {
		// The stream of a bucket may have other subjects, such as those of fences.
		keys = []string{">"}
	}
	src.Stream, src.Subjects, src.PartitionBy = BucketStream(src.Bucket), nil, nil
	for _, key := range keys {
		if !validKeyPattern(key) {
			b.errorf("%s: %q cannot match a key: letters, digits and -/_=. are possible, * for a token and > for all that follow", what, key)
		}
		src.Subjects = append(src.Subjects, BucketSubject(src.Bucket, key))
	}
	return src
}

// validKeyPattern reports whether p is a key of a bucket, maybe with wildcards.
func validKeyPattern(p string) bool {
	for i := range len(p) {
		if c := p[i]; !kvByte(c) && c != '=' && c != '.' && c != '*' && c != '>' {
			return false
		}
	}
	return validPattern(p) && checkWildcards(p)
}

// checkWildcards refuses wildcards that are a part of a token only.
func checkWildcards(p string) bool {
	for token := range strings.SplitSeq(p, ".") {
		if len(token) > 1 && strings.ContainsAny(token, "*>") {
			return false
		}
	}
	return true
}

// deletion reports that the record at hand is the deletion of a key of the bucket
// that is the source.
func (s *source[T]) deletion(m *Meta) bool { return s.inf.Bucket != "" && len(m.raw) == 0 }

// unmoved gives the record at hand the highest time before it. The deletion of a key
// brings no time along, and must not move the watermark to the time of the server.
func (r *Router) unmoved(m *Meta) {
	m.at, m.mark = r.highest, r.Watermark()
	if r.highest == noTime {
		m.at = m.nanos
	}
}

// Takes reports whether the source reads what stands under a subject.
func (s SourceInfo) Takes(subject string) bool {
	return len(s.Subjects) == 0 || slices.ContainsFunc(s.Subjects, func(p string) bool { return matches(p, []byte(subject)) })
}
