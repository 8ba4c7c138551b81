"""Attention of each query to a list of key blocks: native sparse attention's second branch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from brl_jax.attention.core.by_platform import gradient_of_known
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Backend, Implementation, dispatch, triton_backend
from brl_jax.attention.core.on_mesh import rows_and_heads
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.core.tpu_blocks import all_blocks

# Queries at a time: each reads M * size different keys, the largest array in memory.
_QUERY_BLOCK = 64
# Fewer queries, as in a decoding step, would fill only a fraction of the TPU kernel's registers. The kernel may visit
# all keys; from about this many on, that is slower than reading each query's list (docs/sparse.md).
_TPU_SHORTEST, _TPU_LONGEST = 64, 65536
# Up to this many times the keys of a list, XLA scores all keys and masks the others, because a matrix product is that
# much faster than a gather for each query. The mask takes one comparison per block.
_ALL_KEYS = 4
_MOST_COMPARISONS = 32


@divided(rows_and_heads)
def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    starts: Int[Array, "B T K M"],
    offset: int | Int[Array, ""] = 0,
    *,
    size: int,
    scale: float,
    aligned: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention of each query to the keys of M blocks, up to its own position, in float32.

    Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089), equation 5 with the keys of equation 12. Time is
    O(T M size). Memory is O(T M), plus the keys of 64 queries except on a GPU. The TPU kernel visits the blocks
    that any of 512 queries chose and masks the scores of the others: at most O(T S) time, in O(T M) memory.

    Args:
      query: (B, T, N, H), at consecutive positions from `offset` on among the keys.
      key, value: (B, S, K, H) and (B, S, K, V); K divides N.
      starts: (B, T, K, M) int32, the first keys of each query's blocks, which must not overlap; S for a missing
        block. They have no gradient.
      offset: position of the first query.
      size: keys in a block.
      scale: scale of the scores.
      aligned: whether all blocks begin at multiples of `size`.
      implementation: as for `dispatch`; "pallas" on a TPU, "triton" on a GPU.

    Returns:
      (B, T, N, V), 0 if a query sees nothing.
    """
    known = offset if isinstance(offset, int) else None
    xla = functools.partial(_through_xla, size=size, scale=scale)
    backends = {
        "tpu": (_pallas(query, key, known, size=size, scale=scale, aligned=aligned),),
        "cuda": (_triton(size=size, scale=scale),),
    }
    operands = (query, key, value, starts, jnp.asarray(offset, jnp.int32))
    results = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), jnp.float32)
    log_sums = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)
    return dispatch(
        "native_sparse_attention", implementation, backends, xla, *operands, results=results, kept=log_sums
    )


def _through_xla(
    query: Array, key: Array, value: Array, starts: Array, offset: Array, *, size: int, scale: float
) -> Array:
    blocks = starts.shape[3]
    few = blocks <= _MOST_COMPARISONS and key.shape[1] <= _ALL_KEYS * blocks * size
    read = functools.partial(_read_all if few else _read_lists, key=key, value=value, size=size, scale=scale)

    def attend(query: Array, starts: Any, offset: Any) -> Array:
        batch, length, heads, head_dim = query.shape
        positions = offset + jnp.arange(length, dtype=jnp.int32)
        rows = query.reshape(batch, length, key.shape[2], -1, head_dim)
        return read(rows, starts, positions.reshape(1, -1, 1, 1)).reshape(batch, length, heads, -1)

    return by_query_blocks(attend, _QUERY_BLOCK, query, starts, offset)


