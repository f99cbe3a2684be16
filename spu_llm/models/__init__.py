"""Decoders: configurations, Flax modules, checkpoints, tokenizers."""

from .checkpoint import Checkpoint, load_checkpoint
from .config import DecoderConfig
from .decoder import Decoder
from .plain import PlainDecoder
from .tokenizer import Tokenizer

__all__ = ["Checkpoint", "Decoder", "DecoderConfig", "PlainDecoder", "Tokenizer", "load_checkpoint"]
