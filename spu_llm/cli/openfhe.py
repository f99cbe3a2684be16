"""OpenFHE, which not every Python can have: imported when a command needs it."""

from __future__ import annotations

import os

from ..errors import UserError


def need_openfhe() -> None:
    """Raise UserError where OpenFHE is not installed. It gets one thread unless OMP_NUM_THREADS says otherwise: others spin."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import openfhe  # noqa: F401
    except ImportError as error:
        raise UserError(f"OpenFHE: {error}; install spu_llm's extra `arhe` on Python 3.10") from None
