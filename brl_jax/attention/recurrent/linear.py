"""Linear attention: the softmax's kernel replaced by a product of features (Katharopoulos et al. 2020, 2006.16236)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import zero_padding
from brl_jax.attention.core.checks import check_choice
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.recurrent.chunks import (
    Sight,
    check_chunked_call,
    check_runs,
    check_state,
    group_rows,
    heads_first,
    keep,
    mask_rows,
    mask_scores,
    scan_chunks,
    token_runs,
    ungroup_rows,
)

FeatureMap = Literal["elu+1", "elu", "relu"]

# Of an array (B, T, heads, H) and the tokens' positions (B, T) or None.
Features = Callable[[Array, Any], Array]


class LinearState(NamedTuple):
    """What `linear_attention` knows of the tokens so far.

    Attributes:
      key_value: sum of phi(k) v^T.
      key: sum of phi(k); None without normalisation.
    """

    key_value: Float[Array, "B K F H"]
    key: Float[Array, "B K F"] | None


def init_linear_state(
    batch: int,
    num_kv_heads: int,
    features: int,
    value_dim: int,
    *,
    normalize: bool = True,
    dtype: Any = jnp.float32,
) -> LinearState:
    """The state of `linear_attention` before the first token; dtype is float32 for all inputs but float64's."""
    key = jnp.zeros((batch, num_kv_heads, features), dtype) if normalize else None
    return LinearState(jnp.zeros((batch, num_kv_heads, features, value_dim), dtype), key)


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
) -> Any:
    """Attention with the weights phi(q_i) . phi(k_j) in place of exp(q_i . k_j), in O(T) time and memory.

    out_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)): 2006.16236 eqs. 5 and 9 (causal: j <= i); 001
    (TransNormer) eq. 4. Causal attention goes chunk by chunk (quadratic inside a chunk only), and can go on from the
    state of earlier tokens in pieces of any size. A query that sees no key gives 0.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, S, K, H), value: (B, S, K, V), of the same dtype; K divides N, and heads n * (N / K) .. share a key
        head. S = T where causal.
      is_causal: query i sees the keys up to its own.
      normalize: divides by the sum of the weights.
      feature_map: phi; "elu+1" (positive), "elu" or "relu".
      key_value_seq_lengths: (B,) ints; keys from there on are padding. Whatever keys and values hold there, even NaN,
        does not reach the result, nor the state.
      segment_ids: (B, T) ints; a query sees keys of its own segment only. A segment is a run of equal ids: one that
        comes back begins a new segment. The given state is the past of the first one, the returned state that of
        the last one.
      state: of the tokens before these (causal only); None for none.
      return_state: return (out, state), with the state after these tokens.
      chunk_size: tokens of a chunk; it changes time and memory but not the result.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in query's dtype, computed in float32; with return_state, that and a `LinearState`.

    Raises:
      ValueError: arrays, lengths, segments, a state or sizes that don't fit, naming the argument.
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


def linear_sums(query: Array, key: Array, value: Array, *, feature_map: FeatureMap, **options: Any) -> Any:
    """`feature_sums` with phi of each number by itself."""
    check_choice("feature_map", feature_map, get_args(FeatureMap))

    def features(x: Array, positions: Any) -> Array:
        return apply_feature_map(feature_map, x)

    return feature_sums(query, key, value, features, features, num_features=query.shape[-1], **options)


def apply_feature_map(feature_map: FeatureMap, x: Array) -> Array:
    """phi of each number by itself."""
    match feature_map:
        case "elu+1":
            # Not elu(x) + 1: that rounds features below 1e-7 to 0.
            return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))
        case "elu":
            return jax.nn.elu(x)
        case "relu":
            return jax.nn.relu(x)
    raise ValueError(f"unknown feature_map {feature_map!r}")


def feature_sums(
    query: Array,
    key: Array,
    value: Array,
    query_features: Features,
    key_features: Features,
    *,
    num_features: int,
    normalize: bool,
    is_causal: bool,
    key_value_seq_lengths: Any,
    segment_ids: Any,
    state: LinearState | None,
    return_state: bool,
    chunk_size: int,
    implementation: str | None,
    positions: tuple[Array, Array] | None = None,
) -> tuple[tuple[Array, Array | None], LinearState]:
    """What `linear_attention` divides, for any features, computed chunk by chunk and not stored.

    Args: as for `linear_attention`; num_features: how many the features are; positions: of queries (B, T) and keys
    (B, S), for features that depend on them.

    Returns:
      The weighted sums of values (B, T, N, V), the sums of weights (B, T, N, 1) or None, and the state after them.
    """
    check_chunked_call(
        query, key, value, is_causal=is_causal, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    lengths, segments = check_runs(query, key, key_value_seq_lengths, segment_ids)
    key, value = zero_padding(key, lengths), zero_padding(value, lengths)
    runs = token_runs(key.shape[0], key.shape[1], lengths, segments)
    dtype = accumulation_dtype(query.dtype)
    fresh = init_linear_state(
        key.shape[0], key.shape[2], num_features, value.shape[3], normalize=normalize, dtype=dtype
    )
    state = check_state(state, fresh, "linear_attention")
    query_positions, key_positions = (None, None) if positions is None else positions

    def walk(state: LinearState, inputs: Any, runs: Any, strict: bool) -> tuple[LinearState, Any]:
        def step(state: LinearState, chunk: Any, sight: Sight) -> tuple[LinearState, Any]:
            q = query_features(chunk["query"].astype(dtype), chunk["query_positions"])
            k = key_features(chunk["key"].astype(dtype), chunk["key_positions"])
            return _step(q, k, chunk["value"], state, sight)

        return scan_chunks(step, state, inputs, runs, chunk_size=chunk_size, strict=strict)

    inputs = {
        "query": zero_padding(query, lengths) if is_causal else query,
        "key": key,
        "value": value,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    if is_causal:
        state, (total, weight) = walk(state, inputs, runs, strict=False)
    elif segments is not None and runs is not None:
        # The past with the token itself, and, read from the end, the future.
        _, (total, weight) = walk(fresh, inputs, runs, strict=False)
        backwards = jnp.where(runs < 0, -1, runs.max(axis=1)[:, None] - runs)[:, ::-1]
        _, future = walk(fresh, jax.tree.map(lambda x: x[:, ::-1], inputs), backwards, strict=True)
        total, weight = jax.tree.map(lambda a, b: a + b[:, ::-1], (total, weight), future)
    else:
        k = heads_first(key_features(key.astype(dtype), key_positions))
        k = k if runs is None else keep((runs >= 0)[:, None], k)
        state = _enter(k, heads_first(value), fresh)
        q = group_rows(query_features(query.astype(dtype), query_positions), key.shape[2])
        total, weight = (ungroup_rows(x, query.shape[1]) if x is not None else None for x in _read(q, state))
    return (total, weight), state


def _step(q: Array, k: Array, v: Array, state: LinearState, sight: Sight) -> tuple[LinearState, Any]:
    """One chunk: features (B, C, N, F), (B, C, K, F) and values; the sums and the weights' sums of each query."""
    length = k.shape[1]
    rows, k, v = group_rows(q, k.shape[2]), heads_first(k), heads_first(v)
    scores = mask_scores(sight.pairs, jnp.einsum("bkrf,bkcf->bkrc", rows, k))
    total, weight = _read(mask_rows(sight.past, rows), state)
    total = total + jnp.einsum("bkrc,bkch->bkrh", scores, v)
    if weight is not None:
        weight = ungroup_rows(weight + scores.sum(axis=-1, keepdims=True), length)
    entering = k if sight.enters is None else keep(sight.enters[:, None], k)
    state = _enter(entering, v, jax.tree.map(lambda leaf: keep(sight.stays, leaf), state))
    return state, (ungroup_rows(total, length), weight)


def _read(rows: Array, state: LinearState) -> tuple[Array, Array | None]:
    """Sums (B, K, R, H) and weights (B, K, R, 1) that feature rows (B, K, R, F) read from a state."""
    total = jnp.einsum("bkrf,bkfh->bkrh", rows, state.key_value)
    return total, None if state.key is None else jnp.einsum("bkrf,bkf->bkr", rows, state.key)[..., None]


def _enter(k: Array, v: Array, state: LinearState) -> LinearState:
    """The state with the keys (B, K, C, F) and values (B, K, C, H) added."""
    key_value = state.key_value + jnp.einsum("bkcf,bkch->bkfh", k, v)
    return LinearState(key_value, None if state.key is None else state.key + k.sum(axis=2))
