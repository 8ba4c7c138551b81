"""The recurrence on TPUs and GPUs: a Pallas or Triton kernel walks the chunks of a row.

For the TPU kernel, segments and a decay by head become factors of tokens and of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from brl_jax.attention.core.dispatch import Backend, triton_backend
from brl_jax.attention.core.query_blocks import in_blocks
from brl_jax.attention.recurrent.decay import clip_log_decay
from brl_jax.sharding import Names, sequence_axis, shard_call

# XLA takes rows shorter than this, which are only a few chunks.
_SHORTEST_ON_TPU, _SHORTEST_ON_GPU = 512, 128


class Walked(NamedTuple):
    """The arrays of a recurrence.

    Attributes:
      query, key: features.
      key_value, key_sum: the state before the first token; key_sum only if weights are summed.
      beta: only for the delta rule.
      segments: from `segment_numbers`; the state belongs to segment 0.
    """

    query: Float[Array, "B T N F"]
    key: Float[Array, "B T K F"]
    value: Float[Array, "B T K V"]
    key_value: Float[Array, "B K F V"]
    key_sum: Float[Array, "B K F"] | None = None
    log_decay: Float[Array, "B T K"] | Float[Array, "B T K F"] | None = None
    beta: Float[Array, "B T K"] | None = None
    segments: Int[Array, "B T"] | None = None


_QUERIES, _KEYS = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
_STATE, _NUMBERS = ("batch", "kv_heads", None, None), _KEYS[:3]
#: Names for `shard_call`: the axes of `Walked`, and of the sums, weights and states after the last token.
_WALKED_AXES = (
    (_QUERIES, _KEYS, _KEYS, _STATE, _STATE[:3], _NUMBERS, _NUMBERS, ("batch", None)),
    (_QUERIES, _QUERIES[:3], _STATE, _STATE[:3]),
)


def recurrence_backends(
    run: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    *,
    features: int,
    chunk_size: int,
    out_dtype: Any,
    delta: bool = False,
    log_decay: Array | None = None,
    refused: str | None = None,
) -> dict[str, tuple[Backend, ...]]:
    """The kernels of a call, by platform.

    Args:
      run: run(walk, *operands, **options), where walk(Walked(...), **options) returns the `Sums` of a kernel.
      query, key, value: of the call; only shapes and dtypes matter.
      features: of the queries and keys that the kernel gets.
      chunk_size: of the scan through XLA, which takes rows that a mesh shards.
      out_dtype: of the GPU kernel's total.
      refused: why no kernel computes the call, or None.
    """
    sizes = ((query, features), (key, features), (value, value.shape[3]))
    shapes = [jax.ShapeDtypeStruct((*x.shape[:3], size), x.dtype) for x, size in sizes]
    by_feature = log_decay is not None and log_decay.ndim == 4

    def tpu_unsupported(*_: Any) -> str | None:
        return refused or kernels.tpu.recurrence_unsupported(*shapes, delta=delta, by_feature=by_feature)

    def gpu_unsupported(*_: Any) -> str | None:
        return refused or kernels.triton.recurrence_unsupported(*shapes)

    length = key.shape[1]
    sharded = sequence_axis(length, chunk_size) is not None
    on_tpu = functools.partial(run, walk_on_tpu)
    on_gpu = functools.partial(run, functools.partial(_walk_on_gpu, out_dtype=out_dtype))
    return {
        "tpu": (Backend("pallas", on_tpu, tpu_unsupported, sharded or length < _SHORTEST_ON_TPU),),
        "cuda": (triton_backend(on_gpu, gpu_unsupported, sharded or length < _SHORTEST_ON_GPU),),
    }


def _walk_on_gpu(arrays: Walked, *, out_dtype: Any) -> Any:
    """The `Sums` of the kernels; each device computes its own rows and heads."""

    def attend(*arrays: Any) -> Any:
        return tuple(kernels.triton.recurrence(kernels.triton.Operands(*arrays), out_dtype=out_dtype))

    return kernels.triton.Sums(*shard_call(attend, arrays, *_axes(arrays)))


def _axes(arrays: Walked) -> tuple[Any, Any]:
    """`_WALKED_AXES` for these arrays."""
    axes, results = _WALKED_AXES
    names: list[Names] = list(axes)
    if arrays.log_decay is not None and arrays.log_decay.ndim == 4:
        names[Walked._fields.index("log_decay")] = _KEYS
    return names, results


def walk_on_tpu(arrays: Walked, *, interpret: bool) -> Any:
    """The `Sums` of the kernel; each device computes its own rows and heads."""

    def attend(*arrays: Any) -> Any:
        walked = Walked(*arrays)
        factors, segments = _factors(walked), walked.segments
        return tuple(kernels.tpu.recurrence(*walked[:5], factors, segments=segments, interpret=interpret))

    return kernels.tpu.Sums(*shard_call(attend, arrays, *_axes(arrays)))


def _factors(arrays: Walked) -> Any:
    """How much of the state before its chunk each token reads, and how much it adds to the state after it."""
    log, segments = arrays.log_decay, arrays.segments
    length, heads = arrays.key.shape[1:3]
    start = end = total = None
    if log is not None:
        log = clip_log_decay(log.astype(jnp.float32))
    if log is not None and log.ndim == 3:
        chunked = in_blocks(log, kernels.tpu.CHUNK)
        up_to = jnp.tri(kernels.tpu.CHUNK)

        def summed(which: Array) -> Array:
            """Sums over the given tokens; differences of cumulative sums would lose precision (see `decay`)."""
            return jnp.einsum("ij,bcjk->bcik", which, chunked, precision=lax.Precision.HIGHEST)

        sums, rest = summed(up_to), summed(1 - up_to)
        start, end = (jnp.exp(x).reshape(x.shape[0], -1, heads)[:, :length] for x in (sums, rest))
        total = jnp.exp(sums[:, :, -1])
    if segments is not None:
        chunked = in_blocks(segments, kernels.tpu.CHUNK, fill=-1)
        # Numbers grow along a row and padding has -1, so the largest is the newest.
        after = lax.cummax(jnp.maximum(chunked.max(axis=2), 0), axis=1)
        before = jnp.pad(after[:, :-1], ((0, 0), (1, 0)))

        def masked(x: Array | None, kept: Array) -> Array:
            kept = kept.reshape(kept.shape[0], -1)[:, : None if x is None else x.shape[1], None]
            ones = jnp.ones((1, 1, heads), jnp.float32)
            return jnp.where(kept, ones if x is None else x, 0.0)

        start = masked(start, chunked == before[..., None])[:, :length]
        end = masked(end, chunked == after[..., None])[:, :length]
        total = masked(total, before == after)
    return kernels.tpu.Factors(start, end, log, arrays.beta, total)
