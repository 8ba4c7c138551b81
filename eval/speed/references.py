"""Float64 references of attention functions, forward and gradients, on a sample of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

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


def attention_reference(
    sees: Callable[[SpeedOptions, Any, Any], Any],
    levels: Callable[[SpeedOptions, int], list[Level]] = _one_level,
    *,
    linear: bool = False,
) -> Callable:
    """The reference of causal attention by its matrix of weights; query i sees key j if sees(options, i, j). Weights
    are a softmax of the scores; in linear attention, with the features 1 + elu, they are proportional to them."""

    def reference(
        options: SpeedOptions, arrays: Arrays, rows: np.ndarray, tail: int
    ) -> tuple[np.ndarray, ...]:
        query, key, value, d_out = (x.astype(np.float64) for x in arrays)
        slopes = [np.exp(np.minimum(x, 0)) if linear else 1.0 for x in (query[:, rows], key[:, tail:])]
        if linear:
            query, key = (np.maximum(x, 0) + np.exp(np.minimum(x, 0)) for x in (query, key))
        columns = np.arange(key.shape[1])
        parts = [
            (level.features, level.scale * level.holds(rows[:, None], columns[None, :]))
            for level in levels(options, key.shape[1])
        ]
        seen = sees(options, rows[:, None], columns[None, :])
        scores = sum(w * np.einsum("brnh,bsnh->bnrs", query[:, rows][..., f], key[..., f]) for f, w in parts)
        scores = np.where(seen, scores, 0.0 if linear else -np.inf)
        weights = scores if linear else np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        # An exponential is its own derivative.
        slope = seen / total if linear else weights / total
        weights = weights / total
        d_weights = np.einsum("brnh,bsnh->bnrs", d_out[:, rows], value)
        d_scores = slope * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        # No query before the tail sees a key of the tail, and all queries of the tail are among the rows.
        last = rows >= tail
        d_query, d_key = np.zeros_like(query[:, rows]), np.zeros_like(key[:, tail:])
        for f, weight in parts:
            own = weight * d_scores
            d_query[..., f] = np.einsum("bnrs,bsnh->brnh", own, key[..., f])
            d_key[..., f] = np.einsum("bnrs,brnh->bsnh", own[:, :, last, tail:], query[:, rows[last]][..., f])
        d_value = np.einsum("bnrs,brnh->bsnh", weights[:, :, last, tail:], d_out[:, rows[last]])
        out = np.einsum("bnrs,bsnh->brnh", weights, value)
        return out, d_query * slopes[0], d_key * slopes[1], d_value

    return reference


def recurrence_reference(
    arrays: Arrays, rows: np.ndarray, tail: int, log_decay: Any, *, delta: bool
) -> tuple[np.ndarray, ...]:
    """The reference of linear attention or the delta rule on a decaying state, by its recurrence and, over the tail,
    the recurrence of its gradient.

    Args:
      log_decay: of the state before each token: a number, or (heads, 1 or features).
      delta: whether keys are scaled to length 1, and a token's value replaces a part of the state's value for its key.
    """
    erase, write = (BETA, BETA) if delta else (0.0, 1.0)
    query, key, value, d_out = (x.astype(np.float64) for x in arrays)
    length, heads, features = key.shape[1:]
    decay = np.broadcast_to(np.exp(log_decay), (heads, features))[..., None]
    size = np.linalg.norm(key, axis=-1, keepdims=True) if delta else np.ones((*key.shape[:3], 1))
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
        along = k * (k * d_unit).sum(-1, keepdims=True) if delta else 0.0
        d_key[:, t] = (d_unit - along) / size[:, t]
        d_value[:, t] = write * d_error
        d_state = decay * (d_state - (erase * k)[..., None] * d_error[:, :, None])
    return out[:, rows], d_query[:, rows], d_key[:, tail:], d_value[:, tail:]
