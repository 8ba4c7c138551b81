"""Cross-entropy over large vocabularies without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.sharding import current_row_shards

# Logits that exist at a time on a device, at the most (floats in float32: 64 MB).
_LOGITS = 2**24


def cross_entropy(
    hidden: Float[Array, "B T D"],
    to_logits: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    vocab_size: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of -log p(target) over all tokens, in nats, and the sum of weights, both float32.

    The sequence is cut along T (the batch axis stays whole, so that its sharding does), in pieces of at most 16M
    logits on a device; each piece's logits are made, used and, for the gradient, made again.

    Args:
      hidden: (B, T, D), what `to_logits` maps to (B, C, V) logits.
      targets: (B, T) ints in 0..V-1.
      weights: (B, T), 1 by default; 0 leaves a token out.
      vocab_size: V.
    """
    batch, length = targets.shape
    weights = jnp.ones((batch, length), jnp.float32) if weights is None else weights.astype(jnp.float32)

    def piece(hidden, targets, weights):
        logits = to_logits(hidden).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * weights)

    size = max(1, _LOGITS * current_row_shards() // (batch * vocab_size))
    if size >= length:
        return piece(hidden, targets, weights), weights.sum()
    count = -(-length // size)
    size = -(-length // count)

    def split(array):
        room = ((0, 0), (0, count * size - length)) + ((0, 0),) * (array.ndim - 2)
        array = jnp.pad(array, room)
        return jnp.moveaxis(array.reshape(batch, count, size, *array.shape[2:]), 1, 0)

    def step(total, xs):
        return total + jax.checkpoint(piece)(*xs), None

    total, _ = jax.lax.scan(step, jnp.zeros((), jnp.float32), (split(hidden), split(targets), split(weights)))
    return total, weights.sum()
