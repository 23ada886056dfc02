package bus

import (
	"strconv"
	"strings"
)

// PositionHeader is on every result of a fenced sink: <flow>/<task>/<n>/<i>, the commit and the place in its outbox that
// it comes from. On other sinks the same text is the message id.
const PositionHeader = "Natsflow-Position"

// AppendPosition appends the text of a position to b.
func AppendPosition(b []byte, flow, task string, n uint64, i int) []byte {
	b = append(b, flow...)
	b = append(b, '/')
	b = append(b, task...)
	b = append(b, '/')
	b = strconv.AppendUint(b, n, 10)
	b = append(b, '/')
	return strconv.AppendInt(b, int64(i), 10)
}

// FormatPosition is the text of a position.
func FormatPosition(flow, task string, n uint64, i int) string {
	return string(AppendPosition(nil, flow, task, n, i))
}

// ParsePosition is the reverse of FormatPosition; ok is false for a text that it cannot have written.
func ParsePosition(s string) (flow, task string, n uint64, i int, ok bool) {
	rest, last, ok1 := cutLast(s)
	rest, entry, ok2 := cutLast(rest)
	flow, task, ok3 := cutLast(rest)
	n, err1 := strconv.ParseUint(entry, 10, 64)
	i, err2 := strconv.Atoi(last)
	if !ok1 || !ok2 || !ok3 || err1 != nil || err2 != nil || i < 0 || flow == "" || task == "" || FormatPosition(flow, task, n, i) != s {
		return "", "", 0, 0, false
	}
	return flow, task, n, i, true
}

func cutLast(s string) (before, after string, ok bool) {
	k := strings.LastIndexByte(s, '/')
	if k < 0 {
		return "", s, false
	}
	return s[:k], s[k+1:], true
}
