"""What POST needs of a secure decoder: several tokens a pass, whose logits stay secret until they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..runtime import Session


class Scores(Protocol):
    """SecureDecoder and AssistedDecoder are such."""

    session: Session
    length: int

    def advance(self, tokens: Sequence[int]) -> np.ndarray: ...

    def score(self, tokens: Sequence[int]) -> None: ...

    def row(self, i: int) -> np.ndarray: ...

    def roll_back(self, length: int) -> None: ...
