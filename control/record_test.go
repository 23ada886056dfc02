package control

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func testRecord(sources ...string) Record {
	def := Definition{Partitions: 16, Hash: "h", Sources: map[string]SourceRecord{}}
	for _, s := range sources {
		def.Sources[s] = SourceRecord{Created: scriptTime(0)}
	}
	return newRecord("f", def, ControlRef{Prefix: "control", Stream: StreamName, Created: scriptTime(0)}, 0, scriptTime(0))
}

func TestDecodeRecord(t *testing.T) {
	good, err := encodeRecord(testRecord("A"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decodeRecord(good); err != nil {
		t.Fatal(err)
	}
	change := func(was, is string) []byte {
		s := strings.Replace(string(good), was, is, 1)
		if s == string(good) {
			t.Fatalf("%s is not in %s", was, good)
		}
		return []byte(s)
	}
	for name, b := range map[string][]byte{
		"empty":          nil,
		"not JSON":       []byte("x"),
		"newer version":  change(`"version":1`, `"version":2`),
		"unknown member": change(`"state"`, `"colour":"red","state"`),
		"unknown state":  change(`"running"`, `"walking"`),
		"stopped":        change(`"running"`, `"drained"`),
		"draining":       change(`"running"`, `"draining"`),
		"no partitions":  change(`"partitions":16`, `"partitions":0`),
		"more behind":    append(append([]byte{}, good...), good...),
		"flow":           change(`"flow":"f"`, `"flow":"F"`),
	} {
		if _, err := decodeRecord(b); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	rec := testRecord("A")
	rec, _ = rec.Apply(Command{Seq: 1, Kind: KindDrain})
	b, err := encodeRecord(rec)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := decodeRecord(b)
		if err != nil {
			return
		}
		if _, err := encodeRecord(rec); err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
	})
}

func TestRecord_bounded(t *testing.T) {
	rec := testRecord()
	seqs := map[string]uint64{}
	for i := range 2000 {
		seqs[fmt.Sprintf("a-long-name-of-a-stream-%d", i)] = 1
	}
	big := strings.Repeat("é", 20_000)
	for seq := uint64(1); seq < 100; seq += 3 {
		rec, _ = rec.Apply(Command{Seq: seq, Kind: KindDrain, At: At{Kind: AtSeq, Seq: seqs}, Reason: "r"})
		cmd, err := ParseCommand("control", "control."+big, nil)
		if err == nil {
			t.Fatal("accepted")
		}
		cmd.Seq = seq + 1
		rec, _ = rec.Refuse(cmd, err)
		rec, _ = rec.Apply(Command{Seq: seq + 2, Kind: KindResume})
	}
	b, err := encodeRecord(rec)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) > 40_000 {
		t.Errorf("a record of %d bytes", len(b))
	}
}

func TestRecord_FixCut(t *testing.T) {
	rec, _ := testRecord("A").Apply(Command{Seq: 1, Kind: KindDrain})
	next, err := rec.FixCut(1, map[string]uint64{"A": 4}, map[string]uint64{"A": 5})
	var behind *CutBehindError
	if !errors.As(err, &behind) || !errors.Is(err, ErrCutBehind) || *behind != (CutBehindError{"A", 4, 5}) {
		t.Fatalf("error %v", err)
	}
	if next.State != StateRunning || next.Epoch != 1 || rec.State != StateDraining {
		t.Errorf("state %s, epoch %d; before %s", next.State, next.Epoch, rec.State)
	}
	// What the caller does with its map later must not reach the record.
	cut := map[string]uint64{"A": 5}
	next, err = rec.FixCut(1, cut, map[string]uint64{"A": 5})
	if err != nil {
		t.Fatal(err)
	}
	cut["A"] = 9
	if next.Drain.Cut["A"] != 5 || rec.Drain.Cut != nil {
		t.Errorf("cut %v, before %v", next.Drain.Cut, rec.Drain.Cut)
	}
	if _, err := rec.FixCut(2, cut, nil); !errors.Is(err, ErrNotDraining) {
		t.Errorf("error %v", err)
	}
}

func TestRecord_rebind(t *testing.T) {
	rec := testRecord("A")
	rec.LastCommand = 40
	ref := rec.Control
	if got := rec.rebind(ref, 99, 40, scriptTime(9)); got.LastCommand != 40 {
		t.Errorf("the same stream: last command %d", got.LastCommand)
	}
	if got := rec.rebind(ref, 39, 39, scriptTime(9)); got.LastCommand != 40 || got.LastError != "" {
		t.Errorf("the same stream, another process looked at 40 meanwhile: %+v", got)
	}
	if got := rec.rebind(ref, 17, 40, scriptTime(9)); got.LastCommand != 17 || !strings.Contains(got.LastError, "has lost its end") {
		t.Errorf("without its end: %+v", got)
	}
	ref.Created = scriptTime(5)
	if got := rec.rebind(ref, 99, 40, scriptTime(9)); got.LastCommand != 0 || !got.Control.equal(ref) {
		t.Errorf("created anew: last command %d", got.LastCommand)
	}
	ref.Prefix, ref.Stream = "x", streamName("x")
	if got := rec.rebind(ref, 99, 40, scriptTime(9)); got.LastCommand != 99 {
		t.Errorf("another prefix: last command %d", got.LastCommand)
	}
}

// naiveFlow is the model of the machine below: what the words of the design say,
// without regard to repeats, races or storage.
type naiveFlow struct {
	state    State
	epoch    uint64
	mode     Mode
	at       At
	cut      map[string]uint64
	bySeq    map[uint64]bool // commands looked at
	last     uint64
	cuts     map[uint64]map[string]uint64 // every cut that was ever fixed, by epoch
	refusals int
}

