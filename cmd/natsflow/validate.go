package main

import (
	"context"
	"encoding/json"
)

// ValidateCmd checks a flow file and prints its plan. It needs no server.
type ValidateCmd struct {
	File string `arg:"" help:"Flow file, or a folder with a flow.yaml."`
	JSON bool   `name:"json" help:"Print the plan as JSON."`
}

// Run prints the plan or returns all mistakes.
func (cmd *ValidateCmd) Run(_ context.Context, c *Console) error {
	spec, _, err := loadFlow(cmd.File)
	if err != nil {
		return err
	}
	if cmd.JSON {
		return c.json(spec.Plan())
	}
	c.printf("%s", spec.Plan())
	return nil
}

// json prints v to Out, indented.
func (c *Console) json(v any) error {
	enc := json.NewEncoder(c.Out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
