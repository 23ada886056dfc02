package flowspec

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

var units = []struct {
	name string
	unit time.Duration
}{
	{"ms", time.Millisecond},
	{"us", time.Microsecond},
	{"s", time.Second},
	{"m", time.Minute},
	{"h", time.Hour},
	{"d", 24 * time.Hour},
}

// parseDuration reads a duration such as 100ms, 1h30m or 30d. A day has 24 hours.
func parseDuration(s string) (time.Duration, error) {
	var total time.Duration
	if s == "" {
		return 0, errors.New("a duration is missing")
	}
	for rest := s; rest != ""; {
		n := len(rest) - len(strings.TrimLeft(rest, "0123456789."))
		number, err := strconv.ParseFloat(rest[:n], 64)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration", s)
		}
		rest = rest[n:]
		n = len(rest) - len(strings.TrimLeft(rest, "abcdefghijklmnopqrstuvwxyz"))
		unit := time.Duration(0)
		for _, u := range units {
			if u.name == rest[:n] {
				unit = u.unit
			}
		}
		if unit == 0 {
			return 0, fmt.Errorf("%q is not a duration", s)
		}
		rest = rest[n:]
		part := number * float64(unit)
		if part > math.MaxInt64/2 || total > math.MaxInt64/2 {
			return 0, fmt.Errorf("duration %q is too long", s)
		}
		total += time.Duration(math.Round(part))
	}
	return total, nil
}

// formatDuration prints whole days as such.
func formatDuration(d time.Duration) string {
	const day = 24 * time.Hour
	if d >= day && d%day == 0 {
		return strconv.FormatInt(int64(d/day), 10) + "d"
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}
