"""Dense float64 NumPy references, written from the formulas; they share no code with the kernels."""

from __future__ import annotations

import numpy as np
from scipy import special

from tests.oracles import attention as dense


def to64(x) -> np.ndarray:
    return np.asarray(x.astype(np.float32) if x.dtype != np.float64 else x).astype(np.float64)


def rounded(logits: np.ndarray) -> np.ndarray:
    """Exact logits rounded once to float32, the best that float32 can do."""
    return logits.astype(np.float32).astype(np.float64)


def attention(query, key, value, mask, scale, grad=None, grad_log_sum=None, bias=None, **options):
    """Masked softmax attention: (output, log-sum-exp), with `grad` the three gradients, with `bias`, which broadcasts
    to (B, N, T, S), the gradient of each of its elements, and with `sinks` (N,), logits without a value, theirs.

    query (B, T, N, H); key, value (B, S, K, H); mask (B or 1, T, S) or (B, N, T, S) bool. Rows that see nothing give 0
    and -inf. see(logits) replaces the logits; a cap bounds the scaled ones."""
    arrays = [to64(x) for x in (query, key, value)]
    seen, options = mask if mask.ndim == 4 else mask[:, None], {"bias": bias, "scale": scale} | options
    out, log_sum = dense.softmax_attention(*arrays, seen, **options, log_sums=True)
    if grad is None:
        return out, log_sum
    d_log_sums = None if grad_log_sum is None else to64(grad_log_sum)
    grads = dense.softmax_attention_gradients(*arrays, seen, to64(grad), d_log_sums=d_log_sums, **options)
    return out, log_sum, *grads[:3], *grads[3:4] * (bias is not None), *grads[4:]


def by_distance(kind, numbers, first, distance):
    """The bias (N, T, S) for distances (T, S), query minus key, and its gradient as a function of the gradients of all
    elements, (B, N, T, S). `numbers` are "slopes" (N,), or a "table" (N, D) of distances starting at `first`, whose end
    values extend beyond it."""
    if kind == "slopes":
        return dense.alibi(numbers, distance)
    place = np.clip(distance - first, 0, numbers.shape[1] - 1)

    def pull(grad):
        total = np.zeros(numbers.shape)
        for head in range(len(numbers)):
            np.add.at(total[head], place, grad[:, head].sum(0))
        return total

    return numbers.astype(np.float64)[:, place], pull


def check(got, want, tolerance: float) -> None:
    distances = [distance(x, y) for x, y in zip(got, want, strict=True)]
    assert max(distances) < tolerance, distances


def distance(got, want) -> float:
    """Norm of the difference over the norm of the expected value."""
    got, want = to64(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


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
    return np.where(seen, 0.5 * (1 + special.erf(z / np.sqrt(2))), 0), np.where(seen, density, 0)


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


def squared_relu(query, key, value, seen, d_out):
    """out and the gradients of query, key and value; seen is (B, T, S), heads are grouped."""
    groups = query.shape[2] // key.shape[2]
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    wide_k, wide_v = (np.repeat(x, groups, axis=2) for x in (k, v))
    w, slope = weights("relu2", np.einsum("btnh,bsnh->bnts", q, wide_k), seen[:, None])
    d_scores = slope * np.einsum("btnv,bsnv->bnts", do, wide_v)
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, q)
    d_value = np.einsum("bnts,btnv->bsnv", w, do)
    d_key, d_value = (x.reshape(*x.shape[:2], key.shape[2], groups, -1).sum(3) for x in (d_key, d_value))
    out = np.einsum("bnts,bsnv->btnv", w, wide_v)
    return out, np.einsum("bnts,bsnh->btnh", d_scores, wide_k), d_key, d_value


def rotated(x, positions):
    """Rotates adjacent pairs of (N, H) or (B, T, N, H) to positions (B, T): (B, T, N, H)."""
    x = np.asarray(x, np.float64)
    angle = positions[..., None, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], -1).reshape(*turned.shape[:-1], -1)


def recurrence(operands, cotangents):
    """Results and gradients by name of a recurrence, token by token; operands by name as for `triton.Operands`, and the
    results' cotangents by name, where missing ones are 0."""
    given = {name: np.asarray(x, np.float64) for name, x in operands.items() if x is not None}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    (batch, length, heads, features), kv_heads = query.shape, key.shape[2]
    groups = heads // kv_heads
    weighs, log = "key_sum" in given, given.get("log_decay")
    segments = operands.get("segments")
    segments = np.zeros((batch, length), int) if segments is None else np.asarray(segments)
    total, weight = np.zeros((batch, length, heads, value.shape[3])), np.zeros((batch, length, heads))
    found = {name: np.zeros_like(x) for name, x in given.items() if name != "segments"}
    last, last_key = np.zeros_like(given["key_value"]), np.zeros((batch, kv_heads, features))
    results = {"total": total, "key_value": last} | ({"weight": weight, "key": last_key} if weighs else {})
    d_total, d_key_value, d_weight, d_key = (
        np.asarray(cotangents.get(name, np.zeros(like.shape)), np.float64)
        for name, like in zip(("total", "key_value", "weight", "key"), (total, last, weight, last_key))
    )
    for b, h in np.ndindex(batch, kv_heads):
        mine = slice(h * groups, (h + 1) * groups)
        state = given["key_value"][b, h]
        sums = given["key_sum"][b, h] if weighs else np.zeros(features)
        steps, segment = [], 0
        for t in range(length):
            if segments[b, t] < 0:
                continue
            fresh, segment = segments[b, t] != segment, segments[b, t]
            if fresh:
                state, sums = np.zeros_like(state), np.zeros_like(sums)
            factor = np.ones(1) if log is None else np.exp(np.atleast_1d(log[b, t, h]))
            before, k, v = state, key[b, t, h], value[b, t, h]
            kept = factor[:, None] * before
            beta = given["beta"][b, t, h] if "beta" in given else 1.0
            new = v - kept.T @ k if "beta" in given else v
            state, sums = kept + beta * np.outer(k, new), sums + k
            total[b, t, mine], weight[b, t, mine] = query[b, t, mine] @ state, query[b, t, mine] @ sums
            steps.append((t, fresh, factor, before, kept, beta, new, state, sums))
        last[b, h], last_key[b, h] = state, sums
        d_state, d_sums = d_key_value[b, h], d_key[b, h] if weighs else np.zeros(features)
        for t, fresh, factor, before, kept, beta, new, state, sums in reversed(steps):
            q, k, do, dw = query[b, t, mine], key[b, t, h], d_total[b, t, mine], d_weight[b, t, mine]
            found["query"][b, t, mine] = do @ state.T
            d_state = d_state + q.T @ do
            found["key"][b, t, h] = beta * d_state @ new
            d_new = beta * d_state.T @ k
            if weighs:
                found["query"][b, t, mine] += dw[:, None] * sums
                d_sums = d_sums + dw @ q
                found["key"][b, t, h] += d_sums
            found["value"][b, t, h] = d_new
            if "beta" in given:
                found["beta"][b, t, h] = k @ d_state @ new
                found["key"][b, t, h] -= kept @ d_new
                d_state = d_state - np.outer(k, d_new)
            if log is not None:
                flow = factor * (d_state * before).sum(1)
                found["log_decay"][b, t, h] = flow if log.ndim == 4 else flow.sum()
            d_state, d_sums = (0 * d_state, 0 * d_sums) if fresh else (factor[:, None] * d_state, d_sums)
        found["key_value"][b, h] = d_state
        if weighs:
            found["key_sum"][b, h] = d_sums
    return results, found
