"""Networks of the mechanisms with a fixed-size state.

Weights are dense (n, n) matrices and recurrences run token by token: no chunks, and no states of chunks."""

from __future__ import annotations

import jax
import numpy as np

from brl_jax.attention.recurrent.performer import performer_projection
from tests.oracles.parts import (
    FEATURES,
    feed_forward,
    full_mask,
    head_inputs,
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
)


def recurrence(q, transition, written):
    """o_t = S_t^T q_t of one head, where S_t = transition(t) S_(t - 1) + written(t)."""
    state, out = 0 * written(0), []
    for t in range(len(q)):
        state = transition(t) @ state + written(t)
        out.append(state.T @ q[t])
    return np.stack(out)


def kept(decay, t, features):
    """diag(decay) at token t; decay (n, features), (n, 1), (n,) or None."""
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


def linear_mix(u, p, m, d):
    """Rotates the features, except in the normalizing sum."""
    phi = FEATURES[m.feature_map]
    mask = full_mask(len(u), d, m)
    heads = []
    for q, k, v in head_inputs(u, p, d, rotated=False):
        w = turned(phi(q)) @ turned(phi(k)).T * mask
        total = (phi(q) @ phi(k).T * mask).sum(-1, keepdims=True)
        heads.append((w / total if m.normalize else w) @ v)
    return merge(heads, p)


