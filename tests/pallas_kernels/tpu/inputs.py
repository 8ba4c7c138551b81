"""Random inputs of mixed scale, and a jit that compiles interpreted kernels in half the time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

#: An interpreted kernel is a long program that runs once: compiling it is what takes the time.


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
    """As `arrays` in float32, in numbers so short that the inner product of two tokens, in any order, rounds nothing.

    Entries are sixteenths below 8 times a power of two that is the token's own: a sum of 128 products takes 21 bits.
    """
    rng = np.random.default_rng(seed)
    out = []
    for shape in shapes:
        scales = np.exp2(np.round(rng.uniform(-spread, spread, shape[:3]) / np.log(2)))[..., None]
        out.append(jnp.asarray(np.round(rng.standard_normal(shape) * 16) / 16 * scales, jnp.float32))
    return out
