package flowspec

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

var callRE = regexp.MustCompile(`(?s)^(\s*)([A-Za-z_][A-Za-z0-9_]*)(\s*\()(.*)\)\s*$`)

// signature says what arguments a function has behind the expression.
type signature struct {
	// limit is what the second argument is called; empty if there is none.
	limit string
	// most bounds it. fallback is what it is when it is left out, 0 where it has to be
	// there.
	most, fallback int
	// by: a third argument is an expression.
	by bool
	// usage shows a call.
	usage string
}

// signatures are those of the functions that have more than one argument.
var signatures = map[aggregateFn]signature{
	aggCollect:    {limit: "limit", most: maxValues, usage: "collect(x, 100)"},
	aggTop:        {limit: "count", most: maxValues, by: true, usage: "top(x, 10) or top(x, 10, by)"},
	aggBottom:     {limit: "count", most: maxValues, by: true, usage: "bottom(x, 10) or bottom(x, 10, by)"},
	aggDistinct:   {limit: "limit", most: maxDistinct, fallback: defaultDistinct, usage: "distinct(x) or distinct(x, 50000)"},
	aggPercentile: {limit: "percentage", usage: "percentile(x, 99)"},
}

// argument is one of a call.
type argument struct {
	text string
	// offset in the text of the call, in runes.
	offset int
}

// space is the number of runes before the argument begins.
func (a argument) space() int {
	return utf8.RuneCountInString(a.text) - utf8.RuneCountInString(strings.TrimLeft(a.text, " \t\r\n"))
}

// aggregateMember reads NAME: FUNCTION(EXPRESSION, …).
func (p *specParser) aggregateMember(f field) (aggregateMember, bool) {
	what := "aggregate." + f.name
	s, ok := p.expressionText(f.value, what)
	if !ok {
		return aggregateMember{}, false
	}
	parts := callRE.FindStringSubmatch(s.text)
	if parts == nil && strings.Count(s.text, "(") > strings.Count(s.text, ")") {
		p.errorf(s.start, `if it was cut at a comma: within {…} put it into quotes, such as "top(delay, 3)"`, "%s: the parenthesis is not closed", what)
		return aggregateMember{}, false
	}
	if parts == nil {
		p.errorf(s.start, "possible: "+strings.Join(aggregateNames, ", "), "%s: an aggregate is one call of a function such as sum(delay)", what)
		return aggregateMember{}, false
	}
	name, arg := parts[2], parts[4]
	fn, ok := aggregateByName(name)
	if !ok {
		p.errorf(s.at(len(parts[1])), aggregateHint(name), "%s: there is no aggregate %q", what, name)
		return aggregateMember{}, false
	}
	member := aggregateMember{name: f.name, fn: fn}
	offset := utf8.RuneCountInString(parts[1] + name + parts[3])
	if strings.TrimSpace(arg) == "" {
		if fn != aggCount {
			p.errorf(s.at(offset), signatures[fn].hint(), "%s: %s needs an expression", what, name)
			return member, false
		}
		member.fn = aggRecords
		return member, true
	}
	args, depth := arguments(arg, offset)
	switch {
	case depth < 0:
		p.errorf(s.start, "a map step after it can compute with the results", "%s: an aggregate is one call of a function", what)
		return member, false
	case depth > 0:
		// That says where the mistake is.
		p.compileExpression(s, offset, arg, what, &p.scope)
		return member, false
	}
	if !p.arguments(s, what, &member, args) {
		return member, false
	}
	member.arg = p.compileExpression(s, args[0].offset, args[0].text, what, &p.scope)
	if e := member.arg; e != nil && fn == aggCountIf && e.result != kindNull && e.result != kindBool {
		p.errorf(s.at(offset), "", "%s: a condition is true or false, this is a %v", what, e.result)
	}
	if len(args) == 3 {
		member.by = p.compileExpression(s, args[2].offset, args[2].text, what, &p.scope)
		return member, member.arg != nil && member.by != nil
	}
	return member, member.arg != nil
}

// otherNames are what functions are called elsewhere.
var otherNames = map[string]string{
	"median": "percentile(x, 50)", "quantile": "percentile(x, 50)", "mean": "avg", "array_agg": "collect",
	"count_distinct": "distinct", "approx_count_distinct": "approx_distinct", "topk": "top", "stddev_samp": "stddev",
	"var": "variance", "var_samp": "variance", "var_pop": "variance_pop",
}