def delta_mix(u, p, m, d):
    beta, group = sigmoid(u @ p["beta"]["kernel"]), d.num_heads // d.num_kv_heads
    projected = {name: project(u, p[name]) for name in ("query", "key", "value")}
    if m.conv_size:
        q, k, v = (short_convolved(x, p[f"{name}_conv"]) for name, x in projected.items())
    else:
        q, k, v = (silu(x) for x in projected.values())
    q, k, heads = unit(q), k / np.sqrt((k * k).sum(-1, keepdims=True)), []
    for a in range(d.num_heads):
        out = delta(q[:, a], k[:, a // group], v[:, a // group], beta[:, a // group])
        heads.append(norm(out, {"scale": p["head_norm"]["scale"][a]}, d.norm))
    return merge(heads, p)


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
    gate, group = project(u, p["gate"]), v.shape[1] // k.shape[1]
    heads = []
    for a in range(v.shape[1]):
        out = delta(q[:, a // group], k[:, a // group], v[:, a], beta[:, a], decay[:, a])
        heads.append(gated_norm(out, gate[:, a], p["head_norm"], silu, m.norm_epsilon or 1e-5))
    return merge(heads, p)


def kda_mix(u, p, m, d):
    beta = sigmoid(u @ p["beta"]["kernel"])
    return by_feature_mix(u, p, d, lambda q, k, v, b, decay: delta(q, k, v, beta[:, b], decay))


def gated_delta_2_mix(u, p, m, d):
    gates = [sigmoid(project(u, p[name])) for name in ("erase", "write")]
    return by_feature_mix(
        u, p, d, lambda q, k, v, b, decay: gated_delta_2(q, k, v, *(x[:, b] for x in gates), decay)
    )


def by_feature_mix(u, p, d, rule):
    """rule(q, k, v, key head, decay) is the recurrence of one head."""
    q, k, v = (short_convolved(project(u, p[name]), p[f"{name}_conv"]) for name in ("query", "key", "value"))
    q, k = unit(q) / np.sqrt(q.shape[-1]), unit(k)
    steps, gate = (project(u @ p[f"{name}_down"]["kernel"], p[f"{name}_up"]) for name in ("step", "gate"))
    decay, heads = step_decay(steps, p), []
    for a in range(d.num_heads):
        b = a * d.num_kv_heads // d.num_heads
        out = rule(q[:, a], k[:, b], v[:, b], b, decay[:, b])
        heads.append(gated_norm(out, gate[:, a], p["head_norm"], sigmoid))
    return merge(heads, p)


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
    removal, written, heads = k * p["removal"], k + (rate - 1) * p["replacement"] * k, []
    removal = removal / np.sqrt((removal * removal).sum(-1, keepdims=True))
    for a in range(d.num_heads):
        b = a * d.num_kv_heads // d.num_heads
        out = rwkv7(r[:, a], written[:, b], v[:, b], removal[:, b], rate[:, b], decay[:, b])
        out = out - out.mean(-1, keepdims=True)
        out = out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-5 * d.head_dim)
        out = out * p["head_norm"]["scale"][a] + p["head_norm"]["bias"][a]
        own = (r[:, a] * p["bonus"][a] * written[:, b]).sum(-1, keepdims=True) * v[:, b]
        heads.append((out + own) * gate[:, a])
    return merge(heads, p)


def retnet_mix(u, p, m, d):
    gate, heads = project(u, p["gate"]), []
    for a, (q, k, v) in enumerate(head_inputs(u, p, d)):
        decay = np.full((len(u), 1), 1 - 2.0 ** (-5 - a * d.num_kv_heads // d.num_heads))
        out = decayed(q, k / np.sqrt(d.head_dim), v, decay)
        heads.append(gated_norm(out, gate[:, a], p["head_norm"], silu))
    return merge(heads, p)


def gla_mix(u, p, m, d):
    gate, heads = project(u, p["gate"]), []
    decay = sigmoid(project(u @ p["decay_down"]["kernel"], p["decay_up"])) ** (1 / m.temperature)
    for a, (q, k, v) in enumerate(head_inputs(u, p, d, rotated=False)):
        out = decayed(q / np.sqrt(q.shape[1]), k, v, decay[:, a * d.num_kv_heads // d.num_heads])
        heads.append(gated_norm(out, gate[:, a], p["head_norm"], silu))
    return merge(heads, p)


def mamba2_mix(u, p, m, d):
    x, key, query = (short_convolved(project(u, p[name]), p[f"{name}_conv"]) for name in ("x", "B", "C"))
    steps = u @ p["step"]["kernel"]
    decay, dt = step_decay(steps, p), np.log(1 + np.exp(steps + p["step_bias"]))
    group, heads = x.shape[1] // m.num_groups, []
    for a in range(x.shape[1]):
        values = dt[:, a, None] * x[:, a]
        out = decayed(query[:, a // group], key[:, a // group], values, decay[:, a, None])
        heads.append(out + p["skip"][a] * x[:, a])
    gated = np.stack(heads, 1) * silu(project(u, p["gate"]))
    of_groups = (gated * gated).mean(2).reshape(len(u), m.num_groups, group).mean(2)
    root = np.repeat(np.sqrt(of_groups + 1e-5), group, axis=1)[..., None]
    return np.tensordot(gated / root * p["norm_scale"], p["out"]["kernel"], axes=2)


def norm_mix(u, p, m, d):
    phi = FEATURES[m.feature_map]
    inputs = head_inputs(u, p, d, rotated=False)
    heads = [turned(phi(q)) @ turned(phi(k)).T * full_mask(len(u), d, m) @ v for q, k, v in inputs]
    merged = norm(np.concatenate(heads, -1), {"scale": p["norm_scale"].reshape(-1)}, m.norm)
    return merged @ p["out"]["kernel"].reshape(merged.shape[-1], -1)


def cosformer_mix(u, p, m, d):
    i = np.arange(len(u))
    nearness = np.cos(np.pi * (i[:, None] - i) / (2 * m.max_length)) * full_mask(len(u), d, m)
    heads = []
    for q, k, v in head_inputs(u, p, d, rotated=False):
        w = relu(q) @ relu(k).T * nearness
        total = w.sum(-1, keepdims=True)
        heads.append(w @ v / np.where(np.real(total) > 1e-6, total, 1e-6))
    return merge(heads, p)


def performer_mix(u, p, m, d):
    # The library draws the random directions; tests/attention checks them.
    directions = performer_projection(
        jax.random.key(m.seed), m.num_features or round(d.head_dim * np.log(d.head_dim)), d.head_dim
    )
    directions = np.asarray(directions, np.float64)

    def phi(x):
        x = x / d.head_dim**0.25
        return np.exp(x @ directions.T - (x * x).sum(-1, keepdims=True) / 2)

    heads = []
    for q, k, v in head_inputs(u, p, d):
        w = phi(q) @ phi(k).T * full_mask(len(u), d, m)
        heads.append(w / w.sum(-1, keepdims=True) @ v)
    return merge(heads, p)


def flow_mix(u, p, m, d):
    """Every flow sums over the tokens that a causal token has seen."""
    n = len(u)
    heads = []
    for q, k, v in head_inputs(u, p, d, rotated=False):
        q, k = sigmoid(q), sigmoid(k)
        seen = [slice(0, t + 1) if d.is_causal else slice(None) for t in range(n)]
        number = np.array([t + 1 if d.is_causal else n for t in range(n)])
        incoming = np.array([q[t] @ k[seen[t]].sum(0) for t in range(n)]) / number
        outgoing = np.array([k[t] @ q[seen[t]].sum(0) for t in range(n)]) / number
        sinks = np.array([q[t] @ (k / outgoing[:, None])[seen[t]].sum(0) for t in range(n)]) / number
        sources = np.array([k[t] @ (q / incoming[:, None])[seen[t]].sum(0) for t in range(n)]) / number
        shares = np.array([np.exp(sources[t]) / np.exp(sources[seen[t]]).sum() for t in range(n)]) * number
        weights = turned(q) @ turned(k).T * full_mask(n, d, m)
        heads.append((sigmoid(sinks) / (incoming * number))[:, None] * (weights @ (shares[:, None] * v)))
    return merge(heads, p)


def gated_network(attend):
    """Gated attention units without feed-forward networks; attend(maps, v, bias(i - j), mechanism, dimensions)."""

    def network(params, mechanism, d, x):
        places = np.arange(len(x))
        for p in layers(params):
            u, p = norm(x, p["mixer_norm"], d.norm), p["mixer"]
            z = silu(u @ p["shared"]["kernel"])
            maps = [
                rotary((z * scale + offset)[:, None], places)[:, 0]
                for scale, offset in zip(p["scale"], p["offset"])
            ]
            left, right = (
                rotary(np.stack([p[f"bias_{side}"]] * len(x)), places)[:, 0] for side in ("left", "right")
            )
            attended = attend(maps, silu(u @ p["value"]["kernel"]), left @ right.T, mechanism, d)
            x = x + (silu(u @ p["gate"]["kernel"]) * attended) @ p["out"]["kernel"]
        return norm(x, params["final_norm"], d.norm)

    return network


def gau_attend(maps, v, bias, m, d):
    mask = full_mask(len(v), d, m)
    q, k = maps
    return relu(q @ k.T / mask.sum(-1, keepdims=True) + bias) ** 2 * mask @ v


def flash_attend(maps, v, bias, m, d):
    chunk = np.arange(len(v)) // m.chunk_size
    same = chunk[:, None] == chunk
    before = chunk[:, None] > chunk if d.is_causal else np.ones_like(same)
    q, k, linear_q, linear_k = maps
    inside = relu(q @ k.T / m.chunk_size + bias) ** 2 * (same & full_mask(len(v), d, m))
    return (inside + linear_q @ linear_k.T / m.chunk_size * before) @ v


def bsbr_mix(u, p, m, d):
    """Token by token: the softmax of its chunk, then the products of the chunks that its chunk retrieves from."""
    n, c = len(u), m.chunk_size
    starts = range(0, n, c)
    ends = [min(s + c, n) for s in starts]
    retrieval_q, retrieval_k = project(u, p["retrieval_query"]), project(u, p["retrieval_key"])
    group = d.num_heads // d.num_kv_heads
    heads = []
    for a, (q, k, v) in enumerate(head_inputs(u, p, d)):
        r, h = retrieval_q[:, a], retrieval_k[:, a // group]
        products = [k[s:e].T @ v[s:e] for s, e in zip(starts, ends)]
        if m.num_compressed is not None:
            kept = [np.tensordot(f, p["compress"], axes=2) for f in products]
            products = [np.tensordot(f, p["expand"], axes=1) for f in kept]
        out = []
        for i, s in enumerate(starts):
            others = range(i) if d.is_causal else [j for j in range(len(ends)) if j != i]
            read = 0
            if others:
                logits = np.array([r[s] @ h[ends[j] - 1] for j in others]) / np.sqrt(d.head_dim)
                weights = np.exp(logits - np.real(logits).max())
                read = sum(w * products[j] for w, j in zip(weights / weights.sum(), others))
            for t in range(s, ends[i]):
                e = t + 1 if d.is_causal else ends[i]
                logits = k[s:e] @ q[t] / np.sqrt(d.head_dim)
                weights = np.exp(logits - np.real(logits).max())
                far = p["strength"][a] * (q[t] @ read) / np.sqrt(d.head_dim) if others else 0
                out.append(weights / weights.sum() @ v[s:e] + far)
        heads.append(np.stack(out))
    return merge(heads, p)


def luna_causal(u, p, packed, d):
    """Token by token: sums over the tokens so far, divided by their number."""
    scale, group = 1 / np.sqrt(d.head_dim), d.num_heads // d.num_kv_heads
    q, k, v = (project(u, p[name]) for name in ("query", "key", "value"))
    pack = project(packed, p["pack_query"])
    turned_q, turned_k = rotary(q, np.arange(len(u))), rotary(k, np.arange(len(u)))
    heads = []
    for a in range(d.num_heads):
        b, rows = a // group, []
        z = scale * k[:, b] @ pack[:, b].T
        weights = np.where(np.real(z) > 0, z + 1, np.exp(np.where(np.real(z) > 0, 0, z)))
        for t in range(len(u)):
            products = turned_k[: t + 1, b] @ turned_q[t, a]
            mean = (products @ weights[: t + 1])[None] / (t + 1)
            read = softmax(scale * mean, np.ones(mean.shape, bool))[0]
            rows.append((weights[: t + 1] @ read) @ v[: t + 1, b] / (t + 1))
        heads.append(np.stack(rows))
    return merge(heads, p)


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
            y = luna_causal(u, p["mixer"], packed, d)
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
