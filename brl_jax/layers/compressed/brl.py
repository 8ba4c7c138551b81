"""BRL attention as a layer: local attention plus compressed tokens that read the past (BRL-Attention, algorithm 1).

A sequence is cut in blocks. Each block has its own m compressed tokens, which read only the history before the block
(so nothing in a block depends on later tokens of it), evolve from layer to layer beside the main tokens, and are read
by the block's tokens. In an encoder there is one block, the sequence itself, and its history is the sequence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from brl_jax.attention.compressed.propagate import propagate, propagate_weights
from brl_jax.attention.core.checks import check_at_least
from brl_jax.attention.core.scores import Score
from brl_jax.layers.compressed.compressed_tokens import (
    COMPRESSED,
    CompressedStream,
    each_shard,
    merge_blocks,
    named,
    position_bias,
    spread,
)
from brl_jax.layers.core.modules import dense, maps_wanted, norm, parameter, scale_scores
from brl_jax.layers.core.protocol import Dimensions, Mechanism, check_call
from brl_jax.layers.local.local import LocalConfig
from brl_jax.sharding import constrain, sequence_axis

# exp(10) = 22026: large enough for any spike, small enough for sums of products in bfloat16.
_SPIKE_LIMIT = 10.0


@dataclasses.dataclass(frozen=True)
class BRLConfig(Mechanism):
    """BRL attention: a local pattern plus compressed tokens (symbols of the paper in brackets)."""

    window: int = 128
    """Width of the local attention [w], as in the mechanism `local`."""
    pattern: Literal["sliding", "dilated", "block", "bucketed"] = "sliding"
    """Pattern of the local attention [D]."""
    dilation: int = 2
    """Step between the keys of the pattern "dilated"."""
    num_compressed: int = 64
    """Compressed tokens [m], 1 to 256; 0 leaves the local attention alone."""
    compressed_dim: int | None = None
    """Their width [d_ct]; None for the model's."""
    block_size: int = 512
    """Tokens that share one set of compressed tokens; these read what precedes the block."""
    history_size: int | None = None
    """How many tokens before a block its compressed tokens read [n_hist]; None for block_size."""
    memory: Literal["output", "layer"] = "output"
    """What they read: "output", the network's final outputs (algorithm 1), without gradient and block after block;
    "layer", each layer's own inputs, all blocks at once and with gradient. An encoder's compressed tokens read the
    network's input or each layer's own."""
    generation: Literal["blocks", "all"] = "blocks"
    """What they read in generation: completed blocks only, which is what training computes, or all earlier tokens
    (figure 11), for tokens generated one at a time."""
    formulation: Literal["algorithm", "equations"] = "algorithm"
    """Algorithm 1, or equations 4-12 where the two differ: ReLU around the evolved tokens, no ReLU and norm around
    what is propagated, norms after the sublayers, no feed-forward network for the compressed tokens."""
    input_norm: bool = True
    """In "algorithm", normalise a layer's input; algorithm 1 as printed does not."""
    phi: Literal["linear", "spiky"] = "linear"
    """Feature map of the propagation's queries: linear, or exp of it, clipped."""
    score: Score = "softmax"
    """What turns logits into weights in compression and propagation [sigma]."""
    bias: Literal["none", "t5", "alibi"] = "none"
    """Relative bias in compression and propagation [b_rel], by the distance between a token and the block's start; in
    an encoder compressed tokens count as spread evenly over the sequence."""
    gamma: float | None = None
    """Weight of the second attention of compression; None: learned, three numbers a head; 0 switches it off."""
    lambda_init: float = 0.5
    """First value of the learned strength of the propagation, one a head."""
    beta: float = 0.5
    """Share of the previous layer's compressed tokens in the evolved ones, 0 to 1."""
    compress_scale: Literal["m1", "rsqrt", "learned"] = "rsqrt"
    """Scale of compression's logits: "m1", the paper's 1 / (m sqrt(h)), which begins with an almost uniform softmax;
    "rsqrt", 1 / sqrt(h), which reached the lower held-out loss on text; "learned", begun at the latter."""

    def __post_init__(self):
        check_at_least(self, "window", "dilation", "block_size")
        if not 0 <= self.num_compressed <= 256:
            raise ValueError(f"num_compressed must be 0 to 256, got {self.num_compressed}")
        if self.history_size is not None and self.history_size < 1:
            raise ValueError(f"history_size must be at least 1 or None, got {self.history_size}")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must be 0 to 1, got {self.beta}")

    @property
    def linear_cost(self) -> bool:
        return True

    @property
    def residual(self) -> str:
        if self.formulation == "equations":
            return "post"
        return "pre" if self.input_norm else "ffn"

    @property
    def segment(self) -> int | None:
        return self.block_size if self.memory == "output" and self.num_compressed else None

    @property
    def packs(self) -> bool:
        return not self.num_compressed and self.local.packs

    @property
    def local(self) -> LocalConfig:
        """The local attention inside."""
        return LocalConfig(self.window, self.pattern, self.dilation)

    @property
    def history(self) -> int:
        return self.block_size if self.history_size is None else self.history_size

    def width(self, dimensions: Dimensions) -> int:
        """Width of the compressed tokens."""
        return dimensions.d_model if self.compressed_dim is None else self.compressed_dim

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        if self.width(dimensions) % dimensions.num_heads:
            raise ValueError(
                f"compressed_dim must be a multiple of num_heads={dimensions.num_heads}, got {self.width(dimensions)}"
            )
        if dimensions.d_model % dimensions.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads={dimensions.num_heads}, got {dimensions.d_model}"
            )

    def check_stretches(self, length: int, devices: int) -> None:
        if self.memory == "layer" and self.num_compressed and length // devices % self.block_size:
            raise ValueError(
                f"block_size must divide the {length // devices} tokens of a row that each of {devices} devices has, "
                f"got {self.block_size}"
            )
        if self.segment is not None and self.segment % devices:
            raise ValueError(
                f"block_size must be a multiple of the {devices} devices that share each block, got {self.segment}"
            )

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        if not self.num_compressed:
            return self.local.layer(dimensions, **kwargs)
        return BRLAttention(self, dimensions, **kwargs)

    def carrier(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module | None:
        return BRLCarrier(self, dimensions, **kwargs) if self.num_compressed else None


def _is_decoding(cache: Any) -> bool:
    return cache is not None and "index" in cache


def _num_blocks(mechanism: BRLConfig, length: int, decoding: bool) -> int:
    """Blocks that `length` tokens touch, at the most; when decoding they may start anywhere in a block."""
    if mechanism.segment is not None:
        return 1
    if decoding:
        return (length + mechanism.block_size - 2) // mechanism.block_size + 1
    return -(-length // mechanism.block_size)


def _append(history: jax.Array, filled: Any, new: jax.Array):
    """The last tokens of [history | new], as long as history, without gradient; and how many of them exist."""
    size, length = history.shape[1], new.shape[1]
    filled = jnp.minimum(filled + length, size)
    new = new[:, max(length - size, 0) :].astype(history.dtype)
    history = jnp.concatenate([history[:, length:], new], axis=1) if length < size else new
    return jax.lax.stop_gradient(history), filled


class BRLCarrier(nn.Module):
    """Holds the compressed tokens' learned start and, for memory "output", the queue of the network's outputs."""

    mechanism: BRLConfig
    dimensions: Dimensions

    def init_memory(self, batch: int) -> dict[str, jax.Array] | None:
        if self.mechanism.memory == "layer":
            return None
        shape = (batch, self.mechanism.history, self.dimensions.d_model)
        return {"history": jnp.zeros(shape, self.dimensions.dtype), "filled": jnp.zeros((), jnp.int32)}

    def init_cache(self, batch: int, length: int) -> dict[str, jax.Array]:
        index = {"index": jnp.zeros((), jnp.int32)}
        memory = self.init_memory(batch)
        if memory is None:
            return index
        shape = (batch, self.mechanism.block_size, self.dimensions.d_model)
        return {**memory, **index, "current": jnp.zeros(shape, self.dimensions.dtype)}

    def memory_from_cache(self, cache: Any) -> dict[str, jax.Array] | None:
        """The training memory at the point where a decoding cache has arrived."""
        return None if self.mechanism.memory == "layer" else _memory_from_cache(self.mechanism, cache)

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], cache: Any) -> dict[str, Any]:
        mechanism, d = self.mechanism, self.dimensions
        shape = (mechanism.num_compressed, mechanism.width(d))
        init = nn.initializers.normal(1.0)
        table = parameter(self, "tokens", init, shape, ("compressed", "compressed_embed"))
        blocks = _num_blocks(mechanism, x.shape[1], _is_decoding(cache)) if d.is_causal else 1
        tokens = jnp.broadcast_to(table.astype(d.dtype)[None, None], (x.shape[0], blocks, *table.shape))
        tokens = constrain(tokens, COMPRESSED)
        if not d.is_causal:
            source = norm(d, name="history_norm")(x) if mechanism.memory == "output" else None
            return {"tokens": tokens, "history": source, "filled": None}
        if cache is None or mechanism.memory == "layer":
            return {"tokens": tokens, "history": None, "filled": None}
        history, filled = cache["history"], cache["filled"]
        if _is_decoding(cache) and mechanism.generation == "all" and x.shape[1] == 1:
            history, filled = _recent(mechanism, cache)
        return {"tokens": tokens, "history": history, "filled": filled}

    def close(self, y: Float[Array, "B T D"], cache: Any, count: Any) -> Any:
        if cache is None:
            return None
        if not _is_decoding(cache):
            history, filled = _append(cache["history"], cache["filled"], y)
            return {"history": history, "filled": filled}
        count = y.shape[1] if count is None else count
        if self.mechanism.memory == "layer":
            return {"index": cache["index"] + count}
        return _advance(self.mechanism, cache, y, count)


