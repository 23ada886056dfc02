package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"natsflow/bus"
	"natsflow/flow"
)

const (
	// tableCheck is how often a session looks how its tables are.
	tableCheck = time.Second
	// tableGrace is how long a table may not follow its bucket before that is said.
	tableGrace = 5 * time.Second
	// largeTable is the size, in bytes, from which on a table is warned of, at each
	// doubling: it is in the memory of each worker.
	largeTable = 256 << 20
)

// tables are the buckets that the flow looks keys up in, each a copy in memory that
// follows its bucket for as long as the session lasts.
type tables struct {
	names  []string
	copies map[string]*bus.Copy
}

// Get implements [flow.Tables].
func (t *tables) Get(bucket, key string) ([]byte, bool) { return t.copies[bucket].Get(key) }

// tableNames are the buckets that the flow looks keys up in, each once, in the order of
// the steps.
func tableNames(f *flow.Flow) []string {
	var names []string
	for _, l := range f.Lookups() {
		if !slices.Contains(names, l.Bucket) {
			names = append(names, l.Bucket)
		}
	}
	return names
}

// checkTables refuses a flow that looks keys up in buckets that are not there.
func checkTables(ctx context.Context, conn *bus.Conn, f *flow.Flow) error {
	for _, name := range tableNames(f) {
		if _, err := conn.OpenBucket(ctx, name); err != nil {
			return tableError(f, name, err)
		}
	}
	return nil
}

// tableError says what it means that a table cannot be had.
func tableError(f *flow.Flow, name string, err error) error {
	if errors.Is(err, bus.ErrNotFound) {
		var steps []string
		for _, l := range f.Lookups() {
			if l.Bucket == name {
				steps = append(steps, l.Step)
			}
		}
		return fmt.Errorf("%w: there is no bucket %s, in which the flow looks keys up (%s); create it first, for example: nats kv add %s",
			ErrSource, name, strings.Join(steps, ", "), name)
	}
	return fmt.Errorf("bucket %s of a lookup: %w", name, err)
}

// openTables makes the copies and waits until all that is in the buckets now is in them:
// before that no record may be looked up.
func (s *session) openTables(ctx context.Context) error {
	t := &tables{names: tableNames(s.flow), copies: map[string]*bus.Copy{}}
	if len(t.names) == 0 {
		return nil
	}
	for _, name := range t.names {
		table, err := s.conn.OpenCopy(ctx, name)
		if err != nil {
			return tableError(s.flow, name, err)
		}
		t.copies[name] = table
		s.wg.Go(func() {
			err := table.Run(s.ctx)
			if s.ctx.Err() == nil {
				s.cancel(tableError(s.flow, name, err))
			}
		})
	}
	s.tables = t
	for _, name := range t.names {
		if err := s.awaitTable(ctx, name); err != nil {
			return err
		}
	}
	s.wg.Go(func() { s.watchTables(s.ctx) })
	return s.cfg.reached(ctx, "tables-loaded", "")
}

// awaitTable waits for the first complete copy of a bucket.
func (s *session) awaitTable(ctx context.Context, name string) error {
	began := time.Now()
	t := time.NewTicker(complainEvery)
	defer t.Stop()
	for {
		select {
		case <-s.tables.copies[name].Loaded():
			is := s.tables.copies[name].State()
			s.log.Info("loaded the bucket that the flow looks keys up in", "bucket", name, "keys", is.Keys, "bytes", is.Bytes, "took", time.Since(began).Round(time.Millisecond))
			return nil
		case <-t.C:
			is := s.tables.copies[name].State()
			s.log.Warn("the bucket that the flow looks keys up in is not loaded yet; no record is processed before", "bucket", name, "for", time.Since(began).Round(time.Second), "err", is.Err)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// watchTables measures the tables, and warns of those that are large or do not follow
// their buckets.
func (s *session) watchTables(ctx context.Context) {
	t := time.NewTicker(tableCheck)
	defer t.Stop()
	defer func() {
		for _, name := range s.tables.names {
			s.metrics.forgetTable(name)
		}
	}()
	large := map[string]int{}
	for {
		for _, name := range s.tables.names {
			if bytes := s.lookAtTable(name); bytes >= max(largeTable, 2*large[name]) {
				large[name] = bytes
				s.log.Warn("a bucket that the flow looks keys up in is large; each worker has all of it in memory", "bucket", name, "bytes", bytes)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// lookAtTable measures one table and returns its size in bytes.
func (s *session) lookAtTable(name string) int {
	is := s.tables.copies[name].State()
	behind := tableBehind(is)
	s.metrics.table(name, is, behind)
	key := "kv " + name // no source has a blank in its name
	switch warned := s.warning(key) != ""; {
	case behind >= tableGrace:
		if !warned {
			s.log.Warn("the copy of a bucket that the flow looks keys up in does not follow it; lookups find what was there before", "bucket", name, "for", behind.Round(time.Second), "err", is.Err)
		}
		s.setWarning(key, fmt.Sprintf("lookups in bucket %s find what was there %v ago: %v", name, behind.Round(time.Second), is.Err))
	case warned && behind == 0:
		s.log.Info("the copy of a bucket follows it again", "bucket", name)
		s.setWarning(key, "")
	}
	return is.Bytes
}

// tableBehind is for how long a copy has not followed its bucket.
func tableBehind(is bus.CopyState) time.Duration {
	if is.Behind.IsZero() {
		return 0
	}
	return max(time.Since(is.Behind), 1)
}

// TableStatus is how a bucket is that the flow looks keys up in.
type TableStatus struct {
	// Keys is the number of its keys, Bytes the size of keys and values in memory.
	Keys  int `json:"keys"`
	Bytes int `json:"bytes"`
	// Behind is for how many seconds the worker has not followed the changes of the
	// bucket; 0 while it does.
	Behind float64 `json:"behind_seconds"`
}

// status returns how the tables are, by bucket; nil if there are none.
func (t *tables) status() map[string]TableStatus {
	if t == nil {
		return nil
	}
	all := make(map[string]TableStatus, len(t.names))
	for _, name := range t.names {
		is := t.copies[name].State()
		all[name] = TableStatus{Keys: is.Keys, Bytes: is.Bytes, Behind: tableBehind(is).Seconds()}
	}
	return all
}

// text names the tables with the number of their keys.
func (t *tables) text() string {
	if t == nil {
		return ""
	}
	parts := make([]string, len(t.names))
	for i, name := range t.names {
		parts[i] = fmt.Sprintf("%s:%d", name, t.copies[name].State().Keys)
	}
	return strings.Join(parts, ",")
}
