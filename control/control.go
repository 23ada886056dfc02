package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"natsflow/bus"
)

var (
	// ErrNoFlow says that there is no record of the flow.
	ErrNoFlow = errors.New("no such flow")
	// ErrPrefix says that the flow takes its commands from another control prefix.
	ErrPrefix = errors.New("the flow has another control prefix")

	// errRebound: the record counts commands of a control stream other than the
	// one that this process has in hand.
	errRebound = errors.New("the control stream of the flow changed")
)

// Control reads and changes the record of one flow. Its methods may be called
// from any goroutine, and any number of processes may have one for a flow.
type Control struct {
	cfg    Config
	bucket *bus.Bucket
	log    *slog.Logger

	// process tells what joined here from what joined elsewhere, and joined is
	// whether anything did.
	process string
	joined  atomic.Bool
}

// Open makes sure that the control stream and bucket exist.
func Open(ctx context.Context, cfg Config) (*Control, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("configure control: %w", err)
	}
	c := &Control{cfg: cfg, log: cfg.Logger.With("flow", cfg.Flow), process: uuid.NewString()}
	if _, _, err := c.bind(ctx); err != nil {
		return nil, err
	}
	err := retry(ctx, c.log, "open the control bucket", func() (err error) {
		c.bucket, err = cfg.Conn.EnsureBucket(ctx, bus.BucketConfig{
			Name: BucketName, Replicas: cfg.Replicas, MarkerTTL: markerTTL,
			Description: "natsflow: flow records, members, assignments, tasks",
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the control bucket: %w", err)
	}
	return c, nil
}

// bind makes sure that the control stream exists and tells which one it is and
// its last sequence.
func (c *Control) bind(ctx context.Context) (ControlRef, uint64, error) {
	var info bus.StreamInfo
	name := streamName(c.cfg.Prefix)
	err := retry(ctx, c.log, "open the control stream", func() (err error) {
		info, _, err = c.cfg.Conn.EnsureSink(ctx, bus.SinkConfig{
			Stream: name, Subjects: []string{c.cfg.Prefix + ".>"}, Replicas: c.cfg.Replicas,
		})
		return err
	})
	if err != nil {
		return ControlRef{}, 0, fmt.Errorf("open the control stream %s on %s.> (another control prefix can be configured if a stream has these subjects): %w", name, c.cfg.Prefix, err)
	}
	if info.Retention != "limits" {
		return ControlRef{}, 0, fmt.Errorf("the control stream %s has %s retention and would lose commands: it needs limits retention; remove it (nats stream rm %s), and natsflow makes one", name, info.Retention, name)
	}
	return ControlRef{Prefix: c.cfg.Prefix, Stream: name, Created: info.Created}, info.LastSeq, nil
}

func recordKey(flow string) string { return flow + ".flow" }

// Record reads the flow record. The error is ErrNoFlow when there is none.
func (c *Control) Record(ctx context.Context) (Record, error) {
	rec, _, err := c.read(ctx)
	if errors.Is(err, ErrNoFlow) {
		err = fmt.Errorf("%w%s", err, c.suggestFlow(ctx))
	}
	return rec, err
}

func (c *Control) read(ctx context.Context) (Record, []byte, error) {
	if c.cfg.Flow == "" {
		return Record{}, nil, fmt.Errorf("read the flow record: %w: no flow was named", ErrNoFlow)
	}
	item, err := c.bucket.Get(ctx, recordKey(c.cfg.Flow))
	if errors.Is(err, bus.ErrNotFound) {
		return Record{}, nil, fmt.Errorf("read the flow record: %w: %q", ErrNoFlow, c.cfg.Flow)
	}
	if err != nil {
		return Record{}, nil, fmt.Errorf("read the flow record: %w", err)
	}
	rec, err := recordOf(item)
	return rec, item.Value, err
}

func recordOf(item bus.Item) (Record, error) {
	rec, err := decodeRecord(item.Value)
	if err != nil {
		return Record{}, fmt.Errorf("key %s of bucket %s: %w", item.Key, BucketName, err)
	}
	rec.Revision = item.Seq
	return rec, nil
}

func (c *Control) suggestFlow(ctx context.Context) string {
	recs, err := listFlows(ctx, c.bucket)
	if err != nil {
		return "" // the error that is being explained is the better one
	}
	var names []string
	for _, r := range recs {
		names = append(names, r.Flow)
	}
	return didYouMean(c.cfg.Flow, names)
}

// change replaces the record by fn's result with compare-and-set, and calls fn
// again on what is there now when another process was faster. fn may return an
// error along with a changed record: the record is stored and the error
// returned. A record that fn did not change is not written.
func (c *Control) change(ctx context.Context, what string, fn func(Record) (Record, error)) (Record, error) {
	tries := backoff{log: c.log, what: what}
	var sent []byte
	var verdict error // of fn, for sent
	for {
		rec, stored, err := c.read(ctx)
		if err == nil && sent != nil && bytes.Equal(stored, sent) {
			return rec, verdict // a write of unknown outcome that did succeed
		}
		if err == nil {
			var next Record
			var changed bool
			next, changed, verdict = apply(rec, fn)
			if !changed {
				return rec, verdict
			}
			next.Updated = time.Now().UTC()
			if sent, err = encodeRecord(next); err != nil {
				return rec, fmt.Errorf("%s: %w", what, err)
			}
			next.Revision, err = c.bucket.Update(ctx, recordKey(rec.Flow), sent, rec.Revision, 0)
			if err == nil {
				return next, verdict
			}
		}
		if err := tries.wait(ctx, err); err != nil {
			return rec, fmt.Errorf("%s: %w", what, err)
		}
	}
}

// apply calls fn and tells whether the record changed.
func apply(rec Record, fn func(Record) (Record, error)) (Record, bool, error) {
	next, verdict := fn(rec)
	before, err := encodeRecord(rec)
	if err != nil {
		return rec, false, err
	}
	after, err := encodeRecord(next)
	if err != nil {
		return rec, false, err
	}
	return next, !bytes.Equal(before, after), verdict
}

// Define creates the record of a flow or checks it against the definition and
// takes over what may change. Errors: ErrDefinition, also while another member runs
// another definition or a drain is under way with one; ErrSourceRecreated.
// Commands that were published before a flow was created do not affect it.
func (c *Control) Define(ctx context.Context, def Definition) (Record, error) {
	if err := def.validate(); err != nil {
		return Record{}, fmt.Errorf("define flow %s: %w", c.cfg.Flow, err)
	}
	if err := c.agree(ctx, def); err != nil {
		return Record{}, fmt.Errorf("define flow %s: %w", c.cfg.Flow, err)
	}
	tries := backoff{log: c.log, what: "define the flow"}
	for {
		ref, last, err := c.bind(ctx)
		if err != nil {
			return Record{}, fmt.Errorf("define flow %s: %w", c.cfg.Flow, err)
		}
		rec, err := c.create(ctx, newRecord(c.cfg.Flow, def, ref, last, time.Now().UTC()))
		if err == nil {
			return rec, nil
		}
		if errors.Is(err, bus.ErrExists) || errors.Is(err, bus.ErrFenced) {
			rec, err = c.change(ctx, "define flow "+c.cfg.Flow, func(r Record) (Record, error) {
				next, err := r.redefine(def)
				if err != nil {
					return r, err
				}
				return next.rebind(ref, last, 0, time.Time{}), nil
			})
			if err == nil || !errors.Is(err, ErrNoFlow) {
				return rec, err
			}
			err = fmt.Errorf("%w: it was deleted meanwhile", bus.ErrConflict)
		}
		if err := tries.wait(ctx, err); err != nil {
			return Record{}, fmt.Errorf("define flow %s: %w", c.cfg.Flow, err)
		}
	}
}

// agree checks the definition against those of the live members. Two processes may
// both find nobody; of those the assignment lets one run, see rebalanced.
func (c *Control) agree(ctx context.Context, def Definition) error {
	var members []MemberInfo
	err := retry(ctx, c.log, "list members", func() (err error) {
		members, err = c.live(ctx)
		return err
	})
	if err != nil {
		return fmt.Errorf("list members: %w", err)
	}
	return def.agrees(c.cfg.Flow, c.cfg.Name, members)
}

func (c *Control) create(ctx context.Context, rec Record) (Record, error) {
	// Looking first saves a refused write at each start, and an error that
	// servers count.
	if _, err := c.bucket.Get(ctx, recordKey(rec.Flow)); err == nil {
		return Record{}, bus.ErrExists
	} else if !errors.Is(err, bus.ErrNotFound) {
		return Record{}, err
	}
	value, err := encodeRecord(rec)
	if err != nil {
		return Record{}, err
	}
	rec.Revision, err = c.bucket.Create(ctx, recordKey(rec.Flow), value, 0)
	if err == nil {
		c.log.InfoContext(ctx, "flow created", "partitions", rec.Partitions)
	}
	return rec, err
}

// FixCut fixes the cut of a drain; see [Record.FixCut]. The cut that counts is
// the one of the record returned. Errors: ErrNotDraining, *CutBehindError (the
// drain is given up then and the flow runs).
func (c *Control) FixCut(ctx context.Context, epoch uint64, cut, read map[string]uint64) (Record, error) {
	ours := false
	rec, err := c.change(ctx, "fix the cut", func(r Record) (Record, error) {
		next, err := r.FixCut(epoch, cut, read)
		ours = err == nil && r.Drain.Cut == nil
		return next, err
	})
	if err == nil && ours {
		c.log.InfoContext(ctx, "cut fixed", "epoch", epoch, "cut", FormatCut(rec.Drain.Cut))
	}
	return rec, err
}

// RefuseCut gives the drain of an epoch up, see [Record.RefuseCut]. Another drain
// that was begun meanwhile is left alone: ErrNotDraining.
func (c *Control) RefuseCut(ctx context.Context, epoch uint64, cause error) (Record, error) {
	return c.change(ctx, "refuse the cut", func(r Record) (Record, error) { return r.RefuseCut(epoch, cause) })
}

// Drained records the end of a drain; see [Record.Drained]. Time and Worker of
// the report are filled in when they are empty.
func (c *Control) Drained(ctx context.Context, epoch uint64, report Report) (Record, error) {
	if report.Time.IsZero() {
		report.Time = time.Now().UTC()
	}
	if report.Worker == "" {
		report.Worker = c.cfg.Name
	}
	return c.change(ctx, "end the drain", func(r Record) (Record, error) { return r.Drained(epoch, report) })
}

// SetError notes msg as the flow's last error.
func (c *Control) SetError(ctx context.Context, msg string) (Record, error) {
	now := time.Now().UTC()
	return c.change(ctx, "note an error", func(r Record) (Record, error) { return r.WithError(now, msg), nil })
}

// Resume lets the flow run, whether it is stopped or still draining (which is
// cancelled), unless it runs already. It publishes a command, so that it has its
// place among the others, and applies what is there up to it.
func (c *Control) Resume(ctx context.Context, reason string) (Record, error) {
	rec, err := c.CatchUp(ctx)
	if err != nil || rec.State == StateRunning {
		return rec, err
	}
	if _, err := c.Send(ctx, Command{Kind: KindResume, Flow: c.cfg.Flow, Reason: reason}); err != nil {
		return rec, err
	}
	return c.CatchUp(ctx)
}

// Send publishes a command and returns its sequence in the control stream. A
// command for one flow is refused when there is no such flow (ErrNoFlow) or it
// listens elsewhere (ErrPrefix): nobody would ever look at it.
func (c *Control) Send(ctx context.Context, cmd Command) (uint64, error) {
	// One id for all tries: a try of which the outcome is unknown may have been
	// stored, and "drain" twice around a "resume" would not be the same as once.
	return c.SendOnce(ctx, uuid.NewString(), cmd)
}

// SendOnce is [Control.Send] for a command that several processes send, each for
// all: the control stream keeps the first one with an id, for its duplicate window
// (two minutes as natsflow creates it), and all get the sequence of that one.
func (c *Control) SendOnce(ctx context.Context, id string, cmd Command) (uint64, error) {
	cmd = cmd.withDefaults()
	if err := cmd.Validate(); err != nil {
		return 0, fmt.Errorf("send a command: %w", err)
	}
	if cmd.Flow != "" {
		other := &Control{cfg: c.cfg, bucket: c.bucket, log: c.log}
		other.cfg.Flow = cmd.Flow
		rec, err := other.Record(ctx)
		if err != nil {
			return 0, fmt.Errorf("send a command: %w", err)
		}
		if rec.Control.Prefix != c.cfg.Prefix {
			return 0, fmt.Errorf("send a command: %w: flow %s listens on %s.>, not on %s.>", ErrPrefix, cmd.Flow, rec.Control.Prefix, c.cfg.Prefix)
		}
	}
	header := map[string]string{"Nats-Msg-Id": id}
	var seq uint64
	err := retry(ctx, c.log, "send a command", func() (err error) {
		seq, err = c.cfg.Conn.Publish(ctx, cmd.Subject(c.cfg.Prefix), header, cmd.Body())
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("send a command: %w", err)
	}
	return seq, nil
}

// Flows returns the records of all flows, by name. There may be none, also when
// nothing of natsflow is on the server yet.
func Flows(ctx context.Context, conn *bus.Conn) ([]Record, error) {
	bucket, err := conn.OpenBucket(ctx, BucketName)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	return listFlows(ctx, bucket)
}

func listFlows(ctx context.Context, bucket *bus.Bucket) ([]Record, error) {
	items, err := bucket.List(ctx, recordKey("*"))
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	var recs []Record
	for _, item := range items {
		if item.Deleted {
			continue
		}
		rec, err := recordOf(item)
		if err != nil {
			return nil, fmt.Errorf("list flows: %w", err)
		}
		recs = append(recs, rec)
	}
	slices.SortFunc(recs, func(a, b Record) int { return strings.Compare(a.Flow, b.Flow) })
	return recs, nil
}
