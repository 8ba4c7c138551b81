"""Flow attention: linear attention whose queries and keys conserve a flow (Flowformer, Wu et al. 2022)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_positions
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.linear import LinearState, feature_sums
from brl_jax.attention.recurrent.rows import zero_unless
from brl_jax.fields import Count, Positive, declared
from brl_jax.sharding import sequence_axis

# Added to features and their sums, as in the authors' code, so that every flow is positive.
_MIN_FLOW = 1e-6
# The logarithm of a missing share of the competition, finite so that differences are not NaN.
_LOG_ZERO = -1e30


class FlowformerState(NamedTuple):
    """What causal `flowformer_attention` keeps of the tokens so far, for each query head.

    Attributes:
      query, key: the sums of phi(q) and of phi(k).
      sink: the sum of phi(q) over the incoming flow of its query.
      source: the sum of phi(k) over the outgoing flow of its key.
      competition: the logarithm of the sum of the exponentials of the keys' conserved flows; -1e30 at first.
      key_value: the sum of phi(k) v^T, with v times its key's share, and phi(k) rotated if there are rotary positions.
      length: the number of tokens so far in each row.
    """

    query: Float[Array, "B N F"]
    key: Float[Array, "B N F"]
    sink: Float[Array, "B N F"]
    source: Float[Array, "B N F"]
    competition: Float[Array, "B N"]
    key_value: Float[Array, "B N F V"]
    length: Int[Array, "B"]


class _Flows(NamedTuple):
    """Factors for linear attention: allocation over incoming flow for the queries, share of the competition for the
    values."""

    sinks: Float[Array, "B T N"]
    sources: Float[Array, "B T N"]


@declared
def init_flowformer_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    num_heads: Count | None = None,
) -> FlowformerState:
    """Returns the state of `flowformer_attention` before the first token.

    Args:
      num_heads: heads of the queries, which each have their own state; num_kv_heads by default.

    Raises:
      ValueError: a size is below 1.
    """
    num_heads = num_kv_heads if num_heads is None else num_heads
    value_dim = head_dim if value_dim is None else value_dim
    features = (batch, num_heads, head_dim)
    return FlowformerState(
        jnp.zeros(features, jnp.float32),
        jnp.zeros(features, jnp.float32),
        jnp.zeros(features, jnp.float32),
        jnp.zeros(features, jnp.float32),
        jnp.full((batch, num_heads), _LOG_ZERO, jnp.float32),
        jnp.zeros((batch, num_heads, head_dim, value_dim), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
    )


@attention_function
def flowformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: Positive = 10000.0,
    state: FlowformerState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], FlowformerState]:
    """Linear attention with conserved flows from values (sources) to outputs (sinks), in O(T) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = flowformer_attention(query, key, value, is_causal=True)

    Flowformer (Wu et al. 2022, arXiv:2202.06258), section 3, with phi the sigmoid and sums over all tokens:

      incoming flow I_i = phi(q_i) . sum_j phi(k_j)          outgoing flow O_j = phi(k_j) . sum_i phi(q_i)
      conserved     I'_i = phi(q_i) . sum_j phi(k_j) / O_j                 O'_j = phi(k_j) . sum_i phi(q_i) / I_i
      competition   c_j = n softmax(O')_j                    allocation    a_i = sigmoid(I'_i)
      out_i = a_i phi(q_i) / I_i sum_j phi(k_j) c_j v_j^T

    The number of tokens n, a factor from the authors' code, keeps the mean of c at 1. That code also clips O' to
    [-1, 1], unlike the paper; as the mean of O' is 1, clipping would remove about half of the competition. The
    authors' code for the Long Range Arena uses ReLU for phi and runs the softmax over the heads.

    Causal: every sum runs over the tokens up to i (for O, O' and the softmax's denominator, up to j). As in the
    authors' code, I, O, I' and O' are divided by the number n of these tokens. Cumulative sums compute them; the
    last line is causal linear attention, computed chunk by chunk.

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or
        float16; K divides N. Each query head has separate flows.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything,
        even NaN, and reaches neither a flow nor the state.
      positions, rope_theta: as for `linear_attention`. They rotate phi(q) and phi(k) in the last line; the flows
        use the unrotated features.
      state, return_state: as for `linear_attention`, with a `FlowformerState`.
      chunk_size: tokens in a chunk; changes time and memory, not the result.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths, state=state,
        return_state=return_state, implementation=implementation, same_tokens=True,
    )  # fmt: skip
    batch, length, heads, head_dim = query.shape
    options: dict[str, Any] = {}
    if positions is not None:
        options["positions"] = (check_positions(positions, query, key),) * 2
        options["rotation"] = functools.partial(rotate, theta=rope_theta)
    state = check_state(state, init_flowformer_state, batch, heads, head_dim, value.shape[3])
    group = heads // key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (prepared.query, prepared.key, prepared.value))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    exists = None if prepared.segments is None else prepared.segments >= 0
    phi_q, phi_k = (zero_unless(exists, jax.nn.sigmoid(x)) for x in (q, k))
    counts = jnp.full((batch,), length, jnp.int32) if prepared.lengths is None else prepared.lengths
    counts = jnp.minimum(counts, length)
    if is_causal:
        flows, new = _causal_flows(phi_q, phi_k, counts, exists, state)
    else:
        flows, new = _flows(phi_q, phi_k, counts, exists), state
    (total, _), linear = feature_sums(
        q, k, v * flows.sources[..., None], _features, _features, num_features=head_dim, normalize=False,
        is_causal=is_causal, key_value_seq_lengths=prepared.lengths, return_state=return_state,
        state=LinearState(state.key_value, None) if is_causal else None, chunk_size=chunk_size,
        implementation=implementation, **options,
    )  # fmt: skip
    out = (total * flows.sinks[..., None]).astype(query.dtype)
    return (out, new._replace(key_value=linear.key_value)) if return_state else out


