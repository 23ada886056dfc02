package main

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"natsflow/control"
	"natsflow/worker"
)

// member is a worker process of a flow, as it says itself.
type member struct {
	Name    string         `json:"name"`
	Host    string         `json:"host"`
	PID     int            `json:"pid"`
	Started time.Time      `json:"started"`
	Active  bool           `json:"active"`
	Renewed time.Time      `json:"renewed"`
	Status  *worker.Status `json:"status,omitempty"`
}

// listMembers returns the members of a flow, the active one first.
func listMembers(ctx context.Context, ctl *control.Control) ([]member, error) {
	list, assignment, err := ctl.Members(ctx)
	if err != nil {
		return nil, err
	}
	members := make([]member, 0, len(list))
	for _, m := range list {
		v := member{
			Name: m.Name, Host: m.Host, PID: m.PID, Started: m.Started, Renewed: m.Renewed,
			Active: assignment.Owner == m.Name && assignment.Instance == m.Instance,
		}
		var st worker.Status
		if len(m.Status) > 0 && json.Unmarshal(m.Status, &st) == nil {
			v.Status = &st
		}
		members = append(members, v)
	}
	slices.SortFunc(members, func(a, b member) int {
		if a.Active != b.Active {
			if a.Active {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.Name, b.Name)
	})
	return members, nil
}

// sortedKeys returns the keys of a map in order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
