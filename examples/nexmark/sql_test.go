package main

import (
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"modernc.org/sqlite"

	"natsflow/examples/nexmark/gen"
)

// The judge of the queries: the same events in tables, and the question in SQL.

// events are those of a data set, in the order of their coming.
type events struct {
	name string
	all  []gen.Event
	// data are the events as JSON.
	data []string
	// every is the time from one event to the next by the clock of the stream.
	every time.Duration
	db    *sql.DB
}

// streamStart is the timestamp of the first event in the stream.
var streamStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// taken returns the timestamp that the stream gives an event.
func (e *events) taken(i int) time.Time { return streamStart.Add(time.Duration(i) * e.every) }

// last is an event of a kind that is long after all others and has to do with none of
// them: time has passed for what they have left open.
func (e *events) last(kind string) gen.Event {
	at := e.all[len(e.all)-1].Time() + gen.Time(time.Hour.Milliseconds())
	if kind == gen.AuctionEvent {
		return gen.Event{Auction: &gen.Auction{Event: gen.AuctionEvent, DateTime: at, Expires: at}}
	}
	return gen.Event{Bid: &gen.Bid{Event: gen.BidEvent, DateTime: at}}
}

// dataSets are the events of the file; some around midnight; and slow ones at the end
// of a day, of which windows and auctions have few.
func dataSets(t *testing.T) []*events {
	midnight, evening := standard, standard
	midnight.Seed, midnight.Base = 2, time.Date(2015, 7, 15, 23, 58, 20, 0, time.UTC)
	evening.Seed, evening.Base = 3, time.Date(2015, 7, 15, 18, 58, 0, 0, time.UTC)
	evening.Rate, evening.OutOfOrder = 1, 1
	return []*events{
		newEvents(t, "file", standard, standardEvents),
		newEvents(t, "midnight", midnight, 6000),
		newEvents(t, "evening", evening, 4000),
	}
}

func newEvents(t *testing.T, name string, cfg gen.Config, n int) *events {
	t.Helper()
	g, err := gen.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	set := &events{name: name, every: time.Second / time.Duration(cfg.Rate)}
	for i := range n {
		e := g.Event(i)
		set.all, set.data = append(set.all, e), append(set.data, string(e.JSON()))
	}
	set.load(t)
	return set
}

const schema = `
CREATE TABLE person (seq INTEGER PRIMARY KEY, at INTEGER, taken INTEGER,
	id INTEGER, name TEXT, emailAddress TEXT, creditCard TEXT, city TEXT, state TEXT, dateTime TEXT, extra TEXT);
CREATE TABLE auction (seq INTEGER PRIMARY KEY, at INTEGER, taken INTEGER,
	id INTEGER, itemName TEXT, description TEXT, initialBid INTEGER, reserve INTEGER, dateTime TEXT, expires TEXT, ends INTEGER,
	seller INTEGER, category INTEGER, extra TEXT);
CREATE TABLE bid (seq INTEGER PRIMARY KEY, at INTEGER, taken INTEGER,
	auction INTEGER, bidder INTEGER, price INTEGER, channel TEXT, url TEXT, dateTime TEXT, extra TEXT);
CREATE TABLE side_input (key INTEGER PRIMARY KEY, value TEXT);
CREATE INDEX auction_id ON auction (id);
CREATE INDEX person_id ON person (id);
CREATE INDEX bid_auction ON bid (auction);`

