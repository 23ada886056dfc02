package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// errStoreInUse says that another process has the folder.
var errStoreInUse = errors.New("in use")

// devStore is the folder that keeps the data of `dev`. Two servers on one folder
// would destroy it, so it is locked.
type devStore struct {
	dir    string
	unlock func()
	// fresh: there was nothing in it.
	fresh bool
}

// openStoreDir creates and locks the folder; without a name it is one for the
// flow in the user's cache folder.
func openStoreDir(dir, flow string) (*devStore, error) {
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("find a folder for the data: %w; name one with --store", err)
		}
		dir = filepath.Join(cache, "natsflow", flow)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open the data folder: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the data folder: %w", err)
	}
	s := &devStore{dir: dir}
	if s.unlock, err = lockFile(filepath.Join(dir, "natsflow.lock")); err != nil {
		if errors.Is(err, errStoreInUse) {
			return nil, fmt.Errorf("the data folder %s is %w by another natsflow dev: stop that one, or name another folder with --store", dir, err)
		}
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
	_, err = os.Stat(filepath.Join(dir, "jetstream"))
	s.fresh = errors.Is(err, os.ErrNotExist)
	return s, nil
}
