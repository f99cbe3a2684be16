"""Ranges and references where tokens that a text may begin with count too."""

import numpy as np
from conftest import LLAMA, write_checkpoint

from spu_llm.models import load_checkpoint
from spu_llm.models.calibration import calibrate

TEXTS = [np.random.default_rng(i).integers(0, 97, 12).tolist() for i in range(8)]
PREFIX = (7,)


def close(found, want):
    for a, b in zip(found.references, want.references, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    for a, b in zip(found.layers, want.layers, strict=True):
        np.testing.assert_allclose(list(vars(a).values()), list(vars(b).values()), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.final_squares, want.final_squares, rtol=1e-4)


def test_a_few_first_tokens_are_short_texts(tmp_path):
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", LLAMA)).decoder
    firsts = [3, 50, 90]
    found = calibrate(decoder, TEXTS, PREFIX, firsts=firsts)
    close(found, calibrate(decoder, [*TEXTS, *([token] for token in firsts)], PREFIX))
    assert found.tokens == 96


def test_many_first_tokens_weigh_as_much_as_the_texts(tmp_path):
    """96 positions of text: 96 tokens count in full, the same ones three times over a third each."""
    decoder = load_checkpoint(write_checkpoint(tmp_path / "model", LLAMA)).decoder
    firsts = list(range(1, 97))
    once, thrice = (calibrate(decoder, TEXTS, PREFIX, firsts=firsts * times) for times in (1, 3))
    close(thrice, once)
    without = calibrate(decoder, TEXTS, PREFIX)
    assert any(np.abs(a - b).max() > 0.01 for a, b in zip(without.references, once.references, strict=True))
    for some, all_of_them in zip(without.layers, once.layers, strict=True):
        assert all_of_them.ffn_squares[0] <= some.ffn_squares[0] and some.ffn_squares[1] <= all_of_them.ffn_squares[1]
