package flow

// Redistribute hands the records of a stream without a key to the tasks of the first stage,
// one after the other, so that the steps behind it run in all lanes of all workers. Without
// it the steps before a key run in the reader of each worker, on every record of the source:
// right for cheap ones, since a record that another worker has is dropped before it costs
// more, and wrong for a step that takes long.
//
// A record goes to the partition of its sequence modulo their number; with
// [Source.PartitionBy] it stays in the one that the server has put it in. Either is the same
// in every replay, and nothing crosses the exchange for it.
//
// Behind it records have no key that can be used: steps with state are not possible, and a
// key is given by [Rekey], which begins the next stage. [Meta.Key] is the subject. Records of
// one key, or of one subject, come from different tasks then: their order, which is kept
// within a task, is decided by when tasks commit, also at a sink right behind it.
func Redistribute[T any](s Stream[T], opts ...StepOption) Stream[T] {
	step := s.step("redistribute", opts)
	switch {
	case s.spread:
		s.b.errorf("step %q: the stream is redistributed already", s.b.steps[step].ID)
		return s
	case s.keyed:
		s.b.errorf("step %q: the stream has a key, so that its records are with the tasks of their keys: put the Redistribute before the KeyBy, and a Rekey in the place of that", s.b.steps[step].ID)
		return s
	}
	s.spread = true
	return keyStream(s, step, true, subjectKey[T])
}
