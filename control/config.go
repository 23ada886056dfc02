package control

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/google/uuid"

	"natsflow/bus"
)

const (
	// DefaultPrefix begins the control subjects unless another is configured.
	DefaultPrefix = "control"
	// StreamName is the control stream of the default prefix.
	StreamName = "NATSFLOW_CONTROL"
	// BucketName is the KV bucket of flow records, members, assignments and task records.
	BucketName = "natsflow_control"

	// markerTTL is how long the bucket keeps the mark of an expired key. A
	// watcher that was away for longer misses it, which is why members also look
	// by themselves.
	markerTTL = 2 * time.Minute
)

// Config configures [Open].
type Config struct {
	// Conn is the connection to use; it stays the caller's. Required.
	Conn *bus.Conn
	// Flow is the flow that is controlled. It may be empty for Send to all flows.
	Flow string
	// Prefix begins the control subjects. Defaults to "control".
	Prefix string
	// Replicas of the control stream and bucket when they are created. Defaults
	// to 1.
	Replicas int
	// Logger. Defaults to none.
	Logger *slog.Logger
	// LeaseTTL is how long a member's lease lasts after a renewal: whole seconds,
	// at least 2 s. Defaults to 5 s.
	LeaseTTL time.Duration
	// Name is the name of this process among the members: tokens of
	// [A-Za-z0-9_-] separated by dots. A process that joins under the name of
	// another replaces it. Defaults to the host's name and a random suffix.
	Name string
	// Instance tells this process from others of the same name and must be
	// unique. Defaults to a new UUID for every Join.
	Instance string
	// Tasks are the names of all tasks of the flow: tokens of [A-Za-z0-9_-]
	// separated by dots. Required for Join, and the same in all processes.
	Tasks []string
	// Hash identifies the definition that this process runs; see [Definition].
	Hash string
}

func (c Config) withDefaults() Config {
	if c.Prefix == "" {
		c.Prefix = DefaultPrefix
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.LeaseTTL == 0 {
		c.LeaseTTL = defaultLeaseTTL
	}
	if c.Name == "" {
		c.Name = DefaultName()
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if c.Conn == nil {
		errs = append(errs, errors.New("no connection"))
	}
	if c.Flow != "" {
		errs = append(errs, ValidFlow(c.Flow))
	}
	if c.Replicas < 1 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("%d replicas: must be 1 to 5", c.Replicas))
	}
	errs = append(errs, ValidPrefix(c.Prefix), validLeaseTTL(c.LeaseTTL), ValidName(c.Name))
	return errors.Join(errs...)
}

// ValidName returns an error unless name can be the name of a member.
func ValidName(name string) error {
	if !isName(name) {
		return fmt.Errorf("name %q: must be letters, digits, _, - and single dots between them, at most %d bytes", name, maxName)
	}
	return nil
}

// ValidTask returns an error unless task can be the name of a task.
func ValidTask(task string) error {
	if !isName(task) {
		return fmt.Errorf("task %q: must be letters, digits, _, - and single dots between them, at most %d bytes", task, maxName)
	}
	return nil
}

// maxName bounds the names of members and tasks, in bytes.
const maxName = 100

// isName reports whether s can end a key of the bucket: non-empty tokens of
// [A-Za-z0-9_-] separated by dots.
func isName(s string) bool {
	if len(s) > maxName {
		return false
	}
	for token := range strings.SplitSeq(s, ".") {
		if token == "" || strings.ContainsFunc(token, func(r rune) bool {
			return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
		}) {
			return false
		}
	}
	return true
}

func validTasks(tasks []string) error {
	if len(tasks) == 0 {
		return errors.New("no tasks: a member must know the tasks of its flow")
	}
	for _, task := range tasks {
		if err := ValidTask(task); err != nil {
			return err
		}
	}
	if len(sortedSet(tasks)) != len(tasks) {
		return fmt.Errorf("tasks %s: one is there twice", strings.Join(tasks, " "))
	}
	return nil
}

// DefaultName is the host's name and eight random hexadecimal digits.
func DefaultName() string {
	host := regexp.MustCompile(`[^A-Za-z0-9_-]+`).ReplaceAllString(hostname(), "-")
	host = strings.Trim(host[:min(len(host), 60)], "-")
	if host == "" {
		host = "worker"
	}
	return host + "-" + uuid.NewString()[:8]
}

func hostname() string {
	host, err := os.Hostname()
	if err != nil {
		return ""
	}
	return host
}

// streamName is the control stream of a prefix. Each prefix has a stream of its
// own: the stream of the default one may be there already with other subjects,
// and a stream that exists is never changed.
func streamName(prefix string) string {
	if prefix == DefaultPrefix {
		return StreamName
	}
	// A dot cannot be in the name of a stream. Two prefixes must not share one,
	// so what stands for the dot must not be in a prefix: "a.b" and "a_b" differ.
	return StreamName + "_" + strings.ReplaceAll(prefix, ".", "+")
}
