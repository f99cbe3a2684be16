"""Randomness from short keys: whoever holds a key makes the same ring elements, so they need not be sent."""

from __future__ import annotations

import hmac
import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 16
_ZEROS = np.zeros(1 << 18, np.uint8)  # what CTR mode encrypts, a piece at a time; small enough to stay in the cache


def derive_key(master: bytes, label: str, number: int) -> bytes:
    """The 16-byte key of purpose `label` and its `number`: HMAC-SHA256 under the master key, cut (a pseudorandom function).

    Keys of different (label, number) tell nothing about each other or the master. ValueError: a master of fewer than 16 bytes.
    OverflowError: a number outside [0, 2^64).
    """
    if len(master) < KEY_BYTES:
        raise ValueError(f"a master key of {len(master)} bytes; at least {KEY_BYTES} are needed")
    # The number's fixed length makes the message unambiguous whatever the label holds.
    return hmac.digest(master, label.encode() + number.to_bytes(8, "big"), "sha256")[:KEY_BYTES]


class Stream:
    """An endless pseudorandom string: AES-128 in counter mode from counter 0. Use a key for one stream only.

    The string depends on the key and on nothing else; how it is cut into calls does not change it. Not to be called from
    two threads at once.
    """

    def __init__(self, key: bytes):
        if len(key) != KEY_BYTES:
            raise ValueError(f"a stream key of {len(key)} bytes; it takes {KEY_BYTES}")
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, shape: int | tuple[int, ...]) -> np.ndarray:
        """int64 `shape`: the next ring elements, uniform in Z_2^64."""
        return self._take(8 * math.prod(np.atleast_1d(shape).tolist())).view(np.int64).reshape(shape)

    def seeds(self, n: int) -> np.ndarray:
        """uint8 [n, 16]: the next n roots of distributed point functions (or other keys)."""
        return self._take(16 * n).reshape(n, 16)

    def _take(self, size: int) -> np.ndarray:
        """The next `size` bytes, encrypted straight into the array that is returned."""
        out = np.empty(size, np.uint8)
        for start in range(0, size, len(_ZEROS)):
            self._cipher.update_into(_ZEROS[: size - start].data, out[start:].data)
        return out
