package bus

import (
	"context"
	"slices"
	"strings"
	"time"
)

// Read calls fn for the items of filters (none: all) with a sequence from `from` (0: the first) to `through` (0: the last
// one that is there now), in their order. Marks of deletion are included. Whether there is more to come is decided by
// the leader, never by a replica that may be behind; what is purged meanwhile is not waited for.
func (b *Bucket) Read(ctx context.Context, filters []string, from, through uint64, fn func(Item) error) error {
	p := b.puller(filters, from, "natsflow-read")
	if through == 0 {
		var err error
		if through, err = p.lastMatching(ctx); err != nil {
			return classify("reading bucket "+b.name, err)
		}
	}
	return p.read(ctx, through, func(m *Msg) error { return fn(b.item(m)) })
}

// List returns all items that are there now and match filter, without those that are deleted, in the order of their
// sequences. An empty filter is all.
func (b *Bucket) List(ctx context.Context, filter string) ([]Item, error) {
	current := make(map[string]Item)
	var filters []string
	if filter != "" {
		filters = []string{filter}
	}
	err := b.Read(ctx, filters, 0, 0, func(it Item) error {
		// A key that is written meanwhile comes again.
		if it.Deleted {
			delete(current, it.Key)
		} else {
			current[it.Key] = it
		}
		return nil
	})
	if err != nil {
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
// several changes of a key made meanwhile, only the last may come. ErrNotFound when the bucket is gone.
func (b *Bucket) Watch(ctx context.Context, filter string, fn func(Item) error) error {
	var filters []string
	if filter != "" {
		filters = []string{filter}
	}
	p := b.puller(filters, 0, "natsflow-watch")
	through, err := p.lastMatching(ctx)
	if err != nil {
		return classify("watching bucket "+b.name, err)
	}
	initial := true
	err = p.run(ctx, func(m *Msg) error { return fn(b.item(m)) }, func() error {
		if !initial {
			return nil
		}
		if err := p.reached(ctx, through); err != nil {
			return err
		}
		initial = false
		return fn(Item{})
	})
	p.finish(ctx)
	return err
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
