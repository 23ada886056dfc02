package flow_test

import (
	"errors"
	"runtime"
	"testing"

	"natsflow/flow"
)

// allocated runs fn and returns how many bytes it allocates. Other goroutines of
// the fuzzer may add a little.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// FuzzOutputs: any bytes are an outbox or an error, at a cost that their length
// bounds.
func FuzzOutputs(f *testing.F) {
	box := outbox(f)
	f.Add(box)
	f.Add(box[:len(box)/2])
	f.Add([]byte{0, 0, 2, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		size, outputs := 0, 0
		n := allocated(func() {
			err := flow.Outputs(data, func(_ int, o flow.Output) error {
				outputs++
				size += len(o.Subject) + len(o.Data)
				for _, h := range o.Headers {
					size += len(h)
				}
				if o.Sink < 0 || len(o.Headers)%2 != 0 {
					t.Errorf("output %+v", o)
				}
				return nil
			})
			if err != nil && !errors.Is(err, flow.ErrOutbox) {
				t.Errorf("error %v", err)
			}
		})
		if size > len(data) || outputs > len(data)/4+1 {
			t.Errorf("%d outputs with %d bytes of %d", outputs, size, len(data))
		}
		if most := uint64(1<<20 + 64*len(data)); n > most {
			t.Errorf("%d bytes allocate %d", len(data), n)
		}
	})
}

// FuzzTask_Load: any bytes are an image or an error, at a cost that their length
// bounds; what was loaded can be stored and loaded again.
func FuzzTask_Load(f *testing.F) {
	r := threeStates(f)
	r.feed("a add", "b add", "a drop", "c add emit", "a emit add")
	r.seal()
	image := r.deltas[0][0]
	f.Add(image)
	f.Add(image[:len(image)-3])
	for _, h := range hostile() {
		f.Add(h)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		task := threeStates(t).tasks[0]
		var err error
		n := allocated(func() {
			err = task.Load(data)
			task.Loaded()
		})
		// A key takes two bytes in the image, a cell, a slot and its place in the
		// map in memory.
		if most := uint64(1<<20 + 1024*len(data)); n > most {
			t.Errorf("%d bytes allocate %d", len(data), n)
		}
		if keys := task.Keys(); keys > len(data)/2 {
			t.Errorf("%d keys of %d bytes", keys, len(data))
		}
		if err != nil {
			if !errors.Is(err, flow.ErrState) {
				t.Errorf("error %v", err)
			}
			return
		}
		again := threeStates(t).tasks[0]
		task.BeginImage()
		for more := true; more; {
			var part []byte
			if part, more, err = task.NextImage(2); err != nil {
				t.Fatal(err)
			}
			if err := again.Load(part); err != nil {
				t.Fatal(err)
			}
		}
		if again.Keys() != task.Keys() {
			t.Errorf("%d keys of %d after storing and loading", again.Keys(), task.Keys())
		}
	})
}
