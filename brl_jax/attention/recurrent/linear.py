"""Linear attention: products of features instead of the softmax's exponential (Katharopoulos et al. 2020)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from brl_jax.attention.core.checks import check_positions, check_qkv, require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, dispatch
from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.chunk_scan import (
    ChunkVisibility,
    Recurrence,
    Step,
    kept_by_scan,
    scan_both_directions,
    scan_chunks,
)
from brl_jax.attention.recurrent.decay import (
    DecayedSum,
    apply_sum,
    check_log_decay,
    decayed_step,
    join_sums,
)
from brl_jax.attention.recurrent.kernels import Walked, recurrence_backends
from brl_jax.attention.recurrent.prefix_states import states_before
from brl_jax.attention.recurrent.rows import (
    group_rows,
    heads_first,
    mask_rows,
    mask_scores,
    ungroup_rows,
    zero_unless,
)
from brl_jax.fields import Count, Positive, declared

FeatureMap = Literal["elu+1", "elu", "relu", "identity"]

#: (array (B, T, heads, H), positions (B, T) or None) -> features (B, T, heads, F)
Features = Callable[[Array, Any], Array]


class LinearState(NamedTuple):
    """What `linear_attention` and `norm_attention` keep of the tokens so far.

    Attributes:
      key_value: the sum of phi(k) v^T over the tokens, with phi(k) rotated if there are rotary positions.
      key: the sum of phi(k); None if outputs are not divided by the sum of the weights.
    """

    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"] | None


@declared
def init_linear_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    normalize: bool = True,
) -> LinearState:
    """Returns the state of `linear_attention` (of `norm_attention` if not `normalize`) before the first token.

    Args:
      normalize: as in the calls; always False for `norm_attention`.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    key = jnp.zeros((batch, num_kv_heads, head_dim), jnp.float32) if normalize else None
    return LinearState(jnp.zeros((batch, num_kv_heads, head_dim, value_dim), jnp.float32), key)


