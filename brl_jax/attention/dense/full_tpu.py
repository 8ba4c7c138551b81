"""Full softmax attention on a TPU: the kernel for lists of blocks, whose lists have every pair that can be visible."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from brl_jax.attention.core.softmax import merge_sums, normalise, residual, sink_sums, sums_of_normalised
from brl_jax.attention.core.tpu_blocks import all_blocks
from pallas_kernels import tpu


def obstacle(
    query: Array, key: Array, value: Array, bias: Any, mask: Any, is_causal: bool, offset: Any
) -> str | None:
    """Why the kernel cannot serve a call; None if it can. Traces nothing."""
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            return f"{name} must be None, got {type(given).__name__ if name == 'bias' else 'an array'}"
    width = max(query.shape[3], value.shape[3])
    shapes = [jax.ShapeDtypeStruct((*x.shape[:3], width), x.dtype) for x in (query, key, value)]
    return tpu.block_obstacle(*shapes, **all_blocks(query.shape[1], key.shape[1], is_causal, offset))


def attend(
    query: Array,
    key: Array,
    value: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    segments: tuple,
    query_offset: Array,
    sinks: Array | None,
    *,
    scale: float,
    is_causal: bool,
    offset: int | None,
    cap: float | None,
    return_residual: bool,
    interpret: bool,
) -> Array | tuple[Array, Array]:
    """`full_attention` on the kernel, with the residual in float32 if the call returns it.

    `offset` is the query offset where it is known, and None where it is known only at run time.
    """
    query_dim, value_dim = query.shape[3], value.shape[3]
    # The kernel has one head dimension; lanes of zeros change neither scores nor gradients.
    query, key, value = (_widened(x, max(query_dim, value_dim)) for x in (query, key, value))
    out, log_sums = tpu.block_attention(
        query,
        key,
        value,
        causal=is_causal,
        query_position=offset or 0,
        shift=query_offset if is_causal and offset is None else None,
        scale=scale,
        logits_soft_cap=cap,
        query_segment_ids=segments[0],
        key_segment_ids=segments[1],
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        return_log_sum_exp=True,
        interpret=interpret,
        **all_blocks(query.shape[1], key.shape[1], is_causal, offset),
    )
    out = out[..., :value_dim]
    if sinks is not None:
        rows = jnp.broadcast_to(sinks, log_sums.shape)
        merged = merge_sums(sums_of_normalised(out, log_sums), sink_sums(rows, value_dim))
        out, log_sums = normalise(merged)
        out, log_sums = out.astype(query.dtype), residual(log_sums)
    return (out, log_sums) if return_residual else out


def _widened(x: Array, width: int) -> Array:
    return x if x.shape[3] == width else jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[3]),))
