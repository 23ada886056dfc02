package kvsnap

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"natsflow/bus"
)

// The points at which Config.Probe is called.
const (
	// PointChunkWritten: a batch of chunks is stored, nothing refers to it yet.
	PointChunkWritten = "chunk-written"
	// PointEntryUnacked: an entry of any kind was sent, its answer was not
	// looked at.
	PointEntryUnacked = "entry-appended-unacked"
	// PointCommitted: a claim, commit or release is stored.
	PointCommitted = "committed"
	// PointBaseWritten: a base is stored, nothing is purged yet.
	PointBaseWritten = "base-written"
	// PointPurged: what the base made superfluous is gone.
	PointPurged = "purged"
)

const (
	defaultChunkSize    = 512 << 10
	defaultMinBaseBytes = 256 << 10
	defaultMaxEntries   = 500
)

// Config says where the snapshots of a flow are kept. Bucket and Flow are
// required.
type Config struct {
	// Bucket of the flow.
	Bucket *bus.Bucket
	// Flow is the flow's name. It is in every entry and chunk.
	Flow string
	// Owner is the name of this process in the entries that it writes. For
	// people: nothing depends on its being unique. Defaults to "".
	Owner string
	// Probe is called at the Point… places, for tests: an error makes the
	// operation stop dead there, as a crash of the process would, and the log
	// is of no use afterwards. It may be called from several goroutines.
	// Defaults to none.
	Probe func(ctx context.Context, point string, task TaskID) error
	// Logger gets what an operator may want to know. Defaults to none.
	Logger *slog.Logger
	// ChunkSize is the most bytes of body in one message, at most 8 MiB. With
	// about 1 KiB for the header it must fit the server's max_payload.
	// Defaults to 512 KiB.
	ChunkSize int
	// MinBaseBytes: a base is not due before the deltas since the last one
	// have this many bytes (see [Log.BaseDue]). Defaults to 256 KiB.
	MinBaseBytes int
	// MaxEntries: a base may be due before MinBaseBytes when there are more
	// entries than this since the last one (see [Log.BaseDue]). Appends get
	// slower with the length of the log. Defaults to 500.
	MaxEntries int
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.ChunkSize == 0 {
		c.ChunkSize = defaultChunkSize
	}
	if c.MinBaseBytes == 0 {
		c.MinBaseBytes = defaultMinBaseBytes
	}
	if c.MaxEntries == 0 {
		c.MaxEntries = defaultMaxEntries
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.Flow == "" {
		errs = append(errs, errors.New("no flow given"))
	}
	if c.ChunkSize < 1 || c.ChunkSize > maxPiece {
		errs = append(errs, fmt.Errorf("chunk size %d is not between 1 and %d", c.ChunkSize, maxPiece))
	}
	if c.MinBaseBytes < 0 || c.MaxEntries < 0 {
		errs = append(errs, fmt.Errorf("negative bound: MinBaseBytes %d, MaxEntries %d", c.MinBaseBytes, c.MaxEntries))
	}
	return errors.Join(errs...)
}

// bucket is what the store needs of a bus.Bucket.
type bucket interface {
	Append(ctx context.Context, key string, value []byte, filter string, last uint64) (uint64, error)
	PutMany(ctx context.Context, items []bus.Item) error
	Last(ctx context.Context, filter string) (bus.Item, error)
	Read(ctx context.Context, filters []string, from, through uint64, fn func(bus.Item) error) error
	Stats(ctx context.Context, filters []string, fn func(bus.Stat) error) error
	Purge(ctx context.Context, filter string, before uint64) error
}

// Store is the snapshot store of one flow. It is safe for concurrent use and
// has no goroutines of its own; there is nothing to close.
type Store struct {
	cfg    Config
	bucket bucket
	codec  *codec
	err    error // of the configuration, returned by every operation
}

// New makes a store. A mistake in the configuration is returned by the first
// operation.
func New(cfg Config) *Store {
	s := newStore(cfg.Bucket, cfg)
	if cfg.Bucket == nil {
		s.err = errors.Join(s.err, errors.New("snapshot store: no bucket given"))
	}
	return s
}

func newStore(b bucket, cfg Config) *Store {
	cfg = cfg.withDefaults()
	s := &Store{cfg: cfg, bucket: b}
	if err := cfg.validate(); err != nil {
		s.err = fmt.Errorf("snapshot store: %w", err)
	}
	c, err := newCodec()
	if err != nil {
		s.err = errors.Join(s.err, fmt.Errorf("snapshot store: %w", err))
	}
	s.codec = c
	return s
}

// stopped is the error of a probe: the operation ends as if the process had.
type stopped struct{ err error }

func (e *stopped) Error() string { return "stopped by probe: " + e.err.Error() }
func (e *stopped) Unwrap() error { return e.err }

func (s *Store) probe(ctx context.Context, point string, t TaskID) error {
	if s.cfg.Probe == nil {
		return nil
	}
	if err := s.cfg.Probe(ctx, point, t); err != nil {
		return &stopped{err}
	}
	return nil
}

// newHeader begins an entry of this process.
func (s *Store) newHeader(kind string, t TaskID, n, generation uint64, head Head) *header {
	return &header{
		Kind: kind, Flow: s.cfg.Flow, Task: t.String(), N: n, Generation: generation,
		Owner: s.cfg.Owner, Time: time.Now().UTC(), Head: head,
	}
}

func newNonce() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, says crypto/rand
	return hex.EncodeToString(b[:])
}
