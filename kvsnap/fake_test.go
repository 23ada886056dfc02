package kvsnap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"natsflow/bus"
)

// fakeBucket is a bucket in memory, with faults on demand. It stands for the
// stream's leader: what it says is true.
type fakeBucket struct {
	mu    sync.Mutex
	seq   uint64
	items map[string]bus.Item
	limit int // bytes; 0 means none
	used  int

	written map[string]int // bytes by kind of key, ever

	// The hooks, all optional, are called without the lock.
	onAppend func(key string, store func() (uint64, error)) (uint64, error)
	onPut    func(items []bus.Item, store func() error) error
	onLast   func() (*bus.Item, error)
	onRead   func(item bus.Item)
	onPurge  func(do func()) error
}

func newFake() *fakeBucket {
	return &fakeBucket{items: map[string]bus.Item{}, written: map[string]int{}}
}

func matches(filter, key string) bool {
	if prefix, ok := strings.CutSuffix(filter, ">"); ok && !strings.Contains(prefix, "*") {
		return strings.HasPrefix(key, prefix)
	}
	f, k := strings.Split(filter, "."), strings.Split(key, ".")
	for i, part := range f {
		switch {
		case part == ">":
			return len(k) > i
		case i >= len(k) || (part != "*" && part != k[i]):
			return false
		}
	}
	return len(f) == len(k)
}

func (b *fakeBucket) Append(ctx context.Context, key string, value []byte, filter string, last uint64) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("%w: %w", bus.ErrUnknownOutcome, err)
	}
	value = bytes.Clone(value)
	store := func() (uint64, error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		head, _ := b.lastOf(filter)
		if head.Seq != last {
			return 0, fmt.Errorf("%w: last is %d, not %d", bus.ErrFenced, head.Seq, last)
		}
		return b.store(key, value)
	}
	if b.onAppend != nil {
		return b.onAppend(key, store)
	}
	return store()
}

func (b *fakeBucket) store(key string, value []byte) (uint64, error) {
	old := len(b.items[key].Value)
	if b.limit > 0 && b.used-old+len(value) > b.limit {
		return 0, bus.ErrNoSpace
	}
	b.seq++
	b.used += len(value) - old
	b.written[key[:strings.IndexByte(key, '.')]] += len(value)
	b.items[key] = bus.Item{Key: key, Value: value, Seq: b.seq}
	return b.seq, nil
}

func (b *fakeBucket) PutMany(ctx context.Context, items []bus.Item) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", bus.ErrUnknownOutcome, err)
	}
	items = slices.Clone(items)
	store := func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		var errs []error
		for _, item := range items {
			_, err := b.store(item.Key, bytes.Clone(item.Value))
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	if b.onPut != nil {
		return b.onPut(items, store)
	}
	return store()
}

func (b *fakeBucket) lastOf(filter string) (bus.Item, bool) {
	var last bus.Item
	for key, item := range b.items {
		if item.Seq > last.Seq && matches(filter, key) {
			last = item
		}
	}
	return last, last.Seq > 0
}

func (b *fakeBucket) Last(_ context.Context, filter string) (bus.Item, error) {
	if b.onLast != nil {
		item, err := b.onLast()
		if err != nil {
			return bus.Item{}, err
		}
		if item != nil {
			return *item, nil
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	item, ok := b.lastOf(filter)
	if !ok {
		return item, bus.ErrNotFound
	}
	return item, nil
}

// sorted returns the matching items by sequence.
func (b *fakeBucket) sorted(filters ...string) []bus.Item {
	b.mu.Lock()
	defer b.mu.Unlock()
	var list []bus.Item
	for key, item := range b.items {
		if slices.ContainsFunc(filters, func(f string) bool { return matches(f, key) }) {
			list = append(list, item)
		}
	}
	slices.SortFunc(list, func(a, b bus.Item) int { return int(a.Seq) - int(b.Seq) })
	return list
}

func (b *fakeBucket) Read(_ context.Context, filters []string, from, through uint64, fn func(bus.Item) error) error {
	if b.onRead == nil {
		for _, item := range b.sorted(filters...) {
			if item.Seq < from || item.Seq > through {
				continue
			}
			if err := fn(item); err != nil {
				return err
			}
		}
		return nil
	}
	for {
		// One item at a time, so that what the hook changes is seen.
		list := b.sorted(filters...)
		i := slices.IndexFunc(list, func(item bus.Item) bool { return item.Seq >= from })
		if i < 0 || list[i].Seq > through {
			return nil
		}
		if b.onRead != nil {
			b.onRead(list[i])
		}
		if err := fn(list[i]); err != nil {
			return err
		}
		from = list[i].Seq + 1
	}
}

func (b *fakeBucket) Stats(_ context.Context, filters []string, fn func(bus.Stat) error) error {
	for _, item := range b.sorted(filters...) {
		if err := fn(bus.Stat{Key: item.Key, Seq: item.Seq, Size: int64(len(item.Value))}); err != nil {
			return err
		}
	}
	return nil
}

func (b *fakeBucket) Purge(_ context.Context, filter string, before uint64) error {
	do := func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		for key, item := range b.items {
			if matches(filter, key) && (before == 0 || item.Seq < before) {
				b.used -= len(item.Value)
				delete(b.items, key)
			}
		}
	}
	if b.onPurge != nil {
		return b.onPurge(do)
	}
	do()
	return nil
}

// snapshot is a copy of all items.
func (b *fakeBucket) snapshot() map[string]bus.Item {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.items)
}

// copyOf is a bucket of its own with the same content and no hooks.
func (b *fakeBucket) copyOf() *fakeBucket {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &fakeBucket{items: maps.Clone(b.items), seq: b.seq, used: b.used, written: map[string]int{}}
}

var _ bucket = (*fakeBucket)(nil)
