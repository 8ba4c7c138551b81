"""Parts that the networks share: norms, projections, rotary positions, softmax, residual blocks."""

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


def joint_norm(x, p, kind):
    """Norm over as many last axes as the weights have."""
    if p["scale"].ndim == 1:
        return norm(x, p, kind)
    return norm(x.reshape(len(x), -1), {"scale": p["scale"].reshape(-1)}, kind).reshape(x.shape)


def feed_forward(x, p):
    return (relu(x @ p["gate"]["kernel"]) * (x @ p["up"]["kernel"])) @ p["down"]["kernel"]


def classified(x, p):
    """The logits of a classifier's head."""
    hidden = relu(x @ p["hidden"]["kernel"] + p["hidden"]["bias"])
    return hidden @ p["out"]["kernel"] + p["out"]["bias"]


def softmax(z, mask=True, sink=-np.inf):
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
    """Multiplies (n, d) by a kernel (d, heads, h)."""
    y = np.tensordot(x, p["kernel"], axes=1)
    return y + p["bias"] if "bias" in p else y


def visible(n, is_causal):
    """Which keys (n,) each of n queries sees."""
    return np.tri(n, dtype=bool) if is_causal else np.ones((n, n), bool)


def each_head(attend):
    """A function of one head's arrays (n, ...) as a function of arrays (n, heads, ...) with all heads.

    Where one array has fewer heads, a group of consecutive heads shares each of them."""

    def attend_all(*arrays, **options):
        count = max(x.shape[1] for x in arrays)
        heads = [[x[:, a * x.shape[1] // count] for x in arrays] for a in range(count)]
        return np.stack([attend(*head, **options) for head in heads], 1)

    return attend_all


def layers(params):
    """The parameters of each layer in turn."""

    def pick(tree, i):
        return {k: pick(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}

    stacked = params["layers_0"]["block_0"]
    leaf = stacked
    while isinstance(leaf, dict):
        leaf = next(iter(leaf.values()))
    return [pick(stacked, i) for i in range(leaf.shape[0])]


def residual_network(mix):
    """Blocks around mix(input (n, d), parameters, mechanism, dimensions) -> (n, d), which normalise inputs, or outputs
    with post_norm."""

    def network(params, mechanism, d, x):
        for p in layers(params):
            if getattr(mechanism, "post_norm", False):
                x = x + norm(mix(x, p["mixer"], mechanism, d), p["mixer_norm"], d.norm)
                x = x + norm(feed_forward(x, p["feed_forward"]), p["feed_forward_norm"], d.norm)
                continue
            x = x + mix(norm(x, p["mixer_norm"], d.norm), p["mixer"], mechanism, d)
            x = x + feed_forward(norm(x, p["feed_forward_norm"], d.norm), p["feed_forward"])
        return norm(x, params["final_norm"], d.norm)

    return network


def mixer_network(mix):
    """Blocks with a mixer only."""

    def network(params, mechanism, d, x):
        for p in layers(params):
            x = x + mix(norm(x, p["mixer_norm"], d.norm), p["mixer"], mechanism, d)
        return norm(x, params["final_norm"], d.norm)

    return network


def inputs(u, p, rotated=True):
    """Query (n, heads, h), key and value."""
    q, k, v = (project(u, p[name]) for name in ("query", "key", "value"))
    if rotated:
        q, k = rotary(q, np.arange(len(u))), rotary(k, np.arange(len(u)))
    return q, k, v


def merge(heads, p):
    """Projects all heads' outputs (n, heads, h) to (n, d)."""
    return np.tensordot(heads, p["out"]["kernel"], axes=2)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def silu(z):
    return z * sigmoid(z)


def elu(z):
    positive = np.real(z) > 0
    return np.where(positive, z, np.exp(np.where(positive, 0, z)) - 1)


FEATURES = {"elu+1": lambda z: elu(z) + 1, "elu": elu, "relu": relu, "identity": lambda z: z}


def turned(x, positions):
    """Features (n, h) of one head, rotated; not without positions."""
    return x if positions is None else rotary(x[:, None], positions)[:, 0]


def softmax_attention(x, p, mask, d, cap=None, rotated=None):
    """Multi-head attention with grouped heads under a mask (n, n). Uses p's norms of queries and keys (of all heads
    together if a norm has a weight for each), sinks and gate if present, and rotates the first `rotated` features."""
    n = x.shape[0]
    positions = np.arange(n)
    q, k, v = (project(x, p[name]) for name in ("query", "key", "value"))
    if "query_norm" in p:
        q, k = joint_norm(q, p["query_norm"], d.norm), joint_norm(k, p["key_norm"], d.norm)
    rotated = d.head_dim if rotated is None else rotated
    q, k = (np.concatenate([rotary(y[..., :rotated], positions), y[..., rotated:]], -1) for y in (q, k))
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
