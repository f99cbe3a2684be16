"""What a variable of the user's function is while it is rewritten: a secret, possibly not computed yet, or a step of a softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ranges import Span

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """A value as a function of one other, element by element: however long, it is one table.

    `degree` is set while it is a polynomial; `labels` names what makes it none; `kinked` says it may not be smooth.
    """

    base: Secret
    function: Callable[[Any], Any]
    degree: int | None
    labels: tuple[str, ...] = ()
    kinked: bool = False


@dataclass(frozen=True)
class View:
    """A value as another one reshaped to `ones` and then broadcast: it is worked on, and opened, at its small size."""

    source: Secret
    ones: Shape


@dataclass(eq=False)
class Secret:
    """A value that depends on a secret. `make` computes it when something needs it, once.

    Where it is a `chain`, a `view` or a `product` (of a value and a view), what uses it may do with its parts instead.
    """

    shape: Shape
    dtype: Any
    make: Callable[[], Any]
    chain: Chain | None = None
    view: View | None = None
    product: tuple[Secret, Secret] | None = None
    bounds: Span | None = None
    made: Any = None

    def array(self) -> Any:
        """The engine's array, of `shape`."""
        if self.made is None:
            self.made = self.make()
        return self.made

    @property
    def univariate(self) -> tuple[Chain, Shape | None]:
        """The value as a chain (of itself, if need be), and the shape at which it is a view of that."""
        inner, ones = (self, None) if self.view is None else (self.view.source, self.view.ones)
        return inner.chain or Chain(inner, lambda t: t, 1), ones


@dataclass(frozen=True, eq=False)
class Masked:
    """Scores of which those `hidden` (public, broadcastable to the shape) count for nothing: not yet applied."""

    clean: Secret
    hidden: np.ndarray

    @property
    def shape(self) -> Shape:
        return self.clean.shape


@dataclass(frozen=True, eq=False)
class Peak:
    """The maximum of scores along axes; `steady` once a stop_gradient says that it only steadies a softmax."""

    scores: Secret | Masked
    axes: tuple[int, ...]
    shape: Shape
    steady: bool = False


@dataclass(frozen=True, eq=False)
class Centred:
    """Scores minus a reference near their maximum, of which those `hidden` count for nothing."""

    value: Secret
    hidden: np.ndarray | None

    @property
    def shape(self) -> Shape:
        return self.value.shape


Value = Any
"""One of the classes above, or a public value: a numpy or JAX array that every party knows."""


def is_public(value: Value) -> bool:
    return not isinstance(value, (Secret, Masked, Peak, Centred))
