package bus

import (
	"context"
	"errors"
	"time"
)

// read handles the messages up to through, and deletes the consumer.
func (p *puller) read(ctx context.Context, through uint64, handle func(*Msg) error) error {
	if p.last.Load() >= through {
		return nil
	}
	err := p.run(ctx, func(m *Msg) error {
		if m.Seq > through {
			return errDone
		}
		if err := handle(m); err != nil {
			return err
		}
		if m.Seq == through {
			return errDone
		}
		return nil
	}, func() error {
		if err := p.reached(ctx, through); err != nil {
			return err
		}
		return errDone
	})
	p.finish(ctx)
	if errors.Is(err, errDone) {
		return nil
	}
	return err
}

// filters are the subjects that are read.
func (p *puller) filters() []string { return orAll(p.cfg.subjects) }

// lastMatching is the sequence of the last message that matches, as the leader of the stream has it; 0 if none.
func (p *puller) lastMatching(ctx context.Context) (last uint64, err error) {
	return p.c.lastMatching(ctx, p.cfg.stream, p.filters())
}

// reached returns nil when everything that matches up to through has been handled, as the leader of the stream has it,
// and errNotYet when there is more or it cannot be told now.
func (p *puller) reached(ctx context.Context, through uint64) error {
	last := p.last.Load()
	if last >= through {
		return nil
	}
	for _, f := range p.filters() {
		m, err := p.c.nextMsg(ctx, p.cfg.stream, f, last+1)
		switch {
		case isNoMessage(err):
		case Retryable(classify("looking for more", err)):
			return errNotYet
		case err != nil:
			return classify("reading stream "+p.cfg.stream, err)
		case m.Seq <= through:
			return errNotYet
		}
	}
	return nil
}

// isNoMessage reports that the stream is there and has no such message.
func isNoMessage(err error) bool {
	var api *APIError
	return errors.As(err, &api) && api.ErrorCode == codeNoMessage
}

// finish deletes the consumer of a read, also when ctx has ended, within a bound.
func (p *puller) finish(ctx context.Context) {
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = p.shut(dctx) // it goes by itself when this fails
}
