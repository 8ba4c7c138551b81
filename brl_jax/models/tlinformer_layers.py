"""The layers of a TLinFormer, as functions of a plain decoder's stacked parameters, and its training pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.compressed.compress import compress
from brl_jax.attention.compressed.xla import read_cache
from brl_jax.attention.dense.full import full_attention
from brl_jax.layers.compressed.tlinformer import TLinFormerConfig
from brl_jax.layers.core.modules import FeedForward, merge_heads, norm, project_qkv
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.sharding import shard_call


class _Mixer(nn.Module):
    """The projections of a full attention layer."""

    dimensions: Dimensions

    @nn.compact
    def __call__(self, x: Array, positions: Array | None) -> Any:
        """Returns query, key and value of rows at `positions`; without positions, the output projection of heads x."""
        if positions is None:
            return merge_heads(self.dimensions, x)
        return project_qkv(self.dimensions, x, positions)


class _Layer(nn.Module):
    """A layer of a plain decoder without its attention, which the caller computes. Parameters are `Block`'s."""

    dimensions: Dimensions

    def setup(self):
        d = self.dimensions
        self.mixer = _Mixer(d)
        self.mixer_norm = norm(d, name="mixer_norm")
        self.feed_forward = FeedForward(d)
        self.feed_forward_norm = norm(d, name="feed_forward_norm")
        self.dropout = nn.Dropout(d.dropout)

    def project(self, x, positions):
        return self.mixer(self.mixer_norm(x), positions)

    def finish(self, x, attended, deterministic):
        x = x + self.dropout(self.mixer(attended, None), deterministic=deterministic)
        mixed = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(mixed, deterministic=deterministic)


