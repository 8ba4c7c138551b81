"""The mechanisms with a fixed-size state.

Weights are dense (n, n) matrices and recurrences run token by token: no chunks, and no states of chunks."""

from __future__ import annotations

import jax
import numpy as np

from brl_jax.attention.recurrent.performer import performer_projection
from tests.oracles import parts
from tests.oracles.parts import (
    FEATURES,
    each_head,
    feed_forward,
    inputs,
    layers,
    merge,
    mixer_network,
    norm,
    project,
    relu,
    residual_network,
    rotary,
    sigmoid,
    silu,
    softmax,
    turned,
    visible,
)


def recurrence(q, transition, written):
    """o_t = S_t^T q_t of one head, where S_t = transition(t) S_(t - 1) + written(t)."""
    state, out = 0 * written(0), []
    for t in range(len(q)):
        state = transition(t) @ state + written(t)
        out.append(state.T @ q[t])
    return np.stack(out)


def kept(decay, t, features):
    """diag(decay) at token t; decay (n, features), (n,) or None."""
    return np.eye(features) if decay is None else np.eye(features) * decay[t][..., None]


def decayed(q, k, v, decay):
    """S <- diag(decay) S + k v^T."""
    return recurrence(q, lambda t: kept(decay, t, k.shape[1]), lambda t: np.outer(k[t], v[t]))


def delta(q, k, v, beta, decay=None):
    """S <- D + beta k (v - D^T k)^T, D = diag(decay) S."""
    return gated_delta_2(q, k, v, beta[:, None], beta[:, None], decay)


def gated_delta_2(q, k, v, erase, write, decay):
    """S <- D + k (write v - D^T (erase k))^T, D = diag(decay) S."""

    def transition(t):
        diagonal = kept(decay, t, k.shape[1])
        return diagonal - np.outer(k[t], erase[t] * k[t]) @ diagonal

    return recurrence(q, transition, lambda t: np.outer(k[t], write[t] * v[t]))


def rwkv7(q, k, v, removal, rate, decay):
    """S <- (diag(decay) - diag(rate) r r^T) S + k v^T."""

    def transition(t):
        return kept(decay, t, k.shape[1]) - rate[t][:, None] * np.outer(removal[t], removal[t])

    return recurrence(q, transition, lambda t: np.outer(k[t], v[t]))


@each_head
def linear(q, k, v, *, is_causal=False, normalize=True, feature_map="elu+1", positions=None):
    """Weights phi(q_i) . phi(k_j), divided by their sum to normalize (arXiv:2006.16236, equations 4 and 5).

    Positions rotate the features, except in the sum (arXiv:2104.09864, equation 19)."""
    q, k, mask = FEATURES[feature_map](q), FEATURES[feature_map](k), visible(len(q), is_causal)
    weights = turned(q, positions) @ turned(k, positions).T * mask
    return (weights / (q @ k.T * mask).sum(-1, keepdims=True) if normalize else weights) @ v


def linear_mix(u, p, m, d):
    options = {"is_causal": d.is_causal, "normalize": m.normalize, "feature_map": m.feature_map}
    return merge(linear(*inputs(u, p, rotated=False), positions=np.arange(len(u)), **options), p)


