"""The pseudo-inverse of small matrices by matrix products alone."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def iterative_pseudo_inverse(
    matrix: Float[Array, "*leading R R"], iterations: int
) -> Float[Array, "*leading R R"]:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, from Z = A^T / (|A|_1 |A|_inf) on.

    The iteration of order three of Razavi et al. (2014), as Nystromformer uses it (arXiv:2102.03902, eqs. 11-13). A
    direction of A with the singular value s is inverted once s^2 3.25^iterations exceeds |A|_1 |A|_inf; weaker ones
    are damped, which bounds gradients. Each matrix is scaled by its own norms. Rows and columns that are 0 stay 0.

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

    # Products of full precision: on a TPU the default rounds the factors to 8 bits, which the inverse amplifies.
    def times(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)

    for _ in range(iterations):
        product = times(matrix, inverse)
        inner = 15 * identity - times(product, 7 * identity - product)
        inverse = times(inverse, 13 * identity - times(product, inner)) / 4
    return inverse
