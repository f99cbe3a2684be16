"""Private LLM text generation on SecretFlow-SPU. See README.md; the parts are its subpackages."""

from typing import Any

_PLUGIN = ("Plugin", "Precision", "Ranges", "calibrate", "enable")


def __getattr__(name: str) -> Any:
    """The plugin's names, imported when first used: JAX and SPU take seconds to import."""
    if name in _PLUGIN:
        from . import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
