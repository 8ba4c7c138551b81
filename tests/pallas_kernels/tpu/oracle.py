"""Dense float64 NumPy references, written from the formulas; they share no code with the kernels."""

from __future__ import annotations

import math

import numpy as np


def to64(x) -> np.ndarray:
    return np.asarray(x.astype(np.float32) if x.dtype != np.float64 else x).astype(np.float64)


def rounded(logits: np.ndarray) -> np.ndarray:
    """Exact logits rounded once to float32, the best that float32 can do."""
    return logits.astype(np.float32).astype(np.float64)


def attention(
    query, key, value, mask, scale, grad=None, grad_log_sum=None, see=lambda logits: logits, bias=None
):
    """Masked softmax attention: (output, log-sum-exp), with `grad` the three gradients, and with `bias`, which
    broadcasts to (B, N, T, S), the gradient of each of its elements.

    query (B, T, N, H); key, value (B, S, K, H); mask (B or 1, T, S) bool. Rows that see nothing give 0 and -inf.
    see(logits) replaces the logits."""
    q, k, v = (to64(x) for x in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = see(np.einsum("btnh,bsnh->bnts", q, k)) * scale
    scores = scores if bias is None else scores + bias
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

    results = out, log_sum, grad_query, ungroup(grad_key), ungroup(grad_value)
    return results if bias is None else (*results, grad_scores)


def by_distance(kind, numbers, first, distance):
    """The bias (N, T, S) for distances (T, S), query minus key, and its gradient as a function of the gradients of all
    elements, (B, N, T, S). `numbers` are "slopes" (N,), or a "table" (N, D) of distances starting at `first`, whose end
    values extend beyond it."""
    if kind == "slopes":
        far = np.abs(distance).astype(np.float64)
        return -numbers[:, None, None] * far, lambda grad: -(grad * far).sum((0, 2, 3))
    place = np.clip(distance - first, 0, numbers.shape[1] - 1)

    def pull(grad):
        total = np.zeros(numbers.shape)
        for head in range(len(numbers)):
            np.add.at(total[head], place, grad[:, head].sum(0))
        return total

    return numbers.astype(np.float64)[:, place], pull


def distance(got, want) -> float:
    """Norm of the difference over the norm of the expected value."""
    got, want = to64(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def weights(score: str, logits: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights over the last axis, and for scores that are not normalized their derivative with respect to the
    logits."""
    if score == "softmax":
        logits = np.where(seen, logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        w = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
        total = w.sum(-1, keepdims=True)
        return w / np.where(total == 0, 1.0, total), None
    if score == "relu2":
        return np.where(seen, np.maximum(logits, 0) ** 2, 0), np.where(seen, 2 * np.maximum(logits, 0), 0)
    z = (logits - np.sqrt(0.5)) / np.sqrt(0.25 / np.pi)
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi * 0.25 / np.pi)
    return np.where(seen, 0.5 * (1 + _erf(z / np.sqrt(2))), 0), np.where(seen, density, 0)


def cross_attention(query, key, value, grad, scale, score, seen=True, see=lambda logits: logits, bias=0.0):
    """One attention in float64, masked or not: output, gradients of query, key and value for `grad`, and the gradient
    of each element of a bias, which broadcasts to (B, N, M, S)."""
    q, k, v, g = query, key, value, grad
    logits = see(np.einsum("bmnh,bsnh->bnms", q, k)) * scale + bias
    w, slope = weights(score, logits, np.broadcast_to(seen, logits.shape))
    grad_w = np.einsum("bmnh,bsnh->bnms", g, v)
    if slope is None:
        change = w * (grad_w - (w * grad_w).sum(-1, keepdims=True))
    else:
        change = slope * grad_w
    return (
        np.einsum("bnms,bsnh->bmnh", w, v),
        np.einsum("bnms,bsnh->bmnh", change, k) * scale,
        np.einsum("bnms,bmnh->bsnh", change, q) * scale,
        np.einsum("bnms,bmnh->bsnh", w, g),
        change,
    )


def propagate(query, key, value, strength, scale, score, grad, **options):
    """The output, the gradients of query, key, value and strength, and the gradient of each element of the bias if
    there is one."""
    q, k, v, s, g = (to64(x) for x in (query, key, value, strength, grad))
    plain, *_ = cross_attention(q, k, v, g, scale, score, **options)
    _, grad_query, grad_key, grad_value, change = cross_attention(
        q, k, v * s[:, None], g, scale, score, **options
    )
    results = plain * s[:, None], grad_query, grad_key, grad_value * s[:, None], (plain * g).sum((0, 1, 3))
    return (*results, change) if "bias" in options else results


def compress(query, key, contrast, value, gamma, scale, score, grad, seen=True, bias=None, **options):
    """Differential compression: output and the gradients of query, both keys, value and gamma; with a bias also of each
    of its elements.

    If contrast or gamma is None, so is its gradient. seen (B or 1, N or 1, M or 1, S) bool, or True."""
    q, k1, v, g = (to64(x) for x in (query, key, value, grad))
    if np.ndim(seen):
        # Absent tokens may hold NaN.
        there = np.broadcast_to(np.any(seen, axis=(1, 2)), (q.shape[0], k1.shape[1]))[:, :, None, None]
        k1, v = np.where(there, k1, 0.0), np.where(there, v, 0.0)
    options["bias"] = 0.0 if bias is None else bias
    out, grad_query, grad_key, grad_value, grad_bias = cross_attention(
        q, k1, v, g, scale, score, seen, **options
    )
    of_bias = lambda x: () if bias is None else (x,)  # noqa: E731
    if contrast is None:
        return out, grad_query, grad_key, None, grad_value, None, *of_bias(grad_bias)
    k2, factor = to64(contrast), to64(gamma)[:, None]
    if np.ndim(seen):
        k2 = np.where(there, k2, 0.0)
    second, query2, grad_contrast, value2, bias2 = cross_attention(
        q, k2, v, -factor * g, scale, score, seen, **options
    )
    return (
        out - factor * second,
        grad_query + query2,
        grad_key,
        grad_contrast,
        grad_value + value2,
        -(second * g).sum((0, 1, 3)),
        *of_bias(grad_bias + bias2),
    )
