"""Proof for the client that values stayed in their ranges, in one opened element for a whole program.

A value was opened as c = x - r by some protocol; nothing more is opened for it here. With x moved to [0, 2^b), u = -r and both
cut to the modulus m, z = (c >> b) - (u >> b) + 2^(m-b) [u has its top bit and c has not] is 0 or, by a borrow, 1 exactly if x
is in range. So z^2 - z is 0, and the sum over all values of w (z^2 - z), with w random, odd and *secret*, is 0 if all are in
range, and tells nothing of the values if not, but the power of two that divides it: the dealer draws w and
shares w and its products with what it knows of u, in which the sum is linear. A value up to 2^b above its range may pass, as
a borrow; one below it, or further above, never does, alone. Several cancel out with a chance of about 2^-30.

x is known modulo 2^m, so x + 2^m passes too: the range must be proven by other means, or fit m with room (two bits, say).

0 rounds and online bytes. Dealer: 12 bytes an element, or 4 or 8 where m - b is at least 32: there the wrap term of z is 0.
XMEASURED
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from .base import define
from .dealing import RING, Dealing, Request, Value, logical_shift
from .fixed import Fixed

_CHECKED_BITS = 32  # the sum is 0 modulo 2^32 at least: what is left to chance when several values are out of range


def out_of_range(x: Fixed, low: float, high: float) -> Fixed:
    """0 if all of x is in [low, low + 2^b / 2^x.bits), the smallest such range that holds [low, high]; else not 0.

    Shares the opening of the lookup (or other protocol) that x goes into. Add up those of a program and give the sum to the
    client alone. In plaintext and on stock SPU the number of values out of range.
    """
