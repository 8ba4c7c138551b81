"""float64 NumPy references, dense and written from the formulas; they share nothing with the kernels."""

from __future__ import annotations

import numpy as np


def to64(x) -> np.ndarray:
    return np.asarray(x.astype(np.float32) if x.dtype != np.float64 else x).astype(np.float64)


def attention(query, key, value, mask, scale, grad=None, grad_log_sum=None):
    """Masked softmax attention: (output, log-sum-exp) and, with `grad`, the three gradients.

    query (B, T, N, H); key, value (B, S, K, H); mask (B or 1, T, S) bool; rows that see nothing give 0 and
    -inf.
    """
    q, k, v = (to64(x) for x in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    seen = np.broadcast_to(mask[:, None], scores.shape)
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_sum = (np.log(total) + top)[..., 0].swapaxes(1, 2)
    weights = weights / np.where(total == 0, 1.0, total)
    out = np.einsum("bnts,bsnh->btnh", weights, v)
    if grad is None:
        return out, log_sum
    g = to64(grad)
    grad_weights = np.einsum("btnh,bsnh->bnts", g, v)
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True))
    if grad_log_sum is not None:
        grad_scores = grad_scores + weights * to64(grad_log_sum).swapaxes(1, 2)[..., None]
    grad_query = np.einsum("bnts,bsnh->btnh", grad_scores, k) * scale
    grad_key = np.einsum("bnts,btnh->bsnh", grad_scores, q) * scale
    grad_value = np.einsum("bnts,btnh->bsnh", weights, g)

    def ungroup(x):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    return out, log_sum, grad_query, ungroup(grad_key), ungroup(grad_value)


def distance(got, want) -> float:
    """Norm of the difference over the norm of what was expected."""
    got, want = to64(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
