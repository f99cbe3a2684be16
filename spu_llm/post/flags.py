"""The `flags` disclosure: drafted tokens are tested under encryption, and only the place of the first rejection is opened.

POST (ICML 2025, arXiv 2505.15252), with what its test costs brought down further. For each drafted x the client draws a uniform r
and shares r q(x). With e = exp(z / T - reference) of all logits z at a position and S = sum(e), the target's p(x) is e(x) / S, and

    x is rejected iff r q(x) > p(x), that is iff r q(x) S - e(x) > 0: no division, and one comparison a position, not one a word.

The reference is a prediction of log S that is folded into the output layer (`models/centred_head.py`), so no maximum is looked
for. Where predictions miss by too much, 2 log sum exp(x / 2) of the relative logits x is subtracted as well (`refined`, as in
attention): it lies between log S and log S + log V.

Verdicts are not opened. Signal i is the sum over j <= i of rejection j times a random word w_ij of the dealer's: 0 while all tokens
so far are accepted, uniform in the ring after. The words ride in the comparison's last table, so this costs no message; opening all
signals tells how many tokens are accepted and nothing else. The client alone then gets the target's logits at that position, and
draws there what follows: from [p - q]_+ after a rejection, from p after the whole draft.

On the dealer's protocols, for g drafted tokens and a vocabulary of V words (`DealtVerifier`):

| message | refined | opened | elements |
|---|---|---|---|
| 1 | 1 | relative logits x; places of the drafted words (`primitives/entry.py`) | g V + g |
| - | 2 | sum of exp(x / 2) | g |
| - | 3 | x - 2 log of that; the same of each drafted word | g V + g |
| 2 | 4 | S; r q; x of each drafted word, unless it was opened | 3 g or 2 g |
| 3, 4 | 5, 6 | r q S - e(x), rounded; what tells its borrow | 2 g |
| 5 | 7 | signals | g |

8 bytes an element from each party. The client shares places and r q before (16 g bytes); the owner sends its share of the row (4 V)
and of the range check (8) after: 7 or 9 messages one after the other. Dealer: a key of a table of exp for each of the g V logits
(97 to 145 bytes to each party; two where refined), and some words.

| who | learns |
|---|---|
| client | how many drafted tokens are accepted; the target's logits at the first rejected or the bonus position, less a reference |
| owner | how many drafted tokens are accepted |
| dealer | the draft's length |

With `every` all verdicts are opened to both, as the paper does: they tell besides which of the drafted tokens *after* the first
rejection would have been accepted, something of the target's distribution after a text that was never written.

**Precision.** Probabilities err by the exponential: about 1.5e-4 of themselves, and 4e-8 / S (refined 6e-10 / S). The test rounds
to 2^-20 (2^-26), which is evened out over r but for probabilities below that: an eighth of it, over S, a word at most. So the total
variation distance of what is sampled from the exact distribution is below 8e-5 + 1.6e-7 V / S, where S >= 1 mostly: 1.6e-4 for
V = 512; refined 8e-5 + 2.5e-9 V / S, where 1 / S is the number of words that matter (exp of the Renyi entropy of order 1/2): 2.1e-4
for V = 512 and 100 of them. That of the exponentials alone was measured as 2e-5 to 4e-5 for V = 512 and up to 5e-4 for V = 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from math import ceil
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from ..dealer.table import ExponentialTable, Table
from ..errors import UserError
from ..generation.assisted import LOGIT_BITS
from ..generation.generate import Step
from ..generation.sampling import SamplingConfig
from ..models.centred_head import CentredHead
from ..primitives.base import define
from ..primitives.compare import negative
from ..primitives.dealing import RING, Dealing, Opened, Request, Value, share_of
from ..primitives.entry import entry
from ..primitives.fixed import Fixed
from ..primitives.functions import exponential, twice_log
from ..primitives.lookup import lookup
from ..primitives.range_check import violation
from ..primitives.scale import scale
from ..runtime import Slot
from ..runtime.assisted import Assisted, DealtProgram
from .draft import Draft
from .residual import draw, residual, target_random
from .scores import Scores

LARGEST_VOCABULARY = 4096

_MORE, _ENOUGH = b"1", b"0"
_REJECTED = 1.0 - 2.0**-20  # r q of a token that nobody wants any more: above all p but one that is as good as certain
_LEAST_TEMPERATURE = 1e-4  # below it sampling is greedy
_INSTEAD = "set decoding.disclosure: distribution"

_PLACE_BITS = 14  # of exp's table: its relative error is about one unit of the place
_THRESHOLD_BITS = 2 * _PLACE_BITS  # of r q: times S, rounded to the table's bits, it has those of what is looked up
_ROOM = 34  # the table's bits, and those that S takes above 1: with the places' they are what can be lifted
_KEPT = 5  # of the table's bits, how many r q S - e(x) has less when its sign is taken, so that 30 bits hold it
_INVERSE_BITS = 16  # of 1 / T

_SEGMENTS = (64, 128, 256, 512)
_SCORE_MARGIN = 1.25
_LOG_SUM_MARGIN = 1.0


@dataclass(frozen=True)
class _Kind:
    """Constants of a test. bits: of exp's table, below half a unit of which a probability is 0; S must stay below 2^(_ROOM - bits),
    and the range check holds it to half of that. top: where the table ends; largest: its values are cut above exp of this, so that
    one alone cannot drive S over its bound. usual: where the offset puts the largest log sum of the text; least: what log sums
    should stay above.
    """

    bits: int
    top: float
    largest: float
    usual: float
    least: float


_DIRECT = _Kind(bits=25, top=8.0, largest=5.0, usual=3.5, least=-2.5)
_REFINED = _Kind(bits=31, top=4.0, largest=1.0, usual=12.5, least=0.0)
_HALF_TOP, _HALF_LARGEST = 12.0, 8.0  # of exp(x / 2), and the sum of these is below 2044
_LOG = twice_log(512, 2)

MOST_SPAN = _DIRECT.usual - _DIRECT.least - _LOG_SUM_MARGIN
"""What log sums may span around their prediction without a refinement: `most` of `centred_head`."""


@dataclass(frozen=True)
class FlagsPlan:
    """What is public of the test: `offset` of relative logits z / temperature - offset."""

    vocabulary: int
    temperature: float
    offset: float

    @property
    def factor(self) -> int:
        """1 / temperature with _INVERSE_BITS fraction bits, as the secure test has it."""
        return round(2.0**_INVERSE_BITS / self.temperature)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """The target's distribution [vocabulary] at one position, on the client."""
        scaled = np.asarray(logits, np.float64) * (self.factor / 2.0**_INVERSE_BITS)
        weights = np.exp(scaled - scaled.max())
        return weights / weights.sum()


