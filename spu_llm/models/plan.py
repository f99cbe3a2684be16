"""From ranges on text to the tables of a model: wide enough for what was seen and a margin, else an error before anything runs.

Each layer's ranges choose its tables from a few sizes (SOAL's narrowing): a table of half as many segments is half the work to
expand and fewer dealer bytes. Layers that need the same tables share one program; where there would be too many programs, those
that cost least together are merged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import ceil, log

from ..dealer.dpf import key_bytes
from ..dealer.table import Table
from ..errors import UserError
from ..primitives import functions
from ..primitives.attention import Refinement, SoftmaxPlan
from ..primitives.norm import NormPlan, root_table, rounded_phi
from .calibration import Calibration, LayerRanges
from .config import DecoderConfig
from .fixed_block import STREAM_BITS, BlockPlan
from .fixed_experts import RoutingPlan
from .table_sizes import PlanSizes, RoutingSizes, TableSizes

_MARGIN = 2.0  # how far beyond what was seen a range of mean squares is made to reach
_LARGEST = 6.0  # exp(score - reference) is cut at exp of this: calibration keeps it rare, and a cut weight is a large one
_EXP_TOP = 14.0  # scores so far above their reference stay in the table, cut
_SCORE_MARGIN = 1.25
_LEAST_SUM = 0.05
_LEAST_NORMALISED = 0.06  # of sums brought near 1: those below 1/4, the first segment, are multiplied by 4
_SUM_MARGIN = 2.0  # logs of sums on other text were up to 4.5 above those on the calibration text, nearly always less than 2
_ACTIVATION_MARGIN = 1.3
_LEAST_LOG_SUM = -3.5  # of sums over exp(reference) that the tables of one stage take
_HALF_SUM = 1024  # the table of its log takes a sum of exponentials of half the scores up to here
_ROUTING_SUM = 127.98  # largest sum of experts' weights in one table of the inverse; more takes a power of two

_NORM_SEGMENTS = (128, 512, 2048, 8192)
_EXP_SEGMENTS = (64, 128, 256)
_SUM_SEGMENTS = (256, 4096)  # of width 1/4; the last step refines the reference instead
_SILU = ((-20.0, 64), (-52.0, 128), (-104.0, 256))
_GELU = ((-8.0, 64), (-16.0, 128), (-64.0, 512))


@dataclass(frozen=True)
class ModelPlan:
    """Each layer's tables, the same object where they are equal, and phi of its two norms; the same of the final norm.

    Each phi is the owner's secret; whoever is not the owner has ones.
    """

    blocks: tuple[BlockPlan, ...]
    phis: tuple[tuple[float, float], ...]
    final: NormPlan
    final_phi: float
    public: PlanSizes

    @property
    def sizes(self) -> tuple[TableSizes, ...]:
        return self.public.layers


def plan_model(config: DecoderConfig, calibration: Calibration, programs: int = 4) -> ModelPlan:
    """Tables for every layer, of at most `programs` different sizes, or those that the calibration names, if it names them.

    Raises UserError where a range exceeds every table.
    """
    if calibration.sizes is not None:
        return blind_plan(config, calibration.sizes)
    wanted = [_sizes(config, i, layer) for i, layer in enumerate(calibration.layers)]
    routing = _routing(config, [layer.router for layer in calibration.layers])
    chosen = _merge(config, wanted, programs)
    joined = [chosen[each] for each in wanted]
    # the fewer bits that phi has beside a wider table can be too few: such a layer keeps what it asked for
    sizes = tuple(
        new if all(_holds(config, new.norm, squares) for squares in (layer.attention_squares, layer.ffn_squares)) else old
        for new, old, layer in zip(joined, wanted, calibration.layers, strict=True)
    )
    phis = tuple((_phi(layer.attention_squares), _phi(layer.ffn_squares)) for layer in calibration.layers)
    public = PlanSizes(sizes, _norm_size(config, "final norm", calibration.final_squares), routing)
    return replace(blind_plan(config, public), phis=phis, final_phi=_phi(calibration.final_squares))


def blind_plan(config: DecoderConfig, public: PlanSizes) -> ModelPlan:
    """The plan of whoever knows its sizes only."""
    blocks = {each: _block(config, each, public.routing) for each in set(public.layers)}
    ones = ((1.0, 1.0),) * len(public.layers)
    return ModelPlan(tuple(blocks[each] for each in public.layers), ones, _norm(config, public.final), 1.0, public)


def _merge(config: DecoderConfig, wanted: list[TableSizes], programs: int) -> dict[TableSizes, TableSizes]:
    """What each of the wanted sizes becomes: pairs are joined, cheapest first, until there are `programs` of them."""
    groups = {sizes: [sizes] for sizes in set(wanted)}
    count = Counter(wanted)

    def cost(sizes: TableSizes, members: list[TableSizes]) -> float:
        return sum(count[member] for member in members) * expanded_words(config, plan_of(config, sizes), _CONTEXT)

    while len(groups) > programs:

        def loss(pair: tuple[TableSizes, TableSizes]) -> tuple[float, tuple]:
            joined = pair[0].joined(pair[1])
            members = groups[pair[0]] + groups[pair[1]]
            return cost(joined, members) - sum(cost(each, groups[each]) for each in pair), pair

        a, b = min(combinations(sorted(groups), 2), key=loss)
        members = groups.pop(a) + groups.pop(b)
        joined = a.joined(b)
        groups[joined] = groups.get(joined, []) + members
    return {member: sizes for sizes, members in groups.items() for member in members}


_CONTEXT = 64  # cached positions that the work of softmax is weighed at


def widest(config: DecoderConfig) -> TableSizes:
    """The largest tables there are."""
    activations = {"opt": 1, "gpt2": len(_GELU)}.get(config.family, len(_SILU))
    return TableSizes(len(_NORM_SEGMENTS) - 1, len(_EXP_SEGMENTS) - 1, len(_SUM_SEGMENTS), activations - 1)


def plan_of(config: DecoderConfig, sizes: TableSizes) -> BlockPlan:
    """The tables of a layer without experts."""
    return _block(config, sizes, None)


def expanded_words(config: DecoderConfig, plan: BlockPlan, context: int) -> float:
    """Ring words of tables that each party expands for one token of a layer."""
    return sum(count * table.words for count, table in looked_up(config, plan, context))


def dealer_bytes(config: DecoderConfig, plan: BlockPlan, context: int) -> float:
    """Bytes of tables' keys that the dealer sends each party for one token of a layer at `context` cached positions."""
    tables = looked_up(config, plan, context)
    return sum(count * key_bytes(table.depth, table.payload_words) for count, table in tables)


