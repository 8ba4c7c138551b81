"""Biases of scores between tokens and compressed tokens: their checks, and the layout in which kernels read them.

Unlike a bias by distance, such a bias is an array of all pairs, which are linear in the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.tpu.core.heads import HeadLayout
from pallas_kernels.tpu.core.inputs import Shaped


class ScoreBias(NamedTuple):
    """What a plan knows of a bias, which hides keys where it is -inf.

    Attributes:
      batches, heads, queries: whether each entry of the batch, each head and each query has numbers of its own. The
        numbers of a bias without `queries` lie in lanes, and have no gradient.
    """

    batches: bool
    heads: bool
    queries: bool = True


def described(bias: Shaped | None, mask: Shaped | None, full: tuple[int, int, int, int]) -> ScoreBias | None:
    """What a plan needs to know of a bias and a mask; None without them.

    Raises:
      ValueError: unless both have four axes, each that of `full`, which is (B, N, queries, keys), or 1.
    """
    given = [(name, x) for name, x in (("bias", bias), ("mask", mask)) if x is not None]
    for name, x in given:
        if len(x.shape) != 4 or any(size not in (1, most) for size, most in zip(x.shape, full)):
            raise ValueError(f"{name} must broadcast to {full}, got shape {x.shape}")
    if not given:
        return None
    batches, heads, queries = (any(x.shape[axis] > 1 for _, x in given) for axis in range(3))
    return ScoreBias(batches, heads, bias is not None or queries)


def lay_out(
    bias: Float[Array, "#B #N #Q #S"] | None,
    mask: Bool[Array, "#B #N #Q #S"] | None,
    kind: ScoreBias,
    layout: HeadLayout,
    scale: float,
    shape: tuple[int, int],
    padded: tuple[int, int],
) -> Float[Array, "..."]:
    """The operand of the kernels, in the unit of scores that are not yet scaled. JAX differentiates this function.

    Its shape is (batch or 1, tiles or 1, packed heads or 1, keys, queries), or lacks the last axis. `shape` has the
    numbers of queries and keys, and `padded` those of the operand.
    """
    added = jnp.zeros((1, 1, 1, 1), jnp.float32) if bias is None else bias.astype(jnp.float32) / scale
    if mask is not None:
        added = jnp.where(mask, added, -jnp.inf)
    batch, heads = added.shape[:2]
    shape, padded = (shape, padded) if kind.queries else ((1, shape[1]), (1, padded[1]))
    added = jnp.broadcast_to(added, (batch, heads, *shape))
    packed = layout.packed if kind.heads else 1
    pad = [(0, 0), (0, -heads % packed), *((0, more - size) for size, more in zip(shape, padded))]
    added = jnp.swapaxes(jnp.pad(added, pad), 2, 3).reshape(batch, -1, packed, *padded[::-1])
    return added if kind.queries else added[..., 0]


def gradient_like(
    bias: Float[Array, "..."], grad: Float[Array, "B tiles packed keys queries"] | None, scale: float
) -> Float[Array, "..."]:
    """The gradient of an operand that `lay_out` made, from those of the scores of each entry of the batch and head;
    zeros without them."""
    if grad is None:
        return jnp.zeros_like(bias)
    return grad.sum(axis=[n for n in range(3) if bias.shape[n] == 1], keepdims=True) * scale
