package flow_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"natsflow/flow"
)

// joinState plays lines and returns the image of the only task.
func joinState(t testing.TB, f *flow.Flow, lines ...string) []byte {
	t.Helper()
	task := f.Task(0)
	for i, src := range f.Sources() {
		r := f.Router(i)
		n := uint64(0)
		for _, line := range lines {
			stream, data, _ := strings.Cut(line, ": ")
			if stream != src.Stream {
				continue
			}
			at, err := clockTime(data)
			if err != nil {
				t.Fatal(err)
			}
			if src.Clock == nil {
				_, data, _ = strings.Cut(data, " ")
			}
			n++
			if err := r.Route("s", n, at.UnixNano(), []byte(data)); err != nil {
				t.Fatal(err)
			}
		}
		r.Take(func(b *flow.Batch) {
			if err := task.Play(b); err != nil {
				t.Fatal(err)
			}
			b.Release()
		})
	}
	s, err := task.Seal()
	if err != nil {
		t.Fatal(err)
	}
	return s.Delta
}

// State that is not that of the join is refused when it is loaded.
func TestJoin_State(t *testing.T) {
	lines := []string{"L: 10:00 a 1", "R: 10:10 a x", "L: 10:20 b 2"}
	inner := joinFlow{cfg: anHourAndTen(flow.InnerJoin)}
	image := joinState(t, inner.build(t), lines...)
	versioned := inner
	versioned.cfg.Version = 3
	strict := inner.builder2(flow.Codec[string]{Encode: flow.EncodeText(), Decode: func(_ *flow.Meta, data []byte) (string, error) {
		if string(data) == "2" {
			return "", errors.New("is two")
		}
		return string(data), nil
	}})
	table := func(latest bool) *flow.Flow {
		b := flow.New("test", flow.Options{Partitions: 1})
		results, _ := flow.JoinTable(timedKeyed(b, "L", nil), timedKeyed(b, "R", nil), "join", flow.TableConfig[string, string, string]{
			Latest: latest, Stream: flow.TextCodec(), Table: flow.TextCodec(), Join: joinValues,
		})
		flow.To(results, textSink("OUT"))
		return build(t, b)
	}
	for _, tc := range []struct {
		f    *flow.Flow
		data []byte
		want string
	}{
		{inner.build(t), image, ""},
		{joinFlow{cfg: anHourAndTen(flow.OuterJoin)}.build(t), image, ""},
		{versioned.build(t), image, "state of version 0, the step has version 3 and no Migrate"},
		{build(t, strict), image, "is two"},
		{table(false), image, "not the state of this join: what is stored is that of another kind; give the changed step another id"},
		{table(true), joinState(t, table(false), lines...), "not the state of this join"},
		{table(false), joinState(t, table(true), lines...), "not the state of this join"},
		{inner.build(t), image[:len(image)-1], "not an image"},
		{inner.build(t), []byte("\x04join\x00\x01\x01a\x02x"), `key "a": not one of this step`},
	} {
		got := ""
		if err := tc.f.Task(0).Load(tc.data); err != nil {
			got = err.Error()
		}
		if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s, want %s", got, tc.want)
		}
	}
}

// builder2 is builder with another codec of the left records.
func (j joinFlow) builder2(left flow.Codec[string]) *flow.Builder {
	b := flow.New("test", flow.Options{Partitions: 1})
	j.cfg.Left, j.cfg.Right, j.cfg.Join = left, flow.TextCodec(), joinValues
	results, _, _ := flow.Join(timedKeyed(b, "L", nil), timedKeyed(b, "R", nil), "join", j.cfg)
	flow.To(results, textSink("OUT"))
	return b
}

