"""Where values stand: every element has a slot of its own, as many ciphertexts as planned; maps and their matrices."""

import numpy as np
from arhe_cases import options
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.arhe.graph import Layout, Span
from spu_llm.arhe.slots import ABSENT, Places, SlotMap, baby_steps, copies, places, rotation_steps

sizes = st.integers(1, 7)
layouts = st.builds(Layout, sizes, st.integers(1, 20), st.booleans(), st.booleans(), st.booleans()) | st.builds(
    lambda pieces, size, last, single: Layout(pieces, size, last, True, single, stacked=True),
    sizes, st.integers(1, 20), st.booleans(), st.booleans(),
)  # fmt: skip
spans = st.builds(Span, sizes, st.integers(0, 9), options)
slot_counts = st.sampled_from([4, 16, 64])
several = settings(max_examples=150, deadline=None)


@several
@given(layouts, spans, slot_counts)
def test_every_value_has_one_slot_in_the_ciphertexts_that_are_counted(layout, span, slots):
    found = places(layout, span, slots)
    present = found.index[found.index != ABSENT]
    assert len(np.unique(present)) == len(present) == layout.values(span)
    assert present.min() >= 0 and present.max() < found.count * slots
    assert found.count == layout.ciphertexts(span, slots)
    last = found.index[-1]
    assert last[last != ABSENT].min() == 0


@several
@given(layouts.filter(lambda layout: layout.stacked), spans, slot_counts)
def test_positions_are_whole_copies_apart(layout, span, slots):
    """So that rotating by a copy, or going to the next ciphertexts, leads from a position to the next."""
    index = places(layout, span, slots).index
    size, each = copies(layout, span, slots)[0][1:]
    row = index[-1]
    for position in range(1, (row[0, :, 0] != ABSENT).sum()):
        step = row[:, position] - row[:, position - 1]
        whole = slots - (each - 1) * size if each else -(-size // slots) * slots
        assert np.all(step == (size if each and position % each else whole))


@several
@given(st.integers(0, 2**32 - 1), sizes, sizes)
def test_a_maps_matrix_is_what_it_does(seed, rows, columns):
    draw = np.random.default_rng(seed)
    kernel, offset = draw.standard_normal((rows, columns)), draw.standard_normal(rows)
    source = Places(draw.choice(16, columns, replace=False), 2)
    target = Places(draw.choice(24, rows, replace=False), 3)
    target.index[0] = ABSENT
    slot_map = SlotMap(lambda x: kernel @ x + offset, source, target)
    matrix, constants, targets, sources = slot_map.matrix()
    flat, wanted = draw.standard_normal(16), np.zeros(24)
    wanted[targets] = matrix @ flat[sources] + constants
    np.testing.assert_allclose(slot_map.applied(flat, 8), wanted, atol=1e-12)


@given(st.integers(0, 11).map(lambda bits: 2**bits))
def test_every_rotation_is_of_two_steps_that_have_keys(slots):
    steps, baby = {0, *rotation_steps(slots)}, baby_steps(slots)
    assert all(step // baby * baby in steps and step % baby in steps for step in range(slots))
    assert len(rotation_steps(slots, few=True)) == slots.bit_length() - 1
