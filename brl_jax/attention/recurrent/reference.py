"""Plain forms of this family's functions: dense (T, S) weights, or a recurrence token by token.

They are slow, use O(T S) memory and have neither states nor padding. Readers learn from them what the chunked functions
of the same names compute, and the tests compare the two. Everything is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.rotary import rotate


def linear_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    is_causal: bool = False,
    normalize: bool = True,
    feature_map: str = "elu+1",
    log_decay: Float[Array, " K"] | Float[Array, "B T K"] | Float[Array, "B T K H"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Weights phi(q_i) . phi(k_j), divided by their sum with `normalize` (arXiv:2006.16236, eqs. 4 and 5).

    With positions, the weights use rotated features and the sum unrotated ones (arXiv:2104.09864, eq. 19). With
    log_decay, S_t = exp(log_decay_t) S_(t-1) + phi(k_t) v_t^T and out_t = S_t^T phi(q_t), token by token.
    """
    if log_decay is not None:
        log_decay = log_decay.reshape((1,) * max(3 - log_decay.ndim, 0) + log_decay.shape)
        shape = *key.shape[:3], log_decay.shape[3] if log_decay.ndim == 4 else 1
        decay = jnp.broadcast_to(jnp.exp(log_decay.reshape(*log_decay.shape[:3], -1)), shape)
        decay = jnp.repeat(decay, query.shape[2] // key.shape[2], axis=2)
    query, key, value = _float32_heads(query, key, value)
    query, key = _FEATURE_MAPS[feature_map](query), _FEATURE_MAPS[feature_map](key)
    sums = jnp.einsum("btnh,bsnh->bnts", query, key)
    visible = _visible(sums, is_causal)
    sums = jnp.where(visible, sums, 0.0).sum(-1, keepdims=True)
    if positions is not None:
        query, key = rotate(query, positions), rotate(key, positions)
    if log_decay is not None:
        return _token_by_token(
            lambda state, k, v, a: a[..., None] * state + _outer(k, v), query, key, value, decay
        )
    weights = jnp.where(visible, jnp.einsum("btnh,bsnh->bnts", query, key), 0.0)
    return jnp.einsum("bnts,bsnv->btnv", weights / sums if normalize else weights, value)


def luna_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    packed: Float[Array, "M K H"],
    *,
    positions: Int[Array, "#B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Weights u_t . a_j / t with u_t = softmax(sum_{j <= t} (q_t . k_j) a_j / (t sqrt(H))) (arXiv:2106.01540, 3.3)."""
    scale, group = query.shape[3] ** -0.5, query.shape[2] // key.shape[2]
    query, key, value = _float32_heads(query, key, value)
    packed = jnp.repeat(packed.astype(jnp.float32), group, axis=1)
    enters = _FEATURE_MAPS["elu+1"](jnp.einsum("bsnh,mnh->bsnm", key, packed) * scale)
    if positions is not None:
        query, key = rotate(query, positions), rotate(key, positions)
    products = jnp.einsum("btnh,bsnh->bnts", query, key)
    visible = _visible(products, True)
    number = 1.0 + jnp.arange(query.shape[1], dtype=jnp.float32)[None, :, None, None]
    scores = jnp.einsum("bnts,bsnm->btnm", jnp.where(visible, products, 0.0), enters) / number
    read = jax.nn.softmax(scores * scale, axis=-1) / number
    weights = jnp.where(visible, jnp.einsum("btnm,bsnm->bnts", read, enters), 0.0)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def norm_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    is_causal: bool = False,
    feature_map: str = "elu+1",
    norm: str = "rms",
    norm_scale: Float[Array, "N V"] | None = None,
    epsilon: float = 1e-5,
    positions: Int[Array, "#B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Linear attention without its denominator, then a norm over the merged heads (arXiv:2210.10340, eq. 14)."""
    sums = linear_attention(
        query, key, value, is_causal=is_causal, normalize=False, feature_map=feature_map, positions=positions
    )
    if norm == "layer":
        sums = sums - sums.mean((2, 3), keepdims=True)
    normed = sums / jnp.sqrt(jnp.square(sums).mean((2, 3), keepdims=True) + epsilon)
    return normed if norm_scale is None else normed * norm_scale.astype(jnp.float32)[None, None]


def performer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    projection: Float[Array, "F H"],
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """Linear attention with features exp(W x - |x|^2 / 2), x scaled by H^(-1/4) (arXiv:2009.14794, lemma 1).

    It does not guard against overflow. Like the function of the same name, it adds a millionth of a query's largest
    feature to each of the query's features.
    """
    query, key, value = _float32_heads(query, key, value)

    def phi(x: Array) -> Array:
        x = x * x.shape[-1] ** -0.25
        return jnp.exp(x @ projection.T - jnp.square(x).sum(-1, keepdims=True) / 2)

    query_features = phi(query)
    query_features = query_features + 1e-6 * query_features.max(-1, keepdims=True)
    weights = jnp.einsum("btnf,bsnf->bnts", query_features, phi(key))
    weights = jnp.where(_visible(weights, is_causal), weights, 0.0)
    return jnp.einsum("bnts,bsnv->btnv", weights / weights.sum(-1, keepdims=True), value)


def cosformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    max_length: int,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """Weights ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / (2 max_length)), normalised (arXiv:2202.08791, eq. 10)."""
    query, key, value = _float32_heads(query, key, value)
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None]
    cosine = jnp.cos(distance.astype(jnp.float32) * (math.pi / (2 * max_length)))
    weights = jnp.einsum("btnh,bsnh->bnts", jax.nn.relu(query), jax.nn.relu(key)) * cosine[None, None]
    weights = jnp.where(_visible(weights, is_causal), weights, 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-6)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def flowformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    is_causal: bool = False,
    positions: Int[Array, "#B T"] | None = None,
) -> Float[Array, "B T N V"]:
    """Linear attention with conserved flows; see the function of the same name (arXiv:2202.06258, section 3).

    `pairs` are phi(q_i) . phi(k_j). A causal query sees the earlier keys, and a causal key the earlier queries: its
    flow is a sum over the lower triangle of the transposed matrix.
    """
    query, key, value = _float32_heads(query, key, value)
    query, key = jax.nn.sigmoid(query), jax.nn.sigmoid(key)
    pairs = jnp.einsum("btnh,bsnh->bnts", query, key)
    seen = _visible(pairs, is_causal)
    number = seen.sum(-1).astype(jnp.float32)
    to_sinks, to_sources = (jnp.where(seen, x, 0.0) for x in (pairs, jnp.swapaxes(pairs, 2, 3)))
    incoming, outgoing = to_sinks.sum(-1) / number, to_sources.sum(-1) / number
    sinks = jnp.einsum("bnts,bns->bnt", to_sinks, 1 / outgoing) / number
    sources = jnp.einsum("bnst,bnt->bns", to_sources, 1 / incoming) / number
    competition = jnp.where(seen, jnp.exp(sources)[:, :, None], 0.0).sum(-1)
    shares = number * jnp.exp(sources) / competition
    if positions is not None:
        pairs = jnp.einsum("btnh,bsnh->bnts", rotate(query, positions), rotate(key, positions))
    weights = jnp.where(seen, pairs, 0.0) * (jax.nn.sigmoid(sinks) / (incoming * number))[..., None]
    return jnp.einsum("bnts,bns,bsnv->btnv", weights, shares, value)


def delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    beta: Float[Array, "B T K"],
    normalize_keys: bool = True,
) -> Float[Array, "B T N V"]:
    """S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T and out_t = S_t^T q_t, token by token (arXiv:2406.06484)."""
    return gated_delta_rule(
        query, key, value, beta=beta, log_decay=jnp.zeros_like(beta), normalize_keys=normalize_keys
    )


