"""Local attention over sequences that are sharded over a mesh axis; to be called inside `jax.shard_map`.

Each device has one of n equal shards of every sequence, in the order of the axis, and computes its own queries. The
keys and values within reach beyond its shard, the halo, come from neighbouring devices by `ppermute`, which is
differentiable. A device holds the keys of a whole sequence only if the pattern reaches over all of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_scale,
    check_segments,
    check_sinks,
)
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.halo import with_halo
from brl_jax.attention.core.on_mesh import Cut, absent
from brl_jax.attention.local.attend import attend
from brl_jax.attention.local.patterns import CallArrays, Dilated, Pattern, PatternCall, SlidingWindow
from brl_jax.sharding import sequence_axis
from pallas_kernels.absent import mark_absent


def cut(function: Any, **arguments: Any) -> Cut | None:
    """The rule of `local_attention`: of tokens too, where queries and keys are the same and the reach is bounded."""
    pattern, length = arguments["pattern"], arguments["query"].shape[1]
    if arguments["local_window_size"] is not None:
        pattern = SlidingWindow.of_size(arguments["local_window_size"])
    if not isinstance(pattern, Pattern) or not absent(arguments, "state", "return_state"):
        return None
    before, after = pattern.limits
    bounded = before is not None and (arguments["is_causal"] or after is not None)
    others = ("bias", "mask", "query_seq_lengths", "query_offset", "key_offset", "return_residual")
    same = arguments["key"].shape[1] == length and absent(arguments, *others)
    axis = sequence_axis(length) if bounded and same else None
    if axis is None:
        return Cut()
    run = functools.partial(local_attention, axis_name=axis)
    return Cut({"T": "length", "S": "length"}, {"pattern": pattern, "local_window_size": None}, run)


def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    axis_name: str,
    pattern: Pattern,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """`brl_jax.local_attention` of shards, T tokens per device, for a pattern of bounded reach; lengths are of whole
    sequences. Keys, values and segment ids travel as far as the pattern reaches, from one neighbour or several."""
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    before, after = pattern.limits
    after = 0 if is_causal else after
    assert before is not None
    assert after is not None
    batch, size = key.shape[:2]
    shards, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    before, after = (min(reach, (shards - 1) * size) for reach in (before, after))
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query_ids, key_ids = check_segments(segment_ids, query.shape, key.shape)

    first = index * size
    stop = jnp.full((1,), shards * size, jnp.int32) if lengths is None else lengths
    if lengths is not None:
        inside = (first + jnp.arange(size, dtype=jnp.int32))[None] < stop[:, None]
        key, value = (jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (key, value))
    key, value = (with_halo(x, before, after, axis_name) for x in (key, value))
    key_ids = None if key_ids is None else with_halo(key_ids, before, after, axis_name)
    places = first - before + jnp.arange(before + size + after, dtype=jnp.int32)
    key_exists = (places >= 0)[None] & (places[None] < stop[:, None])

    query_offset, query_exists = before, jnp.ones((1, size), bool)
    # Window kernels need equal numbers of queries and keys. If the halo is short, padding the queries costs less than
    # taking the kernels for arbitrary patterns.
    padded = before + after <= size
    if padded:
        query_offset = 0
        query = jnp.pad(query, ((0, 0), (before, after), (0, 0), (0, 0)))
        query_exists = jnp.pad(query_exists, ((0, 0), (before, after)))
        query_ids = None if query_ids is None else jnp.pad(query_ids, ((0, 0), (before, after)))
    query_ids, key_ids = mark_absent(query_ids, key_ids, query_exists, key_exists, batch)
    # Windows do not depend on absolute positions.
    moves = isinstance(pattern, (SlidingWindow, Dilated))
    call = PatternCall(
        pattern=pattern,
        is_causal=is_causal,
        scale=check_scale(scale, query.shape[3]),
        num_queries=query.shape[1],
        num_keys=key.shape[1],
        query_offset=query_offset,
        key_offset=0 if moves else None,
        logits_soft_cap=logits_soft_cap and float(logits_soft_cap),
    )
    arrays = CallArrays(
        query,
        key,
        value,
        query_segments=query_ids,
        key_segments=key_ids,
        key_offset=None if moves else first - before,
        sinks=check_sinks(sinks, query.shape[2]),
    )
    out = attend(call, implementation, arrays)
    return lax.slice_in_dim(out, before, before + size, axis=1) if padded else out
