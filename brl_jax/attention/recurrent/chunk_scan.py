"""The scan over chunks that mechanisms with a recurrent state share.

A sequence is cut into chunks of C tokens. Inside a chunk, all pairs of queries and keys are computed at once, in matrix
products that are quadratic only in C. Earlier chunks reach a chunk only through the state. This is the chunked form of
linear attention (Yang et al. 2023, arXiv:2312.06635). A mechanism brings its state (any pytree) and its step from one
chunk to the next; padding and packed sequences are handled here. Chunks and states are computed in float32 for every
input dtype, because a sum over 64k tokens does not fit into the 8 significant bits of bfloat16.

There are two schedules. On a CPU, chunks run one after the other and stay in cache. A GPU would wait for the kernel
launches of each chunk, so it computes all chunks at once: first their contributions to the state, then the states
before all chunks by an associative scan, then the outputs. The choice is made when the call is lowered. On a mesh that
shards sequences, each device runs one of these schedules on its own shard; see `scan_sharded`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from brl_jax.attention.core.by_platform import Form, branches, recomputed, traced_for
from brl_jax.attention.core.query_blocks import in_blocks
from brl_jax.attention.core.segments import run_numbers
from brl_jax.attention.core.varying import of_floats, vary_like
from brl_jax.attention.recurrent.prefix_states import Join, joined
from brl_jax.attention.recurrent.scan_sharded import scan_shards
from brl_jax.sharding import sequence_axis
from pallas_kernels.absent import existing

#: Checkpoint name of a chunk's small arrays that take many kernels to compute. When all chunks run at once,
#: the backward pass saves them instead of recomputing them.
SAVED = "saved of a chunk"


class ChunkVisibility(NamedTuple):
    """Which tokens of a chunk interact with each other and with the state. None means True everywhere.

    Attributes:
      pairs: whether query i attends to key j of the chunk; the leading axis is 1 if all rows of the batch agree.
      reads_state: whether a query reads the state, which covers earlier tokens of its segment.
      keeps_state: whether the state's contents survive the chunk; a new segment drops them.
      enters_state: whether a key is added to the state after the chunk.
    """

    pairs: Bool[Array, "#B C C"]
    reads_state: Bool[Array, "B C"] | None
    keeps_state: Bool[Array, "B"] | None
    enters_state: Bool[Array, "B C"] | None


#: (state, inputs of one chunk, visibility) -> (next state, outputs of the chunk).
Step = Callable[[Any, Any, ChunkVisibility], tuple[Any, Any]]


class Recurrence(NamedTuple):
    """How chunks change a mechanism's state, so that the states before all chunks can be computed at once.

    Attributes:
      summarize: (inputs of one chunk, visibility) -> the chunk's summary, any pytree of arrays (B, ...).
      states: (state, summaries, keeps) -> the states before each chunk and the state after the last; see
        `prefix_states`.
      join: joins the summaries of two consecutive runs of chunks; see `prefix_states.Join`.
    """

    summarize: Callable[[Any, ChunkVisibility], Any]
    states: Callable[[Any, Any, Bool[Array, "B chunks"] | None], tuple[Any, Any]]
    join: Join


def scan_chunks(
    step: Step,
    state: Any,
    inputs: Any,
    segments: Int[Array, "B T"] | None = None,
    *,
    whole: dict[str, Any] | None = None,
    chunk_size: int,
    strict: bool = False,
    recurrence: Recurrence | None = None,
) -> tuple[Any, Any]:
    """Applies state, outputs = step(state, chunk, visibility) to consecutive chunks, from the first to the last.

    The backward pass recomputes each chunk from the state before it, so it stores only the inputs and one state per
    chunk. With a recurrence, GPUs compute all chunks at once. The last chunk is padded with tokens that no query
    sees; a sequence of at most chunk_size tokens is one shorter chunk.

    Args:
      step: gets the state, a pytree of (B, C, ...) arrays and a `ChunkVisibility`, and returns the next state (with
        the same structure, shapes and dtypes) and a pytree of (B, C, ...) outputs.
      state: the state before the first token, any pytree of arrays; it belongs to segment 0.
      inputs: a pytree of (B, T, ...) arrays.
      segments: the segment of each token, from `segment_numbers`.
      whole: arrays without a token axis, which are added to each chunk's dict of inputs. The step must not close
        over arrays.
      chunk_size: C, at least 1.
      strict: whether a token does not attend to itself.
      recurrence: how the step changes the state; None runs chunk by chunk on every platform.

    Returns:
      The state after the last token, and the outputs as (B, T, ...) arrays.
    """
    length = jax.tree.leaves(inputs)[0].shape[1]
    walk = functools.partial(_walk, step, min(length, chunk_size), strict, recurrence)
    axis = None if recurrence is None else sequence_axis(length, chunk_size)
    if axis is None or recurrence is None:
        segment = None if segments is None else jnp.zeros(segments.shape[:1], segments.dtype)
        return walk(whole).through(state, segment, inputs, segments)
    return scan_shards(walk, recurrence.states, whole, state, inputs, segments, axis)


def kept_by_scan(
    step: Step, state: Any, inputs: Any, *, chunk_size: int, recurrence: Recurrence
) -> dict[str, Any]:
    """Options `forms` and `kept` with which `dispatch` keeps the states before all chunks for the gradient of
    `scan_chunks(step, state, inputs, segments)`, instead of scanning again.

    Empty if there is one chunk, or if a mesh shards the sequences.
    """
    length = jax.tree.leaves(inputs)[0].shape[1]
    if length <= chunk_size or sequence_axis(length, chunk_size) is not None:
        return {}
    walk = _Walk(step, chunk_size, False, recurrence)

    def form(run: Callable[..., Any], gradient: Callable[..., Any]) -> Form:
        return Form(
            functools.partial(walk.with_states, functools.partial(run, keep=True)),
            lambda operands, results, kept, d_results: gradient(operands, kept, d_results),
        )

    at_once = form(walk.all_at_once, walk.gradient_at_once)
    one_by_one = form(walk.one_by_one, walk.gradient_one_by_one)
    chunks = -(-length // chunk_size)
    return {
        "forms": {"default": one_by_one, "cuda": at_once, "rocm": at_once},
        "kept": jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0], chunks, *x.shape[1:]), x.dtype), state
        ),
    }


def _walk(
    step: Step, size: int, strict: bool, recurrence: Recurrence | None, whole: dict[str, Any] | None
) -> _Walk:
    """The walk whose step and summary also get the arrays in `whole`."""
    if not whole:
        return _Walk(step, size, strict, recurrence)

    def whole_step(state: Any, chunk: Any, visibility: ChunkVisibility) -> tuple[Any, Any]:
        return step(state, chunk | whole, visibility)

    def summarize(chunk: Any, visibility: ChunkVisibility) -> Any:
        assert recurrence is not None
        return recurrence.summarize(chunk | whole, visibility)

    return _Walk(whole_step, size, strict, recurrence and recurrence._replace(summarize=summarize))


class _Walk(NamedTuple):
    """The schedules for a sequence in chunks of `size` tokens."""

    step: Step
    size: int
    strict: bool
    recurrence: Recurrence | None

    def through(
        self, state: Any, segment: Int[Array, "B"] | None, inputs: Any, segments: Int[Array, "B T"] | None
    ) -> tuple[Any, Any]:
        """The state after arrays (B, T, ...) and their outputs; `segment` is the state's segment before them."""
        length = jax.tree.leaves(inputs)[0].shape[1]
        if length == self.size:
            visibility, _ = _chunk_visibility(self.size, segments, segment, self.strict)
            return self.step(state, inputs, visibility)
        operands = self._chunked(state, inputs, segments, segment)
        if self.recurrence is None:
            state, outputs, _ = self.one_by_one(*operands)
        else:
            at_once = self.all_at_once
            state, outputs, _ = branches(*operands, cuda=at_once, rocm=at_once, default=self.one_by_one)
        return state, _join(outputs, length)

    def with_states(
        self, run: Callable[..., Any], state: Any, inputs: Any, segments: Int[Array, "B T"] | None
    ) -> tuple[Any, Any]:
        """((The state after arrays (B, T, ...), their outputs), the states before all chunks)."""
        operands = self._chunked(state, inputs, segments)
        last, outputs, states = run(*operands)
        return (last, _join(outputs, jax.tree.leaves(inputs)[0].shape[1])), states

    def _chunked(self, state: Any, inputs: Any, segments: Any, segment: Any = None) -> tuple[Any, ...]:
        """The operands of a schedule; the state belongs to segment 0 by default."""
        chunks, split = self._split(inputs, segments)
        if split is not None and segment is None:
            segment = jnp.zeros(split.shape[:1], split.dtype)
        return vary_like(state, jax.tree.leaves(inputs)), segment, chunks, split

    def gradient_one_by_one(self, operands: Any, states: Any, d_results: Any) -> tuple[Any, Any, None]:
        """The gradients of state and inputs, by a loop from the last chunk to the first."""
        _, inputs, _ = operands
        _, segment, chunks, segments = self._chunked(*operands)
        before, _ = _segments_before(segment, segments)
        d_last, d_outputs = d_results
        d_outputs, _ = self._split(d_outputs, None)

        def one_chunk(d_state: Any, chunk: Any) -> Any:
            state, inputs, segments, before, d_outputs = chunk

            def run(state: Any, inputs: Any) -> Any:
                visibility, _ = _chunk_visibility(self.size, segments, before, self.strict)
                return self.step(state, inputs, visibility)

            return of_floats(jax.vjp(run, state, inputs)[1]((d_state, d_outputs)))

        chunked = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (states, chunks, segments, before, d_outputs))
        d_last = vary_like(d_last, jax.tree.leaves(chunked))
        d_state, d_chunks = lax.scan(one_chunk, d_last, chunked, reverse=True)
        d_chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), d_chunks)
        return d_state, _join(d_chunks, jax.tree.leaves(inputs)[0].shape[1]), None

    def gradient_at_once(self, operands: Any, states: Any, d_results: Any) -> tuple[Any, Any, None]:
        """The gradients of state and inputs, for all chunks at once."""
        _, inputs, _ = operands
        state, segment, chunks, segments = self._chunked(*operands)
        d_last, d_outputs = d_results
        d_outputs, _ = self._split(d_outputs, None)

        def outputs(states: Any, chunks: Any) -> Any:
            return self._read(states, chunks, segment, segments)

        def every_state(state: Any, chunks: Any) -> Any:
            return self._states(state, segment, chunks, segments)

        d_states, d_chunks = of_floats(jax.vjp(outputs, states, chunks)[1](d_outputs))
        d_state, more = of_floats(jax.vjp(every_state, state, chunks)[1]((d_states, d_last)))
        d_chunks = jax.tree.map(jnp.add, d_chunks, more)
        return d_state, _join(d_chunks, jax.tree.leaves(inputs)[0].shape[1]), None

    def _split(
        self, inputs: Any, segments: Int[Array, "B T"] | None
    ) -> tuple[Any, Int[Array, "B chunks C"] | None]:
        """Arrays (B, T, ...) as chunks (B, chunks, C, ...), the last one padded with tokens that no query sees."""
        batch, length = jax.tree.leaves(inputs)[0].shape[:2]
        if length % self.size and segments is None:
            segments = jnp.zeros((batch, length), jnp.int32)
        split = functools.partial(in_blocks, size=self.size)
        return jax.tree.map(split, inputs), None if segments is None else split(segments, fill=-1)

    def one_by_one(
        self,
        state: Any,
        segment: Int[Array, "B"] | None,
        inputs: Any,
        segments: Int[Array, "B chunks C"] | None,
        keep: bool = False,
    ) -> Any:
        """The last state, the outputs (B, chunks, C, ...) and, with `keep`, the states before all chunks, by a loop."""

        def one_chunk(carry: Any, chunk: Any) -> Any:
            state, segment = carry
            inputs, segments = chunk
            visibility, segment = _chunk_visibility(self.size, segments, segment, self.strict)
            after, outputs = self.step(state, inputs, visibility)
            return (after, segment), (outputs, state if keep else None)

        chunked = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, segments))
        carry = vary_like((state, segment), jax.tree.leaves((state, inputs, segments)))
        (state, _), every = lax.scan(functools.partial(recomputed, one_chunk), carry, chunked)
        return state, *jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), every)

    def all_at_once(
        self,
        state: Any,
        segment: Int[Array, "B"] | None,
        inputs: Any,
        segments: Int[Array, "B chunks C"] | None,
        keep: bool = False,
    ) -> Any:
        """`one_by_one`, in a number of kernels that grows with the logarithm of the number of chunks."""
        states, last = self._states(state, segment, inputs, segments)
        return last, self._read(states, inputs, segment, segments), states if keep else None

    def _states(self, state: Any, segment: Any, inputs: Any, segments: Any) -> tuple[Any, Any]:
        """The states before all chunks and after the last."""
        assert self.recurrence is not None
        before, keeps = _segments_before(segment, segments)
        summaries = _each_chunk(self._summarize, inputs, segments, before)
        return self.recurrence.states(state, summaries, keeps)

    def _read(self, states: Any, inputs: Any, segment: Any, segments: Any) -> Any:
        def read(state: Any, inputs: Any, segments: Any, before: Any) -> Any:
            visibility, _ = _chunk_visibility(self.size, segments, before, self.strict)
            return self.step(state, inputs, visibility)[1]

        before, _ = _segments_before(segment, segments)
        return _each_chunk(read, states, inputs, segments, before)

    def summary(
        self, inputs: Any, segments: Int[Array, "B T"] | None, segment: Int[Array, "B"] | None
    ) -> Any:
        """What all chunks of arrays (B, T, ...) do to a state in `segment`."""
        recurrence = self.recurrence
        assert recurrence is not None
        chunks, segments = self._split(inputs, segments)
        before, keeps = _segments_before(segment, segments)
        operands = (chunks, segments, before, keeps)

        def first(*operands: Any) -> Any:
            inputs, segments, before, _ = jax.tree.map(lambda x: x[:, 0], operands)
            return self._summarize(inputs, segments, before)

        def one_by_one(*operands: Any) -> Any:
            def one_chunk(summary: Any, chunk: Any) -> Any:
                inputs, segments, before, keeps = chunk
                return recurrence.join(summary, self._summarize(inputs, segments, before), keeps), None

            rest = jax.tree.map(lambda x: jnp.moveaxis(x[:, 1:], 1, 0), operands)
            return lax.scan(functools.partial(recomputed, one_chunk), first(*operands), rest)[0]

        def at_once(inputs: Any, segments: Any, before: Any, keeps: Any) -> Any:
            return joined(recurrence.join, _each_chunk(self._summarize, inputs, segments, before), keeps)

        return branches(*operands, cuda=at_once, rocm=at_once, default=one_by_one)

    def _summarize(self, inputs: Any, segments: Any, before: Any) -> Any:
        assert self.recurrence is not None
        visibility, _ = _chunk_visibility(self.size, segments, before, self.strict)
        return self.recurrence.summarize(inputs, visibility)


