"""Causal attention whose past is a state of fixed size: the walk over chunks that all such mechanisms share.

A sequence is cut into chunks. Within a chunk every query meets every key, in products that are quadratic in the
chunk only; what came before the chunk is known through the state alone. Mechanisms differ in their state (any
pytree) and in their step from one chunk to the next; tokens that are not there and borders between packed sequences
are the same for all of them. Chunks are computed in float32 whatever the inputs' type, and so is the state: sums over
64k tokens don't fit into 8 bits of mantissa.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.arguments import check_dtypes, check_lengths, check_segments, is_int
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.core.varying import vary_like

# Step of a mechanism: state, chunk of the inputs, what its tokens see -> next state, outputs.
Step = Callable[[Any, Any, "Sight"], tuple[Any, Any]]


def scan_chunks(
    step: Step,
    state: Any,
    inputs: Any,
    runs: Int[Array, "B T"] | None = None,
    *,
    chunk_size: int,
    strict: bool = False,
) -> tuple[Any, Any]:
    """Walks over consecutive chunks: state, outputs = step(state, chunk, sight), from the first to the last.

    The backward pass computes each chunk anew from the state before it: besides the inputs, only one state a chunk is
    stored. A last chunk that is not full is filled up with tokens that are not there; a sequence of at most
    chunk_size tokens is one chunk of its length.

    Args:
      step: takes the state, a pytree of (B, C, ...) arrays and a `Sight`, and returns the next state (of the same
        structure, shapes and dtypes) and a pytree of (B, C, ...) outputs.
      state: before the first token, any pytree of arrays; it belongs to run 0.
      inputs: pytree of (B, T, ...) arrays.
      runs: of the tokens, from `token_runs`.
      chunk_size: C, at least 1.
      strict: a token does not see itself.

    Returns:
      The state after the last token and the outputs as (B, T, ...) arrays.
    """
    leaves = jax.tree.leaves(inputs)
    batch, length = leaves[0].shape[:2]
    size = min(length, chunk_size)
    chunks = -(-length // size)
    missing = chunks * size - length

    def cut(x: Array, filling: int = 0) -> Array:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=filling)
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * size, *x.shape[3:])[:, :length]

    def one(carry: Any, chunk: Any) -> Any:
        state, run = carry
        inputs, runs = chunk
        sight, run = _look(size, runs, run, strict)
        state, outputs = step(state, inputs, sight)
        return (state, run), outputs

    if missing and runs is None:
        runs = jnp.zeros((batch, length), jnp.int32)
    run = None if runs is None else jnp.zeros((batch,), jnp.int32)
    if chunks == 1:
        (state, _), outputs = one((state, run), (inputs, runs))
        return state, outputs
    carry = vary_like((state, run), leaves)
    chunked = (jax.tree.map(cut, inputs), None if runs is None else cut(runs, -1))
    (state, _), outputs = lax.scan(jax.checkpoint(one, prevent_cse=False), carry, chunked)
    return state, jax.tree.map(join, outputs)


# --- Which tokens see which ---


def token_runs(
    batch: int, length: int, lengths: Int[Array, "B"] | None, segment_ids: Int[Array, "B T"] | None
) -> Int[Array, "B T"] | None:
    """The number of each token's run of equal segment ids, from 0 on; -1 from each length on. None: all are 0."""
    if lengths is None and segment_ids is None:
        return None
    runs = jnp.zeros((batch, length), jnp.int32)
    if segment_ids is not None:
        runs = runs.at[:, 1:].set(
            jnp.cumsum(segment_ids[:, 1:] != segment_ids[:, :-1], axis=1, dtype=jnp.int32)
        )
    if lengths is not None:
        runs = jnp.where(jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None], runs, -1)
    return runs


class Sight(NamedTuple):
    """What the tokens of a chunk see. None in place of an array stands for True everywhere.

    Attributes:
      pairs: whether query i sees key j of the chunk; the leading axis is 1 if all rows are alike.
      past: whether a query sees what the state holds.
      stays: whether the state's content outlives the chunk.
      enters: whether a key goes into the state.
    """

    pairs: Bool[Array, "#B C C"]
    past: Bool[Array, "B C"] | None
    stays: Bool[Array, "B"] | None
    enters: Bool[Array, "B C"] | None