def _read_lists(
    rows: Float[Array, "B T K G H"],
    starts: Int[Array, "B T K M"],
    positions: Int[Array, "1 T 1 1"],
    *,
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    size: int,
    scale: float,
) -> Float[Array, "B T K G V"]:
    """Gathers the keys and values of each query's blocks."""
    places = starts[..., None] + jnp.arange(size, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    places = places.reshape(*starts.shape[:3], -1)
    seen = places <= positions
    places = jnp.clip(places, 0, key.shape[1] - 1)
    # (B, K, S, F) at the places: (B, T, K, P, F).
    chosen_key, chosen_value = (
        jax.vmap(jax.vmap(lambda x, at: x[at], (0, 1), 1))(jnp.moveaxis(x, 2, 1), places)
        for x in (key, value)
    )
    scores = jnp.einsum("btkgh,btkph->btkgp", rows, chosen_key, preferred_element_type=jnp.float32)
    weights = softmax_weights(scores * scale, seen[:, :, :, None]).astype(value.dtype)
    return jnp.einsum("btkgp,btkpv->btkgv", weights, chosen_value, preferred_element_type=jnp.float32)


def _read_all(
    rows: Float[Array, "B T K G H"],
    starts: Int[Array, "B T K M"],
    positions: Int[Array, "1 T 1 1"],
    *,
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    size: int,
    scale: float,
) -> Float[Array, "B T K G V"]:
    """Scores all keys and masks those outside a query's blocks."""
    places = jnp.arange(key.shape[1], dtype=jnp.int32).reshape(1, 1, 1, -1)
    # Cast to unsigned, negative distances become large.
    distances = ((places - starts[..., m, None]).astype(jnp.uint32) for m in range(starts.shape[3]))
    seen = functools.reduce(jnp.logical_or, (distance < size for distance in distances))
    seen = jnp.moveaxis(seen & (places <= positions), 2, 1)[:, :, :, None]
    # Heads first, as in `KeyValueCache`, so that no product copies the past.
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    rows = jnp.moveaxis(rows, 2, 1)
    shape = rows.shape[:4]
    rows = rows.reshape(*shape[:2], -1, rows.shape[4])
    scores = jnp.einsum("bkrh,bksh->bkrs", rows, key, preferred_element_type=jnp.float32)
    weights = softmax_weights(scores.reshape(*shape, -1) * scale, seen).astype(value.dtype)
    weights = weights.reshape(scores.shape)
    out = jnp.einsum("bkrs,bksv->bkrv", weights, value, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out.reshape(*shape, -1), 1, 2)


def _pallas(
    query: Array, key: Array, static: int | None, *, size: int, scale: float, aligned: bool
) -> Backend:
    """The TPU kernel for operands (query, key, value, starts, offset), with the offset in `static` if that is known.

    It computes all blocks of keys up to the queries' positions and masks the keys that a query did not choose.
    """
    blocks = all_blocks(query.shape[1], key.shape[1], True, static)
    unsuited = query.shape[1] < _TPU_SHORTEST or key.shape[1] > _TPU_LONGEST

    def unsupported(query, key, value, starts, offset) -> str | None:
        return kernels.tpu.block_unsupported(query, key, value, chosen_runs=starts.shape[3], **blocks)

    def run(query, key, value, starts, offset, *, interpret, known=None):
        out, log_sums = kernels.tpu.block_attention(
            query,
            key,
            value,
            causal=True,
            query_position=static or 0,
            shift=offset if static is None else None,
            chosen_starts=starts,
            chosen_size=size,
            chosen_aligned=aligned,
            scale=scale,
            return_log_sum_exp=True,
            known=known and (known[0], known[1].swapaxes(1, 2)),
            interpret=interpret,
            **blocks,
        )
        return out.astype(jnp.float32), log_sums.swapaxes(1, 2)

    return Backend("pallas", run, unsupported, unsuited, gradient_of_known(run))


def _triton(*, size: int, scale: float) -> Backend:
    """The GPU kernel for operands (query, key, value, starts, offset)."""

    def unsupported(query, key, value, starts, offset) -> str | None:
        if value.shape[3] != key.shape[3]:
            return f"value must have the head_dim of key, {key.shape[3]}, got {value.shape[3]}"
        return kernels.triton.selected_unsupported(query, key)

    def run(query, key, value, starts, offset, *, known=None):
        positions = offset + jnp.arange(query.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, query.shape[:2])
        out, log_sums = kernels.triton.selected_attention(
            query, key, value, starts, positions, size=size, scale=scale, return_log_sum_exp=True,
            known=known and (known[0], known[1].swapaxes(1, 2)),
        )  # fmt: skip
        return out, log_sums.swapaxes(1, 2)

    return triton_backend(run, unsupported, gradient=gradient_of_known(run))