def _join(outputs: Any, length: int) -> Any:
    """Arrays (B, chunks, C, ...) as (B, T, ...)."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length], outputs)


def _segments_before(segment: Int[Array, "B"] | None, segments: Int[Array, "B chunks C"] | None) -> Any:
    """The state's segment before each chunk and whether the chunk keeps the state; None if all is one segment."""
    if segments is None or segment is None:
        return None, None
    # Numbers grow along a row and padding has -1, so the largest is the newest.
    after = lax.cummax(jnp.maximum(segments.max(axis=2), segment[:, None]), axis=1)
    before = jnp.concatenate([segment[:, None], after[:, :-1]], axis=1)
    return before, before == after


def _each_chunk(function: Callable[..., Any], *trees: Any) -> Any:
    """Maps the function over chunks of arrays (B, chunks, ...); the backward pass recomputes what is not SAVED, and all
    of it outside a form."""
    if traced_for.value is None:
        return recomputed(jax.vmap(function, in_axes=1, out_axes=1), *trees)
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    return jax.vmap(jax.checkpoint(function, policy=policy), in_axes=1, out_axes=1)(*trees)


def scan_both_directions(
    step: Step,
    state: Any,
    inputs: Any,
    segments: Int[Array, "B T"],
    **options: Any,
) -> tuple[Any, Any]:
    """Two scans: one over each token and the tokens before it, and one, from the end, over the tokens after it.

    Args:
      step, inputs, segments, options: as for `scan_chunks`.
      state: the state before any token, where both scans begin.

    Returns:
      The outputs over the past and over the future, (B, T, ...) arrays in the order of the inputs.
    """

    def reverse(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[:, ::-1], tree)

    _, past = scan_chunks(step, state, inputs, segments, **options)
    # Read from the end, the last segment comes first.
    backwards = jnp.where(segments < 0, -1, segments.max(axis=1)[:, None] - segments)
    _, future = scan_chunks(step, state, reverse(inputs), reverse(backwards), strict=True, **options)
    return past, reverse(future)


