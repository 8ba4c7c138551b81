"""TLinFormer: exact softmax attention over the whole history at linear cost per window (Tang 2025, arXiv:2508.20407).

A sequence is cut into windows. The tokens before a window are its history. Most layers see the history only through the
context, which starts as the last few tokens of the history. A block has H + 2 layers:
  compress   the context's queries read the whole history; the window's queries read the window itself (causally) and,
             in a second softmax that is added, the whole history;
  hidden     H times: the context reads itself, the window reads itself and the context;
  restore    the history's queries, from the first layer, read the context, which gives the history for the next block.
             The last block skips this, as nothing would read the result.
The parameters have a plain decoder's structure, and without history the network computes what a plain decoder does.

In the first block, the history's queries, keys and values depend on the tokens alone, so all windows share them. After
the first restoring layer every row of the history has read the context, which differs between windows. Nothing can be
kept, and n tokens cost n^2 / (2 window) rows in the later blocks. A decoding cache pays this cost only once per window
(a miss); within a window (a hit) a token costs a single row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.attention.core.state import write_places
from brl_jax.layers.compressed.tlinformer import TLinFormerConfig
from brl_jax.layers.core.protocol import check_packs
from brl_jax.models.cross_attention import CrossSizes
from brl_jax.models.stack import Stack
from brl_jax.models.stack_call import Recall, StackCall, check_room
from brl_jax.models.tlinformer_layers import Layers, train_window

# How many rows of the history a miss restores at a time.
_PIECE = 1024


class KeyValue(NamedTuple):
    """Keys and values."""

    key: Array
    value: Array


class TLinFormerCache(NamedTuple):
    """A decoding cache for up to L tokens.

    Attributes:
      length: () int32, the tokens so far.
      window_index: () int32, the window whose history the context and the later blocks hold; window 0 has no history.
      past: the tokens (B, L) int32, or their embeddings (B, L, D).
      history: for each block, keys and values (B, K, L, H) of the history in its first layer.
      context: for each block, keys and values (H + 1, B, C, K, H) of the context in its other layers.
      window: keys and values (layers, B, W, K, H) of the current window.
    """

    length: Any
    window_index: Any
    past: Any
    history: tuple[KeyValue, ...]
    context: tuple[KeyValue, ...]
    window: KeyValue


class TLinFormerStack(Stack):
    """A `Stack` whose layers are arranged as TLinFormer's; call and parameters are as with full attention.

    Raises:
      ValueError: `cross_attention` is given, or a call with a cache has positions or dropout. With dropout a token
        would differ each time it is read.
    """

    def __post_init__(self):
        if self.cross_attention is not None:
            raise ValueError(f"cross_attention must be None with tlinformer, got {self.cross_attention}")
        super().__post_init__()

    @property
    def _mechanism(self) -> TLinFormerConfig:
        mechanism = self.mechanisms[0]
        assert isinstance(mechanism, TLinFormerConfig)
        return mechanism

    def init_cache(
        self, batch: int, length: int, *, recalls: bool = False, source: CrossSizes | None = None
    ) -> TLinFormerCache:
        """Returns an empty decoding cache for sequences of up to `length` tokens.

        Args:
          recalls: every call comes with a `Recall`, so that the cache keeps tokens. Otherwise it keeps their
            embeddings, which takes half again the memory (less with more blocks).
          source: must be None, as cross-attention is not supported.
        """
        d, m = self.dimensions, self._mechanism
        blocks = len(self.mechanisms) // m.group
        windows = -(-length // m.window)
        context = int(m.context_sizes(windows).max())

        def pair(*shape):
            return KeyValue(jnp.zeros(shape, d.dtype), jnp.zeros(shape, d.dtype))

        past, heads = jnp.zeros((batch, length), jnp.int32), (d.num_kv_heads, d.head_dim)
        return TLinFormerCache(
            length=jnp.zeros((), jnp.int32),
            window_index=jnp.zeros((), jnp.int32),
            past=past if recalls else jnp.zeros((batch, length, d.d_model), d.dtype),
            history=tuple(pair(batch, d.num_kv_heads, length, d.head_dim) for _ in range(blocks)),
            context=tuple(pair(m.group - 1, batch, context, *heads) for _ in range(blocks)),
            window=pair(len(self.mechanisms), batch, min(m.window, length), *heads),
        )

    def init_memory(self, batch: int) -> None:
        return None

    def _layers(self, deterministic: bool) -> Layers:
        params = nn.unbox(self.layers[0].variables["params"]["block_0"])
        drops = self.dimensions.dropout > 0 and not deterministic
        return Layers(self._mechanism, self.dimensions, params, self.make_rng("dropout") if drops else None)

    def __call__(self, x, *, cache: Any = None, recall: Recall | None = None, **call: Any):
        if call.get("segment_ids") is not None:
            check_packs(self._mechanism, self.dimensions)
        if cache is not None:
            if call.get("positions") is not None:
                raise ValueError(
                    "positions must be None with a cache of TLinFormer, whose windows have their own"
                )
            if self.dimensions.dropout > 0 and not call.get("deterministic", True):
                raise ValueError(
                    "deterministic must be True with a cache of TLinFormer, which rereads earlier tokens, got "
                    "False"
                )
            check_room(x.shape[1], cache.length, cache.past.shape[1])
            cache = _note_tokens(cache, recall)
        return super().__call__(x, cache=cache, recall=recall, **call)

    def absorbable(self, length: int) -> int:
        return (length - 1) // self._mechanism.window * self._mechanism.window

    def absorb(
        self, x: Float[Array, "B T D"], cache: TLinFormerCache, recall: Recall | None = None
    ) -> TLinFormerCache:
        """Returns the cache after whole windows of tokens whose outputs are not needed. For each token it computes only
        the keys and values of the first block.

        Absorbed tokens, over any number of calls, must begin and end at the start of a window, and at least one more
        token must follow.
        """
        check_room(x.shape[1], cache.length, cache.past.shape[1])
        length, layers = x.shape[1], self._layers(True)
        places = cache.length + jnp.arange(length, dtype=jnp.int32)
        _, key, value = layers.project(0, x, places[None])
        cache = _remember(_note_tokens(cache, recall), x, key, value, places)
        return cache._replace(length=cache.length + length)

    def _run(self, x, cache, call: StackCall, deterministic):
        if cache is None:
            return super()._run(x, cache, call, deterministic)
        layers = self._layers(True)  # `__call__` rejects dropout with a cache
        batch, length, _ = x.shape
        count = length if call.count is None else call.count
        index, m = cache.length, self._mechanism
        room = cache.past.shape[1]
        window = index // m.window
        history = window * m.window
        sizes = jnp.asarray(m.context_sizes(-(-room // m.window)))
        num_context = sizes[window]
        exist = jnp.arange(length, dtype=jnp.int32) < count
        places = index + jnp.arange(length, dtype=jnp.int32)
        first = layers.project(0, x, places[None])
        # Write before anything reads the history, which ends earlier; otherwise XLA copies it.
        cache = _remember(cache, x, *first[1:], jnp.where(exist, places, room))
        # A cache for a single window never has a history, nor space for a context.
        has_history = room > m.window
        if has_history:
            embed = None if call.recall is None else call.recall.embed
            cache = _Miss(layers, cache.past, embed, history, num_context).update(cache, window)

        slots = jnp.where(exist, places - history, m.window)
        lengths = jnp.broadcast_to(num_context, (batch,))
        kept = cache.window
        for number in range(len(self.mechanisms)):
            block, inner = divmod(number, m.group)
            query, key, value = layers.project(number, x, places[None]) if number else first
            kept = KeyValue(
                kept.key.at[number, :, slots].set(jnp.moveaxis(key, 1, 0), mode="drop"),
                kept.value.at[number, :, slots].set(jnp.moveaxis(value, 1, 0), mode="drop"),
            )
            offset = index - history
            attended = layers.attend(
                query, kept.key[number], kept.value[number], is_causal=True, query_offset=offset
            )
            if has_history and inner == 0:
                past = cache.history[block]
                attended += layers.attend_kept(query, past.key, past.value, history)
            elif has_history:
                context = cache.context[block]
                attended += layers.attend(
                    query, context.key[inner - 1], context.value[inner - 1], key_value_seq_lengths=lengths
                )
            x = layers.finish(number, x, attended)
        return self.final_norm(x), cache._replace(window=kept, length=index + count)

    def _aligned_segments(self, x, memory, call, deterministic):
        """Runs all windows of a sequence for training; the backward pass recomputes each."""
        del memory
        if self.is_initializing():
            return self._run(x, None, call, deterministic)
        m, layers = self._mechanism, self._layers(deterministic)
        batch, length, width = x.shape
        windows = -(-length // m.window)
        padded = windows * m.window
        x = jnp.pad(x, ((0, 0), (0, padded - length), (0, 0)))
        places = jnp.arange(padded, dtype=jnp.int32)[None]
        first = layers.project(0, x, places)  # of the first block, which all windows share
        sizes = jnp.asarray(m.context_sizes(windows))

        def window(number):
            return train_window(layers.folded(number), number, sizes[number], x, first)

        out = lax.map(jax.checkpoint(window), jnp.arange(windows, dtype=jnp.int32))
        y = jnp.moveaxis(out, 0, 1).reshape(batch, padded, width)[:, :length]
        return self.final_norm(y), None


@dataclasses.dataclass(frozen=True)
class _Miss:
    """Updates a cache for a new window, whose history is the first `history` tokens.

    Attributes:
      past: as in the cache; if it holds embeddings, `embed` is None.
    """

    layers: Layers
    past: Array
    embed: Callable[[Array], Array] | None
    history: Array
    num_context: Array

    @property
    def group(self) -> int:
        return self.layers.mechanism.group

    def rows(self, past: Array) -> Array:
        return past if self.embed is None else self.embed(past)

    def update(self, cache: TLinFormerCache, window: Array) -> TLinFormerCache:
        """Returns the cache with the context and the later blocks' history of `window`, computed only if missing.

        Arrays as long as the history are written in place and only by the loops, which run no iteration on a hit.
        """
        missed = window != cache.window_index
        slots = jnp.arange(cache.context[0].key.shape[2], dtype=jnp.int32)
        places = jnp.minimum(self.history - self.num_context + slots, self.past.shape[1] - 1)

        def first_rows():
            return self.rows(jnp.take(self.past, places, axis=1, mode="clip"))

        shape = jax.eval_shape(first_rows)
        x = lax.cond(missed, first_rows, lambda: jnp.zeros(shape.shape, shape.dtype))
        histories, contexts = list(cache.history), list(cache.context)
        for block, first in enumerate(self.layers.blocks):
            if block:
                histories[block] = self._restored(histories[block], contexts[:block], missed)
            compute = functools.partial(self._context, first, places[None])
            x, contexts[block] = lax.cond(
                missed, compute, lambda x, past, old: (x, old), x, histories[block], contexts[block]
            )
        return cache._replace(history=tuple(histories), context=tuple(contexts), window_index=window)

    def _context(self, first: int, places: Array, x: Array, past: KeyValue, _: Any) -> tuple[Array, KeyValue]:
        """Passes the context through the block of layer `first`; see `Layers.context`."""
        query, _, _ = self.layers.project(first, x, places)
        read = self.layers.attend_kept(query, past.key, past.value, self.history)
        x, pairs = self.layers.context(first, x, query, read, places, self.num_context)
        keys, values = zip(*pairs)
        return x, KeyValue(jnp.stack(keys), jnp.stack(values))

    def _restored(self, pair: KeyValue, contexts: list[KeyValue], missed: Array) -> KeyValue:
        """Returns the history's keys and values in the block after `contexts`."""
        room = self.past.shape[1]
        piece = min(_PIECE, room)

        def step(i, pair):
            start = jnp.minimum(i * piece, room - piece)
            here = (start + jnp.arange(piece, dtype=jnp.int32))[None]
            x = self.rows(lax.dynamic_slice_in_dim(self.past, start, piece, axis=1))
            # Every block starts again from the tokens: keeping the rows would double the memory of the history.
            for block, context in enumerate(contexts):
                query, _, _ = self.layers.project(block * self.group, x, here)
                last = (context.key[-1], context.value[-1])
                x = self.layers.restore(block * self.group, x, query, last, self.num_context)
            _, key, value = self.layers.project(len(contexts) * self.group, x, here)
            return KeyValue(
                lax.dynamic_update_slice_in_dim(pair.key, jnp.swapaxes(key, 1, 2), start, axis=2),
                lax.dynamic_update_slice_in_dim(pair.value, jnp.swapaxes(value, 1, 2), start, axis=2),
            )

        steps = jnp.where(missed, (self.history + piece - 1) // piece, 0)
        return lax.fori_loop(jnp.int32(0), steps.astype(jnp.int32), step, pair)


def _note_tokens(cache: TLinFormerCache, recall: Recall | None) -> TLinFormerCache:
    """Returns the cache with the new tokens in its past, if it keeps tokens."""
    if cache.past.ndim == 3:
        return cache
    if recall is None:
        raise ValueError("recall must be given with a cache that was made with recalls=True")
    places = cache.length + jnp.arange(recall.tokens.shape[1], dtype=jnp.int32)
    return cache._replace(past=cache.past.at[:, places].set(recall.tokens.astype(jnp.int32), mode="drop"))


def _remember(cache: TLinFormerCache, x: Array, key: Array, value: Array, places: Array) -> TLinFormerCache:
    """Returns the cache with new tokens' embeddings, and their keys and values in the first block, at `places`; places
    beyond its end are dropped."""
    first, *later = cache.history
    first = KeyValue(
        write_places(first.key, jnp.swapaxes(key, 1, 2), places, axis=2),
        write_places(first.value, jnp.swapaxes(value, 1, 2), places, axis=2),
    )
    past = cache.past
    if past.ndim == 3:
        past = past.at[:, places].set(x, mode="drop")
    return cache._replace(past=past, history=(first, *later))
