"""CKKS by OpenFHE: the executor's operations on real ciphertexts, bootstraps included.

OpenFHE's fixed scaling: every ciphertext between operations has the nominal scale, and levels are dropped where the schedule says.
Primes differ from the scale by less than 2^-30 of it: a product errs by as much, far less than a bootstrap does.
`OMP_NUM_THREADS=1` should be set before OpenFHE is imported: its threads wait by spinning, and on few cores slow each other.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openfhe

from ..errors import UserError
from .backend import LevelViolation
from .parameters import CkksParameters
from .slots import SlotMap, baby_steps

_KEPT_BYTES = 2**31
_LEAST_SCALE = 50  # a bootstrap errs by 4e-4 there, by 4e-5 at 54 bits and by 0.6 at 40 (ring 2^11, input divided by 2^10)
_SECRET = openfhe.SecretKeyDist.SPARSE_ENCAPSULATED


def make_context(parameters: CkksParameters, secure: bool = False) -> Any:
    """A context that can compute and bootstrap; `secure`: of 128 bits by the standard's tables, else of whatever the ring gives.

    Raises UserError where no modulus of this size is secure at this ring, and for parameters that bootstraps cannot work with.
    """
    if parameters.reserve < 1 or parameters.scale_bits < _LEAST_SCALE:
        raise UserError(
            f"reserve {parameters.reserve}, scale 2^{parameters.scale_bits}: OpenFHE's bootstrap needs a level in its input, and "
            f"errs too much below a scale of 2^{_LEAST_SCALE}; choose parameters toy or secure"
        )
    chosen = openfhe.CCParamsCKKSRNS()
    chosen.SetSecretKeyDist(_SECRET)
    chosen.SetSecurityLevel(openfhe.SecurityLevel.HEStd_128_classic if secure else openfhe.SecurityLevel.HEStd_NotSet)
    chosen.SetRingDim(parameters.ring)
    chosen.SetBatchSize(parameters.slots)
    chosen.SetScalingModSize(parameters.scale_bits)
    chosen.SetFirstModSize(parameters.first_bits)
    chosen.SetScalingTechnique(openfhe.ScalingTechnique.FIXEDMANUAL)
    chosen.SetNumLargeDigits(parameters.digits)
    chosen.SetMultiplicativeDepth(total_depth(parameters))
    try:
        context = openfhe.GenCryptoContext(chosen)
    except RuntimeError as error:
        raise UserError(f"ring 2^{parameters.log_ring}: {_reason(error)}; give a larger ring or fewer levels") from None
    for feature in ("PKE", "KEYSWITCH", "LEVELEDSHE", "ADVANCEDSHE", "FHE"):
        context.Enable(getattr(openfhe.PKESchemeFeature, feature))
    correction = parameters.first_bits - parameters.scale_bits + parameters.correction_bits
    context.EvalBootstrapSetup(_budget(parameters), [0, 0], parameters.slots, correction)
    return context


def make_keys(context: Any, rotations: Iterable[int]) -> Any:
    """A key pair; the context gets the public keys for products, rotations by these steps, and bootstraps."""
    pair = context.KeyGen()
    context.EvalMultKeyGen(pair.secretKey)
    context.EvalRotateKeyGen(pair.secretKey, sorted(rotations))
    context.EvalBootstrapKeyGen(pair.secretKey, context.GetBatchSize())
    return pair


def total_depth(parameters: CkksParameters) -> int:
    """Levels of the modulus: those after a bootstrap and its own."""
    return parameters.levels + openfhe.CryptoContext.GetBootstrapDepth(_budget(parameters), _SECRET)


class OpenFheBackend:
    """A `Backend` of OpenFHE ciphertexts. A server's has no secret key and cannot decrypt."""

    def __init__(self, parameters: CkksParameters, context: Any, public_key: Any = None, secret_key: Any = None):
        self.parameters, self.context = parameters, context
        self.public_key, self.secret_key = public_key, secret_key
        self.bootstraps = 0
        self.bootstrap_seconds = 0.0
        self._depth = total_depth(parameters)
        self._encoded: OrderedDict[tuple[int, bytes], Any] = OrderedDict()
        self._baby = baby_steps(parameters.slots)

    def encrypt(self, values: np.ndarray) -> Any:
        if self.public_key is None:
            raise UserError("encryption needs the public key; load it")
        return self.context.Encrypt(self.public_key, self._plain(values, self.parameters.levels))

    def decrypt(self, x: Any) -> np.ndarray:
        if self.secret_key is None:
            raise UserError("decryption needs the secret key, which the client alone has")
        found = self.context.Decrypt(x, self.secret_key)
        found.SetLength(self.parameters.slots)
        return np.asarray(found.GetRealPackedValue())

    def level(self, x: Any) -> int:
        return self._depth - x.GetLevel() - (x.GetNoiseScaleDeg() - 1)

    def lower(self, x: Any, level: int) -> Any:
        above = self.level(x) - level
        if above < 0:
            raise LevelViolation(f"a ciphertext at level {self.level(x)} cannot be raised to {level}")
        return self.context.LevelReduce(x, None, above) if above else x

    def add(self, x: Any, y: Any) -> Any:
        self._agree(x, y)
        return self.context.EvalAdd(x, y)

    def subtract(self, x: Any, y: Any) -> Any:
        self._agree(x, y)
        return self.context.EvalSub(x, y)

    def rotate(self, x: Any, steps: int) -> Any:
        for step in self._parts(steps % self.parameters.slots):
            x = self.context.EvalRotate(x, step)
        return x

    def add_constant(self, x: Any, constant: float) -> Any:
        return self.context.EvalAdd(x, constant)

    def multiply(self, x: Any, y: Any) -> Any:
        self._agree(x, y)
        return self._rescaled(self.context.EvalMult(x, y) if x is not y else self.context.EvalSquare(x))

    def multiply_constant(self, x: Any, constant: float) -> Any:
        return self._rescaled(self.context.EvalMult(x, constant))

    def linear(self, inputs: Sequence[Any], slot_map: SlotMap) -> list[Any]:
        """Diagonals by baby and giant steps (Halevi and Shoup 2014): sum_d diagonal_d * rotated(x, d), with d = giant + baby.

        What a giant step has in common is summed before it is rotated, from the largest step down (Horner's way).
        """
        for other in inputs[1:]:
            self._agree(inputs[0], other)
        diagonals, constants = _diagonals(slot_map, self.parameters.slots)
        turned = [_Turned(self.context, x, self.parameters.few_keys) for x in inputs]
        return [self._combined(turned, found, constant) for found, constant in zip(diagonals, constants, strict=True)]

    def bootstrap(self, x: Any) -> Any:
        if self.level(x) < self.parameters.reserve:
            raise LevelViolation(f"a bootstrap at level {self.level(x)} needs {self.parameters.reserve}")
        self.bootstraps += 1
        began = time.perf_counter()
        found = self.context.EvalBootstrap(x)
        self.bootstrap_seconds += time.perf_counter() - began
        if found.GetNoiseScaleDeg() > 1:
            found = self.context.Rescale(found)
        return self.lower(found, self.parameters.levels)

    def within(self, x: Any, bound: float) -> None:
        """Nothing can be told."""

    def _combined(self, turned: Sequence[_Turned], diagonals: Diagonals, constant: np.ndarray) -> Any:
        """One ciphertext of a linear map's result."""
        level = self.level(turned[0].x)
        by_giant: dict[int, list[tuple[int, int]]] = {}
        for which, step in diagonals:
            by_giant.setdefault(step // self._baby * self._baby, []).append((which, step))
        total, above = None, 0
        for giant in sorted(by_giant, reverse=True):
            if total is not None:
                total = self.rotate(total, above - giant)
            above = giant
            for which, step in by_giant[giant]:
                factor = self._factor(np.roll(diagonals[which, step], giant), level)
                term = self.context.EvalMult(turned[which].by(step - giant), factor)
                if total is None:
                    total = term
                else:
                    self.context.EvalAddInPlace(total, term)
        total = self.context.EvalMult(turned[0].x, 0.0) if total is None else self.rotate(total, above)
        total = self._rescaled(total)
        return self.context.EvalAdd(total, self._plain(constant, level - 1)) if constant.any() else total

    def _parts(self, steps: int) -> list[int]:
        """Steps that there are keys for and that make up this one."""
        if self.parameters.few_keys:
            return [1 << bit for bit in range(steps.bit_length()) if steps >> bit & 1]
        return [part for part in (steps // self._baby * self._baby, steps % self._baby) if part]

    def _plain(self, values: np.ndarray, level: int) -> Any:
        """Encoded for ciphertexts of a level."""
        return self.context.MakeCKKSPackedPlaintext(values.tolist(), 1, self._depth - level, None, self.parameters.slots)

    def _factor(self, values: np.ndarray, level: int) -> Any:
        """A diagonal, encoded. Most are the same for every token: those last used are kept, _KEPT_BYTES of them."""
        name = level, hashlib.sha256(values.tobytes()).digest()
        found = self._encoded.pop(name, None)
        self._encoded[name] = found = self._plain(values, level) if found is None else found
        if len(self._encoded) * self.parameters.ring * 8 * self.parameters.levels > _KEPT_BYTES:
            self._encoded.popitem(last=False)
        return found

    def _rescaled(self, x: Any) -> Any:
        """Of a product, which has lost a level already."""
        if self.level(x) < 0:
            raise LevelViolation("a product at level 0")
        return self.context.Rescale(x)

    def _agree(self, x: Any, y: Any) -> None:
        if self.level(x) != self.level(y):
            raise LevelViolation(f"operands at levels {self.level(x)} and {self.level(y)}")


Diagonals = dict[tuple[int, int], np.ndarray]
"""(number of the input ciphertext, steps to the left) -> factors [slots]."""


@dataclass
class _Turned:
    """A ciphertext and its rotations, which share the first half of their work (Halevi and Shoup 2018); with few keys each is
    made of another one."""

    context: Any
    x: Any
    few_keys: bool

    def __post_init__(self) -> None:
        self._digits: Any = None
        self._found: dict[int, Any] = {0: self.x}

    def by(self, steps: int) -> Any:
        if steps not in self._found:
            last = steps & -steps
            self._found[steps] = self.context.EvalRotate(self.by(steps - last), last) if self.few_keys else self._hoisted(steps)
        return self._found[steps]

    def _hoisted(self, steps: int) -> Any:
        if self._digits is None:
            self._digits = self.context.EvalFastRotationPrecompute(self.x)
        return self.context.EvalFastRotation(self.x, steps, self.context.GetCyclotomicOrder(), self._digits)


def _diagonals(slot_map: SlotMap, slots: int) -> tuple[list[Diagonals], np.ndarray]:
    """For each ciphertext of the result, its diagonals; the constants [ciphertexts, slots]."""
    matrix, offsets, targets, sources = slot_map.matrix()
    constants = np.zeros(slot_map.target.count * slots)
    constants[targets] = offsets
    rows, columns = np.nonzero(matrix)
    target, source = targets[rows], sources[columns]
    names = np.stack([target // slots, source // slots, (source - target) % slots])
    different, number = np.unique(names, axis=1, return_inverse=True)
    factors = np.zeros((different.shape[1], slots))
    np.add.at(factors, (number, target % slots), matrix[rows, columns])
    found: list[Diagonals] = [{} for _ in range(slot_map.target.count)]
    for (to, frm, step), diagonal in zip(different.T.tolist(), factors, strict=True):
        found[to][frm, step] = diagonal
    return found, constants.reshape(-1, slots)


def _budget(parameters: CkksParameters) -> list[int]:
    return [parameters.transform_levels] * 2


def _reason(error: RuntimeError) -> str:
    """The library's words, without its file names."""
    return str(error).split("): ")[-1].strip().rstrip(".")
