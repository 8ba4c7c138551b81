"""TLinFormer: exact softmax over all history at linear cost a window (paper 003; `TLinFormerConfig`).

A sequence is cut in windows. While one is processed, what came before it is history, seen through the context, its
last few tokens. A block of H + 2 layers
  compresses   the context's queries read the whole history, the window's queries itself (causally) and, in a second
               softmax that is added, the whole history;
  H times      the context reads itself, the window itself and the context;
  restores     the history's queries, those of the first layer, read the context: the history for the next block. The
               last block leaves that out, as nobody reads it.
The parameters are a plain decoder's, and while there is no history so is everything else.

What a window shares with the next: the history's queries, keys and values in the first block, which hang on the tokens
alone. From the first restoring layer on every row of the history has read the context, which is another one in every
window: nothing of it can be kept, and n tokens cost n^2 / (2 window) rows of the later blocks. A cache meets that only
once a window (a miss); within a window (a hit) a token costs its own row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.layers.compressed.tlinformer import TLinFormerConfig
from brl_jax.models.stack import Stack
from brl_jax.models.tlinformer.layers import Layers, train_window

# History rows that a miss restores at a time.
_PIECE = 1024


class TLinFormerStack(Stack):
    """A `Stack` whose layers TLinFormer organises; the same call, and the same parameters as with full attention."""

    @property
    def _mechanism(self) -> TLinFormerConfig:
        mechanism = self.mechanisms[0]
        assert isinstance(mechanism, TLinFormerConfig)
        return mechanism

    def init_cache(self, batch: int, length: int, tokens: bool = False) -> dict[str, Any]:
        """A decoding cache for sequences of up to `length` tokens.

        Args:
          tokens: the caller keeps the tokens in the cache's "past" (B, length) and gives `embed`, a function from
            tokens to rows, with every call; otherwise the rows themselves are kept, for half as much memory again
            (and less with more blocks).
        """
        d, m = self.dimensions, self._mechanism
        blocks = len(self.mechanisms) // m.group
        windows = -(-length // m.window)
        context = int(m.context_sizes(windows).max())

        def pair(*shape):
            shape = (*shape, d.num_kv_heads, d.head_dim)
            return {"key": jnp.zeros(shape, d.dtype), "value": jnp.zeros(shape, d.dtype)}

        return {
            "index": jnp.zeros((), jnp.int32),
            # The window whose history the context and the later blocks hold; the first has none.
            "state": jnp.zeros((), jnp.int32),
            "past": jnp.zeros((batch, length), jnp.int32)
            if tokens
            else jnp.zeros((batch, length, d.d_model), d.dtype),
            "history": [pair(batch, length) for _ in range(blocks)],
            "context": [pair(m.group - 1, batch, context) for _ in range(blocks)],
            "window": pair(len(self.mechanisms), batch, min(m.window, length)),
        }

    def init_memory(self, batch: int) -> None:
        return None

    def _layers(self, deterministic: bool) -> Layers:
        params = nn.unbox(self.layers[0].variables["params"]["block_0"])
        drops = self.dimensions.dropout > 0 and not deterministic
        return Layers(self._mechanism, self.dimensions, params, self.make_rng("dropout") if drops else None)

    def __call__(self, x, *, cache: Any = None, **call: Any):
        if cache is not None:
            _check_room(x, cache)
        return super().__call__(x, cache=cache, **call)

    def absorb(self, x: Float[Array, "B T D"], cache: Any) -> Any:
        """The cache after whole windows of tokens whose outputs nobody wants: for each the first block's keys and
        values alone.

        What is absorbed must begin and end, after any number of calls, at a window's start, and one more token at
        least must follow.
        """
        _check_room(x, cache)
        length, layers = x.shape[1], self._layers(True)
        places = cache["index"] + jnp.arange(length, dtype=jnp.int32)
        _, key, value = layers.project(0, x, places[None])
        cache = _remember(cache, x, key, value, places)
        return {**cache, "index": cache["index"] + length}

    def _run(self, x, cache, call, deterministic):
        if cache is None:
            return super()._run(x, cache, {k: v for k, v in call.items() if k != "embed"}, deterministic)
        layers = self._layers(True)
        batch, length, _ = x.shape
        count = length if call["count"] is None else call["count"]
        index, m = cache["index"], self._mechanism
        room = cache["past"].shape[1]
        window = index // m.window
        history = window * m.window
        sizes = jnp.asarray(m.context_sizes(-(-room // m.window)))
        num_context = sizes[window]
        exist = jnp.arange(length, dtype=jnp.int32) < count
        places = index + jnp.arange(length, dtype=jnp.int32)
        first = layers.project(0, x, places[None])
        # Written before anything reads the history, which ends before: else XLA copies it.
        cache = _remember(cache, x, *first[1:], jnp.where(exist, places, room))
        miss = _Miss(layers, cache["past"], call.get("embed"), history, num_context)
        cache = miss.update(cache, window)

        slots = jnp.where(exist, places - history, m.window)
        lengths = jnp.broadcast_to(num_context, (batch,))
        kept = cache["window"]
        for number in range(len(self.mechanisms)):
            block, inner = divmod(number, m.group)
            query, key, value = layers.project(number, x, places[None]) if number else first
            kept = {
                "key": kept["key"].at[number, :, slots].set(jnp.moveaxis(key, 1, 0), mode="drop"),
                "value": kept["value"].at[number, :, slots].set(jnp.moveaxis(value, 1, 0), mode="drop"),
            }
            offset = index - history
            own = layers.attend(
                query, kept["key"][number], kept["value"][number], is_causal=True, query_offset=offset
            )
            if inner == 0:
                past = cache["history"][block]
                read = layers.attend_history(query, past["key"], past["value"], history)
            else:
                pair = (cache["context"][block][name][inner - 1] for name in ("key", "value"))
                read = layers.attend(query, *pair, key_value_seq_lengths=lengths)
            x = layers.finish(number, x, own + read)
        return self.final_norm(x), {**cache, "window": kept, "index": index + count}

    def _aligned_segments(self, x, memory, call, deterministic):
        """All windows of a sequence for training, each made again in the backward pass."""
        del memory
        if self.is_initializing():
            return self._run(x, None, call, deterministic)
        m, layers = self._mechanism, self._layers(deterministic)
        batch, length, width = x.shape
        windows = -(-length // m.window)
        padded = windows * m.window
        x = jnp.pad(x, ((0, 0), (0, padded - length), (0, 0)))
        places = jnp.arange(padded, dtype=jnp.int32)[None]
        first = layers.project(0, x, places)  # of the first block: the same whatever the window
        sizes = jnp.asarray(m.context_sizes(windows))

        def window(number):
            return train_window(layers.folded(number), number, sizes[number], x, first)

        out = lax.map(jax.checkpoint(window), jnp.arange(windows, dtype=jnp.int32))
        y = jnp.moveaxis(out, 0, 1).reshape(batch, padded, width)[:, :length]
        return self.final_norm(y), None


@dataclasses.dataclass(frozen=True)
class _Miss:
    """Brings a cache up to a new window, whose history is the first `history` tokens; `past` and `embed` as in
    `TLinFormerStack.init_cache`."""

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

    def update(self, cache: Any, window: Array) -> Any:
        """The cache with the context and the later blocks' history of `window`, or as it is where it has them.

        Only the loops write what is as long as the history, and they write it in place; on a hit they make no step.
        """
        missed = window != cache["state"]
        slots = jnp.arange(cache["context"][0]["key"].shape[2], dtype=jnp.int32)
        places = jnp.minimum(self.history - self.num_context + slots, self.past.shape[1] - 1)

        def first_rows():
            return self.rows(jnp.take(self.past, places, axis=1, mode="clip"))

        shape = jax.eval_shape(first_rows)
        x = lax.cond(missed, first_rows, lambda: jnp.zeros(shape.shape, shape.dtype))
        histories, contexts = list(cache["history"]), list(cache["context"])
        for block, first in enumerate(self.layers.blocks):
            if block:
                histories[block] = self._restored(histories[block], contexts[:block], missed)
            compute = functools.partial(self._context, first, places[None])
            x, contexts[block] = lax.cond(
                missed, compute, lambda x, past, old: (x, old), x, histories[block], contexts[block]
            )
        return {**cache, "history": histories, "context": contexts, "state": window}

    def _context(self, first: int, places: Array, x: Array, past: Any, _: Any) -> tuple[Array, Any]:
        """Through the block of layer `first`: see `Layers.context`."""
        query, _, _ = self.layers.project(first, x, places)
        read = self.layers.attend_history(query, past["key"], past["value"], self.history)
        x, pairs = self.layers.context(first, x, query, read, places, self.num_context)
        keys, values = zip(*pairs)
        return x, {"key": jnp.stack(keys), "value": jnp.stack(values)}

    def _restored(self, pair: Any, contexts: list[Any], missed: Array) -> Any:
        """The history's keys and values in the block after `contexts`."""
        room = self.past.shape[1]
        piece = min(_PIECE, room)

        def step(i, pair):
            start = jnp.minimum(i * piece, room - piece)
            here = (start + jnp.arange(piece, dtype=jnp.int32))[None]
            x = self.rows(lax.dynamic_slice_in_dim(self.past, start, piece, axis=1))
            # Made again from the tokens for every block: kept, the rows would be as long as the history.
            for block, context in enumerate(contexts):
                query, _, _ = self.layers.project(block * self.group, x, here)
                last = (context["key"][-1], context["value"][-1])
                x = self.layers.restore(block * self.group, x, query, last, self.num_context)
            _, key, value = self.layers.project(len(contexts) * self.group, x, here)
            return {
                name: lax.dynamic_update_slice_in_dim(pair[name], new, start, axis=1)
                for name, new in (("key", key), ("value", value))
            }

        steps = jnp.where(missed, (self.history + piece - 1) // piece, 0)
        return lax.fori_loop(jnp.int32(0), steps.astype(jnp.int32), step, pair)


def _check_room(x: Array, cache: Any) -> None:
    """Raises ValueError where new tokens don't fit in a cache; what is there already counts where it is known."""
    room, index = cache["past"].shape[1], cache["index"]
    there = 0 if isinstance(index, jax.core.Tracer) else int(index)
    if there + x.shape[1] > room:
        raise ValueError(
            f"cache: has room for {room} tokens, got {x.shape[1]} after {there}; "
            "init_cache(batch, length) with a larger length makes more"
        )


def _remember(cache: Any, x: Array, key: Array, value: Array, places: Array) -> Any:
    """The cache with new tokens' rows, and their keys and values in the first block, at `places`; dropped beyond."""
    first, *later = cache["history"]
    first = {
        "key": first["key"].at[:, places].set(key, mode="drop"),
        "value": first["value"].at[:, places].set(value, mode="drop"),
    }
    past = cache["past"]
    if past.ndim == 3:
        past = past.at[:, places].set(x, mode="drop")
    return {**cache, "past": past, "history": [first, *later]}


def make_stack(mechanisms: tuple[Any, ...], *args: Any, **kwargs: Any) -> Stack:
    """The network that these mechanisms name (`Mechanism.network`)."""
    network = mechanisms[0].network
    return (Stack if network is None else _NETWORKS[network])(mechanisms, *args, **kwargs)


_NETWORKS: dict[str, type[Stack]] = {"tlinformer": TLinFormerStack}