def looked_up(config: DecoderConfig, plan: BlockPlan, context: int) -> list[tuple[int, Table]]:
    """How many elements of one token are looked up in which table of a layer."""
    softmax, heads = plan.softmax, config.heads
    found = [(2, plan.norm.root), (heads * (context + 1), softmax.exp), (heads, softmax.inverse)]
    if softmax.power is not None:
        found.append((heads, softmax.power))
    if softmax.refinement is not None:
        found += [(heads * (context + 1), softmax.refinement.exp), (heads, softmax.refinement.log)]
    if plan.activation is not None:
        found.append((config.hidden, plan.activation))
    if plan.routing is not None and config.experts is not None:
        sums = [plan.routing.softmax.inverse, plan.routing.softmax.power]
        found += [(config.experts, plan.routing.softmax.exp), *((1, table) for table in sums if table is not None)]
    return found


def _sizes(config: DecoderConfig, i: int, layer: LayerRanges) -> TableSizes:
    return TableSizes(
        max(
            _norm_size(config, f"layer {i}, attention norm", layer.attention_squares),
            _norm_size(config, f"layer {i}, ffn norm", layer.ffn_squares),
        ),
        _exp_size(f"layer {i}", layer.relative[0]),
        _layer_sum_size(f"layer {i}", layer.log_sum),
        _activation_size(config, f"layer {i}", layer.activation),
    )


@lru_cache
def _block(config: DecoderConfig, sizes: TableSizes, routing: RoutingSizes | None) -> BlockPlan:
    softmax = _softmax(sizes.exp, sizes.sums)
    experts = None if routing is None else _routing_plan(routing)
    return BlockPlan(_norm(config, sizes.norm), softmax, _activation(config, sizes.activation), experts)


def _phi(squares: tuple[float, float]) -> float:
    """Brings the geometric middle of the mean squares to 1."""
    return float((squares[0] * squares[1]) ** -0.25)


def _norm_size(config: DecoderConfig, where: str, squares: tuple[float, float]) -> int:
    for i in range(len(_NORM_SEGMENTS)):
        if _holds(config, i, squares):
            return i
    widest = _norm(config, len(_NORM_SEGMENTS) - 1)
    raise UserError(
        f"{where}: mean squares from {squares[0]:.3g} to {squares[1]:.3g} on the calibration text are more than the tables "
        f"take: with a margin of {_MARGIN:g} they may span {_span(_NORM_SEGMENTS[-1]) ** 2:.0f}, and 1 over their middle has "
        f"{widest.weight_bits(STREAM_BITS)} fraction bits; give the model a prefix that takes its outliers "
        "(prefix in the model's config)"
    )


def _holds(config: DecoderConfig, size: int, squares: tuple[float, float]) -> bool:
    """Whether a norm's table covers mean squares, with a margin, under phi as the ring holds it."""
    norm, span = _norm(config, size), _span(_NORM_SEGMENTS[size])
    weight = rounded_phi(_phi(squares), norm.weight_bits(STREAM_BITS)) ** 2
    return weight * squares[0] / _MARGIN >= 1 / span and weight * squares[1] * _MARGIN <= span


def _span(segments: int) -> float:
    """A norm's table of so many segments reaches from 1 / span to span."""
    return (segments / 4) ** 0.5


@lru_cache
def _norm(config: DecoderConfig, size: int) -> NormPlan:
    segments = _NORM_SEGMENTS[size]
    return NormPlan(root_table(config.width, 1 / _span(segments), _span(segments), segments), config.epsilon)


