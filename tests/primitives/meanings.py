"""A function of `Fixed` numbers in every meaning it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import harness
import jax
import numpy as np
from jax.experimental import enable_x64

from spu_llm.primitives.fixed import Fixed
from spu_llm.runtime import ProtocolConfig

STOCK = ("SEMI2K", "ABY3", "CHEETAH")


def meanings(function: Callable, *args: Fixed, stock: Sequence[str] = STOCK, dealer: bool = True) -> dict[str, Any]:
    """function(*args) in plaintext, jitted, as stock SPU protocols compute it, and between two parties with a `dealer`.

    Fails if one of them has not the shapes and scales that abstract evaluation foretells.
    """
    with enable_x64():
        foretold = jax.eval_shape(function, *args)
        found = {
            "plaintext": harness.run_plain(function, *args),
            "jit": jax.tree_util.tree_map(np.asarray, jax.jit(function)(*args)),
        }
    for name in stock:
        with mock.patch.object(harness, "ProtocolConfig", partial(ProtocolConfig, name=name)):
            found[name] = harness.run_stock(function, *args)
    if dealer:
        found["dealer"], _ = harness.run_dealt(function, *args)
    for name, value in found.items():
        assert jax.tree_util.tree_map(np.shape, value) == jax.tree_util.tree_map(np.shape, foretold), name
    return found


def garbled(raw: np.ndarray, modulus: int, multiple: int) -> np.ndarray:
    """The same numbers modulo 2^modulus: a multiple of it added, modulo 2^64."""
    added = np.int64(((multiple << modulus) + 2**63) % 2**64 - 2**63)
    with np.errstate(over="ignore"):
        return np.asarray(raw + added)
