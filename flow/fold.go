package flow

import "errors"

// Fold returns an aggregator whose result is the state itself: add folds a record into *s,
// which starts as the zero value, and merge folds *from, the state of a later session, into
// *into. After an error of either, *s and *into must be as before. merge is needed for
// sessions only, and may be nil otherwise.
//
// The result is a copy of S as far as an assignment copies it. A step behind it must not
// change or keep what maps, slices and pointers in it lead to: that is still the state. Write
// a [WindowAggregator] with a Result that copies where one has to.
//
//	flow.Window(s, "totals", flow.Tumbling(time.Hour), flow.Fold(codec, add, merge))
//	flow.Aggregate(s, "totals", flow.Fold(codec, add, nil).Whole())
func Fold[T, S any](codec StateCodec[S], add func(m *Meta, s *S, v T) error, merge func(into, from *S) error) WindowAggregator[T, S, S] {
	return WindowAggregator[T, S, S]{
		State: codec, Add: add, Merge: merge,
		Result: func(_ *Meta, _ Span, s *S) (S, error) { return *s, nil },
	}
}

// Reduced is the state of [Reduce]: the combination of the records so far.
type Reduced[T any] struct {
	// Value is the zero value as long as Any is false: there was no record.
	Value T
	Any   bool
}

// Reduce returns an aggregator that combines all records to one: the first one is the result
// until the second comes, then combine(first, second) is, and so on. codec stores values.
//
// combine must not change its arguments, which it may return. It is called for the states of
// sessions that are joined too, of which the earlier one comes first: so it has to be
// associative there. An error makes the record a dead letter, and the combination stays.
func Reduce[T any](codec StateCodec[T], combine func(a, b T) (T, error)) WindowAggregator[T, Reduced[T], T] {
	a := WindowAggregator[T, Reduced[T], T]{
		State:  reducedCodec(codec),
		Result: func(_ *Meta, _ Span, s *Reduced[T]) (T, error) { return s.Value, nil },
	}
	if combine == nil {
		// Build reports it.
		return a
	}
	a.Add = func(_ *Meta, s *Reduced[T], v T) error { return s.combine(combine, v) }
	a.Merge = func(into, from *Reduced[T]) error {
		if !from.Any {
			return nil
		}
		return into.combine(combine, from.Value)
	}
	return a
}

func (s *Reduced[T]) combine(combine func(a, b T) (T, error), v T) error {
	if !s.Any {
		s.Value, s.Any = v, true
		return nil
	}
	both, err := combine(s.Value, v)
	if err == nil {
		s.Value = both
	}
	return err
}

var errReduced = errors.New("not the state of a Reduce")

// reducedCodec stores whether there was a record, and the value:
//
//	reduced = 0 | 1, value
func reducedCodec[T any](codec StateCodec[T]) StateCodec[Reduced[T]] {
	if !codec.usable() {
		// Build reports it.
		return StateCodec[Reduced[T]]{}
	}
	decode := func(data []byte, s *Reduced[T], value func(data []byte, v *T) error) error {
		switch {
		case len(data) == 1 && data[0] == 0:
			return nil
		case len(data) == 0 || data[0] != 1:
			return errReduced
		}
		s.Any = true
		return value(data[1:], &s.Value)
	}
	return StateCodec[Reduced[T]]{
		Version: codec.Version,
		Append: func(dst []byte, s *Reduced[T]) ([]byte, error) {
			if !s.Any {
				return append(dst, 0), nil
			}
			return codec.Append(append(dst, 1), &s.Value)
		},
		Decode: func(data []byte, s *Reduced[T]) error { return decode(data, s, codec.Decode) },
		Migrate: func(version int, data []byte, s *Reduced[T]) error {
			return decode(data, s, func(data []byte, v *T) error { return codec.decode(version, data, v) })
		},
	}
}

// Whole returns the aggregator over all records of a key, for [Aggregate]. Result gets an
// empty [Span]. Emit can be set.
func (a WindowAggregator[T, S, U]) Whole() Aggregator[T, S, U] {
	whole := Aggregator[T, S, U]{State: a.State, Add: a.Add}
	if a.Result != nil {
		whole.Result = func(m *Meta, s *S) (U, error) { return a.Result(m, Span{}, s) }
	}
	return whole
}
