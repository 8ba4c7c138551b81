"""Full softmax attention on a TPU: the block kernel, with every pair of blocks that can be visible."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels
from brl_jax.attention.core import tpu_biases
from brl_jax.attention.core.biases import ALiBi
from brl_jax.attention.core.checks import pad_features
from brl_jax.attention.core.softmax import gradient_of_kernel, merge_kernels
from brl_jax.attention.core.tpu_blocks import BLOCK, all_blocks
from brl_jax.attention.dense.full_xla import FullArrays
from pallas_kernels.absent import mark_absent

#: Larger than any distance between two tokens.
_ANY = 1 << 30
#: Queries from which blocks have 1,024 rows.
_LONG = 4096


def unsupported(x: FullArrays, *, is_causal: bool, offset: int | None, **static: Any) -> str | None:
    """Why the kernel does not support a call, or None. Traces nothing."""
    bias, mask = x.bias, x.mask
    if mask is not None and mask.shape[1:3] != (1, 1):
        return f"mask must be the same for all heads and queries, got shape {mask.shape}"
    if (why := tpu_biases.unsupported(bias)) is not None:
        return why
    if bias is not None and offset is None and (not is_causal or _unbounded(bias)):
        return f"query_offset must be a static int with {type(bias).__name__}"
    return _refusal(x, is_causal, offset, BLOCK)


def _refusal(x: FullArrays, is_causal: bool, offset: int | None, block_q: int) -> str | None:
    width = max(x.query.shape[3], x.value.shape[3])
    shapes = [jax.ShapeDtypeStruct((*a.shape[:3], width), a.dtype) for a in (x.query, x.key, x.value)]
    described = tpu_biases.described(x.bias, _distances(x.query, x.key, is_causal, offset))
    blocks = all_blocks(x.query.shape[1], x.key.shape[1], is_causal, offset, block_q=block_q)
    return kernels.tpu.block_unsupported(*shapes, bias=described, **blocks)


def _blocks(x: FullArrays, is_causal: bool, offset: int | None) -> dict[str, Any]:
    """The kernel's options. Twice the rows take a tenth fewer instructions for a pair, but score more pairs after the
    query, which shows in short rows, and need more VMEM."""
    large = x.query.shape[1] >= _LONG and _refusal(x, is_causal, offset, 2 * BLOCK) is None
    rows = 2 * BLOCK if large else BLOCK
    return all_blocks(x.query.shape[1], x.key.shape[1], is_causal, offset, block_q=rows)


def _unbounded(bias: Any) -> bool:
    """Whether a bias needs a number for every distance; a traced offset makes their range unknown."""
    return bias.farthest is None and not isinstance(bias, ALiBi)


def _distances(query: Array, key: Array, is_causal: bool, offset: int | None) -> tpu_biases.Distances:
    """The range of distances of all visible pairs; everything if the offset is traced."""
    if offset is None:
        return tpu_biases.Distances(0, _ANY)
    least = offset - (key.shape[1] - 1)
    return tpu_biases.Distances(max(least, 0) if is_causal else least, query.shape[1] - 1 + offset)


def attend(
    x: FullArrays, *, return_residual: bool, **static: Any
) -> tuple[Array | tuple[Array, Array], Float[Array, "B N T"]]:
    """The results of `full_attention` on the kernel, with a float32 residual, and what `gradient` needs: the
    log-sum-exp without sinks. `_run` has the other arguments."""
    own = _run(x, **static)
    out, lse = merge_kernels(x, [own])
    return (out, lse) if return_residual else out, own[1].swapaxes(1, 2)


def gradient(
    operands: tuple[FullArrays],
    results: Any,
    log_sums: Float[Array, "B N T"],
    d_results: Any,
    *,
    return_residual: bool,
    **static: Any,
) -> tuple[FullArrays]:
    """The gradient of `attend`."""

    def run(x: FullArrays, known: tuple[Array, Array]) -> tuple[Array, Array]:
        return _run(x, known=known, **static)

    given = (*operands, results, log_sums, d_results)
    return (gradient_of_kernel(run, *given, return_residual=return_residual),)


def _run(
    x: FullArrays,
    *,
    scale: float,
    is_causal: bool,
    offset: int | None,
    cap: float | None,
    interpret: bool,
    known: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """The kernel's output and log-sum-exp, without sinks; `offset` is the query offset, None if traced. With `known`,
    the results of an earlier run, only its backward pass does work."""
    query, key, value, bias, mask, query_lengths, key_lengths, segments, query_offset, _ = x
    if mask is not None:
        key, value, segments = _without_hidden_keys(query, key, value, mask, segments)
    query_dim, value_dim = query.shape[3], value.shape[3]
    # The kernel has one head dimension; lanes of zeros change neither scores nor gradients.
    width = max(query_dim, value_dim)
    query, key, value = (pad_features(x, width) for x in (query, key, value))
    out, lse = kernels.tpu.block_attention(
        query,
        key,
        value,
        causal=is_causal,
        bias=tpu_biases.for_kernel(bias, query.shape[2], _distances(query, key, is_causal, offset)),
        query_position=offset or 0,
        shift=query_offset if is_causal and offset is None else None,
        scale=scale,
        logits_soft_cap=cap,
        query_segment_ids=segments[0],
        key_segment_ids=segments[1],
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        return_log_sum_exp=True,
        known=known and (pad_features(known[0], width), known[1]),
        interpret=interpret,
        **_blocks(x, is_causal, offset),
    )
    return out[..., :value_dim], lse


def _without_hidden_keys(query: Array, key: Array, value: Array, mask: Array, segments: tuple) -> tuple:
    """Zeroes the keys and values that a mask of keys hides, and hides them by segment ids."""
    seen = jnp.broadcast_to(mask[:, 0, 0], (mask.shape[0], key.shape[1]))
    key, value = (jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (key, value))
    every = jnp.ones((1, query.shape[1]), bool)
    query_ids, key_ids = segments
    return key, value, mark_absent(query_ids, key_ids, every, seen, query.shape[0])