@attention_function
def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    normalize: bool = True,
    feature_map: FeatureMap = "elu+1",
    log_decay: Float[Array, " K"] | Float[Array, "B T K"] | Float[Array, "B T K H"] | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: Positive = 10000.0,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """Attention with weights phi(q_i) . phi(k_j) instead of exp(q_i . k_j), in O(T) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = linear_attention(query, key, value, is_causal=True)

      out_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)), with j <= i if causal

    Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 5 and 9; TransNormer, arXiv:2210.10340, eq. 4. Causal
    attention is computed chunk by chunk, with products that are quadratic only inside a chunk. It can continue from
    the state of earlier tokens, in pieces of any size. A query that sees no key gives 0.

    With log_decay the state shrinks before each token: S_t = exp(log_decay_t) S_(t-1) + phi(k_t) v_t^T and out_t =
    S_t^T phi(q_t). With "identity" for phi, one number per head gives retention (RetNet, arXiv:2307.08621, eq. 5;
    lightning attention, arXiv:2401.04658), one per head and token Mamba-2's state space duality (arXiv:2405.21060,
    section 6), and one per feature and token gated linear attention (GLA, arXiv:2312.06635, eq. 3). Results and
    gradients are finite at any decay.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, S, K, H) and (B, S, K, V) of the same dtype. K divides N: N / K consecutive query heads share
        a key head. S = T if causal.
      normalize: divides by the sum of the weights.
      feature_map: phi, one of "elu+1" (always positive), "elu", "relu" or "identity".
      log_decay: (K,), (B, T, K) or (B, T, K, H), floating point, at most 0: the logarithm of the factor by which a
        key head's state shrinks, for all tokens, per token, or per token and feature; -inf empties it. Needs
        is_causal=True and normalize=False.
      is_causal: query i sees only the keys up to i.
      key_value_seq_lengths: (B,) ints; keys at and after the length are padding. Padding may contain anything, even
        NaN, and reaches neither the result nor the state.
      segment_ids: (B, T) ints; a query sees only the keys of its segment, a run of equal ids. An id that recurs
        later starts a new segment. The given state is the past of the first segment; the returned state belongs to
        the last.
      positions: (B, T) or (1, T) ints for rotary positions, or None. Queries and keys must be the same tokens.
        Positions rotate phi(q) and phi(k), so weights depend only on distances. The sum that divides uses the
        unrotated weights, which are never negative (Su et al. 2021, arXiv:2104.09864, eq. 19).
      rope_theta: base of the rotary frequencies.
      state: the state before these tokens, from `init_linear_state` or an earlier call; causal only.
      return_state: also return the state after these tokens.
      chunk_size: tokens in a chunk; changes time and memory, not the result.
      implementation: None picks by platform when the call is lowered; "xla" works everywhere. For causal attention,
        "pallas" is a TPU kernel that multiplies in the query's dtype, "triton" a GPU kernel, and "pallas_interpret"
        and "triton_interpret" interpret them.

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
      NotImplementedError: the named kernel does not support the call or the platform.
    """
    (total, weight), state = linear_sums(
        query, key, value, name="linear_attention", feature_map=feature_map, normalize=normalize, is_causal=is_causal,
        log_decay=log_decay, positions=positions, rope_theta=rope_theta, key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    out = total
    if weight is not None:
        out = _ratio(total, jnp.where(weight == 0, jnp.ones((), weight.dtype), weight))
    out = out.astype(query.dtype)
    return (out, state) if return_state else out


@jax.custom_jvp
def _ratio(total: Float[Array, "B T N V"], weight: Float[Array, "B T N 1"]) -> Float[Array, "B T N V"]:
    """total / weight. JAX's own derivative squares 1 / weight, which overflows for weights below 1e-19."""
    return total / weight


@_ratio.defjvp
def _ratio_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    ratio, weight = _ratio(*primals), primals[1]
    # XLA would join the factors 1 / weight of (tangents[0] - ratio * tangents[1]) / weight in the backward pass.
    return ratio, tangents[0] / weight - tangents[1] / weight * ratio


def linear_sums(
    query: Array,
    key: Array,
    value: Array,
    *,
    feature_map: FeatureMap,
    positions: Any = None,
    rope_theta: float = 10000.0,
    **options: Any,
) -> tuple[tuple[Array, Array | None], LinearState]:
    """`feature_sums` for an elementwise feature map, with or without rotary positions."""
    check_qkv(query, key, value)

    def features(x: Array, positions: Any) -> Array:
        return _FEATURE_MAPS[feature_map](x)

    if positions is not None:
        positions = check_positions(positions, query, key)
        options["positions"] = (positions, positions)
        options["rotation"] = functools.partial(rotate, theta=rope_theta)
    return feature_sums(query, key, value, features, features, num_features=query.shape[-1], **options)


def elu_plus_one(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    # Unlike elu(x) + 1, this does not round features below 1e-7 to 0.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


_FEATURE_MAPS: dict[FeatureMap, Callable[[Array], Array]] = {
    "elu+1": elu_plus_one,
    "elu": jax.nn.elu,
    "relu": jax.nn.relu,
    "identity": lambda x: x,
}


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
    positions: tuple[Num[Array, "B T"], Num[Array, "B S"]] | None = None,
    rotation: Features | None = None,
    log_decay: Any = None,
    name: str | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"] | None], LinearState]:
    """The numerator and denominator of linear attention for any features, which are computed chunk by chunk.

    Args:
      query, key, value, normalize, is_causal, state, chunk_size, implementation, and in `options`
        key_value_seq_lengths, segment_ids and return_state: as for `linear_attention`.
      query_features, key_features: the feature maps.
      num_features: F.
      positions: of queries and keys, or numbers derived from them, for features that depend on positions.
      rotation: applied to the numerator's features; must keep their number.
      log_decay: (K,), (B, T, K) or (B, T, K, F), as for `linear_attention`.
      name: of the public function, if kernels may compute it.

    Returns:
      The weighted sums of the values and the sums of the weights (None without normalize), both float32, and the
      state after these tokens.
    """
    dispatched = is_causal and name is not None
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, state=state, dispatched=dispatched,
        implementation=implementation, **options,
    )  # fmt: skip
    query, key, value, segments = prepared.query, prepared.key, prepared.value, prepared.segments
    batch, _, kv_heads, value_dim = value.shape

    sizes = (batch, kv_heads, num_features, value_dim)
    state = check_state(state, init_linear_state, *sizes, normalize=normalize)
    # A function, because dispatched functions must not close over arrays.
    fresh = functools.partial(init_linear_state, *sizes, normalize=normalize)
    query_positions, key_positions = (None, None) if positions is None else positions

    def both(features: Features, x: Array, positions: Any) -> _Both:
        made = features(x.astype(jnp.float32), positions)
        return _Both(made if rotation is None else rotation(made, positions), made)

    def step(state: LinearState, chunk: Any, visibility: ChunkVisibility) -> tuple[LinearState, Any]:
        q = both(query_features, chunk["query"], chunk["query_positions"])
        k = both(key_features, chunk["key"], chunk["key_positions"])
        return _step(q, k, chunk["value"], state, visibility)

    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    # With decay, outputs are neither divided by a sum of weights nor normalised later.
    out_dtype = jnp.float32 if log_decay is None else query.dtype

    def run(step: Step, recurrence: Recurrence) -> Any:
        """A causal call, through XLA or the platform's kernel."""
        scan = functools.partial(scan_chunks, step, chunk_size=chunk_size, recurrence=recurrence)
        if name is None:
            last, sums = scan(state, inputs, segments)
            return sums, last
        features = functools.partial(both, query_features), functools.partial(both, key_features)
        # Sums in bfloat16 halve what a GPU writes and rereads for the division. float16 would overflow.
        narrow = log_decay is not None or query.dtype == jnp.bfloat16
        backends = recurrence_backends(
            functools.partial(_walk_features, *features, out_dtype), query, key, value, features=num_features,
            chunk_size=chunk_size, out_dtype=query.dtype if narrow else jnp.float32, log_decay=log_decay,
        )  # fmt: skip
        total = jax.ShapeDtypeStruct((*query.shape[:3], value_dim), out_dtype)
        weight = jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32) if normalize else None
        last, sums = dispatch(
            name, implementation, backends, scan, state, inputs, segments, results=(state, (total, weight)),
            **kept_by_scan(step, state, inputs, chunk_size=chunk_size, recurrence=recurrence),
        )  # fmt: skip
        return sums, last

    if log_decay is not None:
        require(
            is_causal and not normalize,
            "log_decay needs is_causal=True and normalize=False: a sum of weights that decay may be 0, got "
            f"is_causal={is_causal} and normalize={normalize}",
        )
        log_decay = check_log_decay(log_decay, key.shape, num_features)
        inputs["log_decay"] = zero_padding(log_decay, prepared.lengths)

        def decayed(state: LinearState, chunk: Any, visibility: ChunkVisibility) -> tuple[DecayedSum, Any]:
            q = both(query_features, chunk["query"], chunk["query_positions"]).numerator
            k = both(key_features, chunk["key"], chunk["key_positions"]).numerator
            arrays = group_rows(q, kv_heads), heads_first(k), heads_first(chunk["value"])
            change, out = decayed_step(*arrays, chunk["log_decay"], state.key_value, visibility)
            return change, (ungroup_rows(out, k.shape[1]).astype(out_dtype), None)

        return run(*_decayed_scan(decayed, fresh))

    def summarize(chunk: Any, visibility: ChunkVisibility) -> LinearState:
        return step(fresh(), chunk, visibility)[0]

    recurrence = Recurrence(summarize, functools.partial(states_before, _join, _join), _join)
    if is_causal:
        return run(step, recurrence)
    if prepared.packed and segments is not None:
        scan: dict[str, Any] = {"chunk_size": chunk_size, "recurrence": recurrence}
        past, future = scan_both_directions(step, fresh(), inputs, segments, **scan)
        sums = jax.tree.map(jnp.add, past, future)
    else:
        k = jax.tree.map(heads_first, both(key_features, key, key_positions))
        k = k if segments is None else jax.tree.map(lambda x: zero_unless((segments >= 0)[:, None], x), k)
        state = _add_to_state(k, heads_first(value), fresh())
        q = jax.tree.map(lambda x: group_rows(x, kv_heads), both(query_features, query, query_positions))
        sums = tuple(None if x is None else ungroup_rows(x, query.shape[1]) for x in _read_state(q, state))
    return sums, state


