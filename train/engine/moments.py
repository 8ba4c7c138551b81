"""How much gradients vary over a run, from running moments of their norms.

TransNormer (arXiv:2210.10340, section 4.2, table 2) compares mechanisms by the relative standard deviation of the
gradients over all iterations: with g_t the gradient of step t,

    std_t(|g_t|) / mean_t(|g_t|).

The paper does not define |g_t|. Deviations of 0.2 to 0.6 of the mean are typical of norms (single
entries, whose mean is about 0, would give far more), so norms are used here: of the whole gradient before clipping
("grad_rsd"), and of each tensor's gradient, averaged over the tensors ("grad_rsd_tensors"), where an unstable
layer is not hidden by larger ones."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


class GradientMoments(flax.struct.PyTreeNode):
    """Running moments of P + 1 norms: the norm of the whole gradient, then of each of its P tensors.

    Attributes:
      count: () int32, gradients seen.
      mean: (P + 1,) float32.
      spread: (P + 1,) float32, the sum of squared distances from the mean.
    """

    count: Int[Array, ""]
    mean: Float[Array, " norms"]
    spread: Float[Array, " norms"]


def fresh_moments(params: Any) -> GradientMoments:
    """The moments before the first gradient, for gradients like `params`."""
    norms = len(jax.tree.leaves(params)) + 1
    return GradientMoments(
        count=jnp.zeros((), jnp.int32),
        mean=jnp.zeros(norms, jnp.float32),
        spread=jnp.zeros(norms, jnp.float32),
    )


def add_gradient(moments: GradientMoments, grads: Any) -> GradientMoments:
    """The moments with one more gradient (Welford 1962, which subtracts no large sums)."""
    tensors = [optax.tree.norm(leaf) for leaf in jax.tree.leaves(grads)]
    norms = jnp.stack([optax.tree.norm(grads), *tensors]).astype(jnp.float32)
    count = moments.count + 1
    off = norms - moments.mean
    mean = moments.mean + off / count.astype(jnp.float32)
    return GradientMoments(count=count, mean=mean, spread=moments.spread + off * (norms - mean))


def relative_deviations(moments: GradientMoments) -> dict[str, Float[Array, ""]]:
    """ "grad_rsd" and "grad_rsd_tensors" of the gradients seen; 0 for norms that were always 0."""
    deviation = jnp.sqrt(moments.spread / moments.count.astype(jnp.float32))
    relative = deviation / jnp.where(moments.mean > 0, moments.mean, 1.0)
    return {"grad_rsd": relative[0], "grad_rsd_tensors": relative[1:].mean()}
