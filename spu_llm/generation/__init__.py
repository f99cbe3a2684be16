"""Generating text, in plaintext and between parties."""

from .assisted import AssistedDecoder
from .generate import Step, TextStream, generate
from .sampling import Sampler, SamplingConfig
from .secure import SecureDecoder

__all__ = ["AssistedDecoder", "Sampler", "SamplingConfig", "SecureDecoder", "Step", "TextStream", "generate"]
