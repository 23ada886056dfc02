package flow_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"natsflow/flow"
)

func TestCodecs(t *testing.T) {
	type point struct{ X, Y int }
	m := &flow.Meta{}
	if v, err := flow.DecodeJSON[point]()(m, []byte(`{"X":1,"Y":2,"X":3}`)); err != nil || v != (point{3, 2}) {
		t.Errorf("JSON: %v %v, want the last of two members", v, err)
	}
	if _, err := flow.DecodeJSON[point]()(m, []byte(`{"X":`)); err == nil {
		t.Error("half a JSON value is decoded")
	}
	data := []byte("abc")
	if v, err := flow.DecodeBytes()(m, data); err != nil || &v[0] != &data[0] {
		t.Errorf("bytes are copied, or %v", err)
	}
	text, err := flow.DecodeText()(m, data)
	data[0] = 'x'
	if err != nil || text != "abc" {
		t.Errorf("text %q, %v", text, err)
	}

	dst := []byte("> ")
	for want, encode := range map[string]func() ([]byte, error){
		`> {"X":1,"Y":2}`: func() ([]byte, error) { return flow.EncodeJSON[point]()(dst, m, point{1, 2}) },
		"> ab":            func() ([]byte, error) { return flow.EncodeBytes()(dst, m, []byte("ab")) },
		"> cd":            func() ([]byte, error) { return flow.EncodeText()(dst, m, "cd") },
	} {
		if got, err := encode(); err != nil || string(got) != want {
			t.Errorf("encoded %q, %v; want %q", got, err, want)
		}
	}
	if _, err := flow.EncodeJSON[chan int]()(dst, m, nil); err == nil {
		t.Error("a channel is encoded")
	}
}

// total is a state that has changed: version 1 was {"n":3}, version 2 counts in
// cents and has a name.
type total struct {
	Cents int    `json:"cents"`
	Name  string `json:"name"`
}

var errTooOld = errors.New("too old")

func migrateTotal(version int, data []byte, s *total) error {
	switch version {
	case 0:
		return errTooOld
	case 1:
		var old struct{ N int }
		if err := json.Unmarshal(data, &old); err != nil {
			return err
		}
		s.Cents, s.Name = 100*old.N, "migrated"
		return nil
	}
	panic("version " + strconv.Itoa(version))
}

// totals adds the second word; its state is of the codec's version.
func totals(t fataler, codec flow.StateCodec[total]) *runner {
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "total", codec, func(_ *flow.Meta, s *total, v string, emit func(string)) error {
		n, err := strconv.Atoi(strings.Fields(v)[1])
		if err != nil {
			return err
		}
		s.Cents += n
		emit(fmt.Sprintf("%d %s", s.Cents, s.Name))
		return nil
	}))
	return run(t, b)
}

// oldImage is what a program with state of version 1 has stored.
func oldImage(t fataler, value string, version int) []byte {
	r := totals(t, flow.StateCodec[total]{
		Version: version,
		Append:  func(dst []byte, _ *total) ([]byte, error) { return append(dst, value...), nil },
		Decode:  func([]byte, *total) error { return nil },
	})
	r.feed("k 0")
	r.seal()
	return r.deltas[0][0]
}

func TestStateCodec_Migrate(t *testing.T) {
	r := totals(t, flow.JSONState(2, migrateTotal))
	r.deltas[0] = [][]byte{oldImage(t, `{"n":3}`, 1)}
	r.crash()
	r.want([]string{"k 5"}, out("k", "305 migrated"))
	// The log has both versions now, each with its own.
	r.crash()
	r.want([]string{"k 5"}, out("k", "310 migrated"))
}

// State that cannot be read is an error that names step and key. It is no use to
// go on from an empty one.
func TestStateCodec_Unreadable(t *testing.T) {
	panics := flow.JSONState[total](1, nil)
	panics.Decode = func([]byte, *total) error { panic("what is this") }
	for name, test := range map[string]struct {
		codec flow.StateCodec[total]
		image []byte
		want  string
		is    error
	}{
		"no migrate":       {flow.JSONState[total](2, nil), oldImage(t, "{}", 1), `state of version 1, the step has version 2 and no Migrate`, nil},
		"newer":            {flow.JSONState[total](1, nil), oldImage(t, "{}", 2), `state of version 2, the step has version 1`, nil},
		"migrate fails":    {flow.JSONState(2, migrateTotal), oldImage(t, "{}", 0), `migrate state of version 0 to 2: too old`, errTooOld},
		"migrate panics":   {flow.JSONState(2, migrateTotal), oldImage(t, "{}", 3), `version 3`, flow.ErrPanic},
		"not decodable":    {flow.JSONState[total](1, nil), oldImage(t, "{", 1), `unexpected end of JSON`, nil},
		"decode panics":    {panics, oldImage(t, "{}", 1), `what is this`, flow.ErrPanic},
		"undecodable old":  {flow.JSONState(2, migrateTotal), oldImage(t, "[", 1), `migrate state of version 1 to 2: unexpected end`, nil},
		"empty state JSON": {flow.JSONState[total](1, nil), oldImage(t, "", 1), `unexpected end of JSON`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			before := string(test.image)
			err := totals(t, test.codec).tasks[0].Load(test.image)
			if !errors.Is(err, flow.ErrState) || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), `step "total"`) {
				t.Errorf("error %v\nwant ErrState with %q", err, test.want)
			}
			if test.is == nil && !strings.Contains(err.Error(), `key "k"`) {
				t.Errorf("error %v does not name the key", err)
			}
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error %v is not %v", err, test.is)
			}
			if string(test.image) != before {
				t.Error("the image was changed")
			}
		})
	}
}

// State that cannot be encoded stops the task, by an error and not by a panic.
func TestStateCodec_NotEncodable(t *testing.T) {
	refuse := flow.JSONState[total](1, nil)
	refuse.Append = func([]byte, *total) ([]byte, error) { return nil, errTooOld }
	panics := flow.JSONState[total](1, nil)
	panics.Append = func([]byte, *total) ([]byte, error) { panic("boom") }
	for want, codec := range map[error]flow.StateCodec[total]{errTooOld: refuse, flow.ErrPanic: panics} {
		r := totals(t, codec)
		r.feed("k 1")
		_, err := r.tasks[0].Seal()
		if !errors.Is(err, want) || !strings.Contains(err.Error(), `step "total"`) {
			t.Errorf("Seal: %v, want %v", err, want)
		}
		r.tasks[0].BeginImage()
		_, _, err = r.tasks[0].NextImage(10)
		if !errors.Is(err, want) || !strings.Contains(err.Error(), `step "total"`) {
			t.Errorf("NextImage: %v, want %v", err, want)
		}
	}
}

// A later image replaces the state of a key: nothing of the earlier one shows
// through where the encoding leaves members out.
func TestTask_LoadReplaces(t *testing.T) {
	b := newFlow()
	textTo(flow.Stateful(keyed(b), "set", flow.JSONState[map[string]int](1, nil),
		func(_ *flow.Meta, s *map[string]int, v string, emit func(string)) error {
			data, err := json.Marshal(*s)
			emit(string(data))
			*s = map[string]int{v: 1}
			return err
		}))
	r := run(t, b)
	r.want([]string{"k a"}, out("k", "null"))
	r.want([]string{"k b"}, out("k", `{"k a":1}`))
	r.crash()
	r.want([]string{"k c"}, out("k", `{"k b":1}`))
}
