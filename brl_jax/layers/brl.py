"""BRL attention as a layer: local attention plus compressed tokens that read the past (BRL-Attention, algorithm 1).

A sequence is cut in blocks. Each block has its own m compressed tokens, which read only the history before the block
(so nothing in a block depends on later tokens of it), evolve from layer to layer beside the main tokens, and are read
by the block's tokens. In an encoder there is one block, the sequence itself, and its history is the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from brl_jax.attention.bias import ALiBi, PositionBias, T5Bias, alibi_slopes
from brl_jax.attention.compress import compress, compress_weights
from brl_jax.attention.compress_blocks import compress_blocks
from brl_jax.attention.propagate import propagate, propagate_weights
from brl_jax.attention.scores import Score
from brl_jax.layers.common import FeedForward, dense, head_norm, norm, parameter, scale_scores
from brl_jax.layers.local import LocalConfig
from brl_jax.layers.mechanism import Dimensions, Mechanism, check_call
from brl_jax.sharding import constrain, shard_call

# exp(10) = 22026: large enough for any spike, small enough for sums of products in bfloat16.
_SPIKE_LIMIT = 10.0
# The dimensions of compressed tokens, for a mesh.
_COMPRESSED = ("batch", None, "compressed", "compressed_embed")


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
        for name in ("window", "dilation", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
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
    size = history.shape[1]
    history = jnp.concatenate([history, new.astype(history.dtype)], axis=1)[:, new.shape[1] :]
    return jax.lax.stop_gradient(history), jnp.minimum(filled + new.shape[1], size)


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
        tokens = constrain(tokens, _COMPRESSED)
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


class CompressedStream(nn.Module):
    """One layer of the compressed tokens: they read the history, evolve, and offer keys and values to the tokens."""

    mechanism: BRLConfig
    dimensions: Dimensions

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, "B C M E"],
        source: Float[Array, "B S D"] | None,
        *,
        history_lengths: Any = None,
        source_lengths: Any = None,
    ):
        """Returns the tokens for the next layer (B, C, M, E) and keys and values (B, C, M, N, H).

        source: what the blocks read, in a decoder laid out as `compress_blocks` wants it, short of zeros in front;
        history_lengths: (C,), how much of its history exists for each block; source_lengths: (B,), in an encoder.
        """
        mechanism, d = self.mechanism, self.dimensions
        equations = mechanism.formulation == "equations"
        read = tokens
        if source is None and self.is_initializing():
            self._read(tokens, jnp.zeros((tokens.shape[0], 1, d.d_model), d.dtype), None, None)
        elif source is not None:
            read = self._read(tokens, source, history_lengths, source_lengths)
            if history_lengths is not None:
                read = jnp.where((history_lengths > 0)[None, :, None, None], read, tokens)
        width = tokens.shape[-1]
        carried = dense(d, width, ("compressed_embed", "compressed_out"), name="carry")(tokens)
        beta = mechanism.beta
        evolved = (1.0 - beta) * norm(d, name="read_norm", axis="compressed_embed")(read) + beta * carried
        evolved = constrain(jax.nn.relu(evolved) if equations else evolved, _COMPRESSED)
        shape = (d.num_heads, d.d_model // d.num_heads)
        key = dense(d, shape, ("compressed_embed", "heads", "head_dim"), name="propagate_key")(evolved)
        value = dense(d, shape, ("compressed_embed", "heads", "head_dim"), name="propagate_value")(evolved)
        if not equations:
            tokens = constrain(tokens + evolved, _COMPRESSED)
            normed = norm(d, name="ffn_norm", axis="compressed_embed")(tokens)
            tokens = constrain(tokens + FeedForward(d, name="ffn")(normed), _COMPRESSED)
            return tokens, key, value
        return evolved, key, value

    def _read(self, tokens, source, history_lengths, source_lengths):
        """F_comp (eqs. 11, 12): (B, C, M, E)."""
        mechanism, d = self.mechanism, self.dimensions
        blocks, count, width = tokens.shape[1:]
        shape = (d.num_heads, width // d.num_heads)
        axes = ("compressed_embed", "heads", "head_dim")
        query = scale_scores(dense(d, shape, axes, name="compress_query")(tokens), d.head_score_factor)
        gamma: Any = mechanism.gamma
        contrast_key = None
        key, value = (
            dense(d, shape, ("embed", "heads", "head_dim"), name=f"compress_{name}")(source)
            for name in ("key", "value")
        )
        if gamma == 0.0:
            gamma = None
        else:
            axes = ("embed", "heads", "head_dim")
            contrast_key = dense(d, shape, axes, name="compress_contrast_key")(source)
        if mechanism.gamma is None:
            g = parameter(self, "gamma", nn.initializers.normal(0.1), (3, d.num_heads), (None, "heads"))
            gamma = jnp.exp(g[0] * g[1]) - jnp.exp(g[0] * g[2])
        scale = None if mechanism.compress_scale == "m1" else 1.0 / math.sqrt(shape[1])
        if mechanism.compress_scale == "learned":
            learned = parameter(
                self, "compress_scale", nn.initializers.ones_init(), (d.num_heads,), ("heads",)
            )
            query = query * learned.astype(d.dtype).reshape(1, 1, 1, d.num_heads, 1)
        bias: Any = position_bias(self, "compress_bias")
        if history_lengths is None:
            length = source.shape[1]
            if bias is not None:
                tokens_at = jnp.arange(length)
                bias = jax.vmap(lambda places: bias(places, tokens_at))(
                    _spread(count, length, source_lengths)
                )
            if self.is_mutable_collection("maps"):
                mask = None if source_lengths is None else jnp.arange(length)[None] < source_lengths[:, None]
                weights = compress_weights(
                    query[:, 0],
                    key,
                    contrast_key,
                    gamma=gamma,
                    scale=scale,
                    score=mechanism.score,
                    bias=bias,
                    mask=None if mask is None else mask[:, None, None],
                )
                self.sow("maps", "compress", weights)
            read = _each_shard(
                functools.partial(
                    compress,
                    scale=scale,
                    score=mechanism.score,
                    implementation=d.implementation,
                ),
                bias,
                query[:, 0],
                key,
                contrast_key,
                value,
                gamma=gamma,
                key_value_seq_lengths=source_lengths,
            )[:, None]
        else:
            size = mechanism.history
            missing = size + (blocks - 1) * mechanism.block_size - source.shape[1]
            room = ((0, 0), (missing, 0), (0, 0), (0, 0))
            key, value = jnp.pad(key, room), jnp.pad(value, room)
            if contrast_key is not None:
                contrast_key = jnp.pad(contrast_key, room)
            if bias is not None:
                bias = bias(jnp.full((count,), size), jnp.arange(size))
            read = _each_shard(
                functools.partial(
                    compress_blocks,
                    block_size=mechanism.block_size,
                    history_size=size,
                    scale=scale,
                    score=mechanism.score,
                    implementation=d.implementation,
                ),
                bias,
                query,
                key,
                contrast_key,
                value,
                gamma=gamma,
                history_lengths=history_lengths,
            )
        read = head_norm(d, name="compress_norm")(read)
        return constrain(rearrange(read, "b c m n h -> b c m (n h)"), _COMPRESSED)


def _each_shard(function: Any, bias: Any, *arrays: Any, **parts: Any) -> Any:
    """function(*arrays, **parts, bias=bias), by each device of a mesh on its own rows and heads.

    With a bias, which only XLA's forms of the functions take, the compiler divides the work.

    Args:
      arrays: (B, ..., N, H) or None, the first shaped like the result.
      parts: one number a head, (N,) or a plain one, except for lengths: (B,), or (C,) for each block.
    """
    if bias is not None:
        return function(*arrays, **parts, bias=bias)
    given = {name: part for name, part in parts.items() if isinstance(part, jax.Array)}
    function = functools.partial(function, **{name: parts[name] for name in parts.keys() - given.keys()})
    heads = [
        ("batch", *(None for _ in x.shape[1:-2]), "heads", None) if x is not None else () for x in arrays
    ]
    axis = {"history_lengths": None, "key_value_seq_lengths": "batch"}
    return shard_call(
        lambda *operands: function(*operands[: len(arrays)], **dict(zip(given, operands[len(arrays) :]))),
        (*arrays, *given.values()),
        (*heads, *((axis.get(name, "heads"),) for name in given)),
        heads[0],
    )


def _spread(count: int, length: int, lengths: Any) -> jax.Array:
    """Positions of `count` compressed tokens spread evenly over each sequence: (1, M), or (B, M) by their lengths."""
    lengths = jnp.full((1,), length, jnp.int32) if lengths is None else lengths
    return (2 * jnp.arange(count, dtype=jnp.int32) + 1)[None] * lengths[:, None] // (2 * count)


def position_bias(module: nn.Module, name: str) -> PositionBias | None:
    """The b_rel of a BRL module: ALiBi, or T5 with a learned table `name`; None without."""
    mechanism, d = module.mechanism, module.dimensions
    if mechanism.bias == "alibi":
        return ALiBi(alibi_slopes(d.num_heads))
    if mechanism.bias == "t5":
        table = parameter(module, name, nn.initializers.normal(0.02), (32, d.num_heads), (None, "heads"))
        return T5Bias(table, max_distance=mechanism.history, bidirectional=not d.is_causal)
    return None


class BRLAttention(nn.Module):
    """F_BRL of algorithm 1: local attention of the tokens plus what they read from the compressed tokens.

    See `brl_jax.layers.mechanism` for the call. `carry` holds the compressed tokens, and for memory "output" the
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
        start = jnp.arange(blocks, dtype=jnp.int32) * mechanism.block_size
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
        size = length if blocks == 1 else mechanism.block_size
        aligned = blocks > 1
        if aligned:
            room = ((0, 0), (0, blocks * size - length), (0, 0), (0, 0))
            # Each token goes to its place in the grid of blocks; those of one block read its compressed tokens.
            query = jnp.roll(jnp.pad(query, room), offset, axis=1)
            query = rearrange(query, "b (c t) n h -> (b c) t n h", c=blocks)
        if bias is not None:
            inside = jnp.arange(size) + (0 if aligned else offset)
            places = jnp.full((1, count), -1) if d.is_causal else _spread(count, length, lengths)
            bias = jax.vmap(lambda places: bias(inside, places))(places)
        if self.is_mutable_collection("maps"):
            merged = rearrange(key, "b c m n h -> (b c) m n h")
            weights = propagate_weights(query, merged, strength=strength, score=mechanism.score, bias=bias)
            self.sow("maps", "propagate", weights)
        out = _each_shard(
            functools.partial(propagate, score=mechanism.score, implementation=d.implementation),
            bias,
            query,
            rearrange(key, "b c m n h -> (b c) m n h"),
            rearrange(value, "b c m n h -> (b c) m n h"),
            strength=strength,
        )
        if aligned:
            out = rearrange(out, "(b c) t n h -> b (c t) n h", c=blocks)
            out = jax.lax.dynamic_slice_in_dim(out, offset, length, axis=1)
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
