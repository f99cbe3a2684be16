"""Private LLM text generation on SecretFlow-SPU. What is listed here is for users and stays; docs/api.md describes it.

Importing the package changes nothing and takes no time: JAX and SPU, which take seconds, are imported with the first name used.
The subpackages are for those who build on them: what they hold may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for those who read without running
    from .errors import UserError
    from .experiment import load_experiment, run_experiment
    from .experiment.schema import load_model
    from .generation import AssistedDecoder, Sampler, SamplingConfig, SecureDecoder, generate
    from .models import load_checkpoint
    from .models.calibration_file import calibration_for
    from .plugin import Plugin, Precision, Ranges, calibrate, enable
    from .runtime import ProtocolConfig, Session, Slot

    __version__: str

__all__ = [
    "AssistedDecoder",
    "Plugin",
    "Precision",
    "ProtocolConfig",
    "Ranges",
    "Sampler",
    "SamplingConfig",
    "SecureDecoder",
    "Session",
    "Slot",
    "UserError",
    "calibrate",
    "calibration_for",
    "enable",
    "generate",
    "load_checkpoint",
    "load_experiment",
    "load_model",
    "run_experiment",
]

_PLACES = {
    "errors": ("UserError",),
    "experiment": ("load_experiment", "run_experiment"),
    "experiment.schema": ("load_model",),
    "generation": ("AssistedDecoder", "Sampler", "SamplingConfig", "SecureDecoder", "generate"),
    "models": ("load_checkpoint",),
    "models.calibration_file": ("calibration_for",),
    "plugin": ("Plugin", "Precision", "Ranges", "calibrate", "enable"),
    "runtime": ("ProtocolConfig", "Session", "Slot"),
}


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version(__name__)
        for module, names in _PLACES.items():
            if name in names:
                return getattr(import_module(f".{module}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", *(name for name in globals() if name.startswith("__"))]
