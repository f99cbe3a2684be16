"""A network between the parties, and the time that traffic takes on it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class NetworkProfile(BaseModel):
    """The link between any two parties, and how its time is had."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """By which reports call it."""

    mode: Literal["none", "model", "link"]
    """`none`: times are the compute measured here, traffic is free. `model`: compute + messages x delay + bytes / bandwidth.
    `link`: the parties are processes, and their traffic takes an emulated link, so that measured time has it in."""

    bandwidth_mbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Megabits a second in each direction; needed but for mode `none`, which takes none."""

    delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Milliseconds that a message takes one way."""

    @model_validator(mode="after")
    def _check(self) -> NetworkProfile:
        if (self.mode == "none") == (self.bandwidth_mbps is not None):
            raise ValueError(f"mode {self.mode} {'takes no' if self.mode == 'none' else 'needs'} bandwidth_mbps")
        return self

    def seconds(self, compute_seconds: float, messages: int, sent_bytes: int, concurrent: int = 0) -> float:
        """Time of a run in which one party sends `messages` and `sent_bytes`:
        compute + (messages - concurrent) * delay + bytes / bandwidth.

        SPU's openings between two parties are exchanges: both send, both wait for the other's, one after another, so each message
        costs a delay (libspu's `Communicator::allReduce`; what it could open together it packs into one message). `concurrent` are
        those messages that leave together with the one before, because their sender waits for nothing in between: all but the
        first of a row of inputs that one party shares, all but one of what an opening sends to several peers. The two directions
        do not disturb each other. Framing, answers and acknowledgements (see link.py) are left out, as they delay nothing; so is
        the link's own compute beyond what `compute_seconds` has of it.
        """
        if self.bandwidth_mbps is None:
            return compute_seconds
        awaited = messages - concurrent
        return compute_seconds + awaited * self.delay_ms / 1e3 + sent_bytes * 8 / (self.bandwidth_mbps * 1e6)
