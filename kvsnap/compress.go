package kvsnap

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/klauspost/compress/zstd"
)

const (
	encodingNone = "none"
	encodingZstd = "zstd"

	// maxPiece is the most raw bytes that a chunk or an inline body may hold.
	// It belongs to the format: it bounds what a reader allocates for one,
	// whatever the ChunkSize of the writer was.
	maxPiece = 8 << 20
	// minCompress is the size below which zstd is not tried.
	minCompress = 128
	// maxCoders bounds the memory of the shared encoder and decoder, which
	// keep a few megabytes for each call that runs at the same time.
	maxCoders = 4
)

// codec compresses and decompresses. It is shared by all tasks of a store and
// safe for concurrent use; more than maxCoders calls at a time wait.
type codec struct {
	enc *zstd.Encoder
	dec *zstd.Decoder
}

func newCodec() (*codec, error) {
	n := min(runtime.GOMAXPROCS(0), maxCoders)
	// The envelope has a checksum, so zstd's own is left out.
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(n),
		zstd.WithEncoderCRC(false), zstd.WithWindowSize(512<<10), zstd.WithLowerEncoderMem(true), zstd.WithSingleSegment(true))
	if err != nil {
		return nil, fmt.Errorf("new zstd encoder: %w", err)
	}
	// The cap limit makes the decoder stop at the size that the header says,
	// so that damaged or hostile bytes cannot make it allocate more.
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(n), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(maxPiece), zstd.WithDecoderMaxWindow(maxPiece), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("new zstd decoder: %w", err), enc.Close())
	}
	return &codec{enc: enc, dec: dec}, nil
}

// appendPacked appends raw to dst, compressed when that saves an eighth.
func (c *codec) appendPacked(dst, raw []byte) (out []byte, encoding string) {
	start := len(dst)
	if len(raw) >= minCompress {
		dst = c.enc.EncodeAll(raw, dst)
		if len(dst)-start <= len(raw)-len(raw)/8 {
			return dst, encodingZstd
		}
		dst = dst[:start]
	}
	return append(dst, raw...), encodingNone
}

// unpack is the reverse of appendPacked. size is the raw size that the header
// gives; anything else is an error. The result is a part of stored if it was
// not compressed.
func (c *codec) unpack(stored []byte, encoding string, size int64) ([]byte, error) {
	if size < 0 || size > maxPiece {
		return nil, fmt.Errorf("body of %d bytes is outside of the format's bounds", size)
	}
	switch encoding {
	case encodingNone:
		if int64(len(stored)) != size {
			return nil, fmt.Errorf("body has %d bytes instead of %d", len(stored), size)
		}
		return stored, nil
	case encodingZstd:
		raw, err := c.dec.DecodeAll(stored, make([]byte, 0, size))
		if err != nil {
			return nil, fmt.Errorf("decompressing body: %w", err)
		}
		if int64(len(raw)) != size {
			return nil, fmt.Errorf("body has %d bytes decompressed instead of %d", len(raw), size)
		}
		return raw, nil
	default:
		return nil, fmt.Errorf("unknown encoding %q", encoding)
	}
}
