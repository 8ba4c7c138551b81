"""The low-rank mechanisms."""

import itertools
import math

import jax
import numpy as np

from brl_jax.attention.low_rank.skyformer import skyformer_samples
from tests.oracles.dense import gaussian
from tests.oracles.parts import each_head, inputs, merge, norm, project, residual_network, rotary, softmax


@each_head
def linformer(q, k, v, *, key_projection, value_projection, scale=None):
    """Softmax over projected keys: row r mixes the keys by E[r] and the values by F[r] (arXiv:2006.04768, eq. 7)."""
    e, f = (x[:, : len(k)] for x in (key_projection, value_projection))
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    return softmax(scale * q @ (e @ k).T) @ (f @ v)


def linformer_mix(u, p, m, d):
    return merge(
        linformer(*inputs(u, p), **{name: p[name] for name in ("key_projection", "value_projection")}), p
    )


def pseudo_inverse(a, steps):
    """The third-order iteration; selects the largest sums by their real parts."""
    rows, columns = a.sum(1), a.sum(0)
    z = a.T / (rows[np.argmax(np.real(rows))] * columns[np.argmax(np.real(columns))])
    one = np.eye(len(a))
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def nystromformer(query, key, value, *, num_landmarks, iterations=6, value_kernel=None, scale=None):
    """Landmarks are means of segments; a new segment begins where floor(t r / n) increases (arXiv:2102.03902)."""
    n = len(query)
    r = min(num_landmarks, n)
    cuts = [-(-i * n // r) for i in range(r + 1)]
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale

    @each_head
    def attend(q, k, v):
        few_q, few_k = (np.stack([x[s:e].mean(0) for s, e in itertools.pairwise(cuts)]) for x in (q, k))
        left, between, right = (softmax(scale * x @ y.T) for x, y in ((q, few_k), (few_q, few_k), (few_q, k)))
        return left @ pseudo_inverse(between, iterations) @ (right @ v)

    out = attend(query, key, value)
    if value_kernel is not None:
        heads, width = value_kernel.shape
        padded = np.pad(value, ((width // 2, width // 2), (0, 0), (0, 0))).repeat(heads // value.shape[1], 1)
        out = out + sum(value_kernel[:, w, None] * padded[w : w + n] for w in range(width))
    return out


def nystromformer_mix(u, p, m, d):
    kernel = p["value_kernel"] if m.conv_size else None
    options = {"num_landmarks": m.num_landmarks, "iterations": m.iterations}
    return merge(nystromformer(*inputs(u, p), value_kernel=kernel, **options), p)


@each_head
def skyformer(q, k, v, *, samples, iterations, ridge=0.1, scale=None):
    """C(Q, X) (C(X, X) + ridge I)^-1 C(X, K) V for sampled rows X, half queries and half keys (arXiv:2111.00035)."""
    places, half = np.floor(samples * len(q)).astype(int), len(samples) // 2
    x = np.concatenate([q[places[:half]], k[places[half:]]])
    between = gaussian(x, x, scale) + ridge * np.eye(len(x))
    root = np.diag(1 / np.sqrt(between.sum(1)))
    inverse = root @ pseudo_inverse(root @ between @ root, iterations) @ root
    return gaussian(q, x, scale) @ inverse @ (gaussian(x, k, scale) @ v)


def skyformer_mix(u, p, m, d):
    # The library draws the random positions.
    samples = np.asarray(skyformer_samples(jax.random.key(m.seed), m.num_samples), np.float64)
    return merge(skyformer(*inputs(u, p), samples=samples, iterations=m.iterations, ridge=m.ridge), p)


def long_short(
    q, k, v, logits, *, window, chunk_size=16, norms=(None, None), positions=None, is_causal=False
):
    """Token by token: the keys of its window and the projected keys share one softmax (arXiv:2107.02192, section 3)."""
    n, group, w, c = len(q), q.shape[1] // k.shape[1], window, chunk_size

    def normed(x, scale):
        scale = np.ones(x.shape[1:]) if scale is None else scale
        return norm(x.reshape(len(x), -1), {"scale": scale.reshape(-1)}, "layer").reshape(x.shape)

    def projected(x, s, e):
        """(r, K, h)"""
        weights = [softmax(logits[s:e, a].T) for a in range(x.shape[1])]
        return normed(np.stack([w @ x[s:e, a] for a, w in enumerate(weights)], 1), norms[1])

    near_k, near_v, near_q = normed(k, norms[0]), normed(v, norms[0]), q
    if positions is not None:
        near_k, near_q = rotary(near_k, positions), rotary(q, positions)
    spans = [(s, s + c) for s in range(0, n - c + 1, c)] if is_causal else [(0, n)]
    every_far = [(projected(k, *span), projected(v, *span)) for span in spans]
    out = []
    for i in range(n):
        if is_causal:
            start, end, far = max(0, i - w + 1), i + 1, every_far[: i // c]
        else:
            start, end, far = max(0, i // w * w - w // 2), min(n, i // w * w + w + w // 2), every_far
        for a in range(q.shape[1]):
            b = a // group
            scores = [near_k[start:end, b] @ near_q[i, a], *(x[:, b] @ q[i, a] for x, _ in far)]
            values = [near_v[start:end, b], *(x[:, b] for _, x in far)]
            scores = np.concatenate(scores)[None] / np.sqrt(q.shape[2])
            out.append((softmax(scores) @ np.concatenate(values))[0])
    return np.reshape(out, q.shape)


def long_short_mix(u, p, m, d):
    options = {"window": m.window, "chunk_size": m.chunk_size, "is_causal": d.is_causal}
    norms = p["local_norm_scale"], p["projected_norm_scale"]
    arrays = *inputs(u, p, rotated=False), project(u, p["projection"])
    return merge(long_short(*arrays, norms=norms, positions=np.arange(len(u)), **options), p)


NETWORKS = {
    "linformer": residual_network(linformer_mix),
    "long_short": residual_network(long_short_mix),
    "nystromformer": residual_network(nystromformer_mix),
    "skyformer": residual_network(skyformer_mix),
}
