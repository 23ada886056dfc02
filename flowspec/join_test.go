package flowspec

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"natsflow/flow/flowtest"
)

// joinEvent is a record of one of two streams.
type joinEvent struct {
	left bool
	id   int
	key  string
	at   int64
	// v is null for some.
	v *int64
}

func (e joinEvent) json() string {
	v := "null"
	if e.v != nil {
		v = fmt.Sprint(*e.v)
	}
	return fmt.Sprintf(`{"id":%d,"k":%q,"at":%d,"v":%s}`, e.id, e.key, e.at, v)
}

// joinEvents are events of two streams, each up to half an hour out of order.
func joinEvents(seed uint64, n int) []joinEvent {
	rng := rand.New(rand.NewPCG(seed, 11))
	now := map[bool]int64{true: 1_767_225_600, false: 1_767_225_600}
	var all []joinEvent
	for i := range n {
		left := rng.IntN(2) == 0
		now[left] += rng.Int64N(200)
		e := joinEvent{left: left, id: i, key: fmt.Sprintf("k%d", rng.IntN(9)), at: now[left]}
		if rng.IntN(3) == 0 {
			e.at -= rng.Int64N(1800)
		}
		if rng.IntN(5) > 0 {
			v := rng.Int64N(100)
			e.v = &v
		}
		all = append(all, e)
	}
	return all
}

// joinDatabase puts the events into the tables l and r. In r, the next record of the
// same key has the time next.
func joinDatabase(t *testing.T, events []joinEvent) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(1) // each connection has a memory of its own
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
			t.Fatal(err)
		}
	}
	for _, table := range []string{"l", "s"} {
		exec("CREATE TABLE " + table + " (id INTEGER, k TEXT, at INTEGER, v INTEGER)")
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		table := map[bool]string{true: "l", false: "s"}[e.left]
		if _, err := tx.ExecContext(t.Context(), "INSERT INTO "+table+" VALUES (?, ?, ?, ?)", e.id, e.key, e.at, e.v); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	exec("CREATE TABLE r AS SELECT *, coalesce(lead(at) OVER (PARTITION BY k ORDER BY at, id), 9e18) AS next FROM s")
	return db
}

// joinRows are pairs of ids; - for none.
func joinRows(t *testing.T, db *sql.DB, query string) []string {
	t.Helper()
	res, err := db.QueryContext(t.Context(), "SELECT coalesce(l.id, '-') || ' ' || coalesce(r.id, '-') FROM "+query)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	var all []string
	for res.Next() {
		var pair string
		if err := res.Scan(&pair); err != nil {
			t.Fatal(err)
		}
		all = append(all, pair)
	}
	if err := res.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

// TestJoins_SQL asks a flow and SQL for joins, calmly and with a crash or a stop now
// and then. No record is late.
func TestJoins_SQL(t *testing.T) {
	for _, tc := range []struct{ name, join, window, query string }{
		{"inner", "within: 10m", "", "l JOIN r ON l.k = r.k AND r.at BETWEEN l.at - 600 AND l.at + 600"},
		{"inner, when", "within: {before: 10m, after: 1h}, when: r.v > v", "", "l JOIN r ON l.k = r.k AND r.at BETWEEN l.at - 600 AND l.at + 3600 AND r.v > l.v"},
		{"inner, forever", "within: {before: forever, after: 0s}, when: r.v % 10 == v % 10", "", "l JOIN r ON l.k = r.k AND r.at <= l.at AND r.v % 10 = l.v % 10"},
		{"left", "within: {before: 2m, after: 3m}, type: left", "", "l LEFT JOIN r ON l.k = r.k AND r.at BETWEEN l.at - 120 AND l.at + 180"},
		{"left, when", "within: {before: 0s, after: 20m}, type: left, when: v + r.v > 100", "", "l LEFT JOIN r ON l.k = r.k AND r.at BETWEEN l.at AND l.at + 1200 AND l.v + r.v > 100"},
		{"outer", "within: {before: 2m, after: 5m}, type: outer", "", "l FULL JOIN r ON l.k = r.k AND r.at BETWEEN l.at - 120 AND l.at + 300"},
		{"outer, when", "within: 15m, type: outer, when: v < r.v", "", "l FULL JOIN r ON l.k = r.k AND r.at BETWEEN l.at - 900 AND l.at + 900 AND l.v < r.v"},
		{"windows", "type: outer", "{tumbling: 10m}", "l FULL JOIN r ON l.k = r.k AND l.at/600 = r.at/600"},
		{"windows from a quarter past", "type: left", "{tumbling: 1h, offset: 15m}", "l LEFT JOIN r ON l.k = r.k AND (l.at-900)/3600 = (r.at-900)/3600"},
		{"table", "table: true", "", "l JOIN r ON l.k = r.k AND r.at <= l.at AND l.at < r.next"},
		{"table, left", "table: true, type: left", "", "l LEFT JOIN r ON l.k = r.k AND r.at <= l.at AND l.at < r.next"},
		{"table, deletes", "table: true, type: left, deletes: v > 50", "", "l LEFT JOIN r ON l.k = r.k AND r.at <= l.at AND l.at < r.next AND NOT coalesce(r.v, 0) > 50"},
		{"table, when", "table: true, type: left, when: v == nil or r.v > v", "", "l LEFT JOIN r ON l.k = r.k AND r.at <= l.at AND l.at < r.next AND (l.v IS NULL OR r.v > l.v)"},
	} {
		for _, disturbed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/disturbed=%v", tc.name, disturbed), func(t *testing.T) {
				events := joinEvents(5, 1500)
				want := joinRows(t, joinDatabase(t, events), tc.query)
				got := joinsOf(t, events, tc.join, tc.window, disturbed)
				if diff := gocmp.Diff(want, got); diff != "" {
					t.Errorf("(-SQL +flow):\n%.3000s", diff)
				}
				if len(want) < 400 {
					t.Errorf("only %d results", len(want))
				}
			})
		}
	}
}

