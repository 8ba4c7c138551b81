"""Linear attention: a product of features in place of the softmax's exponential (Katharopoulos et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_sizes
from brl_jax.attention.core.checks import check_choice
from brl_jax.attention.recurrent.arguments import check_state, prepare_inputs
from brl_jax.attention.recurrent.chunk_scan import ChunkVisibility, scan_both_directions, scan_chunks
from brl_jax.attention.recurrent.rows import (
    group_rows,
    heads_first,
    mask_rows,
    mask_scores,
    ungroup_rows,
    zero_unless,
)

FeatureMap = Literal["elu+1", "elu", "relu"]

#: Maps an array (B, T, heads, H) and the positions of its tokens, (B, T) or None, to features (B, T, heads, F).
Features = Callable[[Array, Any], Array]


class LinearState(NamedTuple):
    """What `linear_attention` and `norm_attention` keep of the tokens so far.

    Attributes:
      key_value: the sum of phi(k) v^T over the tokens.
      key: the sum of phi(k); None if outputs are not divided by the sum of the weights.
    """

    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"] | None


def init_linear_state(
    batch: int, num_kv_heads: int, num_features: int, value_dim: int, *, normalize: bool = True
) -> LinearState:
    """The state of `linear_attention`, or without `normalize` of `norm_attention`, before the first token.

    Args:
      num_features: F, which is the head dimension H for the feature maps of these functions.
      value_dim: V, the head dimension of the values.
      normalize: as in the calls that use the state; always False for `norm_attention`.

    Raises:
      ValueError: a size below 1.
    """
    check_sizes(batch=batch, num_kv_heads=num_kv_heads, num_features=num_features, value_dim=value_dim)
    key = jnp.zeros((batch, num_kv_heads, num_features), jnp.float32) if normalize else None
    return LinearState(jnp.zeros((batch, num_kv_heads, num_features, value_dim), jnp.float32), key)


def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    is_causal: bool = False,
    normalize: bool = True,
    feature_map: FeatureMap = "elu+1",
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """Attention with the weights phi(q_i) . phi(k_j) in place of exp(q_i . k_j), in O(T) time and memory.

    out_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)), where j <= i in causal attention: Katharopoulos
    et al. 2020, arXiv:2006.16236, eqs. 5 and 9; TransNormer, arXiv:2210.10340, eq. 4. Causal attention is computed
    chunk by chunk, with products that are quadratic inside a chunk only. It can continue from the state of earlier
    tokens, in pieces of any size. A query that sees no key gives 0. `reference.linear_attention` is the plain form.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, S, K, H), value: (B, S, K, V), of the same dtype. K divides N: N / K consecutive query heads share a
        key head. S = T where causal.
      is_causal: query i sees the keys up to its own.
      normalize: divides by the sum of the weights.
      feature_map: phi; "elu+1" (always positive), "elu" or "relu".
      key_value_seq_lengths: (B,) ints; keys at and after the length are padding. What keys and values contain there,
        even NaN, reaches neither the result nor the state.
      segment_ids: (B, T) ints; a query sees the keys of its own segment only. A segment is a run of equal ids: an id
        that recurs later begins a new segment. The given state is the past of the first segment, and the returned
        state is that of the last.
      state: the state of the tokens before these (causal only), from an earlier call or `init_linear_state`; None if
        there are none.
      return_state: if True, the result is (out, state) with the state after these tokens.
      chunk_size: the tokens of a chunk; it changes time and memory but not the result.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the query, computed in float32; with return_state, that and a `LinearState`.

    Raises:
      ValueError: arrays, lengths, segments, a state or sizes that do not fit, naming the argument.
    """
    (total, weight), state = linear_sums(
        query, key, value, feature_map=feature_map, normalize=normalize, is_causal=is_causal,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state,
        return_state=return_state, chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip
    out = total
    if weight is not None:
        out = total / jnp.where(weight == 0, jnp.ones((), weight.dtype), weight)
    out = out.astype(query.dtype)
    return (out, state) if return_state else out


def linear_sums(
    query: Array, key: Array, value: Array, *, feature_map: FeatureMap, **options: Any
) -> tuple[tuple[Array, Array | None], LinearState]:
    """`feature_sums` of an elementwise feature map."""
    check_choice("feature_map", feature_map, get_args(FeatureMap))

    def features(x: Array, positions: Any) -> Array:
        return apply_feature_map(feature_map, x)

    return feature_sums(query, key, value, features, features, num_features=query.shape[-1], **options)


def apply_feature_map(feature_map: FeatureMap, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """phi, applied to each number by itself."""
    match feature_map:
        case "elu+1":
            # Not elu(x) + 1, which rounds features below 1e-7 to 0.
            return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))
        case "elu":
            return jax.nn.elu(x)
        case "relu":
            return jax.nn.relu(x)
    raise ValueError(f"unknown feature_map {feature_map!r}")


def feature_sums(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    query_features: Features,
    key_features: Features,
    *,
    num_features: int,
    normalize: bool,
    is_causal: bool,
    state: LinearState | None,
    chunk_size: int,
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    **options: Any,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"] | None], LinearState]:
    """The numerator and the denominator of linear attention with any features, which are computed chunk by chunk.

    Args:
      query, key, value, normalize, is_causal, state, chunk_size, and in `options` key_value_seq_lengths, segment_ids,
        return_state and implementation: as for `linear_attention`.
      query_features, key_features: the feature maps.
      num_features: the number of features F.
      positions: of the queries and keys, for features that depend on them.

    Returns:
      The weighted sums of the values, the sums of the weights (None without normalize), both float32, and the state
      after these tokens.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, state=state, chunk_size=chunk_size, **options
    )
    query, key, value, segments = prepared.query, prepared.key, prepared.value, prepared.segments
    batch, _, kv_heads, value_dim = value.shape
    fresh = init_linear_state(batch, kv_heads, num_features, value_dim, normalize=normalize)
    state = check_state(state, fresh, "init_linear_state")
    query_positions, key_positions = (None, None) if positions is None else positions

    def step(state: LinearState, chunk: Any, visibility: ChunkVisibility) -> tuple[LinearState, Any]:
        q = query_features(chunk["query"].astype(jnp.float32), chunk["query_positions"])
        k = key_features(chunk["key"].astype(jnp.float32), chunk["key_positions"])
        return _step(q, k, chunk["value"], state, visibility)

    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    if is_causal:
        state, sums = scan_chunks(step, state, inputs, segments, chunk_size=chunk_size)
    elif prepared.packed and segments is not None:
        past, future = scan_both_directions(step, fresh, inputs, segments, chunk_size=chunk_size)
        sums = jax.tree.map(jnp.add, past, future)
    else:
        k = heads_first(key_features(key.astype(jnp.float32), key_positions))
        k = k if segments is None else zero_unless((segments >= 0)[:, None], k)
        state = _add_to_state(k, heads_first(value), fresh)
        q = group_rows(query_features(query.astype(jnp.float32), query_positions), kv_heads)
        sums = tuple(None if x is None else ungroup_rows(x, query.shape[1]) for x in _read_state(q, state))
    return sums, state


