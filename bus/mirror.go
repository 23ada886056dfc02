package bus

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// mirrorGrace is by how much a mirror keeps messages longer than its origin, so that it never lacks what that still has.
const mirrorGrace = time.Minute

// Transform is a subject transform: what matches Source is stored under Destination.
type Transform struct{ Source, Destination string }

// MirrorConfig is a mirror of a stream with other subjects.
type MirrorConfig struct {
	Name   string
	Origin string
	// Transforms also filter: what no Source of them matches is left out.
	Transforms []Transform
	// Replicas defaults to 1.
	Replicas    int
	Description string
	Metadata    map[string]string
}

// EnsureMirror looks for a mirror and creates it if there is none. It has the sequences and timestamps of its origin,
// file storage, and keeps messages for as long as the origin does, and a little longer; when the limits of the origin
// have changed, those of the mirror are changed. It returns ErrExists if there is another stream of that name.
func (c *Conn) EnsureMirror(ctx context.Context, cfg MirrorConfig) (info StreamInfo, created bool, err error) {
	origin, err := c.streamInfo(ctx, cfg.Origin)
	if err != nil {
		return info, false, classify("looking at stream "+cfg.Origin, err)
	}
	want := mirrorStream(cfg, origin.Config)
	is, err := c.streamInfo(ctx, cfg.Name)
	if err = classify("looking at mirror "+cfg.Name, err); isClass(err, ErrNotFound) {
		if info, err = c.createStream(ctx, want); !isClass(err, ErrExists) {
			return info, err == nil, err
		}
		// Somebody was faster; what they have created counts.
		is, err = c.createdStream(ctx, cfg.Name)
		err = classify("looking at mirror "+cfg.Name, err)
	}
	if err != nil {
		return info, false, err
	}
	have := is.Config
	if !sameMirror(have.Mirror, want.Mirror) {
		return info, false, fmt.Errorf("%w: stream %s is not the mirror of %s that is needed", ErrExists, cfg.Name, cfg.Origin)
	}
	limited := have
	limited.MaxAge, limited.MaxMsgs, limited.MaxBytes = want.MaxAge, want.MaxMsgs, want.MaxBytes
	limited.MaxMsgsPerSubject = want.MaxMsgsPerSubject
	if limited.MaxAge > 0 {
		limited.Duplicates = min(limited.Duplicates, limited.MaxAge) // or the server refuses it
	}
	if limited.MaxAge == have.MaxAge && limited.MaxMsgs == have.MaxMsgs && limited.MaxBytes == have.MaxBytes &&
		limited.MaxMsgsPerSubject == have.MaxMsgsPerSubject {
		return streamInfo(is), false, nil
	}
	var updated jetstream.StreamInfo
	if err := c.ask(ctx, "STREAM.UPDATE."+cfg.Name, limited, &updated); err != nil {
		return info, false, classify("changing the limits of mirror "+cfg.Name, err)
	}
	return streamInfo(&updated), false, nil
}

func mirrorStream(cfg MirrorConfig, origin jetstream.StreamConfig) jetstream.StreamConfig {
	sc := jetstream.StreamConfig{
		Name: cfg.Name, Mirror: &jetstream.StreamSource{Name: cfg.Origin}, Storage: jetstream.FileStorage,
		Replicas: max(cfg.Replicas, 1), MaxMsgs: origin.MaxMsgs, MaxBytes: -1, MaxMsgsPerSubject: origin.MaxMsgsPerSubject,
		MaxMsgSize: -1, AllowMsgTTL: origin.AllowMsgTTL, Description: cfg.Description, Metadata: cfg.Metadata,
	}
	for _, t := range cfg.Transforms {
		sc.Mirror.SubjectTransforms = append(sc.Mirror.SubjectTransforms, jetstream.SubjectTransformConfig(t))
	}
	if origin.MaxAge > 0 {
		sc.MaxAge = origin.MaxAge + mirrorGrace
	}
	if origin.MaxBytes > 0 {
		// Its subjects are a few bytes longer; the smallest message takes 31.
		sc.MaxBytes = origin.MaxBytes + origin.MaxBytes/4
	}
	return sc
}

func sameMirror(a, b *jetstream.StreamSource) bool {
	return a != nil && a.Name == b.Name && a.External == nil && slices.Equal(a.SubjectTransforms, b.SubjectTransforms)
}

// LastMatching is the sequence of the last message that matches one of the filters (all if there are none), as the
// leader of the stream has it; 0 if there is none.
func (c *Conn) LastMatching(ctx context.Context, stream string, filters []string) (uint64, error) {
	last, err := c.lastMatching(ctx, stream, orAll(filters))
	return last, classify("looking for the last message of stream "+stream, err)
}

func (c *Conn) lastMatching(ctx context.Context, stream string, filters []string) (last uint64, err error) {
	for _, f := range filters {
		m, err := c.lastMsg(ctx, stream, f)
		if err == nil {
			last = max(last, m.Seq)
		} else if !isNoMessage(err) {
			return 0, err
		}
	}
	return last, nil
}

func orAll(filters []string) []string {
	if len(filters) == 0 {
		return []string{">"}
	}
	return filters
}

// StreamNames returns the names of the streams that begin with a prefix.
func (c *Conn) StreamNames(ctx context.Context, prefix string) ([]string, error) {
	var names []string
	for offset := 0; ; {
		var page struct {
			Total   int      `json:"total"`
			Streams []string `json:"streams"`
		}
		if err := c.ask(ctx, "STREAM.NAMES", map[string]int{"offset": offset}, &page); err != nil {
			return nil, classify("listing streams", err)
		}
		for _, name := range page.Streams {
			if strings.HasPrefix(name, prefix) {
				names = append(names, name)
			}
		}
		offset += len(page.Streams)
		if offset >= page.Total || len(page.Streams) == 0 {
			return names, nil
		}
	}
}
