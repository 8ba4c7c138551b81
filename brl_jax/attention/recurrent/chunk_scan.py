"""The scan over chunks that the mechanisms with a recurrent state share.

A sequence is cut into chunks of C tokens. Inside a chunk all pairs of queries and keys are computed at once, in matrix
products that are quadratic in C only. Earlier chunks reach a chunk through the state alone. This is the chunked form
of linear attention (Yang et al. 2023, arXiv:2312.06635). Mechanisms differ in their state (any
pytree) and in their step from one chunk to the next. Padding and the boundaries of packed sequences are handled here
for all of them. Chunks and states are computed in float32 whatever the dtype of the inputs, because a sum over 64k
tokens does not fit into the 8 significant bits of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from brl_jax.attention.core.varying import vary_like


class ChunkVisibility(NamedTuple):
    """Which tokens of a chunk interact with each other and with the state. None stands for True everywhere.

    Attributes:
      pairs: whether query i attends to key j of the chunk; the leading axis is 1 if all rows of the batch agree.
      reads_state: whether a query reads the state, which holds earlier tokens of its own segment.
      keeps_state: whether the content of the state is kept after the chunk; it is dropped where a new segment begins.
      enters_state: whether a key is added to the state after the chunk.
    """

    pairs: Bool[Array, "#B C C"]
    reads_state: Bool[Array, "B C"] | None
    keeps_state: Bool[Array, "B"] | None
    enters_state: Bool[Array, "B C"] | None


#: The step of a mechanism: (state, inputs of one chunk, visibility) -> (next state, outputs of the chunk).
Step = Callable[[Any, Any, ChunkVisibility], tuple[Any, Any]]


def scan_chunks(
    step: Step,
    state: Any,
    inputs: Any,
    segments: Int[Array, "B T"] | None = None,
    *,
    chunk_size: int,
    strict: bool = False,
) -> tuple[Any, Any]:
    """Applies state, outputs = step(state, chunk, visibility) to consecutive chunks, from the first to the last.

    The backward pass recomputes each chunk from the state before it, so that besides the inputs only one state per
    chunk is stored. The last chunk is padded to the chunk size with tokens that no query sees; a sequence of at most
    chunk_size tokens is a single chunk of its own length.

    Args:
      step: receives the state, a pytree of (B, C, ...) arrays and a `ChunkVisibility`, and returns the next state (of
        the same structure, shapes and dtypes) and a pytree of (B, C, ...) outputs.
      state: the state before the first token, any pytree of arrays; it belongs to segment 0.
      inputs: a pytree of (B, T, ...) arrays.
      segments: the segment of each token, from `segment_numbers`.
      chunk_size: C, at least 1.
      strict: if True, a token does not attend to itself.

    Returns:
      The state after the last token and the outputs as (B, T, ...) arrays.
    """
    leaves = jax.tree.leaves(inputs)
    batch, length = leaves[0].shape[:2]
    size = min(length, chunk_size)
    chunks = -(-length // size)
    missing = chunks * size - length

    def split(x: Array, fill: int = 0) -> Array:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *x.shape[3:])[:, :length]

    def one_chunk(carry: Any, chunk: Any) -> Any:
        state, segment = carry
        inputs, segments = chunk
        visibility, segment = _chunk_visibility(size, segments, segment, strict)
        state, outputs = step(state, inputs, visibility)
        return (state, segment), outputs

    if missing and segments is None:
        segments = jnp.zeros((batch, length), jnp.int32)
    segment = None if segments is None else jnp.zeros((batch,), jnp.int32)
    if chunks == 1:
        (state, _), outputs = one_chunk((state, segment), (inputs, segments))
        return state, outputs
    carry = vary_like((state, segment), leaves)
    chunked = (jax.tree.map(split, inputs), None if segments is None else split(segments, -1))
    (state, _), outputs = lax.scan(jax.checkpoint(one_chunk, prevent_cse=False), carry, chunked)
    return state, jax.tree.map(join, outputs)


def scan_both_directions(
    step: Step, state: Any, inputs: Any, segments: Int[Array, "B T"], *, chunk_size: int
) -> tuple[Any, Any]:
    """Two scans: one over each token and those before it, one (from the end) over those after it.

    Args:
      step, inputs, segments, chunk_size: as for `scan_chunks`.
      state: the state before any token, with which both scans begin.

    Returns:
      The outputs over the past and those over the future, (B, T, ...) arrays in the order of the inputs.
    """

    def reverse(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[:, ::-1], tree)

    _, past = scan_chunks(step, state, inputs, segments, chunk_size=chunk_size)
    # The last segment comes first when the sequence is read from its end.
    backwards = jnp.where(segments < 0, -1, segments.max(axis=1)[:, None] - segments)
    _, future = scan_chunks(
        step, state, reverse(inputs), reverse(backwards), chunk_size=chunk_size, strict=True
    )
    return past, reverse(future)


def segment_numbers(
    batch: int, length: int, lengths: Int[Array, "B"] | None, segment_ids: Int[Array, "B T"] | None
) -> Int[Array, "B T"] | None:
    """The number of each token's segment, counted from 0 along the row, and -1 for padding.

    A segment is a run of equal ids. The result is None if the whole batch is one segment without padding.
    """
    if lengths is None and segment_ids is None:
        return None
    segments = jnp.zeros((batch, length), jnp.int32)
    if segment_ids is not None:
        segments = segments.at[:, 1:].set(
            jnp.cumsum(segment_ids[:, 1:] != segment_ids[:, :-1], axis=1, dtype=jnp.int32)
        )
    if lengths is not None:
        segments = jnp.where(jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None], segments, -1)
    return segments


def _chunk_visibility(
    length: int, segments: Int[Array, "B C"] | None, segment: Int[Array, "B"] | None, strict: bool
) -> tuple[ChunkVisibility, Int[Array, "B"] | None]:
    """The visibility within a chunk, and the segment of the state after it; `segment` is that before the chunk."""
    pairs = jnp.tri(length, k=-1 if strict else 0, dtype=bool)[None]
    if segments is None or segment is None:
        return ChunkVisibility(pairs, None, None, None), None
    # Numbers only grow along a row and padding has -1, so that the largest is the newest.
    newest = jnp.maximum(segment, segments.max(axis=1))
    pairs = pairs & (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
    visibility = ChunkVisibility(
        pairs, segments == segment[:, None], newest == segment, segments == newest[:, None]
    )
    return visibility, newest
