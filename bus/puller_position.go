package bus

// position is what the reply subject of a delivered message says.
type position struct {
	stream, consumer uint64
	time             int64
	pending          uint64
}

// parseAckSubject reads $JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>, or the newer form with
// domain and account behind $JS.ACK and a token at the end (ADR-15).
func parseAckSubject(s string) (p position, ok bool) {
	const prefix = "$JS.ACK."
	if len(s) < len(prefix) || s[:len(prefix)] != prefix {
		return p, false
	}
	dots := 0
	for i := range len(s) {
		if s[i] == '.' {
			dots++
		}
	}
	skip := 5 // tokens before <sseq>
	if dots >= 10 {
		skip = 7
	} else if dots != 8 {
		return p, false
	}
	i := 0
	for ; skip > 0; i++ {
		if s[i] == '.' {
			skip--
		}
	}
	var field [4]uint64
	for f := range field {
		start := i
		for i < len(s) && s[i] != '.' {
			d := s[i] - '0'
			if d > 9 {
				return p, false
			}
			field[f] = field[f]*10 + uint64(d)
			i++
		}
		if i == start {
			return p, false
		}
		i++
	}
	return position{stream: field[0], consumer: field[1], time: int64(field[2]), pending: field[3]}, true
}
