package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"natsflow/bus"
)

// MemberInfo is what a member tells of itself, stored with its lease.
type MemberInfo struct {
	Name     string    `json:"name"`
	Instance string    `json:"instance"`
	Host     string    `json:"host,omitempty"`
	PID      int       `json:"pid,omitempty"`
	Started  time.Time `json:"started"`
	// Process is the same for all that joins by one Control, one after the other.
	Process string `json:"process,omitempty"`
	// TTL is that of the lease on the server, in nanoseconds in JSON.
	TTL time.Duration `json:"ttl_ns"`
	// Hash identifies the definition that it runs.
	Hash string `json:"hash,omitempty"`
	// Settled: no earlier process of this name can trust its lease any more.
	Settled bool `json:"settled,omitempty"`
	// Leaving: it is not to be assigned anything; see [Member.Yield].
	Leaving bool `json:"leaving,omitempty"`
	// Stopped is what it says for the cut of a drain; see [Member.Tell].
	Stopped *Stopped `json:"stopped,omitempty"`
	// Status is the member's own; see [Member.SetStatus].
	Status json.RawMessage `json:"status,omitempty"`

	// Renewed is the server's time of the last renewal, Age how long ago that is
	// by the clock of this process (never below 0), and Tasks are the tasks that
	// this instance holds, in order. Only [Control.Members] sets them.
	Renewed time.Time     `json:"-"`
	Age     time.Duration `json:"-"`
	Tasks   []string      `json:"-"`
}

func memberKey(flow, name string) string { return flow + ".member." + name }
func assignmentKey(flow string) string   { return flow + ".assignment" }

// memberOf decodes the entry of a member.
func memberOf(item bus.Item) (MemberInfo, error) {
	var info MemberInfo
	if err := json.Unmarshal(item.Value, &info); err != nil {
		return info, fmt.Errorf("key %s: %w: %w", item.Key, ErrRecord, err)
	}
	return info, nil
}

// Members lists the members of the flow by name, and its assignment (zero when
// there is none).
func (c *Control) Members(ctx context.Context) ([]MemberInfo, Assignment, error) {
	members, assigned, err := c.members(ctx)
	if err != nil {
		return nil, assigned, fmt.Errorf("list members: %w", err)
	}
	return members, assigned, nil
}

func (c *Control) members(ctx context.Context) ([]MemberInfo, Assignment, error) {
	var assigned Assignment
	items, err := c.bucket.List(ctx, c.cfg.Flow+".>")
	if err != nil {
		return nil, assigned, err
	}
	var members []MemberInfo
	tasks := make(map[string][]string) // by instance
	for _, item := range items {
		kind, rest, _ := strings.Cut(strings.TrimPrefix(item.Key, c.cfg.Flow+"."), ".")
		switch kind {
		case "assignment":
			if assigned, err = assignmentOf(item); err != nil {
				return nil, assigned, err
			}
		case "task":
			rec, err := taskOf(item)
			if err != nil {
				return nil, assigned, err
			}
			tasks[rec.Instance] = append(tasks[rec.Instance], rest)
		case "member":
			info, err := memberOf(item)
			if err != nil {
				return nil, assigned, err
			}
			info.Renewed, info.Age = item.Time, max(0, time.Since(item.Time))
			members = append(members, info)
		}
	}
	for i := range members {
		members[i].Tasks = sortedSet(tasks[members[i].Instance])
	}
	slices.SortFunc(members, func(a, b MemberInfo) int { return strings.Compare(a.Name, b.Name) })
	return members, assigned, nil
}

// live lists the members that have a lease, without their tasks. An entry that
// cannot be read is none that tasks could be assigned to.
func (c *Control) live(ctx context.Context) ([]MemberInfo, error) {
	items, err := c.bucket.List(ctx, memberKey(c.cfg.Flow, ">"))
	if err != nil {
		return nil, err
	}
	members := make([]MemberInfo, 0, len(items))
	for _, item := range items {
		if info, err := memberOf(item); err == nil {
			members = append(members, info)
		}
	}
	return members, nil
}

func assignmentOf(item bus.Item) (Assignment, error) {
	a, err := decodeAssignment(item.Value)
	if err != nil {
		return a, fmt.Errorf("key %s of bucket %s: %w", item.Key, BucketName, err)
	}
	return a, nil
}

// readAssignment returns the assignment and its revision; zero and 0 when there
// is none.
func (c *Control) readAssignment(ctx context.Context) (Assignment, uint64, error) {
	item, err := c.bucket.Get(ctx, assignmentKey(c.cfg.Flow))
	if errors.Is(err, bus.ErrNotFound) {
		return Assignment{}, 0, nil
	}
	if err != nil {
		return Assignment{}, 0, err
	}
	a, err := assignmentOf(item)
	return a, item.Seq, err
}

// writeAssignment writes the assignment if its revision is rev.
func (c *Control) writeAssignment(ctx context.Context, a Assignment, rev uint64) (uint64, error) {
	value, err := encodeAssignment(a)
	if err != nil {
		return 0, err
	}
	key := assignmentKey(c.cfg.Flow)
	if rev == 0 {
		return c.bucket.Create(ctx, key, value, 0)
	}
	return c.bucket.Update(ctx, key, value, rev, 0)
}