@dataclass(frozen=True)
class DealtPlan(FlagsPlan):
    """The test by dealer protocols: segments of its table of exp and, where refined, of that of exp(x / 2)."""

    segments: int
    half_segments: int | None = None

    @property
    def table(self) -> Table:
        return _table(_DIRECT if self.half_segments is None else _REFINED, self.segments)


@lru_cache
def _table(kind: _Kind, segments: int) -> Table:
    low = kind.top - (segments - 1)
    return ExponentialTable(np.exp, jnp.exp, low, segments, 0, 6, bits=kind.bits, place_bits=_PLACE_BITS, largest=kind.largest)


@lru_cache
def _half_table(segments: int) -> Table:
    return exponential(_HALF_TOP - (segments - 1), _HALF_LARGEST, segments)


def check_sampling(sampling: SamplingConfig, vocabulary: int) -> None:
    """Raise UserError for what only the other disclosure does."""
    if sampling.temperature < _LEAST_TEMPERATURE:
        raise UserError(
            f"generation.sampling.temperature {sampling.temperature:g}: disclosure flags does not take the best token; {_INSTEAD}"
        )
    for name, value, usual in (("top_k", sampling.top_k, None), ("top_p", sampling.top_p, 1.0)):
        if value != usual:
            raise UserError(f"generation.sampling.{name} {value:g}: disclosure flags samples by temperature alone; {_INSTEAD}")
    if vocabulary > LARGEST_VOCABULARY:
        tables = 16 * vocabulary * _SEGMENTS[1] * 8 / 1e9
        raise UserError(
            f"the model's vocabulary of {vocabulary} words: disclosure flags takes the exponential of each at each position, for "
            f"which 16 drafted tokens unpack {tables:.2g} GB of tables a party and round; it serves up to {LARGEST_VOCABULARY}; "
            f"{_INSTEAD}"
        )


def plan_dealt(head: CentredHead, sampling: SamplingConfig) -> DealtPlan:
    """The plan for a decoder whose head was centred for the sampling's temperature. Raises UserError where it cannot serve."""
    kind = _REFINED if head.halved else _DIRECT
    common = plan_offset(head, sampling, kind.usual, kind.least)
    least, table = head.least - common.offset, partial(_table, kind)
    if not head.halved:
        return DealtPlan(**asdict(common), segments=_size(least, table))
    return DealtPlan(**asdict(common), segments=_size(head.fall, table), half_segments=_size(least / 2, _half_table))


