"""A linear layer whose weights the owner sends once, encrypted; after that the client multiplies, and sends one message a product.

Nimbus (NeurIPS 2024, arXiv 2411.15707), its client-side outer product, on Microsoft SEAL (BFV) through the package seal-python.
Both parties have additive shares of the activations x [tokens, inputs] modulo 2^RING_BITS; the owner has the weights w [inputs,
outputs]. x w = (client's share) w + (owner's share) w: the owner computes the second part in the clear, the client the first on
ciphertexts. It hides its result behind a random mask, which becomes minus its share of the product, and the owner decrypts.

What the client must hide from the owner, who has the secret key and knows the randomness of every ciphertext:
- the product: the mask is uniform in all coefficients;
- the random polynomials, of which the client's sum is a linear combination: a fresh encryption under the public key is added;
- the noise, another such combination: the modulus is switched down by DROPPED_BITS, far more than the noise has, so that what
  remains of it changes a coefficient's rounding with the probability that `hidden_bits` states.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import seal

RING_BITS = 48
"""Of shares and products: SPU's 18 fraction bits twice and 12 integer bits with the sign. SEAL takes at most 60 bits."""
DEGREE = 8192
KEPT_BITS = 60
DROPPED_BITS = (60, 60)
KEY_BITS = 20
"""Of a prime that SEAL puts into keys only; it serves nothing here, and SEAL builds no modulus to switch down without it."""

_RING_MASK = np.uint64((1 << RING_BITS) - 1)
_WORD = 8
_REPLY_WORD = KEPT_BITS // 4  # bytes of two coefficients


class Lattice:
    """Parameters and formats that both parties have. SEAL refuses what is below 128 bits of security by the HE standard's table."""

    def __init__(self) -> None:
        parameters = seal.EncryptionParameters(seal.scheme_type.bfv)
        parameters.set_poly_modulus_degree(DEGREE)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(DEGREE, [KEPT_BITS, *DROPPED_BITS, KEY_BITS]))
        parameters.set_plain_modulus(1 << RING_BITS)
        self.context = seal.SEALContext(parameters, True, seal.sec_level_type.tc128)
        if not self.context.parameters_set():
            raise ValueError(f"SEAL refuses the parameters: {self.context.parameter_error_message()}")
        self.evaluator = seal.Evaluator(self.context)
        self.full, self.last = self.context.first_parms_id(), self.context.last_parms_id()
        whole = seal.Plaintext(f"1x^{DEGREE - 1}").to_bytes()
        self._plain_head = whole[: -_WORD * DEGREE]

    def plaintext(self, values: np.ndarray) -> seal.Plaintext:
        """A polynomial from its DEGREE coefficients, uint64 below 2^RING_BITS."""
        plain = seal.Plaintext()
        plain.load_bytes(self.context, self._plain_head + values.astype(np.uint64).tobytes())
        return plain

    def coefficients(self, plain: seal.Plaintext) -> np.ndarray:
        """The inverse of `plaintext`."""
        found = np.frombuffer(plain.to_bytes()[len(self._plain_head) :], np.uint64)
        return np.pad(found, (0, DEGREE - len(found)))

    def transformed(self, values: np.ndarray) -> seal.Plaintext:
        """A polynomial as a product of polynomials wants it."""
        return self.evaluator.transform_to_ntt(self.plaintext(values), self.full)

    def ciphertext(self, data: bytes) -> seal.Ciphertext:
        encrypted = seal.Ciphertext()
        encrypted.load_bytes(self.context, data)
        return encrypted


class Packing(Protocol):
    """Which weights and products lie in which coefficient. Ciphertexts have been received and `prepare`d."""

    def polynomials(self, weights: np.ndarray) -> Iterator[np.ndarray]:
        """What is encrypted: uint64 [DEGREE] each, of weights uint64 [inputs, outputs]."""

    def prepare(self, lattice: Lattice, encrypted: seal.Ciphertext) -> None:
        """Done by the client once, in place."""

    def products(self, lattice: Lattice, weights: Sequence[seal.Ciphertext], share: np.ndarray) -> list[seal.Ciphertext]:
        """The client's share uint64 [tokens, inputs] times the weights."""

    def used(self, tokens: int) -> list[int]:
        """How many of each product's coefficients, from the first on, hold results."""

    def results(self, values: np.ndarray, tokens: int) -> np.ndarray:
        """[tokens, outputs] from the coefficients [products, DEGREE]."""


