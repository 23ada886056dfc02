package control

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// ErrMalformed is in the chain of every error of [ParseCommand].
var ErrMalformed = errors.New("malformed command")

// Kind says what a command asks for.
type Kind string

// The kinds of commands. They are the second token of the control subject.
const (
	KindDrain  Kind = "drain"
	KindResume Kind = "resume"
	// kindSavepoint is a subject that is reserved; it is refused as long as
	// savepoints do not exist.
	kindSavepoint Kind = "savepoint"
)

// Mode says what a drain does with open windows and timers.
type Mode string

// The modes of a drain.
const (
	// ModeSuspend keeps windows and timers open; a resume goes on with them.
	ModeSuspend Mode = "suspend"
	// ModeFinish ends the input. As long as no step has windows it differs
	// from ModeSuspend only in the state that it ends in.
	ModeFinish Mode = "finish"
)

// The kinds of [At].
const (
	AtNow  = "now"
	AtHead = "head"
	AtSeq  = "seq"
	AtTime = "time"
)

// At says where a drain puts the cut.
type At struct {
	// Kind is AtNow (where reading has got to), AtHead (the last sequence of
	// each source), AtSeq (as given in Seq) or AtTime (the last sequence at or
	// before Time).
	Kind string
	// Seq is the cut per source stream; only with AtSeq.
	Seq map[string]uint64
	// Time is only set with AtTime.
	Time time.Time
}

// Command is one message of the control stream.
type Command struct {
	// Seq is the sequence in the control stream, 0 before it was published.
	Seq uint64 `json:"seq"`
	// Time is the timestamp of the message.
	Time time.Time `json:"time"`
	Kind Kind      `json:"kind"`
	// Flow is the flow it is for; "" is all flows.
	Flow string `json:"flow,omitempty"`
	// Mode and At are only set with KindDrain.
	Mode Mode `json:"mode,omitempty"`
	At   At   `json:"at,omitzero"`
	// Reason is free text that reports and logs repeat.
	Reason string `json:"reason,omitempty"`
}

const (
	maxBody   = 64 << 10
	maxReason = 1000
	maxFlow   = 100
)

// ValidFlow returns an error unless name can be the name of a flow:
// [a-z0-9-]+, at most 100 bytes.
func ValidFlow(name string) error {
	foreign := func(r rune) bool {
		return r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}
	if name == "" || len(name) > maxFlow || strings.ContainsFunc(name, foreign) {
		return fmt.Errorf("flow name %q: must match [a-z0-9-]+ and have at most %d bytes", name, maxFlow)
	}
	return nil
}

