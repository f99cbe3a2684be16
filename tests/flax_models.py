"""transformers' Flax models of checkpoints, loaded fast."""

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from transformers import FlaxPreTrainedModel


def pretrained(kind: type[FlaxPreTrainedModel], folder: Path) -> Any:
    """kind.from_pretrained(folder), which would compile and draw random parameters first, to replace them by the file's."""
    init = kind.init_weights

    def zeros(self: Any, rng: jax.Array, shape: tuple, params: Any = None) -> Any:
        shapes = jax.eval_shape(lambda: init(self, rng, shape, params))
        return jax.tree_util.tree_map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    with mock.patch.object(kind, "init_weights", zeros):
        return kind.from_pretrained(folder)
