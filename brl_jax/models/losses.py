"""Cross-entropy over large vocabularies without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.sharding import constrain, current_shards

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
    logits on a device; each piece's logits are made, used and, for the gradient, made again. Where T itself is cut over
    a mesh, each device gives its part of every piece.

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

    shards = current_shards("length")
    shards = shards if length % shards == 0 else 1
    stretch = length // shards
    size = max(1, _LOGITS * current_shards("batch") // (batch * vocab_size))
    if size >= stretch:
        return piece(hidden, targets, weights), weights.sum()
    count = -(-stretch // size)
    size = -(-stretch // count)

    def split(array):
        rest = array.shape[2:]
        array = array.reshape(batch, shards, stretch, *rest)
        array = jnp.pad(array, ((0, 0), (0, 0), (0, count * size - stretch)) + ((0, 0),) * len(rest))
        array = jnp.moveaxis(array.reshape(batch, shards, count, size, *rest), 2, 0)
        array = array.reshape(count, batch, shards * size, *rest)
        return constrain(array, (None, "batch", "length", *(None for _ in rest)))

    def step(total, xs):
        return total + jax.checkpoint(piece)(*xs), None

    total, _ = jax.lax.scan(step, jnp.zeros((), jnp.float32), (split(hidden), split(targets), split(weights)))
    return total, weights.sum()