// TestJoins_Flights joins a stream with itself: flights that leave where another one
// goes to, soon after that has left.
func TestJoins_Flights(t *testing.T) {
	s, err := Parse("flow.yaml", []byte(`
flow: flights
sources: {flights: {stream: IN, time: {path: date, lateness: 30m, max_ahead: 10000d}}}
steps:
  arrivals:
    from: flights
    steps:
      - key: destination
      - join: {with: departures, within: {before: 0s, after: 20m}, type: left, as: next}
        late: {stream: LATE, subject: late}
      - map: {d: date, from: origin, at: destination, nd: next.date, to: next.destination}
      - to: {stream: OUT, subject: "out.{key}"}
  departures: {from: flights, steps: [{key: origin}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	events := flights(t)[:6000]
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1) // each connection has a memory of its own
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec("CREATE TABLE f (d TEXT, at INTEGER, a TEXT, b TEXT)")
	r := flowtest.New(t, f)
	for i, e := range events {
		exec("INSERT INTO f SELECT j ->> 'date', ?, j ->> 'origin', j ->> 'destination' FROM (SELECT ? AS j)", e.at, e.json)
		r.Push(flowtest.Record{Data: e.json})
		if i%777 == 0 {
			r.Crash(i % 16)
		}
	}
	r.Push(flowtest.Record{Data: `{"date":"2049-01-01T00:00:00Z","origin":"x","destination":"y"}`})
	got := r.Data("OUT")
	res, err := db.QueryContext(t.Context(), `SELECT json_object('d', l.d, 'from', l.a, 'at', l.b, 'nd', r.d, 'to', r.b)
		FROM f l LEFT JOIN f r ON l.b = r.a AND r.at BETWEEN l.at AND l.at + 1200`)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	var want []string
	for res.Next() {
		var row string
		if err := res.Scan(&row); err != nil {
			t.Fatal(err)
		}
		want = append(want, row)
	}
	if err := res.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := gocmp.Diff(want, got); diff != "" || len(want) <= len(events) {
		t.Errorf("%d rows of %d flights (-SQL +flow):\n%.2000s", len(want), len(events), diff)
	}
}

// joinsOf runs the flow.
func joinsOf(t *testing.T, events []joinEvent, join, window string, disturbed bool) []string {
	t.Helper()
	if window != "" {
		window = "        window: " + window + "\n"
	}
	s, err := Parse("flow.yaml", fmt.Appendf(nil, `
flow: joins
partitions: 8
sources:
  left: {stream: L, time: {path: at, format: unix, lateness: 30m, max_ahead: 10000d}}
  right: {stream: R, time: {path: at, format: unix, lateness: 30m, max_ahead: 10000d}}
steps:
  joined:
    from: left
    steps:
      - key: k
      - join: {with: others, as: r, %s}
%s      - to: {stream: OUT, subject: "out.{key}"}
  others: {from: right, steps: [{key: k}]}
`, join, window))
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(9, 9))
	r := flowtest.New(t, f)
	record := func(e joinEvent) flowtest.Record {
		return flowtest.Record{Stream: map[bool]string{true: "L", false: "R"}[e.left], Data: e.json()}
	}
	for chunk := range slices.Chunk(events, 97) {
		var records []flowtest.Record
		for _, e := range chunk {
			records = append(records, record(e))
		}
		r.Push(records...)
		if !disturbed {
			continue
		}
		switch rng.IntN(6) {
		case 0:
			r.Crash()
		case 1:
			r.Commit()
		case 2:
			r.Drain()
		case 3:
			r.Crash(rng.IntN(8), rng.IntN(8))
		}
	}
	for _, at := range []int64{2_000_000_000, 2_000_100_000} {
		r.Push(record(joinEvent{left: true, id: -1, key: "end", at: at}), record(joinEvent{id: -2, key: "end", at: at}))
	}
	var got []string
	for _, data := range r.Data("OUT") {
		var res struct {
			ID *int
			R  *struct{ ID *int }
		}
		if err := json.Unmarshal([]byte(data), &res); err != nil {
			t.Fatal(err)
		}
		id := func(p *int) string {
			if p == nil {
				return "-"
			}
			return fmt.Sprint(*p)
		}
		other := "-"
		if res.R != nil {
			other = id(res.R.ID)
		}
		if pair := id(res.ID) + " " + other; !strings.Contains(pair, "-1") && !strings.Contains(pair, "-2") {
			got = append(got, pair)
		}
	}
	slices.Sort(got)
	if errs := r.Errors(); len(errs) > 0 || r.Late() > 0 {
		t.Errorf("%d late, dead letters: %s", r.Late(), strings.Join(errs[:min(1, len(errs))], ""))
	}
	return got
}