// aggregateHint says what may be meant by a name that no function has.
func aggregateHint(name string) string {
	if other := otherNames[name]; other != "" {
		return "it is " + other + " here"
	}
	if best := didYouMeanOnly(name, aggregateNames); best != "" {
		return best
	}
	return "possible: " + strings.Join(aggregateNames, ", ")
}

func (g signature) hint() string {
	if g.usage == "" {
		return ""
	}
	return "such as " + g.usage
}

// arguments looks at the number of arguments of a call, and reads the second one.
func (p *specParser) arguments(s scalar, what string, m *aggregateMember, args []argument) bool {
	g := signatures[m.fn]
	most, least := 1, 1
	switch {
	case g.by:
		most, least = 3, 2
	case g.fallback > 0:
		most = 2
	case g.limit != "":
		most, least = 2, 2
	}
	if len(args) > most {
		extra := args[most]
		p.errorf(s.at(extra.offset+extra.space()), g.hint(), "%s: %s has %s, these are %d", what, m.fn, atMost(most, least), len(args))
		return false
	}
	if len(args) < least {
		p.errorf(s.at(args[0].offset), g.hint(), "%s: %s needs a %s as its second argument", what, m.fn, g.limit)
		return false
	}
	m.limit = g.fallback
	if len(args) == 1 {
		return true
	}
	second := args[1]
	m.limitText = strings.TrimSpace(second.text)
	at := s.at(second.offset + second.space())
	if m.fn == aggPercentile {
		if m.percent, m.limitText = parsePercentage(m.limitText); m.limitText == "" {
			p.errorf(at, "", "%s: the percentage of %s is a number from 0 to 100 with up to 4 decimals, not %s", what, m.fn, shown(second.text))
			return false
		}
		return true
	}
	n, err := strconv.Atoi(m.limitText)
	if err != nil || n < 1 || n > g.most {
		p.errorf(at, "", "%s: the %s of %s is a number from 1 to %d, not %s", what, g.limit, m.fn, g.most, shown(second.text))
		return false
	}
	m.limit, m.limitText = n, strconv.Itoa(n)
	return true
}

func shown(text string) string {
	if text = strings.TrimSpace(text); text != "" {
		return text
	}
	return "empty"
}

func atMost(most, least int) string {
	if most == 1 {
		return "one argument"
	}
	if most == least {
		return fmt.Sprintf("%d arguments", most)
	}
	return fmt.Sprintf("%d arguments at most", most)
}

var percentRE = regexp.MustCompile(`^[0-9]{1,3}(\.[0-9]{1,4})?$`)

// parsePercentage reads a percentage exactly, and returns it with its shortest text, which is
// empty if it is none.
func parsePercentage(text string) (percentage, string) {
	if !percentRE.MatchString(text) {
		return 0, ""
	}
	whole, decimals, _ := strings.Cut(text, ".")
	digits := whole + decimals + strings.Repeat("0", 4-len(decimals))
	// At most 7 digits.
	n, _ := strconv.Atoi(digits)
	if n > 100*percentUnit {
		return 0, ""
	}
	decimals = strings.TrimRight(decimals, "0")
	text = strconv.Itoa(n / percentUnit)
	if decimals != "" {
		text += "." + decimals
	}
	return percentage(n), text
}

// arguments takes the arguments of a call apart. depth is below 0 where its parenthesis is
// closed before its end, as in "count(a) + sum(b)", and above 0 where another one, or a
// text, is not closed.
func arguments(text string, offset int) (args []argument, depth int) {
	quote, escaped := rune(0), false
	from, runes, begin := 0, offset, offset
	for i, c := range text {
		switch {
		case escaped:
			escaped = false
		case quote != 0:
			escaped = c == '\\' && quote != '`'
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'' || c == '`':
			quote = c
		case c == '(' || c == '[' || c == '{':
			depth++
		case c == ')' || c == ']' || c == '}':
			if depth--; depth < 0 && c == ')' {
				return nil, depth
			}
		case c == ',' && depth == 0:
			args = append(args, argument{text[from:i], begin})
			from, begin = i+1, runes+1
		}
		runes++
	}
	if quote != 0 || depth != 0 {
		return nil, 1
	}
	return append(args, argument{text[from:], begin}), 0
}
