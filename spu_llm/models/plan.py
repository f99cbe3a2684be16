"""From ranges on text to the tables of a model: wide enough for what was seen and a margin, else an error before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2

from ..dealer.table import Table
from ..errors import UserError
from ..primitives import functions
from ..primitives.attention import Refinement, SoftmaxPlan
from ..primitives.norm import UNIT_BITS, NormPlan, root_table, square_bits
from .calibration import Calibration
from .config import DecoderConfig
from .fixed_block import STREAM_BITS, BlockPlan

_MARGIN = 2.0  # how far beyond what was seen a range is made to reach
_LARGEST = 6.0  # exp(score - reference) is cut at exp of this: calibration keeps it rare, and a cut weight is a large one
_SCORE_MARGIN = 1.25
_LEAST_SUM = 0.05
_ACTIVATION_MARGIN = 1.3
_GOOD_SUMS = (-3.5, 6.9)  # logs of sums over exp(reference) that the tables of one stage take, at the worst by cutting weights
_SPREAD = 1000.0  # a norm's table covers mean squares up to this many units


@dataclass(frozen=True)
class ModelPlan:
    """Tables for every layer, and each layer's units (their squares are powers of two) of its two norms; the final norm's unit."""

    block: BlockPlan
    units: tuple[tuple[float, float], ...]
    final_unit: float


def plan_model(config: DecoderConfig, calibration: Calibration) -> ModelPlan:
    """Raises UserError where a quantity spans more than a table can hold."""
    units = tuple(
        (_unit(f"layer {i}, attention norm", layer.attention_squares), _unit(f"layer {i}, ffn norm", layer.ffn_squares))
        for i, layer in enumerate(calibration.layers)
    )
    final = _unit("final norm", calibration.final_squares)
    lows = [layer.activation[0] for layer in calibration.layers]
    highs = [layer.activation[1] for layer in calibration.layers]
    relative = min(layer.relative[0] for layer in calibration.layers)
    exp = _exponential(relative)
    softmax = _softmax(exp, [layer.log_sum for layer in calibration.layers])
    root = root_table(config.width, 1 / _MARGIN, _SPREAD, config.epsilon, segments=8192)
    norm = NormPlan(root, square_bits=square_bits(root, STREAM_BITS))
    return ModelPlan(BlockPlan(norm, softmax, _activation(config, min(lows), max(highs))), units, final)


def _unit(where: str, squares: tuple[float, float]) -> float:
    """A unit not above the least root mean square seen; its square is a power of two."""
    unit = 2.0 ** (min(floor(log2(squares[0])), UNIT_BITS) / 2)
    if squares[1] / unit**2 * _MARGIN > _SPREAD:
        raise UserError(
            f"{where}: mean squares from {squares[0]:.3g} to {squares[1]:.3g} on the calibration text span more than the table's "
            f"{_SPREAD:g}; give the model a prefix that takes its outliers (prefix in the model's config)"
        )
    return unit


def _exponential(relative: float) -> Table:
    """A table that reaches low enough for scores so far below their reference, and 14 above it."""
    for segments in (64, 128):
        low = 14.0 - 2 * (segments - 1)
        if relative * _SCORE_MARGIN > low:
            return functions.exponential(low, _LARGEST, segments)
    raise UserError(
        f"scores fall {-relative:.0f} below their reference on the calibration text; the table of exp reaches {-low:.0f}"
    )


def _softmax(exp: Table, log_sums: list[tuple[float, float]]) -> SoftmaxPlan:
    """Sums straight from the learned references where these are good, else from a refined one."""
    inverse = functions.reciprocal(_LEAST_SUM, 3.98, degree=3)
    low, high = min(low for low, _ in log_sums), max(high for _, high in log_sums)
    if _GOOD_SUMS[0] < low and high < _GOOD_SUMS[1]:
        return SoftmaxPlan(exp, inverse, functions.power_of_two(8192, -3))
    return SoftmaxPlan(exp, inverse, functions.power_of_two(8192, -12), Refinement(exp, functions.twice_log(8192, -3)))


def _activation(config: DecoderConfig, low: float, high: float) -> Table | None:
    if config.family == "opt":
        return None
    if config.family == "gpt2":
        return functions.gelu(-8.0 if low > -6 and high < 6 else -16.0, 64 if low > -6 and high < 6 else 128, approximate=True)
    for segments in (32, 64):
        table = functions.silu(-52.0 * segments / 32, segments)
        if table.low < low * _ACTIVATION_MARGIN and high * _ACTIVATION_MARGIN < table.high:
            return table
    raise UserError(
        f"gates from {low:.0f} to {high:.0f} on the calibration text exceed the table of SiLU, {table.low} to {table.high:.0f}"
    )
