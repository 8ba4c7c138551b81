"""The layer of BRL attention, and the module that carries its compressed tokens from layer to layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from brl_jax.attention.compressed.propagate import merge_blocks, propagate_blocks, propagate_weights
from brl_jax.layers.compressed.brl_memory import BRLCache, BRLCarrierCache, BRLCarry, BRLMemory, BRLPast
from brl_jax.layers.compressed.compressed_tokens import (
    COMPRESSED,
    CompressedStream,
    position_bias,
    spread,
)
from brl_jax.layers.compressed.packing import PackedBlocks
from brl_jax.layers.core.modules import maps_wanted, norm, parameter, scale_scores, to_heads
from brl_jax.layers.core.protocol import CacheOwner, LayerCall, MechanismLayer
from brl_jax.sharding import constrain, sequence_axis

# exp(10) = 22026: large enough for any spike, small enough for sums of products in bfloat16.
_SPIKE_LIMIT = 10.0


class _PastOwner(CacheOwner):
    """A module whose cache has a `past`, with what the compressed tokens read if the mechanism's memory is `memory`."""

    memory: ClassVar[str]

    def init_memory(self, batch: int) -> BRLMemory | None:
        m, d = self.mechanism, self.dimensions
        return BRLMemory.empty(batch, m.history, d.d_model, d.dtype) if m.memory == self.memory else None

    def init_past(self, batch: int) -> BRLPast | None:
        m, d = self.mechanism, self.dimensions
        owns = m.memory == self.memory
        return BRLPast.empty(batch, m.history, m.block, d.d_model, d.dtype) if owns else None

    def memory_from_cache(self, cache: BRLCache | BRLCarrierCache) -> BRLMemory | None:
        return None if cache.past is None else cache.past.memory(cache.length)

    def resume(self, cache: Any, memory: BRLMemory | None) -> Any:
        return cache if memory is None else cache._replace(past=cache.past._replace(before=memory))


class BRLCarrier(_PastOwner):
    """Owns the compressed tokens' learned initial values and, for memory "output", the queue of the network's outputs.

    See `Mechanism.carrier` for the calls.
    """

    memory: ClassVar[str] = "output"

    def init_cache(self, batch: int, length: int) -> BRLCarrierCache:
        return BRLCarrierCache(jnp.zeros((), jnp.int32), self.init_past(batch))

    def summary(self, carry: BRLCarry) -> Float[Array, "B M E"]:
        return carry.tokens[:, 0]

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], cache: BRLCarrierCache | BRLMemory | None) -> BRLCarry:
        mechanism, d = self.mechanism, self.dimensions
        decoding = isinstance(cache, BRLCarrierCache)
        shape = (mechanism.num_compressed, mechanism.width(d))
        init = nn.initializers.normal(1.0)
        table = parameter(self, "tokens", init, shape, ("compressed", "compressed_embed"))
        blocks = mechanism.num_blocks(x.shape[1], decoding) if d.is_causal else 1
        tokens = jnp.broadcast_to(table.astype(d.dtype)[None, None], (x.shape[0], blocks, *table.shape))
        tokens = constrain(tokens, COMPRESSED)
        if mechanism.memory == "layer":
            return BRLCarry(tokens)
        if not d.is_causal:
            return BRLCarry(tokens, norm(d, name="history_norm")(x))
        if cache is None:
            return BRLCarry(tokens)
        if isinstance(cache, BRLMemory):
            return BRLCarry(tokens, *cache)
        assert cache.past is not None
        if mechanism.generation == "all" and x.shape[1] == 1:
            return BRLCarry(tokens, *cache.past.recent(cache.length))
        return BRLCarry(tokens, *cache.past.before)

    def close(self, y: Float[Array, "B T D"], cache: BRLCarrierCache | BRLMemory | None, count: Any) -> Any:
        if cache is None:
            return None
        if isinstance(cache, BRLMemory):
            return cache.append(y)
        count = jnp.int32(y.shape[1] if count is None else count)
        past = None if cache.past is None else cache.past.advance(cache.length, y, count)
        return BRLCarrierCache(cache.length + count, past)


