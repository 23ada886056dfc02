package flowspec

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"natsflow/flow/flowtest"
)

const sqlAggregateFlow = `
flow: judged
partitions: 8
source: {stream: IN, time: {path: date, lateness: 1h, max_ahead: 10000d}}
steps:
  - filter: delay != nil
  - key: origin
  - aggregate:
      n: count()
      all: collect(delay, 5)
      best: top(delay, 3)
      worst: bottom(delay, 3)
      last: top(delay, 4, date)
      kinds: distinct(delay)
      about: approx_distinct(delay)
      p90: percentile(delay, 90)
      spread: stddev(delay)
      variance: variance_pop(delay)
%s
  - to: {stream: OUT, subject: "out.{key}"}
`

// judged is a result of that flow, and a row of the query.
type judged struct {
	Key                    string
	N                      int64
	All, Best, Worst, Last []int64
	Kinds                  int64
	About, P90             float64
	Spread                 *float64
	Variance               float64
}

// judgeQuery asks the same of SQLite. Records of one date and key are in the order of the
// stream.
const judgeQuery = `
WITH w AS (SELECT *, %s AS start FROM events),
live AS (SELECT * FROM w WHERE start + 86400 > mark),
r AS (SELECT *,
	row_number() OVER (PARTITION BY k, start ORDER BY seq) AS nth,
	row_number() OVER (PARTITION BY k, start ORDER BY v DESC, seq) AS high,
	row_number() OVER (PARTITION BY k, start ORDER BY v, seq) AS low,
	row_number() OVER (PARTITION BY k, start ORDER BY at DESC, seq) AS late,
	count(*) OVER (PARTITION BY k, start) AS size
	FROM live)
SELECT k, count(*),
	json_group_array(v ORDER BY nth) FILTER (WHERE nth <= 5),
	json_group_array(v ORDER BY high) FILTER (WHERE high <= 3),
	json_group_array(v ORDER BY low) FILTER (WHERE low <= 3),
	json_group_array(v ORDER BY late) FILTER (WHERE late <= 4),
	count(DISTINCT v), max(v) FILTER (WHERE low = (90*size + 99)/100),
	CASE WHEN count(*) > 1 THEN sqrt((sum(v*v) - 1.0*sum(v)*sum(v)/count(*)) / (count(*)-1)) END,
	(sum(v*v) - 1.0*sum(v)*sum(v)/count(*)) / count(*)
FROM r GROUP BY k, start ORDER BY k, start`

// TestAggregates_SQL asks a flow and SQL the same, over all records of a key, and by days.
func TestAggregates_SQL(t *testing.T) {
	for name, events := range map[string][]event{"flights": flights(t), "generated": generated(3)} {
		for window, start := range map[string]string{"": "9e18", "    window: {tumbling: 1d}": "at/86400*86400"} {
			t.Run(fmt.Sprintf("%s/windows=%v", name, window != ""), func(t *testing.T) {
				want := judge(t, table(t, events, 3600e9), fmt.Sprintf(judgeQuery, start))
				got := aggregatesOf(t, events, window)
				near := cmp.FilterPath(func(p cmp.Path) bool {
					field := p.String()
					return field == "Spread" || field == "Variance"
				}, cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, a, b) }))
				about := cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "P90" },
					cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= 0.01*max(math.Abs(a), math.Abs(b)) }))
				if diff := cmp.Diff(want, got, near, about); diff != "" {
					t.Errorf("(-SQL +flow):\n%.4000s", diff)
				}
				if len(want) < 12 {
					t.Errorf("only %d rows", len(want))
				}
			})
		}
	}
}

func judge(t *testing.T, db *sql.DB, query string) []judged {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []judged
	for rows.Next() {
		var j judged
		var lists [4]string
		if err := rows.Scan(&j.Key, &j.N, &lists[0], &lists[1], &lists[2], &lists[3], &j.Kinds, &j.P90, &j.Spread, &j.Variance); err != nil {
			t.Fatal(err)
		}
		for i, list := range []*[]int64{&j.All, &j.Best, &j.Worst, &j.Last} {
			if err := json.Unmarshal([]byte(lists[i]), list); err != nil {
				t.Fatal(err)
			}
		}
		// So few values are counted without an error.
		j.About = float64(j.Kinds)
		all = append(all, j)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// aggregatesOf runs the flow with a crash or a stop now and then, and returns the last result
// of each key, or that of each window.
func aggregatesOf(t *testing.T, events []event, window string) []judged {
	t.Helper()
	s, err := Parse("flow.yaml", fmt.Appendf(nil, sqlAggregateFlow, window))
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(9, 9))
	r := flowtest.New(t, f)
	for chunk := range slices.Chunk(events, 501) {
		var records []flowtest.Record
		for _, e := range chunk {
			records = append(records, flowtest.Record{Data: e.json})
		}
		r.Push(records...)
		switch rng.IntN(6) {
		case 0:
			r.Crash(rng.IntN(8), rng.IntN(8))
		case 1:
			r.Drain()
		}
	}
	if window != "" {
		r.Push(flowtest.Record{Data: `{"date":"2049-01-01T00:00:00Z","origin":"end","delay":1}`})
	}
	var all []judged
	last := map[string]int{}
	for _, data := range r.Data("OUT") {
		var j judged
		if err := json.Unmarshal([]byte(data), &j); err != nil {
			t.Fatal(err)
		}
		if at, there := last[j.Key]; there && window == "" {
			all[at] = j
			continue
		}
		last[j.Key] = len(all)
		all = append(all, j)
	}
	slices.SortStableFunc(all, func(a, b judged) int {
		switch {
		case a.Key < b.Key:
			return -1
		case a.Key > b.Key:
			return 1
		}
		return 0
	})
	return all
}
