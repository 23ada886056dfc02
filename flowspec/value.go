package flowspec

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// kind is the type of a value.
type kind uint8

const (
	kindNull kind = iota
	kindBool
	kindInt    // an int64
	kindUint   // an integer above the highest int64, up to the highest uint64
	kindFloat  // a finite float64
	kindString // text
	kindJSON   // an array or an object, as its JSON text
)

func (k kind) String() string {
	switch k {
	case kindNull:
		return "null"
	case kindBool:
		return "boolean"
	case kindInt, kindUint, kindFloat:
		return "number"
	case kindString:
		return "text"
	case kindJSON:
		return "array or object"
	}
	return "kind " + strconv.Itoa(int(k))
}

// value is what an expression yields: a JSON value that is not boxed, so that
// the hot path does not allocate.
type value struct {
	kind kind
	// bits are those of the boolean, the integer or the float.
	bits uint64
	// str is the text of kindString and kindJSON.
	str string
}

func boolValue(b bool) value {
	if b {
		return value{kind: kindBool, bits: 1}
	}
	return value{kind: kindBool}
}
func intValue(i int64) value     { return value{kind: kindInt, bits: uint64(i)} }
func floatValue(f float64) value { return value{kind: kindFloat, bits: math.Float64bits(f)} }
func stringValue(s string) value { return value{kind: kindString, str: s} }
func uintValue(u uint64) value {
	if u <= math.MaxInt64 {
		return intValue(int64(u))
	}
	return value{kind: kindUint, bits: u}
}

func (v value) isNull() bool   { return v.kind == kindNull }
func (v value) isNumber() bool { return v.kind >= kindInt && v.kind <= kindFloat }
func (v value) int() int64     { return int64(v.bits) }

// float is the number as a float64; for large integers the nearest one.
func (v value) float() float64 {
	switch v.kind {
	case kindInt:
		return float64(int64(v.bits))
	case kindUint:
		return float64(v.bits)
	}
	return math.Float64frombits(v.bits)
}

// parseNumber reads a JSON number. An integer that fits 64 bits stays one; what
// is beyond, or has a fraction or an exponent, is a float.
func parseNumber(raw string) (value, error) {
	if v, ok := parseSmallInt(raw); ok {
		return v, nil
	}
	if !strings.ContainsAny(raw, ".eE") {
		if i, err := strconv.ParseInt(raw, 10, 64); err == nil {
			return intValue(i), nil
		}
		if u, err := strconv.ParseUint(raw, 10, 64); err == nil {
			return uintValue(u), nil
		}
	}
	f, err := strconv.ParseFloat(raw, 64)
	if err != nil {
		return value{}, fmt.Errorf("number %.40s is out of range", raw)
	}
	return floatValue(f), nil
}

// parseSmallInt reads an integer of up to 18 digits, which cannot overflow.
func parseSmallInt(raw string) (value, bool) {
	digits := raw
	if len(digits) > 0 && digits[0] == '-' {
		digits = digits[1:]
	}
	if len(digits) == 0 || len(digits) > 18 {
		return value{}, false
	}
	var n int64
	for i := range len(digits) {
		c := digits[i] - '0'
		if c > 9 {
			return value{}, false
		}
		n = n*10 + int64(c)
	}
	if len(digits) != len(raw) {
		n = -n
	}
	return intValue(n), true
}

// appendJSON appends the value as JSON.
func (v value) appendJSON(dst []byte) []byte {
	switch v.kind {
	case kindString:
		return appendString(dst, v.str)
	case kindJSON:
		return append(dst, v.str...)
	}
	return v.appendText(dst)
}

// appendText appends a scalar as text: a key, or a part of a subject.
func (v value) appendText(dst []byte) []byte {
	switch v.kind {
	case kindBool:
		return strconv.AppendBool(dst, v.bits != 0)
	case kindInt:
		return strconv.AppendInt(dst, int64(v.bits), 10)
	case kindUint:
		return strconv.AppendUint(dst, v.bits, 10)
	case kindFloat:
		return appendFloat(dst, math.Float64frombits(v.bits))
	case kindString, kindJSON:
		return append(dst, v.str...)
	}
	return append(dst, "null"...)
}

// text returns a scalar as text; it allocates for anything but a string.
func (v value) text() string {
	if v.kind == kindString {
		return v.str
	}
	return string(v.appendText(nil))
}

// appendFloat prints a float as ECMAScript does: the shortest digits that give
// the same number back, without an exponent between 1e-6 and 1e21.
func appendFloat(dst []byte, f float64) []byte {
	if f == 0 {
		return append(dst, '0')
	}
	format := byte('f')
	if abs := math.Abs(f); abs < 1e-6 || abs >= 1e21 {
		format = 'e'
	}
	start := len(dst)
	dst = strconv.AppendFloat(dst, f, format, -1, 64)
	if format == 'e' {
		// e-09 to e-9
		if n := len(dst); n-start >= 4 && dst[n-4] == 'e' && dst[n-3] == '-' && dst[n-2] == '0' {
			dst[n-2] = dst[n-1]
			dst = dst[:n-1]
		}
	}
	return dst
}

// appendString appends a JSON string. Bytes that are not UTF-8 become U+FFFD.
func appendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				dst = append(append(dst, s[start:i]...), "\uFFFD"...)
				start = i + 1
			}
			i += n
			continue
		}
		dst = append(dst, s[start:i]...)
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
		i++
		start = i
	}
	return append(append(dst, s[start:]...), '"')
}

// compareNumbers orders two numbers, exactly also where an integer has no
// float64 of its own.
func compareNumbers(a, b value) int {
	switch {
	case a.kind == kindInt && b.kind == kindInt:
		return compare(a.int(), b.int())
	case a.kind == kindFloat && b.kind == kindFloat:
		return compare(a.float(), b.float())
	case a.kind == kindFloat:
		return -compareIntFloat(b, a.float())
	case b.kind == kindFloat:
		return compareIntFloat(a, b.float())
	case a.kind == b.kind:
		return compare(a.bits, b.bits)
	case a.kind == kindUint:
		return 1
	}
	return -1
}

func compare[T int64 | uint64 | float64](a, b T) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func compareIntFloat(i value, f float64) int {
	const two63, two64 = float64(1 << 63), float64(1<<63) * 2
	if i.kind == kindUint {
		switch {
		case f >= two64:
			return -1
		case f < two63:
			return 1
		}
		// From 2^63 on every float is an integer.
		return compare(i.bits, uint64(f))
	}
	switch {
	case f >= two63:
		return -1
	case f < -two63:
		return 1
	}
	whole := math.Trunc(f)
	if c := compare(i.int(), int64(whole)); c != 0 {
		return c
	}
	return compare(0, f-whole)
}
