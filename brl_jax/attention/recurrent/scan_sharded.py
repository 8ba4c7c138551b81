"""A recurrence on a mesh that shards its sequences: each device scans its own shard of every row.

A shard's summary, joined from its chunks' summaries, describes how the shard changes the state. Devices exchange these
summaries, whose size does not depend on the length, and each applies the summaries of the shards before its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from brl_jax.attention.core.varying import vary_like


class Walk(Protocol):
    """How to scan a shard; see `chunk_scan`."""

    def through(self, state: Any, segment: Any, inputs: Any, segments: Any) -> tuple[Any, Any]:
        """The state after a shard and its outputs; the state before it belongs to `segment`."""

    def summary(self, inputs: Any, segments: Any, segment: Any) -> Any:
        """How the shard changes a state in `segment`."""


def scan_shards(
    make_walk: Callable[[Any], Walk],
    states: Callable[[Any, Any, Any], tuple[Any, Any]],
    whole: Any,
    state: Any,
    inputs: Any,
    segments: Int[Array, "B T"] | None,
    axis: str,
) -> tuple[Any, Any]:
    """The state after sequences that are sharded over a mesh axis, and their outputs, sharded in the same way.

    The compiler handles the other mesh axes, so heads and rows may be sharded too.

    Args:
      make_walk: makes the walk from `whole`; must not close over arrays.
      states: of a `Recurrence`.
      whole, state, inputs, segments: as for `scan_chunks`.
      axis: the mesh axis, whose size divides T.
    """

    def shard(whole: Any, state: Any, inputs: Any, segments: Any) -> tuple[Any, Any]:
        walk = make_walk(whole)
        index, count = lax.axis_index(axis), lax.axis_size(axis)
        state = vary_like(state, jax.tree.leaves(inputs))
        before = keeps = None
        if segments is not None:
            # Numbers grow along a row and padding has -1, so the largest is the newest.
            newest = lax.all_gather(jnp.maximum(segments.max(axis=1), 0), axis, axis=1)
            after = lax.cummax(newest, axis=1)
            earlier = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
            keeps, before = earlier == after, _pick(earlier, index)
        summary = walk.summary(inputs, segments, before)
        summaries = jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1), summary)
        starts, _ = states(state, summaries, keeps)
        last, outputs = walk.through(_pick(starts, index), before, inputs, segments)
        is_last = index == count - 1
        last = jax.tree.map(lambda x: lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), axis), last)
        return last, outputs

    cut = PartitionSpec(None, axis)
    specs = (PartitionSpec(), PartitionSpec(), cut, cut)
    mapped = jax.shard_map(shard, in_specs=specs, out_specs=(PartitionSpec(), cut), axis_names={axis})
    return mapped(whole, state, inputs, segments)


def _pick(tree: Any, index: Any) -> Any:
    """One shard's entry of arrays (B, shards, ...)."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), tree)