def plan_offset(head: CentredHead, sampling: SamplingConfig, usual: float, least: float) -> FlagsPlan:
    """The plan that puts the largest log sum of the text at `usual`. Raises UserError where the least is not above `least` then."""
    vocabulary = head.decoder.config.vocabulary
    check_sampling(sampling, vocabulary)
    if head.temperature != sampling.temperature:
        raise ValueError(f"the head was centred for temperature {head.temperature:g}, not for {sampling.temperature:g}")
    most = usual - least - _LOG_SUM_MARGIN
    if head.span > most:
        raise UserError(
            f"generation.sampling.temperature {sampling.temperature:g}: logs of the softmax's sums span {head.span:.1f} around "
            f"their prediction on the calibration text, more than the {most:g} of disclosure flags; raise it, or {_INSTEAD}"
        )
    offset = ceil(4 * (head.log_sum[1] - usual)) / 4  # in quarters: more of it would tell of the owner's text
    return FlagsPlan(vocabulary, sampling.temperature, offset)


def _size(least: float, table: Callable[[int], Table]) -> int:
    """Segments of the smallest table that reaches so far down, with a margin."""
    for segments in _SEGMENTS:
        if _SCORE_MARGIN * least > table(segments).low:
            return segments
    raise UserError(
        f"relative logits down to {least:.0f} on the calibration text leave the widest table of exp, which reaches "
        f"{table(_SEGMENTS[-1]).low:.0f}; raise generation.sampling.temperature or {_INSTEAD}"
    )


# The test on the dealer's protocols


def signals(plan: DealtPlan, logits: Fixed, draft: Fixed, every: bool = False) -> Any:
    """logits [..., g, vocabulary] and the client's `draft` [2, ..., g] (`encode_draft`) -> int64 [..., g], public.

    0 up to the first rejection, uniform words from there on; with `every` 1 at each rejection and 0 elsewhere. 5 or 7 rounds.
    """
    place, threshold = Fixed(draft.raw[0], 0), Fixed(draft.raw[1], _THRESHOLD_BITS)
    x = relative(plan, logits)
    drafted = entry(x, place)
    if plan.half_segments is not None:
        half = Fixed(x.raw, x.bits + 1, x.modulus)
        reference = lookup(lookup(half, _half_table(plan.half_segments), RING).sum(-1), _LOG, RING)
        x, drafted = x - reference.reshape(*reference.shape, 1), drafted - reference
    total = lookup(x, plan.table, RING).sum(-1)
    margin = lookup(drafted, plan.table, RING) - scale(total, threshold, plan.table.bits, _THRESHOLD_BITS)
    return signals_p.bind(margin.raw, total.raw, every=every)


def relative(plan: FlagsPlan, logits: Fixed) -> Fixed:
    """z / T - offset: local."""
    bits = logits.bits + _INVERSE_BITS
    return Fixed(logits.raw * plan.factor - round(plan.offset * 2.0**bits), bits, logits.modulus)


