package kvsnap

import (
	"errors"
	"fmt"
)

// ErrSnapshotCorrupt is what errors.Is finds in every [CorruptError].
var ErrSnapshotCorrupt = errors.New("snapshot is corrupt")

// ErrReleased is returned by a [Log] that was released.
var ErrReleased = errors.New("task was released")

// ErrBaseActive is returned by [Base.Finish] of a base that was begun while
// another one of the same log was not finished or aborted yet.
var ErrBaseActive = errors.New("another base of this task is being written")

// CorruptError says that the snapshot of a task cannot be read back as it was
// written. errors.Is(err, ErrSnapshotCorrupt) is true. Nothing was overwritten
// or purged: what is left can still be looked at.
type CorruptError struct {
	// Key in the flow's bucket.
	Key string
	// Reason in a few words, e.g. "checksum mismatch".
	Reason string
}

// Error names the key and the reason.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("snapshot is corrupt at key %s: %s", e.Key, e.Reason)
}

// Is makes errors.Is(err, ErrSnapshotCorrupt) work.
func (e *CorruptError) Is(target error) bool { return target == ErrSnapshotCorrupt }

func corrupt(key, format string, args ...any) *CorruptError {
	return &CorruptError{Key: key, Reason: fmt.Sprintf(format, args...)}
}