// What an inner join has kept has perhaps met others; another kind does not say that
// it has met none.
func TestJoin_OtherKind(t *testing.T) {
	lines := []string{"L: 10:00 a 1", "R: 10:10 a x", "L: 10:20 b 2"}
	image := joinState(t, joinFlow{cfg: anHourAndTen(flow.InnerJoin)}.build(t), lines...)
	f := joinFlow{cfg: anHourAndTen(flow.OuterJoin)}.build(t)
	task := f.Task(0)
	if err := task.Load(image); err != nil {
		t.Fatal(err)
	}
	task.Loaded()
	r := f.Router(1)
	if err := r.Route("s", 9, flowtestTime(t, "10:25"), []byte("b y")); err != nil {
		t.Fatal(err)
	}
	r.Take(func(b *flow.Batch) {
		if err := task.Play(b); err != nil {
			t.Fatal(err)
		}
	})
	for i := range 2 {
		if err := task.Advance(i, flowtestTime(t, "15:00")); err != nil {
			t.Fatal(err)
		}
	}
	s, err := task.Seal()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := flow.Outputs(s.Outbox, func(_ int, o flow.Output) error { got = append(got, string(o.Data)); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0] != "b 2+y" || task.Keys() != 0 {
		t.Errorf("results %q, %d records are kept", got, task.Keys())
	}
}

func flowtestTime(t *testing.T, clock string) int64 {
	t.Helper()
	at, err := clockTime(clock)
	if err != nil {
		t.Fatal(err)
	}
	return at.UnixNano()
}

// A commit stores what has changed, not all that a key has.
func TestJoin_DeltaOfOneRecord(t *testing.T) {
	f := joinFlow{cfg: anHourAndTen(flow.OuterJoin)}.build(t)
	task, r := f.Task(0), f.Router(0)
	play := func(from, n int) int {
		for i := range n {
			if err := r.Route("s", uint64(from+i), flowtestTime(t, "10:00")+int64(from+i), []byte("a value")); err != nil {
				t.Fatal(err)
			}
		}
		r.Take(func(b *flow.Batch) {
			if err := task.Play(b); err != nil {
				t.Fatal(err)
			}
			b.Release()
		})
		s, err := task.Seal()
		if err != nil {
			t.Fatal(err)
		}
		return len(s.Delta)
	}
	play(1, 5000)
	if n := play(5001, 1); n > 100 {
		t.Errorf("%d bytes for one more record of a key that has 5,000", n)
	}
}

// Bytes that are not the state of a join are an error, never a panic.
func FuzzJoin_Load(f *testing.F) {
	window := joinFlow{cfg: flow.JoinConfig[string, string, string]{Kind: flow.OuterJoin, Windows: flow.TumblingDays(2, time.FixedZone("x", 3600))}}
	flows := []*flow.Flow{
		joinFlow{cfg: anHourAndTen(flow.OuterJoin)}.build(f), window.build(f),
		tableFlow{cfg: flow.TableConfig[string, string, string]{Kind: flow.LeftJoin}}.build(f),
		tableFlow{cfg: flow.TableConfig[string, string, string]{Latest: true}}.build(f),
	}
	for _, fl := range flows {
		f.Add(joinState(f, fl, "L: 10:00 a 1", "R: 10:10 a x", "L: 10:20 b 2", "R: 10:10 a gone", "R: 10:10 a y"))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, fl := range flows {
			task := fl.Task(0)
			if err := task.Load(data); err != nil {
				if !errors.Is(err, flow.ErrState) {
					t.Fatal(err)
				}
				continue
			}
			task.Loaded()
			for i := range 2 {
				if err := task.Advance(i, 1<<62); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

func TestJoin_Mistakes(t *testing.T) {
	day := flow.Tumbling(time.Hour)
	late, sessions, each := day, flow.Sessions(time.Hour, 0), day
	late.AllowedLateness, each.Emit = time.Hour, flow.EmitEach
	type cfg = flow.JoinConfig[string, string, string]
	for _, tc := range []struct {
		cfg  cfg
		want string
	}{
		{cfg{Kind: 7}, "there is no JoinKind 7"},
		{cfg{AllowedLateness: -1}, "an allowed lateness is not negative and at most 7300 days"},
		{cfg{Before: -1}, "the bounds Before and After are not negative, and at most 7300 days or Forever"},
		{cfg{After: 1 << 62}, "the bounds Before and After are not negative, and at most 7300 days or Forever"},
		{cfg{Kind: flow.LeftJoin, After: flow.Forever}, "with After Forever it is never known that a left record met none: a left join needs a bound"},
		{cfg{Kind: flow.OuterJoin, Before: flow.Forever}, "with Before Forever it is never known that a right record met none: an outer join needs a bound"},
		{cfg{Before: 1, Windows: day}, "a join has Windows, or Before and After, not both"},
		{cfg{Windows: sessions}, "the windows of a join are tumbling"},
		{cfg{Windows: flow.Sliding(time.Hour, time.Minute)}, "the windows of a join are tumbling"},
		{cfg{Windows: late}, "the windows of a join have no AllowedLateness and no Emit of their own"},
		{cfg{Windows: each}, "the windows of a join have no AllowedLateness and no Emit of their own"},
		{cfg{Windows: flow.Tumbling(-1)}, "sizes, gaps and lateness are positive"},
	} {
		_, err := joinFlow{cfg: tc.cfg}.builder().Build()
		if err == nil || !strings.Contains(err.Error(), `step "join": `+tc.want) {
			t.Errorf("%+v: error %v, want %s", tc.cfg, err, tc.want)
		}
	}
	for _, tc := range []struct {
		cfg  flow.TableConfig[string, string, string]
		want string
	}{
		{flow.TableConfig[string, string, string]{Kind: flow.OuterJoin}, "a join with a table is inner or left, not outer"},
		{flow.TableConfig[string, string, string]{AllowedLateness: -1}, "an allowed lateness is not negative"},
		{flow.TableConfig[string, string, string]{Latest: true, AllowedLateness: 1}, "with Latest no record is late"},
	} {
		_, err := tableFlow{cfg: tc.cfg}.builder().Build()
		if err == nil || !strings.Contains(err.Error(), `step "table": `+tc.want) {
			t.Errorf("%+v: error %v, want %s", tc.cfg, err, tc.want)
		}
	}
}

func TestJoin_MistakesOfStreams(t *testing.T) {
	b, other := newFlow(), newFlow()
	l, r := timedKeyed(b, "L", nil), timedKeyed(b, "R", nil)
	none := flow.From(b, flow.Source{Stream: "N"}, flow.DecodeText())
	later := flow.Rekey(r, firstWord, flow.TextCodec())
	cfg := anHourAndTen(flow.InnerJoin)
	cfg.Join, cfg.Left, cfg.Right = joinValues, flow.TextCodec(), flow.TextCodec()
	flow.Join(l, none, "one", cfg)
	flow.Join(none, r, "two", cfg)
	flow.Join(l, later, "three", cfg)
	flow.Join(l, timedKeyed(other, "R", nil), "four", cfg)
	flow.Join(l, r, "five", flow.JoinConfig[string, string, string]{})
	flow.JoinTable(l, none, "six", flow.TableConfig[string, string, string]{})
	_, err := b.Build()
	for _, want := range []string{
		`step "one": the second stream has no key: records with the same key meet, put a KeyBy before it`,
		`step "two": join keeps state for each key: put a KeyBy before it`,
		`step "three": a stream of stage 0 with one of stage 1: change the key of the first by Rekey, so that both are of one stage`,
		`step "four": the streams belong to different flows`,
		`step "five": there is no function Join`,
		`step "five": there is no codec with Encode and Decode for the left records`,
		`step "five": there is no codec with Encode and Decode for the right records`,
		`step "six": the second stream has no key`,
		`step "six": there is no codec with Encode and Decode for the records of the stream`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("there is no %q in %v", want, err)
		}
	}
}

// The definition of a flow holds its joins.
func TestFlow_HashOfJoins(t *testing.T) {
	seen := map[string]string{}
	add := func(f *flow.Flow, what string) {
		if other, there := seen[f.Hash()]; there {
			t.Errorf("%s and %s have one hash", what, other)
		}
		seen[f.Hash()] = what
	}
	type cfg = flow.JoinConfig[string, string, string]
	for _, c := range []cfg{
		{},
		{Kind: flow.LeftJoin},
		{Before: 1},
		{After: 1},
		{Before: flow.Forever},
		{AllowedLateness: 1},
		{Windows: flow.Tumbling(1)},
		{Windows: flow.Tumbling(2)},
		{Version: 1},
	} {
		add(joinFlow{cfg: c}.build(t), fmt.Sprintf("%+v", c))
	}
	type table = flow.TableConfig[string, string, string]
	for _, c := range []table{{}, {Kind: flow.LeftJoin}, {Latest: true}, {AllowedLateness: 1}, {Version: 1}} {
		add(tableFlow{cfg: c}.build(t), fmt.Sprintf("%+v", c))
	}
}

// BenchmarkJoin plays records of two sides with keys that each have a number of kept
// records, of which one in a hundred meets the record at hand.
func BenchmarkJoin(b *testing.B) {
	for _, kept := range []int{10, 10_000} {
		b.Run(fmt.Sprintf("kept=%d", kept), func(b *testing.B) {
			const keys = 16
			bld := flow.New("bench", flow.Options{Partitions: 1})
			src := flow.From(bld, flow.Source{Stream: "IN"}, flow.DecodeBytes())
			all := flow.KeyBy(src, func(m *flow.Meta, _ []byte) (string, error) { return m.Subject, nil })
			left, right := flow.Branch(all, func(m *flow.Meta, _ []byte) (bool, error) { return m.Seq/keys%2 == 0, nil })
			results, _, _ := flow.Join(left, right, "join", flow.JoinConfig[[]byte, []byte, []byte]{
				Kind: flow.LeftJoin, Before: 2 * keys, AllowedLateness: time.Duration(keys * kept), Left: flow.BytesCodec(), Right: flow.BytesCodec(),
				Join: func(_ *flow.Meta, l, _ *[]byte) ([]byte, bool, error) { return *l, true, nil },
			})
			flow.To(results, bytesTo("OUT", "out."))
			f := build(b, bld)
			r, t := f.Router(0), f.Task(0)
			names := make([]string, keys)
			for i := range names {
				names[i] = fmt.Sprintf("key-%08d", i)
			}
			data := []byte(strings.Repeat("x", 100))
			seq := 0
			play := func(n int) {
				for range n {
					seq++
					if err := r.Route(names[seq%keys], uint64(seq), int64(seq), data); err != nil {
						b.Fatal(err)
					}
				}
				r.Take(func(bt *flow.Batch) {
					if err := t.Play(bt); err != nil {
						b.Fatal(err)
					}
					bt.Release()
				})
				if _, err := t.Seal(); err != nil {
					b.Fatal(err)
				}
			}
			for range 2*keys*kept/1000 + 1 {
				play(1000)
			}
			if n := t.Keys(); n < keys*kept/2 {
				b.Fatalf("%d records are kept", n)
			}
			b.ReportAllocs()
			b.ResetTimer()
			for left := b.N; left > 0; left -= 1000 {
				play(min(left, 1000))
			}
		})
	}
}

// A codec may take a part of the value from the key of the record, also when a task is
// loaded.
func TestJoin_CodecWithKey(t *testing.T) {
	cfg := anHourAndTen(flow.InnerJoin)
	cfg.Left = flow.Codec[string]{
		Encode: func(dst []byte, _ *flow.Meta, v string) ([]byte, error) { return append(dst, v...), nil },
		Decode: func(m *flow.Meta, data []byte) (string, error) {
			if m.Key == "" {
				return "", errors.New("no key")
			}
			return m.Key + string(data), nil
		},
	}
	f := joinFlow{cfg: cfg}.build(t)
	image := joinState(t, f, "L: 10:00 a 1")
	if err := f.Task(0).Load(image); err != nil {
		t.Fatal(err)
	}
	r := timed(t, f, "L: 10:00 a 1", "crash", "drain", "R: 10:05 a x")
	wantData(t, r, "OUT", "a a1+x")
}
