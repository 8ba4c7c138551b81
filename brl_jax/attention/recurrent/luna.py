"""Luna's causal attention: tokens are packed into a few tokens and read from them (Ma et al. 2021,
arXiv:2106.01540)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_positions, check_scale, require
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.core.segments import first_tokens
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.linear import LinearState, elu_plus_one, feature_sums
from brl_jax.fields import Count, Positive, declared


class LunaState(NamedTuple):
    """What `luna_attention` keeps of the tokens so far.

    Attributes:
      scores: the sum of k a^T over the tokens, where a are the token's weights in the packed tokens.
      values: the sum of a v^T.
      length: the number of tokens so far in each row.
    """

    scores: Float[Array, "B K H M"]
    values: Float[Array, "B K M V"]
    length: Int[Array, " B"]


@declared
def init_luna_state(
    batch: Count, num_kv_heads: Count, head_dim: Count, value_dim: Count | None = None, *, num_packed: Count
) -> LunaState:
    """Returns the state of `luna_attention` before the first token; `num_packed` is M.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    return LunaState(
        jnp.zeros((batch, num_kv_heads, head_dim, num_packed), jnp.float32),
        jnp.zeros((batch, num_kv_heads, num_packed, value_dim), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
    )


@attention_function
def luna_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    packed: Float[Array, "M K H"],
    *,
    scale: float | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: Positive = 10000.0,
    state: LunaState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LunaState]:
    """Causal attention through M packed tokens, in O(T M) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (M, K, H) -> (B, T, N, V)::

        out = luna_attention(query, key, value, packed)

      a_j = omega(scale packed k_j)                           the weights of token j in the packed tokens
      u_t = softmax(scale / t sum_{j <= t} (q_t . k_j) a_j)   the weights of the packed tokens for query t
      out_t = 1 / t sum_{j <= t} (u_t . a_j) v_j

    Luna (Ma et al. 2021, arXiv:2106.01540), section 3.3, with omega = elu + 1. The bidirectional form packs with a
    softmax over the tokens, which would see later ones. Both sums are linear attention, computed chunk by chunk.
    The bidirectional form is two calls of `full_attention`, Y = Attn(P, X) and Attn(X, Y) (eqs. 4, 5).

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) and (B, T, K, V) of the same tokens and dtype; K divides N.
      packed: (M, K, H), the queries of the packed tokens, the same for all sequences.
      scale: scale of the products; 1 / sqrt(H) by default.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding, which may contain anything.
      segment_ids: (B, T) ints; a token sees only its segment, a run of equal ids, and t counts from the segment's
        start. The given state is the past of the first segment; the returned state belongs to the last.
      positions: (B, T) or (1, T) ints for rotary positions, or None. They rotate q_t and k_j in u_t; what enters a
        packed token does not depend on positions.
      rope_theta: base of the rotary frequencies.
      state: the state before these tokens, from `init_luna_state` or an earlier call.
      return_state: also return the state after these tokens.
      chunk_size: tokens in a chunk; changes time and memory, not the result.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=True, key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids,
        state=state, return_state=return_state, implementation=implementation,
    )  # fmt: skip
    batch, length, _, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    require(
        packed.ndim == 3 and packed.shape[0] > 0 and packed.shape[1:] == (kv_heads, head_dim),
        f"packed must have shape (M, {kv_heads}, {head_dim}), not empty, got {packed.shape}",
    )
    scale = check_scale(scale, head_dim)
    many = packed.shape[0]
    before = check_state(state, init_luna_state, batch, kv_heads, head_dim, value_dim, num_packed=many)
    exact = [x.astype(jnp.float32) for x in (prepared.query, prepared.key, prepared.value)]
    weights = elu_plus_one(jnp.einsum("btkh,mkh->btkm", exact[1], packed.astype(jnp.float32)) * scale)
    turned = exact[:2]
    if positions is not None:
        places = check_positions(positions, query, key)
        turned = [rotate(x, places, rope_theta) for x in turned]
    number = before.length[:, None] + 1 + jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is not None:
        first = first_tokens(jnp.asarray(segment_ids, jnp.int32))
        number = number - jnp.where(first > 0, first + before.length[:, None], 0)
    share = (1.0 / number.astype(jnp.float32))[..., None, None]

    def same(x: Array, positions: Any) -> Array:
        return x

    sums = functools.partial(
        feature_sums, query_features=same, key_features=same, normalize=False, is_causal=True,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip
    (scores, _), new_scores = sums(
        turned[0], turned[1], weights, num_features=head_dim, state=LinearState(before.scores, None)
    )
    read = softmax_weights(scores * (share * scale), None)
    (out, _), new_values = sums(
        read, weights, exact[2], num_features=many, state=LinearState(before.values, None)
    )
    out = (out * share).astype(query.dtype)
    if not return_state:
        return out
    last = number[:, -1]
    if prepared.lengths is not None:
        lengths = prepared.lengths
        newest = jnp.take_along_axis(number, jnp.clip(lengths - 1, 0, length - 1)[:, None], axis=1)[:, 0]
        last = jnp.where(lengths > 0, newest, before.length)
    return out, LunaState(new_scores.key_value, new_values.key_value, last)
