"""The pseudo-inverse of small matrices, from matrix products alone."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.products import multiply_precisely


def iterative_pseudo_inverse(
    matrix: Float[Array, "*leading R R"], iterations: int
) -> Float[Array, "*leading R R"]:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, starting at Z = A^T / (|A|_1 |A|_inf).

    This is the third-order iteration of Razavi et al. (2014), as Nystromformer uses it (arXiv:2102.03902, eqs.
    11-13). A direction with singular value s is inverted once s^2 3.25^iterations exceeds |A|_1 |A|_inf; weaker
    directions are damped, which bounds the gradients. Each matrix is scaled by its own norms. Zero rows and columns
    stay zero.

    Args:
      matrix: A, float32.
      iterations: the number of steps.
    """
    size = jnp.abs(matrix)
    bound = size.sum(-1).max(-1) * size.sum(-2).max(-1)
    bound = jnp.where(bound == 0, jnp.ones((), bound.dtype), bound)[..., None, None]
    inverse = jnp.swapaxes(matrix, -1, -2) / bound
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype).reshape(
        (1,) * (matrix.ndim - 2) + matrix.shape[-2:]
    )

    for _ in range(iterations):
        product = multiply_precisely(matrix, inverse)
        inner = 15 * identity - multiply_precisely(product, 7 * identity - product)
        inverse = multiply_precisely(inverse, 13 * identity - multiply_precisely(product, inner)) / 4
    return inverse
