"""Series drawn from Gaussian processes with random kernels (KernelSynth of Chronos, arXiv:2403.07815, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float

Kernel = Callable[[Float[np.ndarray, "R R"], Float[np.ndarray, "R R"]], Float[np.ndarray, "R R"]]

# Seasons in rows: of hours, days, weeks, months and quarters of a year.
_PERIODS = (24, 48, 96, 168, 336, 672, 7, 14, 30, 60, 365, 730, 4, 26, 52, 6, 12, 40, 10)
MOST_ROWS = 4096
"""Rows of a series at most: drawing one takes the cube of its rows in time and the square in memory."""


def _periodic(period: float, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return np.exp(-2 * np.sin(np.pi * np.abs(t - s) / period) ** 2)


def _linear(offset: float, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return offset**2 + t * s


def _smooth(length: float, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return np.exp(-((t - s) ** 2) / (2 * length**2))


def _rational(alpha: float, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return (1 + (t - s) ** 2 / (2 * alpha)) ** -alpha


def _noise(variance: float, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    return variance * (t == s)


def bank(rows: int) -> list[Kernel]:
    """The kernels to draw from, of places between 0 and 1."""
    return [
        *(partial(_periodic, period / rows) for period in _PERIODS),
        *(partial(_linear, offset) for offset in (0.0, 1.0, 10.0)),
        *(partial(_smooth, length) for length in (0.1, 1.0, 10.0)),
        *(partial(_rational, alpha) for alpha in (0.1, 1.0, 10.0)),
        *(partial(_noise, variance) for variance in (0.1, 1.0)),
        lambda t, s: np.ones_like(t),
    ]


def kernel_series(rows: int, columns: int, seed: int = 0) -> Float[np.ndarray, "R C"]:
    """Columns of `rows` numbers, each of a Gaussian process whose kernel joins one to five of `bank` by random sums and
    products. A column depends on the seed and its number alone."""
    kernels = bank(rows)
    places = np.linspace(0.0, 1.0, rows)
    t, s = np.broadcast_arrays(places[:, None], places[None])
    drawn = []
    for column in range(columns):
        rng = np.random.default_rng([seed, column])
        first, *more = (kernels[i](t, s) for i in rng.integers(len(kernels), size=rng.integers(1, 6)))
        for kernel in more:
            first = first + kernel if rng.random() < 0.5 else first * kernel
        jitter = 1e-6 * max(float(np.trace(first)) / rows, 1.0)
        drawn.append(np.linalg.cholesky(first + jitter * np.eye(rows)) @ rng.standard_normal(rows))
    return np.stack(drawn, axis=1)
