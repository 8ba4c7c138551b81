"""Solves triangular systems with a unit diagonal by matrix products, without a loop over rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.products import multiply_precisely
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.recurrent.chunk_scan import SAVED


def solve_unit_lower(a: Float[Array, "*B C C"], b: Float[Array, "*B C V"]) -> Float[Array, "*B C V"]:
    """x with (I + A) x = b, for A strictly lower triangular."""
    # Under shard_map the custom derivative below needs both to vary over the same mesh axes.
    return _solve(*vary_like((a, b), (a, b)))


@jax.custom_jvp
def _solve(a: Array, b: Array) -> Array:
    return multiply_precisely(invert_unit_lower(a), b)


@_solve.defjvp
def _solve_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    a, b = primals
    d_a, d_b = tangents
    inverse = checkpoint_name(invert_unit_lower(a), SAVED)
    x = checkpoint_name(multiply_precisely(inverse, b), SAVED)
    return x, multiply_precisely(inverse, d_b - multiply_precisely(jnp.tril(d_a, k=-1), x))


def invert_unit_lower(a: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + A)^-1 for A strictly lower triangular.

    A GPU library solves for the inverse in one launch. Elsewhere the inverse is assembled from blocks of doubling
    size, by matrix products: [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]. This is as stable as forward
    substitution. A series in powers of A is not: for equal keys the powers grow like binomial coefficients.
    """
    return branches(a, cuda=_substitute, rocm=_substitute, default=_assemble)


def _substitute(a: Array) -> Array:
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    return lax.linalg.triangular_solve(
        a, vary_like(identity, (a,)), left_side=True, lower=True, unit_diagonal=True
    )


def _assemble(a: Array) -> Array:
    size = a.shape[-1]
    width = 1 << (size - 1).bit_length()
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, width - size)] * 2)
    blocks = vary_like(jnp.ones((*a.shape[:-2], width, 1, 1), a.dtype), (a,))
    block = 1
    while block < width:
        corners = [a[..., i + block : i + 2 * block, i : i + block] for i in range(0, width, 2 * block)]
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -multiply_precisely(multiply_precisely(second, jnp.stack(corners, axis=-3)), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([corner, second], axis=-1)
        blocks = jnp.concatenate([upper, lower], axis=-2)
        block *= 2
    return blocks[..., 0, :size, :size]
