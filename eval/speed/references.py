"""Float64 references of attention functions, forward and gradients, on a sample of rows: NumPy arrays in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
        # Row i and column j of the scores, whose axes are batch, heads, rows, columns.
        i = rows[None, None, :, None]
        j = np.arange(arrays[1].shape[1])[None, None, None, :]
        seen = sees(options, i, j)
        parts = [(level.features, level.scale * level.holds(i, j)) for level in levels(options, j.size)]

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            if linear:
                query, key = (1 + jax.nn.elu(x) for x in (query, key))
            scores: Any = sum(w * jnp.einsum("brnh,bsnh->bnrs", query[..., f], key[..., f]) for f, w in parts)
            if linear:
                scores = jnp.where(seen, scores, 0.0)
                weights = scores / scores.sum(-1, keepdims=True)
            else:
                weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            return jnp.einsum("bnrs,bsnh->brnh", weights, value)

        with jax.enable_x64(True):
            query, key, value, d_out = (jnp.asarray(x, jnp.float64) for x in arrays)
            out, pull = jax.vjp(attend, query[:, rows], key, value)
            d_query, d_key, d_value = pull(d_out[:, rows])
            # No query before the tail sees a key of the tail, and all queries of the tail are among the rows.
            return tuple(map(np.asarray, (out, d_query, d_key[:, tail:], d_value[:, tail:])))

    return reference


def recurrence_reference(
    arrays: Arrays, rows: np.ndarray, tail: int, log_decay: Any, *, delta: bool
) -> tuple[np.ndarray, ...]:
    """The reference of linear attention or the delta rule on a decaying state, token by token.

    Args:
      log_decay: of the state before each token: a number, or (heads, 1 or features).
      delta: whether keys are scaled to length 1, and a token's value replaces a part of the state's value for its key.
    """

    @jax.jit
    def run(state: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> Any:
        """The state at the end, the outputs, and the gradients of the queries, (B, n, N, H) each."""
        if delta:
            key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)

        def step(state: jax.Array, token: Any) -> Any:
            q, k, v, d = token
            state = decay * state
            error = BETA * (v - jnp.einsum("bnfh,bnf->bnh", state, k)) if delta else v
            state = state + k[..., None] * error[..., None, :]
            return state, (jnp.einsum("bnfh,bnf->bnh", state, q), jnp.einsum("bnfh,bnh->bnf", state, d))

        tokens = tuple(x.swapaxes(0, 1) for x in (query, key, value, d_out))
        state, made = jax.lax.scan(step, state, tokens)
        return state, *(x.swapaxes(0, 1) for x in made)

    with jax.enable_x64(True):
        query, key, value, d_out = (jnp.asarray(x, jnp.float64) for x in arrays)
        decay = jnp.asarray(np.broadcast_to(np.exp(log_decay), key.shape[2:]))[None, :, :, None]
        empty = jnp.zeros((*key.shape[::2], key.shape[3], value.shape[3]), jnp.float64)
        _, out, d_query = run(empty, query, key, value, d_out)
        state, *_ = run(empty, *(x[:, :tail] for x in (query, key, value, d_out)))
        # Nothing after the tail reads its keys and values.
        query, key, value, d_out = (x[:, tail:] for x in (query, key, value, d_out))
        pull = jax.vjp(lambda key, value: run(state, query, key, value, d_out)[1], key, value)[1]
        return tuple(map(np.asarray, (out[:, rows], d_query[:, rows], *pull(d_out))))
