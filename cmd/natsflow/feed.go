package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"natsflow/bus"
	"natsflow/flowspec"
)

// maxLine bounds a line of a feed, in bytes: what the server takes by default.
const maxLine = 1 << 20

// feed publishes the lines of a file to a source stream, each once: a line's
// message id is <file>:<line>, and the ids that are in the stream tell which
// lines are still missing, whenever and however an earlier feed ended. So other
// messages in the stream, such as those of `nats pub`, do no harm.
type feed struct {
	stream string
	spec   flowspec.Feed
	name   string // of the file, in message ids
	limit  *rate.Limiter

	// most ends the feed when so many lines are in the stream; 0 for all.
	most uint64

	// total is the number of lines that are not empty.
	total uint64
	// have tells the lines that are in the stream, by number from 0.
	have bitmap
	// before is how many lines were in the stream at the start, done how many
	// are there now, as far as they have been sent.
	before uint64
	done   atomic.Uint64
}

// bitmap is a set of small numbers.
type bitmap []uint64

func (b bitmap) has(i int) bool { return i/64 < len(b) && b[i/64]&(1<<(i%64)) != 0 }

func (b *bitmap) add(i int) {
	for i/64 >= len(*b) {
		*b = append(*b, 0)
	}
	(*b)[i/64] |= 1 << (i % 64)
}

// openFeed makes sure that the stream is there and finds out what is missing in
// it. perSecond bounds the lines a second, 0 for no bound.
func openFeed(ctx context.Context, conn *bus.Conn, sources []flowspec.Source, stream string, spec flowspec.Feed, perSecond int) (*feed, error) {
	f := &feed{stream: stream, spec: spec, name: filepath.Base(spec.File), limit: rate.NewLimiter(rate.Inf, 1)}
	if perSecond > 0 {
		f.limit = rate.NewLimiter(rate.Limit(perSecond), max(perSecond/20, 1))
	}
	var filters []string
	for _, src := range sources {
		if stream == src.Stream {
			filters = src.Subjects
		}
	}
	if _, err := ensureStream(ctx, conn, stream, feedSubjects(spec.Wildcard(), filters)); err != nil {
		return nil, err
	}
	var numbers []int
	err := f.each(ctx, func(n int, _ []byte) error {
		numbers = append(numbers, n)
		return nil
	})
	if err != nil {
		return nil, err
	}
	f.total = uint64(len(numbers))
	if err := f.scan(ctx, conn); err != nil {
		return nil, err
	}
	for _, n := range numbers {
		if f.have.has(n) {
			f.before++
		}
	}
	f.done.Store(f.before)
	return f, nil
}

// feedSubjects are the subjects of a stream that takes what a feed publishes, of which
// its source may read a part only. They do not overlap where the filters of the source
// do not.
func feedSubjects(wildcard string, filters []string) []string {
	if slices.ContainsFunc(filters, func(f string) bool { return covers(f, wildcard) }) {
		return filters
	}
	all := []string{streamSubject(wildcard)}
	for _, f := range filters {
		if !covers(all[0], f) {
			all = append(all, f)
		}
	}
	return all
}

// covers tells whether a subject with wildcards takes all that another one does.
func covers(wide, narrow string) bool {
	w, n := strings.Split(wide, "."), strings.Split(narrow, ".")
	for i, token := range w {
		switch {
		case token == ">":
			return len(n) > i
		case i >= len(n) || n[i] == ">" || (token != "*" && token != n[i]):
			return false
		}
	}
	return len(w) == len(n)
}

// streamSubject is what a stream takes so that it takes what a template makes,
// and what a person is likely to publish there by hand.
func streamSubject(wildcard string) string {
	tokens := strings.Split(wildcard, ".")
	if i := slices.Index(tokens, "*"); i > 0 {
		return strings.Join(tokens[:i], ".") + ".>"
	}
	return wildcard
}

// ensureStream creates a stream unless there is one of that name.
func ensureStream(ctx context.Context, conn *bus.Conn, name string, subjects []string) (bus.StreamInfo, error) {
	info, err := conn.Stream(ctx, name)
	if errors.Is(err, bus.ErrNotFound) {
		info, err = conn.CreateStream(ctx, bus.StreamConfig{Name: name, Subjects: subjects, Description: "source, made by natsflow dev"})
	}
	return info, err
}