// ValidPrefix returns an error unless prefix can begin the control subjects: one
// or more tokens of [A-Za-z0-9_-].
func ValidPrefix(prefix string) error {
	if !regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`).MatchString(prefix) {
		return fmt.Errorf("control prefix %q: must be tokens of letters, digits, _ and -, separated by dots", prefix)
	}
	if first, _, _ := strings.Cut(prefix, "."); first == "natsflow" {
		return fmt.Errorf("control prefix %q: the token natsflow is taken by natsflow's own subjects", prefix)
	}
	return nil
}

// Subject is the subject that c is published on.
func (c Command) Subject(prefix string) string {
	if c.Flow == "" {
		return prefix + "." + string(c.Kind)
	}
	return prefix + "." + string(c.Kind) + "." + c.Flow
}

// ParseCommand decodes a message of the control stream. It is strict: an unknown
// member, a member given twice or anything that is not understood is an error
// (ErrMalformed), with a suggestion where a word looks misspelt. A drain with an
// empty body is suspend, now. With an error the returned command still has Kind
// and Flow as far as the subject tells them, so that the refusal can be noted
// where it belongs. Seq and Time are the caller's to set.
func ParseCommand(prefix, subject string, body []byte) (Command, error) {
	c, err := parseSubject(prefix, subject)
	if err != nil {
		return c, fmt.Errorf("%w on %s: %w", ErrMalformed, subject, err)
	}
	if err := c.parseBody(body); err != nil {
		return Command{Kind: c.Kind, Flow: c.Flow}, fmt.Errorf("%w on %s: %w", ErrMalformed, subject, err)
	}
	return c, nil
}

func parseSubject(prefix, subject string) (Command, error) {
	rest, ok := strings.CutPrefix(subject, prefix+".")
	if !ok {
		return Command{}, fmt.Errorf("the subject does not begin with %q", prefix+".")
	}
	tokens := strings.Split(rest, ".")
	c := Command{Kind: Kind(tokens[0])}
	if len(tokens) > 1 {
		c.Flow = tokens[1]
	}
	if len(tokens) > 2 {
		return c, fmt.Errorf("too many tokens: the form is %s.%s.FLOW", prefix, tokens[0])
	}
	if len(tokens) == 2 {
		if err := ValidFlow(c.Flow); err != nil {
			return c, err
		}
	}
	switch c.Kind {
	case KindDrain, KindResume:
		return c, nil
	case kindSavepoint:
		return c, errors.New("savepoints are not supported by this version")
	}
	return c, fmt.Errorf("unknown command %q%s", c.Kind, didYouMean(string(c.Kind), []string{string(KindDrain), string(KindResume)}))
}

func (c *Command) parseBody(body []byte) error {
	if c.Kind == KindDrain {
		c.Mode, c.At = ModeSuspend, At{Kind: AtNow}
	}
	if len(body) > maxBody {
		return fmt.Errorf("the body has %d bytes, more than %d", len(body), maxBody)
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	known := []string{"reason"}
	if c.Kind == KindDrain {
		known = []string{"mode", "at", "reason"}
	}
	members, err := strictObject("the body", body, known...)
	if err != nil {
		return err
	}
	if v, ok := members["mode"]; ok {
		s, err := strictString("mode", v)
		if err != nil {
			return err
		}
		modes := []string{string(ModeSuspend), string(ModeFinish)}
		if !slices.Contains(modes, s) {
			return fmt.Errorf("mode %q: must be one of %s%s", s, quoted(modes), didYouMean(s, modes))
		}
		c.Mode = Mode(s)
	}
	if v, ok := members["at"]; ok {
		if c.At, err = parseAt(v); err != nil {
			return err
		}
	}
	if v, ok := members["reason"]; ok {
		if c.Reason, err = strictString("reason", v); err != nil {
			return err
		}
		if len(c.Reason) > maxReason {
			return fmt.Errorf("reason has %d bytes, more than %d", len(c.Reason), maxReason)
		}
	}
	return nil
}

// Body is the message body of c, complete: every member is written out, so that
// the control stream can be read as a log.
func (c Command) Body() []byte {
	body := struct {
		Mode   Mode   `json:"mode,omitempty"`
		At     *At    `json:"at,omitempty"`
		Reason string `json:"reason,omitempty"`
	}{Reason: c.Reason}
	if c.Kind == KindDrain {
		body.Mode, body.At = c.Mode, &c.At
	}
	b, err := json.Marshal(body)
	if err != nil {
		// At.MarshalJSON is the only part that can refuse, and Validate was
		// there to be asked before.
		panic(fmt.Sprintf("control: encode command: %v", err))
	}
	return b
}

// withDefaults fills Mode and At of a drain: suspend, now.
func (c Command) withDefaults() Command {
	if c.Kind == KindDrain {
		if c.Mode == "" {
			c.Mode = ModeSuspend
		}
		if c.At.Kind == "" {
			c.At.Kind = AtNow
		}
	}
	return c
}

// Validate reports whether c could be published: it would be understood by
// [ParseCommand].
func (c Command) Validate() error {
	c = c.withDefaults()
	if c.Kind == KindDrain {
		if err := c.At.validate(); err != nil {
			return fmt.Errorf("%w: %w", ErrMalformed, err)
		}
	}
	_, err := ParseCommand("control", c.Subject("control"), c.Body())
	return err
}
