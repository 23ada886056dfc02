package embed

import (
	"bufio"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStart(t *testing.T) {
	t.Parallel()
	t.Run("listens and keeps its port", func(t *testing.T) {
		t.Parallel()
		s, err := Start(Config{Store: t.TempDir(), Listen: "127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Stop()
		url := s.URL()
		if err := s.Restart(func(c *Config) { c.Store, c.Listen = "elsewhere", "" }); err != nil {
			t.Fatal(err)
		}
		if s.URL() != url {
			t.Fatalf("URL changed from %s to %s", url, s.URL())
		}
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "nats://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "INFO ") {
			t.Fatalf("read %q, %v, want an INFO line", line, err)
		}
	})
	t.Run("says what is wrong", func(t *testing.T) {
		t.Parallel()
		taken, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer taken.Close()
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for name, tc := range map[string]struct {
			cfg  Config
			want string
		}{
			"no store":        {Config{}, "no store folder"},
			"negative limits": {Config{Store: "x", MaxStore: -1, MaxPayload: -1}, "negative"},
			"no port":         {Config{Store: t.TempDir(), Listen: "127.0.0.1"}, "missing port"},
			"bad port":        {Config{Store: t.TempDir(), Listen: "127.0.0.1:nats"}, "port is not 0 to 65535"},
			"port taken":      {Config{Store: t.TempDir(), Listen: taken.Addr().String()}, "address already in use"},
			"store not a dir": {Config{Store: filepath.Join(file, "x")}, "not a directory"},
		} {
			s, err := Start(tc.cfg)
			if err == nil {
				s.Stop()
				t.Errorf("%s: started", name)
				continue
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: got %q, want it to contain %q", name, err, tc.want)
			}
		}
	})
}