def gated_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    beta: Float[Array, "B T K"],
    log_decay: Float[Array, "B T K"],
    normalize_keys: bool = True,
) -> Float[Array, "B T N V"]:
    """The delta rule on a state first multiplied by exp(log_decay_t), token by token (arXiv:2412.06464)."""
    of_features = jnp.broadcast_to(log_decay[..., None], key.shape)
    return kimi_delta_rule(query, key, value, beta=beta, log_decay=of_features, normalize_keys=normalize_keys)


def kimi_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    beta: Float[Array, "B T K"],
    log_decay: Float[Array, "B T K H"],
    normalize_keys: bool = True,
) -> Float[Array, "B T N V"]:
    """The delta rule on a state whose rows are first multiplied by exp(log_decay_t) (arXiv:2510.26692)."""
    gates = {
        "erase": jnp.broadcast_to(beta[..., None], key.shape),
        "write": jnp.broadcast_to(beta[..., None], value.shape),
    }
    return gated_delta_rule_2(query, key, value, **gates, log_decay=log_decay, normalize_keys=normalize_keys)


def gated_delta_rule_2(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    erase: Float[Array, "B T K H"],
    write: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K H"],
    normalize_keys: bool = True,
) -> Float[Array, "B T N V"]:
    """D_t + k_t (write_t * v_t - D_t^T (erase_t * k_t))^T, D_t = diag(exp(log_decay_t)) S_(t-1) (arXiv:2605.22791)."""
    key = key.astype(jnp.float32)
    if normalize_keys:
        key = key / jnp.sqrt(jnp.square(key).sum(-1, keepdims=True) + 1e-12)
    decay, value = (
        jnp.exp(log_decay.astype(jnp.float32)),
        value.astype(jnp.float32) * write.astype(jnp.float32),
    )

    def update(state: Array, k: Array, v: Array, e: Array, a: Array) -> Array:
        state = a[..., None] * state
        return state + _outer(k, v - jnp.einsum("bnhv,bnh->bnv", state, e * k))

    return _token_by_token(update, query, key, value, erase, decay)


