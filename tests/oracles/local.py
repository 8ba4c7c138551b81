"""Local attention, whose softmax has a mask built pair by pair, and TransNormer's diagonal blocks."""

import math

import numpy as np

from tests.oracles import attention
from tests.oracles.parts import (
    each_head,
    inputs,
    norm,
    relu,
    residual_network,
    softmax,
    softmax_attention,
    visible,
)


def local_mask(n, d, m):
    """Which keys a token sees, by the definition of each pattern."""
    w = m.window
    left, right = (w - 1, 0) if d.is_causal else (w // 2, w // 2)
    sees = {
        "sliding": lambda: attention.sliding(left, right),
        "dilated": lambda: attention.dilated(left, right, m.dilation),
        "block": lambda: attention.block_diagonal(w),
        "bucketed": lambda: attention.bucketed(w, 1, 1),
        "strided": lambda: attention.strided(w),
        "fixed": lambda: attention.fixed(w, 1),
        "global": lambda: attention.global_window(left, right, m.num_global),
        "axial": lambda: attention.axial(m.grid_width),
        "neighbourhood": lambda: attention.neighbourhood(m.grid_width, w // 2, w // 2),
        "bigbird": lambda: attention.block_mask(w, bigbird_blocks(n, m)),
        "block_mask": lambda: attention.block_mask(w, [[int(c) for c in row] for row in m.block_mask]),
    }[m.pattern]()
    return attention.pairs(n, n, sees, is_causal=d.is_causal)


def bigbird_blocks(n, mechanism):
    # The random blocks come from the pattern itself; tests/attention/local/test_patterns.py checks them.
    pattern = mechanism.make_pattern(False)
    blocks = -(-n // mechanism.window)
    starts = np.arange(blocks) * mechanism.window
    return np.asarray(pattern.visible(starts[:, None], starts[None, :], n))


def local_mix(u, p, m, d):
    return softmax_attention(u, p, local_mask(len(u), d, m), d, m.logits_soft_cap, m.rotary_dim)


@each_head
def diag(q, k, v, *, block_size=64, score="softmax", scale=None, is_causal=False):
    """Softmax or ReLU attention inside blocks (arXiv:2210.10340, section 4.3)."""
    block = np.arange(len(q)) // block_size
    mask = (block[:, None] == block) & visible(len(q), is_causal)
    scores = q @ k.T * (1 / math.sqrt(q.shape[1]) if scale is None else scale)
    return (softmax(scores, mask) if score == "softmax" else relu(scores) * mask) @ v


def diag_mix(u, p, m, d):
    """ReLU's heads are merged and normalized together."""
    out = diag(*inputs(u, p), block_size=m.block_size, score=m.score, is_causal=d.is_causal)
    merged = out.reshape(len(u), -1)
    if m.score == "relu":
        merged = norm(merged, {"scale": p["attended_norm"]["scale"].reshape(-1)}, m.norm)
    return merged @ p["out"]["kernel"].reshape(merged.shape[-1], -1)


NETWORKS = {"local": residual_network(local_mix), "diag": residual_network(diag_mix)}
