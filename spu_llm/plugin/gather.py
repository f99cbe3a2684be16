"""Rows of a table at secret places: token embeddings. One-hot vectors times the table (2 rounds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserError
from .interpret import Interpreter
from .values import Secret, Value, is_public


def at_secret_places(interpreter: Interpreter, eqn: Any, inputs: Sequence[Value]) -> Secret:
    """gather of whole rows of a matrix. The places may have been made from the secret by any function of one integer."""
    table, places = inputs[0], interpreter.plain(eqn, inputs[1])
    numbers = eqn.params["dimension_numbers"]
    count, width = table.shape if len(table.shape) == 2 else (0, 0)
    if tuple(numbers.start_index_map) != (0,) or tuple(eqn.params["slice_sizes"]) != (1, width) or places.shape[-1] != 1:
        raise UserError(
            f"{interpreter.where(eqn)}: a secret place can be read of whole rows of a matrix only; use jnp.take(x, i, axis=0)"
        )
    chain, _ = places.univariate
    with jax.ensure_compile_time_eval():
        order = np.asarray(chain.function(jnp.arange(count)))
    engine = interpreter.engine

    def make() -> Any:
        unit = engine.one_hot(chain.base.array(), count)
        letters = "abcdefgh"[: len(chain.base.shape)]
        subscripts = f"{letters}v,vw->{letters}w"
        if is_public(table):
            rows = engine.dot_public(subscripts, unit, np.asarray(table)[order])
        else:
            rows = engine.dot(subscripts, unit, _in_order(interpreter, table.array(), order))
        return engine.moved(lambda raw: raw.reshape(eqn.outvars[0].aval.shape), rows)

    return interpreter.secret(eqn, make)


def _in_order(interpreter: Interpreter, table: Any, order: np.ndarray) -> Any:
    if np.array_equal(order, np.arange(len(order))):
        return table
    return interpreter.engine.moved(lambda raw: raw[order], table)
