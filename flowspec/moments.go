package flowspec

import (
	"encoding/binary"
	"fmt"
	"math"
)

// stddev, variance and the like keep the number of the values, their mean, and the sum
// of the squares of the differences from it (Welford 1962): the sum of the squares of the
// values themselves would lose what is small beside them. Two of them merge (Chan,
// Golub and LeVeque 1979).
//
// Products are converted to float64 by themselves, as the specification of Go has it, so
// that no processor computes them together with a sum, with other last bits.

// addMoment adds a value. It changes nothing when it returns an error.
func (c *acc) addMoment(v value) error {
	if !v.isNumber() {
		return fmt.Errorf("%v is not a number", v.kind)
	}
	n := c.n + 1
	delta := v.float() - c.float
	mean := c.float + delta/float64(n)
	squares := c.squares() + float64(delta*(v.float()-mean))
	return c.moments(n, mean, squares)
}

// mergeMoments adds the values of a later session.
func (c *acc) mergeMoments(later acc) error {
	switch {
	case later.n == 0:
		return nil
	case c.n == 0:
		*c = later
		return nil
	}
	n := c.n + later.n
	delta := later.float - c.float
	share := float64(later.n) / float64(n)
	mean := c.float + float64(delta*share)
	squares := c.squares() + later.squares() + float64(float64(delta*delta)*float64(c.n)*share)
	return c.moments(n, mean, squares)
}

// squares is the sum of the squares of the differences from the mean.
func (c *acc) squares() float64 {
	if c.val.isNull() {
		return 0
	}
	return c.val.float()
}

func (c *acc) moments(n int64, mean, squares float64) error {
	if _, err := finite(mean); err != nil {
		return err
	}
	val, err := finite(max(squares, 0))
	if err != nil {
		return err
	}
	c.n, c.float, c.val = n, mean, val
	return nil
}

// spread is the result: that of a sample needs two values, that of a population one.
func (c *acc) spread(fn aggregateFn) value {
	n := c.n
	if fn == aggStddev || fn == aggVariance {
		n--
	}
	if n < 1 {
		return value{}
	}
	variance := c.squares() / float64(n)
	if fn == aggStddev || fn == aggStddevPop {
		return floatValue(math.Sqrt(variance))
	}
	return floatValue(variance)
}

func appendMoments(dst []byte, c *acc) []byte {
	dst = binary.AppendUvarint(dst, uint64(c.n))
	if c.n == 0 {
		return dst
	}
	dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(c.float))
	return binary.LittleEndian.AppendUint64(dst, c.val.bits)
}

func (r *stateReader) moments(c *acc, k kind) {
	if c.n = r.count(); c.n == 0 {
		r.bad = r.bad || k != kindNull
		return
	}
	c.float, c.val = r.float(), floatValue(r.float())
	r.bad = r.bad || k != kindFloat || c.val.float() < 0
}
