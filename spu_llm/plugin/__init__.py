"""Unmodified JAX and Flax code on the primitives: trace, rewrite, look functions up in tables of known range."""

from .calibrate import calibrate
from .enable import enable
from .engine import Precision
from .plugin import Plugin
from .ranges import Ranges

__all__ = ["Plugin", "Precision", "Ranges", "calibrate", "enable"]