def _recent(mechanism: BRLConfig, cache: Any):
    """What precedes the next token: the last `history` tokens of [history | current], and how many exist."""
    both = jnp.concatenate([cache["history"], cache["current"]], axis=1)
    offset = cache["index"] % mechanism.block_size
    recent = jax.lax.dynamic_slice_in_dim(both, offset, mechanism.history, axis=1)
    return recent, jnp.minimum(cache["filled"] + offset, mechanism.history)


def _memory_from_cache(mechanism: BRLConfig, cache: Any) -> dict[str, jax.Array]:
    history, filled = _recent(mechanism, cache)
    return {"history": jax.lax.stop_gradient(history), "filled": filled}


def _write(mechanism: BRLConfig, cache: Any, new: jax.Array) -> jax.Array:
    """[history | current block | room], the new tokens in their places."""
    block = mechanism.block_size
    # Room for tokens that start anywhere in the current block, and for the next `current` after the last of them.
    blocks = (new.shape[1] + block - 2) // block + 1
    room = jnp.pad(cache["current"], ((0, 0), (0, blocks * block), (0, 0)))
    offset = cache["index"] % block
    room = jax.lax.dynamic_update_slice_in_dim(room, new.astype(room.dtype), offset, axis=1)
    return jnp.concatenate([cache["history"], room], axis=1)


