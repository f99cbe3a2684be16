"""Naming classes of rows by rows whose classes are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.spatial import cKDTree

_NEIGHBOURS = 16

Classifier = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(x [rows, features], classes [rows], asked [more, features]) -> classes [more]. The first of equals is the most frequent one."""


def constant(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    names, _, _ = _classes(y)
    return np.full(len(asked), names[0])


def discriminant(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Gaussians of one covariance, a mean each; the mean of a class counts as if one row at the overall mean were among its own."""
    names, index, number = _classes(y)
    centre = np.zeros((len(names), x.shape[1]))
    np.add.at(centre, index, x - x.mean(0))
    centre /= (number + 1)[:, None]
    rest = x - x.mean(0) - centre[index]
    weights = centre @ np.linalg.pinv(rest.T @ rest / len(x), hermitian=True)
    offset = np.log(number) - (weights * centre).sum(1) / 2
    return names[((asked - x.mean(0)) @ weights.T + offset).argmax(1)]


def neighbours(x: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The vote of the nearest rows."""
    names, index, _ = _classes(y)
    count = min(_NEIGHBOURS, len(x))
    _, nearest = cKDTree(x).query(asked, range(1, count + 1))
    votes = np.zeros((len(asked), len(names)), np.int16)
    np.add.at(votes, (np.arange(len(asked))[:, None], index[nearest]), 1)
    return names[votes.argmax(1)]


def _classes(y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Names, the most frequent first; each row's place among them; how many rows each has."""
    names, index, number = np.unique(y, return_inverse=True, return_counts=True)
    order = np.argsort(-number, kind="stable")
    return names[order], np.argsort(order)[index], number[order]
