"""Hidden units that never fire, made useful again before a decoder is trained further.

Each becomes a copy of a unit of its group that does fire, its inputs a little changed, and the copies share what the unit wrote:
the decoder computes nearly what it did, and training makes of the copies what serves (Net2Net's widening, ICLR 2016, in a layer).
"""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from .decoder import Decoder


def revived(decoder: Decoder, fires: np.ndarray, group: int, noise: float, seed: int) -> Decoder:
    """A decoder of the OPT family whose every hidden unit fires about as often as another one of its group of neighbours.

    fires [layers, ffn] bool: units that need no reviving. A group without one is copied from its whole layer. noise: of a copy's
    inputs, relative to their root mean square; 0 changes nothing of what is computed. Raises UserError where none of a layer fires.
    """
    random = np.random.default_rng(seed)
    layers = []
    for i, (layer, alive) in enumerate(zip(decoder.params["layers"], fires, strict=True)):
        if not alive.any():
            raise UserError(f"layer {i}: none of its {len(alive)} hidden units fires on the text; give other text")
        source = _sources(alive, group, random)
        up, down = (np.asarray(layer[name]["kernel"]) for name in ("up", "down"))
        size = np.sqrt(np.mean(up**2, axis=0))[source] * ~alive
        copied = up[:, source] + noise * size * random.standard_normal(up.shape)
        shared = down[source] / np.bincount(source, minlength=len(alive))[source, None]
        changed = {
            "up": {"kernel": copied.astype(up.dtype), "bias": layer["up"]["bias"][source]},
            "down": {**layer["down"], "kernel": shared.astype(down.dtype)},
        }
        layers.append({**layer, **changed})
    return Decoder(decoder.config, {**decoder.params, "layers": layers})


def _sources(alive: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
    """[ffn] of each unit: itself where it is alive, else a unit of its group that is."""
    source = np.arange(len(alive))
    for units in source.reshape(-1, group).copy():
        living = units[alive[units]]
        dead = units[~alive[units]]
        source[dead] = random.choice(living if len(living) else np.flatnonzero(alive), len(dead))
    return source
