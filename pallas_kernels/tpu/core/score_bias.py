"""Biases of the scores between tokens and compressed tokens: their checks, and their layout for the kernels.

Unlike a bias by distance, such a bias is an array over all pairs, whose number is linear in the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.tpu.core.heads import HeadLayout
from pallas_kernels.tpu.core.inputs import Shaped


class ScoreBias(NamedTuple):
    """What a plan knows about a bias, which hides keys where it is -inf.

    Attributes:
      batches, heads, queries: whether each entry of the batch, each head and each query has separate numbers. A bias
        without `queries` lies in lanes and has no gradient.
    """

    batches: bool
    heads: bool
    queries: bool = True


def described(bias: Shaped | None, mask: Shaped | None, full: tuple[int, int, int, int]) -> ScoreBias | None:
    """Returns what a plan needs to know about a bias and a mask; None without them.

    Raises:
      ValueError: one of them does not broadcast to `full`, which is (B, N, queries, keys).
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
    """Returns the kernels' operand, in the unit of unscaled scores. JAX differentiates this function.

    Its shape is (batch or 1, tiles or 1, packed heads or 1, keys, queries), or lacks the last axis. `shape` has the
    numbers of queries and keys, `padded` the operand's.
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
    """Returns the gradient of `lay_out`'s operand, given the scores' gradients for each entry of the batch and head;
    zeros without them."""
    if grad is None:
        return jnp.zeros_like(bias)
    return grad.sum(axis=[n for n in range(3) if bias.shape[n] == 1], keepdims=True) * scale
