"""Streams: one key gives one string however it is cut, and nothing about another key's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.dealer.prg import Stream, derive_key

KEY = bytes(range(16))


def test_is_aes_in_counter_mode():
    known = Stream(bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")).seeds(2)
    assert known[0].tobytes().hex() == "7df76b0c1ab899b33e42f047b91b546f"  # AES-128 of the zero block: RFC 4493, section 4
    assert (known[0] != known[1]).any()


@given(sizes=st.lists(st.integers(0, 50), max_size=6))
def test_calls_continue_the_string(sizes):
    cut, whole = Stream(KEY), Stream(KEY)
    parts = [cut.words(size) for size in sizes]
    assert (np.concatenate([*parts, np.empty(0, np.int64)]) == whole.words(sum(sizes))).all()
    assert (cut.seeds(3) == whole.words((3, 2)).view(np.uint8)).all()


def test_long_calls_continue_the_string():
    size = 100_003  # over several of the pieces it is made in
    long, short = Stream(KEY).words(size), Stream(KEY)
    assert (long == np.concatenate([short.words(n) for n in (1, 32768, 32768, size - 65537)])).all()


def test_shapes():
    stream = Stream(KEY)
    assert stream.words((2, 3)).shape == (2, 3)
    assert stream.words(()).shape == ()
    assert stream.words((0, 3)).shape == (0, 3)
    assert stream.words(4).dtype == np.int64
    assert stream.seeds(0).shape == (0, 16)
    assert stream.words((2, 3)).flags.writeable


def test_bytes_are_uniform():
    counts = np.bincount(Stream(KEY).words(1 << 17).view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)


def test_keys_differ_by_label_number_and_master():
    cases = [(KEY, "run", 0), (KEY, "run", 1), (KEY, "row", 0), (KEY, "", 0), (KEY[::-1], "run", 0), (KEY, "run" + 7 * "\0", 0)]
    keys = [derive_key(*case) for case in cases]
    assert len(set(keys)) == len(cases)
    assert {len(key) for key in keys} == {16}
    assert derive_key(KEY, "run", 1) == keys[1]
    assert not (set(Stream(keys[0]).words(1000)) & set(Stream(keys[1]).words(1000)))


def test_refuses_what_is_no_key():
    with pytest.raises(ValueError, match="15 bytes"):
        Stream(bytes(15))
    with pytest.raises(ValueError, match="master key of 8 bytes"):
        derive_key(bytes(8), "run", 0)
    with pytest.raises(OverflowError):
        derive_key(KEY, "run", -1)
