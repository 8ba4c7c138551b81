"""How tokens are drawn from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sample(
    key: Array, logits: Float[Array, "B V"], *, top_k: int | None = None, top_p: float | None = None
) -> Int[Array, "B"]:
    """Draws a token for each row from softmax(logits), cut to the top_k most likely tokens and then to their top_p
    share; see `likely`.

    Returns:
      (B,) int32.
    """
    return jax.random.categorical(key, likely(logits, top_k=top_k, top_p=top_p), axis=-1).astype(jnp.int32)


def likely(
    logits: Float[Array, "*L V"], *, top_k: int | None = None, top_p: float | None = None
) -> Float[Array, "*L V"]:
    """Returns the logits of the most likely tokens, and -inf for the others.

    Args:
      logits: (..., V) floats.
      top_k: how many of the most likely tokens to keep, including ties with the last; None for all.
      top_p: keeps the most likely tokens until their probabilities reach this sum, including ties with the last; None
        for all.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        # The last token to keep is the one at which the sum reaches top_p.
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