def _decayed_scan(
    decayed: Callable[[LinearState, Any, ChunkVisibility], tuple[DecayedSum, Any]],
    fresh: Callable[[], LinearState],
) -> tuple[Step, Recurrence]:
    """The step and recurrence of a function that returns a chunk's change of the state and its outputs."""

    def step(state: LinearState, chunk: Any, visibility: ChunkVisibility) -> tuple[LinearState, Any]:
        change, sums = decayed(state, chunk, visibility)
        return LinearState(apply_sum(state.key_value, change, visibility.keeps_state), None), sums

    def summarize(chunk: Any, visibility: ChunkVisibility) -> DecayedSum:
        return decayed(fresh(), chunk, visibility)[0]

    def states(state: LinearState, summaries: DecayedSum, keeps: Any) -> tuple[LinearState, LinearState]:
        before, last = states_before(join_sums, apply_sum, state.key_value, summaries, keeps)
        return LinearState(before, None), LinearState(last, None)

    return step, Recurrence(summarize, states, join_sums)


def _walk_features(
    query_features: Callable[[Array, Any], _Both],
    key_features: Callable[[Array, Any], _Both],
    out_dtype: Any,
    walk: Callable[..., Any],
    state: LinearState,
    inputs: Any,
    segments: Int[Array, "B T"] | None,
    **options: Any,
) -> tuple[LinearState, Any]:
    """The last state and the sums from a kernel, `walk`, which gets features in the dtype of the arrays.

    Args:
      out_dtype: of the sums of the values.
    """
    value, log_decay = inputs["value"], inputs.get("log_decay")
    q = query_features(inputs["query"], inputs["query_positions"])
    k = key_features(inputs["key"], inputs["key_positions"])
    rotated = q.numerator is not q.denominator
    q, k = jax.tree.map(lambda x: x.astype(value.dtype), (q, k))

    def through(q: Array, k: Array, value: Array, key_value: Array, key: Array | None) -> Any:
        return walk(Walked(q, k, value, key_value, key, log_decay, None, segments), **options)

    if state.key is None or not rotated:
        sums = through(q.numerator, k.numerator, value, *state)
        weight = None if sums.weight is None else sums.weight[..., None]
        return LinearState(sums.key_value, sums.key), (sums.total.astype(out_dtype), weight)
    # Walk again with unrotated features for the weights; the values do not matter.
    sums = through(q.numerator, k.numerator, value, state.key_value, None)
    weights = through(q.denominator, k.denominator, value[..., :1], state.key_value[..., :1], state.key)
    return LinearState(sums.key_value, weights.key), (sums.total.astype(out_dtype), weights.weight[..., None])


