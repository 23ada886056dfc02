package control

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// strictObject decodes body, which must be one JSON object whose members all
// are among known. A member given twice is refused at any depth: parsers
// disagree on which of the two counts, and a command must not mean two things.
func strictObject(what string, body []byte, known ...string) (map[string]jsontext.Value, error) {
	if k := jsontext.Value(bytes.TrimSpace(body)).Kind(); k != '{' && k != 0 {
		return nil, fmt.Errorf("%s must be a JSON object, not %s", what, kindName(k))
	}
	var members map[string]jsontext.Value
	if err := json.Unmarshal(body, &members); err != nil {
		return nil, fmt.Errorf("%s: %w", what, plainJSONError(err))
	}
	names := make([]string, 0, len(members))
	for name := range members {
		names = append(names, name)
	}
	slices.Sort(names) // the message must not depend on the order of a map
	for _, name := range names {
		if !slices.Contains(known, name) {
			hint := didYouMean(name, known)
			if hint == "" {
				hint = " (known: " + quoted(known) + ")"
			}
			return nil, fmt.Errorf("%s: unknown member %q%s", what, name, hint)
		}
	}
	return members, nil
}

// strictString decodes a JSON string.
func strictString(what string, v jsontext.Value) (string, error) {
	if v.Kind() != '"' {
		return "", fmt.Errorf("%s must be a string, not %s", what, kindName(v.Kind()))
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil {
		return "", fmt.Errorf("%s: %w", what, plainJSONError(err))
	}
	return s, nil
}

// plainJSONError takes the package prefix off an error of the JSON library and
// names a member that was given twice.
func plainJSONError(err error) error {
	var syn *jsontext.SyntacticError
	if !errors.As(err, &syn) {
		return err
	}
	if errors.Is(syn.Err, jsontext.ErrDuplicateName) {
		return fmt.Errorf("member %q given twice", syn.JSONPointer.LastToken())
	}
	return fmt.Errorf("not valid JSON at byte %d: %w", syn.ByteOffset, syn.Err)
}

func kindName(k jsontext.Kind) string {
	switch k {
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	case '"':
		return "a string"
	case '0':
		return "a number"
	case '{':
		return "an object"
	case '[':
		return "an array"
	}
	return "something else"
}
