"""Narrowed functions beside SPU's own and SOAL's, on three protocols or on those that are named: writes result.json.

`python measure.py [--out FILE] [PROTOCOL...]` from anywhere; about 10 minutes, most of them CHEETAH's. Bytes an element and
messages are of one party, the mean of some passes after the first, because CHEETAH makes its triples in batches. Errors are the
largest over the range, against float64, of results above 1 relative to them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paper
from scipy import special

from spu_llm.primitives.narrow import fit
from spu_llm.primitives.narrow.activation import activation, activation_plan
from spu_llm.primitives.narrow.coefficients import chains
from spu_llm.primitives.narrow.exponential import exponential, exponential_plan
from spu_llm.primitives.narrow.inverse_root import inverse_root, inverse_root_plan
from spu_llm.primitives.narrow.pieces import last_weights
from spu_llm.primitives.narrow.reciprocal import reciprocal, reciprocal_plan
from spu_llm.primitives.narrow.softmax import softmax, softmax_plan
from spu_llm.runtime import ProtocolConfig, Session, Slot

PROTOCOLS = ("SEMI2K", "ABY3", "CHEETAH")
_ELEMENTS, _PASSES, _ROW = 2048, 6, 64
_ROWS = np.linspace(-8, 0, _ELEMENTS, dtype=np.float32).reshape(_ROW, -1).T.copy()  # rows of 64, column 63 the largest


@dataclass(frozen=True)
class Case:
    """One function over a range: SPU's own, narrowed, and SOAL's where that is another."""

    x: np.ndarray
    exact: np.ndarray
    sides: dict[str, Callable[[Any], Any]]


def spread(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, _ELEMENTS, dtype=np.float32)


def cases() -> dict[str, Case]:
    root = inverse_root_plan(paper.RANGE[1] / paper.RANGE[0])
    unit = root.low / paper.RANGE[0]
    weights = np.array(last_weights(root)) * unit**0.5
    mask = np.ones(_ROW, bool)
    rows = softmax_plan((-8.0, 0.0), (0.0, float(np.log(_ROW))), _ROW)

    def named(name: str, low: float, high: float, **sides: Callable) -> Case:
        return Case(spread(low, high), fit.exact(name)(spread(low, high).astype(np.float64)), sides)

    def act(name: str, size: float) -> Callable:
        return partial(activation, plan=activation_plan(name, size))

    cubic = paper.fitted_cubic()
    return {
        "exp": named(
            "exponential", -16, 2, own=jnp.exp, narrowed=partial(exponential, plan=exponential_plan(-16, 2)), soal=paper.exponential
        ),
        "exp, wide": named("exponential", -120, 4, own=jnp.exp, narrowed=partial(exponential, plan=exponential_plan(-120, 4))),
        "silu": named("silu", -15.9, 15.9, own=jax.nn.silu, narrowed=act("silu", 15.9), soal=paper.silu),
        "silu, wide": named("silu", -45, 45, own=jax.nn.silu, narrowed=act("silu", 45)),
        "gelu": named("gelu", -8, 8, own=partial(jax.nn.gelu, approximate=False), narrowed=act("gelu", 8)),
        "gelu_tanh": named("gelu_tanh", -8, 8, own=jax.nn.gelu, narrowed=act("gelu_tanh", 8)),
        "reciprocal": named(
            "reciprocal",
            0.25,
            16,
            own=lambda x: 1.0 / x,
            narrowed=partial(reciprocal, plan=reciprocal_plan(0.25, 16)),
            soal=partial(paper.reciprocal, low=0.25, high=16.0),
        ),
        "inverse root": named(
            "inverse_root",
            *paper.RANGE,
            own=jax.lax.rsqrt,
            narrowed=lambda x: inverse_root(x * unit, root, weights),
            soal=partial(paper.inverse_root, cubic=paper.PAPER_CUBIC),
            soal_fitted=partial(paper.inverse_root, cubic=cubic),
        ),
        "softmax": Case(
            _ROWS,
            special.softmax(_ROWS.astype(np.float64), axis=-1),
            {"own": jax.nn.softmax, "narrowed": lambda s: softmax(s, mask, s[:, -1:], rows)},
        ),
    }


def measured(session: Session, name: str, function: Callable, case: Case) -> dict[str, float]:
    session.share("x", case.x, "client")
    program = session.compile(name, lambda x: function(x), (Slot(case.x.shape),))
    session.run(program, ("x",), "y")
    with session.phase(name) as phase:
        for _ in range(_PASSES):
            session.run(program, ("x",), "y")
    found = np.asarray(session.receive("y"), np.float64)
    return {
        "bytes_per_element": round(phase.bytes / _PASSES / case.x.size, 1),
        "messages": round(phase.messages / _PASSES, 1),
        "max_error": float((np.abs(found - case.exact) / np.maximum(1, np.abs(case.exact))).max()),
    }


def starts() -> dict[str, Any]:
    """The cubic start of the inverse root: SOAL's coefficients and ours, and errors after 0, 1 and 2 Newton steps."""
    cubics = {"soal": paper.PAPER_CUBIC, "fitted": paper.fitted_cubic()}
    return {
        name: {"cubic": cubic, "errors": [paper.cubic_error(cubic, steps) for steps in range(3)]} for name, cubic in cubics.items()
    }


def main(protocols: Sequence[str], out: Path) -> None:
    names = dict.fromkeys(name for name, _ in fit.targets())
    result: dict[str, Any] = {
        "chains": {name: [{**vars(chain), "squarings": chain.levels} for chain in chains(name)] for name in names},
        "inverse_root_starts": starts(),
        "functions": {},
    }
    for protocol in protocols:
        with Session(ProtocolConfig(name=protocol)) as session:
            for name, case in cases().items():
                sides = {side: measured(session, f"{name} {side}", function, case) for side, function in case.sides.items()}
                result["functions"].setdefault(name, {})[protocol] = sides
                print(protocol, name, sides, flush=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["inverse_root_starts"], indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("protocols", nargs="*", metavar="PROTOCOL", default=PROTOCOLS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    arguments = parser.parse_args()
    main(arguments.protocols, arguments.out)
