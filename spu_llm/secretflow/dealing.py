"""How the dealer's output comes to the device: by SecretFlow's own sharing, or as a message to each party, which expands it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..dealer.material import Specification
from ..plugin import Plugin
from ..runtime.supply import Run
from .device import check_device, chunk_count, infeed
from .ends import DealerEnd, PartyEnd

Delivery = Literal["keys", "shares"]
"""keys: each party has a key in common with the dealer and makes most of its share from that. shares: the whole material is
shared with `dealer_output.to(device)`, 8 bytes a word to each party."""


@dataclass
class Line:
    """Takes material from the dealer's end to the device. `ends`: of its two parties, as many ranks; each has its `device` (a PYU).

    Every specification is told to the ends once.
    """

    device: Any
    ends: Sequence[Any]
    dealer: Any
    delivery: Delivery = "keys"
    numbers: dict[int, tuple[Specification, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dealer.begin(*(end.key().to(self.dealer.device) for end in self.ends))

    def material(self, run: Run) -> Any:
        """New material for one run, as a secret SPUObject, int64 [words]."""
        facts = self._number(run.specification), dict(run.operands), dict(run.keeps), dict(run.publics)
        if self.delivery == "shares":
            return self.dealer.deal_whole(*facts).to(self.device)
        messages = self.dealer.deal(*facts, _num_returns=len(self.ends))
        shape = (run.specification.words,)
        parts = {
            end.device.party: end.expand(facts[0], message.to(end.device), _num_returns=1 + chunk_count(shape))
            for end, message in zip(self.ends, messages, strict=True)
        }
        return infeed(self.device, parts, shape)

    def _number(self, specification: Specification) -> int:
        """By which the ends know a specification."""
        key = id(specification)
        if key not in self.numbers:
            self.numbers[key] = specification, len(self.numbers)  # kept, so that its id stays its own
            for end in (*self.ends, self.dealer):
                end.learn(specification)
        return self.numbers[key][1]


class SecretFlowDealer:
    """Material for functions of `spu_llm.enable` on a user's device, from a PYU that is none of its parties.

        dealer = SecretFlowDealer(device, carol)
        f = spu_llm.enable(forward, ranges=ranges)
        y = device(f.program)(dealer.material(f, ids, params), ids_object, params_object)

    Keys are new in every dealer, material in every call of `material`: give each to one call of the device only.
    """

    def __init__(self, device: Any, dealer: Any, delivery: Delivery = "keys"):
        import secretflow as sf

        first, second = map(sf.PYU, check_device(device, dealer))
        actor = sf.proxy(sf.PYUObject)
        ends = [actor(PartyEnd)(rank, device=pyu) for rank, pyu in enumerate((first, second))]
        self._line = Line(device, ends, actor(DealerEnd)(device=dealer), delivery)

    def material(self, function: Plugin, *args: Any, **kwargs: Any) -> Any:
        """A secret SPUObject for one run of `function.program` on arguments of these shapes: arrays or `ShapeDtypeStruct`s."""
        specification = function.traced(args, kwargs).dealt.specification
        return self._line.material(Run(specification, {}, {}, {}))
