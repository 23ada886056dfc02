package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// copyCheck is how often a copy is compared with what the server says of the bucket.
const copyCheck = 10 * time.Second

// errOutOfStep ends a session of a copy that has to be made anew: the bucket has changed without telling.
var errOutOfStep = errors.New("the copy is out of step with the bucket")

// Copy holds what is in a bucket, in memory, and follows its changes: a table to look keys up in. It is safe for
// concurrent use.
//
// Whenever the connection or its consumer is lost, and when the bucket has changed without a message that says so (a
// purge, messages that grew too old), it reads the whole bucket again, beside what it has, and takes that in its place:
// so that what was deleted meanwhile is gone here, too.
type Copy struct {
	b *Bucket

	loaded chan struct{} // closed when all is here for the first time

	mu    sync.RWMutex
	items map[string]copied
	bytes int
	last  uint64 // the sequence up to which items follows the bucket
	first uint64 // what is before it is not in items
	// behind is since when the bucket is not followed, zero while it is; why is the last failure meanwhile.
	behind time.Time
	why    error
}

type copied struct {
	value []byte
	seq   uint64
}

// CopyState is how a copy is.
type CopyState struct {
	// Keys is the number of keys, Bytes the size of keys and values.
	Keys, Bytes int
	// Behind is since when the copy has not followed the bucket; zero while it does.
	Behind time.Time
	// Err is the last failure meanwhile, nil if there was none.
	Err error
}

// OpenCopy makes a copy of a bucket, which is empty until [Copy.Run] fills it. It returns ErrNotFound if there is no
// bucket of that name, and another error for one that is a mirror, whose keys have the subjects of its origin.
func (c *Conn) OpenCopy(ctx context.Context, bucket string) (*Copy, error) {
	b, err := c.OpenBucket(ctx, bucket)
	if err != nil {
		return nil, err
	}
	info, err := c.Stream(ctx, b.stream)
	if err != nil {
		return nil, err
	}
	if info.Mirror {
		return nil, fmt.Errorf("opening bucket %s: it is a mirror of another one: use that", bucket)
	}
	return &Copy{b: b, loaded: make(chan struct{}), items: map[string]copied{}, behind: time.Now()}, nil
}

// Get returns the value of a key; ok is false if it is not there. The value must not be modified.
func (k *Copy) Get(key string) (value []byte, ok bool) {
	k.mu.RLock()
	it, ok := k.items[key]
	k.mu.RUnlock()
	return it.value, ok
}

// Loaded is closed when the copy has what was in the bucket when Run began.
func (k *Copy) Loaded() <-chan struct{} { return k.loaded }

// State says how large the copy is and whether it follows the bucket.
func (k *Copy) State() CopyState {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return CopyState{Keys: len(k.items), Bytes: k.bytes, Behind: k.behind, Err: k.why}
}

// Run fills the copy and follows the bucket until ctx ends, and returns the cause. It outlives reconnects, and a bucket
// that was deleted and created anew; it returns ErrNotFound when the bucket is gone.
func (k *Copy) Run(ctx context.Context) error {
	failures := 0
	for {
		began := time.Now()
		err := k.follow(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !errors.Is(err, errLost) && !errors.Is(err, errOutOfStep) && !Retryable(err) {
			return err
		}
		if time.Since(began) > pullLongSession {
			failures = 0
		}
		if failures == 0 {
			k.b.c.log.Info("the copy of a bucket is made anew", "bucket", k.b.name, "err", err)
		}
		failures++
		k.lose(err)
		if err := sleep(ctx, jitter(min(20*time.Millisecond<<min(failures, 9), pullMaxBackoff), rand.Float64)); err != nil {
			return err
		}
	}
}

// lose notes that the bucket is not followed any more.
func (k *Copy) lose(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.why = err
	if k.behind.IsZero() {
		k.behind = time.Now()
	}
}

// follow is one session: it reads the whole bucket and then its changes, with one consumer. It ends with errLost,
// errOutOfStep, a retryable error, or one that ends the copy.
func (k *Copy) follow(ctx context.Context) error {
	info, err := k.b.c.Stream(ctx, k.b.stream)
	if err != nil {
		return err
	}
	p := k.b.puller(nil, 0, "natsflow-copy")
	p.cfg.once = true
	through, err := p.lastMatching(ctx)
	if err != nil {
		return classify("reading bucket "+k.b.name, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { k.watchStep(ctx, info.Created, cancel) })
	fresh, end := map[string]copied{}, &completion{p: p, goal: through}
	err = p.run(ctx, func(m *Msg) error {
		if it := k.b.item(m); fresh != nil {
			put(fresh, it)
		} else {
			k.change(it)
		}
		return nil
	}, func() error {
		if fresh == nil {
			return nil
		}
		if err := end.reached(ctx); err != nil {
			return err
		}
		k.replace(fresh, p.last.Load())
		fresh = nil
		return nil
	})
	p.finish(ctx)
	return err
}

// put changes a key of items and returns the difference in size.
func put(items map[string]copied, it Item) (grown int) {
	if was, ok := items[it.Key]; ok {
		grown -= len(it.Key) + len(was.value)
	}
	if it.Deleted {
		delete(items, it.Key)
		return grown
	}
	items[it.Key] = copied{it.Value, it.Seq}
	return grown + len(it.Key) + len(it.Value)
}

// change follows one change of the bucket.
func (k *Copy) change(it Item) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.bytes += put(k.items, it)
	k.last = it.Seq
}

// replace takes what was read of the bucket in place of what is here.
func (k *Copy) replace(items map[string]copied, last uint64) {
	bytes := 0
	for key, it := range items {
		bytes += len(key) + len(it.value)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.items, k.bytes, k.last, k.first, k.behind, k.why = items, bytes, last, 0, time.Time{}, nil
	select {
	case <-k.loaded:
	default:
		close(k.loaded)
	}
}

// watchStep ends the session when the bucket is another one, or has lost keys without a message that says so.
func (k *Copy) watchStep(ctx context.Context, created time.Time, cancel context.CancelCauseFunc) {
	t := time.NewTicker(copyCheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		info, err := k.b.c.Stream(ctx, k.b.stream)
		switch {
		case isClass(err, ErrNotFound):
			cancel(fmt.Errorf("%w: %w", errOutOfStep, err))
		case err != nil:
			continue // the reader finds out
		case !info.Created.Equal(created):
			cancel(fmt.Errorf("%w: it was deleted and created anew", errOutOfStep))
		case !k.inStep(info):
			cancel(fmt.Errorf("%w: keys are gone from it without a mark", errOutOfStep))
		}
	}
}

// inStep drops what stands before the first message of the bucket, where messages grow too old or are purged, and
// reports false if there must be more that is gone: the bucket has fewer subjects than there are keys here.
func (k *Copy) inStep(info StreamInfo) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.behind.IsZero() {
		return true // it is being read
	}
	if info.FirstSeq > k.first {
		k.first = info.FirstSeq
		for key, it := range k.items {
			if it.seq < info.FirstSeq {
				delete(k.items, key)
				k.bytes -= len(key) + len(it.value)
			}
		}
	}
	// What is here and not yet in info would only seem to be gone.
	return k.last > info.LastSeq || uint64(len(k.items)) <= info.NumSubjects
}
