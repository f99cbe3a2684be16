"""The pseudorandom strings that SPU's parties draw shares from: AES-128 under a party's seed, in blocks that a counter numbers.

As yacl's `crypto/tools/prg.cc` and SPU's `mpc/utils/ring_ops.cc`, `permute.cc` have it: ring elements are AES of the little-endian
counter, block by block; permutations and elements of prime fields come from counter mode, whose first block holds the counter.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

BLOCK = 16
"""Bytes of a cipher block, and of a seed."""


class Stream(Protocol):
    """A pseudorandom string that is read once, from its beginning."""

    def take(self, size: int) -> np.ndarray:
        """uint8 [size]: the next bytes."""
        ...


class BlockStream:
    """Blocks `count`, `count` + 1, ... of a seed's codebook. Of a string cut into pieces, all but the last must be whole blocks."""

    def __init__(self, seed: bytes, count: int):
        self._cipher = Cipher(algorithms.AES(seed), modes.ECB()).encryptor()
        self._count = count

    def take(self, size: int) -> np.ndarray:
        blocks = -(-size // BLOCK)
        plain = np.zeros((blocks, 2), "<u8")
        plain[:, 0] = np.arange(self._count, self._count + blocks, dtype=np.uint64)
        self._count += blocks
        out = np.empty(blocks * BLOCK + BLOCK - 1, np.uint8)  # the library asks for room beyond the last block
        self._cipher.update_into(plain.data.cast("B"), out.data)
        return out[:size]


class CounterStream:
    """AES in counter mode; its first block is the counter, little-endian, in 16 bytes."""

    def __init__(self, seed: bytes, count: int):
        self._cipher = Cipher(algorithms.AES(seed), modes.CTR(count.to_bytes(BLOCK, "little"))).encryptor()

    def take(self, size: int) -> np.ndarray:
        return np.frombuffer(self._cipher.update(bytes(size)), np.uint8)


def permutation(seed: bytes, count: int, n: int) -> np.ndarray:
    """int64 [n]: the permutation that a party draws at its counter, by the shuffle of Durstenfeld. n is below 2^32."""
    numbers = CounterStream(seed, count).take(BLOCK * (n - 1)).view("<u8").reshape(n - 1, 2)
    limits = np.arange(2, n + 1, dtype=np.uint64)
    # The remainder of 128 bits: those of the halves, as limits below 2^32 keep the products within 64 bits.
    radix = (np.uint64(2**64 - 1) % limits + np.uint64(1)) % limits
    high = (numbers[:, 1] % limits) * radix % limits
    places = ((high + numbers[:, 0] % limits) % limits).tolist()
    found = list(range(n))
    for i in range(n - 1, 0, -1):
        j = places[i - 1]
        found[i], found[j] = found[j], found[i]
    return np.array(found, np.int64)