def _advance(mechanism: BRLConfig, cache: Any, new: jax.Array, count: Any) -> dict[str, jax.Array]:
    """history, current, filled and index after the first `count` of the new tokens."""
    block, size = mechanism.block_size, mechanism.history
    both = _write(mechanism, cache, new)
    index = cache["index"] + count
    # Tokens by which the start of the current block moves on.
    shift = (cache["index"] % block + count) // block * block
    return {
        "history": jax.lax.stop_gradient(jax.lax.dynamic_slice_in_dim(both, shift, size, axis=1)),
        "current": jax.lax.dynamic_slice_in_dim(both, size + shift, block, axis=1),
        "filled": jnp.minimum(cache["filled"] + shift, size),
        "index": index,
    }


class BRLAttention(nn.Module):
    """F_BRL of algorithm 1: local attention of the tokens plus what they read from the compressed tokens.

    See `brl_jax.layers.core.protocol` for the call. `carry` holds the compressed tokens, and for memory "output" the
    history, both from `BRLCarrier`.
    """

    mechanism: BRLConfig
    dimensions: Dimensions

    def init_memory(self, batch: int) -> dict[str, jax.Array] | None:
        if self.mechanism.memory == "output":
            return None
        shape = (batch, self.mechanism.history, self.dimensions.d_model)
        return {"history": jnp.zeros(shape, self.dimensions.dtype), "filled": jnp.zeros((), jnp.int32)}

    def memory_from_cache(self, cache: Any) -> dict[str, jax.Array] | None:
        """The training memory at the point where a decoding cache has arrived."""
        return None if self.mechanism.memory == "output" else _memory_from_cache(self.mechanism, cache)

    def init_cache(self, batch: int, length: int) -> dict[str, Any]:
        mechanism, d = self.mechanism, self.dimensions
        offered = (batch, mechanism.num_compressed, d.num_heads, d.d_model // d.num_heads)
        cache: dict[str, Any] = {
            "window": mechanism.local.layer(d, parent=None).init_cache(batch, length),
            "key": jnp.zeros(offered, d.dtype),
            "value": jnp.zeros(offered, d.dtype),
            "index": jnp.zeros((), jnp.int32),
        }
        memory = self.init_memory(batch)
        if memory is not None:
            current = jnp.zeros((batch, mechanism.block_size, d.d_model), d.dtype)
            cache = {**cache, **memory, "current": current}
        return cache

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        carry: Any = None,
        cache: Any = None,
        positions: Any = None,
        lengths: Any = None,
        segment_ids: Any = None,
        count: Any = None,
        deterministic: bool = True,
    ):
        mechanism, d = self.mechanism, self.dimensions
        check_call(mechanism, segment_ids)
        decoding = _is_decoding(cache)
        out, _, window = mechanism.local.layer(d, name="local")(
            x,
            cache=cache["window"] if decoding else None,
            positions=positions,
            lengths=lengths,
            count=count,
            deterministic=deterministic,
        )
        stream = CompressedStream(mechanism, d, name="compressed")
        if not d.is_causal:
            source = x if carry["history"] is None else carry["history"]
            tokens, key, value = stream(carry["tokens"], source, source_lengths=lengths)
        elif decoding and x.shape[1] == 1:
            tokens, key, value = self._step(stream, x, carry, cache)
        else:
            tokens, key, value = self._blocks(stream, x, carry, cache)
        offset = cache["index"] % mechanism.block_size if decoding else 0
        out = out + self._propagate(x, key, value, offset, lengths)
        return out, {**carry, "tokens": tokens}, self._update(x, cache, window, key, value, count)

    def _blocks(self, stream, x, carry, cache):
        """Compressed tokens, keys and values of all blocks that the tokens x touch."""
        mechanism = self.mechanism
        blocks = carry["tokens"].shape[1]
        before_last = (blocks - 1) * mechanism.block_size
        start = jnp.arange(blocks, dtype=jnp.int32) * mechanism.block_size
        if mechanism.memory == "layer" and not _is_decoding(cache):
            axis = sequence_axis(x.shape[1], mechanism.block_size)
            if axis is not None:
                earlier, filled = (None, 0) if cache is None else (cache["history"], cache["filled"])
                lengths = jnp.minimum(filled + start, mechanism.history)
                return stream(carry["tokens"], x, earlier=earlier, history_lengths=lengths, axis_name=axis)
        if mechanism.memory == "output":
            source, filled = carry["history"], carry["filled"]
        elif cache is None:
            source, filled = (x[:, :before_last] if blocks > 1 else None), 0
        else:
            filled = cache["filled"]
            if _is_decoding(cache):
                source = _write(mechanism, cache, x)[:, : mechanism.history + before_last]
            else:
                source = jnp.concatenate([cache["history"], x[:, :before_last]], axis=1)
        if source is None:
            return stream(carry["tokens"], None)
        lengths = jnp.minimum(filled + start, mechanism.history)
        return stream(carry["tokens"], source, history_lengths=lengths)

    def _step(self, stream, x, carry, cache):
        """The same for one new token: its block's compressed tokens stay as they are until the block ends."""
        mechanism = self.mechanism
        if mechanism.memory == "output":
            history, filled = carry["history"], carry["filled"]
        elif mechanism.generation == "all":
            history, filled = _recent(mechanism, cache)
        else:
            history, filled = cache["history"], cache["filled"]

        def evolve(stream, tokens):
            return stream(tokens, history, history_lengths=filled[None])

        def keep(stream, tokens):
            return tokens, cache["key"][:, None], cache["value"][:, None]

        if mechanism.generation == "all":
            return evolve(stream, carry["tokens"])
        first = cache["index"] % mechanism.block_size == 0
        return nn.cond(first, evolve, keep, stream, carry["tokens"])

    def _propagate(self, x, key, value, offset, lengths):
        """F_prop (eqs. 8, 9), in algorithm 1 normalised and rectified: (B, T, D)."""
        mechanism, d = self.mechanism, self.dimensions
        length = x.shape[1]
        blocks, count, heads, head_dim = key.shape[1:]
        axes = ("embed", "heads", "head_dim")
        use_bias = mechanism.phi == "spiky" or d.use_bias
        query = dense(d, (heads, head_dim), axes, name="propagate_query", use_bias=use_bias)(x)
        if mechanism.phi == "spiky":
            query = jnp.exp(jnp.minimum(query, _SPIKE_LIMIT))
        query = scale_scores(query, d.head_score_factor)
        init = nn.initializers.constant(mechanism.lambda_init)
        strength = parameter(self, "lambda", init, (heads,), ("heads",))
        bias: Any = position_bias(self, "propagate_bias")
        aligned, moved = blocks > 1, isinstance(offset, jax.Array)
        size = mechanism.block_size if aligned else length
        if aligned:
            # Each token goes to its place in the grid of blocks; those of one block read its compressed tokens.
            query = jnp.pad(query, ((0, 0), (0, blocks * size - length), (0, 0), (0, 0)))
            query = jnp.roll(query, offset, axis=1) if moved else query
        if bias is not None:
            inside = jnp.arange(size) + (0 if aligned else offset)
            places = jnp.full((1, count), -1) if d.is_causal else spread(count, length, lengths)
            bias = jax.vmap(lambda places: bias(inside, places))(places)
        if maps_wanted(self):
            merged, offered = merge_blocks(query, key)
            weights = propagate_weights(merged, offered, strength=strength, score=mechanism.score, bias=bias)
            self.sow("maps", "propagate", weights)

        def read(query, key, value, strength, bias):
            merged, value = merge_blocks(query, value)
            out = propagate(
                merged,
                merge_blocks(query, key)[1],
                value,
                strength=strength,
                bias=bias,
                score=mechanism.score,
                implementation=d.implementation,
            )
            return out.reshape(query.shape)

        tokens = None if sequence_axis(query.shape[1], size if aligned else 1) is None else "length"
        queries = ("batch", tokens, "heads", None)
        offers = ("batch", "blocks" if aligned and tokens else None, None, "heads", None)
        rows = None if bias is None or bias.shape[0] == 1 else "batch"
        out = each_shard(
            read,
            queries,
            query=(query, queries),
            **named(offers, {"key": key, "value": value}),
            strength=(strength, ("heads",)),
            bias=(bias, (rows, "heads", None if aligned else tokens, None)),
        )
        if aligned:
            out = jax.lax.dynamic_slice_in_dim(out, offset, length, axis=1) if moved else out[:, :length]
        out = constrain(rearrange(out, "b t n h -> b t (n h)"), ("batch", "length", "embed"))
        if mechanism.formulation == "algorithm":
            # It writes into the residual stream without a projection, so its norm takes over the scale of those.
            first = math.sqrt(d.residual_scale)
            out = jax.nn.relu(norm(d, name="propagate_norm", scale=first)(out))
        return out

    def _update(self, x, cache, window, key, value, count):
        mechanism = self.mechanism
        if cache is None:
            return None
        if not _is_decoding(cache):
            history, filled = _append(cache["history"], cache["filled"], x)
            return {"history": history, "filled": filled}
        count = x.shape[1] if count is None else count
        # The block of the last new token; when it is complete, what is kept here is never read again.
        last = (cache["index"] % mechanism.block_size + count - 1) // mechanism.block_size
        new = {
            "window": window,
            "key": jax.lax.dynamic_index_in_dim(key, last, axis=1, keepdims=False),
            "value": jax.lax.dynamic_index_in_dim(value, last, axis=1, keepdims=False),
        }
        if mechanism.memory == "output":
            return {**new, "index": cache["index"] + count}
        return {**new, **_advance(mechanism, cache, x, count)}
