package flowspec

import (
	"bufio"
	"compress/gzip"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	_ "modernc.org/sqlite"

	"natsflow/flow/flowtest"
)

// The judge of windows: the same records in a table, and the same question in SQL.

// event is a record with a time in seconds; v is nil for null.
type event struct {
	key  string
	at   int64
	v    *int64
	json string
}

func flights(t *testing.T) []event {
	t.Helper()
	file, err := os.Open("../examples/flights/flights.ndjson.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	var all []event
	for lines := bufio.NewScanner(unzipped); lines.Scan(); {
		var f struct {
			Date   time.Time
			Origin string
			Delay  *int64
		}
		if err := json.Unmarshal(lines.Bytes(), &f); err != nil {
			t.Fatal(err)
		}
		all = append(all, event{f.Origin, f.Date.Unix(), f.Delay, lines.Text()})
	}
	if len(all) != 20_000 {
		t.Fatalf("%d flights", len(all))
	}
	return all
}

// generated are events of which some come hours late, with runs and gaps.
func generated(seed uint64) []event {
	rng := rand.New(rand.NewPCG(seed, 3))
	now := time.Date(2025, 12, 30, 20, 0, 0, 0, time.UTC).Unix()
	var all []event
	for range 3000 {
		if now += rng.Int64N(240); rng.IntN(200) == 0 {
			now += rng.Int64N(40_000)
		}
		e := event{key: fmt.Sprintf("k%d", rng.IntN(12)), at: now}
		switch rng.IntN(12) {
		case 0:
			e.at -= rng.Int64N(20_000)
		case 1, 2, 3:
			e.at -= rng.Int64N(1800)
		}
		v := "null"
		if rng.IntN(9) > 0 {
			n := rng.Int64N(100) - 20
			e.v = &n
			v = fmt.Sprint(n)
		}
		e.json = fmt.Sprintf(`{"date":%q,"origin":%q,"delay":%s}`, time.Unix(e.at, 0).UTC().Format(time.RFC3339), e.key, v)
		all = append(all, e)
	}
	return all
}

// table puts the events into a database, each with the watermark before it: the
// highest time of all events before, less the lateness.
func table(t *testing.T, events []event, lateness time.Duration) *sql.DB {
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
	exec("CREATE TABLE raw (seq INTEGER PRIMARY KEY, k TEXT, at INTEGER, v INTEGER)")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range events {
		if _, err := tx.ExecContext(t.Context(), "INSERT INTO raw VALUES (?, ?, ?, ?)", i+1, e.key, e.at, e.v); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	exec(`CREATE TABLE events AS SELECT *, coalesce(max(at) OVER (ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) - ?, -1000000000000) AS mark FROM raw`, int64(lateness/time.Second))
	exec("DELETE FROM events WHERE v IS NULL") // the filter of the flow, behind its clock
	return db
}

// rows runs a query with columns key, start, end, n, sum and returns lines.
func rows(t *testing.T, db *sql.DB, query string) []string {
	t.Helper()
	res, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	var all []string
	for res.Next() {
		var key string
		var start, end, n, sum int64
		if err := res.Scan(&key, &start, &end, &n, &sum); err != nil {
			t.Fatal(err)
		}
		all = append(all, line(key, time.Unix(start, 0), time.Unix(end, 0), n, sum))
	}
	if err := res.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

func line(key string, start, end time.Time, n, sum int64) string {
	return fmt.Sprintf("%s %s %s %d %d", key, start.UTC().Format(time.RFC3339), end.UTC().Format(time.RFC3339), n, sum)
}

const lateQuery = "SELECT 'late', 0, 0, count(*), 0 FROM events WHERE "

// TestWindows_SQL asks a flow and SQL for tumbling, sliding and session windows, and
// for the number of records that are late, calmly and with a crash or a stop now and
// then.
func TestWindows_SQL(t *testing.T) {
	sources := map[string][]event{"flights": flights(t), "generated": generated(1), "generated again": generated(2)}
	for _, tc := range []struct {
		name     string
		lateness time.Duration
		window   string
		query    string
		late     string
	}{
		{
			"tumbling", 30 * time.Minute, "{tumbling: 1h}",
			`WITH w AS (SELECT *, at/3600*3600 AS start, at/3600*3600 + 3600 AS end FROM events)
			 SELECT k, start, end, count(*), sum(v) FROM w WHERE end > mark GROUP BY k, start`,
			"at/3600*3600 + 3600 <= mark",
		},
		{
			"tumbling, allowed lateness", 10 * time.Minute, "{tumbling: 90m, offset: 15m, allowed_lateness: 20m}",
			`WITH w AS (SELECT *, (at-900)/5400*5400 + 900 AS start, (at-900)/5400*5400 + 6300 AS end FROM events)
			 SELECT k, start, end, count(*), sum(v) FROM w WHERE end + 1200 > mark GROUP BY k, start`,
			"(at-900)/5400*5400 + 6300 + 1200 <= mark",
		},
		{
			"sliding", 20 * time.Minute, "{sliding: {size: 1h, every: 15m}}",
			`WITH i AS (SELECT 0 AS i UNION SELECT 1 UNION SELECT 2 UNION SELECT 3),
			 w AS (SELECT *, at/900*900 - i*900 AS start, at/900*900 - i*900 + 3600 AS end FROM events, i)
			 SELECT k, start, end, count(*), sum(v) FROM w WHERE end > mark GROUP BY k, start`,
			"at/900*900 + 3600 <= mark",
		},
		{
			"days", time.Second, "{tumbling: 1d}",
			`WITH w AS (SELECT *, at/86400*86400 AS start, at/86400*86400 + 86400 AS end FROM events)
			 SELECT k, start, end, count(*), sum(v) FROM w WHERE end > mark GROUP BY k, start`,
			"at/86400*86400 + 86400 <= mark",
		},
		{
			// With enough lateness the order of arrival does not matter.
			"session", 5 * 365 * 24 * time.Hour, "{session: {gap: 40m}}",
			`WITH gaps AS (SELECT *, coalesce(at - lag(at) OVER (PARTITION BY k ORDER BY at) >= 2400, 1) AS first FROM events),
			 s AS (SELECT *, sum(first) OVER (PARTITION BY k ORDER BY at ROWS UNBOUNDED PRECEDING) AS session FROM gaps)
			 SELECT k, min(at), max(at) + 2400, count(*), sum(v) FROM s GROUP BY k, session`,
			"at < mark",
		},
	} {
		for name, events := range sources {
			for _, disturbed := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/disturbed=%v", tc.name, name, disturbed), func(t *testing.T) {
					db := table(t, events, tc.lateness)
					want := append(rows(t, db, tc.query), rows(t, db, lateQuery+tc.late)...)
					got := windowsOf(t, events, tc.lateness, tc.window, disturbed)
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("(-SQL +flow):\n%.4000s", diff)
					}
					if late := want[len(want)-1]; len(want) < 50 || tc.name == "tumbling" && late == line("late", time.Unix(0, 0), time.Unix(0, 0), 0, 0) {
						t.Errorf("only %d windows, and %s", len(want), late)
					}
				})
			}
		}
	}
}

