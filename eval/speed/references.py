"""Float64 references of attention functions, forward and gradients, on a sample of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from brl_jax.attention.sorting.native_sparse import DEFAULT_SIZES
from eval.speed.options import SpeedOptions

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # query, key, value, cotangent: (B, n, N, H)
# How far a token's value replaces the state's value for its key.
BETA = 0.5
# The decay in the gated delta rule and in Mamba-2.
LOG_DECAY = -0.1


class Level(NamedTuple):
    """Features of the head whose products, times a scale, count in the scores of the pairs (i, j) that it holds."""

    features: slice
    scale: float
    holds: Callable[[Any, Any], Any]


def _one_level(options: SpeedOptions, length: int) -> list[Level]:
    return [Level(slice(None), options.head_dim**-0.5, lambda i, j: 1.0)]


def softmax_reference(
    sees: Callable[[SpeedOptions, Any, Any], Any],
    levels: Callable[[SpeedOptions, int], list[Level]] = _one_level,
) -> Callable:
    """The reference of causal softmax attention; query i sees key j if sees(options, i, j)."""

    def reference(
        options: SpeedOptions, arrays: Arrays, rows: np.ndarray, tail: int
    ) -> tuple[np.ndarray, ...]:
        query, key, value, d_out = (x.astype(np.float64) for x in arrays)
        columns = np.arange(key.shape[1])
        parts = [
            (level.features, level.scale * level.holds(rows[:, None], columns[None, :]))
            for level in levels(options, key.shape[1])
        ]
        scores = sum(w * np.einsum("brnh,bsnh->bnrs", query[:, rows][..., f], key[..., f]) for f, w in parts)
        scores = np.where(sees(options, rows[:, None], columns[None, :]), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        d_weights = np.einsum("brnh,bsnh->bnrs", d_out[:, rows], value)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        # No query before the tail sees a key of the tail, and all queries of the tail are among the rows.
        last = rows >= tail
        d_query, d_key = np.zeros_like(query[:, rows]), np.zeros_like(key[:, tail:])
        for f, weight in parts:
            own = weight * d_scores
            d_query[..., f] = np.einsum("bnrs,bsnh->brnh", own, key[..., f])
            d_key[..., f] = np.einsum("bnrs,brnh->bsnh", own[:, :, last, tail:], query[:, rows[last]][..., f])
        d_value = np.einsum("bnrs,brnh->bsnh", weights[:, :, last, tail:], d_out[:, rows[last]])
        return np.einsum("bnrs,bsnh->brnh", weights, value), d_query, d_key, d_value

    return reference


def native_sparse_reference(
    options: SpeedOptions, arrays: Arrays, rows: np.ndarray, tail: int
) -> tuple[np.ndarray, ...]:
    """The reference of native sparse attention that compresses blocks to their means, with gates of one third."""
    sizes = DEFAULT_SIZES
    query, key, value, d_out = (x.astype(np.float64) for x in arrays)
    length, at = key.shape[1], rows[:, None]
    columns = np.arange(length)
    starts = np.arange(max((length - sizes.compressed) // sizes.stride + 1, 0)) * sizes.stride
    inside = (
        (columns >= starts[:, None]) & (columns < starts[:, None] + sizes.compressed)
    ) / sizes.compressed
    short_key, short_value = (np.einsum("cs,bsnh->bcnh", inside, x) for x in (key, value))
    near = (columns <= at) & (at - columns < options.window)
    far = starts + sizes.compressed <= at + 1
    compressed = _SoftmaxRows(query[:, rows], short_key, short_value, far, options.head_dim**-0.5)
    chosen = _chosen_keys(compressed.weights, rows, starts, length, sizes)
    parts = [compressed]
    parts += [
        _SoftmaxRows(query[:, rows], key, value, seen, options.head_dim**-0.5) for seen in (chosen, near)
    ]
    last = rows >= tail
    out = np.mean([part.out for part in parts], axis=0)
    means, first, second = (part.gradients(d_out[:, rows] / 3, last) for part in parts)
    d_key, d_value = (
        (first[n] + second[n])[:, tail:] + np.einsum("cs,bcnh->bsnh", inside[:, tail:], means[n])
        for n in (1, 2)
    )
    return out, means[0] + first[0] + second[0], d_key, d_value


class _SoftmaxRows:
    """Softmax attention of sampled queries to the keys that `seen` (rows, keys) or (B, N, rows, keys) names."""

    def __init__(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray, scale: float):
        self.query, self.key, self.value, self.scale = query, key, value, scale
        scores = np.where(seen, scale * np.einsum("brnh,bsnh->bnrs", query, key), -np.inf)
        top = scores.max(-1, keepdims=True, initial=-1e30)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        self.weights = weights / np.where(total == 0, 1.0, total)
        self.out = np.einsum("bnrs,bsnh->brnh", self.weights, value)

    def gradients(self, d_out: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, ...]:
        """The gradients of the queries, and of keys and values by the last rows alone."""
        weights = self.weights
        d_weights = np.einsum("brnh,bsnh->bnrs", d_out, self.value)
        d_scores = self.scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        d_query = np.einsum("bnrs,bsnh->brnh", d_scores, self.key)
        d_key = np.einsum("bnrs,brnh->bsnh", d_scores[:, :, last], self.query[:, last])
        return d_query, d_key, np.einsum("bnrs,brnh->bsnh", weights[:, :, last], d_out[:, last])


def _chosen_keys(
    weights: np.ndarray, rows: np.ndarray, starts: np.ndarray, length: int, sizes: Any
) -> np.ndarray:
    """(B, N, rows, keys): whether a query's chosen blocks have the key."""
    blocks = np.arange(length // sizes.selected) * sizes.selected
    low = np.maximum(starts[:, None], blocks)
    high = np.minimum(starts[:, None] + sizes.compressed, blocks + sizes.selected)
    scores = weights @ (np.maximum(high - low, 0) // sizes.stride)
    own = rows[:, None] // sizes.selected * sizes.selected
    scores = np.where((blocks > 0) & (blocks < own - sizes.selected), scores, -1.0)
    ranks = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    free = (ranks < max(sizes.blocks - 3, 0)) & (scores >= 0)
    key_blocks = np.arange(length) // sizes.selected * sizes.selected
    fixed = (key_blocks == own) | (key_blocks == own - sizes.selected) | (key_blocks == 0)
    whole = np.minimum(np.arange(length) // sizes.selected, max(len(blocks) - 1, 0))
    chosen = free[..., whole] & (key_blocks < own) if len(blocks) else False
    return (fixed | chosen) & (np.arange(length) <= rows[:, None])


def linear_reference(
    options: SpeedOptions, arrays: Arrays, rows: np.ndarray, tail: int
) -> tuple[np.ndarray, ...]:
    """The reference of causal linear attention with the features 1 + elu, by its matrix of weights."""
    query, key, value, d_out = (x.astype(np.float64) for x in arrays)

    def phi(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def slope(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, 1, np.exp(np.minimum(x, 0)))

    visible = np.arange(key.shape[1])[None, :] <= rows[:, None]
    scores = np.where(visible, np.einsum("brnh,bsnh->bnrs", phi(query[:, rows]), phi(key)), 0)
    total = scores.sum(-1, keepdims=True)
    weights = scores / total
    d_weights = np.einsum("brnh,bsnh->bnrs", d_out[:, rows], value)
    d_scores = np.where(visible, d_weights - (weights * d_weights).sum(-1, keepdims=True), 0) / total
    last = rows >= tail
    d_key = np.einsum("bnrs,brnh->bsnh", d_scores[:, :, last, tail:], phi(query[:, rows[last]]))
    d_value = np.einsum("bnrs,brnh->bsnh", weights[:, :, last, tail:], d_out[:, rows[last]])
    out = np.einsum("bnrs,bsnh->brnh", weights, value)
    d_query = np.einsum("bnrs,bsnh->brnh", d_scores, phi(key)) * slope(query[:, rows])
    return out, d_query, d_key * slope(key[:, tail:]), d_value


def delta_reference(
    options: SpeedOptions,
    arrays: Arrays,
    rows: np.ndarray,
    tail: int,
    log_decay: Any = 0.0,
    erase: Any = BETA,
    write: Any = BETA,
    unit: bool = True,
) -> tuple[np.ndarray, ...]:
    """The reference of the delta rule, by its recurrence and, over the tail, the recurrence of its gradient. Without
    erasing, it is linear attention with a decaying state.

    Args:
      log_decay: of the state before each token: a number, one for each key feature, or (heads, 1 or features).
      erase, write: the gates: a number, or one for each feature of the keys or of the values.
      unit: whether keys are scaled to length 1.
    """
    query, key, value, d_out = (x.astype(np.float64) for x in arrays)
    length, heads, features = key.shape[1:]
    decay = np.broadcast_to(np.exp(log_decay), (heads, features))[..., None]
    size = np.linalg.norm(key, axis=-1, keepdims=True) if unit else np.ones((*key.shape[:3], 1))
    key = key / size
    state = np.zeros((*key.shape[::2], key.shape[3], value.shape[3]))
    out, d_query, before = np.zeros_like(value), np.zeros_like(query), {}
    sampled = set(rows.tolist())
    for t in range(length):
        state = decay * state
        if t >= tail:
            before[t] = state
        error = write * value[:, t] - np.einsum("bnfh,bnf->bnh", state, erase * key[:, t])
        state = state + key[:, t, :, :, None] * error[:, :, None]
        if t in sampled:
            out[:, t] = np.einsum("bnfh,bnf->bnh", state, query[:, t])
            d_query[:, t] = np.einsum("bnfh,bnh->bnf", state, d_out[:, t])
    d_state = np.zeros_like(state)
    d_key, d_value = np.zeros_like(key), np.zeros_like(value)
    for t in reversed(range(tail, length)):
        k, recalled = key[:, t], before[t]
        d_state = d_state + query[:, t, :, :, None] * d_out[:, t, :, None]
        error = write * value[:, t] - np.einsum("bnfh,bnf->bnh", recalled, erase * k)
        d_error = np.einsum("bnfh,bnf->bnh", d_state, k)
        d_unit = np.einsum("bnfh,bnh->bnf", d_state, error)
        d_unit = d_unit - erase * np.einsum("bnfh,bnh->bnf", recalled, d_error)
        along = k * (k * d_unit).sum(-1, keepdims=True) if unit else 0.0
        d_key[:, t] = (d_unit - along) / size[:, t]
        d_value[:, t] = write * d_error
        d_state = decay * (d_state - (erase * k)[..., None] * d_error[:, :, None])
    return out[:, rows], d_query[:, rows], d_key[:, tail:], d_value[:, tail:]
