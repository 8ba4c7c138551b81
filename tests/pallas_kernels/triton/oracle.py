"""Dense float64 forms of the GPU kernels' operations with their gradients, in NumPy."""

import math

import numpy as np
from scipy import special


def softmax_attention(query, key, value, seen, scale, d_out, d_log_sums=None, sinks=None, cap=None):
    """out, log-sum-exp and the gradients of query, key, value (and sinks, where there are any).

    seen is (B, T, S) or (B, N, T, S), heads are grouped. Sinks are logits (N,) without a value, a cap bounds the scaled
    scores.
    """
    groups = query.shape[2] // key.shape[2]
    q, k, v, g = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    wide_k, wide_v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, wide_k) * scale
    slope = np.ones_like(scores) if cap is None else np.cosh(scores / cap) ** -2
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    logits = np.where(seen if seen.ndim == 4 else seen[:, None], scores, -np.inf)
    extra = np.full(len(wide_k[0, 0]), -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    extra = extra[:, None, None]
    top = np.maximum(np.max(logits, -1, keepdims=True), extra)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True) + np.exp(extra - top)
    with np.errstate(divide="ignore"):
        log_sums = (top + np.log(total))[..., 0]
    total = np.where(total > 0, total, 1.0)
    weights, sink_weight = weights / total, (np.exp(extra - top) / total)[..., 0]
    out = np.einsum("bnts,bsnh->btnh", weights, wide_v)
    d_weights = np.einsum("btnh,bsnh->bnts", g, wide_v)
    mean = (weights * d_weights).sum(-1)
    if d_log_sums is not None:
        mean = mean - np.asarray(d_log_sums, np.float64).transpose(0, 2, 1)
    d_logits = slope * weights * (d_weights - mean[..., None])
    d_query = np.einsum("bnts,bsnh->btnh", d_logits, wide_k) * scale
    d_key = np.einsum("bnts,btnh->bsnh", d_logits, q) * scale
    d_value = np.einsum("bnts,btnh->bsnh", weights, g)
    d_key, d_value = (x.reshape(*x.shape[:2], key.shape[2], groups, -1).sum(3) for x in (d_key, d_value))
    gradients = (d_query, d_key, d_value)
    if sinks is not None:
        gradients += (-(sink_weight * mean).sum((0, 2)),)
    return out, log_sums.transpose(0, 2, 1), *gradients


def sigma(logits, seen, score):
    """The weights of a score function and a function from their gradient to the logits'."""
    if score == "softmax":
        logits = np.where(seen, logits, -np.inf)
        top = np.max(logits, -1, keepdims=True)
        weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1.0)
        return weights, lambda d: weights * (d - (weights * d).sum(-1, keepdims=True))
    if score == "relu2":
        positive = np.maximum(logits, 0.0) * seen
        return positive**2, lambda d: 2.0 * positive * d
    deviation = math.sqrt(0.25 / math.pi)
    u = (logits - math.sqrt(0.5)) / deviation
    density = np.exp(-0.5 * u**2) / (deviation * math.sqrt(2.0 * math.pi))
    return special.ndtr(u) * seen, lambda d: density * seen * d


def compress(query, key, contrast_key, value, gamma, seen, scale, score, d_out):
    """out and the gradients of query, key, contrast_key, value and gamma; seen is (B, 1, 1, S)."""
    q, k1, k2, v, g, do = (np.asarray(x, np.float64) for x in (query, key, contrast_key, value, gamma, d_out))
    logits = [np.einsum("bmnh,bsnh->bnms", q, k) * scale for k in (k1, k2)]
    (w1, pull1), (w2, pull2) = (sigma(x, seen, score) for x in logits)
    outs = [np.einsum("bnms,bsnh->bmnh", w, v) for w in (w1, w2)]
    weigh = g[None, :, None, None]
    d_weights = np.einsum("bmnh,bsnh->bnms", do, v)
    d1, d2 = pull1(d_weights) * scale, pull2(-weigh * d_weights) * scale
    d_query = np.einsum("bnms,bsnh->bmnh", d1, k1) + np.einsum("bnms,bsnh->bmnh", d2, k2)
    return (
        outs[0] - g[None, None, :, None] * outs[1],
        d_query,
        np.einsum("bnms,bmnh->bsnh", d1, q),
        np.einsum("bnms,bmnh->bsnh", d2, q),
        np.einsum("bnms,bmnh->bsnh", w1 - weigh * w2, do),
        -np.einsum("bmnh,bmnh->n", do, outs[1]),
    )


def propagate(query, key, value, strength, scale, score, d_out):
    """out and the gradients of query, key, value and strength."""
    q, k, v, s, do = (np.asarray(x, np.float64) for x in (query, key, value, strength, d_out))
    weights, pull = sigma(np.einsum("btnh,bmnh->bntm", q, k) * scale, np.True_, score)
    read = np.einsum("bntm,bmnh->btnh", weights, v)
    d_logits = pull(np.einsum("btnh,bmnh->bntm", do, v)) * s[None, :, None, None] * scale
    return (
        read * s[None, None, :, None],
        np.einsum("bntm,bmnh->btnh", d_logits, k),
        np.einsum("bntm,btnh->bmnh", d_logits, q),
        np.einsum("bntm,btnh->bmnh", weights, do) * s[None, None, :, None],
        np.einsum("btnh,btnh->n", do, read),
    )


def squared_relu(query, key, value, seen, d_out):
    """out and the gradients of query, key and value; seen is (B, T, S), heads are grouped."""
    groups = query.shape[2] // key.shape[2]
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    wide_k, wide_v = (np.repeat(x, groups, axis=2) for x in (k, v))
    weights, pull = sigma(np.einsum("btnh,bsnh->bnts", q, wide_k), seen[:, None], "relu2")
    d_scores = pull(np.einsum("btnv,bsnv->bnts", do, wide_v))
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, q)
    d_value = np.einsum("bnts,btnv->bsnv", weights, do)
    d_key, d_value = (x.reshape(*x.shape[:2], key.shape[2], groups, -1).sum(3) for x in (d_key, d_value))
    out = np.einsum("bnts,bsnv->btnv", weights, wide_v)
    return out, np.einsum("bnts,bsnh->btnh", d_scores, wide_k), d_key, d_value


def rotated(x, positions):
    """Adjacent pairs of (N, H) or (B, T, N, H) turned to positions (B, T): (B, T, N, H)."""
    x = np.asarray(x, np.float64)
    angle = positions[..., None, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], -1).reshape(*turned.shape[:-1], -1)
