"""Rows at secret places against numpy; what they cost; the one-hots they are dealt."""

import jax
import numpy as np
import pytest
from harness import run_dealt, run_plain, run_stock
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.dealer.generator import Dealer, message_bytes, receive
from spu_llm.dealer.material import Recorder
from spu_llm.primitives.fixed import Fixed
from spu_llm.primitives.select import block_rows, embed, in_blocks, one_hot, select, split_ids


@settings(deadline=None, max_examples=15)
@given(
    size=st.sampled_from([1, 2, 3, 8, 21, 63, 64, 65, 200]),
    shape=st.sampled_from([(), (1,), (5,), (2, 3)]),
    seed=st.integers(0, 99),
)
def test_one_hot(size, shape, seed):
    index = np.random.default_rng(seed).integers(0, size, shape)
    found, cost = run_dealt(lambda i: one_hot(i, size), Fixed(index, 0, 20))
    assert (found.raw == (index[..., None] == np.arange(size))).all()
    assert (cost.messages, cost.bytes) == (1, 8 * index.size)


def test_many_long_one_hots():
    index = np.random.default_rng(0).integers(0, 100, 130)
    found, _ = run_dealt(lambda i: one_hot(i, 100), Fixed(index, 0))
    assert (found.raw == (index[:, None] == np.arange(100))).all()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("table_shape", [(1,), (6,), (5, 3), (70, 2, 2)])
@pytest.mark.parametrize("operands", [(), (0,)])
def test_select(shape, table_shape, operands):
    random = np.random.default_rng(0)
    table, index = random.integers(-(2**62), 2**62, table_shape), random.integers(0, table_shape[0], shape)
    found, cost = run_dealt(select, Fixed(table, 9), Fixed(index, 0), operands=operands)
    assert (found.raw == table[index]).all()
    assert found.bits == 9
    assert cost.messages == 2
    assert cost.bytes == 8 * (index.size * (1 + table_shape[0]) + (0 if operands else table.size))


@pytest.mark.parametrize(("vocabulary", "width", "count"), [(97, 4, 1), (97, 4, 3), (1000, 10, 5)])
def test_embed(vocabulary, width, count):
    random = np.random.default_rng(0)
    table, ids = random.integers(-(2**40), 2**40, (vocabulary, width)), random.integers(0, vocabulary, count)
    ids[-1] = vocabulary - 1
    b = block_rows(vocabulary, width)
    blocks = in_blocks(table, b)
    found, cost = run_dealt(embed, Fixed(blocks, 9), Fixed(split_ids(ids, b), 0), operands=[0])
    assert (found.raw == table[ids]).all()
    assert cost.messages == 3
    assert cost.bytes == 8 * count * (2 + len(blocks) + b + b * width)


def test_block_rows_sends_least():
    rows, width = 50257, 768
    sent = {b: -(-rows // b) + b * (width + 1) for b in range(1, 30)}
    assert block_rows(rows, width) == min(sent, key=sent.__getitem__)


def test_plaintext_stock_spu_and_vmap():
    random = np.random.default_rng(0)
    table, index = Fixed(random.integers(-9, 9, (6, 2)), 3), Fixed(random.integers(0, 6, (4, 2)), 0)

    def function(t, i):
        return select(t, i), jax.vmap(lambda row: one_hot(row, 6), in_axes=1, out_axes=1)(i)

    for run in (run_plain, run_stock, lambda *args: run_dealt(*args)[0]):
        rows, hot = run(function, table, index)
        assert (rows.raw == table.raw[index.raw]).all()
        assert (hot.raw == np.eye(6)[index.raw]).all()


def test_nothing_and_no_index():
    found, _ = run_dealt(select, Fixed(np.zeros((5, 2), np.int64), 0), Fixed(np.zeros((0,), np.int64), 0))
    assert found.raw.shape == (0, 2)
    for index in (Fixed(np.zeros(2, np.int64), 3), Fixed(np.zeros(2, np.int64), 0, 4)):
        with pytest.raises(ValueError, match="not one of 17 places"):
            one_hot(index, 17)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 33])
def test_dealt_one_hots_add_up(size):
    recorder = Recorder(lambda count: np.zeros(count, np.int64))
    mask = recorder.uniform((3, 2))
    recorder.one_hot(lambda r: r % size, size, mask)
    specification = recorder.specification()
    keys = b"a" * 16, b"b" * 16
    dealt = Dealer(keys).deal(specification, 1)
    assert tuple(map(len, dealt.messages)) == message_bytes(specification)
    total = sum(receive(specification, party, keys[party], 1, dealt.messages[party]) for party in range(2))
    points = total[:6] % size
    assert (total[6:].reshape(6, size) == (points[:, None] == np.arange(size))).all()
