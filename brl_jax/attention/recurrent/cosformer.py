"""cosFormer: linear attention weighted by a cosine of the distance (Qin et al. 2022, arXiv:2202.08791)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_lengths, check_qkv, is_int, require
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.linear import LinearState, feature_sums
from brl_jax.fields import Count, declared


class CosformerState(NamedTuple):
    """What `cosformer_attention` keeps of the tokens so far.

    Attributes:
      key_value: the sum of phi(k) v^T over the tokens; phi has a cosine half and a sine half.
      key: the sum of phi(k).
      length: the number of tokens so far in each row.
    """

    key_value: Float[Array, "B K 2*H V"]
    key: Float[Array, "B K 2*H"]
    length: Int[Array, "B"]


@declared
def init_cosformer_state(
    batch: Count, num_kv_heads: Count, head_dim: Count, value_dim: Count | None = None
) -> CosformerState:
    """Returns the state of `cosformer_attention` before the first token.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    return CosformerState(
        jnp.zeros((batch, num_kv_heads, 2 * head_dim, value_dim), jnp.float32),
        jnp.zeros((batch, num_kv_heads, 2 * head_dim), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
    )


@attention_function
def cosformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    max_length: int | Int[Array, ""],
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: CosformerState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], CosformerState]:
    """Linear attention with weights ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / (2 M)), in O(T) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = cosformer_attention(query, key, value, max_length=1024, is_causal=True)

    Qin et al. 2022, arXiv:2202.08791, eqs. 10-12. The cosine of a difference is a sum of products of cosines and
    sines, so the features are [ReLU(x_i) cos(pi i / 2M), ReLU(x_i) sin(pi i / 2M)]. As in the authors' code, the
    outputs are divided by the sum of the weights, but at least by 1e-6.

    Args:
      query, key, value: as for `linear_attention`.
      max_length: M, at least the length of the whole sequence, including earlier and later pieces: tokens more than
        M apart would get a negative weight. An int32 scalar array is not checked.
      is_causal, key_value_seq_lengths, segment_ids, chunk_size, implementation: as for `linear_attention`.
      state, return_state: as for `linear_attention`, with a `CosformerState`.

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: there are more tokens than max_length, or an argument does not fit.
    """
    check_qkv(query, key, value)
    length = max(query.shape[1], key.shape[1])
    if isinstance(max_length, jax.Array) and max_length.shape == () and max_length.dtype == jnp.int32:
        max_length = max_length.astype(jnp.float32)
    else:
        require(
            is_int(max_length) and bool(max_length >= length),
            f"max_length must be an int of at least the sequence's length {length}, got {max_length!r}",
        )
    batch, _, kv_heads, head_dim = key.shape
    given = check_state(state, init_cosformer_state, batch, kv_heads, head_dim, value.shape[3])
    index = given.length

    # Use an array max_length only here: features must not close over arrays, as kernels may compute them.
    def angles(length: int) -> Array:
        positions = index[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        return positions.astype(jnp.float32) * (math.pi / (2 * max_length))

    def features(x: Array, angles: Array) -> Array:
        x = jax.nn.relu(x)
        angles = angles[:, :, None, None]
        return jnp.concatenate([x * jnp.cos(angles), x * jnp.sin(angles)], axis=-1)

    (total, weight), sums = feature_sums(
        query, key, value, features, features, num_features=2 * head_dim, normalize=True, is_causal=is_causal,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids,
        state=None if state is None else LinearState(given.key_value, given.key), return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
        positions=(angles(query.shape[1]), angles(key.shape[1])), name="cosformer_attention",
    )  # fmt: skip
    assert weight is not None
    assert sums.key is not None
    out = (total / jnp.maximum(weight, 1e-6)).astype(query.dtype)
    if not return_state:
        return out
    tokens = query.shape[1]
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, tokens)
    return out, CosformerState(sums.key_value, sums.key, index + (tokens if lengths is None else lengths))