def rwkv7_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    removal_key: Float[Array, "B T K H"],
    learning_rate: Float[Array, "B T K H"],
    log_decay: Float[Array, "B T K H"],
    normalize_keys: bool = True,
) -> Float[Array, "B T N V"]:
    """diag(exp(log_decay_t)) S_(t-1) - (rate_t * r_t) (S_(t-1)^T r_t)^T + k_t v_t^T (arXiv:2503.14456)."""
    removal_key = removal_key.astype(jnp.float32)
    if normalize_keys:
        removal_key = removal_key / jnp.sqrt(jnp.square(removal_key).sum(-1, keepdims=True) + 1e-12)
    decay = jnp.exp(log_decay.astype(jnp.float32))

    def update(state: Array, k: Array, v: Array, r: Array, rate: Array, a: Array) -> Array:
        removed = jnp.einsum("bnhv,bnh->bnv", state, r)
        return a[..., None] * state - _outer(rate * r, removed) + _outer(k, v)

    return _token_by_token(update, query, key, value, removal_key, learning_rate, decay)


def gau_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: PositionBias | None = None,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """Weights ReLU(q_i . k_j / n_i + b_ij)^2, where n_i is the number of visible keys (arXiv:2202.10447, eq. 4)."""
    query, key, value = _float32_heads(query, key, value)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    visible = _visible(scores, is_causal)
    scores = scores / visible.sum(-1, keepdims=True).astype(jnp.float32) + _dense_bias(bias, scores)
    weights = jnp.where(visible, jnp.square(jax.nn.relu(scores)), 0.0)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def mixed_chunk_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    linear_query: Float[Array, "B T N H"],
    linear_key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    bias: PositionBias | None = None,
    is_causal: bool = False,
    chunk_size: int = 256,
) -> Float[Array, "B T N V"]:
    """ReLU(q_i . k_j / C + b_ij)^2 inside chunks plus lq_i . lk_j / C between them (arXiv:2202.10447, eqs. 6-8)."""
    linear_query, linear_key, _ = _float32_heads(linear_query, linear_key, value)
    query, key, value = _float32_heads(query, key, value)
    chunk = jnp.arange(query.shape[1]) // chunk_size
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    inside = (chunk[:, None] == chunk[None])[None, None] & _visible(scores, is_causal)
    scores = scores / chunk_size + _dense_bias(bias, scores)
    weights = jnp.where(inside, jnp.square(jax.nn.relu(scores)), 0.0)
    linear = jnp.einsum("btnh,bsnh->bnts", linear_query, linear_key) / chunk_size
    earlier = (chunk[:, None] > chunk[None])[None, None]
    weights = weights + (jnp.where(earlier, linear, 0.0) if is_causal else linear)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def bsbr_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    retrieval_query: Float[Array, "B T N R"],
    retrieval_key: Float[Array, "B T K R"],
    *,
    compression: tuple[Float[Array, "H H F"], Float[Array, "F H H"]] | None = None,
    strength: float | Float[Array, "N"] = 1.0,
    is_causal: bool = False,
    chunk_size: int = 64,
) -> Float[Array, "B T N H"]:
    """Softmax attention inside chunks, plus key-value products of whole chunks retrieved by softmax (BSBR article)."""
    retrieval_query, retrieval_key, _ = _float32_heads(retrieval_query, retrieval_key, value)
    query, key, value = _float32_heads(query, key, value)
    length, head_dim = query.shape[1], query.shape[3]
    chunk = jnp.arange(length) // chunk_size
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / math.sqrt(head_dim)
    inside = (chunk[:, None] == chunk[None])[None, None] & _visible(scores, is_causal)
    near = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, -1, where=inside), value)

    starts = range(0, length, chunk_size)
    products = [
        jnp.einsum("bcnh,bcnv->bnhv", key[:, a : a + chunk_size], value[:, a : a + chunk_size])
        for a in starts
    ]
    first = jnp.asarray(starts)
    last = jnp.minimum(first + chunk_size, length) - 1
    logits = jnp.einsum("binr,bmnr->bnim", retrieval_query[:, first], retrieval_key[:, last])
    visible = first[:, None] > first[None] if is_causal else first[:, None] != first[None]
    weights = jax.nn.softmax(logits / math.sqrt(retrieval_query.shape[3]), -1, where=visible[None, None])
    retrieved = jnp.einsum("bnim,bmnhv->binhv", weights, jnp.stack(products, 1))
    if compression is not None:
        retrieved = jnp.einsum("binhv,hvf,fxy->binxy", retrieved, *compression)
    far = jnp.einsum("btnh,btnhv->btnv", query, retrieved[:, chunk]) / math.sqrt(head_dim)
    return near + jnp.broadcast_to(jnp.asarray(strength), query.shape[2:3])[None, None, :, None] * far


