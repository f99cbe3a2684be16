"""What a request must satisfy before anything is computed for it.

SPU 0.9.4's client has a defect that these checks catch: a matrix product whose operand is in the Beaver cache for the first time
(`BeaverTtp::Dot`, `spu.experimental.make_cached_var`) draws the operand's mask without moving its counter, so that the product's
own mask, and those of later operations, are the same numbers. What is opened and adjusted then tells parties of the cached
operand. Such a request has masks that overlap, and is refused.
"""

from __future__ import annotations

from .prg import BLOCK
from .refusal import Refusal
from .ring import RINGS
from .wire import Drawn, Request

INPUTS = {
    "AdjustMul": 3,
    "AdjustMulPriv": 2,
    "AdjustSquare": 2,
    "AdjustDot": 3,
    "AdjustAnd": 3,
    "AdjustTrunc": 2,
    "AdjustTruncPr": 3,
    "AdjustRandBit": 1,
    "AdjustEqz": 2,
    "AdjustPerm": 2,
}
"""How many masks a request of each kind names; the last of them (the last two for TruncPr) hide the adjustment."""

_LARGEST = 1 << 32  # bytes: matrices are held whole
_MOST_PERMUTED = 1 << 24  # elements: shuffled one by one
_MOST_PARTIES = 3  # SEMI2K here; more seeds would be so much more to decrypt for one request
_COUNTERS = 1 << 64


def check(request: Request) -> None:
    """Raises Refusal, which says what is wrong, unless the request is one that SPU's client makes and may be answered."""
    kind, inputs = request.kind, request.inputs
    if len(inputs) != INPUTS[kind]:
        raise Refusal(f"{kind} takes {INPUTS[kind]} prg_inputs, not {len(inputs)}")
    if request.width not in RINGS:
        raise Refusal(f"field_size is {request.width}; rings have 4, 8 or 16 bytes")
    parties = len(inputs[0].seeds)
    if parties < 2:
        raise Refusal(f"seeds of {parties} parties; a correlation is between 2 or more")
    if parties > _MOST_PARTIES:
        raise Refusal(f"seeds of {parties} parties; this server takes up to {_MOST_PARTIES}")
    for each in inputs:
        _check_drawn(each, parties, request.width)
    if kind == "AdjustDot":
        _check_product(request)
    elif any(each.size != inputs[0].size for each in inputs):
        raise Refusal(f"{kind} takes arrays of one size, not {', '.join(str(each.size) for each in inputs)} bytes")
    if kind == "AdjustPerm":
        _check_permutation(request)
    _check_bits(request)
    _check_fresh(request)


def _check_drawn(drawn: Drawn, parties: int, width: int) -> None:
    if drawn.size <= 0 or drawn.size % width:
        raise Refusal(f"buffer_len is {drawn.size}; elements of {width} bytes need a multiple of that, above 0")
    if len(drawn.seeds) != parties:
        raise Refusal(f"seeds of {parties} and of {len(drawn.seeds)} parties in one request; name every party's seed, by rank")
    if len(set(drawn.seeds)) != parties:
        raise Refusal("one encrypted seed stands for two ranks; each party sends its own")
    if drawn.count + drawn.size // BLOCK >= _COUNTERS:
        raise Refusal(f"prg_count {drawn.count} with buffer_len {drawn.size} goes beyond 64 bits")


def _check_product(request: Request) -> None:
    m, n, k = request.shape
    if len(request.transposed) != 3 or request.transposed[2]:
        raise Refusal("AdjustDot takes three transpose_inputs, the last false")
    for drawn, size in zip(request.inputs, (m * k, k * n, m * n), strict=True):
        if drawn.size != size * request.width:
            raise Refusal(f"buffer_len is {drawn.size}, but M={m}, N={n}, K={k} make it {size * request.width}")
        _check_size(drawn)


def _check_permutation(request: Request) -> None:
    permuted, first = request.permuted, request.inputs[0]
    _check_size(first)
    if permuted is None or permuted.n != first.size // request.width:
        raise Refusal(f"a permutation of {permuted and permuted.n} elements for {first.size // request.width}")
    if permuted.n > _MOST_PERMUTED:
        raise Refusal(f"a permutation of {permuted.n} elements; up to {_MOST_PERMUTED} are made. Use smaller pieces")
    if permuted.seed not in first.seeds:
        raise Refusal("the seed of the permutation is that of no rank; the permuting rank must be one of the parties")
    if permuted.count + permuted.n >= _COUNTERS:
        raise Refusal(f"prg_count {permuted.count} with {permuted.n} elements goes beyond 64 bits")


def _check_size(drawn: Drawn) -> None:
    if drawn.size > _LARGEST:
        raise Refusal(f"buffer_len is {drawn.size}; matrices and permuted arrays may have {_LARGEST} bytes. Use smaller pieces")


def _check_bits(request: Request) -> None:
    # TruncPr drops the top bit too.
    limit = 8 * request.width - (2 if request.kind == "AdjustTruncPr" else 1)
    if not 0 <= request.bits <= limit:
        raise Refusal(f"bits is {request.bits}; rings of {request.width} bytes take at most {limit}")


def _check_fresh(request: Request) -> None:
    """No two masks of a request may be the same numbers, but for a cached operand that is multiplied by itself."""
    inputs = request.inputs
    if len(inputs) == 3 and inputs[0] == inputs[1] and inputs[2].count != _end(inputs[0]):
        inputs = inputs[1:]
    for i, first in enumerate(inputs):
        for second in inputs[i + 1 :]:
            if set(first.seeds) & set(second.seeds) and first.count < _end(second) and second.count < _end(first):
                raise Refusal(
                    f"masks overlap (prg_count {first.count} and {second.count}), which would leak the operands. SPU's client does "
                    "so for matrix products of cached operands (make_cached_var): do not cache under TrustedThirdParty"
                )


def _end(drawn: Drawn) -> int:
    return drawn.count + -(-drawn.size // BLOCK)
