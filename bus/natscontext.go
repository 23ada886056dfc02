package bus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// natsContext is the part of a context file of the `nats` command that is understood here
// (natscontext of nats-io/jsm.go).
type natsContext struct {
	URL         string `json:"url"`
	SocksProxy  string `json:"socks_proxy"`
	Token       string `json:"token"`
	User        string `json:"user"`
	Password    string `json:"password"`
	Creds       string `json:"creds"`
	NKey        string `json:"nkey"`
	Cert        string `json:"cert"`
	Key         string `json:"key"`
	CA          string `json:"ca"`
	NSC         string `json:"nsc"`
	Domain      string `json:"jetstream_domain"`
	APIPrefix   string `json:"jetstream_api_prefix"`
	InboxPrefix string `json:"inbox_prefix"`
	UserJWT     string `json:"user_jwt"`
	UserSeed    string `json:"user_seed"`
	TLSFirst    bool   `json:"tls_first"`
}

// withContext fills what is not set in c from the context that c names.
func (c Config) withContext() (Config, error) {
	if c.Context == "" {
		return c, nil
	}
	nc, err := readContext(c.Context)
	if err != nil {
		return c, fmt.Errorf("reading nats context %q: %w", c.Context, err)
	}
	fill(&c.URL, nc.URL)
	// Credentials are taken as a whole or not at all: the context's user must not be mixed with an explicit file.
	if c.Creds == "" && c.NKey == "" && c.User == "" {
		c.Creds, c.NKey = expandHome(nc.Creds), expandHome(nc.NKey)
		c.User, c.Password, c.token = nc.User, nc.Password, nc.Token
		c.userJWT, c.userSeed = nc.UserJWT, nc.UserSeed
		if c.Creds != "" {
			c.NKey = ""
		}
	}
	if c.TLSCert == "" && c.TLSKey == "" {
		c.TLSCert, c.TLSKey = expandHome(nc.Cert), expandHome(nc.Key)
	}
	fill(&c.TLSCA, expandHome(nc.CA))
	c.domain, c.apiPrefix, c.inboxPrefix, c.tlsFirst = nc.Domain, nc.APIPrefix, nc.InboxPrefix, nc.TLSFirst
	return c, nil
}

func readContext(name string) (natsContext, error) {
	var nc natsContext
	if strings.ContainsAny(name, `/\`) || name == ".." {
		return nc, errors.New("not a name of a context")
	}
	dir := os.Getenv("XDG_CONFIG_HOME")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return nc, err
		}
		dir = filepath.Join(home, ".config")
	}
	file := filepath.Join(dir, "nats", "context", name+".json")
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nc, fmt.Errorf("%w: there is no %s", ErrNotFound, file)
	}
	if err != nil {
		return nc, err
	}
	if err := json.Unmarshal(b, &nc); err != nil {
		return nc, fmt.Errorf("%s: %w", file, err)
	}
	switch {
	case nc.NSC != "":
		return nc, fmt.Errorf("%s: credentials by nsc are not supported, name a creds file", file)
	case nc.SocksProxy != "":
		return nc, fmt.Errorf("%s: a socks proxy is not supported", file)
	}
	return nc, nil
}

func fill(field *string, value string) {
	if *field == "" {
		*field = value
	}
}

func expandHome(path string) string {
	rest, ok := strings.CutPrefix(path, "~/")
	if !ok {
		return path
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return path
	}
	return filepath.Join(home, rest)
}
