"""Rows put off: counted by hand on small cases, and the rule."""

import numpy as np

from spu_llm.comet.refill import RowCost, at_once, refill


def counted(pattern, row=10.0, messages=2):
    """One layer; `pattern` has a string a head, one character a token."""
    active = np.array([[c == "x" for c in head] for head in pattern]).T[None, :, None]
    return refill(active, RowCost(row, messages))


def test_rows_that_are_needed_later():
    found = counted(["x..x", "xxx.", "...."])
    assert found.skipped == 7 / 4  # head 0 skips two tokens, head 1 the last one, head 2 all
    assert found.hit == 2 / 7
    assert (found.requests, found.missing) == (1 / 4, 2 / 4)
    assert (found.bytes, found.messages, found.bytes_at_once) == (20 / 4, 2 / 4, 70 / 4)


def test_requests_of_a_layer_are_merged():
    assert counted([".x", ".x"]).requests == 1 / 2
    assert counted(["xx", "xx"]) == counted(["xx", "xx"], messages=0)


def test_rule():
    found = counted(["x.x.x.", "xxxxxx"])
    assert not at_once(found, RowCost(10.0, 0), 1e-8, 1e-2)  # a request costs nothing more
    assert at_once(found, RowCost(10.0, 2), 1e-8, 1e-2)
    never = counted(["......", "xxxxxx"])
    assert not at_once(never, RowCost(10.0, 2), 1e-8, 1e-2)