def _look(
    length: int, runs: Int[Array, "B C"] | None, run: Int[Array, "B"] | None, strict: bool
) -> tuple[Sight, Int[Array, "B"] | None]:
    """The sight of a chunk, and the run that the state belongs to afterwards; `run` is that before."""
    pairs = jnp.tri(length, k=-1 if strict else 0, dtype=bool)[None]
    if runs is None or run is None:
        return Sight(pairs, None, None, None), None
    # Runs only grow, and tokens that are not there have -1: the largest is the newest.
    newest = jnp.maximum(run, runs.max(axis=1))
    pairs = pairs & (runs[:, :, None] == runs[:, None, :]) & (runs >= 0)[:, None, :]
    return Sight(pairs, runs == run[:, None], newest == run, runs == newest[:, None]), newest


def keep(condition: Bool[Array, " ..."] | None, x: Array) -> Array:
    """x where the condition, which broadcasts to x's leading axes, holds, else 0; None holds everywhere."""
    if condition is None:
        return x
    return jnp.where(
        condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, jnp.zeros((), x.dtype)
    )


# --- Chunks that count from the first token of all, fed in pieces ---


class Places(NamedTuple):
    """Where a piece of at most C tokens lies that begins anywhere in a chunk of C tokens: in that and the next chunk.

    Its keys are the current chunk's C slots, then the new tokens. Places count from the current chunk's first token.

    Attributes:
      query: of the new tokens.
      key: of the keys.
      there: whether a key exists.
      source: for each slot of the chunk that is current afterwards, the key that belongs there, if `left`.
      left: whether that slot is taken.
      total: tokens since the current chunk began, the new ones included.
      new: how many of the new tokens exist.
    """

    query: Int[Array, "B L"]
    key: Int[Array, "B C+L"]
    there: Bool[Array, "B C+L"]
    source: Int[Array, "B C"]
    left: Bool[Array, "B C"]
    total: Int[Array, "B"]
    new: Int[Array, "B"]

    def inside(self, chunk_size: int) -> Bool[Array, "B L C+L"]:
        """Whether a new token sees a key of its own chunk."""
        same = self.query[..., None] // chunk_size == self.key[:, None] // chunk_size
        return self.there[:, None] & same & (self.key[:, None] <= self.query[..., None])

    def completed(self, chunk_size: int) -> Bool[Array, "B C+L"]:
        """Whether a key belongs to the current chunk and that chunk is complete with the new tokens."""
        return self.there & (self.key < chunk_size) & (self.total >= chunk_size)[:, None]

    def current(self, old: Float[Array, "B C K H"], new: Float[Array, "B L K H"]) -> Float[Array, "B C K H"]:
        """What is left of the current chunk, from what its slots held and the new tokens bring."""
        both = jnp.concatenate([old, new], axis=1)
        return keep(self.left, jnp.take_along_axis(both, self.source[..., None, None], axis=1))


def piece_places(
    filled: Int[Array, "B"], length: int, exists: Bool[Array, "B L"] | None, chunk_size: int
) -> Places:
    """The places of `length` new tokens behind the `filled` ones of the current chunk."""
    batch = filled.shape[0]
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    slots = jnp.arange(chunk_size, dtype=jnp.int32)[None]
    exists = jnp.ones((batch, length), bool) if exists is None else exists
    count = jnp.sum(exists, axis=1, dtype=jnp.int32)
    query = filled[:, None] + steps
    key = jnp.concatenate([jnp.broadcast_to(slots, (batch, chunk_size)), query], axis=1)
    there = jnp.concatenate([slots < filled[:, None], exists], axis=1)
    total = filled + count
    # A slot's token is an old one, or one of the new ones that follow them.
    places = slots + jnp.where(total >= chunk_size, chunk_size, 0)[:, None]
    source = jnp.where(places < filled[:, None], places, chunk_size + places - filled[:, None])
    source = jnp.minimum(source, chunk_size + length - 1)
    return Places(query, key, there, source, places < total[:, None], total, count)