// TestWindows_SQL_stages asks for windows of windows behind changes of the key. What is
// late is so in the first stage.
func TestWindows_SQL_stages(t *testing.T) {
	sources := map[string][]event{"flights": flights(t), "generated": generated(1)}
	const steps = `
  - key: {expr: 'key[len(key)-1:]'}
  - aggregate: {n: sum(n), sum: sum(sum), parts: count()}
    window: {tumbling: 6h}
    late: {stream: LATE, subject: late}
  - key: {expr: 'parts > 1 ? "many" : "one"'}
  - aggregate: {n: sum(n), sum: sum(sum)}
    window: {tumbling: 1d}
    late: {stream: LATE, subject: late}
`
	const query = `WITH hours AS (SELECT k, at/3600*3600 AS start, count(*) AS n, sum(v) AS v FROM events WHERE at/3600*3600 + 3600 + 1200 > mark GROUP BY k, 2),
		six AS (SELECT substr(k, -1) AS k, start/21600*21600 AS start, sum(n) AS n, sum(v) AS v, count(*) AS parts FROM hours GROUP BY substr(k, -1), 2),
		days AS (SELECT CASE WHEN parts > 1 THEN 'many' ELSE 'one' END AS k, start/86400*86400 AS start, n, v FROM six)
		SELECT k, start, start + 86400, sum(n), sum(v) FROM days GROUP BY k, start`
	for name, events := range sources {
		for _, disturbed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/disturbed=%v", name, disturbed), func(t *testing.T) {
				db := table(t, events, 10*time.Minute)
				want := append(rows(t, db, query), rows(t, db, lateQuery+"at/3600*3600 + 3600 + 1200 <= mark")...)
				got := windowsOf(t, events, 10*time.Minute, "{tumbling: 1h, allowed_lateness: 20m}", disturbed, steps)
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("(-SQL +flow):\n%.4000s", diff)
				}
				if len(want) < 10 {
					t.Errorf("only %d windows", len(want))
				}
			})
		}
	}
}

// windowsOf runs the flow, with more steps behind the window.
func windowsOf(t *testing.T, events []event, lateness time.Duration, window string, disturbed bool, more ...string) []string {
	t.Helper()
	s, err := Parse("flow.yaml", fmt.Appendf(nil, `
flow: windows
partitions: 8
source: {stream: IN, time: {path: date, lateness: %s, max_ahead: 10000d}}
steps:
  - filter: delay != nil
  - key: origin
  - aggregate: {n: count(), sum: sum(delay)}
    window: %s
    late: {stream: LATE, subject: late}
%s
  - to: {stream: OUT, subject: "out.{key}"}
`, lateness, window, strings.Join(more, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Build()
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(9, 9))
	r := flowtest.New(t, f)
	for chunk := range slices.Chunk(events, 97) {
		var records []flowtest.Record
		for _, e := range chunk {
			records = append(records, flowtest.Record{Data: e.json})
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
	// One that is later than all closes all windows but its own.
	r.Push(flowtest.Record{Data: `{"date":"2049-01-01T00:00:00Z","origin":"end","delay":1}`})
	var got []string
	for _, data := range r.Data("OUT") {
		var res struct {
			Key    string
			Window struct{ Start, End time.Time }
			N, Sum int64
		}
		if err := json.Unmarshal([]byte(data), &res); err != nil {
			t.Fatal(err)
		}
		got = append(got, line(res.Key, res.Window.Start, res.Window.End, res.N, res.Sum))
	}
	slices.Sort(got)
	late := len(r.Data("LATE"))
	if late != r.Late() {
		t.Errorf("%d late records came out, %d were counted", late, r.Late())
	}
	if errs := r.Errors(); len(errs) > 0 {
		t.Errorf("dead letters: %s", strings.Join(errs[:1], ""))
	}
	return append(got, line("late", time.Unix(0, 0), time.Unix(0, 0), int64(late), 0))
}
