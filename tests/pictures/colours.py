"""Contrast (WCAG 2.2) and what colour-blind readers see (Machado, Oliveira and Fernandes 2009, severity 1)."""

import numpy as np

BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
_WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour):
    """#rrggbb, or three numbers up to 255, as linear light."""
    if isinstance(colour, str):
        colour = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    value = np.asarray(colour, float) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """From 1 to 21."""
    low, high = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(light):
    """CIE Lab of linear light: distances are what an eye sees."""
    x = _TO_XYZ @ np.clip(light, 0, 1) / _WHITE
    f = np.where(x > (6 / 29) ** 3, np.cbrt(x), x * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
