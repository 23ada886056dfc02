package main

import (
	"context"
	"runtime"
	"runtime/debug"

	"natsflow/testenv/embed"
)

// minServer is the oldest nats-server that natsflow works with; package bus
// checks it when it connects.
const minServer = "2.15"

// VersionCmd prints versions.
type VersionCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// versions is what VersionCmd prints.
type versions struct {
	Natsflow  string `json:"natsflow"`
	Revision  string `json:"revision,omitempty"`
	Go        string `json:"go"`
	MinServer string `json:"minimum_server"`
	Embedded  string `json:"embedded_server"`
}

// Run prints them.
func (cmd *VersionCmd) Run(_ context.Context, c *Console) error {
	v := versions{Natsflow: "unknown", Go: runtime.Version(), MinServer: minServer, Embedded: embed.Version}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Natsflow = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	if cmd.JSON {
		return c.json(v)
	}
	c.printf("natsflow %s", v.Natsflow)
	if v.Revision != "" {
		c.printf(" (%s)", v.Revision[:min(12, len(v.Revision))])
	}
	c.printf("\ngo %s\nnats-server %s or newer; dev has %s built in\n", v.Go[2:], v.MinServer, v.Embedded)
	return nil
}
