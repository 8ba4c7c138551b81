"""Cumulative sums over the tokens of rows that may be sharded over a mesh axis.

Inside `jax.shard_map`, with `axis_name`, each device has one shard of each row, in the order of the axis. Devices
exchange only the totals of their shards, each as large as one token. Without `axis_name` the arrays have all tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def running_sum(x: Float[Array, "B T *F"], axis_name: str | None = None) -> Float[Array, "B T *F"]:
    """For each token, the sum up to and including it."""
    within = lax.cumsum(x, axis=1)
    if axis_name is None:
        return within
    return within + _earlier(within[:, -1], axis_name, 0.0).sum(0)[:, None]


def running_log_sum(x: Float[Array, "B T *F"], axis_name: str | None = None) -> Float[Array, "B T *F"]:
    """For each token, the log of the sum of exponentials up to and including it."""
    within = lax.associative_scan(jnp.logaddexp, x, axis=1)
    if axis_name is None:
        return within
    # Finite, so that differences are not NaN.
    before = jax.nn.logsumexp(_earlier(within[:, -1], axis_name, -1e30), axis=0)
    return jnp.logaddexp(within, before[:, None])


def token_numbers(length: int, axis_name: str | None = None) -> Int[Array, " T"]:
    """The positions, in whole rows, of this device's `length` tokens."""
    first = 0 if axis_name is None else lax.axis_index(axis_name) * jnp.int32(length)
    return first + jnp.arange(length, dtype=jnp.int32)


def last_token(x: Float[Array, "B T *F"], axis_name: str | None = None) -> Float[Array, "B *F"]:
    """The entry of each row's last token, on every device."""
    own = x[:, -1]
    if axis_name is None:
        return own
    is_last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return lax.psum(jnp.where(is_last, own, jnp.zeros((), own.dtype)), axis_name)


def _earlier(own: Array, axis_name: str, otherwise: float) -> Array:
    """Every device's `own`, (devices, ...), with `otherwise` instead for this device and the later ones."""
    every = lax.all_gather(own, axis_name)
    before = jnp.arange(every.shape[0], dtype=jnp.int32) < lax.axis_index(axis_name)
    return jnp.where(before.reshape(-1, *[1] * own.ndim), every, jnp.asarray(otherwise, own.dtype))
