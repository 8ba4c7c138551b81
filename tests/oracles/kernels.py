"""Dense float64 references, written from the formulas; they share no code with the kernels."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

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


def in_float64(function, grad, *operands):
    """The function's results in float64, and the gradients of the operands that are not None for the results'
    cotangent."""
    with jax.enable_x64(True):
        grad, operands = jax.tree.map(lambda x: jnp.asarray(to64(x)), (grad, operands))
        out, pull = jax.vjp(function, *operands)
        found = out, *(x for x in pull(grad) if x is not None)
    return jax.tree.map(np.asarray, found)


def weights(score, logits, seen):
    """Weights over the last axis; rows that see nothing give 0."""
    if score == "softmax":
        top = jax.lax.stop_gradient(jnp.where(seen, logits, -jnp.inf).max(-1, keepdims=True))
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        each = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0.0)), 0.0)
        total = each.sum(-1, keepdims=True)
        return each / jnp.where(total == 0, 1.0, total)
    if score == "relu2":
        return jnp.where(seen, jnp.square(jnp.maximum(logits, 0.0)), 0.0)
    z = (logits - math.sqrt(0.5)) / math.sqrt(0.25 / math.pi)
    return jnp.where(seen, 0.5 * (1 + jax.scipy.special.erf(z / math.sqrt(2))), 0.0)


def cross_attention(query, key, value, scale, score, seen=True, see=lambda logits: logits, bias=None):
    """One attention, masked or not, with a bias that broadcasts to (B, N, M, S)."""
    logits = see(jnp.einsum("bmnh,bsnh->bnms", query, key)) * scale
    logits = logits if bias is None else logits + bias
    return jnp.einsum("bnms,bsnh->bmnh", weights(score, logits, jnp.broadcast_to(seen, logits.shape)), value)


def contrasted(query, key, contrast, value, gamma, scale, score, seen=True, **options):
    """Differential compression; a single attention if contrast and gamma are None. Absent tokens may hold NaN.

    seen (B or 1, N or 1, M or 1, S) bool, or True."""
    if np.ndim(seen):
        there = np.broadcast_to(np.any(seen, axis=(1, 2)), key.shape[:2])[:, :, None, None]
        key, contrast, value = (
            None if x is None else jnp.where(there, x, 0.0) for x in (key, contrast, value)
        )
    attend = functools.partial(
        cross_attention, query, value=value, scale=scale, score=score, seen=seen, **options
    )
    if contrast is None:
        return attend(key)
    return attend(key) - jnp.einsum("n,bmnh->bmnh", gamma, attend(contrast))


def propagate(query, key, value, strength, scale, score, grad, bias=None, **options):
    """The output, and the gradients of query, key, value, strength, and the bias if there is one."""

    def run(query, key, value, strength, bias):
        out = cross_attention(query, key, value, scale, score, bias=bias, **options)
        return jnp.einsum("n,bmnh->bmnh", strength, out)

    return in_float64(run, grad, query, key, value, strength, bias)


def compress(query, key, contrast, value, gamma, scale, score, grad, seen=True, bias=None, **options):
    """The output, and the gradients of query, both keys, value, gamma and the bias, as far as these are given."""

    def run(query, key, contrast, value, gamma, bias):
        return contrasted(query, key, contrast, value, gamma, scale, score, seen, bias=bias, **options)

    return in_float64(run, grad, query, key, contrast, value, gamma, bias)


def squared_relu(query, key, value, seen):
    """The output of gated attention units' weights; seen is (B, T, S), heads are grouped."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    return cross_attention(query, key, value, 1.0, "relu2", seen[:, None])


def rotated(x, positions):
    """Rotates adjacent pairs of (N, H) to positions (B, T): (B, T, N, H)."""
    angle = positions[..., None, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = (x[..., 0::2] + 1j * x[..., 1::2])[None, None] * np.exp(1j * angle)
    return jnp.stack([turned.real, turned.imag], -1).reshape(*turned.shape[:-1], -1)


def recurrence(operands, cotangents):
    """Results and gradients by name of a recurrence, token by token; operands by name as for `triton.Operands`, and the
    results' cotangents by name."""
    given = {name: x for name, x in operands.items() if x is not None and name != "segments"}
    (batch, length, heads, _), kv_heads = given["query"].shape, given["key"].shape[2]
    segments = operands.get("segments")
    segments = np.zeros((batch, length), np.int32) if segments is None else np.asarray(segments)

    def choose(mask, x, y):
        return jnp.where(mask.reshape(-1, *(1,) * (y.ndim - 1)), x, y)

    def step(carry, token):
        state, sums, segment = carry
        query, key, value, mine = (token[name] for name in ("query", "key", "value", "segments"))
        there = mine >= 0
        fresh = there & (mine != segment)
        before, factor = choose(fresh, 0.0, state), jnp.exp(token.get("log_decay", jnp.zeros(key.shape)))
        kept = factor.reshape(*factor.shape, *(1,) * (4 - factor.ndim)) * before
        if "beta" in token:
            value = token["beta"][..., None] * (value - jnp.einsum("bkfv,bkf->bkv", kept, key))
        state = choose(there, kept + jnp.einsum("bkf,bkv->bkfv", key, value), state)
        sums = choose(there, choose(fresh, 0.0, sums) + key, sums)
        query = query.reshape(batch, kv_heads, heads // kv_heads, -1)
        read = jnp.einsum("bkgf,bkfv->bkgv", query, state), jnp.einsum("bkgf,bkf->bkg", query, sums)
        segment = jnp.where(there, mine, segment)
        return (state, sums, segment), [choose(there, x, jnp.zeros_like(x)) for x in read]

    def run(given):
        tokens = {name: x for name, x in given.items() if name not in ("key_value", "key_sum")}
        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in (tokens | {"segments": segments}).items()}
        sums = given.get("key_sum", jnp.zeros((batch, kv_heads, given["key"].shape[3])))
        start = given["key_value"], sums, jnp.zeros(batch, segments.dtype)
        (state, sums, _), (total, weight) = jax.lax.scan(step, start, tokens)
        results = {"total": jnp.moveaxis(total, 0, 1).reshape(batch, length, heads, -1), "key_value": state}
        if "key_sum" in given:
            results |= {"weight": jnp.moveaxis(weight, 0, 1).reshape(batch, length, heads), "key": sums}
        return results

    return in_float64(run, cotangents, given)
