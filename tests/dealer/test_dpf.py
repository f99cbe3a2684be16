"""Distributed point functions: shares add up to the point function, and one party's key tells nothing of the point."""

import tracemalloc
from dataclasses import astuple, replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spu_llm.dealer.dpf import Correction, expand, generate, key_bytes
from spu_llm.dealer.prg import Stream


def roots(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    first, second = (Stream(seed.to_bytes(15, "big") + bytes([party])).seeds(n) for party in range(2))
    return first, second


def deal(point: np.ndarray, payload_words: int, depth: int, seed: int = 0):
    """A random payload [n, P], the parties' roots and the correction."""
    payload = Stream(seed.to_bytes(16, "big")).words((len(point), payload_words))
    starts = roots(len(point), seed)
    return payload, starts, generate(point, payload, depth, starts)


def is_uniform(counts: np.ndarray) -> bool:
    """Chi-square within 6 standard deviations of its mean."""
    expected = counts.sum() / counts.size
    return ((counts - expected) ** 2 / expected).sum() < counts.size - 1 + 6 * np.sqrt(2 * (counts.size - 1))


@settings(deadline=None)
@given(n=st.integers(0, 20), depth=st.integers(0, 10), payload_words=st.integers(1, 9), seed=st.integers(0, 2**32))
@example(n=700, depth=7, payload_words=3, seed=1)  # several chunks
@example(n=1, depth=2, payload_words=2000, seed=2)
@example(n=1, depth=0, payload_words=1, seed=3)
def test_shares_add_up_to_the_point_function(n, depth, payload_words, seed):
    point = np.random.default_rng(seed).integers(0, 1 << depth, n)
    payload, starts, correction = deal(point, payload_words, depth, seed)
    total = sum(expand(party, starts[party], correction, depth, payload_words) for party in range(2))
    want = np.zeros((n, 1 << depth, payload_words), np.int64)
    want[np.arange(n), point] = payload
    assert total.dtype == np.int64
    assert (total == want).all()


@pytest.mark.parametrize("right", [0, 1])
def test_leaves_are_made_one_way(right):
    """From AES itself, as written: H_k(x) = AES_k(x) xor x, children under keys 0 and 1, words under 2 with a counter."""
    start = roots(1)[0]
    none = Correction(np.zeros((1, 1, 2), np.uint64), np.zeros((1, 1), np.uint64), np.zeros((1, 7), np.int64))
    leaf = expand(0, start, none, 1, 7)[0, right].tobytes()

    def one_way(key: int, block: int) -> int:
        cipher = Cipher(algorithms.AES(bytes([key]) * 16), modes.ECB()).encryptor()
        return int.from_bytes(cipher.update(block.to_bytes(16, "little")), "little") ^ block

    child = one_way(right, int.from_bytes(start.tobytes(), "little") & ~1)
    blocks = [one_way(2, child ^ number << 64) for number in range(4)]
    assert leaf == b"".join(block.to_bytes(16, "little") for block in blocks)[:56]


@given(n=st.integers(0, 9), depth=st.integers(0, 9), payload_words=st.integers(1, 9))
def test_bytes(n, depth, payload_words):
    point = np.arange(n) % (1 << depth)
    correction = deal(point, payload_words, depth)[2]
    data = correction.to_bytes()
    assert len(data) == correction.nbytes == Correction.size(n, depth, payload_words)
    assert n * key_bytes(depth, payload_words) <= len(data) < n * key_bytes(depth, payload_words) + 1
    # The message may lie anywhere in a longer one.
    again = Correction.from_bytes(memoryview(b"x" + data)[1:], n, depth, payload_words)
    assert all((mine == its).all() for mine, its in zip(astuple(correction), astuple(again), strict=True))


def test_a_slice_expands_alone():
    _, starts, correction = deal(np.arange(50) % 16, 3, 4)
    part = slice(7, 23)
    cut = Correction.from_bytes(correction.to_bytes(), 50, 4, 3)[part]
    assert (expand(1, starts[1][part], cut, 4, 3) == expand(1, starts[1], correction, 4, 3)[part]).all()


@pytest.mark.parametrize(("depth", "payload_words"), [(7, 3), (5, 4), (6, 1), (0, 2)])
@pytest.mark.parametrize("point", [0, -1])
@pytest.mark.parametrize("party", [0, 1])
def test_a_share_looks_uniform(depth, payload_words, point, party):
    """Everywhere, at the point and in every byte of a word, for a payload that is known."""
    n = (1 << 17) // (payload_words << depth)
    points = np.full(n, point % (1 << depth))
    starts = roots(n)
    correction = generate(points, np.zeros((n, payload_words), np.int64), depth, starts)
    share = expand(party, starts[party], correction, depth, payload_words)
    assert len(np.unique(share)) == share.size
    for byte in np.moveaxis(np.ascontiguousarray(share).view(np.uint8).reshape(-1, 8), 1, 0):
        assert is_uniform(np.bincount(byte, minlength=256))
    at_point = np.ascontiguousarray(share[:, points[0]]).view(np.uint8)
    assert is_uniform(np.bincount(at_point.ravel(), minlength=256))


@pytest.mark.parametrize("point", [0, 21, 63])
def test_a_correction_looks_uniform_whatever_the_point(point):
    """Every level's seed correction, both control bit corrections and the words, for a payload that is known."""
    n, depth = 1 << 14, 6
    correction = generate(np.full(n, point), np.zeros((n, 4), np.int64), depth, roots(n, point))
    for seeds, turns in zip(correction.seeds, correction.turns, strict=True):
        assert is_uniform(np.bincount(seeds.view(np.uint8).ravel(), minlength=256))
        both = (seeds[:, 0] & np.uint64(1)) * np.uint64(2) + turns
        assert is_uniform(np.bincount(both.astype(int), minlength=4))
    assert is_uniform(np.bincount(correction.words.view(np.uint8).ravel(), minlength=256))


@pytest.mark.parametrize("party", [0, 1])
@pytest.mark.parametrize("payload_words", [1, 4])
def test_control_bits_do_not_show_the_point(party, payload_words):
    """A party sees at which leaves it adds the correction of words: at the point as often as elsewhere."""
    n, depth = 1 << 13, 4
    point = np.arange(n) % 16
    _, starts, correction = deal(point, payload_words, depth)
    without = replace(correction, words=np.zeros_like(correction.words))
    share, bare = (expand(party, starts[party], each, depth, payload_words) for each in (correction, without))
    added = (share != bare).any(2)
    at_point = np.zeros_like(added)
    at_point[np.arange(n), point] = True
    assert abs(added[at_point].mean() - 0.5) < 6 * np.sqrt(0.25 / n)
    assert abs(added[~at_point].mean() - 0.5) < 6 * np.sqrt(0.25 / n)


def test_memory_is_bounded_by_chunks():
    n, depth, payload_words = 1 << 13, 7, 3
    _, starts, correction = deal(np.arange(n) % 128, payload_words, depth)
    tracemalloc.start()
    share = expand(0, starts[0], correction, depth, payload_words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert share.nbytes == 25_165_824
    assert peak < share.nbytes + (8 << 20)


def test_refuses_what_is_outside():
    with pytest.raises(ValueError, match=r"points from 0 to 8; the domain is \[0, 8\)"):
        generate(np.array([0, 8]), np.zeros((2, 1), np.int64), 3, roots(2))
    with pytest.raises(ValueError, match="points from -1"):
        generate(np.array([-1]), np.zeros((1, 1), np.int64), 3, roots(1))
    with pytest.raises(ValueError, match="a correction of 3 bytes; 1 of depth 7"):
        Correction.from_bytes(b"abc", 1, 7, 3)