def segment_numbers(
    batch: int, length: int, lengths: Int[Array, "B"] | None, segment_ids: Int[Array, "B T"] | None
) -> Int[Array, "B T"] | None:
    """Numbers each token's segment from 0 along the row; padding gets -1.

    A segment is a run of equal ids. Returns None if the whole batch is one segment without padding.
    """
    if lengths is None and segment_ids is None:
        return None
    segments = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else run_numbers(segment_ids)
    if lengths is not None:
        segments = jnp.where(existing(lengths, length), segments, -1)
    return segments


def _chunk_visibility(
    length: int, segments: Int[Array, "B C"] | None, segment: Int[Array, "B"] | None, strict: bool
) -> tuple[ChunkVisibility, Int[Array, "B"] | None]:
    """The visibility within a chunk, and the state's segment after it; `segment` is the one before it."""
    pairs = jnp.tri(length, k=-1 if strict else 0, dtype=bool)[None]
    if segments is None or segment is None:
        return ChunkVisibility(pairs, None, None, None), None
    # Numbers grow along a row and padding has -1, so the largest is the newest.
    newest = jnp.maximum(segment, segments.max(axis=1))
    pairs = pairs & (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
    visibility = ChunkVisibility(
        pairs, segments == segment[:, None], newest == segment, segments == newest[:, None]
    )
    return visibility, newest
