"""A network between the parties, and the time that traffic takes on it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NetworkProfile(BaseModel):
    """Bandwidth and one-way delay of the link between any two parties.

    mode `none`: times are the compute measured here, traffic is free. mode `model`: traffic is added by formula, see `seconds`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    mode: Literal["none", "model"]
    bandwidth_mbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> NetworkProfile:
        if (self.mode == "model") != (self.bandwidth_mbps is not None):
            raise ValueError(f"mode {self.mode} {'needs' if self.mode == 'model' else 'takes no'} bandwidth_mbps")
        return self

    def seconds(self, compute_seconds: float, messages: int, sent_bytes: int) -> float:
        """Time of a run in which one party sends `messages` and `sent_bytes`: compute + messages * delay + bytes / bandwidth.

        Every message counts as one the receiver has to wait for, which is how SPU's two-party openings behave.
        """
        if self.bandwidth_mbps is None:
            return compute_seconds
        return compute_seconds + messages * self.delay_ms / 1e3 + sent_bytes * 8 / (self.bandwidth_mbps * 1e6)
