"""What a model's owner tells the client and the dealer: enough to run programs with it, no weight and no range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ..errors import UserError
from .cache import LayerCache, cache_shape
from .calibration import Calibration, Reference
from .config import DecoderConfig
from .decoder import Decoder
from .plan import plan_model
from .table_sizes import PlanSizes


@dataclass(frozen=True)
class Published:
    """Shapes and constants of the decoder, the tokens computed ahead, and of the plugin's plan its sizes (None: no plugin)."""

    config: DecoderConfig
    prefix: tuple[int, ...]
    sizes: PlanSizes | None = None
    reference: Reference = "learned"

    @property
    def decoder(self) -> Decoder:
        """The decoder with zeros for weights."""
        return Decoder.blind(self.config)

    @property
    def calibration(self) -> Calibration:
        """What takes the place of the owner's calibration: its sizes, and zeros for references."""
        zeros = np.zeros((self.config.width + 3, self.config.heads))
        return Calibration((), (zeros,) * self.config.layers, (1.0, 1.0), 0, self.reference, self.sizes)

    @property
    def prefix_rows(self) -> list[LayerCache]:
        """What takes the place of the prefix's cache rows: zeros."""
        shape = cache_shape(self.config, len(self.prefix))
        return [LayerCache(np.zeros(shape, np.float32), np.zeros(shape, np.float32))] * self.config.layers

    def to_json(self) -> bytes:
        return _TYPE.dump_json(self)

    @classmethod
    def from_json(cls, data: bytes) -> Published:
        """The inverse of `to_json`. Raises UserError for what is no model."""
        try:
            return _TYPE.validate_json(data)
        except ValidationError as error:
            reason = error.errors()[0]
            raise UserError(f"the owner's description of its model is not valid ({reason['loc']}: {reason['msg']})") from None


_TYPE = TypeAdapter(Published)


def publish(config: DecoderConfig, prefix: Sequence[int], calibration: Calibration | None) -> Published:
    """What the owner tells of its model; without a calibration for SPU's own operations."""
    if calibration is None:
        return Published(config, tuple(prefix))
    return Published(config, tuple(prefix), plan_model(config, calibration).public, calibration.reference)
