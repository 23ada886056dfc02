package bus

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// countTries bounds the attempts to count in a stream that is being written to.
const countTries = 8

// Count returns how many messages of a stream match the filters (all if there are none) and stand from a sequence
// through another one. In a stream that has deleted messages, or with filters, it compares what the server counts
// behind both, and counts again while that changes in between; under a heavy load it may come out too low.
func (c *Conn) Count(ctx context.Context, stream string, filters []string, from, through uint64) (uint64, error) {
	info, err := c.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	from, through = max(from, info.FirstSeq, 1), min(through, info.LastSeq)
	if from > through {
		return 0, nil
	}
	if len(filters) == 0 && info.Msgs == info.LastSeq-info.FirstSeq+1 {
		return through - from + 1, nil
	}
	behind, err := c.countFrom(ctx, stream, filters, through+1)
	if err != nil {
		return 0, err
	}
	for try := 0; ; try++ {
		all, err := c.countFrom(ctx, stream, filters, from)
		if err != nil {
			return 0, err
		}
		again, err := c.countFrom(ctx, stream, filters, through+1)
		if err != nil {
			return 0, err
		}
		if again == behind || try == countTries {
			return min(all-min(all, again), through-from+1), nil
		}
		behind = again
	}
}

// countFrom returns how many messages match from a sequence on.
func (c *Conn) countFrom(ctx context.Context, stream string, filters []string, from uint64) (uint64, error) {
	name := "natsflow-count-" + shortID()
	info, err := c.createConsumer(ctx, stream, jetstream.ConsumerConfig{
		Name: name, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: time.Minute,
		FilterSubjects: filters,
	})
	if err != nil {
		return 0, classify("counting in stream "+stream, err)
	}
	if _, err := c.call(ctx, &nats.Msg{Subject: c.api + "CONSUMER.DELETE." + stream + "." + name}); err != nil {
		c.log.Debug("a consumer was not deleted; it goes by itself", "stream", stream, "err", err)
	}
	return info.NumPending, nil
}
