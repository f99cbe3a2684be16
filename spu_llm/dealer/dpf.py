"""Distributed point functions: two short keys whose expansions add up to a payload at one secret point and to 0 elsewhere.

Boyle, Gilboa, Ishai, "Function Secret Sharing: Improvements and Extensions" (CCS 2016), the tree construction with early
termination, vectorised over n elements. The dealer knows point and payload; a party holds its own root and the correction,
which is the same for both, and learns neither.

Each party walks a binary tree from its root. A node is a 128-bit seed whose lowest bit is the control bit. Off the path to
the point both parties hold the same node, so what they derive cancels; on it their seeds are independent and their control
bits differ. A party adds a level's correction where its control bit is 1, which makes the children that leave the path equal.
The tree stops `skip` levels early: a node at its end gives the words of 2^skip neighbouring leaves at once. It takes the
point's bits from the lowest upwards, so that a level's right children follow its left ones as one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_WIDTH = 6  # words up to which a node serves several leaves; measured at K = 128, P = 3: 60% less time, keys 6% longer
_CHUNK_WORDS = 1 << 17  # of output expanded at a time: fewer cost numpy calls, more leave the processor's cache (measured)
_LEFT, _RIGHT, _LEAF = range(3)  # which fixed key stretches a seed
_ONE = np.uint64(1)


@dataclass(frozen=True)
class Correction:
    """What the dealer sends to both parties for n elements; with a party's roots it makes that party's key.

    seeds uint64 [levels, n, 2]: added to both children of a node; its lowest bit belongs to the left child's control bit.
    turns uint64 [levels, n]: 0 or 1, added to the right child's control bit besides.
    words int64 [n, 2^skip * P]: added to the words of a node at the end of the tree.
    """

    seeds: np.ndarray
    turns: np.ndarray
    words: np.ndarray

    def __getitem__(self, part: slice) -> Correction:
        """The correction of some of the elements, without a copy."""
        return Correction(self.seeds[:, part], self.turns[:, part], self.words[part])

    @property
    def nbytes(self) -> int:
        """Length of `to_bytes()`."""
        return self.seeds.nbytes + self.words.nbytes + (self.turns.size + 7) // 8

    def to_bytes(self) -> bytes:
        """Seeds, words, and the turns eight in a byte."""
        return self.seeds.tobytes() + self.words.tobytes() + np.packbits(self.turns.astype(bool)).tobytes()

    @staticmethod
    def size(n: int, depth: int, payload_words: int) -> int:
        """Bytes of the correction of n elements in domain 2^depth."""
        levels, width = _tree(depth, payload_words)
        return 16 * levels * n + 8 * width * n + (levels * n + 7) // 8

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, n: int, depth: int, payload_words: int) -> Correction:
        """The inverse of `to_bytes`; seeds and words stay where `data` is. ValueError if the length is another one."""
        size = cls.size(n, depth, payload_words)
        if len(data) != size:
            raise ValueError(f"a correction of {len(data)} bytes; {n} of depth {depth} and {payload_words} words take {size}")
        levels, width = _tree(depth, payload_words)
        seeds, words, bits = np.split(np.frombuffer(data, np.uint8), [16 * levels * n, (16 * levels + 8 * width) * n])
        turns = np.unpackbits(bits, count=levels * n).astype(np.uint64)
        return cls(seeds.view(np.uint64).reshape(levels, n, 2), turns.reshape(levels, n), words.view(np.int64).reshape(n, width))


def key_bytes(depth: int, payload_words: int) -> float:
    """Bytes an element that the dealer sends to one party, whose roots come from a seed."""
    levels, width = _tree(depth, payload_words)
    return levels * (16 + 1 / 8) + 8 * width


def generate(point: np.ndarray, payload: np.ndarray, depth: int, roots: tuple[np.ndarray, np.ndarray]) -> Correction:
    """The dealer's part: point int64 [n] in [0, 2^depth), payload int64 [n, P], each party's roots uint8 [n, 16].

    Roots must be uniform, and each must serve one element only. ValueError if a point is outside the domain.
    """
    n, payload_words = payload.shape
    if n and (point.min() < 0 or point.max() >> depth):
        raise ValueError(f"points from {point.min()} to {point.max()}; the domain is [0, {1 << depth})")
    levels, width = _tree(depth, payload_words)
    skip = depth - levels
    correction = Correction(np.empty((levels, n, 2), np.uint64), np.empty((levels, n), np.uint64), np.empty((n, width), np.int64))
    stretch = _Stretch()
    seeds = np.stack([_start(party, root) for party, root in enumerate(roots)])
    for level in range(levels):
        bit = (point >> (skip + level)) & 1
        seeds = _descend(stretch, seeds, bit.astype(np.uint64), (correction.seeds[level], correction.turns[level]))
    target = np.zeros((n, 1 << skip, payload_words), np.uint64)
    target[np.arange(n), point & ((1 << skip) - 1)] = payload.view(np.uint64)
    own, other = stretch.words(seeds.reshape(2 * n, 2), width).reshape(2, n, width)
    difference = target.reshape(n, width) - own + other
    negative = seeds[1, :, :1] & _ONE  # the party whose control bit is 1 adds the correction; party 1 adds it negated
    correction.words[:] = np.where(negative, np.negative(difference), difference).view(np.int64)
    return correction


def expand(party: int, roots: np.ndarray, correction: Correction, depth: int, payload_words: int) -> np.ndarray:
    """Party 0's or 1's additive share, int64 [n, 2^depth, P], of the payload at the point and 0 elsewhere.

    roots uint8 [n, 16] are this party's. Besides the result it holds a few MB, or a few times one element's leaves.
    """
    n, leaves = len(roots), 1 << depth
    out = np.empty((n, leaves, payload_words), np.int64)
    stretch = _Stretch()
    step = max(1, _CHUNK_WORDS // (leaves * payload_words))
    for start in range(0, n, step):
        part = slice(start, start + step)
        _leaves(stretch, _grow(stretch, _start(party, roots[part]), correction[part]), correction.words[part], out[part])
        if party:
            np.negative(out[part], out=out[part])
    return out


class _Stretch:
    """Fixed-key AES as a one-way stretch, H_k(x) = AES_k(x) xor x (Matyas-Meyer-Oseas), under public keys k.

    AES under a known key is a permutation that anyone can invert; what makes H one-way is adding the input. If AES is an
    ideal permutation, H_k(x xor i) for public distinct (k, i) look independent and uniform to whoever does not know x
    (correlation robustness: Guo, Katz, Wang, Yu, "Efficient and Secure Multiparty Computation from Fixed-Key Block
    Ciphers", S&P 2020): each node makes its children under two keys and its words under a third with a counter i. All
    nodes share the keys and a control bit is known on the path, so an attacker's T evaluations against N nodes succeed
    with probability about T * N / 2^127: with 2^40 nodes made, 2^80 evaluations give 2^-7. Changing keys per node would
    cost a key schedule a node.
    """

    def __init__(self) -> None:
        keys = [bytes([number]) * 16 for number in (_LEFT, _RIGHT, _LEAF)]
        self._ciphers = [Cipher(algorithms.AES(key), modes.ECB()).encryptor() for key in keys]
        self._room = np.empty(0, np.uint64)

    def aes(self, key: int, blocks: np.ndarray) -> np.ndarray:
        """AES of contiguous uint64 blocks [..., 2]; the result is overwritten by the next call."""
        if self._room.size < blocks.size + 2:
            self._room = np.empty(blocks.size + 2, np.uint64)  # the cipher asks for one block more than it writes
        self._ciphers[key].update_into(blocks.reshape(-1).view(np.uint8).data, self._room.view(np.uint8).data)
        return self._room[: blocks.size].reshape(blocks.shape)

    def words(self, seeds: np.ndarray, width: int) -> np.ndarray:
        """uint64 [nodes, width]: the words of seeds [nodes, 2]; overwritten by the next call."""
        count = (width + 1) // 2
        blocks = np.empty((len(seeds), count, 2), np.uint64)
        blocks.view(np.complex128)[...] = seeds.view(np.complex128)[:, None]  # moved, not computed: 16 bytes at a time
        blocks[..., 1] ^= np.arange(count, dtype=np.uint64)
        hashed = self.aes(_LEAF, blocks)
        np.bitwise_xor(hashed, blocks, out=hashed)
        return hashed.reshape(len(seeds), 2 * count)[:, :width]


def _tree(depth: int, payload_words: int) -> tuple[int, int]:
    """(levels of the tree, words of a node at its end): every level left out doubles the words."""
    skip = 0
    while skip < depth and payload_words << (skip + 1) <= _WIDTH:
        skip += 1
    return depth - skip, payload_words << skip


def _start(party: int, roots: np.ndarray) -> np.ndarray:
    """Root nodes uint64 [n, 2]: the parties' control bits differ, as the root is on the path."""
    seeds = roots.copy().view(np.uint64)
    seeds[:, 0] = seeds[:, 0] & ~_ONE | np.uint64(party)
    return seeds


def _descend(stretch: _Stretch, seeds: np.ndarray, bit: np.ndarray, out: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """One level of both parties' paths [2, n, 2], towards `bit` [n]: the children on it. Writes the correction into `out`."""
    correction, turn = out
    left, right = (stretch.aes(key, seeds) ^ seeds for key in (_LEFT, _RIGHT))
    to_right = bit[:, None].astype(bool)
    correction[:] = np.where(to_right, left[0] ^ left[1], right[0] ^ right[1])
    controls = [(child[0, :, 0] ^ child[1, :, 0]) & _ONE for child in (left, right)]
    left_control, right_control = controls[0] ^ bit ^ _ONE, controls[1] ^ bit
    correction[:, 0] = correction[:, 0] & ~_ONE | left_control
    turn[:] = left_control ^ right_control
    added = correction.copy()
    added[:, 0] ^= turn & bit
    return np.where(to_right, right, left) ^ (seeds[..., :1] & _ONE) * added


def _grow(stretch: _Stretch, seeds: np.ndarray, correction: Correction) -> np.ndarray:
    """All nodes at the end of the tree, uint64 [n, nodes, 2], from the roots [n, 2]."""
    n = len(seeds)
    seeds = seeds.reshape(n, 1, 2)
    for added, turn in zip(correction.seeds, correction.turns, strict=True):
        control = seeds[..., 0] & _ONE
        # H(seed) + control * added = AES(seed) ^ base; the children differ in AES's key and in the control bit.
        base = _where_set(control, added) ^ seeds
        children = np.empty((n, 2, seeds.shape[1], 2), np.uint64)
        np.bitwise_xor(stretch.aes(_LEFT, seeds), base, out=children[:, 0])
        base[..., 0] ^= control & turn[:, None]
        np.bitwise_xor(stretch.aes(_RIGHT, seeds), base, out=children[:, 1])
        seeds = children.reshape(n, -1, 2)
    return seeds


def _leaves(stretch: _Stretch, seeds: np.ndarray, words: np.ndarray, out: np.ndarray) -> None:
    """The words of the last nodes [n, nodes, 2], corrected, into `out` int64 [n, leaves, P]."""
    n, nodes, _ = seeds.shape
    width = words.shape[1]
    hashed = stretch.words(seeds.reshape(n * nodes, 2), width).reshape(n, nodes, width)
    np.add(hashed, _where_set(seeds[..., 0] & _ONE, words.view(np.uint64)), out=out.view(np.uint64).reshape(n, nodes, width))


def _where_set(control: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """rows [n, w] where control bits [n, nodes] are 1, else 0: [n, nodes, w]. By index, as numpy is slow at short inner loops."""
    n, width = rows.shape
    table = np.zeros((n, 2, width), np.uint64)
    table[:, 1] = rows
    index = control.view(np.int64) + np.arange(0, 2 * n, 2)[:, None]
    return table.reshape(2 * n, width).take(index, 0, mode="clip")
