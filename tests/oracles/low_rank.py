"""Networks of the low-rank mechanisms."""

import itertools
import math

import jax
import numpy as np

from brl_jax.attention.low_rank.skyformer import skyformer_samples
from tests.oracles.dense import gaussian
from tests.oracles.parts import head_inputs, merge, norm, project, residual_network, rotary, softmax


def linformer_mix(u, p, m, d):
    """Softmax over projected keys: row r mixes the keys by E[r] and the values by F[r]."""
    n, heads = len(u), []
    for q, k, v in head_inputs(u, p, d):
        e, f = p["key_projection"], p["value_projection"]
        weights = softmax(q @ (e[:, :n] @ k).T / math.sqrt(d.head_dim))
        heads.append(weights @ (f[:, :n] @ v))
    return merge(heads, p)


def pseudo_inverse(a, steps):
    """The third-order iteration; selects the largest sums by their real parts."""
    rows, columns = a.sum(1), a.sum(0)
    z = a.T / (rows[np.argmax(np.real(rows))] * columns[np.argmax(np.real(columns))])
    one = np.eye(len(a))
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def nystromformer_mix(u, p, m, d):
    """Landmarks are means of segments; a new segment begins where floor(t r / n) increases."""
    n = len(u)
    r = min(m.num_landmarks, n)
    cuts = [-(-i * n // r) for i in range(r + 1)]
    heads = []
    for a, (q, k, v) in enumerate(head_inputs(u, p, d)):
        q, k = q / d.head_dim**0.25, k / d.head_dim**0.25
        few_q, few_k = (np.stack([x[s:e].mean(0) for s, e in itertools.pairwise(cuts)]) for x in (q, k))
        left, between, right = (softmax(x @ y.T) for x, y in ((q, few_k), (few_q, few_k), (few_q, k)))
        out = left @ pseudo_inverse(between, m.iterations) @ (right @ v)
        if m.conv_size:
            reach = m.conv_size // 2
            padded = np.concatenate([np.zeros((reach, v.shape[1])), v, np.zeros((reach, v.shape[1]))])
            out = out + sum(p["value_kernel"][a, w] * padded[w : w + n] for w in range(m.conv_size))
        heads.append(out)
    return merge(heads, p)


def skyformer_mix(u, p, m, d):
    # The library draws the random positions; half of them select queries, half keys.
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
    """Token by token: the keys of its window and the projected keys share one softmax."""
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
            out.append((softmax(scores) @ np.concatenate(values))[0])
    return np.tensordot(np.reshape(out, q.shape), p["out"]["kernel"], axes=2)


NETWORKS = {
    "linformer": residual_network(linformer_mix),
    "long_short": residual_network(long_short_mix),
    "nystromformer": residual_network(nystromformer_mix),
    "skyformer": residual_network(skyformer_mix),
}
