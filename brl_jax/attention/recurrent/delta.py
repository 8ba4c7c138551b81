"""The delta rule and its relatives: each token replaces what the state stores under its key. The state may decay."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.checks import require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, dispatch
from brl_jax.attention.core.products import multiply_precisely
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.chunk_scan import (
    SAVED,
    ChunkVisibility,
    Recurrence,
    kept_by_scan,
    scan_chunks,
)
from brl_jax.attention.recurrent.decay import FeatureDecay, HeadDecay, feature_decay, for_rows, head_decay
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
from brl_jax.attention.recurrent.unit_lower import solve_unit_lower
from brl_jax.fields import Count, declared


class DeltaState(NamedTuple):
    """What the delta rules and `rwkv7_attention` keep of the tokens so far.

    Attributes:
      key_value: S, each key head's linear map from keys to values.
    """

    key_value: Float[Array, "B K H V"]


@declared
def init_delta_state(
    batch: Count, num_kv_heads: Count, head_dim: Count, value_dim: Count | None = None
) -> DeltaState:
    """Returns the state of the delta rules and of `rwkv7_attention` before the first token.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    return DeltaState(jnp.zeros((batch, num_kv_heads, head_dim, value_dim), jnp.float32))


@attention_function
def delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    beta: Float[Array, "B T K"],
    normalize_keys: bool = True,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """Linear attention in which each token corrects the value stored under its key, in O(T) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, K) -> (B, T, N, V)::

        out = delta_rule(query, key, value, beta=beta)

      S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T,  out_t = S_t^T q_t

    DeltaNet (Yang et al. 2024, arXiv:2406.06484, eqs. 4-5), always causal. It is computed chunk by chunk in the WY
    form (section 3.2). With A the strictly lower part of diag(beta) K K^T, the corrected values of a chunk are R =
    (I + A)^-1 diag(beta) (V - K S), the outputs Q S + tril(Q K^T) R and the next state S + K^T R. The inverse comes
    from products of blocks of doubling size, so nothing loops over tokens, forward or backward.

    A GPU computes all chunks at once: each chunk maps the state S to A S + B, and a tree joins the maps, in
    float32. Their products do not grow for beta |k|^2 between 0 and 2. Beyond that the recurrence itself diverges,
    and the products may overflow earlier.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) and (B, T, K, V) of the same dtype. K divides N: N / K consecutive query heads share
        a key head and its state.
      beta: (B, T, K), floating point: how much each value replaces the stored one, from 0 (not at all) to 1 (entirely).
      normalize_keys: divides each key by its l2 norm; a zero key stays zero. The recurrence is stable only for beta
        |k|^2 below 2.
      key_value_seq_lengths, segment_ids, return_state, implementation: as for `linear_attention`.
      state: as for `linear_attention`, a `DeltaState`.
      chunk_size: tokens in a chunk; changes time and memory, not the result. The cost of a chunk's inverse grows
        with the cube of its size.

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    return _attend(
        query, key, value, {"beta": beta}, normalize_keys, "delta_rule",
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state, return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip


@attention_function
def gated_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    beta: Float[Array, "B T K"],
    log_decay: Float[Array, "B T K"],
    normalize_keys: bool = True,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """The delta rule on a state that first decays by one factor per head, in O(T) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, K) x 2 -> (B, T, N, V)::

        out = gated_delta_rule(query, key, value, beta=beta, log_decay=log_decay)

      D_t = exp(log_decay_t) S_(t-1),  S_t = D_t + beta_t k_t (v_t - D_t^T k_t)^T,  out_t = S_t^T q_t

    Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464, eq. 10). It is computed like `delta_rule`, with each pair of
    tokens weighted by the decay between them (section 3.3). The logarithms between two tokens are summed separately
    for each pair: a difference of sums from the chunk's first token would lose a weak decay behind a strong one,
    and its exponential could overflow.

    Args:
      log_decay: (B, T, K), floating point, at most 0: the logarithm of the factor by which the state shrinks before
        the token is written; -inf empties it.
      query, key, value, beta and all options: as for `delta_rule`.

    Returns:
      As `delta_rule`.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    return _attend(
        query, key, value, {"beta": beta, "log_decay": log_decay}, normalize_keys, "gated_delta_rule",
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state, return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip


@attention_function
def kimi_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    beta: Float[Array, "B T K"],
    log_decay: Float[Array, "B T K H"],
    normalize_keys: bool = True,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """The delta rule on a state that first decays by one factor per key feature, in O(T) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, K), (B, T, K, H) -> (B, T, N, V)::

        out = kimi_delta_rule(query, key, value, beta=beta, log_decay=log_decay)

      D_t = diag(exp(log_decay_t)) S_(t-1),  S_t = D_t + beta_t k_t (v_t - D_t^T k_t)^T,  out_t = S_t^T q_t

    Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692, eq. 1). Within a chunk, the decays between two tokens
    enter the products of queries and keys feature by feature, as in `linear_attention`. No exponential of a
    positive number is taken, so strong decay stays finite.

    Args:
      log_decay: (B, T, K, H), floating point, at most 0: the logarithms of the factors by which the state's rows
        shrink before the token is written; -inf empties a row.
      query, key, value, beta and all options: as for `delta_rule`.

    Returns:
      As `delta_rule`.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    return _attend(
        query, key, value, {"beta": beta, "log_decay": log_decay}, normalize_keys, "kimi_delta_rule",
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state, return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip


@attention_function
def gated_delta_rule_2(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    erase: Float[Array, "B T K H"],
    write: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K H"],
    normalize_keys: bool = True,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """The delta rule on a decaying state, with one gate for what a token erases and one for what it writes.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, K, H), (B, T, K, V), (B, T, K, H) -> (B, T, N, V)::

        out = gated_delta_rule_2(query, key, value, erase=erase, write=write, log_decay=log_decay)

      D_t = diag(exp(log_decay_t)) S_(t-1),  out_t = S_t^T q_t,
      S_t = D_t + k_t (write_t * v_t - D_t^T (erase_t * k_t))^T

    Gated DeltaNet-2 (Hatamizadeh et al. 2026, arXiv:2605.22791), computed like `kimi_delta_rule`, which it equals
    if both gates are the same number for all features. No kernel takes gates by feature, so XLA computes it on every
    platform.

    Args:
      erase: (B, T, K, H), floating point: how much of what the state stores under the key is read through each
        feature of the key, and erased.
      write: (B, T, K, V), floating point: how much of each feature of the value is written.
      query, key, value, log_decay and all options: as for `kimi_delta_rule`.

    Returns:
      As `delta_rule`.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    gates = {"erase": erase, "write": write, "log_decay": log_decay}
    return _attend(
        query, key, value, gates, normalize_keys, "gated_delta_rule_2",
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state, return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip


@attention_function
def rwkv7_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    removal_key: Float[Array, "B T K H"],
    learning_rate: Float[Array, "B T K H"],
    log_decay: Float[Array, "B T K H"],
    normalize_keys: bool = True,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DeltaState]:
    """The delta rule of RWKV-7, which removes a value under one key and writes the new one under another.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, K, H) x 3 -> (B, T, N, V)::

        out = rwkv7_attention(
            query, key, value, removal_key=removal_key, learning_rate=learning_rate, log_decay=log_decay
        )

      S_t = diag(exp(log_decay_t)) S_(t-1) - (rate_t * r_t) (S_(t-1)^T r_t)^T + k_t v_t^T,  out_t = S_t^T q_t

    RWKV-7 (Peng et al. 2025, arXiv:2503.14456, eqs. 16 and 17, transposed). The removed value is read before the
    state decays. It is computed like `kimi_delta_rule`. No kernel takes a second key, so XLA computes it on every
    platform.

    Args:
      removal_key: (B, T, K, H), floating point: r, the key whose value is removed.
      learning_rate: (B, T, K, H), floating point: from 0 (the feature keeps its part of the value) to 1. The
        recurrence is stable as long as no rate is far above exp(log_decay).
      normalize_keys: divides each removal key by its l2 norm; a zero key stays zero. `key` stays as it is.
      query, key, value, log_decay and all other options: as for `kimi_delta_rule`.

    Returns:
      As `delta_rule`.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    gates = {"removal_key": removal_key, "learning_rate": learning_rate, "log_decay": log_decay}
    return _attend(
        query, key, value, gates, normalize_keys, "rwkv7_attention",
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state, return_state=return_state,
        chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip


def _attend(
    query: Array, key: Array, value: Array, gates: dict[str, Array], normalize_keys: bool, name: str, *,
    state: Any, return_state: bool, chunk_size: int, implementation: Any, **options: Any,
) -> Any:  # fmt: skip
    """All rules. Their gates are beta alone, beta and log_decay, or other arrays with log_decay."""
    prepared = prepare_inputs(
        query, key, value, is_causal=True, state=state, return_state=return_state,
        implementation=implementation, dispatched=True, **options,
    )  # fmt: skip
    of_heads = ("beta", "log_decay") if name == "gated_delta_rule" else ("beta",)
    for gate, x in gates.items():
        shape, axes = key.shape, "batch, length, key heads, key features"
        if gate in of_heads:
            shape, axes = key.shape[:3], "batch, length, key heads"
        elif gate == "write":
            shape, axes = value.shape, "batch, length, key heads, value features"
        require(
            x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating),
            f"{gate} must be floating point of shape {shape} ({axes}), got {x.dtype} of shape {x.shape}",
        )
    state = check_state(state, init_delta_state, key.shape[0], *key.shape[2:], value.shape[3])
    # JAX's caches keep the functions below: they must not close over `query`.
    dtype = query.dtype

    def step(state: DeltaState, chunk: Any, visibility: ChunkVisibility) -> tuple[DeltaState, Array]:
        state, out = _step(chunk, state, visibility, normalize_keys)
        return state, out.astype(dtype)

    inputs = {
        "query": prepared.query,
        "key": prepared.key,
        "value": prepared.value,
        **{gate: zero_padding(x, prepared.lengths) for gate, x in gates.items()},
    }

    def summarize(chunk: Any, visibility: ChunkVisibility) -> _Affine:
        return _summarize(chunk, visibility, normalize_keys)

    recurrence = Recurrence(summarize, _states, _join)

    def kernel(walk: Any, state: DeltaState, inputs: Any, segments: Any, **options: Any) -> Any:
        k = inputs["key"]
        if normalize_keys:
            k = _normalize(k.astype(jnp.float32)).astype(k.dtype)
        arrays = (inputs["query"], k, inputs["value"], state.key_value, None)
        gates = (inputs.get("log_decay"), inputs["beta"].astype(jnp.float32))
        sums = walk(Walked(*arrays, *gates, segments), **options)
        return DeltaState(sums.key_value), sums.total.astype(dtype)

    backends = recurrence_backends(
        kernel, query, key, value, features=key.shape[3], chunk_size=chunk_size, out_dtype=dtype, delta=True,
        log_decay=gates.get("log_decay"), refused=_REFUSED.get(name),
    )  # fmt: skip
    state, out = dispatch(
        name, implementation, backends,
        functools.partial(scan_chunks, step, chunk_size=chunk_size, recurrence=recurrence),
        state, inputs, prepared.segments,
        results=(state, jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), dtype)),
        **kept_by_scan(step, state, inputs, chunk_size=chunk_size, recurrence=recurrence),
    )  # fmt: skip
    return (out, state) if return_state else out


# Why the kernels, in which one number for each token scales what it reads and writes, do not compute a function.
_REFUSED = {
    "gated_delta_rule_2": "erase and write must be one number for each token and head, got one for each feature",
    "rwkv7_attention": "removal_key must be the key under which the value is written, got another",
}


def _normalize(keys: Float[Array, "*leading H"]) -> Float[Array, "*leading H"]:
    """The keys divided by their l2 norm; a zero key stays zero."""
    squares = checkpoint_name(jnp.sum(jnp.square(keys), axis=-1, keepdims=True), SAVED)
    return keys * lax.rsqrt(squares + 1e-12)


class _Direct(NamedTuple):
    """Values that a chunk writes as they are, under other keys than those whose values it corrects.

    Attributes:
      adds, scores: as for `_Keys`.
      values: the values.
    """

    adds: Float[Array, "B K C H"]
    scores: Float[Array, "B K R C"] | None
    values: Float[Array, "B K C V"]


class _Keys(NamedTuple):
    """What the WY form of a chunk needs from its keys and values, and from its queries if given.

    A token reads the state under one key, and writes the difference between its target and what it reads under
    another; the two keys are the same in the delta rule.

    Attributes:
      decay: of the state within the chunk, or None.
      reads: the keys that read the state, times its decay until then.
      adds: the keys under which differences are written to the state, times the decay from then to the chunk's end.
      targets: the values that should be stored.
      beta: factors of the differences; None for 1.
      overlap: the strictly lower part of the products of reading and writing keys, within segments, times beta and
        the decay between the tokens.
      scores: the same for queries and writing keys, without beta and with the diagonal; None without queries.
      direct: further values that the chunk writes, or None.
    """

    decay: HeadDecay | FeatureDecay | None
    reads: Float[Array, "B K C H"]
    adds: Float[Array, "B K C H"]
    targets: Float[Array, "B K C V"]
    beta: Float[Array, "B K C 1"] | None
    overlap: Float[Array, "B K C C"]
    scores: Float[Array, "B K R C"] | None
    direct: _Direct | None

    def difference(self, x: Float[Array, "B K C X"]) -> Float[Array, "B K C X"]:
        """x times beta."""
        return x if self.beta is None else self.beta * x


def _keys(
    chunk: Any, visibility: ChunkVisibility, normalize_keys: bool, rows: Float[Array, "B K R H"] | None
) -> _Keys:
    removes = "removal_key" in chunk
    k = heads_first(chunk["removal_key" if removes else "key"])
    if normalize_keys:
        k = _normalize(k)
    targets = heads_first(chunk["value"])
    beta = heads_first(chunk["beta"][..., None]) if "beta" in chunk else None
    reading, writing = k, k
    if "erase" in chunk:
        reading, targets = k * heads_first(chunk["erase"]), targets * heads_first(chunk["write"])
    elif removes:
        writing = k * heads_first(chunk["learning_rate"])

    log = chunk.get("log_decay")
    decay: HeadDecay | FeatureDecay | None = None

    def products(keys: Array) -> tuple[FeatureDecay, Array, Array | None]:
        """The decay by feature, and the products of reading keys and queries with `keys` under it."""
        # A removal key reads before the state decays, which is when the token before it reads.
        read = jnp.roll(reading, -1, axis=2) if removes else reading
        decay = feature_decay(
            read if rows is None else jnp.concatenate([read, rows], axis=2), keys, heads_first(log)
        )
        overlap, scores = jnp.split(decay.products, [keys.shape[2]], axis=2)
        return decay, jnp.roll(overlap, 1, axis=2) if removes else overlap, scores

    def masked(scores: Array | None) -> Array | None:
        return None if rows is None or scores is None else mask_scores(visibility.pairs, scores)

    def enter(keys: Array) -> Array:
        enters = visibility.enters_state
        keys = keys if enters is None else zero_unless(enters[:, None], keys)
        return keys if decay is None else keys * decay.end

    if log is not None and log.ndim == 4:
        decay, overlap, scores = products(writing)
    else:
        decay = None if log is None else head_decay(heads_first(log[..., None]))
        overlap = jnp.einsum("bkif,bkjf->bkij", k, k)
        scores = None if rows is None else jnp.einsum("bkrf,bkcf->bkrc", rows, k)
    overlap = checkpoint_name(mask_scores(visibility.pairs, overlap), SAVED)
    scores = masked(scores)
    reads = mask_rows(visibility.reads_state, reading)
    if removes:
        assert decay is not None
        reads = reads * jnp.roll(decay.start, 1, axis=2).at[:, :, 0].set(1)
    elif decay is not None:
        reads = reads * decay.start
    if isinstance(decay, HeadDecay):
        overlap = overlap * decay.pairs
        scores = None if scores is None else scores * for_rows(decay.pairs, scores, k.shape[2])
    direct: _Direct | None = None
    if removes:
        # The stored value is to become 0, but this chunk's writes under the other keys are a part of it.
        other = heads_first(chunk["key"])
        _, stored, read = products(other)
        stored = checkpoint_name(mask_scores(visibility.pairs, stored), SAVED)
        direct = _Direct(enter(other), masked(read), targets)
        targets = -jnp.einsum("bkij,bkjv->bkiv", jnp.tril(stored, k=-1), targets)
    overlap = jnp.tril(overlap, k=-1)
    overlap = overlap if beta is None else beta * overlap
    return _Keys(decay, reads, enter(writing), targets, beta, overlap, scores, direct)


def _step(
    chunk: Any, state: DeltaState, visibility: ChunkVisibility, normalize_keys: bool
) -> tuple[DeltaState, Float[Array, "B C N V"]]:
    """One chunk in the WY form."""
    length, kv_heads = chunk["key"].shape[1:3]
    rows = group_rows(chunk["query"], kv_heads)
    keys = _keys(chunk, visibility, normalize_keys, rows)
    stored = jnp.einsum("bkcf,bkfh->bkch", keys.reads, state.key_value)
    corrected = solve_unit_lower(keys.overlap, keys.difference(keys.targets - stored))
    reads, kept = (
        mask_rows(visibility.reads_state, rows),
        zero_unless(visibility.keeps_state, state.key_value),
    )
    if keys.decay is not None:
        reads = reads * for_rows(keys.decay.start, rows, length)
        kept = kept * keys.decay.total
    out = jnp.einsum("bkrf,bkfh->bkrh", reads, state.key_value)
    out = out + jnp.einsum("bkrc,bkch->bkrh", keys.scores, corrected)
    update = jnp.einsum("bkcf,bkch->bkfh", keys.adds, corrected)
    if keys.direct is not None:
        out = out + jnp.einsum("bkrc,bkch->bkrh", keys.direct.scores, keys.direct.values)
        update = update + jnp.einsum("bkcf,bkch->bkfh", keys.direct.adds, keys.direct.values)
    return DeltaState(kept + update), ungroup_rows(out, length)


class _Affine(NamedTuple):
    """How a chunk changes the state that it keeps: S -> A S + B."""

    transition: Float[Array, "*leading K H H"]
    added: Float[Array, "*leading K H V"]


def _summarize(chunk: Any, visibility: ChunkVisibility, normalize_keys: bool) -> _Affine:
    """A = I - K^T W and B = K^T U, where W and U solve the system for diag(beta) K and diag(beta) V.

    See arXiv:2406.06484, eqs. 7-10. With decay, I is multiplied by the chunk's decay. The norm of A is at most 1
    for normalised keys, beta between 0 and 2, and decay at most 1.
    """
    keys = _keys(chunk, visibility, normalize_keys, None)
    right = keys.difference(jnp.concatenate([-keys.reads, keys.targets], axis=-1))
    solved = solve_unit_lower(keys.overlap, right)
    change, added = jnp.split(
        jnp.einsum("bkcf,bkch->bkfh", keys.adds, solved), [keys.reads.shape[-1]], axis=-1
    )
    if keys.direct is not None:
        added = added + jnp.einsum("bkcf,bkch->bkfh", keys.direct.adds, keys.direct.values)
    identity = jnp.eye(change.shape[-1], dtype=change.dtype)
    kept = identity if keys.decay is None else identity[None, None] * keys.decay.total
    return _Affine(change + jnp.broadcast_to(kept, change.shape), added)


def _states(
    state: DeltaState, maps: _Affine, keeps: Bool[Array, "B chunks"] | None
) -> tuple[DeltaState, DeltaState]:
    """The states before all chunks and after the last.

    The states x after the chunks solve the linear equations x_c - A_c x_(c-1) = B_c. Their derivatives solve such
    equations too, in backward order for gradients, so nothing differentiates through the joined maps.
    """
    transition, added = maps
    kept = zero_unless(None if keeps is None else keeps[:, 0], state.key_value)
    first = added[:, :1] + multiply_precisely(transition[:, 0], kept)[:, None]

    def differences(after: Array) -> Array:
        before = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
        return after - multiply_precisely(transition, zero_unless(keeps, before))

    def solve(_: Any, added: Array) -> Array:
        return _affine_states(transition, added, keeps)

    def solve_transposed(_: Any, d_after: Array) -> Array:
        # Backwards, each chunk's map leads to the chunk before it, and the first chunk's map leads nowhere.
        backward = jnp.swapaxes(jnp.roll(transition, -1, axis=1)[:, ::-1], -1, -2)
        backward_keeps = None if keeps is None else jnp.roll(keeps, -1, axis=1)[:, ::-1]
        return _affine_states(backward, d_after[:, ::-1], backward_keeps)[:, ::-1]

    right = jnp.concatenate([first, added[:, 1:]], axis=1)
    after = lax.custom_linear_solve(differences, right, solve, solve_transposed)
    before = jnp.concatenate([state.key_value[:, None], after[:, :-1]], axis=1)
    return DeltaState(before), DeltaState(after[:, -1])


def _join(earlier: _Affine, later: _Affine, keeps: Bool[Array, "*leading"] | None) -> _Affine:
    """How two runs of chunks, one after the other, change the state."""
    kept = zero_unless(keeps, jnp.concatenate(earlier, axis=-1))
    transition, added = jnp.split(
        multiply_precisely(later.transition, kept), [later.transition.shape[-1]], axis=-1
    )
    return _Affine(transition, added + later.added)


def _affine_states(
    transition: Float[Array, "B chunks K H H"],
    added: Float[Array, "B chunks K H V"],
    keeps: Bool[Array, "B chunks"] | None,
) -> Float[Array, "B chunks K H V"]:
    """The states after all chunks, starting from zeros."""
    size = transition.shape[-1]

    def join(earlier: Array, later: Array, keeps: Any) -> Array:
        # One product covers both parts of [A B].
        joined = multiply_precisely(later[..., :size], zero_unless(keeps, earlier))
        return joined + jnp.pad(later[..., size:], [(0, 0)] * (later.ndim - 1) + [(size, 0)])

    def apply(state: Array, following: Array, keeps: Any) -> Array:
        return multiply_precisely(following[..., :size], zero_unless(keeps, state)) + following[..., size:]

    maps = jnp.concatenate([transition, added], axis=-1)
    before, last = states_before(join, apply, jnp.zeros_like(added[:, 0]), maps, keeps)
    return jnp.concatenate([before[:, 1:], last[:, None]], axis=1)
