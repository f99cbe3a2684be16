"""The breakdown of a layer, dense against sparse: halves, products and functions, and what predicting costs (Comet, S&P 2025).

A part is a program of its own, run in turns with the others in one session. Halves are attention, with its norm, and the
feed-forward part, with its norm. `linear` are the products alone, their openings and truncations (see sparse_plugin.py and
sparse_stock.py); `nonlinear` is what the half costs more: norms, softmax, ReLU. `given` is the sparse layer whose blocks are a
public input and which predicts nothing; `predictor` is what the sparse layer costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..network import NetworkProfile
from ..progress import Progress, silent
from ..runtime import ProtocolConfig, Session
from ..runtime.assisted import TRUST
from .costs import Cost, added, less, measured, ratios
from .sparse_case import LayerCase, SparseModel, layer_case
from .sparse_plugin import plugin_output, plugin_runs
from .sparse_stock import stock_runs

Ops = Literal["plugin", "stock"]
_OPERATIONS = 8  # of a layer that are reported


@dataclass(frozen=True)
class How:
    """How a layer is measured: seconds are given for these networks too; medians are of so many passes.

    layer: by default the middle one. products: whether halves are told into linear and nonlinear parts, which takes twice as long.
    """

    networks: Sequence[NetworkProfile] = ()
    repeats: int = 3
    layer: int | None = None
    products: bool = True


def layer_parts(
    ops: Ops,
    protocol: ProtocolConfig,
    model: SparseModel,
    sequence: Sequence[int],
    tokens: int = 1,
    how: How = How(),
    progress: Progress = silent,
) -> dict[str, Any]:
    """What a layer's pass of the last `tokens` of a sequence (prefix included) costs, dense and sparse.

    dense, sparse: a `Cost` (see costs.py) each for layer, attention, ffn, and each half's linear and nonlinear part; sparse has
    given and predictor too. speedup, attention_speedup, ffn_speedup: dense over sparse, by seconds of compute, messages, bytes and
    seconds on each network; ffn_with_predictor_speedup: the predictor counted to the sparse ffn; predictor_share: predictor over
    sparse layer. max_error: of the dense layer and the given one against plaintext. operations: SPU's own figures of those that
    take most time (plugin, where `spu.reveal` sends everything) or send most (stock) of a layer. All of it is JSON's.

    Raises UserError for what cannot be run.
    """
    case = layer_case(model, sequence, tokens, how.layer)
    dense, dense_facts = _costs(ops, protocol, model, case, False, how, progress)
    sparse, sparse_facts = _costs(ops, protocol, model, case, True, how, progress)
    sparse["predictor"] = less(sparse["layer"], sparse["given"])
    plan = case.sparsity[0]
    return {
        "ops": ops,
        "protocol": protocol.name,
        "trust": TRUST if ops == "plugin" else protocol.trust,
        "layer": case.layer,
        "tokens": tokens,
        "context": case.context,
        "blocks": [plan.active_blocks, plan.blocks],
        "heads": [case.active.shape[1] if _skips(ops, protocol, tokens) else case.config.heads, case.config.heads],
        "dense": dense,
        "sparse": sparse,
        "speedup": ratios(dense["layer"], sparse["layer"]),
        "attention_speedup": ratios(dense["attention"], sparse["attention"]),
        "ffn_speedup": ratios(dense["ffn"], sparse["ffn"]),
        "ffn_with_predictor_speedup": ratios(dense["ffn"], added(sparse["ffn"], sparse["predictor"])),
        "predictor_share": ratios(sparse["predictor"], sparse["layer"]),
        "max_error": {"dense": dense_facts["max_error"], "sparse": sparse_facts["max_error"]},
        "operations": {"dense": dense_facts["operations"], "sparse": sparse_facts["operations"]},
    }


def _skips(ops: Ops, protocol: ProtocolConfig, tokens: int) -> bool:
    """Whether heads are skipped: by stock SPU in passes of one token only, and not on CHEETAH."""
    return ops == "plugin" or (tokens == 1 and not protocol.ciphertexts)


def _want(ops: Ops, protocol: ProtocolConfig, case: LayerCase) -> np.ndarray:
    """What the sparse layer gives; on CHEETAH a pass of several tokens is dense."""
    if ops == "stock" and protocol.ciphertexts and case.tokens > 1:
        return case.want
    return case.want_sparse if _skips(ops, protocol, case.tokens) else case.want_all_heads


def _costs(
    ops: Ops,
    protocol: ProtocolConfig,
    model: SparseModel,
    case: LayerCase,
    sparse: bool,
    how: How,
    progress: Progress,
) -> tuple[dict[str, Cost], dict[str, Any]]:
    """The layer's parts, its error and its operations."""
    with Session(protocol) as session:
        plugin = ops == "plugin"
        if plugin:
            runs = plugin_runs(session, model, case, sparse, how.products)
        else:
            runs = stock_runs(session, case, sparse, how.products)
        costs = measured(session, runs, how.networks, how.repeats, progress)
        name = "given" if sparse else "layer"
        found = plugin_output(session, name) if plugin else session.receive(name)
        operations = session.phases[f"layer {how.repeats}"].ops
    want = _want(ops, protocol, case) if sparse else case.want
    want = want - want.mean(-1, keepdims=True) if plugin else want
    for half in ("attention", "ffn") if how.products else ():
        costs[f"{half}_nonlinear"] = less(costs[half], costs[f"{half}_linear"])
    weight = {op: cost.seconds if plugin else cost.bytes for op, cost in operations.items()}
    most = {op: vars(operations[op]) for op in sorted(weight, key=lambda op: -weight[op])[:_OPERATIONS]}
    return costs, {"max_error": float(np.abs(found - want).max()), "operations": most}