def _step(
    q: Float[Array, "B C N F"],
    k: Float[Array, "B C K F"],
    v: Float[Array, "B C K V"],
    state: LinearState,
    visibility: ChunkVisibility,
) -> tuple[LinearState, tuple[Float[Array, "B C N V"], Float[Array, "B C N 1"] | None]]:
    """One chunk: the next state and, for each query, the weighted sum of the values and the sum of the weights."""
    length = k.shape[1]
    rows, k, v = group_rows(q, k.shape[2]), heads_first(k), heads_first(v)
    scores = mask_scores(visibility.pairs, jnp.einsum("bkrf,bkcf->bkrc", rows, k))
    total, weight = _read_state(mask_rows(visibility.reads_state, rows), state)
    total = total + jnp.einsum("bkrc,bkch->bkrh", scores, v)
    if weight is not None:
        weight = ungroup_rows(weight + scores.sum(axis=-1, keepdims=True), length)
    added = k if visibility.enters_state is None else zero_unless(visibility.enters_state[:, None], k)
    kept = jax.tree.map(lambda leaf: zero_unless(visibility.keeps_state, leaf), state)
    return _add_to_state(added, v, kept), (ungroup_rows(total, length), weight)


def _read_state(
    rows: Float[Array, "B K R F"], state: LinearState
) -> tuple[Float[Array, "B K R V"], Float[Array, "B K R 1"] | None]:
    """The weighted sums of the values and the sums of the weights that feature rows read from a state."""
    total = jnp.einsum("bkrf,bkfh->bkrh", rows, state.key_value)
    return total, None if state.key is None else jnp.einsum("bkrf,bkf->bkr", rows, state.key)[..., None]


def _add_to_state(k: Float[Array, "B K C F"], v: Float[Array, "B K C V"], state: LinearState) -> LinearState:
    """The state with keys and values added."""
    key_value = state.key_value + jnp.einsum("bkcf,bkch->bkfh", k, v)
    return LinearState(key_value, None if state.key is None else state.key + k.sum(axis=2))
