"""Passages side by side against each passage alone."""

from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import CONFIGS, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.models import PlainDecoder, load_checkpoint, trace
from spu_llm.models.trace import embedded, sequences, trace_layer, traced_params

MIXTRAL = Path(__file__).parent / "mixtral"
PASSAGES = [[5, 17, 46, 2, 40, 3], [1], [7] * 6, [9], [8, 3, 4, 5, 6, 7]]
"""Of two lengths, for each of which the reference is compiled."""


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_row_is_in_its_place_and_sees_prefix_and_own_past(lengths, start):
    prefix = list(range(100, 100 + start))
    passages = [[10 * i + j for j in range(length)] for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "ROWS", 16)
        patch.setattr(trace, "_STEP", 4)
        parts = list(sequences(prefix, passages))
    assert len({len(part.tokens) for part in parts}) <= 1
    rows = [(part, row) for part in parts for row in np.flatnonzero(part.kept)]
    assert [int(part.tokens[row]) for part, row in rows] == [token for passage in passages for token in passage]
    places = [(i, j) for i, length in enumerate(lengths) for j in range(length)]
    for (part, row), (i, j) in zip(rows, places, strict=True):
        assert part.positions[row] == start + j
        assert part.tokens[part.places.mask[row]].tolist() == prefix + passages[i][: j + 1]


@pytest.mark.parametrize(("family", "prefix"), [*((family, [11]) for family in [*CONFIGS, "mixtral"]), ("gpt2", [])])
def test_side_by_side_as_alone(family, prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "ROWS", 16)
    folder = MIXTRAL if family == "mixtral" else write_checkpoint(tmp_path / "model", CONFIGS[family])
    decoder = load_checkpoint(folder).decoder
    step = jax.jit(lambda layer, x, places: trace_layer(decoder.config, layer, x, places))
    layers = [traced_params(decoder.config, params) for params in decoder.params["layers"]]
    found = []
    for part in sequences(prefix, PASSAGES):
        x = embedded(decoder, part)
        for layer in layers:
            x, seen = step(layer, x, part.places)
        assert seen.scores.shape == (len(x), decoder.config.heads, len(x))
        found.append(np.asarray(decoder.final(decoder.params["final"], x))[part.kept] @ decoder.head_table.T)
    want = []
    for passage in PASSAGES:
        plain = PlainDecoder(decoder, 32)
        if prefix:
            plain.advance(prefix)
        want.append(plain.advance(passage))
    assert np.abs(np.concatenate(found) - np.concatenate(want)).max() < 1e-4
