"""Generating text on a SecretFlow device: the client, the owner and the dealer are PYUs, the first two also the SPU's parties.

SecretFlow is imported when a decoder or a dealer is made, so that the rest of the package works without it. `decoder.py` and
`dealing.py` are for users: text from a model, and material for functions of their own. `device.py` is a `Session` whose parties are
the device's, `ends.py` what runs at each PYU.
"""

from .dealing import SecretFlowDealer
from .decoder import SecretFlowDecoder
from .model import OwnerModel, load_model

__all__ = ["OwnerModel", "SecretFlowDealer", "SecretFlowDecoder", "load_model"]