def _rows_of_heads(query: Array, kv_heads: int) -> Array:
    """Reshapes (B, T, N, H) to (B, T * N / K, K, H): query heads that share a key head become rows of that head."""
    batch, count, heads, width = query.shape
    rows = query.reshape(batch, count, kv_heads, heads // kv_heads, width)
    return jnp.moveaxis(rows, 3, 2).reshape(batch, -1, kv_heads, width)


def _heads_of_rows(rows: Array, query: Array) -> Array:
    """Inverts `_rows_of_heads`, into the shape of `query`."""
    batch, count, heads, width = query.shape
    kv_heads = rows.shape[2]
    return jnp.moveaxis(rows.reshape(batch, count, heads // kv_heads, kv_heads, width), 2, 3).reshape(
        query.shape
    )


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers, as functions of their stacked parameters; see `_Layer`."""

    mechanism: TLinFormerConfig
    dimensions: Dimensions
    params: Any
    key: Array | None = None  # for dropout; None disables it

    @property
    def blocks(self) -> range:
        depth = jax.tree.leaves(self.params)[0].shape[0]
        return range(0, depth, self.mechanism.group)

    def _apply(self, number: int, *args: Any, **kwargs: Any) -> Any:
        params = jax.tree.map(lambda leaf: leaf[number], self.params)
        return _Layer(self.dimensions, parent=None).apply({"params": params}, *args, **kwargs)

    def project(self, number: int, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        return self._apply(number, x, positions, method="project")

    def finish(self, number: int, x: Array, attended: Array, stream: int = 0) -> Array:
        """Finishes the layer after its attention; each use of its parameters needs another `stream` of dropout."""
        if self.key is None:
            return self._apply(number, x, attended, True, method="finish")
        key = jax.random.fold_in(jax.random.fold_in(self.key, number), stream)
        return self._apply(number, x, attended, False, method="finish", rngs={"dropout": key})

    def folded(self, number: Any) -> Layers:
        """Returns the same layers with the dropout of window or piece `number`."""
        return (
            self if self.key is None else dataclasses.replace(self, key=jax.random.fold_in(self.key, number))
        )

    def attend(self, query: Array, key: Array, value: Array, **kwargs: Any) -> Array:
        implementation = self.dimensions.implementation
        implementation = None if implementation in ("pallas", "pallas_interpret") else implementation
        return full_attention(query, key, value, implementation=implementation, **kwargs)

    def attend_history(self, query: Array, key: Array, value: Array, length: Any) -> Array:
        """Attends from queries (B, T, N, H) to the first `length` of the keys (B, S, K, H); zeros if length is 0."""
        implementation = self.dimensions.implementation
        rows = _rows_of_heads(query, key.shape[2])
        lengths = jnp.broadcast_to(jnp.asarray(length, jnp.int32), query.shape[:1])

        # Every device reads the whole history: `compress` alone would sum over devices in each window of the loop.
        def attend(rows: Array, key: Array, value: Array, lengths: Array) -> Any:
            return compress(
                rows, key, None, value, gamma=None, key_value_seq_lengths=lengths, scale=query.shape[3] ** -0.5,
                implementation=None if implementation == "cudnn" else implementation,
            )  # fmt: skip

        names = ("batch", None, "kv_heads", None)
        out = shard_call(attend, (rows, key, value, lengths), (names, names, names, ("batch",)), names)
        return _heads_of_rows(out, query)

    def attend_kept(self, query: Array, key: Array, value: Array, length: Any) -> Array:
        """`attend_history` for a cache's keys and values (B, K, S, H), which it does not copy."""
        if query.shape[1] > 1:
            rows = jnp.swapaxes(_rows_of_heads(query, key.shape[1]), 1, 2)
            out = read_cache(rows, key, value, jnp.asarray(length, jnp.int32), scale=query.shape[3] ** -0.5)
            return _heads_of_rows(jnp.swapaxes(out, 1, 2), query)
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        return self.attend(query, key, value, is_causal=True, query_offset=length - 1)

    def context(
        self, first: int, x: Array, query: Array, read: Array, positions: Array, count: Any
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Passes the context through a block.

        Args:
          first: number of the block's first layer.
          x: the context's rows (B, C, D); the first `count` are valid.
          query, read: the context's queries in that layer, and what they read from the history.

        Returns:
          Its rows in the restored history, and its keys and values in the layers after the first.
        """
        lengths = jnp.broadcast_to(jnp.asarray(count, jnp.int32), x.shape[:1])
        context = self.finish(first, x, read, 1)
        pairs = []
        last = first + self.mechanism.group - 1
        for number in range(first + 1, last + 1):
            own, key, value = self.project(number, context, positions)
            pairs.append((key, value))
            if number < last:
                seen = self.attend(own, key, value, key_value_seq_lengths=lengths)
                context = self.finish(number, context, seen, 1)
        return self.restore(first, x, query, pairs[-1], count), pairs

    def restore(self, first: int, x: Array, query: Array, pair: tuple[Array, Array], count: Any) -> Array:
        """Returns rows of the history (B, T, D) for the next block; `query` comes from this block's first layer."""
        lengths = jnp.broadcast_to(jnp.asarray(count, jnp.int32), x.shape[:1])
        read = self.attend(query, *pair, key_value_seq_lengths=lengths)
        return self.finish(first + self.mechanism.group - 1, x, read, 2)


def train_window(
    layers: Layers,
    number: Int[Array, ""],
    num_context: Array,
    x: Float[Array, "B S D"],
    shared: tuple[Array, ...],
) -> Float[Array, "B T D"]:
    """Returns the outputs of window `number`, given the sequence's rows x and its layer-0 queries, keys and values."""
    m = layers.mechanism
    size, history = m.window, number * m.window
    windows = x.shape[1] // size
    slots = jnp.arange(int(m.context_sizes(windows).max()), dtype=jnp.int32)
    context_places = jnp.minimum(history - num_context + slots, x.shape[1] - 1)
    places = history + jnp.arange(size, dtype=jnp.int32)

    def of_context(array):
        return jnp.take(array, context_places, axis=1, mode="clip")

    def of_window(array):
        return lax.dynamic_slice_in_dim(array, history, size, axis=1)

    own, context, past, (queries, keys, values) = of_window(x), of_context(x), x, shared
    lengths = jnp.broadcast_to(num_context, x.shape[:1])
    for first in layers.blocks:
        if first == 0:
            query, key, value = (of_window(a) for a in shared)
            context_query = of_context(queries)
        else:
            query, key, value = layers.project(first, own, places[None])
            context_query, _, _ = layers.project(first, context, context_places[None])
        both = jnp.concatenate([context_query, query], axis=1)
        read = layers.attend_history(both, keys, values, history)
        own = layers.finish(
            first, own, layers.attend(query, key, value, is_causal=True) + read[:, slots.size :]
        )
        restored, pairs = layers.context(
            first, context, context_query, read[:, : slots.size], context_places[None], num_context
        )
        for i, pair in enumerate(pairs):
            number_here = first + 1 + i
            query, key, value = layers.project(number_here, own, places[None])
            seen = layers.attend(query, *pair, key_value_seq_lengths=lengths)
            own = layers.finish(number_here, own, layers.attend(query, key, value, is_causal=True) + seen)
        if first + m.group == len(layers.blocks) * m.group:
            break
        context = restored
        past, queries, keys, values = _restore_all(
            layers, first, number, past, queries, pairs[-1], num_context
        )
    return own


def _restore_all(
    layers: Layers, first: int, number: Array, past: Array, queries: Array, pair: Any, num_context: Array
) -> tuple[Array, Array, Array, Array]:
    """Returns the history for the next block: its rows, and their queries, keys and values there.

    `first` is the first layer of the present block. The history is computed window by window, up to window `number`;
    later rows are zeros.
    """
    m = layers.mechanism
    size = m.window

    def pieces(array):
        return jnp.moveaxis(array.reshape(array.shape[0], -1, size, *array.shape[2:]), 1, 0)

    @jax.checkpoint
    def piece(i, x, query):
        rows = layers.folded(i).restore(first, x, query, pair, num_context)
        here = (i * size + jnp.arange(size, dtype=jnp.int32))[None]
        return rows, *layers.project(first + m.group, rows, here)

    def step(_, xs):
        i, x, query = xs
        shapes = jax.eval_shape(piece, i, x, query)

        def nothing(*_):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return None, lax.cond(i < number, piece, nothing, i, x, query)

    numbers = jnp.arange(past.shape[1] // size, dtype=jnp.int32)
    _, made = lax.scan(step, None, (numbers, pieces(past), pieces(queries)))
    rows, *projected = (jnp.moveaxis(a, 0, 1).reshape(*past.shape[:2], *a.shape[3:]) for a in made)
    return rows, projected[0], projected[1], projected[2]
