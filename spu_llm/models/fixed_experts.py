"""The feed-forward part of a mixture of experts on the plugin's primitives: every expert evaluated, the routing a secret.

Nothing tells the experts of a token apart but shares of their weights, which are 0 outside the k largest logits. Openings after
the norm, everything named together in one message: gates, ups and logits; SiLU of the gates, exponentials of the logits and
comparisons of all pairs of these; gated units and comparisons; ranks; each expert's outputs and its weight, the sum of weights;
the weighted sum and the inverse sum. 6 messages whatever the number of tokens and experts, 5 where every expert is chosen (without
comparisons), 2 more where sums are brought near 1 by a power of two (`SoftmaxPlan`).

Weights multiply outputs, not units: an expert has fewer of these, and the ranks are there only when the outputs are. Of n tokens,
E experts of f units and width w: 8 n (4 E f + E w + E (E + 3) + w + 2) bytes, and 8 n (w + 2) more with a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dealer.table import Table
from ..primitives.attention import SoftmaxPlan, divide
from ..primitives.contract import contract
from ..primitives.fixed import Fixed, encode
from ..primitives.lookup import lookup
from ..primitives.scale import scale
from ..primitives.topk import keep_top_k
from .config import DecoderConfig

_LOGIT_BITS = 39
"""Bits in which differences of logits are compared: up to 2^11, with the 28 fraction bits that a norm gives."""

_INVERSE_BITS = 16
"""Fraction bits of the inverse sum: more than of what it multiplies, as sums go beyond 100."""


@dataclass(frozen=True)
class RoutingPlan:
    """How k experts' logits become weights.

    shift: taken from all logits, whose mean is 0, so that exponentials and their sums fit the tables of `softmax`. As a sum has the
    largest logit in it, it is at least exp(-shift), whatever the input.
    """

    softmax: SoftmaxPlan
    shift: float


def mix(config: DecoderConfig, plan: RoutingPlan, activation: Table, h: Fixed, down: Fixed) -> Fixed:
    """h [n, 2 * hidden + experts]: gates, ups and logits -> [n, width] with twice `plan.softmax.bits` fraction bits.

    `down` [hidden, width] has the rows of all experts. Everything but the shapes is secret.
    """
    assert config.experts is not None and config.experts_per_token is not None
    n, hidden, bits = h.shape[0], config.hidden, plan.softmax.bits
    gate, up, logits = h[:, :hidden], h[:, hidden : 2 * hidden], h[:, 2 * hidden :]
    units = scale(lookup(gate, activation), up, bits, bits).reshape(n, config.experts, config.ffn)
    outputs = contract("nef,efw->new", units, down.reshape(config.experts, config.ffn, config.width), bits)
    weights = _weights(config.experts_per_token, plan, logits)
    mixed = scale(outputs, weights.reshape(n, config.experts, 1), bits, bits).sum(1)
    total = weights.sum(1, keepdims=True)
    if plan.softmax.power is not None:
        return divide(mixed, total, plan.softmax)
    inverse = lookup(total, plan.softmax.inverse, modulus=64)
    return scale(mixed, inverse, 2 * bits - _INVERSE_BITS, _INVERSE_BITS)


def _weights(k: int, plan: RoutingPlan, logits: Fixed) -> Fixed:
    """exp(logit - shift) of each row's k largest, 0 for the others. Lookup and comparisons stand on one opening of the logits."""
    relative = logits.with_raw(logits.raw - int(encode(plan.shift, logits.bits)))
    return keep_top_k(lookup(relative, plan.softmax.exp, modulus=64), relative, k, _LOGIT_BITS)
