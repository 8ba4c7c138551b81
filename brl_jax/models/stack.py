"""A stack of transformer blocks over a schedule of mechanisms; runs of equal layers are one scanned module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.modules import FeedForward, norm
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.sharding import constrain

Remat = Literal["none", "full", "dots"]


def group_layers(mechanisms: Sequence[Mechanism]) -> list[tuple[tuple[Mechanism, ...], int]]:
    """Cuts a sequence of layers in (period, repeats): one period if the whole repeats, else runs of equal layers.

    [A, A, A] -> [((A,), 3)];  [A, B, A, B] -> [((A, B), 2)];  [A, A, B] -> [((A,), 2), ((B,), 1)].
    """
    total = len(mechanisms)
    for period in range(1, total // 2 + 1):
        if total % period == 0 and tuple(mechanisms) == tuple(mechanisms[:period]) * (total // period):
            return [(tuple(mechanisms[:period]), total // period)]
    groups: list[tuple[tuple[Mechanism, ...], int]] = []
    for mechanism in mechanisms:
        if groups and groups[-1][0] == (mechanism,):
            groups[-1] = ((mechanism,), groups[-1][1] + 1)
        else:
            groups.append(((mechanism,), 1))
    return groups


class Block(nn.Module):
    """A mechanism and (mostly) a feed-forward network, each added to the residual stream (see `Mechanism.residual`)."""

    mechanism: Mechanism
    dimensions: Dimensions

    def setup(self):
        d = self.dimensions
        self.mixer = self.mechanism.layer(d)
        if self.mechanism.residual != "ffn":
            self.mixer_norm = norm(d, name="mixer_norm")
        if self.mechanism.residual != "mixer":
            self.feed_forward = FeedForward(d)
            self.feed_forward_norm = norm(d, name="feed_forward_norm")
        self.dropout = nn.Dropout(d.dropout)

    def __call__(self, x, carry, cache, call, deterministic):
        residual = self.mechanism.residual
        mixed, carry, cache = self.mixer(
            self.mixer_norm(x) if residual in ("pre", "mixer") else x,
            carry=carry,
            cache=cache,
            deterministic=deterministic,
            **call,
        )
        if residual == "post":
            mixed = self.mixer_norm(mixed)
        x = _whole_width(x + self.dropout(mixed, deterministic=deterministic))
        if residual == "mixer":
            return x, carry, cache
        if residual == "post":
            mixed = self.feed_forward_norm(self.feed_forward(x))
        else:
            mixed = self.feed_forward(self.feed_forward_norm(x))
        return _whole_width(x + self.dropout(mixed, deterministic=deterministic)), carry, cache


def _whole_width(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream, of which each device of a mesh has its rows in full: norms need no word from others."""
    return constrain(x, ("batch", "length", "embed"))


class Period(nn.Module):
    """The layers that repeat; what `nn.scan` runs over."""

    mechanisms: tuple[Mechanism, ...]
    carriers: tuple[str, ...]
    dimensions: Dimensions

    @nn.compact
    def __call__(self, state, caches, call, deterministic):
        x, carries = state
        caches = list(caches)
        for i, (mechanism, key) in enumerate(zip(self.mechanisms, self.carriers)):
            block = Block(mechanism, self.dimensions, name=f"block_{i}")
            x, carry, caches[i] = block(x, carries.get(key), caches[i], call, deterministic)
            if key in carries:
                carries = {**carries, key: carry}
        return (x, carries), tuple(caches)


