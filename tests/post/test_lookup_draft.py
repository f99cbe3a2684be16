"""Prompt lookup against a search that tries every place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.post.lookup_draft import LookupDraft


def continuation(tokens, longest, shortest):
    """What followed the last earlier occurrence of the longest suffix that has one."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size :]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    length=st.integers(0, 6),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
)
def test_longest_suffix_that_occurred_before(tokens, length, sizes):
    shortest, longest = sizes[0], sizes[0] + sizes[1]
    draft = LookupDraft(5, longest, shortest).propose(tokens, length)
    found = continuation(tokens, longest, shortest)
    assert draft.tokens == [found[i % len(found)] for i in range(length if found else 0)]
    assert draft.probabilities.shape == (len(draft.tokens), 5) and draft.probabilities.dtype == np.float64
    assert np.array_equal(draft.probabilities.argmax(-1), draft.tokens) and draft.probabilities.sum() == len(draft.tokens)


def test_a_text_that_repeats_is_foreseen():
    text = [5, 6, 7, 8, 9, 1, 5, 6]
    assert LookupDraft(10).propose(text, 3).tokens == [7, 8, 9]
    assert LookupDraft(10).propose(text, 9).tokens == [7, 8, 9, 1, 5, 6, 7, 8, 9]
    assert LookupDraft(10).propose([1, 2, 3], 4).tokens == []
    with pytest.raises(ValueError, match="there are none"):
        LookupDraft(10, 1, 2)