// load puts the events into a database. The columns besides the members are seq, the
// place in the stream, and times in milliseconds: at is the event's own, taken that of
// the stream, ends that at which an auction expires.
func (e *events) load(t *testing.T) {
	t.Helper()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(1) // each connection has a memory of its own
	if _, err := db.ExecContext(t.Context(), schema); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	insert := map[string]*sql.Stmt{}
	for table, columns := range map[string]int{gen.PersonEvent: 11, gen.AuctionEvent: 14, gen.BidEvent: 10} {
		marks := strings.Repeat(", ?", columns)[2:]
		if insert[table], err = tx.PrepareContext(t.Context(), "INSERT INTO "+table+" VALUES ("+marks+")"); err != nil {
			t.Fatal(err)
		}
	}
	for i, event := range e.all {
		row := []any{i + 1, int64(event.Time()), e.taken(i).UnixMilli()}
		switch {
		case event.Person != nil:
			p := event.Person
			row = append(row, p.ID, p.Name, p.Email, p.CreditCard, p.City, p.State, timeText(t, p.DateTime), p.Extra)
		case event.Auction != nil:
			a := event.Auction
			row = append(row, a.ID, a.ItemName, a.Description, a.InitialBid, a.Reserve, timeText(t, a.DateTime), timeText(t, a.Expires),
				int64(a.Expires), a.Seller, a.Category, a.Extra)
		default:
			b := event.Bid
			row = append(row, b.Auction, b.Bidder, b.Price, b.Channel, b.URL, timeText(t, b.DateTime), b.Extra)
		}
		if _, err := insert[event.Kind()].ExecContext(t.Context(), row...); err != nil {
			t.Fatal(err)
		}
	}
	for key, value := range sideInput() {
		if _, err := tx.ExecContext(t.Context(), "INSERT INTO side_input VALUES (?, ?)", key, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	e.db = db
}

// sideInput is what query 13 looks up: a text for two of three auctions.
func sideInput() map[int]string {
	side := map[int]string{}
	for key := range 2000 {
		if key%3 > 0 {
			side[key] = fmt.Sprintf("text %d", key)
		}
	}
	return side
}

func timeText(t *testing.T, at gen.Time) string {
	t.Helper()
	text, err := at.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestMain gives the queries rfc3339(milliseconds), the text of a time.
func TestMain(m *testing.M) {
	sqlite.MustRegisterDeterministicScalarFunction("rfc3339", 1, func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
		ms, ok := args[0].(int64)
		if !ok {
			return nil, fmt.Errorf("rfc3339 of %T", args[0])
		}
		text, err := gen.Time(ms).MarshalText()
		return string(text), err
	})
	os.Exit(m.Run())
}

// row is a result, its values as JSON has them.
type row map[string]any

// ask runs the SQL of a query.
func (e *events) ask(t *testing.T, query string) []row {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(query, "query.sql"))
	if err != nil {
		t.Fatal(err)
	}
	res, err := e.db.QueryContext(t.Context(), string(text))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	columns, err := res.Columns()
	if err != nil {
		t.Fatal(err)
	}
	var rows []row
	for res.Next() {
		values, into := make([]any, len(columns)), make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		if err := res.Scan(into...); err != nil {
			t.Fatal(err)
		}
		r := map[string]any{}
		for i, name := range columns {
			r[name] = values[i]
			// SQLite has JSON as text.
			if s, ok := values[i].(string); ok && (strings.HasPrefix(s, "[") || strings.HasPrefix(s, "{")) {
				r[name] = json.RawMessage(s)
			}
		}
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		rows = append(rows, rowOf(t, data))
	}
	if err := res.Err(); err != nil {
		t.Fatal(err)
	}
	return rows
}

// rowOf reads a result in JSON, with times written in one way.
func rowOf(t *testing.T, data []byte) row {
	t.Helper()
	var r row
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatalf("%v in %s", err, data)
	}
	for name, v := range r {
		r[name] = sameTimes(v)
	}
	return r
}

func sameTimes(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for name := range v {
			v[name] = sameTimes(v[name])
		}
	case []any:
		for i := range v {
			v[i] = sameTimes(v[i])
		}
	case string:
		if len(v) < len("2006-01-02T15:04:05Z") || v[10] != 'T' {
			return v
		}
		if at, err := time.Parse(time.RFC3339Nano, v); err == nil {
			return at.UTC().Format(time.RFC3339Nano)
		}
	}
	return v
}
