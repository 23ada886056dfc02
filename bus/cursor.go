package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Msg is one message of a stream. It is valid only during the call that it is given to, except for Data and Header,
// which may be kept.
type Msg struct {
	Subject string
	Data    []byte
	Header  map[string][]string
	// Seq is the sequence in the stream.
	Seq uint64
	// Time is the stream's timestamp, in Unix nanoseconds.
	Time int64
	// Pending is the number of matching messages behind it when it was delivered.
	Pending uint64
}

// CursorConfig says what a cursor reads.
type CursorConfig struct {
	Stream string
	// Subjects filter the stream; they must not overlap. Defaults to everything.
	Subjects []string
	// From is the first sequence that is wanted; a later one is delivered first if that is not there. Defaults to 1.
	From uint64
	// Name begins the names of the consumers, which end in a random part. Defaults to "natsflow".
	Name string
	// MaxMessages bounds the messages that are requested and not yet handled. Defaults to 20,000.
	MaxMessages int
	// MaxBytes bounds their size; at least two messages of the largest size. Defaults to 32 MB.
	MaxBytes int
	// Created is the stream's time of creation: when it is another one, or the stream ends before what was read, Run
	// ends with ErrNotFound. Defaults to no such look.
	Created time.Time
	// Logger defaults to the connection's.
	Logger *slog.Logger
}

// Cursor reads a stream in order, by a disposable pull consumer: in memory, one replica, without acknowledgements, and
// made anew, behind the last message handled, when it is lost or there is any doubt about it. The server's idea of a
// position is never used.
type Cursor struct {
	p *puller
}

// OpenCursor makes the first consumer. It returns ErrNotFound if there is no such stream.
func (c *Conn) OpenCursor(ctx context.Context, cfg CursorConfig) (*Cursor, error) {
	if cfg.Name == "" {
		cfg.Name = "natsflow"
	}
	if !validName(cfg.Name) || !validName(cfg.Stream) {
		return nil, fmt.Errorf("opening cursor %q on stream %q: not a name", cfg.Name, cfg.Stream)
	}
	p := newPuller(c, pullConfig{
		stream: cfg.Stream, subjects: cfg.Subjects, from: cfg.From, name: cfg.Name, maxMessages: cfg.MaxMessages,
		maxBytes: cfg.MaxBytes, log: cfg.Logger, created: cfg.Created,
	})
	if err := p.open(ctx); err != nil {
		p.finish(ctx)
		var user userError
		if errors.As(err, &user) {
			return nil, user.error
		}
		return nil, classify("opening cursor on stream "+cfg.Stream, err)
	}
	return &Cursor{p: p}, nil
}

// Run calls handle for each message, in strictly ascending order of their sequences, none twice, until ctx ends or
// handle errs, and returns the cause. It returns ErrNotFound when the stream is gone. handle may block for as long as
// it likes: that is back-pressure. Run must not be called twice at a time; it may be called again after it has
// returned, and goes on behind the last message that was handled without an error.
func (cu *Cursor) Run(ctx context.Context, handle func(*Msg) error) error {
	return cu.p.run(ctx, handle, nil)
}

// Last is the sequence of the last message handled, or the one before From.
func (cu *Cursor) Last() uint64 { return cu.p.last.Load() }

// CaughtUp returns a sequence such that all matching messages up to it have been handled: the stream's last one, if
// there is nothing left to read, or else the last one handled.
func (cu *Cursor) CaughtUp(ctx context.Context) (through uint64, err error) {
	p := cu.p
	// All from the leader: the consumer may sit on a replica that is behind, and would not know. First the end of the
	// stream, then the last message that matches: when that is handled, all that match up to the end are.
	info, err := p.c.Stream(ctx, p.cfg.stream)
	if err != nil {
		return 0, err
	}
	last := p.last.Load()
	if last >= info.LastSeq {
		return last, nil
	}
	through, err = p.lastMatching(ctx)
	if err != nil {
		return last, classify("looking for the end of stream "+p.cfg.stream, err)
	}
	if last = p.last.Load(); last >= through {
		return max(info.LastSeq, last), nil
	}
	return last, nil
}

// Lacking returns since when Run has had no consumer, which it makes anew, and what came in between last; the zero time
// when it has one. Nothing is read meanwhile.
func (cu *Cursor) Lacking() (since time.Time, err error) {
	cu.p.mu.Lock()
	defer cu.p.mu.Unlock()
	return cu.p.without, cu.p.why
}

// Close deletes the consumer. Run must have returned.
func (cu *Cursor) Close(ctx context.Context) error {
	err := cu.p.shut(ctx)
	if err = classify("closing cursor on stream "+cu.p.cfg.stream, err); isClass(err, ErrNotFound) {
		return nil
	}
	return err
}
