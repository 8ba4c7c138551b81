"""Cross-entropy over large vocabularies, without all logits in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import concrete_values, require
from brl_jax.models.inputs import check_ints
from brl_jax.sharding import constrain, current_shards

# Upper bound on the logits that exist at a time on a device (64 MB in float32).
_LOGITS = 2**24


def cross_entropy(
    hidden: Float[Array, "B T D"],
    to_logits: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    vocab_size: int,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the weighted sum of -log p(target) in nats and the sum of weights, both float32.

    The sequence is cut along T into pieces of at most 16M logits per device. Each piece's logits are computed, used,
    and recomputed for the gradient. The batch is not cut, so it keeps its sharding; if T is sharded over a mesh, every
    piece has a part on each device.

    Args:
      hidden: (B, T, D) hidden states.
      to_logits: maps pieces (B, C, D) of them to logits (B, C, V).
      targets: (B, T) ints in 0..V-1.
      weights: (B, T), 1 by default; 0 ignores a token, whatever its target.
      vocab_size: V.
      z_loss: adds z_loss * log(Z)^2 to the loss of each target, where Z is the sum of the exponentials of its logits
        (PaLM, arXiv:2204.02311, section 5); it keeps log(Z) near 0.

    Raises:
      ValueError: targets or weights have the wrong shape or type, or a target with a nonzero weight is outside the
        vocabulary. Traced targets cannot be checked; outside the vocabulary they give NaN.
    """
    batch, length = hidden.shape[:2]
    _check_targets(targets, weights, (batch, length), vocab_size)
    if weights is None:
        weights = jnp.ones((batch, length), jnp.float32)
    else:
        weights = weights.astype(jnp.float32)
        targets = jnp.where(weights == 0, 0, targets)

    def piece(hidden, targets, weights):
        logits = to_logits(hidden).astype(jnp.float32)
        # JAX counts negative indices from the end, so map negative targets outside the vocabulary.
        outside = jnp.where(targets < 0, vocab_size, targets)[..., None]
        chosen = jnp.take_along_axis(logits, outside, axis=-1)[..., 0]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        losses = log_z - chosen
        return jnp.sum((losses + z_loss * jnp.square(log_z) if z_loss else losses) * weights)

    shards = current_shards("length")
    shards = shards if length % shards == 0 else 1
    shard_length = length // shards
    size = max(1, _LOGITS * current_shards("batch") // (batch * vocab_size))
    if size >= shard_length:
        return piece(hidden, targets, weights), weights.sum()
    count = -(-shard_length // size)
    size = -(-shard_length // count)

    def split(array):
        rest = array.shape[2:]
        array = array.reshape(batch, shards, shard_length, *rest)
        array = jnp.pad(array, ((0, 0), (0, 0), (0, count * size - shard_length)) + ((0, 0),) * len(rest))
        array = jnp.moveaxis(array.reshape(batch, shards, count, size, *rest), 2, 0)
        array = array.reshape(count, batch, shards * size, *rest)
        return constrain(array, (None, "batch", "length", *(None for _ in rest)))

    def step(total, xs):
        return total + jax.checkpoint(piece)(*xs), None

    total, _ = jax.lax.scan(step, jnp.zeros((), jnp.float32), (split(hidden), split(targets), split(weights)))
    return total, weights.sum()


def _check_targets(targets: Any, weights: Any, shape: tuple[int, int], vocab_size: int) -> None:
    check_ints("targets", targets, (shape,))
    require(
        weights is None or weights.shape == shape,
        f"weights must have shape {shape}, got {getattr(weights, 'shape', None)}",
    )
    known = concrete_values(targets)
    counts = np.ones(shape, bool) if weights is None else concrete_values(weights)
    if known is None or counts is None:
        return
    wrong = known[((known < 0) | (known >= vocab_size)) & (counts != 0)]
    require(wrong.size == 0, f"targets must be 0 to vocab_size-1={vocab_size - 1}, got {wrong[:5].tolist()}")