_FEATURE_MAPS = {
    "elu+1": lambda x: jax.nn.elu(x) + 1,
    "elu": jax.nn.elu,
    "relu": jax.nn.relu,
    "identity": lambda x: x,
}


def _outer(k: Float[Array, "B N H"], v: Float[Array, "B N V"]) -> Float[Array, "B N H V"]:
    return jnp.einsum("bnh,bnv->bnhv", k, v)


def _token_by_token(update: Callable[..., Array], query: Array, *arrays: Array) -> Float[Array, "B T N V"]:
    """out_t = S_t^T q_t with S_t = update(S_(t-1), arrays_t), for a key, a value and more with their K heads."""

    def token(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, *rest = token
        state = update(state, *rest)
        return state, jnp.einsum("bnhv,bnh->bnv", state, q)

    heads = query.shape[2]
    repeated = [jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2) for x in (query, *arrays)]
    state = jnp.zeros((query.shape[0], *repeated[1].shape[2:], repeated[2].shape[3]), jnp.float32)
    _, out = lax.scan(token, state, tuple(jnp.swapaxes(x, 0, 1) for x in repeated))
    return jnp.swapaxes(out, 0, 1)


def _float32_heads(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """float32 arrays with one key head and one value head per query head."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    return query.astype(jnp.float32), key, value


def _visible(scores: Float[Array, "B N T S"], is_causal: bool) -> Bool[Array, "1 1 T S"]:
    visible = jnp.ones(scores.shape[2:], bool)
    return (jnp.tril(visible) if is_causal else visible)[None, None]


def _dense_bias(bias: PositionBias | None, scores: Float[Array, "B N T S"]) -> Float[Array, "1 #N #T #S"]:
    """The bias of all pairs; 0 without a bias."""
    if bias is None:
        return jnp.zeros((1, 1, 1, 1), jnp.float32)
    return bias(*(jnp.arange(n, dtype=jnp.int32) for n in scores.shape[2:]))[None]
