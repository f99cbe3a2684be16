"""Which tables a model's functions have: the public part of a plan. It tells the owner's ranges to a size, nothing more."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, order=True)
class TableSizes:
    """Which of the sizes each function of a layer has: indices into the sizes of `plan.py`."""

    norm: int
    exp: int
    sums: int
    activation: int

    def joined(self, other: TableSizes) -> TableSizes:
        """Sizes that serve both."""
        return TableSizes(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


@dataclass(frozen=True)
class RoutingSizes:
    """Indices of the tables that make weights of experts' logits (sums None: one for the inverse), and the shift of logits."""

    exp: int
    sums: int | None
    shift: float


@dataclass(frozen=True)
class PlanSizes:
    """What is public of a plan: which tables each layer, the final norm and the routing have. It tells ranges to a size."""

    layers: tuple[TableSizes, ...]
    final: int
    routing: RoutingSizes | None
