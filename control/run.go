package control

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"natsflow/bus"
)

// identityCheck is how often Run makes sure that the control stream is still the
// one it reads. One that was deleted and created again counts from 1, and one that
// has lost its end from there: commands would look as if they had been applied before.
const identityCheck = 30 * time.Second

// lostPatience is the wait before the second look at a control stream that seems to have
// lost its end.
const lostPatience = 5 * time.Second

// Run applies commands as they come and calls onRecord with the record as it is
// and then with each change, in order and from one goroutine. Any number of
// processes may run for one flow. It returns when ctx ends (with its cause), when
// the record is deleted (ErrNoFlow) or cannot be read (ErrRecord), and when
// another process moved the flow to another prefix (ErrPrefix). onRecord may be
// nil.
func (c *Control) Run(ctx context.Context, onRecord func(Record)) error {
	if _, err := c.await(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, f := range []func(context.Context) error{
		c.follow,
		func(ctx context.Context) error { return c.watch(ctx, onRecord) },
	} {
		wg.Go(func() { cancel(f(ctx)) })
	}
	wg.Wait()
	return context.Cause(ctx)
}

// await reads the record, however long the server is away.
func (c *Control) await(ctx context.Context) (rec Record, err error) {
	err = retry(ctx, c.log, "read the flow record", func() error {
		rec, err = c.Record(ctx)
		return err
	})
	return rec, err
}

// watch reports the record.
func (c *Control) watch(ctx context.Context, onRecord func(Record)) error {
	var last uint64
	report := func(item bus.Item) error {
		if item.Key == "" || item.Seq <= last {
			return nil // the end of the initial values, or a repeat after a reconnect
		}
		last = item.Seq
		if item.Deleted {
			return fmt.Errorf("watch the flow record: %w: the record of %s was deleted", ErrNoFlow, c.cfg.Flow)
		}
		rec, err := recordOf(item)
		if err != nil {
			return err
		}
		if onRecord != nil {
			onRecord(rec)
		}
		return nil
	}
	return retry(ctx, c.log, "watch the flow record", func() error {
		return c.bucket.Watch(ctx, recordKey(c.cfg.Flow), report)
	})
}

// follow applies commands until ctx ends.
func (c *Control) follow(ctx context.Context) error {
	for {
		ref, err := c.rebind(ctx)
		if err != nil {
			return err
		}
		err = c.followStream(ctx, ref)
		if !errors.Is(err, errRebound) {
			return err
		}
		c.log.WarnContext(ctx, "the control stream was deleted or created anew, or has lost its end", "stream", ref.Stream)
	}
}

// rebind makes the record count in the control stream as it is now.
func (c *Control) rebind(ctx context.Context) (ControlRef, error) {
	rec, ref, last, err := c.look(ctx)
	if err != nil {
		return ref, err
	}
	_, err = c.change(ctx, "bind the control stream", func(r Record) (Record, error) {
		if r.Control.Prefix != ref.Prefix {
			return r, fmt.Errorf("%w: flow %s takes its commands from %s.>, this process from %s.>", ErrPrefix, r.Flow, r.Control.Prefix, ref.Prefix)
		}
		return r.rebind(ref, last, rec.LastCommand, time.Now()), nil
	})
	return ref, err
}

// look reads the record and then the stream: what others look at meanwhile is in the
// stream. A stream that seems to have lost its end is asked again: a server that leads no
// more may have answered.
func (c *Control) look(ctx context.Context) (rec Record, ref ControlRef, last uint64, err error) {
	for again := false; ; again = true {
		if rec, err = c.await(ctx); err != nil {
			return rec, ref, 0, err
		}
		if ref, last, err = c.bind(ctx); err != nil || again || last >= rec.LastCommand || !rec.Control.equal(ref) {
			return rec, ref, last, err
		}
		timer := time.NewTimer(lostPatience)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return rec, ref, 0, context.Cause(ctx)
		}
	}
}

