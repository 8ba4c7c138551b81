"""Networks of dense attention: full, Hopfield, kernelized and Synthesizer."""

import numpy as np

from tests.oracles.parts import (
    full_mask,
    head_inputs,
    merge,
    project,
    relu,
    residual_network,
    softmax,
    softmax_attention,
)


def full_mix(u, p, m, d):
    return softmax_attention(u, p, full_mask(len(u), d, m), d, m.logits_soft_cap, m.rotary_dim)


def hopfield_mix(u, p, m, d):
    """Each step except the last replaces the query by a mixture of the visible keys; the last reads the values."""
    mask, heads = full_mask(len(u), d, m), []
    for q, k, v in head_inputs(u, p, d):
        for _ in range(m.steps - 1):
            q = softmax(m.beta * q @ k.T, mask) @ k
        heads.append(softmax(m.beta * q @ k.T, mask) @ v)
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


NETWORKS = {
    "full": residual_network(full_mix),
    "hopfield": residual_network(hopfield_mix),
    "kernelized": residual_network(kernelized_mix),
    "synthesizer": residual_network(synthesizer_mix),
}
