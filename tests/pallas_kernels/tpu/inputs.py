"""Random inputs of mixed scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tpu import DistanceTable, Slopes

SLOPES = np.float32([0.25, -0.03125, 0.01, 0.5])


def arrays(seed: int, dtype, *shapes, spread: float = 0.0) -> list[jax.Array]:
    """Normal arrays whose tokens differ in scale by up to exp(spread) either way."""
    rng = np.random.default_rng(seed)
    out = []
    for shape in shapes:
        x = rng.standard_normal(shape)
        if len(shape) == 4 and spread:
            x *= np.exp(rng.uniform(-spread, spread, shape[:3]))[..., None]
        out.append(jnp.asarray(x.astype(np.float32)).astype(dtype))
    return out


def exact_arrays(seed: int, *shapes, spread: float) -> list[jax.Array]:
    """Like `arrays` in float32, but with so few bits that inner products of two tokens are exact in any order.

    Entries are multiples of 1/16 below 8, times a power of two for each token: a sum of 128 products takes 21 bits."""
    rng = np.random.default_rng(seed)
    out = []
    for shape in shapes:
        scales = np.exp2(np.round(rng.uniform(-spread, spread, shape[:3]) / np.log(2)))[..., None]
        out.append(jnp.asarray(np.round(rng.standard_normal(shape) * 16) / 16 * scales, jnp.float32))
    return out


def table(heads: int, distances: int) -> np.ndarray:
    """The numbers of a bias, one row per head."""
    return np.random.default_rng(7).standard_normal((heads, distances)).astype(np.float32)


def bias_by_distance(kind, numbers, first=0):
    """A bias of that kind for the kernels; None for None."""
    if kind is None:
        return None
    return Slopes(numbers) if kind == "slopes" else DistanceTable(numbers, first)