// followStream applies the commands of one control stream; errRebound when it
// turns out to be another.
func (c *Control) followStream(ctx context.Context, ref ControlRef) error {
	cursor, err := c.openCursor(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	wg.Go(func() { cancel(c.guardStream(ctx, ref, cursor)) })
	err = cursor.Run(ctx, func(m *bus.Msg) error {
		return c.handle(ctx, ref, m)
	})
	stopped := context.Cause(ctx)
	cancel(err)
	wg.Wait()
	c.closeCursor(ctx, cursor)
	switch {
	case stopped != nil:
		return stopped
	case errors.Is(err, bus.ErrNotFound):
		return errRebound
	}
	return err
}

// guardStream returns errRebound once the control stream is not the one of ref, or ends
// before what the record, or the cursor of this process, has had: the record may have been
// put right by another one. It has to be seen twice, see look.
func (c *Control) guardStream(ctx context.Context, ref ControlRef, cursor *bus.Cursor) error {
	shorter := false
	ticker := time.NewTicker(identityCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
		rec, _, err := c.read(ctx)
		if err != nil {
			continue // the watch sees to that
		}
		had := max(rec.LastCommand, cursor.Last())
		info, err := c.cfg.Conn.Stream(ctx, ref.Stream)
		before := shorter
		shorter = err == nil && info.LastSeq < had
		if errors.Is(err, bus.ErrNotFound) || err == nil && !info.Created.Equal(ref.Created) || shorter && before {
			return errRebound
		}
	}
}

func (c *Control) openCursor(ctx context.Context) (*bus.Cursor, error) {
	var cursor *bus.Cursor
	err := retry(ctx, c.log, "read the control stream", func() error {
		rec, _, err := c.read(ctx)
		if err != nil {
			return err
		}
		prefix, flow := c.cfg.Prefix, c.cfg.Flow
		cursor, err = c.cfg.Conn.OpenCursor(ctx, bus.CursorConfig{
			Stream: streamName(prefix),
			// What is misspelt is to be refused, not overlooked: hence all first
			// tokens, and anything below the flow.
			Subjects: []string{prefix + ".*", prefix + ".*." + flow, prefix + ".*." + flow + ".>"},
			From:     rec.LastCommand + 1,
			Name:     "natsflow-control-" + flow,
			Logger:   c.log,
		})
		return err
	})
	if errors.Is(err, bus.ErrNotFound) {
		return nil, errRebound
	}
	if err != nil {
		return nil, fmt.Errorf("read the control stream: %w", err)
	}
	return cursor, nil
}

// closeCursor also works after ctx has ended: a consumer that is left behind is
// only removed minutes later.
func (c *Control) closeCursor(ctx context.Context, cursor *bus.Cursor) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := cursor.Close(ctx); err != nil {
		c.log.DebugContext(ctx, "close the control cursor", "err", err)
	}
}

// handle applies one message of the control stream.
func (c *Control) handle(ctx context.Context, ref ControlRef, m *bus.Msg) error {
	cmd, malformed := ParseCommand(ref.Prefix, m.Subject, m.Data)
	cmd.Seq, cmd.Time = m.Seq, time.Unix(0, m.Time).UTC()
	var out Outcome
	rec, err := c.change(ctx, "apply a command", func(r Record) (Record, error) {
		if !r.Control.equal(ref) {
			return r, errRebound
		}
		var next Record
		if malformed != nil {
			next, out = r.Refuse(cmd, malformed)
		} else {
			next, out = r.Apply(cmd)
		}
		return next, nil
	})
	if err != nil {
		return fmt.Errorf("apply command %d: %w", cmd.Seq, err)
	}
	switch out.Kind {
	case OutcomeIgnored:
	case OutcomeRefused:
		c.log.WarnContext(ctx, "command refused", "seq", cmd.Seq, "subject", m.Subject, "err", out.Text)
	default:
		c.log.InfoContext(ctx, "command", "seq", cmd.Seq, "kind", cmd.Kind, "outcome", out.Text, "epoch", rec.Epoch, "reason", cmd.Reason)
	}
	return nil
}

// CatchUp applies the commands that were published up to now and returns the
// record after them. A process calls it before it starts to work, so that a drain
// that was asked for while nobody ran is seen before the first record is.
func (c *Control) CatchUp(ctx context.Context) (Record, error) {
	ref, err := c.rebind(ctx)
	if err != nil {
		return Record{}, err
	}
	var info bus.StreamInfo
	err = retry(ctx, c.log, "look for commands", func() error {
		info, err = c.cfg.Conn.Stream(ctx, ref.Stream)
		return err
	})
	if err != nil {
		return Record{}, fmt.Errorf("look for commands: %w", err)
	}
	rec, err := c.await(ctx)
	if err != nil || rec.LastCommand >= info.LastSeq {
		return rec, err
	}
	cursor, err := c.openCursor(ctx)
	if err != nil {
		return Record{}, err
	}
	defer c.closeCursor(ctx, cursor)
	run, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		cancel(cursor.Run(run, func(m *bus.Msg) error { return c.handle(run, ref, m) }))
	})
	err = c.untilHandled(run, cursor, info.LastSeq)
	cancel(err)
	wg.Wait()
	if err != nil {
		return Record{}, err
	}
	return c.await(ctx)
}

// untilHandled waits until the cursor's messages up to seq have been handled.
func (c *Control) untilHandled(ctx context.Context, cursor *bus.Cursor, seq uint64) error {
	pause := 2 * time.Millisecond
	for {
		through, err := cursor.CaughtUp(ctx)
		switch {
		case err == nil && through >= seq:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && !bus.Retryable(err):
			return fmt.Errorf("look for commands: %w", err)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
		pause = min(2*pause, time.Second)
	}
}
