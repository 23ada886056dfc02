package flowspec

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/expr-lang/expr/parser"

	"natsflow/flow"
)

// evaluate compiles an expression both ways and returns what each of them makes
// of the payload.
func evaluate(t *testing.T, source, payload string) (native, virtual string) {
	t.Helper()
	c := &exprCompiler{
		doc: &document{}, scope: &scope{format: JSON, keyed: true}, what: "test", text: source,
		place: func(int) position { return position{1, 1} },
	}
	tree, err := parser.Parse(source)
	if err != nil {
		t.Fatalf("%s: %v", source, err)
	}
	c.check(tree.Node, nil, 0)
	v := c.virtual(tree.Node)
	n := v
	if !c.time {
		n = c.native(tree.Node)
	}
	if c.bad {
		t.Fatalf("%s: %v", source, c.doc.err())
	}
	m := &flow.Meta{Subject: "sub.ject", Seq: 7, Key: "k"}
	show := func(e eval) string {
		out, err := e(m, record{data: []byte(payload)})
		if err != nil {
			return "error: " + err.Error()
		}
		return string(out.appendJSON(nil))
	}
	return show(n), show(v)
}

// TestExpressions pins the meaning of the operators. Both ways of running an
// expression agree.
func TestExpressions(t *testing.T) {
	const payload = `{"i":7,"j":-2,"f":2.5,"big":9223372036854775807,"huge":18446744073709551615,"s":"text","t":"10","b":true,"n":null,
		"o":{"x":1,"y":{"z":"deep"},"x":2},"a":[3,1,null,"s",{"x":1}],"nums":[1,2,3],"é":"ü","with space":5,"at":"2026-01-02T03:04:05Z"}`
	for _, c := range []struct{ source, want string }{
		{"i + j", "5"},
		{"i + f", "9.5"},
		{"i / 2", "3.5"},
		{"i % 4", "3"},
		{"j % 4", "-2"},
		{"f % 2", "error: % is for 64-bit integers"},
		{"i / 0", "error: division by zero"},
		{"i % 0", "error: division by zero"},
		{"2 ** 10", "1024"},
		{"2 ** 10000", "error: the result is not a finite number"},
		{"big + 1", "error: the integer result does not fit 64 bits"},
		{"big - -1", "error: the integer result does not fit 64 bits"},
		{"big * 2", "error: the integer result does not fit 64 bits"},
		{"-big - 2", "error: the integer result does not fit 64 bits"},
		{"huge + 1", "error: the integer result does not fit 64 bits"},
		{"-huge", "error: the integer result does not fit 64 bits"},
		{"huge > big", "true"},
		{"big + 0.5 > big", "true"}, // the float is 2^63
		{"huge == 18446744073709551615.0", "false"},
		{"big == 9223372036854775807", "true"},
		{"i == 7.0", "true"},
		{"-i", "-7"},
		{"+s", "error: + before text"},
		{`s + "!"`, `"text!"`},
		{"s + i", "error: + between text and number"},
		{`t > "9"`, "false"},
		{"t > 9", "error: > between text and number"},
		{"t == 10", "false"},
		{"t != 10", "true"},
		{"b > false", "error: > between boolean and boolean"},
		{"b == true", "true"},
		// Null, as in SQL.
		{"n", "null"},
		{"missing.at.all", "null"},
		{"n == nil", "true"},
		{"nil != n", "false"},
		{"n == n", "null"},
		{"n == 1", "null"},
		{"n != 1", "null"},
		{"n > 1", "null"},
		{"n + 1", "null"},
		{"-n", "null"},
		{"not n", "null"},
		{"not (n > 1)", "null"},
		{"n > 1 and false", "false"},
		{"n > 1 and true", "null"},
		{"n > 1 or true", "true"},
		{"n > 1 or false", "null"},
		{"false and s > 1", "false"},
		{"true or s > 1", "true"},
		{"n ?? 5", "5"},
		{"n > 1 ? 1 : 2", "2"},
		{`n contains "x"`, "null"},
		{"i and true", "error: and after number"},
		{"true and i", "error: and before number"},
		{"s ? 1 : 2", "error: a condition is true or false, this is text"},
		// in
		{"i in [1, 7]", "true"},
		{"i in [1, 2]", "false"},
		{"i in [1, nil]", "null"},
		{"i in nums", "false"},
		{"3 in a", "true"},
		{"4 in a", "null"},
		{"n in nums", "null"},
		{`"x" in o`, "true"},
		{"i not in [1]", "true"},
		{"i in s", "error: in between number and text"},
		// text
		{`s contains "ex"`, "true"},
		{`s startsWith "te" and s endsWith "xt"`, "true"},
		{`s matches "^t.*t$"`, "true"},
		{`s matches ("^" + t)`, "false"},
		{`i matches "x"`, "error: matches between number and text"},
		{`s not contains "x"`, "false"},
		// members
		{"o.y.z", `"deep"`},
		{"o.x", "1"},
		{`o["x"]`, "1"},
		{"o?.y?.z", `"deep"`},
		{"s.x", "null"},
		{"a[0]", "3"},
		{"a[-1].x", "1"},
		{"a[99]", "null"},
		{"a[i - 7]", "3"},
		{"o[s]", "null"},
		{"nums", "[1,2,3]"},
		{"nums == [1, 2, 3]", "true"},
		{"nums == [1.0, 2, 3]", "true"},
		{"nums[0:2]", "[1,2]"},
		{`$env["with space"] + 1`, "6"},
		{"é", `"ü"`},
		// functions
		{"len(nums)", "3"},
		{"len(n)", "null"},
		{"sum(nums)", "6"},
		{"filter(nums, # > 1)", "[2,3]"},
		{"filter(n, # > 1)", "null"},
		{"filter(a, # == nil)", "[null]"},
		{"any(nums, # == i or # == 3)", "true"},
		{"map(nums, # * 2)", "[2,4,6]"},
		{"count(nums, # > n)", "0"},
		{"nums | filter(# > 1) | sum()", "5"},
		{"reduce(nums, #acc + #, 0)", "6"},
		{"keys(o)", `["x","y"]`},
		{"toPairs({b: 1, a: 2})", `[["a",2],["b",1]]`},
		{"{b: i, a: n}", `{"a":null,"b":7}`},
		{"upper(s) + lower(\"X\")", `"TEXTx"`},
		{"type(n)", `"nil"`},
		{"string(i)", `"7"`},
		{"int(t) + 1", "11"},
		{"int(s)", "error: invalid operation: int(text)"},
		{"max(i, j, 3)", "7"},
		{"get(o, \"x\")", "1"},
		{"let x = i + 1; x * x", "64"},
		{"let x = n; x > 1 and x < 3", "null"},
		{"if i > 3 { \"high\" } else { \"low\" }", `"high"`},
		{`groupBy(nums, # > 1 ? "many" : "one")`, `{"many":[2,3],"one":[1]}`},
		{`date(at) > date("2026-01-01")`, "true"},
		{`date(n)`, "null"},
		{`date(at) - date("2026-01-01") == duration("27h4m5s")`, "true"},
		{`date(at) - date("2026-01-01")`, `"27h4m5s"`},
		{`date(at) + duration("24h")`, `"2026-01-03T03:04:05Z"`},
		{`date(at).Year()`, "2026"},
		{`date(at).Weekday()`, "5"},
		// the record
		{"_key", `"k"`},
		{"_subject", `"sub.ject"`},
		{"_seq", "7"},
		{"_stream", `""`},
		{"_time", `"1970-01-01T00:00:00.000000000Z"`},
		{"_value.i", "7"},
		{"1 < i", "true"},
		{"1 < i < 7", "false"},
		{"1 < i <= 7", "true"},
	} {
		native, virtual := evaluate(t, c.source, payload)
		if virtual != c.want {
			t.Errorf("%s = %s in the virtual machine, want %s", c.source, virtual, c.want)
		}
		if native != c.want {
			t.Errorf("%s = %s, want %s", c.source, native, c.want)
		}
	}
}

