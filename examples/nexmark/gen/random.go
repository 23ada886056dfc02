package gen

import (
	"fmt"
	"math"
	"math/bits"
	"strings"
)

var (
	firstNames  = []string{"Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"}
	lastNames   = []string{"Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"}
	cities      = []string{"Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"}
	states      = []string{"AZ", "CA", "ID", "OR", "WA", "WY"}
	hotChannels = []string{"Google", "Facebook", "Baidu", "Apple"}
)

// random is SplitMix64 (Steele, Lea and Flood, 2014): a few lines that stay the same,
// whatever becomes of the libraries, and that can start anywhere.
type random struct{ state uint64 }

// step is the odd number by which the state goes on.
const step = 0x9E3779B97F4A7C15

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// newRandom returns the random numbers of one of many things that share a seed.
func newRandom(seed, of uint64) *random {
	return &random{mix(mix(seed+step) ^ mix(of*step+1))}
}

func (r *random) next() uint64 {
	r.state += step
	return mix(r.state)
}

// below returns a number from 0 on, below n, which is positive.
func (r *random) below(n int) int {
	hi, _ := bits.Mul64(r.next(), uint64(n))
	return int(hi)
}

func pick(r *random, from []string) string { return from[r.below(len(from))] }

// price is spread evenly over the orders of magnitude from 100 to 100,000,000.
func (r *random) price() int64 {
	unit := float64(r.next()>>11) / (1 << 53)
	return int64(math.Round(math.Pow(10, unit*6) * 100))
}

// word returns a text of at least three letters, and less than limit.
func (r *random) word(limit int) string {
	const least = 3
	var b strings.Builder
	for range least + r.below(limit-least) {
		b.WriteByte(byte('a' + r.below(26)))
	}
	return b.String()
}

// extra returns a filling of the size, give or take a fifth.
func (r *random) extra(size int) string {
	if size <= 0 {
		return ""
	}
	n := size
	if delta := (size + 2) / 5; delta > 0 {
		n += r.below(2*delta) - delta
	}
	b := make([]byte, 0, n)
	// A random number is good for a few letters.
	for len(b) < n {
		for bits, k := r.next(), 0; k < 8 && len(b) < n; k++ {
			b = append(b, byte('a'+(bits&0xff)*26>>8))
			bits >>= 8
		}
	}
	return string(b)
}

// channel returns the name of a channel and its URL, which has the id of the channel
// nine times of ten.
func (g *Generator) channel(n int) (name, url string) {
	url = g.url(n)
	if newRandom(g.cfg.Seed, ^uint64(n)).below(10) > 0 {
		url = fmt.Sprintf("%s&channel_id=%d", url, bits.Reverse32(uint32(n))>>1)
	}
	return fmt.Sprintf("channel-%d", n), url
}

// url returns that of a channel: it is the same in all its bids.
func (g *Generator) url(channel int) string {
	r := newRandom(g.cfg.Seed, ^uint64(channels+len(hotChannels)+channel))
	return "https://www.nexmark.com/" + r.word(6) + "/" + r.word(6) + "/" + r.word(6) + "/item.htm?query=1"
}
