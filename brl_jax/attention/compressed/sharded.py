"""Compressed tokens of sequences that are sharded over a mesh axis; to be called inside `jax.shard_map`.

`compress_blocks` fetches the history of its blocks from neighbouring devices. `brl_jax.compress(..., axis_name=...)`
merges the softmaxes of all devices instead. `propagate` needs neither, because every device has the compressed tokens.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.compressed import compress_blocks as of_one_device
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.halo import tokens_before
from brl_jax.attention.core.on_mesh import Cut
from brl_jax.attention.core.scores import Score


def _cut(*_: Any, **__: Any) -> Cut:
    return Cut({"C": "blocks", "T": "length"})


@divided(_cut)
def compress_blocks(
    query: Float[Array, "B C M N H"],
    key: Float[Array, "B T N H"],
    contrast_key: Float[Array, "B T N H"] | None,
    value: Float[Array, "B T N V"],
    *,
    gamma: Float[Array, "N"] | float | None,
    axis_name: str,
    block_size: int,
    history_size: int,
    history_lengths: Int[Array, "C"] | Int[Array, "B C"],
    earlier_key: Float[Array, "B R N H"] | None = None,
    earlier_contrast_key: Float[Array, "B R N H"] | None = None,
    earlier_value: Float[Array, "B R N H"] | None = None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#N #M #R"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B C M N V"]:
    """`brl_jax.compress_blocks` of sequences that are sharded over `axis_name`, C blocks per device.

    Unlike there, key, contrast_key and value belong to the blocks' own tokens, T = C * block_size; the `history_size`
    tokens before them come from the neighbours.

    Args:
      query: of this device's blocks.
      axis_name: the mesh axis; the shards of a sequence follow its order.
      history_lengths: of this device's blocks.
      earlier_key, earlier_contrast_key, earlier_value: of the history_size tokens before the whole sequence, the same
        on all devices.
      gamma, block_size, history_size, scale, score, bias, implementation: as in `brl_jax.compress_blocks`.

    Returns:
      (B, C, M, N, H) in query's dtype.

    Raises:
      ValueError: T is not C * block_size.
    """
    require(query.ndim == 5, f"query must have shape (B, blocks, M, N, H), got {query.shape}")
    require(
        key.shape[1] == query.shape[1] * block_size,
        f"key must hold the {query.shape[1]} blocks of {block_size} tokens of this device, got {key.shape[1]} tokens",
    )

    def with_history(x: Any, first: Any) -> Any:
        if x is None:
            return None
        history = tokens_before(x, history_size, axis_name)
        if first is not None:
            # If the sequence began fewer than history_size tokens ago, the earlier tokens fill the rest.
            padded = jnp.pad(first, ((0, 0), (0, history_size), (0, 0), (0, 0)))
            place = jnp.minimum(lax.axis_index(axis_name) * x.shape[1], history_size)
            history += lax.dynamic_slice_in_dim(padded, place, history_size, axis=1)
        return jnp.concatenate([history, x], axis=1)

    return of_one_device.compress_blocks(
        query,
        with_history(key, earlier_key),
        with_history(contrast_key, earlier_contrast_key),
        with_history(value, earlier_value),
        block_size=block_size,
        history_size=history_size,
        gamma=gamma,
        history_lengths=history_lengths,
        scale=scale,
        score=score,
        bias=bias,
        implementation=implementation,
    )
