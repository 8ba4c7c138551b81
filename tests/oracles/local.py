"""Networks of local attention, whose softmax has a mask built pair by pair, and of TransNormer's diagonal blocks."""

import math

import numpy as np

from tests.oracles import attention
from tests.oracles.parts import full_mask, head_inputs, norm, relu, residual_network, softmax_attention


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
        "global": lambda: attention.global_window(left, right, m.num_global, m.global_segment),
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


def diag_mix(u, p, m, d):
    """Softmax or ReLU attention inside blocks; ReLU's heads are merged and normalized together."""
    block = np.arange(len(u)) // m.block_size
    mask = (block[:, None] == block) & full_mask(len(u), d, m)
    if m.score == "softmax":
        return softmax_attention(u, p, mask, d)
    heads = [relu(q @ k.T / math.sqrt(d.head_dim)) * mask @ v for q, k, v in head_inputs(u, p, d)]
    merged = norm(np.concatenate(heads, -1), {"scale": p["attended_norm"]["scale"].reshape(-1)}, m.norm)
    return merged @ p["out"]["kernel"].reshape(merged.shape[-1], -1)


NETWORKS = {"local": residual_network(local_mix), "diag": residual_network(diag_mix)}
