package flowspec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// percentage is a number from 0 to 100, in 1/percentUnit of a percent.
type percentage uint32

const percentUnit = 10_000

// rank is the place, from 1, of the value that p percent of n values do not exceed:
// the nearest rank, as SQL's percentile_disc has it. It is exact.
func (p percentage) rank(n uint64) uint64 {
	hi, lo := bits.Mul64(uint64(p), n)
	rank, rest := bits.Div64(hi, lo, 100*percentUnit)
	if rest > 0 {
		rank++
	}
	return max(rank, 1)
}

// binBits are the bits of a float that are left out to get its bin: what stays are the
// sign, the exponent and 6 bits of the fraction. So there are 64 bins between a number and
// its double, and the middle of a bin is off by less than 1% (1/128 at most).
const binBits = 52 - 6

// histogram is the extension of percentile: how many values there are in each bin.
//
// It is a sketch of quantiles with a relative error, as DDSketch (Masson et al., VLDB
// 2019) with the linear bins of HdrHistogram. The bin of a value is a part of its bits:
// no logarithm is computed, whose last bits differ between processors, so that the results
// of a replay are the same on all of them. Two histograms merge without a loss.
//
//	histogram = uvarint number of bins [8 bytes lowest, 8 bytes highest { bin }]
//	bin       = varint key (the first), uvarint difference from the one before | uvarint count
type histogram struct {
	// bins are in the order of their keys.
	bins []bin
	n    uint64
	// lowest and highest are exact.
	lowest, highest float64
	// kind is kindInt while all values are integers, then kindFloat.
	kind kind
}

type bin struct {
	key   int32
	count uint64
}

// binOf returns the bin of a number. Numbers nearer to zero than 2^-1022, which floats hold
// with fewer bits, are in that of zero.
func binOf(f float64) int32 {
	abs := math.Float64bits(math.Abs(f))
	if abs < 1<<52 {
		return 0
	}
	if f < 0 {
		return -int32(abs >> binBits)
	}
	return int32(abs >> binBits)
}

// maxBin is the bin of the highest float.
const maxBin = int32(0x7fefffffffffffff >> binBits)

// middle returns the number that stands for the values of a bin: of integers one of them.
func (h *histogram) middle(key int32) float64 {
	if key == 0 {
		return 0
	}
	abs := uint64(max(key, -key)) << binBits
	f := math.Float64frombits(abs | 1<<(binBits-1))
	if low := math.Float64frombits(abs); h.kind == kindInt && low < 128 {
		// The bin has one integer.
		f = math.Ceil(low)
	}
	if key < 0 {
		return -f
	}
	return f
}

func (h *histogram) check(_ *aggregateMember, v, _ value) error {
	if !v.isNumber() {
		return fmt.Errorf("%v is not a number", v.kind)
	}
	return nil
}

func (h *histogram) add(_ *aggregateMember, v, _ value) {
	f := v.float()
	h.kind = max(h.kind, kindInt)
	if v.kind == kindFloat {
		h.kind = kindFloat
	}
	h.count(bin{binOf(f), 1})
	h.within(f, f)
	h.n++
}

// within widens the bounds.
func (h *histogram) within(lowest, highest float64) {
	if h.n == 0 {
		h.lowest, h.highest = lowest, highest
	}
	h.lowest, h.highest = min(h.lowest, lowest), max(h.highest, highest)
}

// count adds the values of a bin.
func (h *histogram) count(b bin) {
	i, there := slices.BinarySearchFunc(h.bins, b.key, func(b bin, key int32) int { return int(b.key - key) })
	if there {
		h.bins[i].count += b.count
		return
	}
	h.bins = slices.Insert(h.bins, i, b)
}

func (h *histogram) merge(_ *aggregateMember, later extension) error {
	other := later.(*histogram)
	if other.n == 0 {
		return nil
	}
	for _, b := range other.bins {
		h.count(b)
	}
	h.within(other.lowest, other.highest)
	h.n += other.n
	h.kind = max(h.kind, other.kind)
	return nil
}

func (h *histogram) clone() extension {
	c := *h
	c.bins = slices.Clone(h.bins)
	return &c
}

func (h *histogram) value(m *aggregateMember) value {
	if h.n == 0 {
		return value{}
	}
	f := h.at(m.percent.rank(h.n))
	if h.kind == kindInt && f >= -1<<63 && f < 1<<63 {
		return intValue(int64(f))
	}
	return floatValue(f)
}

// at returns about the value of that rank, from 1.
func (h *histogram) at(rank uint64) float64 {
	switch rank {
	case 1:
		return h.lowest
	case h.n:
		return h.highest
	}
	for _, b := range h.bins {
		if rank <= b.count {
			return min(max(h.middle(b.key), h.lowest), h.highest)
		}
		rank -= b.count
	}
	return h.highest
}

func (h *histogram) appendJSON(dst []byte, m *aggregateMember) []byte {
	return h.value(m).appendJSON(dst)
}

func (h *histogram) form() byte { return byte(h.kind) }

func (h *histogram) append(dst []byte) ([]byte, error) {
	dst = binary.AppendUvarint(dst, uint64(len(h.bins)))
	if len(h.bins) == 0 {
		return dst, nil
	}
	dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(h.lowest))
	dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(h.highest))
	for i, b := range h.bins {
		if i == 0 {
			dst = binary.AppendVarint(dst, int64(b.key))
		} else {
			dst = binary.AppendUvarint(dst, uint64(b.key-h.bins[i-1].key))
		}
		dst = binary.AppendUvarint(dst, b.count)
	}
	return dst, nil
}

func (h *histogram) read(r *stateReader, _ *aggregateMember, form byte) error {
	h.kind = kind(form)
	n := r.uvarint()
	if n == 0 {
		r.bad = r.bad || h.kind != kindNull
		return nil
	}
	h.lowest, h.highest = r.float(), r.float()
	// Each takes two bytes at least.
	h.bins = make([]bin, 0, min(n, uint64(len(r.data))/2))
	key := int64(0)
	for i := range n {
		if i == 0 {
			key = r.varint()
		} else if step := r.uvarint(); step == 0 || step > 2*uint64(maxBin) {
			r.bad = true
		} else {
			key += int64(step)
		}
		count := r.uvarint()
		total, carry := bits.Add64(h.n, count, 0)
		r.bad = r.bad || count == 0 || carry != 0 || key < -int64(maxBin) || key > int64(maxBin)
		if r.bad {
			return nil
		}
		h.n = total
		h.bins = append(h.bins, bin{int32(key), count})
	}
	r.bad = r.bad || h.kind != kindInt && h.kind != kindFloat ||
		binOf(h.lowest) != h.bins[0].key || binOf(h.highest) != h.bins[n-1].key
	return nil
}