class Rows:
    """Nimbus's: a ciphertext has one row of weights and numbers multiply it. Tokens' results lie side by side in one product."""

    def __init__(self, outputs: int):
        self._outputs = outputs
        self._side_by_side = DEGREE // outputs

    def polynomials(self, weights: np.ndarray) -> Iterator[np.ndarray]:
        for row in weights:
            yield np.pad(row, (0, DEGREE - len(row)))

    def prepare(self, lattice: Lattice, encrypted: seal.Ciphertext) -> None:
        """Numbers multiply coefficients as they are."""

    def products(self, lattice: Lattice, weights: Sequence[seal.Ciphertext], share: np.ndarray) -> list[seal.Ciphertext]:
        tokens = _sums(lattice, weights, (([_number(x) for x in column]) for column in share.T))
        for i, product in enumerate(tokens):
            if place := i % self._side_by_side:
                shift = seal.Plaintext(f"1x^{place * self._outputs}")
                lattice.evaluator.add_inplace(tokens[i - place], lattice.evaluator.multiply_plain(product, shift))
        return tokens[:: self._side_by_side]

    def used(self, tokens: int) -> list[int]:
        starts = range(0, tokens, self._side_by_side)
        return [min(self._side_by_side, tokens - start) * self._outputs for start in starts]

    def results(self, values: np.ndarray, tokens: int) -> np.ndarray:
        return values[:, : self._side_by_side * self._outputs].reshape(-1, self._outputs)[:tokens]


class Blocks:
    """Cheetah's packing (USENIX Security 2022) with the roles exchanged: as many rows as fit in a ciphertext.

    The client multiplies by a polynomial with a token's activations at the places that bring each row to the front. One product a
    token.
    """

    def __init__(self, outputs: int):
        self._outputs = outputs
        self._rows = DEGREE // outputs

    def polynomials(self, weights: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(weights), self._rows):
            block = weights[start : start + self._rows].ravel()
            yield np.pad(block, (0, DEGREE - len(block)))

    def prepare(self, lattice: Lattice, encrypted: seal.Ciphertext) -> None:
        lattice.evaluator.transform_to_ntt_inplace(encrypted)

    def products(self, lattice: Lattice, weights: Sequence[seal.Ciphertext], share: np.ndarray) -> list[seal.Ciphertext]:
        blocks = (share[:, start : start + self._rows] for start in range(0, share.shape[1], self._rows))
        tokens = _sums(lattice, weights, ([lattice.transformed(self._fronting(row)) for row in block] for block in blocks))
        for product in tokens:
            lattice.evaluator.transform_from_ntt_inplace(product)
        return tokens

    def _fronting(self, activations: np.ndarray) -> np.ndarray:
        """x_0 + x_1 X^(-outputs) + ...; X^(-j) = -X^(DEGREE - j)."""
        values = np.zeros(DEGREE, np.uint64)
        values[0] = activations[0]
        places = DEGREE - self._outputs * np.arange(1, len(activations))
        values[places] = (-activations[1:]) & _RING_MASK
        return values

    def used(self, tokens: int) -> list[int]:
        return [self._outputs] * tokens

    def results(self, values: np.ndarray, tokens: int) -> np.ndarray:
        return values[:, : self._outputs]


def _number(value: np.uint64) -> seal.Plaintext:
    return seal.Plaintext(f"{int(value):X}")


def _sums(lattice: Lattice, weights: Sequence[seal.Ciphertext], factors: Iterator[list[seal.Plaintext]]) -> list[seal.Ciphertext]:
    """For each token the sum of ciphertexts times that token's factors. SEAL refuses a factor 0, which is left out."""
    sums: list[seal.Ciphertext | None] = []
    for encrypted, numbers in zip(weights, factors, strict=True):
        sums = sums or [None] * len(numbers)
        for i, number in enumerate(numbers):
            if number.is_zero():
                continue
            product, total = lattice.evaluator.multiply_plain(encrypted, number), sums[i]
            if total is None:
                sums[i] = product
            else:
                lattice.evaluator.add_inplace(total, product)
    if any(total is None for total in sums):
        raise ValueError("a token's share is 0 throughout, which random shares are not")
    return [total for total in sums if total is not None]


class Owner:
    """Has the weights (integers modulo 2^RING_BITS) and the secret key."""

    def __init__(self, lattice: Lattice, weights: np.ndarray, packing: Packing):
        self._lattice, self._packing = lattice, packing
        self._weights = weights.astype(np.uint64)
        keys = seal.KeyGenerator(lattice.context)
        self.public_key = keys.create_public_key()
        self._encryptor = seal.Encryptor(lattice.context, self.public_key, keys.secret_key())
        self._decryptor = seal.Decryptor(lattice.context, keys.secret_key())
        self._reply_head = self._encryptor.encrypt_zero(lattice.last).to_string()[: -2 * DEGREE * _WORD]

    def set_up(self) -> list[bytes]:
        """What is sent once: the weights, encrypted."""
        polynomials = self._packing.polynomials(self._weights & _RING_MASK)
        return [self._encryptor.encrypt_symmetric(self._lattice.plaintext(values)).to_string() for values in polynomials]

    def finish(self, replies: Sequence[bytes], share: np.ndarray) -> np.ndarray:
        """The owner's share uint64 [tokens, outputs] of the product."""
        values = [self._lattice.coefficients(self._decrypt(reply)) for reply in replies]
        found = self._packing.results(np.array(values), len(share)) + share @ self._weights
        return found & _RING_MASK

    def _decrypt(self, reply: bytes) -> seal.Plaintext:
        encrypted = self._lattice.ciphertext(self._reply_head + _unpacked(reply).tobytes())
        return self._decryptor.decrypt(encrypted)

    def noise_budget(self, encrypted: seal.Ciphertext) -> int:
        """Bits by which a ciphertext's noise is below what decryption bears. For measuring."""
        return self._decryptor.invariant_noise_budget(encrypted)


