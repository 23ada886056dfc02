package bus

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Read calls fn for the items of filters (none: all) with a sequence from `from` (0: the first) to `through` (0: the last
// one that is there now), in their order. Marks of deletion are included. Whether there is more to come is decided by
// the leader, never by a replica that may be behind; what is purged meanwhile is not waited for.
func (b *Bucket) Read(ctx context.Context, filters []string, from, through uint64, fn func(Item) error) error {
	return b.read(ctx, b.puller(filters, from, "natsflow-read"), through, func(m *Msg) error { return fn(b.item(m)) })
}

// read runs a puller up to through (0: the last item that is there now).
func (b *Bucket) read(ctx context.Context, p *puller, through uint64, fn func(*Msg) error) error {
	if through == 0 {
		var err error
		if through, err = p.lastMatching(ctx); err != nil {
			return classify("reading bucket "+b.name, err)
		}
	}
	return p.read(ctx, through, fn)
}

// Stat is an item without its value.
type Stat struct {
	Key string
	Seq uint64
	// Size of the value in bytes; 0 of a mark of deletion.
	Size int64
}

// Stats calls fn for the items of filters (none: all) that are there now, in their order, like Read. The server sends
// their sizes and not their values.
func (b *Bucket) Stats(ctx context.Context, filters []string, fn func(Stat) error) error {
	p := b.puller(filters, 0, "natsflow-stat")
	p.cfg.headersOnly = true
	return b.read(ctx, p, 0, func(m *Msg) error {
		size, err := strconv.ParseInt(strings.Join(m.Header[hdrMsgSize], ""), 10, 64)
		if err != nil {
			return fmt.Errorf("reading bucket %s: size of item %d: %w", b.name, m.Seq, err)
		}
		return fn(Stat{Key: strings.TrimPrefix(m.Subject, b.prefix), Seq: m.Seq, Size: size})
	})
}

// List returns the items that match filter as they were at one moment after the call, without those that are deleted, in
// the order of their sequences. An empty filter is all.
func (b *Bucket) List(ctx context.Context, filter string) ([]Item, error) {
	current := make(map[string]Item)
	var filters []string
	if filter != "" {
		filters = []string{filter}
	}
	p := b.puller(filters, 0, "natsflow-list")
	through, err := p.lastMatching(ctx)
	if err != nil {
		return nil, classify("listing bucket "+b.name, err)
	}
	end := &completion{p: p, goal: through}
	if through > 0 {
		err = p.run(ctx, func(m *Msg) error {
			// A key that is written meanwhile comes again.
			if it := b.item(m); it.Deleted {
				delete(current, it.Key)
			} else {
				current[it.Key] = it
			}
			return nil
		}, func() error {
			if err := end.reached(ctx); err != nil {
				return err
			}
			return errDone
		})
		p.finish(ctx)
	}
	if err != nil && !errors.Is(err, errDone) {
		return nil, err
	}
	items := make([]Item, 0, len(current))
	for _, it := range current {
		items = append(items, it)
	}
	slices.SortFunc(items, func(a, b Item) int {
		if a.Seq < b.Seq {
			return -1
		}
		return 1
	})
	return items, nil
}

// Watch calls fn for the items of filter that are there, then once with an Item whose Key is empty, then for every
// change, until ctx ends or fn errs. Deletions and the expiry of a TTL come as Deleted. It survives reconnects; of
// several changes of a key made meanwhile, only the last may come. ErrNotFound when the bucket is gone. An empty filter
// is all.
func (b *Bucket) Watch(ctx context.Context, filter string, fn func(Item) error) error {
	var filters []string
	if filter != "" {
		filters = []string{filter}
	}
	return b.WatchAll(ctx, filters, fn)
}

// WatchAll is Watch over several filters (none: all), with one consumer: what comes is in the order of the bucket's
// sequences over all of them. The server refuses filters of which one covers another.
func (b *Bucket) WatchAll(ctx context.Context, filters []string, fn func(Item) error) error {
	p := b.puller(filters, 0, "natsflow-watch")
	through, err := p.lastMatching(ctx)
	if err != nil {
		return classify("watching bucket "+b.name, err)
	}
	initial, end := true, &completion{p: p, goal: through}
	err = p.run(ctx, func(m *Msg) error { return fn(b.item(m)) }, func() error {
		if !initial {
			return nil
		}
		if err := end.reached(ctx); err != nil {
			return err
		}
		initial = false
		return fn(Item{})
	})
	p.finish(ctx)
	return err
}

// completionRounds bounds how often a list looks for what was written meanwhile. A key that it misses all the same was
// written at least so many times while it was read, each time just before its turn.
const completionRounds = 10

// completion finds the end of what is there. Reading up to the sequence that was the last one when it began is not
// enough: a key that is written again meanwhile goes behind that, and would be missed although it was there all the
// time. Nor does it help that the consumer says that it has no more: it may sit on a replica that is behind, and takes a
// message that is replaced off its count before it adds the new one.
type completion struct {
	p      *puller
	goal   uint64 // a last sequence, as the leader had it
	rounds int
}

// reached is asked when the consumer says that it has no more. It returns nil at the end and errNotYet before it.
func (c *completion) reached(ctx context.Context) error {
	if c.p.last.Load() < c.goal {
		// Nothing more at all is the end, too: what was there has been purged.
		return c.p.reached(ctx, math.MaxUint64)
	}
	if c.rounds++; c.rounds > completionRounds {
		return nil
	}
	last, err := c.p.lastMatching(ctx)
	switch {
	case Retryable(classify("looking for more", err)):
		c.rounds--
		return errNotYet
	case err != nil:
		return classify("reading stream "+c.p.cfg.stream, err)
	case last <= c.p.last.Load():
		return nil
	}
	c.goal = last
	return errNotYet
}

func (b *Bucket) puller(filters []string, from uint64, name string) *puller {
	cfg := pullConfig{stream: b.stream, from: from, name: name, maxMessages: 4096}
	for _, f := range filters {
		cfg.subjects = append(cfg.subjects, b.prefix+f)
	}
	if len(cfg.subjects) == 0 {
		cfg.subjects = []string{b.prefix + ">"} // not the fence messages of a bucket that is a sink
	}
	return newPuller(b.c, cfg)
}

func (b *Bucket) item(m *Msg) Item {
	return Item{
		Key: strings.TrimPrefix(m.Subject, b.prefix), Value: m.Data, Seq: m.Seq, Time: time.Unix(0, m.Time), Deleted: isMarker(m.Header),
	}
}
