"""Dense attention: full, Hopfield, kernelized and Synthesizer."""

import numpy as np

from tests.oracles.parts import (
    each_head,
    inputs,
    merge,
    project,
    relu,
    residual_network,
    softmax,
    softmax_attention,
    visible,
)


def full_mix(u, p, m, d):
    return softmax_attention(u, p, visible(len(u), d.is_causal), d, m.logits_soft_cap, m.rotary_dim)


@each_head
def hopfield(q, k, v, *, scale, steps=1, is_causal=False):
    """Each step except the last replaces the query by a mixture of the visible keys; the last reads the values
    (arXiv:2008.02217, equations 3 and 10)."""
    mask = visible(len(q), is_causal)
    for _ in range(steps - 1):
        q = softmax(scale * q @ k.T, mask) @ k
    return softmax(scale * q @ k.T, mask) @ v


def hopfield_mix(u, p, m, d):
    return merge(hopfield(*inputs(u, p), scale=m.beta, steps=m.steps, is_causal=d.is_causal), p)


def gaussian(x, y, scale=None):
    scale = 1 / np.sqrt(x.shape[1]) if scale is None else scale
    return np.exp(-scale * ((x[:, None] - y) ** 2).sum(-1) / 2)


@each_head
def kernelized(q, k, v, *, scale=None):
    """arXiv:2111.00035, section 4.1."""
    return gaussian(q, k, scale) @ v


def kernelized_mix(u, p, m, d):
    return merge(kernelized(*inputs(u, p)), p)


def synthesizer(value, rows, columns, column_bias=None, *, is_causal=False):
    """arXiv:2005.00743, section 3.1."""
    n = len(value)
    bias = np.zeros(columns.shape[:2]) if column_bias is None else column_bias

    @each_head
    def attend(own, columns, bias, v):
        return softmax(own @ columns.T + bias, visible(n, is_causal)) @ v

    return attend(rows[:n], columns[:n], bias[:n], value)


def synthesizer_mix(u, p, m, d):
    rows = p["rows"] if m.weights == "random" else relu(project(u, p["hidden"]))
    bias = None if m.weights == "random" else p["column_bias"]
    return merge(synthesizer(project(u, p["value"]), rows, p["columns"], bias, is_causal=d.is_causal), p)


NETWORKS = {
    "full": residual_network(full_mix),
    "hopfield": residual_network(hopfield_mix),
    "kernelized": residual_network(kernelized_mix),
    "synthesizer": residual_network(synthesizer_mix),
}