def encode_draft(tokens: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The client's part of the test, int64 [2, ..., g]: drafted tokens, and r q of each, float64 in [0, 1)."""
    return np.stack([np.asarray(tokens, np.int64), np.floor(thresholds * 2.0**_THRESHOLD_BITS).astype(np.int64)])


def first_rejection(signal: np.ndarray) -> np.ndarray:
    """How many tokens are accepted, from opened signals [..., g]."""
    return np.argmax(np.concatenate([signal != 0, np.ones((*signal.shape[:-1], 1), bool)], -1), -1)


def _plain(margin: Any, total: Any, *, every: bool) -> Any:
    rejected = (_halved(margin) < 0).astype(jnp.int64)
    return rejected if every else jnp.cumsum(rejected, -1)


def _dealer(dealing: Dealing, margin: Value, total: Value, *, every: bool) -> Generator[Request, None, Any]:
    margin = Value(_halved(share_of(margin)))
    dealing.request(margin)
    if dealing.violations is not None:  # total was opened for its product
        dealing.violations.append((yield from violation(dealing, total, 0, 2 * _PLACE_BITS + _ROOM - 1, RING)))
    opened = yield from dealing.opened(margin, 2 * _PLACE_BITS + _KEPT)
    words = [] if every else [dealing.recorder.uniform(margin.shape) for _ in range(margin.shape[-1])]
    carried = [Opened(jnp.int64(0), word) for word in words]
    rejected, products = yield from negative(dealing, opened, _ROOM - _KEPT + 1, carried)
    shared = rejected if every else jnp.stack([jnp.sum(each[..., : i + 1], -1) for i, each in enumerate(products)], -1)
    request = Request(shared)
    dealing.pending.append(request)
    yield request
    return request.result


def _halved(margin: Any) -> Any:
    """Half a unit less, as opening with truncation adds half a unit on the average."""
    return margin - (1 << (2 * _PLACE_BITS + _KEPT - 1))


signals_p = define("signals", _plain, _plain, _dealer)


# Decoding


class Verifier(Protocol):
    """Runs the secure test on the logits of a decoder's last pass."""

    plan: FlagsPlan

    def accepted(self, tokens: np.ndarray, thresholds: np.ndarray) -> int:
        """How many drafted tokens are accepted: known to both parties. What is not the client's draft does not count."""


class DealtVerifier:
    """The test by dealer protocols, on a session's variable `logits`. `every` opens all verdicts: see above what that tells."""

    def __init__(self, assisted: Assisted, plan: DealtPlan, every: bool = False):
        self.plan: FlagsPlan = plan
        self._dealt = plan
        self._assisted = assisted
        self._every = every
        self._programs: dict[int, DealtProgram] = {}

    def accepted(self, tokens: np.ndarray, thresholds: np.ndarray) -> int:
        """Raises UserError, at the client, where an exponential left its table."""
        session = self._assisted.session
        session.share("flags.draft", encode_draft(tokens, thresholds), "client")
        self._assisted.run(self.program(len(tokens)), ["logits", "flags.draft"], ["flags.signals"])
        self._assisted.check_ranges()
        return int(first_rejection(session.words("flags.signals")[0]))  # public: each party's word is the value

    def program(self, count: int) -> DealtProgram:
        """The test of `count` drafted tokens."""
        if count not in self._programs:
            slots = Slot((count + 1, self.plan.vocabulary), np.int64), Slot((2, count), np.int64)
            self._programs[count] = self._assisted.compile("flags", self._signals, slots, (None,))
        return self._programs[count]

    def _signals(self, logits: Any, draft: Any) -> Any:
        return signals(self._dealt, Fixed(logits[:-1], LOGIT_BITS), Fixed(draft, 0), self._every)


class Flags:
    """Verifies drafts on the rows of `decoder`'s last pass: a `Disclosure` of generate.py."""

    def __init__(self, decoder: Scores, sampling: SamplingConfig, verifier: Verifier):
        check_sampling(sampling, verifier.plan.vocabulary)
        self._decoder = decoder
        self._verifier = verifier
        self._seed = sampling.drawn_seed

    def first(self, logits: np.ndarray, position: int) -> Step:
        """The token after a prompt, whose logits the client has."""
        return Step(draw(target_random(self._seed, position), self._verifier.plan.probabilities(logits)), logits)

    def verify(self, draft: Draft, position: int, most: int, ends: Collection[int]) -> list[Step]:
        """What follows a pass over a token and the drafted ones after it; the first step has `position` in the sequence.

        The accepted tokens, of which the client gets no logits, and one more. At most `most`, none after one of `ends`.
        """
        count = len(draft.tokens)
        random = [target_random(self._seed, position + i) for i in range(count + 1)]
        chosen = draft.probabilities[np.arange(count), draft.tokens] if count else np.zeros(0)
        last = min([most, *(i + 1 for i, token in enumerate(draft.tokens) if token in ends)])  # drafted tokens that may be wanted
        thresholds = np.array([each.random() for each in random[:count]]) * chosen
        thresholds[last:] = _REJECTED  # what is behind is not tested
        accepted = self._accepted(draft.tokens, thresholds)
        steps = [Step(token, None) for token in draft.tokens[:accepted]]
        ended = accepted >= last
        self._decoder.session.broadcast(_ENOUGH if ended else _MORE, "client")
        if ended:
            return steps[:last]
        logits = self._decoder.row(accepted)
        p = self._verifier.plan.probabilities(logits)
        instead = residual(draft.probabilities[accepted], p) if accepted < count else p
        return [*steps, Step(draw(random[accepted], instead), logits)]

    def follow(self, drafted: int) -> int:
        """The part of a party that is not the client; gives the number of steps."""
        accepted = self._accepted([0] * drafted, np.zeros(drafted))
        if self._decoder.session.broadcast(b"", "client") == _ENOUGH:
            return accepted
        self._decoder.row(accepted)
        return accepted + 1

    def _accepted(self, tokens: Sequence[int], thresholds: np.ndarray) -> int:
        return self._verifier.accepted(np.asarray(tokens), thresholds) if len(tokens) else 0
