"""Linear attention: a product of features in place of the softmax's exponential (Katharopoulos et al. 2020)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from brl_jax.attention.core.arguments import check_positions_shape, check_sizes, zero_padding
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_choice, check_qkv, require
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

FeatureMap = Literal["elu+1", "elu", "relu", "identity"]

#: Maps an array (B, T, heads, H) and the positions of its tokens, (B, T) or None, to features (B, T, heads, F).
Features = Callable[[Array, Any], Array]


class LinearState(NamedTuple):
    """What `linear_attention` and `norm_attention` keep of the tokens so far.

    Attributes:
      key_value: the sum of phi(k) v^T over the tokens, phi(k) rotated where there are rotary positions.
      key: the sum of phi(k); None if outputs are not divided by the sum of the weights.
    """

    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"] | None


def init_linear_state(
    batch: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None, *, normalize: bool = True
) -> LinearState:
    """The state of `linear_attention`, or without `normalize` of `norm_attention`, before the first token.

    Args:
      num_features: F, which is the head dimension H for the feature maps of these functions.
      value_dim: V, the head dimension of the values.
      normalize: as in the calls that use the state; always False for `norm_attention`.

    Raises:
      ValueError: a size below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    check_sizes(batch=batch, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim)
    key = jnp.zeros((batch, num_kv_heads, head_dim), jnp.float32) if normalize else None
    return LinearState(jnp.zeros((batch, num_kv_heads, head_dim, value_dim), jnp.float32), key)


