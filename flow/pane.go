package flow

import "fmt"

// Pane says what kind of result a value is: of a window, an aggregate, or whatever
// else emits not only once. What steps make of such a value is of the same kind, up to
// the next window, aggregate or join, whose results are their own. Panes do not cross to a
// later stage: a value that comes there is an ordinary one.
type Pane uint8

// The kinds of results.
const (
	// PaneNone is an ordinary value: a record, an update, the result of a window that
	// closed by itself.
	PaneNone Pane = iota
	// PaneEarly is the result so far of a window that stays open, see [Windows.Early].
	PaneEarly
	// PanePartial is the result so far of a window that stays open while the flow is
	// stopped, see [Windows.OnDrain].
	PanePartial
	// PaneFinal is a result at the end of the input: of a drain with [Finish].
	PaneFinal
)

// String returns "none", "early", "partial" or "final".
func (p Pane) String() string {
	switch p {
	case PaneNone:
		return "none"
	case PaneEarly:
		return "early"
	case PanePartial:
		return "partial"
	case PaneFinal:
		return "final"
	}
	return fmt.Sprintf("pane %d", uint8(p))
}