func (n *naiveFlow) command(c Command) {
	if c.Seq <= n.last || c.Flow == "other" {
		return
	}
	n.bySeq[c.Seq], n.last = true, c.Seq
	switch {
	case c.Kind == KindResume:
		n.state, n.cut = StateRunning, nil
	case n.state == StateDraining:
		if c.Mode != n.mode || !c.At.equal(n.at) {
			n.refusals++
		}
	case n.state == StateDrained && c.Mode == ModeFinish:
		n.refusals++ // what was kept open is not closed
	case n.state == StateRunning && c.At.Kind == AtSeq && len(c.At.Seq) > 0 && !onlyAB(c.At.Seq):
		n.refusals++
	case n.state == StateRunning:
		n.epoch++
		n.state, n.mode, n.at = StateDraining, c.Mode, c.At
	}
}

func onlyAB(m map[string]uint64) bool {
	for k := range m {
		if k != "A" && k != "B" {
			return false
		}
	}
	return true
}

// TestRecord_model drives the record as many processes would that read it, wait,
// and write it by compare-and-set, and compares it with the naive model.
func TestRecord_model(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rec := testRecord("A", "B")
		model := &naiveFlow{state: StateRunning, bySeq: map[uint64]bool{}, cuts: map[uint64]map[string]uint64{}}
		var log []Command // the control stream
		refusals := 0
		check := func(t *rapid.T, before, after Record) {
			if after.Epoch < before.Epoch || after.LastCommand < before.LastCommand {
				t.Fatalf("went back: epoch %d to %d, command %d to %d", before.Epoch, after.Epoch, before.LastCommand, after.LastCommand)
			}
			if before.State.Stopped() && !after.State.Stopped() && after.LastCommand == before.LastCommand {
				t.Fatal("left its stop without a command")
			}
			if after.Drain != nil && after.Drain.Cut != nil {
				if was, ok := model.cuts[after.Epoch]; ok && !maps.Equal(was, after.Drain.Cut) {
					t.Fatalf("the cut of epoch %d changed from %v to %v", after.Epoch, was, after.Drain.Cut)
				}
				model.cuts[after.Epoch] = maps.Clone(after.Drain.Cut)
			}
			b, err := encodeRecord(after)
			if err != nil {
				t.Fatal(err)
			}
			stored, err := decodeRecord(b)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(after, stored); d != "" {
				t.Fatal(d)
			}
			rec = stored
		}
		seqs := rapid.MapOfN(rapid.SampledFrom([]string{"A", "B"}), rapid.Uint64Range(0, 20), 2, 2)
		t.Repeat(map[string]func(*rapid.T){
			"publish": func(t *rapid.T) {
				c := genCommand().Draw(t, "command")
				if c.At.Kind == AtSeq && rapid.Bool().Draw(t, "misspelt") {
					c.At.Seq = map[string]uint64{"C": 1}
				}
				c.Seq = uint64(len(log) + 1)
				c.Time = scriptTime(c.Seq)
				log = append(log, c)
			},
			// A process applies what comes next, or, with stale eyes, something
			// from before.
			"apply": func(t *rapid.T) {
				if len(log) == 0 {
					return
				}
				next := rapid.IntRange(0, min(int(rec.LastCommand), len(log)-1)).Draw(t, "which")
				for next < len(log)-1 && uint64(next) >= rec.LastCommand && log[next].Flow == "other" {
					next++ // what is for others is passed over
				}
				c := log[next]
				before := rec
				after, out := rec.Apply(c)
				if out.Kind == OutcomeRefused {
					refusals++
				}
				if out.Kind == OutcomeIgnored && !cmp.Equal(before, after) {
					t.Fatal("ignored, but changed")
				}
				model.command(c)
				check(t, before, after)
			},
			"fix the cut": func(t *rapid.T) {
				epoch := rapid.Uint64Range(0, rec.Epoch+1).Draw(t, "epoch")
				cut, read := seqs.Draw(t, "cut"), seqs.Draw(t, "read")
				before := rec
				after, err := rec.FixCut(epoch, cut, read)
				under := model.state != StateRunning && epoch == model.epoch
				switch {
				case !under:
					if !errors.Is(err, ErrNotDraining) {
						t.Fatalf("error %v", err)
					}
				case model.cut != nil:
					if err != nil || !maps.Equal(after.Drain.Cut, model.cut) {
						t.Fatalf("cut %v, error %v", after.Drain.Cut, err)
					}
				case cut["A"] < read["A"] || cut["B"] < read["B"]:
					if !errors.Is(err, ErrCutBehind) {
						t.Fatalf("error %v", err)
					}
					model.state = StateRunning
				default:
					if err != nil {
						t.Fatal(err)
					}
					model.cut = cut
				}
				check(t, before, after)
			},
			"drained": func(t *rapid.T) {
				epoch := rapid.Uint64Range(0, rec.Epoch+1).Draw(t, "epoch")
				before := rec
				after, err := rec.Drained(epoch, Report{Time: time.Unix(5, 0).UTC()})
				if ok := epoch == model.epoch && model.cut != nil; ok != (err == nil) {
					t.Fatalf("ended %v, error %v", ok, err)
				}
				if err == nil {
					model.state = map[Mode]State{ModeSuspend: StateDrained, ModeFinish: StateFinished}[model.mode]
				}
				check(t, before, after)
			},
			"": func(t *rapid.T) {
				if rec.State != model.state || rec.Epoch != model.epoch || rec.LastCommand != model.last || refusals != model.refusals {
					t.Fatalf("record: %s, epoch %d, command %d, %d refused; model: %s, %d, %d, %d",
						rec.State, rec.Epoch, rec.LastCommand, refusals, model.state, model.epoch, model.last, model.refusals)
				}
			},
		})
	})
}
