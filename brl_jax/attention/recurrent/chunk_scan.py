"""The walk over chunks that the mechanisms with a recurrent state share.

A sequence is cut into chunks of C tokens. Inside a chunk all pairs of queries and keys are computed at once, in matrix
products that are quadratic in C only. Earlier chunks reach a chunk through the state alone. This is the chunked form
of linear attention (Yang et al. 2023, arXiv:2312.06635). Mechanisms differ in their state (any
pytree) and in their step from one chunk to the next. Padding and the boundaries of packed sequences are handled here
for all of them. Chunks and states are computed in float32 whatever the dtype of the inputs, because a sum over 64k
tokens does not fit into the 8 significant bits of bfloat16.

There are two ways through the chunks. One after the other, they stay in a CPU's cache. A GPU would wait for the launch
of each chunk's kernels, so there all chunks are computed at once: their contributions to the state, the states before
all of them by an associative scan, and their outputs. The choice is made when the call is lowered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from brl_jax.attention.core.varying import vary_like

#: The name, for `jax.ad_checkpoint.checkpoint_name`, of small arrays of a chunk that take many kernels to compute.
#: Where all chunks are computed at once, the backward pass does not compute them anew.
SAVED = "saved of a chunk"


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


class Recurrence(NamedTuple):
    """How chunks change a mechanism's state, so that the states before all of them can be computed at once.

    Attributes:
      summarize: (inputs of one chunk, visibility) -> the chunk's summary, any pytree of arrays (B, ...).
      states: (state, summaries, keeps) -> the states before each chunk and the state after the last; see
        `prefix_states`.
    """

    summarize: Callable[[Any, ChunkVisibility], Any]
    states: Callable[[Any, Any, Bool[Array, "B chunks"] | None], tuple[Any, Any]]


def scan_chunks(
    step: Step,
    state: Any,
    inputs: Any,
    segments: Int[Array, "B T"] | None = None,
    *,
    chunk_size: int,
    strict: bool = False,
    recurrence: Recurrence | None = None,
) -> tuple[Any, Any]:
    """Applies state, outputs = step(state, chunk, visibility) to consecutive chunks, from the first to the last.

    The backward pass recomputes each chunk from the state before it, so that besides the inputs only one state per
    chunk is stored. With a recurrence, GPUs compute all chunks at once. The last chunk is padded to the chunk size with
    tokens that no query sees; a sequence of at most chunk_size tokens is a single chunk of its own length.

    Args:
      step: receives the state, a pytree of (B, C, ...) arrays and a `ChunkVisibility`, and returns the next state (of
        the same structure, shapes and dtypes) and a pytree of (B, C, ...) outputs.
      state: the state before the first token, any pytree of arrays; it belongs to segment 0.
      inputs: a pytree of (B, T, ...) arrays.
      segments: the segment of each token, from `segment_numbers`.
      chunk_size: C, at least 1.
      strict: if True, a token does not attend to itself.
      recurrence: that of the step's state; None walks from chunk to chunk on every platform.

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
        return x.reshape(batch, chunks, size, *x.shape[2:])

    def join(x: Array) -> Array:
        return x.reshape(batch, chunks * size, *x.shape[3:])[:, :length]

    if missing and segments is None:
        segments = jnp.zeros((batch, length), jnp.int32)
    if chunks == 1:
        segment = None if segments is None else jnp.zeros((batch,), jnp.int32)
        visibility, _ = _chunk_visibility(size, segments, segment, strict)
        return step(state, inputs, visibility)
    walk = _Walk(step, size, strict)
    chunked = (jax.tree.map(split, inputs), None if segments is None else split(segments, -1))
    state = vary_like(state, leaves)
    if recurrence is None:
        state, outputs = walk.one_by_one(state, *chunked)
    else:
        at_once = functools.partial(walk.all_at_once, recurrence)
        state, outputs = lax.platform_dependent(
            state, *chunked, cuda=at_once, rocm=at_once, default=walk.one_by_one
        )
    return state, jax.tree.map(join, outputs)


class _Walk(NamedTuple):
    """Both ways through chunks (B, chunks, C, ...); they return the last state and outputs (B, chunks, C, ...)."""

    step: Step
    size: int
    strict: bool

    def one_by_one(self, state: Any, inputs: Any, segments: Int[Array, "B chunks C"] | None) -> Any:
        """A loop over the chunks."""

        def one_chunk(carry: Any, chunk: Any) -> Any:
            state, segment = carry
            inputs, segments = chunk
            visibility, segment = _chunk_visibility(self.size, segments, segment, self.strict)
            state, outputs = self.step(state, inputs, visibility)
            return (state, segment), outputs

        segment = None if segments is None else jnp.zeros_like(segments, shape=segments.shape[:1])
        chunked = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, segments))
        carry = vary_like((state, segment), jax.tree.leaves((state, inputs, segments)))
        (state, _), outputs = lax.scan(jax.checkpoint(one_chunk, prevent_cse=False), carry, chunked)
        return state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)

    def all_at_once(
        self, recurrence: Recurrence, state: Any, inputs: Any, segments: Int[Array, "B chunks C"] | None
    ) -> Any:
        """The states before all chunks, then all outputs: kernels as many as the logarithm of the number of chunks."""
        before = keeps = None
        if segments is not None:
            # Numbers only grow along a row and padding has -1, so that the largest is the newest.
            after = lax.cummax(jnp.maximum(segments.max(axis=2), 0), axis=1)
            before = jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
            keeps = before == after

        def summarize(inputs: Any, segments: Any, before: Any) -> Any:
            visibility, _ = _chunk_visibility(self.size, segments, before, self.strict)
            return recurrence.summarize(inputs, visibility)

        def read(state: Any, inputs: Any, segments: Any, before: Any) -> Any:
            visibility, _ = _chunk_visibility(self.size, segments, before, self.strict)
            return self.step(state, inputs, visibility)[1]

        chunked = (inputs, segments, before)
        states, state = recurrence.states(state, _each_chunk(summarize, *chunked), keeps)
        return state, _each_chunk(read, states, *chunked)


def _each_chunk(function: Callable[..., Any], *trees: Any) -> Any:
    """The function of each chunk of arrays (B, chunks, ...); the backward pass computes anew what is not SAVED."""
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    return jax.vmap(jax.checkpoint(function, policy=policy), in_axes=1, out_axes=1)(*trees)


def scan_both_directions(
    step: Step,
    state: Any,
    inputs: Any,
    segments: Int[Array, "B T"],
    *,
    chunk_size: int,
    recurrence: Recurrence | None = None,
) -> tuple[Any, Any]:
    """Two scans: one over each token and those before it, one (from the end) over those after it.

    Args:
      step, inputs, segments, chunk_size, recurrence: as for `scan_chunks`.
      state: the state before any token, with which both scans begin.

    Returns:
      The outputs over the past and those over the future, (B, T, ...) arrays in the order of the inputs.
    """

    def reverse(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[:, ::-1], tree)

    options: dict[str, Any] = {"chunk_size": chunk_size, "recurrence": recurrence}
    _, past = scan_chunks(step, state, inputs, segments, **options)
    # The last segment comes first when the sequence is read from its end.
    backwards = jnp.where(segments < 0, -1, segments.max(axis=1)[:, None] - segments)
    _, future = scan_chunks(step, state, reverse(inputs), reverse(backwards), strict=True, **options)
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