def _join(earlier: LinearState, later: LinearState, keeps: Bool[Array, "*leading"] | None) -> LinearState:
    """The sums over two adjacent runs of chunks."""
    return jax.tree.map(lambda a, b: zero_unless(keeps, a) + b, earlier, later)


class _Both(NamedTuple):
    """Features of queries or keys for the two sums; the same array without rotation."""

    numerator: Array
    denominator: Array


def _step(
    q: _Both,
    k: _Both,
    v: Float[Array, "B C K V"],
    state: LinearState,
    visibility: ChunkVisibility,
) -> tuple[LinearState, tuple[Float[Array, "B C N V"], Float[Array, "B C N 1"] | None]]:
    """One chunk: the next state and, for each query, the weighted sum of the values and the sum of the weights.

    Args:
      q: features (B, C, N, F).
      k: features (B, C, K, F).
    """
    length, kv_heads = v.shape[1:3]
    rotated = q.numerator is not q.denominator
    rows, k = jax.tree.map(lambda x: group_rows(x, kv_heads), q), jax.tree.map(heads_first, k)
    v = heads_first(v)

    def scores(rows: Array, k: Array) -> Array:
        return mask_scores(visibility.pairs, jnp.einsum("bkrf,bkcf->bkrc", rows, k))

    weights = scores(rows.numerator, k.numerator)
    total, weight = _read_state(jax.tree.map(lambda x: mask_rows(visibility.reads_state, x), rows), state)
    total = total + jnp.einsum("bkrc,bkch->bkrh", weights, v)
    if weight is not None:
        weights = scores(rows.denominator, k.denominator) if rotated else weights
        weight = ungroup_rows(weight + weights.sum(axis=-1, keepdims=True), length)
    enters = visibility.enters_state
    added = k if enters is None else jax.tree.map(lambda x: zero_unless(enters[:, None], x), k)
    kept = jax.tree.map(lambda leaf: zero_unless(visibility.keeps_state, leaf), state)
    return _add_to_state(added, v, kept), (ungroup_rows(total, length), weight)


def _read_state(
    rows: _Both, state: LinearState
) -> tuple[Float[Array, "B K R V"], Float[Array, "B K R 1"] | None]:
    """The weighted sums of values and the sums of weights that feature rows (B, K, R, F) read from a state."""
    total = jnp.einsum("bkrf,bkfh->bkrh", rows.numerator, state.key_value)
    if state.key is None:
        return total, None
    return total, jnp.einsum("bkrf,bkf->bkr", rows.denominator, state.key)[..., None]


def _add_to_state(k: _Both, v: Float[Array, "B K C V"], state: LinearState) -> LinearState:
    """The state with keys (B, K, C, F) and values added."""
    key_value = state.key_value + jnp.einsum("bkcf,bkch->bkfh", k.numerator, v)
    return LinearState(key_value, None if state.key is None else state.key + k.denominator.sum(axis=2))
