"""Networks of the mechanisms that approximate a dense one, in float64 NumPy (see `tests.laws.oracles`).

Dense (n, n) matrices, one head at a time.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.low_rank.skyformer import skyformer_samples
from brl_jax.attention.sorting.lsh import lsh_rotations
from brl_jax.attention.sorting.prob_sparse import sampled_fractions
from tests.laws.oracles import norm, project, relu, rotary, softmax
from tests.laws.state_oracles import head_inputs, merge, residual_network


def pseudo_inverse(a, steps):
    """The iteration of order three; the largest sums are those of the real parts."""
    rows, columns = a.sum(1), a.sum(0)
    z = a.T / (rows[np.argmax(np.real(rows))] * columns[np.argmax(np.real(columns))])
    one = np.eye(len(a))
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def every(a, b):
    return np.ones((len(a), len(b)), bool)


def nystromformer_mix(u, p, m, d):
    """Landmarks are means of segments, cut where floor(t r / n) steps."""
    n = len(u)
    r = min(m.num_landmarks, n)
    cuts = [-(-i * n // r) for i in range(r + 1)]
    heads = []
    for a, (q, k, v) in enumerate(head_inputs(u, p, d)):
        q, k = q / d.head_dim**0.25, k / d.head_dim**0.25
        few_q, few_k = (np.stack([x[s:e].mean(0) for s, e in itertools.pairwise(cuts)]) for x in (q, k))
        left, between, right = (
            softmax(x @ y.T, every(x, y)) for x, y in ((q, few_k), (few_q, few_k), (few_q, k))
        )
        out = left @ pseudo_inverse(between, m.iterations) @ (right @ v)
        if m.conv_size:
            reach = m.conv_size // 2
            room = np.concatenate([np.zeros((reach, v.shape[1])), v, np.zeros((reach, v.shape[1]))])
            out = out + sum(p["value_kernel"][a, w] * room[w : w + n] for w in range(m.conv_size))
        heads.append(out)
    return merge(heads, p)


def gaussian(x, y, d):
    return np.exp(-((x[:, None] - y) ** 2).sum(-1) / (2 * np.sqrt(d.head_dim)))


def kernelized_mix(u, p, m, d):
    return merge([gaussian(q, k, d) @ v for q, k, v in head_inputs(u, p, d)], p)


def synthesizer_mix(u, p, m, d):
    n, group = len(u), d.num_heads // d.num_kv_heads
    rows = p["rows"][:n] if m.weights == "random" else relu(project(u, p["hidden"]))
    bias = np.zeros((n, d.num_heads)) if m.weights == "random" else p["column_bias"][:n]
    v = project(u, p["value"])
    seen = np.tri(n, dtype=bool) if d.is_causal else np.ones((n, n), bool)
    scores = [rows[:, a] @ p["columns"][:n, a].T + bias[:, a] for a in range(d.num_heads)]
    return merge([softmax(s, seen) @ v[:, a // group] for a, s in enumerate(scores)], p)


def skyformer_mix(u, p, m, d):
    # The random places come from the library; half of them choose queries, half keys.
    places = np.asarray(skyformer_samples(jax.random.key(m.seed), m.num_samples), np.float64)
    places, half = np.floor(places * len(u)).astype(int), m.num_samples // 2
    heads = []
    for q, k, v in head_inputs(u, p, d):
        x = np.concatenate([q[places[:half]], k[places[half:]]])
        between = gaussian(x, x, d) + m.ridge * np.eye(len(x))
        root = np.diag(1 / np.sqrt(between.sum(1)))
        inverse = root @ pseudo_inverse(root @ between @ root, m.iterations) @ root
        heads.append(gaussian(q, x, d) @ inverse @ (gaussian(x, k, d) @ v))
    return merge(heads, p)


def long_short_mix(u, p, m, d):
    """Token by token: its window's keys and the projected ones, in one softmax."""
    n, group = len(u), d.num_heads // d.num_kv_heads
    q, k, v = (project(u, p[name]) for name in ("query", "key", "value"))
    logits = project(u, p["projection"])

    def normed(x, name):
        flat = norm(x.reshape(len(x), -1), {"scale": p[name].reshape(-1)}, "layer")
        return flat.reshape(x.shape)

    def projected(x, s, e):
        """(r, K, h)"""
        weights = [
            softmax(logits[s:e, a].T, np.ones((logits.shape[2], e - s), bool)) for a in range(x.shape[1])
        ]
        out = np.stack([w @ x[s:e, a] for a, w in enumerate(weights)], 1)
        return normed(out, "projected_norm_scale")

    near_k, near_v = (normed(x, "local_norm_scale") for x in (k, v))
    near_k, near_q = rotary(near_k, np.arange(n)), rotary(q, np.arange(n))
    w, c = m.window, m.chunk_size
    spans = [(s, s + c) for s in range(0, n - c + 1, c)] if d.is_causal else [(0, n)]
    every_far = [(projected(k, *span), projected(v, *span)) for span in spans]
    out = []
    for i in range(n):
        if d.is_causal:
            start, end, far = max(0, i - w + 1), i + 1, every_far[: i // c]
        else:
            start, end, far = max(0, i // w * w - w // 2), min(n, i // w * w + w + w // 2), every_far
        for a in range(d.num_heads):
            b = a // group
            scores = [near_k[start:end, b] @ near_q[i, a], *(x[:, b] @ q[i, a] for x, _ in far)]
            values = [near_v[start:end, b], *(x[:, b] for _, x in far)]
            scores = np.concatenate(scores)[None] / np.sqrt(d.head_dim)
            out.append((softmax(scores, np.ones(scores.shape, bool)) @ np.concatenate(values))[0])
    return np.tensordot(np.reshape(out, q.shape), p["out"]["kernel"], axes=2)


def informer_mix(u, p, m, d):
    # The random fractions come from the library.
    n = len(u)
    sees = [t + 1 if d.is_causal else n for t in range(n)]
    logarithms = [max(1, int(np.ceil(np.log(s)))) for s in sees]
    budgets = [min(s, m.factor * log) for s, log in zip(sees, logarithms)]
    key = jax.random.key(m.seed)
    draws = np.stack([np.asarray(sampled_fractions(key, jnp.arange(n), s)) for s in range(max(budgets))], 1)
    heads = []
    for q, k, v in head_inputs(u, p, d):
        scores, measures, attending, out = q @ k.T, [], 0, []
        for t in range(n):
            sampled = np.real(
                scores[t, np.floor(draws[t, : budgets[t]].astype(np.float64) * sees[t]).astype(int)]
            )
            measures.append(sampled.max() - sampled.mean())
        for t in range(n):
            others = measures[:t] if d.is_causal else measures[:t] + measures[t + 1 :]
            attends = sum(x >= measures[t] for x in others) < budgets[t]
            attends = attends and not (d.is_causal and attending >= 2 * budgets[t] * logarithms[t])
            attending += attends
            row = scores[None, t, : sees[t]] / np.sqrt(d.head_dim)
            seen = v[: sees[t]]
            if attends:
                out.append((softmax(row, np.ones(row.shape, bool)) @ seen)[0])
            else:
                out.append(seen.sum(0) if d.is_causal else seen.mean(0))
        heads.append(np.stack(out))
    return merge(heads, p)


def native_sparse_mix(u, p, m, d):
    """Token by token, one branch after the other."""
    n, group, scale = len(u), d.num_heads // d.num_kv_heads, 1 / np.sqrt(d.head_dim)
    length, stride, size = m.compressed_size, m.stride, m.selected_size
    turned = [rotary(project(u, p[name]), np.arange(n)) for name in ("query", "key", "window_key")]
    q, k, k_window = turned
    v, v_window = project(u, p["value"]), project(u, p["window_value"])
    gates = 1 / (1 + np.exp(-project(u, p["gates"])))
    starts = range(0, n - length + 1, stride)

    def compressed(name):
        """(C, K, h): a network of one hidden layer with GELU by tanh over the tokens of each block."""
        x, blocks = project(u, p[f"compressed_{name}"]), []
        for start in starts:
            block = np.moveaxis(x[start : start + length], 0, 2) + p[f"compress_{name}_places"]
            hidden = np.tensordot(block, p[f"compress_{name}_hidden"]["kernel"], axes=2)
            cubic = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
            blocks.append(hidden * (1 + np.tanh(cubic)) / 2 @ p[f"compress_{name}_out"]["kernel"])
        return np.reshape(blocks, (len(blocks), *x.shape[1:])) if blocks else np.zeros((0, *x.shape[1:]))

    key_blocks = rotary(compressed("key"), np.array(starts))
    value_blocks = compressed("value")

    def read(query, keys, values):
        if not len(keys):
            return np.zeros(values.shape[1]), np.zeros(len(keys))
        w = softmax(scale * (keys @ query)[None], np.ones((1, len(keys)), bool))
        return (w @ values)[0], w[0]

    out = []
    for t in range(n):
        ended = sum(start + length <= t + 1 for start in starts)
        for b in range(d.num_kv_heads):
            heads = range(b * group, (b + 1) * group)
            far = [read(q[t, a], key_blocks[:ended, b], value_blocks[:ended, b]) for a in heads]
            # The weight of a block of tokens: for each of its strides, that of the blocks that cover the stride.
            weight = sum(np.real(w) for _, w in far)
            own = t // size
            rank = {}
            for j in range(1, own - 1):
                pieces = range(j * size // stride, (j + 1) * size // stride)
                rank[j] = sum(
                    weight[i]
                    for x in pieces
                    for i in range(x - length // stride + 1, x + 1)
                    if 0 <= i < ended
                )
            best = sorted(rank, key=lambda j: -rank[j])[: max(m.num_selected - 3, 0)]
            blocks = {*[own, own - 1, 0][: m.num_selected], *best} - {-1}
            chosen = [i for j in sorted(blocks) for i in range(j * size, min((j + 1) * size, t + 1))]
            near = slice(max(0, t - m.window + 1), t + 1)
            for a, (first, _) in zip(heads, far):
                second, _ = read(q[t, a], k[chosen, b], v[chosen, b])
                third, _ = read(q[t, a], k_window[near, b], v_window[near, b])
                out.append(gates[t, a, 0] * first + gates[t, a, 1] * second + gates[t, a, 2] * third)
    return np.tensordot(np.reshape(out, q.shape), p["out"]["kernel"], axes=2)


def reformer_mix(u, p, m, d):
    """Token by token, round by round: the softmax over what is seen in any round."""
    # The random directions come from the library.
    sizes = {"num_rounds": m.num_rounds, "num_buckets": m.num_buckets}
    rotations = np.asarray(lsh_rotations(jax.random.key(m.seed), d.head_dim, **sizes), np.float64)
    n, size, group = len(u), m.chunk_size, d.num_heads // d.num_kv_heads
    queries, values = rotary(project(u, p["query"]), np.arange(n)), project(u, p["value"])
    heads = []
    for a in range(d.num_heads):
        q, v = queries[:, a], values[:, a // group]
        seen = np.zeros((n, n), bool)
        for rotation in rotations:
            sides = np.real(q) @ rotation
            bucket = np.argmax(np.concatenate([sides, -sides], 1), 1)
            if d.is_causal:
                chunk = np.array([np.sum(bucket[:t] == bucket[t]) for t in range(n)]) // size
            else:
                chunk = np.argsort(sorted(range(n), key=lambda t, b=bucket: (b[t], t))) // size
            apart = chunk[:, None] - chunk
            seen |= (bucket[:, None] == bucket) & ((apart == 0) | (apart == 1))
        seen &= np.tri(n, k=-1, dtype=bool) if d.is_causal else ~np.eye(n, dtype=bool)
        seen |= np.diag(~seen.any(1))
        scores = q @ (q / np.sqrt((q * q).sum(1, keepdims=True))).T / np.sqrt(d.head_dim)
        heads.append(softmax(scores, seen) @ v)
    return merge(heads, p)


def sinkhorn_mix(u, p, m, d):
    """Block by block: the own tokens and the mixed ones, in one softmax."""
    n, w = len(u), m.block_size
    count, group = -(-n // w), d.num_heads // d.num_kv_heads
    starts = range(0, n, w)
    sums = np.stack([u[: s + 1].sum(0) if d.is_causal else u[s : s + w].sum(0) for s in starts])
    logits = relu(project(relu(project(sums, p["sort_hidden"])), p["sort_blocks"]))[:, :count]
    heads = []
    for a, (q, k, v) in enumerate(head_inputs(u, p, d)):
        s = np.exp(logits[:, :, a // group] / m.temperature)
        if d.is_causal:
            s = s * np.tri(count, k=-1)
        for _ in range(m.iterations):
            rows = s.sum(1, keepdims=True)
            s = s / np.where(rows == 0, 1, rows)
            # Divided by what the column has so far, or by all of it.
            columns = np.stack([s[: i + 1].sum(0) if d.is_causal else s.sum(0) for i in range(count)])
            s = s / np.where(columns == 0, 1, columns)
        out = []
        for t in range(n):
            i = t // w
            own = range(i * w, t + 1 if d.is_causal else min(n, i * w + w))
            mixed = range(min(w, n)) if i or not d.is_causal else ()
            keys, values = (
                np.array(
                    [sum(s[i, j] * x[j * w + c] for j in range(count) if j * w + c < n) for c in mixed]
                    + [x[t] for t in own]
                )
                for x in (k, v)
            )
            scores = (keys @ q[t])[None] / np.sqrt(d.head_dim)
            out.append((softmax(scores, np.ones(scores.shape, bool)) @ values)[0])
        heads.append(np.stack(out))
    return merge(heads, p)


def sliceformer_mix(u, p, m, d):
    v = project(u, p["value"])
    out = np.empty_like(v)
    for a, c in np.ndindex(v.shape[1:]):
        falls = m.order == "descending" or (m.order == "interleaved" and c % 2 == 1)
        ranked = sorted(v[:, a, c], key=lambda z, falls=falls: -np.real(z) if falls else np.real(z))
        if m.order == "max_exchange":
            ranked = list(v[:, a, c])
            largest = int(np.argmax(np.real(v[:, a, c])))
            ranked[0], ranked[largest] = ranked[largest], ranked[0]
        out[:, a, c] = ranked
    return np.tensordot(out, p["out"]["kernel"], axes=2)


NETWORKS = {
    "native_sparse": residual_network(native_sparse_mix),
    "reformer": residual_network(reformer_mix),
    "sinkhorn": residual_network(sinkhorn_mix),
    "sliceformer": residual_network(sliceformer_mix),
    "informer": residual_network(informer_mix),
    "long_short": residual_network(long_short_mix),
    "kernelized": residual_network(kernelized_mix),
    "synthesizer": residual_network(synthesizer_mix),
    "skyformer": residual_network(skyformer_mix),
    "nystromformer": residual_network(nystromformer_mix),
}