class Client:
    """Has the encrypted weights."""

    def __init__(self, lattice: Lattice, public_key: seal.PublicKey, packing: Packing, weights: Sequence[bytes]):
        self._lattice, self._packing = lattice, packing
        self._encryptor = seal.Encryptor(lattice.context, public_key)
        self._weights = [lattice.ciphertext(data) for data in weights]
        for encrypted in self._weights:
            packing.prepare(lattice, encrypted)

    def cover(self, tokens: int) -> tuple[list[seal.Ciphertext], np.ndarray]:
        """What hides products of so many tokens, made before they are known: fresh encryptions of masks under the public key, to be
        used once, and what the masks make the client's share uint64 [tokens, outputs] of the result."""
        count = len(self._packing.used(tokens))
        masks = np.frombuffer(os.urandom(count * DEGREE * _WORD), np.uint64).reshape(-1, DEGREE) & _RING_MASK
        covers = [self._encryptor.encrypt(self._lattice.plaintext(mask)) for mask in masks]
        return covers, (-self._packing.results(masks, tokens)) & _RING_MASK

    def products(self, share: np.ndarray, covers: Sequence[seal.Ciphertext]) -> list[seal.Ciphertext]:
        """The client's share uint64 [tokens, inputs] times the weights, covered."""
        products = self._packing.products(self._lattice, self._weights, share)
        for product, cover in zip(products, covers, strict=True):
            self._lattice.evaluator.add_inplace(product, cover)
        return products

    def replies(self, products: Sequence[seal.Ciphertext], tokens: int) -> list[bytes]:
        """What is sent: products in the small modulus, without the coefficients that hold no result."""
        sent = []
        for product, used in zip(products, self._packing.used(tokens), strict=True):
            self._lattice.evaluator.mod_switch_to_inplace(product, self._lattice.last)
            sent.append(_packed(product, used))
        return sent


def _packed(encrypted: seal.Ciphertext, used: int) -> bytes:
    """The first `used` coefficients of the first polynomial and all of the second, KEPT_BITS each."""
    words = np.frombuffer(encrypted.to_string()[-2 * DEGREE * _WORD :], np.uint64)
    words = np.concatenate([words[: used + used % 2], words[DEGREE:]])
    low, high = words[0::2], words[1::2]
    pairs = np.stack([low | high << np.uint64(KEPT_BITS), high >> np.uint64(64 - KEPT_BITS)], axis=1)
    return pairs.view(np.uint8).reshape(-1, 2 * _WORD)[:, :_REPLY_WORD].tobytes()


def _unpacked(data: bytes) -> np.ndarray:
    """The inverse of `_packed`: uint64 [2 * DEGREE], zeros where nothing was sent."""
    bytes_ = np.frombuffer(data, np.uint8).reshape(-1, _REPLY_WORD)
    pairs = np.pad(bytes_, ((0, 0), (0, 2 * _WORD - _REPLY_WORD))).view(np.uint64)
    low = pairs[:, 0] & np.uint64((1 << KEPT_BITS) - 1)
    high = pairs[:, 0] >> np.uint64(KEPT_BITS) | pairs[:, 1] << np.uint64(64 - KEPT_BITS)
    words = np.stack([low, high], axis=1).ravel()
    first = np.pad(words[:-DEGREE], (0, 2 * DEGREE - len(words)))
    return np.concatenate([first, words[-DEGREE:]])


def hidden_bits(budget: int) -> float:
    """-log2 of the distance between what the owner sees and what it would see without noise, for one reply (at most).

    `budget`: the noise budget of the product before its modulus is switched. Its noise v is at most q / 2^(RING_BITS + 1 + budget).
    The modulus goes down prime by prime: after the first, p, noise makes up at most v / p + 1 units, and these shift one of DEGREE
    coefficients over a rounding boundary of the second, p', with a probability of at most 2 (v / p + 1) / p' each.
    """
    first, second = DROPPED_BITS
    noise = 2.0 ** (KEPT_BITS + first + second - RING_BITS - 1 - budget)
    return second - 1 - float(np.log2(noise / 2.0**first + 1)) - float(np.log2(DEGREE))


def ciphertexts(inputs: int, outputs: int, packing: type[Rows] | type[Blocks]) -> int:
    """How many ciphertexts a matrix takes; one that is wider than DEGREE is cut into pieces of that width."""
    pieces = -(-outputs // DEGREE)
    if packing is Blocks and pieces == 1:
        return -(-inputs // (DEGREE // outputs))
    return inputs * pieces


def memory_bytes(count: int) -> int:
    """Of so many encrypted weights at the client, as SEAL holds them."""
    return count * 2 * DEGREE * (1 + len(DROPPED_BITS)) * _WORD


def most_modulus_bits() -> int:
    """Of keys and ciphertexts, for 128 bits of security (the HE standard's table, ternary secrets), as SEAL has it."""
    return seal.CoeffModulus.MaxBitCount(DEGREE)
