package main

import (
	"context"
	"encoding/json"
	"errors"

	"natsflow/control"
)

// ValidateCmd checks a flow file and prints its plan, or what it changes in a flow
// that there is. Only the latter needs a server.
type ValidateCmd struct {
	File    string `arg:"" help:"Flow file, or a folder with a flow.yaml."`
	Against string `placeholder:"FLOW" help:"Say what the file changes in this flow instead, by the flow's record on the server; exit code 1 when it cannot go on, or needs a flag."`
	JSON    bool   `name:"json" help:"Print JSON."`
	ConnectionFlags
}

// Validate checks the flags.
func (cmd *ValidateCmd) Validate() error {
	if cmd.Against == "" {
		return cmd.ConnectionFlags.Validate()
	}
	return errors.Join(control.ValidFlow(cmd.Against), cmd.ConnectionFlags.Validate())
}

// Run prints the plan or the comparison, or returns all mistakes.
func (cmd *ValidateCmd) Run(ctx context.Context, c *Console) error {
	spec, f, err := loadFlow(cmd.File)
	switch {
	case err != nil:
		return err
	case cmd.Against != "":
		return cmd.compare(ctx, c, f)
	case cmd.JSON:
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
