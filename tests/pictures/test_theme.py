"""Colours that both pages can be read by, measured by WCAG's formula."""

from itertools import combinations

import numpy as np
import pytest
from colours import BLIND, contrast, lab, linear
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.pictures.theme import COLOURS, MARKERS, short


def test_contrast_is_wcags():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # the often cited grey that just fails AA


@pytest.mark.parametrize("page", ["#ffffff", "#121212"])
@pytest.mark.parametrize("colour", COLOURS)
def test_colours_stand_out(colour, page):
    assert contrast(colour, page) >= 3


@pytest.mark.parametrize("matrix", [np.eye(3), *BLIND.values()], ids=["all colours", *BLIND])
def test_colours_are_told_apart(matrix):
    seen = [lab(matrix @ linear(colour)) for colour in COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


def test_series_of_one_colour_differ_in_their_marks():
    pairs = {(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i in range(len(COLOURS) * len(MARKERS))}
    assert len(pairs) == len(COLOURS) * len(MARKERS)


@given(st.floats(1e-3, 1e12))
def test_short_numbers_are_the_number(value):
    text = short(value)
    number, letter = [*text.split(), ""][:2]
    factor = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[letter]
    assert float(number) * factor == pytest.approx(value, rel=6e-3)
    assert len(text) <= 8
