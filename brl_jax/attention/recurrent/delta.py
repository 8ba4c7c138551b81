"""The delta rule: linear attention whose state forgets what it held for a key before it writes (DeltaNet)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import zero_padding
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.recurrent.chunks import (
    Sight,
    check_chunked_call,
    check_runs,
    check_state,
    group_rows,
    heads_first,
    keep,
    mask_rows,
    mask_scores,
    scan_chunks,
    token_runs,
    ungroup_rows,
)


class DeltaState(NamedTuple):
    """What `delta_rule` knows of the tokens so far: a linear map from keys to values."""

    key_value: Float[Array, "B K H V"]


def init_delta_state(
    batch: int, num_kv_heads: int, head_dim: int, value_dim: int, *, dtype: Any = jnp.float32
) -> DeltaState:
    """The state of `delta_rule` before the first token; dtype is float32 for all inputs but float64's."""
    return DeltaState(jnp.zeros((batch, num_kv_heads, head_dim, value_dim), dtype))


def delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    beta: Float[Array, "B T K"],
    *,
    normalize_keys: bool = True,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> Any:
    """S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T and out_t = S_t^T q_t, in O(T) time and memory.

    DeltaNet (Yang et al. 2024, arXiv 2406.06484, eqs. 4-5), causal only. Chunk by chunk in the WY form (its section
    3.2): with A the strictly lower part of diag(beta) K K^T, the corrected values of a chunk are
    R = (I + A)^-1 diag(beta) (V - K S), all at once; out = Q S + tril(Q K^T) R and the next state is S + K^T R. The
    inverse comes from products of ever larger blocks, so that nothing loops over tokens, forward or backward.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, T, K, H), value: (B, T, K, V), of the same dtype; K divides N, and heads n * (N / K) .. share a key
        head and its state.
      beta: (B, T, K), how far each token's value replaces what the state holds for its key; from 0 (not at all) to
        1 in the paper.
      normalize_keys: divides each key by its l2 norm (a key of zeros stays zero). The state is only stable for
        beta |k|^2 below 2.
      key_value_seq_lengths, segment_ids, state, return_state, chunk_size, implementation: as in `linear_attention`;
        the cost of a chunk's inverse grows with the cube of its size.

    Returns:
      (B, T, N, V) in query's dtype, computed in float32; with return_state, that and a `DeltaState`.

    Raises:
      ValueError: arrays, lengths, segments, a state or sizes that don't fit, naming the argument.
    """
    check_chunked_call(
        query, key, value, is_causal=True, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    require(
        beta.shape == key.shape[:3] and jnp.issubdtype(beta.dtype, jnp.floating),
        f"beta must be floating point of shape {key.shape[:3]} (batch, length, key heads), got {beta.dtype} of "
        f"shape {beta.shape}",
    )
    lengths, segments = check_runs(query, key, key_value_seq_lengths, segment_ids)
    query, key, value, beta = (zero_padding(x, lengths) for x in (query, key, value, beta))
    dtype = accumulation_dtype(query.dtype)
    fresh = init_delta_state(key.shape[0], key.shape[2], key.shape[3], value.shape[3], dtype=dtype)
    state = check_state(state, fresh, "delta_rule")
    runs = token_runs(key.shape[0], key.shape[1], lengths, segments)

    def step(state: DeltaState, chunk: Any, sight: Sight) -> tuple[DeltaState, Array]:
        state, out = _step(chunk, state, sight, normalize_keys)
        return state, out.astype(query.dtype)

    inputs = {"query": query, "key": key, "value": value, "beta": beta}
    state, out = scan_chunks(step, state, inputs, runs, chunk_size=chunk_size)
    return (out, state) if return_state else out


def _step(chunk: Any, state: DeltaState, sight: Sight, normalize_keys: bool) -> tuple[DeltaState, Array]:
    length, kv_heads = chunk["key"].shape[1:3]
    rows, k, v = group_rows(chunk["query"], kv_heads), heads_first(chunk["key"]), heads_first(chunk["value"])
    if normalize_keys:
        k = k * lax.rsqrt(jnp.sum(jnp.square(k), axis=-1, keepdims=True) + 1e-12)
    beta = heads_first(chunk["beta"][..., None])
    overlap = mask_scores(sight.pairs, jnp.einsum("bkif,bkjf->bkij", k, k))
    held = jnp.einsum("bkcf,bkfh->bkch", mask_rows(sight.past, k), state.key_value)
    corrected = solve_unit_lower(beta * jnp.tril(overlap, k=-1), beta * (v - held))
    scores = mask_scores(sight.pairs, jnp.einsum("bkrf,bkcf->bkrc", rows, k))
    out = jnp.einsum("bkrf,bkfh->bkrh", mask_rows(sight.past, rows), state.key_value)
    out = out + jnp.einsum("bkrc,bkch->bkrh", scores, corrected)
    entering = k if sight.enters is None else keep(sight.enters[:, None], k)
    written = jnp.einsum("bkcf,bkch->bkfh", entering, corrected)
    return DeltaState(keep(sight.stays, state.key_value) + written), ungroup_rows(out, length)


@jax.custom_vjp
def solve_unit_lower(a: Float[Array, "*B C C"], b: Float[Array, "*B C H"]) -> Float[Array, "*B C H"]:
    """x with (I + A) x = b, for A strictly lower triangular (zeros elsewhere)."""
    return _multiply(invert_unit_lower(a), b)


def _solve_forward(a: Array, b: Array) -> tuple[Array, Any]:
    inverse = invert_unit_lower(a)
    x = _multiply(inverse, b)
    return x, (inverse, x)


def _solve_backward(saved: Any, d_x: Array) -> tuple[Array, Array]:
    inverse, x = saved
    d_b = _multiply(jnp.swapaxes(inverse, -1, -2), d_x)
    return -jnp.tril(_multiply(d_b, jnp.swapaxes(x, -1, -2)), k=-1), d_b


solve_unit_lower.defvjp(_solve_forward, _solve_backward)

# Errors of a solution feed those of later rows: no reduced precision here, whatever the device's default.
_multiply = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def invert_unit_lower(a: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + A)^-1 for A strictly lower triangular (zeros elsewhere).

    By blocks of doubling size: [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]. This is as stable as forward
    substitution, which a series in powers of A is not: for equal keys those grow like binomial coefficients.
    """
    size = a.shape[-1]
    width = 1 << (size - 1).bit_length()
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, width - size)] * 2)
    blocks = jnp.ones((*a.shape[:-2], width, 1, 1), a.dtype)
    block = 1
    while block < width:
        corners = [a[..., i + block : i + 2 * block, i : i + block] for i in range(0, width, 2 * block)]
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -_multiply(_multiply(second, jnp.stack(corners, axis=-3)), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        lower = jnp.concatenate([corner, second], axis=-1)
        blocks = jnp.concatenate([upper, lower], axis=-2)
        block *= 2
    return blocks[..., 0, :size, :size]