class Stack(nn.Module):
    """Blocks over `mechanisms`, one for each layer, and a last norm.

    `y, cache = stack(x, cache=cache)`: the cache is None, or made by `init_cache` (generation) or `init_memory`
    (training on streams; None where no layer has one). x and y are (B, T, D).
    """

    mechanisms: tuple[Mechanism, ...]
    dimensions: Dimensions
    remat: Remat = "none"

    def setup(self):
        keys = _carrier_keys(self.mechanisms)
        carriers = {key: m.carrier(self.dimensions, name=key) for m, key in keys.items()}
        self.carriers = {key: carrier for key, carrier in carriers.items() if carrier is not None}
        segments = {m.segment for m in keys if m.segment is not None}
        if len(segments) > 1:
            raise ValueError(
                f"mechanisms of one network must have the same block_size, got {sorted(segments)}"
            )
        self.segment = segments.pop() if segments and self.dimensions.is_causal else None
        groups = group_layers(self.mechanisms)
        self.layers = [
            self._scanned(repeats)(
                period, tuple(keys[m] for m in period), self.dimensions, name=f"layers_{i}"
            )
            for i, (period, repeats) in enumerate(groups)
        ]
        self.final_norm = norm(self.dimensions, name="final_norm")

    def _scanned(self, repeats: int):
        module = Period
        if self.remat != "none":
            policy = (
                None if self.remat == "full" else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            )
            module = nn.remat(Period, prevent_cse=False, static_argnums=(4,), policy=policy)
        return nn.scan(
            module,
            variable_axes={"params": 0, "maps": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True, "projection": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=repeats,
            metadata_params={nn.PARTITION_NAME: "layers"},
            check_constancy_invariants=False,  # it traces the layers once more
        )

    def init_cache(self, batch: int, length: int) -> dict[str, Any]:
        """A decoding cache for sequences of up to `length` tokens."""
        parts = self._modules()
        return {
            "index": jnp.zeros((), jnp.int32),
            "carriers": {key: m.init_cache(batch, length) for key, m in parts["carriers"].items()},
            "layers": [
                tuple(_repeat(module.init_cache(batch, length), repeats) for module in modules)
                for modules, repeats in parts["layers"]
            ],
        }

    def init_memory(self, batch: int) -> dict[str, Any] | None:
        """What training on streams carries from batch to batch; None if nothing."""
        parts = self._modules()
        memory = {
            "carriers": {key: m.init_memory(batch) for key, m in parts["carriers"].items()},
            "layers": [
                tuple(_repeat(module.init_memory(batch), repeats) for module in modules)
                for modules, repeats in parts["layers"]
            ],
        }
        return memory if jax.tree.leaves(memory) else None

    def _modules(self) -> dict[str, Any]:
        """Unbound modules in the places of their caches."""
        d = self.dimensions
        carriers = {key: m.carrier(d, parent=None) for m, key in _carrier_keys(self.mechanisms).items()}
        return {
            "carriers": {key: module for key, module in carriers.items() if module is not None},
            "layers": [
                (tuple(m.layer(d, parent=None) for m in period), repeats)
                for period, repeats in group_layers(self.mechanisms)
            ],
        }

    def _cache_from_memory(self, memory: Any, batch: int, length: int) -> dict[str, Any]:
        """A decoding cache that goes on from a training memory (None: from nothing)."""
        cache = self.init_cache(batch, length)
        if memory is None:
            return cache
        parts = self._modules()
        carriers = {
            key: module.resume(cache["carriers"][key], memory["carriers"][key])
            for key, module in parts["carriers"].items()
        }
        layers = [
            tuple(module.resume(c, m) for module, c, m in zip(modules, caches, memories))
            for (modules, _), caches, memories in zip(parts["layers"], cache["layers"], memory["layers"])
        ]
        return {**cache, "carriers": carriers, "layers": layers}

    def _memory_from_cache(self, cache: dict[str, Any]) -> dict[str, Any]:
        parts = self._modules()
        return {
            "carriers": {
                key: m.memory_from_cache(cache["carriers"][key]) for key, m in parts["carriers"].items()
            },
            "layers": [
                tuple(jax.vmap(module.memory_from_cache)(c) for module, c in zip(modules, caches))
                for (modules, _), caches in zip(parts["layers"], cache["layers"])
            ],
        }

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        cache: Any = None,
        positions: Int[Array, "#B T"] | None = None,
        lengths: Int[Array, "B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        deterministic: bool = True,
        **extra: Any,
    ):
        length, segment = x.shape[1], self.segment
        call = {
            "positions": positions,
            "lengths": lengths,
            "segment_ids": segment_ids,
            "count": None,
            **extra,
        }
        decoding = cache is not None and "index" in cache
        if segment is None or length == 1 or (length <= segment and not decoding):
            return self._run(x, cache, call, deterministic)
        if positions is not None or segment_ids is not None:
            raise ValueError(
                f"positions and segment_ids need sequences of at most block_size={segment} tokens here, got {length}"
            )
        if decoding:
            return self._unaligned_segments(x, cache, call, deterministic)
        y, new = self._aligned_segments(x, cache, call, deterministic)
        return y, None if cache is None else self._memory_from_cache(new)

    def _run(self, x, cache, call, deterministic):
        caches = {"carriers": {}, "layers": None} if cache is None else cache
        carries = {key: carrier(x, caches["carriers"].get(key)) for key, carrier in self.carriers.items()}
        state = (x, carries)
        layers = []
        for i, group in enumerate(self.layers):
            group_cache = (None,) * len(group.mechanisms) if cache is None else caches["layers"][i]
            state, group_cache = group(state, group_cache, call, deterministic)
            layers.append(group_cache)
        y = self.final_norm(state[0])
        if cache is None:
            return y, None
        carriers = {
            key: carrier.close(y, caches["carriers"].get(key), call["count"])
            for key, carrier in self.carriers.items()
        }
        new = {"carriers": carriers, "layers": layers}
        if "index" in cache:
            count = x.shape[1] if call["count"] is None else call["count"]
            new["index"] = cache["index"] + count
        return y, new

    def _over_segments(self, step: Any, length: int | None = None) -> Any:
        return nn.scan(
            step,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            length=length,
            # It traces the network once more, and is needed where the parameters are made.
            check_constancy_invariants=self.is_initializing(),
        )

    def _aligned_segments(self, x, memory, call, deterministic):
        """Segment after segment from a segment's start on, as training needs it: gradients flow through the caches."""
        batch, length, width = x.shape
        segment = self.segment
        whole = length // segment
        cache = self._cache_from_memory(memory, batch, length)

        def step(stack, cache, piece):
            y, cache = stack._run(piece, cache, call, deterministic)
            return cache, y

        scan = self._over_segments(step)
        pieces = jnp.moveaxis(x[:, : whole * segment].reshape(batch, whole, segment, width), 1, 0)
        # Of every segment each device of a mesh takes its share.
        pieces = constrain(pieces, (None, "batch", "length", "embed"))
        cache, y = scan(self, cache, pieces)
        y = jnp.moveaxis(y, 0, 1).reshape(batch, whole * segment, width)
        if whole * segment < length:
            tail, cache = self._run(x[:, whole * segment :], cache, call, deterministic)
            y = jnp.concatenate([y, tail], axis=1)
        return y, cache

    def _unaligned_segments(self, x, cache, call, deterministic):
        """The same from anywhere in a segment: pieces of one size, of which the first tokens exist."""
        length = x.shape[1]
        segment = self.segment
        size = min(length, segment)
        pieces = (length + segment - 2) // segment + 1
        room = ((0, 0), (0, size), (0, 0))
        x = jnp.pad(x, room)

        def step(stack, state, _):
            cache, y, done = state
            left_in_segment = segment - cache["index"] % segment
            count = jnp.minimum(left_in_segment, length - done)
            piece = jax.lax.dynamic_slice_in_dim(x, done, size, axis=1)
            out, cache = stack._run(piece, cache, {**call, "count": count}, deterministic)
            # What lies beyond count is written over by the next piece, or cut off at the end.
            y = jax.lax.dynamic_update_slice_in_dim(y, out, done, axis=1)
            return (cache, y, done + count), None

        scan = self._over_segments(step, length=pieces)
        start = (cache, jnp.zeros_like(x), jnp.zeros((), jnp.int32))
        (cache, y, _), _ = scan(self, start, None)
        return y[:, :length], cache


def _carrier_keys(mechanisms: Sequence[Mechanism]) -> dict[Mechanism, str]:
    """The name of each distinct mechanism's carrier in a network."""
    return {mechanism: f"carrier_{i}" for i, mechanism in enumerate(dict.fromkeys(mechanisms))}


def _repeat(cache: Any, repeats: int) -> Any:
    return jax.tree.map(lambda a: jnp.repeat(a[None], repeats, axis=0), cache)