# --- Layout: heads before tokens, and the queries of a group of heads as rows of one matrix ---


def heads_first(x: Float[Array, "B C K H"]) -> Float[Array, "B K C H"]:
    """Float32 (or wider), as chunks are computed in."""
    return jnp.swapaxes(x, 1, 2).astype(accumulation_dtype(x.dtype))


def group_rows(x: Float[Array, "B C N H"], kv_heads: int) -> Float[Array, "B K G*C H"]:
    batch, length, heads, size = x.shape
    return heads_first(x).reshape(batch, kv_heads, heads // kv_heads * length, size)


def ungroup_rows(x: Float[Array, "B K G*C H"], length: int) -> Float[Array, "B C N H"]:
    return jnp.swapaxes(x.reshape(x.shape[0], -1, length, x.shape[-1]), 1, 2)


def mask_scores(pairs: Bool[Array, "#B C C"], scores: Float[Array, "B K G*C C"]) -> Float[Array, "B K G*C C"]:
    """The scores of the pairs that see each other, else 0."""
    batch, heads, rows, length = scores.shape
    grouped = scores.reshape(batch, heads, rows // length, length, length)
    return jnp.where(pairs[:, None, None], grouped, jnp.zeros((), scores.dtype)).reshape(scores.shape)


def mask_rows(past: Bool[Array, "B C"] | None, x: Float[Array, "B K G*C H"]) -> Float[Array, "B K G*C H"]:
    """The rows of queries that see the past, else 0."""
    if past is None:
        return x
    grouped = x.reshape(*x.shape[:2], -1, past.shape[1], x.shape[-1])
    return keep(past[:, None, None], grouped).reshape(x.shape)


# --- Arguments ---


def check_chunked_call(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool,
    state: Any,
    return_state: bool,
    chunk_size: Any,
    implementation: Any,
) -> None:
    """Raises ValueError for arrays, states and sizes that an attention function over chunks cannot take."""
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    require(
        is_int(chunk_size) and chunk_size >= 1, f"chunk_size must be an int of at least 1, got {chunk_size!r}"
    )
    require(
        not is_causal or query.shape[1] == key.shape[1],
        f"key must have query's length {query.shape[1]} where is_causal, got {key.shape[1]}",
    )
    for name, given in (("state", state is not None), ("return_state", return_state)):
        require(
            is_causal or not given, f"{name} needs is_causal=True: a state is what earlier tokens left behind"
        )
    require(implementation in (None, "xla"), f"implementation must be None or 'xla', got {implementation!r}")


def check_runs(query: Array, key: Array, key_value_seq_lengths: Any, segment_ids: Any) -> tuple[Any, Any]:
    """The lengths and segment ids of the keys, checked; segments need as many queries as keys."""
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, key.shape[0])
    if segment_ids is not None:
        require(
            not isinstance(segment_ids, (tuple, list)) and query.shape[1] == key.shape[1],
            "segment_ids must be one array for queries and keys, which must be the same tokens, got "
            f"{type(segment_ids).__name__} with {query.shape[1]} queries and {key.shape[1]} keys",
        )
    return lengths, check_segments(segment_ids, query.shape, key.shape)[1]


def check_state(state: Any, expected: Any, maker: str) -> Any:
    """The state; raises ValueError unless it has the type, shapes and dtypes of `expected`, made by `maker`."""
    if state is None:
        return expected
    require(
        type(state) is type(expected),
        f"state must be a {type(expected).__name__} from {maker}, got {type(state).__name__}",
    )
    for name, leaf in expected._asdict().items():
        given = getattr(state, name)
        require(
            (leaf is None) == (given is None)
            and (leaf is None or (given.shape == leaf.shape and given.dtype == leaf.dtype)),
            f"state.{name} must be {_describe(leaf)}, got {_describe(given)}",
        )
    return state


def _describe(leaf: Any) -> str:
    return "None" if leaf is None else f"{leaf.dtype} of shape {leaf.shape}"
