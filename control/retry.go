package control

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"natsflow/bus"
)

const (
	firstPause = 20 * time.Millisecond
	maxPause   = 5 * time.Second
)

// backoff is the pauses between the tries of one thing.
type backoff struct {
	tries int
	log   *slog.Logger
	what  string
}

// wait pauses before the next try after err, or returns err when there is no
// point in one. A lost compare-and-set has one: the caller reads again first.
func (b *backoff) wait(ctx context.Context, err error) error {
	raced := errors.Is(err, bus.ErrFenced) || errors.Is(err, bus.ErrConflict) || errors.Is(err, bus.ErrExists)
	if !raced && !bus.Retryable(err) {
		return err
	}
	pause := min(maxPause, firstPause<<min(b.tries, 10))
	b.tries++
	// One lost race or one moved leader is daily business; an operator wants to
	// know from about a second on, and then not with every try.
	if b.tries == 6 || b.tries%30 == 0 {
		b.log.WarnContext(ctx, "still trying", "what", b.what, "tries", b.tries, "err", err)
	}
	timer := time.NewTimer(pause/2 + rand.N(pause/2+1))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), err)
	}
}

// retry calls try until it succeeds, fails for good or ctx ends.
func retry(ctx context.Context, log *slog.Logger, what string, try func() error) error {
	b := backoff{log: log, what: what}
	for {
		err := try()
		if err == nil {
			return nil
		}
		if err := b.wait(ctx, err); err != nil {
			return err
		}
	}
}
