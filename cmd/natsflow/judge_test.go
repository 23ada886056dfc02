package main

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"natsflow/bus"
)

// delays is a result of the example flow.
type delays struct {
	Key     string  `json:"key"`
	Flights int     `json:"flights"`
	Late    int     `json:"late"`
	Avg     float64 `json:"avg_delay"`
	Worst   int     `json:"worst"`
}

// judge compares the results in DELAYS with those that they should be, by key.
func judge(t *testing.T, conn *bus.Conn, want map[string][]delays) {
	t.Helper()
	got := map[string][]delays{}
	total := 0
	err := readStream(t.Context(), conn, bus.CursorConfig{Stream: "DELAYS", Subjects: []string{"delays.*"}}, func(m *bus.Msg) {
		var d delays
		if err := json.Unmarshal(m.Data, &d); err != nil {
			t.Errorf("result %d is not JSON: %v", m.Seq, err)
		}
		if m.Subject != "delays."+d.Key {
			t.Errorf("result %d of key %s has subject %s", m.Seq, d.Key, m.Subject)
		}
		got[d.Key] = append(got[d.Key], d)
		total++
	})
	if err != nil {
		t.Fatal(err)
	}
	for key, results := range want {
		if err := compare(results, got[key]); err != nil {
			t.Errorf("key %s: %v", key, err)
		}
		delete(got, key)
	}
	for key := range got {
		t.Errorf("key %s has results and no flights", key)
	}
	t.Logf("%d results of %d keys", total, len(want))
}

// fileLines are the flights of the file that is fed.
func fileLines(t *testing.T, dir string) (lines [][]byte) {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, "flights.ndjson.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text := bufio.NewScanner(z)
	for text.Scan() {
		lines = append(lines, append([]byte(nil), text.Bytes()...))
	}
	if err := text.Err(); err != nil {
		t.Fatal(err)
	}
	return lines
}

// storedLines are the flights that the source has up to a sequence.
func storedLines(t *testing.T, conn *bus.Conn, through uint64) (lines [][]byte) {
	t.Helper()
	err := readStream(t.Context(), conn, bus.CursorConfig{Stream: "FLIGHTS"}, func(m *bus.Msg) {
		if m.Seq <= through {
			lines = append(lines, m.Data)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// naive computes all results of flights, by key, in order.
func naive(t *testing.T, lines [][]byte) map[string][]delays {
	t.Helper()
	all := map[string][]delays{}
	sums := map[string]int{}
	for _, line := range lines {
		var flight struct {
			Origin string
			Delay  *int
		}
		if err := json.Unmarshal(line, &flight); err != nil {
			t.Fatal(err)
		}
		if flight.Delay == nil {
			continue
		}
		d := delays{Key: flight.Origin, Worst: math.MinInt}
		if before := all[d.Key]; len(before) > 0 {
			d = before[len(before)-1]
		}
		d.Flights++
		if *flight.Delay > 15 {
			d.Late++
		}
		sums[d.Key] += *flight.Delay
		d.Avg = float64(sums[d.Key]) / float64(d.Flights)
		d.Worst = max(d.Worst, *flight.Delay)
		all[d.Key] = append(all[d.Key], d)
	}
	return all
}

// compare looks for the first result that differs.
func compare(want, got []delays) error {
	for i, w := range want {
		if i == len(got) {
			return fmt.Errorf("%d results are missing after %+v", len(want)-i, w)
		}
		g := got[i]
		if math.Abs(g.Avg-w.Avg) < 1e-9 {
			g.Avg = w.Avg
		}
		if g != w {
			return fmt.Errorf("result %d is %+v, want %+v", i+1, g, w)
		}
	}
	if len(got) > len(want) {
		return fmt.Errorf("%d results too many, from %+v", len(got)-len(want), got[len(want)])
	}
	return nil
}
