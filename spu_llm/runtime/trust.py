"""Proof over compiled code that a dealer program never uses SPU's own correlated randomness.

SPU's SEMI2K multiplies, compares and truncates secrets with triples from `TrustedFirstParty`: rank 0 makes them and could
unmask the other party's values. Adding secrets, moving them, and multiplying them by public integers needs none.
"""

from __future__ import annotations

import re

from ..errors import UserError
from .program import Program

_OPERATION = re.compile(r'pphlo\.(?P<name>custom_call @?"?[\w.]+|\w+)')
_SECRET = "pphlo.secret"
_ALL = 1 << 30

_LOCAL = {
    **dict.fromkeys(("add", "subtract", "negate", "reshape", "transpose", "slice", "concatenate", "broadcast", "free"), _ALL),
    **dict.fromkeys(("reverse", "pad", "bitcast_convert", "custom_call @spu.reveal"), _ALL),
    **dict.fromkeys(("dynamic_slice", "dynamic-slice", "custom_call @spu.gather"), 1),
    **dict.fromkeys(("dynamic_update_slice", "dynamic-update-slice"), 2),
}
"""Operations that SEMI2K computes on shares alone, while only this many leading operands are secret (indices stay public)."""
_BILINEAR = {"multiply", "dot", "dot_general"}
"""Local while one operand is public, and both are integers: products of fixed-point numbers are truncated."""


def check_trust(program: Program) -> None:
    """Raise UserError if an operation of a compiled program would draw on SPU's own triples."""
    before = ("", "")  # the operation before, and its line
    for line in program.code.splitlines():
        found = _OPERATION.search(line.split("attributes")[0])
        if found is None or line.lstrip().startswith(("func.func", "return", "module")):
            continue
        name = found["name"].replace('"', "")
        if name == "secret":  # the arguments of a body of the operation before: none that has one is known to be local
            name, line = before
        elif name == "return" or _SECRET not in line or _is_local(name, line):
            before = name, line
            continue
        raise UserError(
            f"program {program.name}: {name} of secrets would use SPU's own triples; use a primitive of spu_llm for it: "
            f"{line.strip()[:200]}"
        )


def _is_local(name: str, line: str) -> bool:
    if name == "reduce":  # by sums, or by what stands in a body of its own
        return re.search(r" applies pphlo\.(?!add\b)", line) is None
    operands = _operands(line)
    if name == "convert":  # between floats, or between integers, only the name of the type changes
        types = re.findall(r"[x<](f|u?i)(\d+)>", line.rsplit(" : ", 1)[-1])
        return len({kind.strip("u") for kind, _ in types}) == 1 and all(size != "1" for _, size in types)
    secret = [i for i, kind in enumerate(operands) if _SECRET in kind]
    if name in _BILINEAR:
        return len(secret) <= 1 and not any(re.search(r"[x<]f\d+>", kind) for kind in operands)
    return all(i < _LOCAL.get(name, 0) for i in secret)


def _operands(line: str) -> list[str]:
    """Operand types from an operation's signature, `: (a, b) -> c` or `: a` where all are alike."""
    signature = line.rsplit(" : ", 1)[-1]
    if "->" in signature:
        return signature.split("->")[0].split("tensor<")[1:]
    count = len(re.findall(r"%\w+", line.split(" : ")[0].split("=", 1)[-1]))
    return [signature] * count
