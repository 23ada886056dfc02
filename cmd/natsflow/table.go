package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// table is text in columns.
type table struct {
	head []string
	// right has the columns that are aligned to the right, as numbers are.
	right []bool
	rows  [][]string
}

// add adds a row.
func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// lines formats the table, the head first if there is one.
func (t *table) lines() []string {
	var widths []int
	all := t.rows
	if t.head != nil {
		all = append([][]string{t.head}, t.rows...)
	}
	for _, row := range all {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	lines := make([]string, len(all))
	for n, row := range all {
		var b strings.Builder
		for i, cell := range row {
			if i > 0 {
				b.WriteString("  ")
			}
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i < len(t.right) && t.right[i] {
				b.WriteString(pad + cell)
			} else {
				b.WriteString(cell + pad)
			}
		}
		lines[n] = strings.TrimRight(b.String(), " ")
	}
	return lines
}

// print writes the table, each line behind indent.
func (t *table) print(w io.Writer, indent string) {
	for _, line := range t.lines() {
		_, _ = fmt.Fprintln(w, indent+line)
	}
}

// clip cuts a line to the columns of a terminal, since one that wraps would break
// what is redrawn in place. Colours take no columns.
func clip(s string, columns int) string {
	if utf8.RuneCountInString(s) <= columns {
		return s
	}
	var b strings.Builder
	width, escape := 0, false
	for _, r := range s {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r != 'm'
		case width == columns:
			if strings.Contains(s, "\x1b") {
				b.WriteString("\x1b[0m")
			}
			return b.String()
		default:
			width++
		}
		b.WriteRune(r)
	}
	return b.String()
}

// plain makes text from outside fit for a terminal: one line, no control
// characters.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