// randomExpression makes an expression of the operators, not always a sensible
// one.
func randomExpression(rng *rand.Rand, depth int) string {
	if depth == 0 || rng.IntN(5) == 0 {
		leaves := []string{
			"i", "f", "s", "b", "n", "big", "o.x", "o.missing.y", "a", "a[1]", "1", "2.5", `"text"`, "true", "false", "nil",
			"_seq", "_key", "-1", "0", "len(a)", "lower(s)", "huge",
		}
		return leaves[rng.IntN(len(leaves))]
	}
	sub := func() string { return randomExpression(rng, depth-1) }
	switch rng.IntN(10) {
	case 0:
		return "not (" + sub() + ")"
	case 1:
		return "-(" + sub() + ")"
	case 2:
		return "((" + sub() + ") ? (" + sub() + ") : (" + sub() + "))"
	case 3:
		return "((" + sub() + ") ?? (" + sub() + "))"
	case 4:
		return "((" + sub() + ") in [1, \"text\", nil, true])"
	}
	ops := []string{"+", "-", "*", "/", "%", "==", "!=", "<", "<=", ">", ">=", "and", "or", "contains", "startsWith", "in"}
	return "((" + sub() + ") " + ops[rng.IntN(len(ops))] + " (" + sub() + "))"
}

// TestExpressions_NativeAndVirtual compares the two ways on random expressions.
func TestExpressions_NativeAndVirtual(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	values := []string{
		"0", "1", "-3", "2.5", "null", `"text"`, `""`, "true", "false", "9223372036854775807", "18446744073709551615", `[1,null,"s"]`, `{"x":1}`,
	}
	pick := func() string { return values[rng.IntN(len(values))] }
	null, failed, other := 0, 0, 0
	for range 3000 {
		source := randomExpression(rng, 4)
		payload := fmt.Sprintf(`{"i":%s,"f":%s,"s":%s,"b":%s,"n":%s,"big":%s,"o":%s,"a":%s,"huge":18446744073709551615}`,
			pick(), pick(), pick(), pick(), pick(), pick(), pick(), pick())
		native, virtual := evaluate(t, source, payload)
		switch {
		case native == "null":
			null++
		case len(native) > 6 && native[:6] == "error:":
			failed++
			if len(virtual) > 6 && virtual[:6] == "error:" {
				continue
			}
		default:
			other++
		}
		if native != virtual {
			t.Fatalf("%s of %s:\nnative  %s\nvirtual %s", source, payload, native, virtual)
		}
	}
	if null < 100 || failed < 100 || other < 100 {
		t.Errorf("%d null, %d errors, %d others: the expressions are too much alike", null, failed, other)
	}
}
