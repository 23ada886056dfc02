package testenv

import (
	"context"
	"encoding/json"
	"fmt"
)

// Edit changes settings of a stream, named as in its JSON form, such as
// "max_msgs" or "subjects".
func (a *Admin) Edit(stream string, settings map[string]any) {
	a.s.tb.Helper()
	a.do(fmt.Sprintf("editing %s: %v", stream, settings), func(ctx context.Context) error {
		s, err := a.js.Stream(ctx, stream)
		if err != nil {
			return err
		}
		cfg := s.CachedInfo().Config
		raw, err := json.Marshal(settings)
		if err != nil {
			return err
		}
		// A list would be decoded into the one that is there.
		if _, ok := settings["subjects"]; ok {
			cfg.Subjects = nil
		}
		if err := json.Unmarshal(raw, &cfg); err != nil {
			return err
		}
		_, err = a.js.UpdateStream(ctx, cfg)
		return err
	})
}