@attention_function
def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    is_causal: bool = False,
    normalize: bool = True,
    feature_map: FeatureMap = "elu+1",
    log_decay: Float[Array, " K"] | Float[Array, "B T K"] | Float[Array, "B T K H"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: float = 10000.0,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """Attention with the weights phi(q_i) . phi(k_j) in place of exp(q_i . k_j), in O(T) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = linear_attention(query, key, value, is_causal=True)

    out_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j)), where j <= i in causal attention: Katharopoulos
    et al. 2020, arXiv:2006.16236, eqs. 5 and 9; TransNormer, arXiv:2210.10340, eq. 4. Causal attention is computed
    chunk by chunk, with products that are quadratic inside a chunk only. It can continue from the state of earlier
    tokens, in pieces of any size. A query that sees no key gives 0. `reference.linear_attention` is the plain form.

    With log_decay the state shrinks before each token: S_t = exp(log_decay_t) S_(t-1) + phi(k_t) v_t^T and
    out_t = S_t^T phi(q_t). With "identity" for phi this is retention with a number for each head (RetNet,
    arXiv:2307.08621, eq. 5; lightning attention, arXiv:2401.04658), Mamba-2's state space duality with one for each
    head and token (arXiv:2405.21060, section 6), and gated linear attention with one for each feature and token (GLA,
    arXiv:2312.06635, eq. 3). Results and gradients are finite at any decay.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, S, K, H), value: (B, S, K, V), of the same dtype. K divides N: N / K consecutive query heads share a
        key head. S = T where causal.
      is_causal: query i sees the keys up to its own.
      normalize: divides by the sum of the weights.
      feature_map: phi; "elu+1" (always positive), "elu", "relu" or "identity".
      log_decay: (K,), (B, T, K) or (B, T, K, H), floating point, at most 0: the logarithm of the factor by which the
        state of a key head shrinks, for all tokens, for each token, or for each token and feature; -inf empties it. It
        needs is_causal=True and normalize=False.
      key_value_seq_lengths: (B,) ints; keys at and after the length are padding. What keys and values contain there,
        even NaN, reaches neither the result nor the state.
      segment_ids: (B, T) ints; a query sees the keys of its own segment only. A segment is a run of equal ids: an id
        that recurs later begins a new segment. The given state is the past of the first segment, and the returned
        state is that of the last.
      positions: (B, T) or (1, T) ints, with rotary positions, for queries and keys that are the same tokens; None
        without. They rotate phi(q) and phi(k), so that the weights depend on distances only. The sum that divides is of
        the weights without rotation, which are not negative (Su et al. 2021, arXiv:2104.09864, eq. 19).
      rope_theta: the base of their frequencies.
      state: the state of the tokens before these (causal only), from an earlier call or `init_linear_state`; None if
        there are none.
      return_state: if True, the result is (out, state) with the state after these tokens.
      chunk_size: the tokens of a chunk; it changes time and memory but not the result.
      implementation: None picks by platform at lowering time. "xla" works everywhere; "pallas", for causal attention,
        is a TPU kernel, whose products are computed in the dtype of the query, and "pallas_interpret" interprets it on
        any platform.

    Returns:
      (B, T, N, V) in the dtype of the query, computed in float32; with return_state, that and a `LinearState`.

    Raises:
      ValueError: arrays, lengths, segments, a state or sizes that do not fit, naming the argument.
      NotImplementedError: if `implementation="pallas"` cannot serve the request, or if the call is then lowered for
        another platform than a TPU.
    """
    (total, weight), state = linear_sums(
        query, key, value, name="linear_attention", feature_map=feature_map, normalize=normalize, is_causal=is_causal,
        log_decay=log_decay, positions=positions, rope_theta=rope_theta, key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    out = total
    if weight is not None:
        out = total / jnp.where(weight == 0, jnp.ones((), weight.dtype), weight)
    out = out.astype(query.dtype)
    return (out, state) if return_state else out


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
    """`feature_sums` of an elementwise feature map, with or without rotary positions."""
    check_qkv(query, key, value)
    check_choice("feature_map", feature_map, get_args(FeatureMap))

    def features(x: Array, positions: Any) -> Array:
        return apply_feature_map(feature_map, x)

    if positions is not None:
        positions = check_positions(positions, query, key)
        options["positions"] = (positions, positions)
        options["rotation"] = functools.partial(rotate, theta=rope_theta)
    return feature_sums(query, key, value, features, features, num_features=query.shape[-1], **options)


def check_positions(positions: Array, query: Array, key: Array) -> Int[Array, "B T"]:
    """The positions of queries and keys that are the same tokens, one row for each of the batch.

    Raises:
      ValueError: another shape.
    """
    check_positions_shape(positions, query, key)
    return jnp.broadcast_to(positions, query.shape[:2])


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
        case "identity":
            return x
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
    positions: tuple[Num[Array, "B T"], Num[Array, "B S"]] | None = None,
    rotation: Features | None = None,
    log_decay: Any = None,
    name: str | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"] | None], LinearState]:
    """The numerator and the denominator of linear attention with any features, which are computed chunk by chunk.

    Args:
      query, key, value, normalize, is_causal, state, chunk_size, and in `options` key_value_seq_lengths, segment_ids,
        return_state: as for `linear_attention`; implementation as well.
      query_features, key_features: the feature maps.
      num_features: the number of features F.
      positions: of the queries and keys, or numbers that follow from them, for features that depend on them.
      rotation: applied to the features of the numerator, whose number it must not change.
      log_decay: (K,), (B, T, K) or (B, T, K, F), as for `linear_attention`.
      name: of the public function, where kernels may serve it.

    Returns:
      The weighted sums of the values, the sums of the weights (None without normalize), both float32, and the state
      after these tokens.
    """
    dispatched = is_causal and name is not None
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, state=state, chunk_size=chunk_size, dispatched=dispatched,
        implementation=implementation, **options,
    )  # fmt: skip
    query, key, value, segments = prepared.query, prepared.key, prepared.value, prepared.segments
    batch, _, kv_heads, value_dim = value.shape

    def fresh() -> LinearState:  # not an array, which functions that dispatch must not close over
        return init_linear_state(batch, kv_heads, num_features, value_dim, normalize=normalize)

    state = check_state(state, fresh(), "init_linear_state")
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
    # Nothing is divided by a sum of weights, or normalised, after a decay.
    out_dtype = jnp.float32 if log_decay is None else query.dtype

    def run(step: Step, recurrence: Recurrence) -> Any:
        """A causal call, through XLA or the kernel of its platform."""
        scan = functools.partial(scan_chunks, step, chunk_size=chunk_size, recurrence=recurrence)
        if name is None:
            last, sums = scan(state, inputs, segments)
            return sums, last
        features = functools.partial(both, query_features), functools.partial(both, key_features)
        # A sum in bfloat16 halves what a GPU writes and reads again to divide it. float16 would overflow.
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
    """The step and the recurrence of a function that returns what a chunk does to the state, and its outputs."""

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
    """The last state and the sums by a kernel, `walk`, which is given features in the dtype of the arrays.

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
    # A second walk with the features before they were rotated, whose values do not matter.
    sums = through(q.numerator, k.numerator, value, state.key_value, None)
    weights = through(q.denominator, k.denominator, value[..., :1], state.key_value[..., :1], state.key)
    return LinearState(sums.key_value, weights.key), (sums.total.astype(out_dtype), weights.weight[..., None])


def _join(earlier: LinearState, later: LinearState, keeps: Bool[Array, "*leading"] | None) -> LinearState:
    """The sums over two adjacent runs of chunks."""
    return jax.tree.map(lambda a, b: zero_unless(keeps, a) + b, earlier, later)


class _Both(NamedTuple):
    """Features of queries or keys for the two sums, which are the same array without rotation."""

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
      q: features (B, C, N, F). k: features (B, C, K, F).
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
    """The weighted sums of the values and the sums of the weights that feature rows (B, K, R, F) read from a state."""
    total = jnp.einsum("bkrf,bkfh->bkrh", rows.numerator, state.key_value)
    if state.key is None:
        return total, None
    return total, jnp.einsum("bkrf,bkf->bkr", rows.denominator, state.key)[..., None]


def _add_to_state(k: _Both, v: Float[Array, "B K C V"], state: LinearState) -> LinearState:
    """The state with keys (B, K, C, F) and values added."""
    key_value = state.key_value + jnp.einsum("bkcf,bkch->bkfh", k.numerator, v)
    return LinearState(key_value, None if state.key is None else state.key + k.denominator.sum(axis=2))
