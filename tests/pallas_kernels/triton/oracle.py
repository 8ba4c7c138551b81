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
    """Rotates adjacent pairs of (N, H) or (B, T, N, H) to positions (B, T): (B, T, N, H)."""
    x = np.asarray(x, np.float64)
    angle = positions[..., None, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], -1).reshape(*turned.shape[:-1], -1)


def recurrence(operands, d_total, d_weight, d_key_value, d_key):
    """Results and gradients by name of a recurrence, token by token; operands by name as for `triton.Operands`."""
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
    d_total, d_weight, d_key_value, d_key = (
        np.asarray(x, np.float64) for x in (d_total, d_weight, d_key_value, d_key)
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
    results = {"total": total, "key_value": last} | ({"weight": weight, "key": last_key} if weighs else {})
    return results, found
