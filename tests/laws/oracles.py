"""Networks of each mechanism in float64 NumPy, one sequence at a time, straight from the formulas.

They share no code with the library. Everything is analytic in its inputs (no absolute values, no comparisons of
imaginary parts), so that derivatives come from complex steps: f'(x) v = Im f(x + i eps v) / eps, exact to rounding.
Parameters come as the library's nested dictionaries, layers stacked on the first axis.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import erf


def relu(z):
    return z * (np.real(z) > 0)


def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"]
    return y + p.get("bias", 0.0)


def rms_norm(x, p):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def norm(x, p, kind):
    return layer_norm(x, p) if kind == "layer" else rms_norm(x, p)


def feed_forward(x, p):
    return (relu(x @ p["gate"]["kernel"]) * (x @ p["up"]["kernel"])) @ p["down"]["kernel"]


def softmax(z, mask, sink=-np.inf):
    """Weights over the keys; a sink is a logit without a key."""
    top = np.maximum(np.where(mask, np.real(z), -np.inf).max(-1, keepdims=True, initial=-1e30), np.real(sink))
    z = z - top
    e = np.where(mask, np.exp(np.where(mask, z, 0.0)), 0.0)
    total = e.sum(-1, keepdims=True) + np.exp(sink - top)
    return e / np.where(np.real(total) == 0, 1.0, total)


def sigma(z, mask, score):
    if score == "softmax":
        return softmax(z, mask)
    if score == "relu2":
        w = relu(z) ** 2
    else:
        w = 0.5 * (1 + erf((z - math.sqrt(0.5)) / (math.sqrt(0.25 / math.pi) * math.sqrt(2))))
    return np.where(mask, w, 0.0)


def rotary(x, positions, theta=10000.0):
    """x (n, heads, h): pair (2 i, 2 i + 1) turned by position * theta^(-2 i / h)."""
    h = x.shape[-1]
    out = np.empty_like(x)
    for i in range(h // 2):
        angle = positions * theta ** (-2 * i / h)
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out[..., 2 * i] = x[..., 2 * i] * c - x[..., 2 * i + 1] * s
        out[..., 2 * i + 1] = x[..., 2 * i] * s + x[..., 2 * i + 1] * c
    return out


def project(x, p):
    """(n, d) by a kernel (d, heads, h)."""
    y = np.tensordot(x, p["kernel"], axes=1)
    return y + p["bias"] if "bias" in p else y


def softmax_attention(x, p, mask, d, cap=None, rotated=None):
    """Multi-head attention with grouped heads under a mask (n, n), with p's sinks and gate if there are any; the first
    `rotated` features are rotated."""
    n = x.shape[0]
    positions = np.arange(n)
    q, k, v = (project(x, p[name]) for name in ("query", "key", "value"))
    q, k = (
        np.concatenate([rotary(y[..., :rotated], positions), y[..., rotated or d.head_dim :]], -1)
        for y in (q, k)
    )
    group = d.num_heads // d.num_kv_heads
    heads = []
    for a in range(d.num_heads):
        z = q[:, a] @ k[:, a // group].T / math.sqrt(d.head_dim)
        z = z if cap is None else cap * np.tanh(z / cap)
        w = softmax(z, mask, p["sinks"][a] if "sinks" in p else -np.inf)
        heads.append(w @ v[:, a // group])
    attended = np.stack(heads, 1)
    if "gate" in p:
        attended = attended / (1 + np.exp(-project(x, p["gate"])))
    return np.tensordot(attended, p["out"]["kernel"], axes=2)


def full_mask(n, d, mechanism):
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    return j <= i if d.is_causal else np.ones((n, n), bool)


def local_mask(n, d, mechanism):
    """Which keys a token sees, by the definitions of each pattern, pair by pair."""
    w, kind = mechanism.window, mechanism.pattern
    left, right = (w - 1, 0) if d.is_causal else (w // 2, w // 2)
    random_blocks = bigbird_blocks(n, mechanism) if kind == "bigbird" else None
    mask = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(n):
            if kind == "sliding":
                seen = -left <= j - i <= right
            elif kind == "dilated":
                seen = (j - i) % mechanism.dilation == 0 and -left <= (j - i) // mechanism.dilation <= right
            elif kind == "block":
                seen = i // w == j // w
            elif kind == "bucketed":
                seen = abs(i // w - j // w) <= 1
            elif kind == "strided":
                seen = abs(i - j) < w or (i - j) % w == 0
            elif kind == "fixed":
                seen = i // w == j // w or j % w == w - 1
            elif kind == "global":
                seen = -left <= j - i <= right or min(i, j) < mechanism.num_global
            elif kind == "global_local":
                few, segment = mechanism.num_global, mechanism.global_segment
                seen = j < few or (-left <= j - i <= right if i >= few else (j - few) // segment == i)
            elif kind == "axial":
                seen = i // mechanism.grid_width == j // mechanism.grid_width
                seen = seen or i % mechanism.grid_width == j % mechanism.grid_width
            elif kind == "neighbourhood":
                (a, b), (c, e) = divmod(i, mechanism.grid_width), divmod(j, mechanism.grid_width)
                seen = abs(a - c) <= w // 2 and abs(b - e) <= w // 2
            else:
                seen = random_blocks[i // w, j // w]
            mask[i, j] = seen and (j <= i or not d.is_causal)
    return mask


def bigbird_blocks(n, mechanism):
    # The random blocks come from the pattern itself; tests/attention/local/test_patterns.py checks them.
    pattern = mechanism.make_pattern(False)
    blocks = -(-n // mechanism.window)
    starts = np.arange(blocks) * mechanism.window
    return np.asarray(pattern.visible(starts[:, None], starts[None, :], n))


def masked_network(make_mask):
    def network(params, mechanism, d, x):
        n = x.shape[0]
        mask = make_mask(n, d, mechanism)
        for p in layers(params):
            u = norm(x, p["mixer_norm"], d.norm)
            m = mechanism
            x = x + softmax_attention(u, p["mixer"], mask, d, m.logits_soft_cap, m.rotary_dim)
            x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
        return norm(x, params["final_norm"], d.norm)

    return network


def diag_network(params, mechanism, d, x):
    """Softmax or ReLU attention inside blocks; ReLU's heads are merged and normalised together."""
    n = x.shape[0]
    places = np.arange(n)
    mask = (places[:, None] // mechanism.block_size == places // mechanism.block_size) & full_mask(n, d, None)
    for p in layers(params):
        u = norm(x, p["mixer_norm"], d.norm)
        if mechanism.score == "softmax":
            mixed = softmax_attention(u, p["mixer"], mask, d)
        else:
            q, k, v = (project(u, p["mixer"][name]) for name in ("query", "key", "value"))
            q, k = rotary(q, places), rotary(k, places)
            group = d.num_heads // d.num_kv_heads
            heads = []
            for a in range(d.num_heads):
                scores = relu(q[:, a] @ k[:, a // group].T / math.sqrt(d.head_dim)) * mask
                heads.append(scores @ v[:, a // group])
            scale = {"scale": p["mixer"]["attended_norm"]["scale"].reshape(-1)}
            merged = norm(np.concatenate(heads, -1), scale, mechanism.norm)
            mixed = merged @ p["mixer"]["out"]["kernel"].reshape(merged.shape[-1], -1)
        x = x + mixed
        x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
    return norm(x, params["final_norm"], d.norm)


def linformer_network(params, mechanism, d, x):
    """Softmax over projected keys: row r of head a mixes the keys by E[a, r], the values by F[a, r]."""
    n = x.shape[0]
    places, group = np.arange(n), d.num_heads // d.num_kv_heads
    for p in layers(params):
        u, own = norm(x, p["mixer_norm"], d.norm), p["mixer"]
        q, k, v = (project(u, own[name]) for name in ("query", "key", "value"))
        q, k = rotary(q, places), rotary(k, places)
        heads = []
        for a in range(d.num_heads):
            e, f = own["key_projection"], own.get("value_projection")
            if mechanism.sharing == "none":
                e, f = e[a // group], f[a // group]
            logits = q[:, a] @ (e[:, :n] @ k[:, a // group]).T / math.sqrt(d.head_dim)
            weights = softmax(logits, np.ones(logits.shape, bool))
            heads.append(weights @ (f[:, :n] @ v[:, a // group]))
        x = x + np.tensordot(np.stack(heads, 1), own["out"]["kernel"], axes=2)
        x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
    return norm(x, params["final_norm"], d.norm)


def hopfield_network(params, mechanism, d, x):
    """Each step but the last replaces the query by a mixture of the visible keys; the last reads the values."""
    n = x.shape[0]
    places, group, mask = np.arange(n), d.num_heads // d.num_kv_heads, full_mask(n, d, None)
    for p in layers(params):
        u, own = norm(x, p["mixer_norm"], d.norm), p["mixer"]
        q, k, v = (project(u, own[name]) for name in ("query", "key", "value"))
        q, k = rotary(q, places), rotary(k, places)
        heads = []
        for a in range(d.num_heads):
            state, keys = q[:, a], k[:, a // group]
            for _ in range(mechanism.steps - 1):
                state = softmax(mechanism.beta * state @ keys.T, mask) @ keys
            heads.append(softmax(mechanism.beta * state @ keys.T, mask) @ v[:, a // group])
        x = x + np.tensordot(np.stack(heads, 1), own["out"]["kernel"], axes=2)
        x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
    return norm(x, params["final_norm"], d.norm)


def tlinformer_network(params, mechanism, d, x):
    """The loop of TLinFormer (arXiv:2508.20407, section 3), which reads the whole history anew for every window."""
    n, w, inner = x.shape[0], mechanism.window, mechanism.hidden + 2
    all_layers = layers(params)

    def project_all(p, rows, places):
        u = norm(rows, p["mixer_norm"], d.norm)
        q, k, v = (project(u, p["mixer"][name]) for name in ("query", "key", "value"))
        return rotary(q, places), rotary(k, places), v

    def attend(q, k, v, mask):
        group = d.num_heads // d.num_kv_heads
        heads = [
            softmax(q[:, a] @ k[:, a // group].T / math.sqrt(d.head_dim), mask) @ v[:, a // group]
            for a in range(d.num_heads)
        ]
        return np.stack(heads, 1)

    def finish(p, rows, attended):
        rows = rows + np.tensordot(attended, p["mixer"]["out"]["kernel"], axes=2)
        return rows + feed_forward(norm(rows, p["feed_forward_norm"], d.norm), p["feed_forward"])

    def everything(a, b):
        return np.ones((a, b), bool)

    outputs = []
    for start in range(0, n, w):
        places, past = np.arange(start, min(start + w, n)), np.arange(start)
        count = min(mechanism.context, start)
        tail = past[start - count :]
        own, history = x[places], x[past]
        causal = places[:, None] >= places[None]
        for first in range(0, len(all_layers), inner):
            p = all_layers[first]
            old_q, old_k, old_v = project_all(p, history, past)
            q, k, v = project_all(p, own, places)
            own = finish(p, own, attend(q, k, v, causal) + attend(q, old_k, old_v, everything(len(q), start)))
            read = attend(old_q[start - count :], old_k, old_v, everything(count, start))
            context = finish(p, history[start - count :], read)
            for p in all_layers[first + 1 : first + inner]:
                context_q, context_k, context_v = project_all(p, context, tail)
                q, k, v = project_all(p, own, places)
                seen = attend(q, context_k, context_v, everything(len(q), count))
                own = finish(p, own, attend(q, k, v, causal) + seen)
                before = context
                context = finish(p, before, attend(context_q, context_k, context_v, everything(count, count)))
            history = finish(p, history, attend(old_q, context_k, context_v, everything(start, count)))
        outputs.append(own)
    return norm(np.concatenate(outputs), params["final_norm"], d.norm)


def layers(params):
    """The parameters of each layer in turn."""

    def pick(tree, i):
        return {k: pick(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}

    stacked = params["layers_0"]["block_0"]
    leaf = stacked
    while isinstance(leaf, dict):
        leaf = next(iter(leaf.values()))
    return [pick(stacked, i) for i in range(leaf.shape[0])]


def brl_network(params, mechanism, d, x):
    """Algorithm 1 (or equations 4-12), block by block, with each history sliced where it is needed."""
    m = mechanism
    n = x.shape[0]
    block = m.block_size if d.is_causal else n  # the cases give it
    history = m.block_size if m.history_size is None else m.history_size
    mask = local_mask(n, d, m.local)
    table = params["carrier_0"]["tokens"]
    per_layer = layers(params)
    inputs = [np.zeros((0, x.shape[1]), x.dtype) for _ in per_layer]
    outputs = np.zeros((0, x.shape[1]), x.dtype)
    for start in range(0, n, block):
        end = min(n, start + block)
        h, ct = x[start:end], table
        for index, p in enumerate(per_layer):
            u = norm(h, p["mixer_norm"], d.norm) if m.residual == "pre" else h
            inputs[index] = np.concatenate([inputs[index], u])
            if not d.is_causal:
                source = norm(x, params["carrier_0"]["history_norm"], d.norm) if m.memory == "output" else u
            elif m.memory == "output":
                source = np.real(outputs[max(0, start - history) : start])  # no gradient through the queue
            else:
                source = inputs[index][max(0, start - history) : start]
            gen = softmax_attention(inputs[index], p["mixer"]["local"], mask[:end, :end], d)[start:]
            ct, prop = brl_regulariser(p["mixer"], m, d, u, ct, source, history, end - start)
            mixed = gen + prop
            if m.residual == "post":
                h = h + norm(mixed, p["mixer_norm"], d.norm)
                h = h + norm(feed_forward(h, p["feed_forward"]), p["feed_forward_norm"], d.norm)
            else:
                h = h + mixed
                h = h + feed_forward(norm(h, p["feed_forward_norm"], d.norm), p["feed_forward"])
        outputs = np.concatenate([outputs, norm(h, params["final_norm"], d.norm)])
    return outputs


def brl_regulariser(p, m, d, u, ct, source, history, length):
    c = p["compressed"]
    count, heads = ct.shape[0], d.num_heads
    equations = m.formulation == "equations"
    read = ct
    if source.shape[0]:
        # Distance of a token before the block to the block's start; in an encoder to evenly spread places.
        if d.is_causal:
            query_places, key_places = np.full(count, 0), np.arange(-source.shape[0], 0)
        else:
            query_places, key_places = (
                np.array([(2 * j + 1) * length // (2 * count) for j in range(count)]),
                np.arange(length),
            )
        q = project(ct, c["compress_query"])
        k1, v = project(source, c["compress_key"]), project(source, c["compress_value"])
        k2 = project(source, c["compress_contrast_key"]) if m.gamma != 0.0 else None
        if m.compress_positions == "rope":
            q, k1 = rotary(q, query_places), rotary(k1, key_places)
            k2 = None if k2 is None else rotary(k2, key_places)
        scale = (
            1 / (count * math.sqrt(q.shape[-1])) if m.compress_scale == "m1" else 1 / math.sqrt(q.shape[-1])
        )
        if m.compress_scale == "learned":
            q = q * c["compress_scale"][None, :, None]
        outs = []
        for a in range(heads):
            bias = position_bias(m, d, c.get("compress_bias"), a, query_places, key_places, history)
            every = np.ones((count, source.shape[0]), bool)
            s = sigma(q[:, a] @ k1[:, a].T * scale + bias, every, m.score)
            if m.gamma != 0.0:
                gamma = m.gamma
                if gamma is None:
                    g = c["gamma"][:, a]
                    gamma = np.exp(g[0] * g[1]) - np.exp(g[0] * g[2])
                s = s - gamma * sigma(q[:, a] @ k2[:, a].T * scale + bias, every, m.score)
            outs.append(norm(s @ v[:, a], {"scale": c["compress_norm"]["scale"][a]}, d.norm))
        read = np.concatenate(outs, -1)
    evolved = (1 - m.beta) * norm(read, c["read_norm"], d.norm)
    if m.beta:
        evolved = evolved + m.beta * (ct @ c["carry"]["kernel"])
    if equations:
        evolved = relu(evolved)
    zq = project(u, p["propagate_query"])
    if m.phi == "spiky":
        zq = np.exp(np.where(np.real(zq) < 10, zq, 10.0))
    zk, zv = project(evolved, c["propagate_key"]), project(evolved, c["propagate_value"])
    places = np.full(count, -1)
    if not d.is_causal:
        places = np.array([(2 * j + 1) * length // (2 * count) for j in range(count)])
    outs = []
    for a in range(heads):
        bias = position_bias(m, d, p.get("propagate_bias"), a, np.arange(length), places, history)
        s = sigma(
            zq[:, a] @ zk[:, a].T / math.sqrt(zq.shape[-1]) + bias, np.ones((length, count), bool), m.score
        )
        outs.append(p["lambda"][a] * (s @ zv[:, a]))
    prop = np.concatenate(outs, -1)
    if equations:
        return evolved, prop
    ct = ct + evolved
    ct = ct + feed_forward(norm(ct, c["ffn_norm"], d.norm), c["ffn"])
    return ct, relu(norm(prop, p["propagate_norm"], d.norm))


def position_bias(m, d, table, head, query_places, key_places, history):
    if m.bias == "none":
        return 0.0
    relative = key_places[None, :] - query_places[:, None]
    if m.bias == "alibi":
        slope = 2.0 ** (-8 * (head + 1) / d.num_heads)  # num_heads is a power of two here
        return -slope * np.abs(relative)
    buckets = 32
    out = np.zeros(relative.shape, table.dtype)
    for i, j in np.ndindex(*relative.shape):
        r, offset, size = int(relative[i, j]), 0, buckets
        if not d.is_causal:
            size //= 2
            offset = size if r > 0 else 0
            r = -abs(r)
        distance = max(-r, 0)
        exact = size // 2
        if distance >= exact:
            far = math.log(distance / exact) / math.log(history / exact) * (size - exact)
            distance = min(size - 1, exact + int(far))
        out[i, j] = table[offset + distance, head]
    return out


NETWORKS = {
    "full": masked_network(full_mask),
    "local": masked_network(local_mask),
    "brl": brl_network,
    "diag": diag_network,
    "linformer": linformer_network,
    "hopfield": hopfield_network,
    "tlinformer": tlinformer_network,
}
