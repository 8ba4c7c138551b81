"""Recurrences on TPUs: one kernel walks the chunks of a row with the state in VMEM.

What separates chunks, decay and segments, becomes factors of tokens and of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.dispatch import Backend
from brl_jax.attention.recurrent.decay import clip_log_decay
from brl_jax.sharding import sequence_axis, shard_call

# Pallas is imported where it is needed: it costs import time.

#: Shorter rows are a few chunks for XLA, and a fraction of one step of the kernel.
_SHORTEST = 512


class Walked(NamedTuple):
    """The arrays of a recurrence.

    Attributes:
      query, key: features. log_decay: (B, T, K) or None. beta: of the delta rule, None for sums.
      key_value, key_sum: the state before the first token; key_sum is None where weights are not summed.
      segments: from `segment_numbers`; that of the state is 0.
    """

    query: Float[Array, "B T N F"]
    key: Float[Array, "B T K F"]
    value: Float[Array, "B T K V"]
    key_value: Float[Array, "B K F V"]
    key_sum: Float[Array, "B K F"] | None = None
    log_decay: Float[Array, "B T K"] | None = None
    beta: Float[Array, "B T K"] | None = None
    segments: Int[Array, "B T"] | None = None


_QUERIES, _KEYS = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
_STATE, _NUMBERS = ("batch", "kv_heads", None, None), _KEYS[:3]
#: The axes of `Walked`, and of the sums, the weights and the states after the last token, for `shard_call`.
WALKED_AXES = (
    (_QUERIES, _KEYS, _KEYS, _STATE, _STATE[:3], _NUMBERS, _NUMBERS, ("batch", None)),
    (_QUERIES, _QUERIES[:3], _STATE, _STATE[:3]),
)


def recurrence_backend(
    run: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    *,
    features: int,
    chunk_size: int,
    delta: bool = False,
    log_decay: Array | None = None,
) -> Backend:
    """The kernel of a call.

    Args:
      run: `run(*operands, interpret=...)`, by `walk`.
      query, key, value: of the call, of which only shapes and dtypes count.
      features: of the queries and keys that the kernel is given.
      chunk_size: of the walk through XLA, which serves rows that a mesh cuts.
    """
    sizes = ((query, features), (key, features), (value, value.shape[3]))
    shapes = [jax.ShapeDtypeStruct((*x.shape[:3], size), x.dtype) for x, size in sizes]
    by_feature = log_decay is not None and log_decay.ndim == 4

    def unsupported(*_: Any) -> str | None:
        from pallas_kernels import tpu

        if by_feature:
            return "log_decay must be one number for each token and head, got one for each feature"
        return tpu.recurrence_unsupported(*shapes, delta=delta)

    length = key.shape[1]
    unsuited = length < _SHORTEST or sequence_axis(length, chunk_size) is not None
    return Backend("pallas", run, unsupported, unsuited)


def walk(arrays: Walked, *, interpret: bool) -> Any:
    """The `Sums` of the kernel, each device for its own rows and heads."""
    from pallas_kernels import tpu

    def attend(*arrays: Any) -> Any:
        walked = Walked(*arrays)
        factors, segments = _factors(walked), walked.segments
        return tuple(tpu.recurrence(*walked[:5], factors, segments=segments, interpret=interpret))

    return tpu.Sums(*shard_call(attend, arrays, *WALKED_AXES))


def _factors(arrays: Walked) -> Any:
    """What each token reads of the state before its chunk and adds to the one after it."""
    from pallas_kernels import tpu

    log, segments = arrays.log_decay, arrays.segments
    length, heads = arrays.key.shape[1:3]
    start = end = total = None
    if log is not None:
        log = clip_log_decay(log.astype(jnp.float32))
        chunked = _chunks(log, tpu.CHUNK)
        up_to = jnp.tri(tpu.CHUNK)

        def summed(which: Array) -> Array:
            """Each sum is over its own tokens, as in `decay`: no difference of sums from the chunk's start."""
            return jnp.einsum("ij,bcjk->bcik", which, chunked, precision=lax.Precision.HIGHEST)

        sums, rest = summed(up_to), summed(1 - up_to)
        start, end = (jnp.exp(x).reshape(x.shape[0], -1, heads)[:, :length] for x in (sums, rest))
        total = jnp.exp(sums[:, :, -1])
    if segments is not None:
        chunked = _chunks(segments, tpu.CHUNK, -1)
        # Numbers only grow along a row and padding has -1, so that the largest is the newest.
        after = lax.cummax(jnp.maximum(chunked.max(axis=2), 0), axis=1)
        before = jnp.pad(after[:, :-1], ((0, 0), (1, 0)))

        def masked(x: Array | None, kept: Array) -> Array:
            kept = kept.reshape(kept.shape[0], -1)[:, : None if x is None else x.shape[1], None]
            ones = jnp.ones((1, 1, heads), jnp.float32)
            return jnp.where(kept, ones if x is None else x, 0.0)

        start = masked(start, chunked == before[..., None])[:, :length]
        end = masked(end, chunked == after[..., None])[:, :length]
        total = masked(total, before == after)
    return tpu.Factors(start, end, log, arrays.beta, total)


def _chunks(x: Array, size: int, fill: int = 0) -> Array:
    """(B, T, ...) as (B, chunks, size, ...)."""
    pads = [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=fill).reshape(x.shape[0], -1, size, *x.shape[2:])