def _exp_size(where: str, relative: float) -> int:
    for i, segments in enumerate(_EXP_SEGMENTS):
        reach = max(_exp_low(segments), 2 * _exp_low(_EXP_SEGMENTS[1])) / _SCORE_MARGIN  # a refinement takes half of the scores
        if relative > reach:
            return i
    raise UserError(
        f"{where}: scores fall {-relative:.0f} below their reference on the calibration text; the table of exp reaches "
        f"{-reach:.0f}; give the model a prefix that takes its outliers (prefix in the model's config)"
    )


def _exp_low(segments: int) -> float:
    return _EXP_TOP - (segments - 1)


def _exponential(size: int) -> Table:
    segments = _EXP_SEGMENTS[size]
    return functions.exponential(_exp_low(segments), _LARGEST, segments)


def _sum_size(log_sum: tuple[float, float], margin: float = _SUM_MARGIN) -> int:
    for i, segments in enumerate(_SUM_SEGMENTS):
        if log_sum[0] > _LEAST_LOG_SUM and log_sum[1] + margin < log(segments / 4):
            return i
    return len(_SUM_SEGMENTS)


def _layer_sum_size(where: str, log_sum: tuple[float, float]) -> int:
    """As `_sum_size`. The sum of square roots that refines a reference is at least the root of the sum; its table must reach it."""
    reach = 2 * log(_HALF_SUM) - _SUM_MARGIN
    if log_sum[1] > reach:
        raise UserError(
            f"{where}: the log of a softmax's sum is {log_sum[1]:.1f} above its reference on the calibration text; its tables "
            f"reach {reach:.1f}; give the model a prefix that takes its outliers (prefix in the model's config)"
        )
    return _sum_size(log_sum)


def _softmax(exp: int, size: int) -> SoftmaxPlan:
    """Sums straight from the first references where these are good, else from a refined one."""
    inverse = functions.reciprocal(_LEAST_NORMALISED, 3.96, 128, 3)
    if size < len(_SUM_SEGMENTS):
        return SoftmaxPlan(_exponential(exp), inverse, functions.power_of_two(_SUM_SEGMENTS[size], -2))
    refinement = Refinement(_exponential(min(1, exp)), functions.twice_log(8 * _HALF_SUM, -3))  # exp of half the scores
    return SoftmaxPlan(_exponential(exp), inverse, functions.power_of_two(8192, -12), refinement)


def _routing_plan(sizes: RoutingSizes) -> RoutingPlan:
    if sizes.sums is not None:
        return RoutingPlan(_softmax(sizes.exp, sizes.sums), sizes.shift)
    inverse = functions.reciprocal(_LEAST_SUM, _ROUTING_SUM, 8192, degree=3)
    return RoutingPlan(SoftmaxPlan(_exponential(sizes.exp), inverse), sizes.shift)


def _routing(config: DecoderConfig, logits: list[tuple[float, float]]) -> RoutingSizes | None:
    """Tables for the sum of a token's k largest exponentials; it is at least exp(-shift), so the shift is kept small."""
    if config.experts_per_token is None:
        return None
    low, high = min(low for low, _ in logits), max(high for _, high in logits)
    largest = high * _SCORE_MARGIN + log(config.experts_per_token)  # log of a sum before the shift
    shift = _public(max(0.0, largest - log(_ROUTING_SUM)))
    if -shift > log(_LEAST_SUM):
        return RoutingSizes(_exp_size("router", low - shift), None, shift)
    shift = _public(largest - _LARGEST)
    if -shift > _LEAST_LOG_SUM:
        return RoutingSizes(_exp_size("router", low - shift), _sum_size((-shift, _LARGEST), margin=0.0), shift)
    most = _public(-_LEAST_LOG_SUM) - 0.5  # the largest shift, which comes in halves
    reach = (_LARGEST + most - log(config.experts_per_token)) / _SCORE_MARGIN
    raise UserError(
        f"an expert's logit is {high:.1f} above the mean of its router on the calibration text; tables of the weights' sum reach "
        f"{reach:.1f}; use a model with smaller router weights"
    )


def _public(shift: float) -> float:
    """Rounded up to halves: everyone sees it, and a logit in full precision would tell of the owner's text."""
    return ceil(2 * shift) / 2


def _activation_size(config: DecoderConfig, where: str, seen: tuple[float, float]) -> int:
    if config.family == "opt":
        return 0
    for size in range(len(_GELU if config.family == "gpt2" else _SILU)):
        table = _activation(config, size)
        if table is None or (table.low < seen[0] * _ACTIVATION_MARGIN and seen[1] * _ACTIVATION_MARGIN < table.high):
            return size
    raise UserError(
        f"{where}: the activation's inputs from {seen[0]:.0f} to {seen[1]:.0f} on the calibration text, with a margin of "
        f"{_ACTIVATION_MARGIN:g}, exceed its widest table; give the model a prefix that takes its outliers (prefix in the model's "
        "config)"
    )


@lru_cache
def _activation(config: DecoderConfig, size: int) -> Table | None:
    if config.family == "opt":
        return None
    if config.family == "gpt2":
        low, segments = _GELU[size]
        return functions.gelu(low, segments, approximate=True)
    return functions.silu(*_SILU[size])
