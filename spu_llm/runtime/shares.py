"""Shares outside SPU: as bytes on a channel, and as values put together by the one party that may see them."""

from __future__ import annotations

import os

import msgpack
import numpy as np
from spu import libspu

NARROW_BITS = 16
"""Fraction bits kept by a narrow word; the other 16 of its 32 bits hold the integer part and the sign."""

CHUNK_BYTES = 1 << 27  # what SPU's own shares are cut into


def pack(share: libspu.Share) -> bytes:
    """A whole share as bytes."""
    return msgpack.packb([share.meta, list(share.share_chunks)])


def unpack(data: bytes) -> libspu.Share:
    """The inverse of `pack`."""
    share = libspu.Share()
    share.meta, share.share_chunks = msgpack.unpackb(data, max_bin_len=len(data))
    return share


def additive(words: np.ndarray, ring: str) -> libspu.Share:
    """A party's additive SEMI2K share of an int64 secret, from its words modulo 2^64.

    In FM128 the words are the lower halves of ring elements, and the upper halves are random: every protocol of the plugin
    works modulo 2^64, and what it opens is then uniform in the whole ring.
    """
    meta = libspu.ValueMeta()
    meta.data_type, meta.visibility = libspu.DataType.DT_I64, libspu.Visibility.VIS_SECRET
    meta.storage_type = f"semi2k.AShr<{ring}>"
    meta.shape = list(words.shape)
    share = libspu.Share()
    share.meta = meta.SerializeToString()
    if ring == "FM128":
        upper = np.frombuffer(os.urandom(8 * words.size), np.int64).reshape(words.shape)
        words = np.stack([words, upper], axis=-1)
    data = np.ascontiguousarray(words).data.cast("B") if words.size else memoryview(b"")
    share.share_chunks = [_chunk(data, start) for start in range(0, max(1, len(data)), CHUNK_BYTES)]
    return share


def additive_words(share: libspu.Share) -> np.ndarray:
    """The inverse of `additive`: words modulo 2^64."""
    shape = shape_of(share)
    return np.frombuffer(_content(share), np.int64).reshape(*shape, -1)[..., 0]


def _chunk(data: memoryview, start: int) -> bytes:
    chunk = libspu.ValueChunk()
    chunk.total_bytes, chunk.chunk_offset = len(data), start
    chunk.content = bytes(data[start : start + CHUNK_BYTES])
    return chunk.SerializeToString()


def narrow_words(share: libspu.Share, rank: int, scale_bits: int) -> list[np.ndarray]:
    """The additive summands this rank adds to what a receiver of rank 0 holds, cut to 32 bits each.

    The value sum(s_i) with `scale_bits` fraction bits fits 16 integer bits, so bits [scale_bits - 16, scale_bits + 16)
    of every summand are enough: the sum of the cut summands is the value with 16 fraction bits, short of it by less
    than one unit a summand. Costs 4 bytes an element instead of 8 or 16 and cannot fail for |value| < 2^15.

    SEMI2K and CHEETAH hold one summand a party. ABY3 party i holds (x_i, x_i+1): rank 0 has two of three and takes the
    last from rank 1.
    """
    meta = libspu.ValueMeta()
    meta.ParseFromString(share.meta)
    kind, ring = meta.storage_type.rstrip(">").split("<")
    limbs = 1 if ring == "FM64" else 2
    summands = 2 if kind == "aby3.AShr" else 1
    if kind not in ("semi2k.AShr", "cheetah.AShr", "aby3.AShr"):
        raise ValueError(f"a share of kind {meta.storage_type} is not additive")
    words = np.frombuffer(_content(share), np.uint64).reshape(-1, summands, limbs)
    cut = [_cut(words[:, i], scale_bits - NARROW_BITS) for i in range(summands)]
    if kind == "aby3.AShr":
        return {0: cut, 1: cut[1:]}.get(rank, [])
    return cut


def join_words(words: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Add narrow words of all parties: float64 values."""
    total = np.sum(words, axis=0, dtype=np.uint32).view(np.int32)
    return total.reshape(shape) / 2.0**NARROW_BITS


def shape_of(share: libspu.Share) -> tuple[int, ...]:
    meta = libspu.ValueMeta()
    meta.ParseFromString(share.meta)
    return tuple(meta.shape.dims)


def _content(share: libspu.Share) -> bytes:
    parts = []
    for data in share.share_chunks:
        chunk = libspu.ValueChunk()
        chunk.ParseFromString(data)
        parts.append((chunk.chunk_offset, chunk.content))
    return b"".join(content for _, content in sorted(parts))


def _cut(limbs: np.ndarray, shift: int) -> np.ndarray:
    """Bits [shift, shift + 32) of little-endian ring elements [n, limbs]."""
    low = limbs[:, shift // 64] >> np.uint64(shift % 64)
    if shift % 64 > 32 and shift // 64 + 1 < limbs.shape[1]:
        low = low | limbs[:, shift // 64 + 1] << np.uint64(64 - shift % 64)
    return low.astype(np.uint32)