class BRLAttention(_PastOwner, MechanismLayer):
    """F_BRL of algorithm 1: local attention plus what the tokens read from the compressed tokens.

    See `brl_jax.layers.core.protocol` for the call, whose carry is a `BRLCarry` from `BRLCarrier`.
    """

    memory: ClassVar[str] = "layer"
    packs_cache: ClassVar[bool] = True

    def init_cache(self, batch: int, length: int) -> BRLCache:
        mechanism, d = self.mechanism, self.dimensions
        window = mechanism.local.layer(d, parent=None).init_cache(batch, length)
        shape = (batch, mechanism.num_compressed, d.num_heads, d.d_model // d.num_heads)
        key, value = (jnp.zeros(shape, d.dtype) for _ in range(2))
        return BRLCache(window, key, value, jnp.zeros((), jnp.int32), self.init_past(batch))

    def mix_with_carry(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, BRLCarry, Any]:
        mechanism, d = self.mechanism, self.dimensions
        cache, carry, lengths = call.cache, call.carry, call.lengths
        decoding = isinstance(cache, BRLCache)
        out, _, window = mechanism.local.layer(d, name="local")(
            x,
            cache=cache.window if decoding else None,
            positions=call.positions,
            lengths=lengths,
            segment_ids=call.segment_ids,
            count=call.count,
            deterministic=call.deterministic,
        )
        stream = CompressedStream(mechanism, d, name="compressed")
        packed = None
        if not d.is_causal:
            source = x if carry.source is None else carry.source
            tokens, key, value = stream(carry.tokens, source, source_lengths=lengths)
        elif decoding and x.shape[1] == 1:
            tokens, key, value = self._step(stream, carry, cache)
        elif call.segment_ids is not None and not decoding:
            packed = PackedBlocks.of(call.segment_ids, mechanism.block)
            lengths_read = jnp.minimum(packed.before, mechanism.history)
            source = packed.sources(x, mechanism.block)
            tokens, key, value = stream(carry.tokens, source, history_lengths=lengths_read)
        else:
            tokens, key, value = self._blocks(stream, x, carry, cache)
        offset = cache.length % mechanism.block if decoding else 0
        out = out + self._propagate(x, key, value, offset, lengths, packed)
        carry = carry._replace(tokens=tokens)
        if cache is None:
            return out, carry, None
        if isinstance(cache, BRLMemory):
            return out, carry, cache.append(x)
        count = call.num_new(x.shape[1])
        # Keep the block of the last new token. If that token completes the block, these entries are never read.
        last = (offset + count - 1) // mechanism.block
        cache = BRLCache(
            window,
            jax.lax.dynamic_index_in_dim(key, last, axis=1, keepdims=False),
            jax.lax.dynamic_index_in_dim(value, last, axis=1, keepdims=False),
            cache.length + count,
            None if cache.past is None else cache.past.advance(cache.length, x, count),
        )
        return out, carry, cache

    def _blocks(self, stream, x, carry: BRLCarry, cache: BRLCache | BRLMemory | None):
        """Returns compressed tokens, keys and values of all blocks that the tokens x touch."""
        mechanism = self.mechanism
        blocks = carry.tokens.shape[1]
        before_last = (blocks - 1) * mechanism.block
        start = jnp.arange(blocks, dtype=jnp.int32) * mechanism.block
        source: Any
        earlier: Any
        filled: Any
        if mechanism.memory == "layer" and not isinstance(cache, BRLCache):
            axis = sequence_axis(x.shape[1], mechanism.block)
            if axis is not None:
                earlier, filled = (None, 0) if cache is None else cache
                lengths = jnp.minimum(filled + start, mechanism.history)
                return stream(carry.tokens, x, earlier=earlier, history_lengths=lengths, axis_name=axis)
        if mechanism.memory == "output":
            source, filled = carry.source, carry.filled
        elif cache is None:
            source, filled = (x[:, :before_last] if blocks > 1 else None), 0
        elif isinstance(cache, BRLMemory):
            source, filled = jnp.concatenate([cache.history, x[:, :before_last]], axis=1), cache.filled
        else:
            assert cache.past is not None
            source = cache.past.extend(cache.length, x)[:, : mechanism.history + before_last]
            filled = cache.past.before.filled
        if source is None:
            return stream(carry.tokens, None)
        lengths = jnp.minimum(filled + start, mechanism.history)
        return stream(carry.tokens, source, history_lengths=lengths)

    def _step(self, stream, carry: BRLCarry, cache: BRLCache):
        """`_blocks` for one new token. Its block's compressed tokens change only when a new block begins, unless
        `generation` is "all"."""
        mechanism = self.mechanism
        history: Any = carry.source
        filled = carry.filled
        if cache.past is not None:
            everything = mechanism.generation == "all"
            history, filled = cache.past.recent(cache.length) if everything else cache.past.before

        def evolve(stream, tokens):
            return stream(tokens, history, history_lengths=filled[None], sown=False)

        def keep(stream, tokens):
            return tokens, cache.key[:, None], cache.value[:, None]

        if mechanism.generation == "all":
            return evolve(stream, carry.tokens)
        first = cache.length % mechanism.block == 0
        return nn.cond(first, evolve, keep, stream, carry.tokens)

    def _propagate(self, x, key, value, offset, lengths, packed=None):
        """F_prop (eqs. 8, 9), normalised and rectified in formulation "algorithm": (B, T, D).

        `offset` is the first token's position in its block, and `packed` describes the blocks of packed rows.
        """
        mechanism, d = self.mechanism, self.dimensions
        length = x.shape[1]
        blocks, count, heads, head_dim = key.shape[1:]
        use_bias = mechanism.phi == "spiky" or d.use_bias
        query = to_heads(d, x, "propagate_query", number=heads, size=head_dim, use_bias=use_bias)
        if mechanism.phi == "spiky":
            query = jnp.exp(jnp.minimum(query, _SPIKE_LIMIT))
        query = scale_scores(query, d.head_score_factor)
        init = nn.initializers.constant(mechanism.lambda_init)
        strength = parameter(self, "lambda", init, (heads,), ("heads",))
        bias: Any = position_bias(self, "propagate_bias")
        aligned, moved = blocks > 1, isinstance(offset, jax.Array)
        size = mechanism.block if aligned else length
        if aligned:
            # Move each token to its position in the grid of blocks; a block's tokens read its compressed tokens.
            query = jnp.pad(query, ((0, 0), (0, blocks * size - length), (0, 0), (0, 0)))
            query = jnp.roll(query, offset, axis=1) if moved else query
        if aligned and packed is not None:
            # All tokens read the first blocks' set. Tokens of further blocks also read their own, and use that result.
            query = jnp.concatenate([query, packed.further(query[:, :length], size)], axis=1)
            key, value = (
                jnp.concatenate([jnp.broadcast_to(a[:, :1], a.shape), a[:, 1:]], axis=1) for a in (key, value)
            )
        if bias is not None and packed is not None:
            inside = packed.places(size if aligned else None)
            bias = jax.vmap(lambda inside, bias=bias: bias(inside, jnp.full((count,), -1)))(inside)
        elif bias is not None:
            inside = jnp.arange(size) + (0 if aligned else offset)
            places = jnp.full((1, count), -1) if d.is_causal else spread(count, length, lengths)
            bias = jax.vmap(lambda places, bias=bias: bias(inside, places))(places)
        if maps_wanted(self) and packed is None:
            merged, offered = merge_blocks(query, key)
            weights = propagate_weights(merged, offered, strength=strength, score=mechanism.score, bias=bias)
            self.sow("maps", "propagate", weights)

        out = propagate_blocks(
            query, key, value,
            strength=strength, bias=bias, score=mechanism.score, implementation=d.implementation,
        )  # fmt: skip
        if aligned and packed is not None:
            further = packed.back(out[:, blocks * size :], size)
            out = jnp.where(packed.is_first[:, :, None, None], out[:, :length], further)
        elif aligned:
            out = jax.lax.dynamic_slice_in_dim(out, offset, length, axis=1) if moved else out[:, :length]
        out = constrain(rearrange(out, "b t n h -> b t (n h)"), ("batch", "length", "embed"))
        if mechanism.formulation == "algorithm":
            # The result enters the residual stream without a projection, so the norm starts at a projection's scale.
            # It divides by the size of all heads together, so only the ratios between the heads' strengths matter.
            first = math.sqrt(d.residual_scale)
            out = jax.nn.relu(norm(d, name="propagate_norm", scale=first)(out))
        return out