def _features(x: Array, positions: Any) -> Array:
    return jax.nn.sigmoid(x)


def _flow(features: Float[Array, "B T N F"], sums: Float[Array, "B #T N F"]) -> Float[Array, "B T N"]:
    return ((features + _MIN_FLOW) * (sums + _MIN_FLOW)).sum(-1)


def _flows(q: Array, k: Array, counts: Int[Array, " B"], exists: Array | None) -> _Flows:
    """The flows over all `counts` tokens of each row; the features of padding are 0."""
    over = lambda x: x.sum(1, keepdims=True)  # noqa: E731
    incoming, outgoing = _flow(q, over(k)), _flow(k, over(q))
    conserved_sinks = _flow(q, over(k / outgoing[..., None]))
    conserved_sources = _flow(k, over(q / incoming[..., None]))
    where = None if exists is None else exists[..., None]
    shares = jax.nn.softmax(conserved_sources, axis=1, where=where)
    return _Flows(
        jax.nn.sigmoid(conserved_sinks) / incoming, shares * counts.astype(jnp.float32)[:, None, None]
    )


def _causal_flows(
    q: Array, k: Array, counts: Int[Array, " B"], exists: Array | None, state: FlowformerState
) -> tuple[_Flows, FlowformerState]:
    """The flows over the tokens up to each one, and the state after them, except for `key_value`."""
    length = q.shape[1]
    axis = sequence_axis(length)
    shard = functools.partial(_causal_flows_of_shard, axis=axis)
    if axis is None:
        return shard(q, k, counts, exists, state)
    cut, whole = PartitionSpec(None, axis), PartitionSpec()
    mapped = jax.shard_map(
        shard, in_specs=(cut, cut, whole, cut, whole), out_specs=(cut, whole), axis_names={axis}
    )
    return mapped(q, k, counts, exists, state)


def _causal_flows_of_shard(
    q: Array,
    k: Array,
    counts: Int[Array, " B"],
    exists: Array | None,
    state: FlowformerState,
    *,
    axis: str | None,
) -> tuple[_Flows, FlowformerState]:
    """`_causal_flows` for one shard of every row; without an axis, for whole rows."""
    number = jnp.minimum(_token_numbers(q.shape[1], axis)[None] + 1, counts[:, None])
    number = jnp.maximum(state.length[:, None] + number, 1).astype(jnp.float32)[..., None]

    def up_to(before: Float[Array, "B N F"], x: Float[Array, "B T N F"]) -> Float[Array, "B T N F"]:
        return before[:, None] + _running_sum(x, axis)

    queries, keys = up_to(state.query, q), up_to(state.key, k)
    incoming, outgoing = _flow(q, keys) / number, _flow(k, queries) / number
    sources = up_to(state.source, k / outgoing[..., None])
    sinks = up_to(state.sink, q / incoming[..., None])
    conserved_sinks, conserved_sources = _flow(q, sources) / number, _flow(k, sinks) / number
    if exists is not None:
        conserved_sources = jnp.where(exists[..., None], conserved_sources, _LOG_ZERO)
    # In logarithms, because a sum of exponentials relative to the largest would look at later tokens.
    competition = jnp.logaddexp(state.competition[:, None], _running_log_sum(conserved_sources, axis))
    flows = _Flows(
        jax.nn.sigmoid(conserved_sinks) / (incoming * number),
        jnp.exp(conserved_sources - competition) * number,
    )
    return flows, state._replace(
        query=_last_token(queries, axis),
        key=_last_token(keys, axis),
        sink=_last_token(sinks, axis),
        source=_last_token(sources, axis),
        competition=_last_token(competition, axis),
        length=state.length + counts,
    )


# Cumulative sums over rows that may be sharded over a mesh axis, in the order of its devices, which exchange only the
# totals of their shards. Without `axis_name` the arrays have all tokens.


def _running_sum(x: Float[Array, "B T *F"], axis_name: str | None) -> Float[Array, "B T *F"]:
    """For each token, the sum up to and including it."""
    within = lax.cumsum(x, axis=1)
    if axis_name is None:
        return within
    return within + _earlier(within[:, -1], axis_name, 0.0).sum(0)[:, None]


def _running_log_sum(x: Float[Array, "B T *F"], axis_name: str | None) -> Float[Array, "B T *F"]:
    """For each token, the log of the sum of exponentials up to and including it."""
    within = lax.associative_scan(jnp.logaddexp, x, axis=1)
    if axis_name is None:
        return within
    # Finite, so that differences are not NaN.
    before = jax.nn.logsumexp(_earlier(within[:, -1], axis_name, -1e30), axis=0)
    return jnp.logaddexp(within, before[:, None])


def _token_numbers(length: int, axis_name: str | None) -> Int[Array, " T"]:
    """The positions, in whole rows, of this device's `length` tokens."""
    first = 0 if axis_name is None else lax.axis_index(axis_name) * jnp.int32(length)
    return first + jnp.arange(length, dtype=jnp.int32)


def _last_token(x: Float[Array, "B T *F"], axis_name: str | None) -> Float[Array, "B *F"]:
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