def length_1(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def delta_mix(u, p, m, d):
    beta = sigmoid(u @ p["beta"]["kernel"])
    projected = {name: project(u, p[name]) for name in ("query", "key", "value")}
    if m.conv_size:
        q, k, v = (short_convolved(x, p[f"{name}_conv"]) for name, x in projected.items())
    else:
        q, k, v = (silu(x) for x in projected.values())
    return merge(norm(each_head(delta)(unit(q), length_1(k), v, beta), p["head_norm"], d.norm), p)


def short_convolved(x, p):
    """SiLU of the sum over the last tokens of (n, heads, h), separately for each channel."""
    kernel = p["kernel"]
    before = np.concatenate([np.zeros((len(kernel) - 1, *x.shape[1:])), x])
    sums = np.stack([(before[t : t + len(kernel)] * kernel).sum(0) for t in range(len(x))])
    return silu(sums + p.get("bias", 0))


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def step_decay(z, p):
    """exp(-exp(rate) log(1 + exp(z + step_bias)))."""
    rate = p["rate"].reshape(-1, *(1 for _ in z.shape[2:]))
    return np.exp(-np.exp(rate) * np.log(1 + np.exp(z + p["step_bias"])))


def gated_norm(x, gate, p, opened, epsilon=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * p["scale"] * opened(gate)


def gated_delta_mix(u, p, m, d):
    q, k, v = (short_convolved(project(u, p[name]), p[f"{name}_conv"]) for name in ("query", "key", "value"))
    q, k = unit(q) / np.sqrt(q.shape[-1]), unit(k)
    beta, decay = sigmoid(u @ p["beta"]["kernel"]), step_decay(u @ p["step"]["kernel"], p)
    beta = 2 * beta if m.negative_eigenvalues else beta
    out, gate = each_head(delta)(q, k, v, beta, decay), project(u, p["gate"])
    return merge(gated_norm(out, gate, p["head_norm"], silu, m.norm_epsilon or 1e-5), p)


def kda_mix(u, p, m, d):
    return by_feature_mix(u, p, delta, sigmoid(u @ p["beta"]["kernel"]))


def gated_delta_2_mix(u, p, m, d):
    return by_feature_mix(u, p, gated_delta_2, *(sigmoid(project(u, p[name])) for name in ("erase", "write")))


def by_feature_mix(u, p, rule, *gates):
    """rule(q, k, v, *gates, decay) is the recurrence of one head."""
    q, k, v = (short_convolved(project(u, p[name]), p[f"{name}_conv"]) for name in ("query", "key", "value"))
    q, k = unit(q) / np.sqrt(q.shape[-1]), unit(k)
    steps, gate = (project(u @ p[f"{name}_down"]["kernel"], p[f"{name}_up"]) for name in ("step", "gate"))
    out = each_head(rule)(q, k, v, *gates, step_decay(steps, p))
    return merge(gated_norm(out, gate, p["head_norm"], sigmoid), p)


def rwkv7_mix(u, p, m, d):
    before = np.concatenate([np.zeros_like(u[:1]), u[:-1]])
    mixed = dict(
        zip(("query", "decay", "key", "value", "rate", "gate"), u + (before - u) * p["mixture"][:, None])
    )
    r, k, v = (project(mixed[name], p[name]) for name in ("query", "key", "value"))
    low = {name: mixed[name] @ p[f"{name}_down"]["kernel"] for name in ("decay", "rate", "gate")}
    decay = np.exp(-sigmoid(project(np.tanh(low["decay"]), p["decay_up"]) + p["decay_bias"]) / np.sqrt(np.e))
    rate = sigmoid(project(low["rate"], p["rate_up"]) + p["rate_bias"])
    gate = project(sigmoid(low["gate"]), p["gate_up"])
    written = k + (rate - 1) * p["replacement"] * k
    out = each_head(rwkv7)(r, written, v, length_1(k * p["removal"]), rate, decay)
    out = out - out.mean(-1, keepdims=True)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-5 * d.head_dim)
    out = out * p["head_norm"]["scale"] + p["head_norm"]["bias"]
    written, v = (np.repeat(x, d.num_heads // d.num_kv_heads, axis=1) for x in (written, v))
    return merge((out + (r * p["bonus"] * written).sum(-1, keepdims=True) * v) * gate, p)


def retnet_mix(u, p, m, d):
    q, k, v = inputs(u, p)
    decay = np.broadcast_to(1 - 2.0 ** (-5 - np.arange(d.num_kv_heads)), k.shape[:2])
    out = each_head(decayed)(q, k / np.sqrt(d.head_dim), v, decay)
    return merge(gated_norm(out, project(u, p["gate"]), p["head_norm"], silu), p)


def gla_mix(u, p, m, d):
    q, k, v = inputs(u, p, rotated=False)
    decay = sigmoid(project(u @ p["decay_down"]["kernel"], p["decay_up"])) ** (1 / m.temperature)
    out = each_head(decayed)(q / np.sqrt(d.head_dim), k, v, decay)
    return merge(gated_norm(out, project(u, p["gate"]), p["head_norm"], silu), p)


def mamba2_mix(u, p, m, d):
    x, key, query = (short_convolved(project(u, p[name]), p[f"{name}_conv"]) for name in ("x", "B", "C"))
    steps = u @ p["step"]["kernel"]
    decay, dt = step_decay(steps, p), np.log(1 + np.exp(steps + p["step_bias"]))
    out = each_head(decayed)(query, key, dt[..., None] * x, decay) + p["skip"][:, None] * x
    gated, group = out * silu(project(u, p["gate"])), x.shape[1] // m.num_groups
    of_groups = (gated * gated).mean(2).reshape(len(u), m.num_groups, group).mean(2)
    root = np.repeat(np.sqrt(of_groups + 1e-5), group, axis=1)[..., None]
    return np.tensordot(gated / root * p["norm_scale"], p["out"]["kernel"], axes=2)


def norm_attention(query, key, value, *, norm_scale=None, norm="rms", **options):
    """Linear attention without its denominator, then a norm over the merged heads (arXiv:2210.10340, equation 14)."""
    sums = linear(query, key, value, normalize=False, **options)
    scale = np.ones(sums.shape[1:]) if norm_scale is None else norm_scale
    return parts.norm(sums.reshape(len(sums), -1), {"scale": scale.reshape(-1)}, norm).reshape(sums.shape)


def norm_mix(u, p, m, d):
    options = {"norm": m.norm, "feature_map": m.feature_map, "is_causal": d.is_causal}
    arrays = inputs(u, p, rotated=False)
    return merge(
        norm_attention(*arrays, norm_scale=p["norm_scale"], positions=np.arange(len(u)), **options), p
    )


@each_head
def cosformer(q, k, v, *, max_length, is_causal=False):
    """Weights ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / (2 max_length)), normalized (arXiv:2202.08791, equation 10)."""
    i = np.arange(len(q))
    nearness = np.cos(np.pi * (i[:, None] - i) / (2 * max_length)) * visible(len(q), is_causal)
    weights = relu(q) @ relu(k).T * nearness
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(np.real(total) > 1e-6, total, 1e-6)


def cosformer_mix(u, p, m, d):
    return merge(cosformer(*inputs(u, p, rotated=False), max_length=m.max_length, is_causal=d.is_causal), p)


@each_head
def performer(q, k, v, *, projection, is_causal=False):
    """Linear attention with features exp(W x - |x|^2 / 2), x scaled by H^(-1/4) (arXiv:2009.14794, lemma 1)."""

    def phi(x):
        x = x / x.shape[1] ** 0.25
        return np.exp(x @ projection.T - (x * x).sum(-1, keepdims=True) / 2)

    weights = phi(q) @ phi(k).T * visible(len(q), is_causal)
    return weights / weights.sum(-1, keepdims=True) @ v


def performer_mix(u, p, m, d):
    # The library draws the random directions; tests/attention checks them.
    directions = performer_projection(
        jax.random.key(m.seed), m.num_features or round(d.head_dim * np.log(d.head_dim)), d.head_dim
    )
    return merge(
        performer(*inputs(u, p), projection=np.asarray(directions, np.float64), is_causal=d.is_causal), p
    )


@each_head
def flowformer(q, k, v, *, is_causal=False, positions=None):
    """Every flow sums over the tokens that a causal token has seen (arXiv:2202.06258, section 3)."""
    n = len(q)
    q, k = sigmoid(q), sigmoid(k)
    seen = [slice(0, t + 1) if is_causal else slice(None) for t in range(n)]
    number = np.array([t + 1 if is_causal else n for t in range(n)])
    incoming = np.array([q[t] @ k[seen[t]].sum(0) for t in range(n)]) / number
    outgoing = np.array([k[t] @ q[seen[t]].sum(0) for t in range(n)]) / number
    sinks = np.array([q[t] @ (k / outgoing[:, None])[seen[t]].sum(0) for t in range(n)]) / number
    sources = np.array([k[t] @ (q / incoming[:, None])[seen[t]].sum(0) for t in range(n)]) / number
    shares = np.array([np.exp(sources[t]) / np.exp(sources[seen[t]]).sum() for t in range(n)]) * number
    weights = turned(q, positions) @ turned(k, positions).T * visible(n, is_causal)
    return (sigmoid(sinks) / (incoming * number))[:, None] * (weights @ (shares[:, None] * v))


def flow_mix(u, p, m, d):
    arrays = inputs(u, p, rotated=False)
    return merge(flowformer(*arrays, is_causal=d.is_causal, positions=np.arange(len(u))), p)


def gated_network(attend):
    """Gated attention units without feed-forward networks; attend(maps, v, sides of the bias, mechanism, dimensions)
    of one head."""

    def network(params, mechanism, d, x):
        places = np.arange(len(x))
        for p in layers(params):
            u, p = norm(x, p["mixer_norm"], d.norm), p["mixer"]
            z = silu(u @ p["shared"]["kernel"])
            maps = [turned(z * scale + offset, places) for scale, offset in zip(p["scale"], p["offset"])]
            sides = [rotary_side(p[f"bias_{side}"], len(x))[:, 0] for side in ("left", "right")]
            attended = attend(maps, silu(u @ p["value"]["kernel"]), sides, mechanism, d)
            x = x + (silu(u @ p["gate"]["kernel"]) * attended) @ p["out"]["kernel"]
        return norm(x, params["final_norm"], d.norm)

    return network


def rotary_side(vectors, n):
    """(n, heads, h): one side of a rotary bias, the same vector at each position, rotated."""
    return rotary(np.stack([vectors] * n), np.arange(n))


def gau(q, k, v, left, right, *, is_causal=False):
    """Weights ReLU(q_i . k_j / n_i + b_ij)^2, where n_i is the number of visible keys (arXiv:2202.10447, equation 4).

    The bias is left right^T."""
    mask = visible(len(v), is_causal)
    return relu(q @ k.T / mask.sum(-1, keepdims=True) + left @ right.T) ** 2 * mask @ v


def mixed_chunk(q, k, linear_q, linear_k, v, left, right, *, chunk_size, is_causal=False):
    """ReLU(q_i . k_j / C + b_ij)^2 inside chunks plus lq_i . lk_j / C between them (equations 6 to 8)."""
    chunk = np.arange(len(v)) // chunk_size
    same = chunk[:, None] == chunk
    before = chunk[:, None] > chunk if is_causal else np.ones_like(same)
    inside = relu(q @ k.T / chunk_size + left @ right.T) ** 2 * (same & visible(len(v), is_causal))
    return (inside + linear_q @ linear_k.T / chunk_size * before) @ v


def gau_attend(maps, v, sides, m, d):
    return gau(*maps, v, *sides, is_causal=d.is_causal)


def flash_attend(maps, v, sides, m, d):
    return mixed_chunk(*maps, v, *sides, chunk_size=m.chunk_size, is_causal=d.is_causal)


def bsbr(
    query,
    key,
    value,
    retrieval_query,
    retrieval_key,
    *,
    compression=None,
    strength=1.0,
    is_causal=False,
    chunk_size=64,
):
    """Token by token: the softmax of its chunk, then the products of the chunks that its chunk retrieves from (BSBR
    article). compression is (h, h, f) and (f, h, h)."""
    n, c, root = len(query), chunk_size, np.sqrt(query.shape[2])
    starts = range(0, n, c)
    ends = [min(s + c, n) for s in starts]

    @each_head
    def attend(q, k, v, r, h):
        products = [k[s:e].T @ v[s:e] for s, e in zip(starts, ends)]
        if compression is not None:
            compress, expand = compression
            products = [np.tensordot(np.tensordot(f, compress, axes=2), expand, axes=1) for f in products]
        near, far = [], []
        for i, s in enumerate(starts):
            others = range(i) if is_causal else [j for j in range(len(ends)) if j != i]
            read = np.zeros((q.shape[1], v.shape[1]))
            if others:
                logits = np.array([r[s] @ h[ends[j] - 1] for j in others])[None] / np.sqrt(r.shape[1])
                read = np.tensordot(softmax(logits)[0], [products[j] for j in others], axes=1)
            for t in range(s, ends[i]):
                e = t + 1 if is_causal else ends[i]
                near.append((softmax((k[s:e] @ q[t])[None] / root) @ v[s:e])[0])
                far.append(q[t] @ read / root)
        return np.stack([near, far], 1)

    out = attend(query, key, value, retrieval_query, retrieval_key)
    return out[:, :, 0] + np.broadcast_to(strength, out.shape[1])[:, None] * out[:, :, 1]


def bsbr_mix(u, p, m, d):
    retrieval = (project(u, p[f"retrieval_{name}"]) for name in ("query", "key"))
    compression = None if m.num_compressed is None else (p["compress"], p["expand"])
    options = {"strength": p["strength"], "is_causal": d.is_causal, "chunk_size": m.chunk_size}
    return merge(bsbr(*inputs(u, p), *retrieval, compression=compression, **options), p)


def luna_causal(query, key, value, packed, *, positions=None):
    """Token by token: sums over the tokens so far, divided by their number (arXiv:2106.01540, section 3.3)."""
    scale = 1 / np.sqrt(query.shape[2])

    @each_head
    def attend(q, k, v, pack):
        weights = FEATURES["elu+1"](scale * k @ pack.T)
        q, k, rows = turned(q, positions), turned(k, positions), []
        for t in range(1, len(q) + 1):
            mean = (k[:t] @ q[t - 1] @ weights[:t])[None] / t
            rows.append(weights[:t] @ softmax(scale * mean)[0] @ v[:t] / t)
        return np.stack(rows)

    return attend(query, key, value, packed)


def luna_both_ways(u, p, packed, d):
    """The tokens' outputs, and what the packed tokens read."""
    n, m, group = len(u), len(packed), d.num_heads // d.num_kv_heads
    places = (2 * np.arange(m) + 1) * n // (2 * m)

    def attend(q, k, v):
        pairs = [(q[:, a], k[:, a // group], v[:, a // group]) for a in range(d.num_heads)]
        every = np.ones((len(q), len(k)), bool)
        return np.stack([softmax(x @ y.T / np.sqrt(d.head_dim), every) @ z for x, y, z in pairs], 1)

    q, k, v = (project(u, p[name]) for name in ("query", "key", "value"))
    q, k = rotary(q, np.arange(n)), rotary(k, np.arange(n))
    read = attend(rotary(project(packed, p["pack_query"]), places), k, v)
    read = np.tensordot(read, p["pack_out"]["kernel"], axes=2)
    out = attend(q, rotary(project(read, p["unpack_key"]), places), project(read, p["unpack_value"]))
    return np.tensordot(out, p["out"]["kernel"], axes=2), read


def luna(params, mechanism, d, x):
    packed = params["carrier_0"]["packed"]
    for p in layers(params):
        u = norm(x, p["mixer_norm"], d.norm)
        if d.is_causal:
            arrays = *inputs(u, p["mixer"], rotated=False), project(packed, p["mixer"]["pack_query"])
            y = merge(luna_causal(*arrays, positions=np.arange(len(u))), p["mixer"])
        else:
            y, read = luna_both_ways(u, p["mixer"], packed, d)
            packed = norm(packed + read, p["mixer"]["packed_norm"], d.norm)
        x = x + y
        x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
    return norm(x, params["final_norm"], d.norm)


NETWORKS = {
    "luna": luna,
    "bsbr": residual_network(bsbr_mix),
    "gau": gated_network(gau_attend),
    "flash": gated_network(flash_attend),
    "linear": residual_network(linear_mix),
    "norm": residual_network(norm_mix),
    "cosformer": residual_network(cosformer_mix),
    "performer": residual_network(performer_mix),
    "flowformer": residual_network(flow_mix),
    "deltanet": residual_network(delta_mix),
    "gated_deltanet": residual_network(gated_delta_mix),
    "kda": residual_network(kda_mix),
    "gated_deltanet_2": residual_network(gated_delta_2_mix),
    "rwkv7": residual_network(rwkv7_mix),
    "retnet": residual_network(retnet_mix),
    "gla": residual_network(gla_mix),
    "mamba2": mixer_network(mamba2_mix),
}
