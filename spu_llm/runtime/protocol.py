"""Which MPC protocol runs, in which ring, between how many parties."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator
from spu import libspu

from ..network.certificates import Identity
from .beaver import BeaverConfig, with_third_party

ROLES = ("client", "owner", "helper")
"""Party names by rank. The client holds the prompt, the owner the weights; only three-party protocols have a helper."""

_PARTIES = {"SEMI2K": (2, 3), "ABY3": (3,), "CHEETAH": (2,)}


class ProtocolConfig(BaseModel):
    """An SPU protocol and its fixed-point format; public, and the same at all parties. Raises ValueError for what does not fit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Literal["SEMI2K", "ABY3", "CHEETAH"] = "SEMI2K"
    """The protocol; whom each trusts is in docs/leakage.md."""

    ring: Literal["FM64", "FM128"] = "FM64"
    """The integers modulo 2^64 or 2^128 that shares are of."""

    fraction_bits: int = 18
    """f: a real x is held as round(x * 2^f). From 8 to 24 in FM64, to 56 in FM128."""

    parties: int | None = None
    """Left out: 3 for ABY3, else 2. SEMI2K also takes 3."""

    beaver: BeaverConfig | None = None
    """The server of a third party's triples for stock SEMI2K (`spu-llm beaver`); without it the client's runtime makes them."""

    @model_validator(mode="after")
    def _check(self) -> ProtocolConfig:
        allowed = _PARTIES[self.name]
        if self.parties is not None and self.parties not in allowed:
            choice = " or ".join(map(str, allowed))
            raise ValueError(f"{self.name} runs between {choice} parties, not {self.parties}; set parties: {allowed[0]}")
        if self.beaver is not None and self.name != "SEMI2K":
            raise ValueError(f"beaver is for SEMI2K, not for {self.name}; leave it out or set name: SEMI2K")
        limit = self.ring_bits // 2 - 8  # a product has 2f fraction bits and 16 integer bits must remain
        if not 8 <= self.fraction_bits <= limit:
            raise ValueError(f"fraction_bits is {self.fraction_bits}; {self.ring} needs a value from 8 to {limit}")
        return self

    @property
    def ring_bits(self) -> int:
        """Bits of an element of the ring, as it is sent."""
        return 64 if self.ring == "FM64" else 128

    @property
    def world_size(self) -> int:
        """How many parties take part."""
        return self.parties or _PARTIES[self.name][0]

    @property
    def roles(self) -> tuple[str, ...]:
        """The parties' names, by rank."""
        return ROLES[: self.world_size]

    @property
    def trust(self) -> str:
        """What the stock protocol rests on, for the report (see docs/leakage.md)."""
        if self.beaver is not None:
            return "third-party Beaver server, which sees no input, weight or opening, and colludes with no party"
        if self.name == "SEMI2K":
            return "test-only: the client's runtime makes the multiplication triples (SPU TrustedFirstParty)"
        return {"ABY3": "honest majority of three parties", "CHEETAH": "two parties, no helper"}[self.name]

    @property
    def ciphertexts(self) -> bool:
        """Whether products of matrices send ciphertexts: half as many where one side is a party's own, and hardly more for large
        ones than for small ones (see cheetah.py)."""
        return self.name == "CHEETAH"

    @property
    def failure_probability(self) -> float:
        """Chance that a pass is spoilt by a truncation. SPU's default one is right whenever |raw| < 2^(ring_bits - 2).

        It would not be 0 under SPU's `trunc_allow_msb_error`, which saves a message and which we leave off.
        """
        return 0.0

    def spu_config(self, profile: bool, identity: Identity | None = None) -> libspu.RuntimeConfig:
        """SPU's own configuration; `profile` makes this party log its traffic, which `profile.py` reads.

        `identity` is the party's own, for mutual TLS with a Beaver server.
        """
        config = libspu.RuntimeConfig(
            protocol=getattr(libspu.ProtocolKind, self.name),
            field=getattr(libspu.FieldType, self.ring),
            fxp_fraction_bits=self.fraction_bits,
        )
        # SPU's default exp is garbage below -512, which masked attention reaches; PADE is right at every mask tried.
        config.fxp_exp_mode = libspu.RuntimeConfig.ExpMode.EXP_PADE
        config.experimental_enable_colocated_optimization = self.ciphertexts  # else what `share_operand` kept is shared
        config.enable_pphlo_profile = profile
        return config if self.beaver is None else with_third_party(config, self.beaver, self.world_size, identity)