// each calls fn for each line that is not empty, with its number from 0.
func (f *feed) each(ctx context.Context, fn func(n int, line []byte) error) error {
	file, err := os.Open(f.spec.File)
	if err != nil {
		return fmt.Errorf("feed: %w", err)
	}
	defer file.Close() //nolint:errcheck // nothing was written
	var r io.Reader = bufio.NewReaderSize(file, 1<<16)
	if strings.HasSuffix(f.spec.File, ".gz") {
		if r, err = gzip.NewReader(r); err != nil {
			return fmt.Errorf("feed %s: %w", f.spec.File, err)
		}
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 1<<16), maxLine)
	n := 0
	for ; lines.Scan(); n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		line := bytes.TrimSuffix(lines.Bytes(), []byte("\r"))
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		if err := fn(n, line); err != nil {
			return fmt.Errorf("feed %s, line %d: %w", f.spec.File, n+1, err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("feed %s, line %d: %w", f.spec.File, n+1, err)
	}
	return nil
}

// scan finds the lines that are in the stream.
func (f *feed) scan(ctx context.Context, conn *bus.Conn) error {
	err := readStream(ctx, conn, bus.CursorConfig{Stream: f.stream}, func(m *bus.Msg) {
		for _, id := range m.Header["Nats-Msg-Id"] {
			number, ok := strings.CutPrefix(id, f.name+":")
			if n, err := strconv.Atoi(number); ok && err == nil && n > 0 {
				f.have.add(n - 1)
			}
		}
	})
	if err != nil {
		return fmt.Errorf("look for what is fed: %w", err)
	}
	return nil
}

// errEnd ends the reading of a stream.
var errEnd = errors.New("end")

// readStream reads what is in a stream now.
func readStream(ctx context.Context, conn *bus.Conn, cfg bus.CursorConfig, fn func(*bus.Msg)) error {
	info, err := conn.Stream(ctx, cfg.Stream)
	if err != nil || info.Msgs == 0 {
		return err
	}
	cfg.Name = "natsflow-look"
	cursor, err := conn.OpenCursor(ctx, cfg)
	if err != nil {
		return err
	}
	closing := context.WithoutCancel(ctx)
	defer func() {
		bounded, cancel := context.WithTimeout(closing, time.Second)
		defer cancel()
		_ = cursor.Close(bounded) // it goes by itself after a while
	}()
	if through, err := cursor.CaughtUp(ctx); err != nil || through >= info.LastSeq {
		return err // nothing matches
	}
	err = cursor.Run(ctx, func(m *bus.Msg) error {
		if m.Seq <= info.LastSeq {
			fn(m)
		}
		if m.Seq >= info.LastSeq || m.Pending == 0 {
			return errEnd
		}
		return nil
	})
	if errors.Is(err, errEnd) {
		return nil
	}
	return err
}

// run publishes the lines that are missing. It returns nil when all are stored,
// and the cause when ctx ends before.
func (f *feed) run(ctx context.Context, conn *bus.Conn) error {
	out := conn.NewFeeder(0)
	var subject []byte
	err := f.each(ctx, func(n int, line []byte) error {
		if f.have.has(n) || (f.most > 0 && f.done.Load() >= f.most) {
			return nil
		}
		if err := f.limit.Wait(ctx); err != nil {
			return err
		}
		var err error
		if subject, err = f.spec.AppendSubject(subject[:0], line); err != nil {
			return err
		}
		if err := out.Publish(string(subject), f.name+":"+strconv.Itoa(n+1), line); err != nil {
			return err
		}
		f.done.Add(1)
		return nil
	})
	// Also what was sent before ctx ended is waited for, within a bound, so that
	// the number that is shown is true. What is not stored, the next feed finds.
	flush := ctx
	if ctx.Err() != nil {
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		flush = bounded
	}
	if ferr := out.Flush(flush); err == nil && ferr != nil {
		err = fmt.Errorf("feed %s: %w", f.spec.File, ferr)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
