"""The compressed tokens of BRL attention: what they read in each layer, and their keys and values for the tokens."""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from brl_jax.attention.compressed import sharded
from brl_jax.attention.compressed.compress import compress, compress_weights
from brl_jax.attention.compressed.compress_blocks import compress_blocks, compress_blocks_weights
from brl_jax.attention.core.biases import ALiBi, PositionBias, T5Bias, alibi_slopes
from brl_jax.attention.core.rotary import rotate
from brl_jax.layers.core.modules import (
    FeedForward,
    dense,
    head_norm,
    maps_wanted,
    norm,
    parameter,
    scale_scores,
)
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.sharding import constrain
from pallas_kernels.absent import existing

# Logical names of the compressed tokens' dimensions (B, C, M, E), for dividing them over a mesh.
COMPRESSED = ("batch", "blocks", "compressed", "compressed_embed")


class CompressedStream(nn.Module):
    """One layer of the compressed tokens: they read the history, evolve, and give the tokens keys and values."""

    mechanism: Any
    dimensions: Dimensions

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, "B C M E"],
        source: Float[Array, "B S D"] | None,
        *,
        earlier: Float[Array, "B R D"] | None = None,
        history_lengths: Any = None,
        source_lengths: Any = None,
        axis_name: str | None = None,
        sown: bool = True,
    ):
        """Runs one layer. It sows its attention weights into "maps": "compress" (S1 - gamma S2) and "compress_first"
        (S1 alone), (B, N, M, S) in an encoder and (B, C, N, M, R) in a decoder, where R is the history's size.

        Args:
          tokens: (B, C, M, E), the compressed tokens of C blocks.
          source: (B, S, D), what they read; None without a history. In a decoder it has the layout of
            `compress_blocks`, without the zeros in front.
          earlier: (B, R, D), with `axis_name`: what precedes all blocks.
          history_lengths: (C,) ints, or (B, C) in packed rows; in a decoder, how much of each block's history exists.
          source_lengths: (B,) ints; in an encoder, the sequences' lengths.
          axis_name: in a decoder, the mesh axis that shards the tokens, if any. The source is then the blocks' tokens.
          sown: whether it may sow; False inside a conditional.

        Returns:
          The compressed tokens for the next layer (B, C, M, E), and their keys and values (B, C, M, N, H).
        """
        mechanism, d = self.mechanism, self.dimensions
        equations = mechanism.formulation == "equations"
        read = tokens
        if source is None and self.is_initializing():
            empty = jnp.zeros((tokens.shape[0], 1, d.d_model), d.dtype)
            self._read(tokens, empty, None, None, None, None, False)
        elif source is not None:
            read = self._read(tokens, source, earlier, history_lengths, source_lengths, axis_name, sown)
            if history_lengths is not None:
                read = jnp.where(jnp.atleast_2d(history_lengths > 0)[:, :, None, None], read, tokens)
        width = tokens.shape[-1]
        evolved = norm(d, name="read_norm", axis="compressed_embed")(read)
        if mechanism.beta:
            carried = dense(d, width, ("compressed_embed", "compressed_out"), name="carry")(tokens)
            evolved = (1.0 - mechanism.beta) * evolved + mechanism.beta * carried
        evolved = constrain(jax.nn.relu(evolved) if equations else evolved, COMPRESSED)
        shape = (d.num_heads, d.d_model // d.num_heads)
        key = dense(d, shape, ("compressed_embed", "heads", "head_dim"), name="propagate_key")(evolved)
        value = dense(d, shape, ("compressed_embed", "heads", "head_dim"), name="propagate_value")(evolved)
        if not equations:
            tokens = constrain(tokens + evolved, COMPRESSED)
            normed = norm(d, name="ffn_norm", axis="compressed_embed")(tokens)
            tokens = constrain(tokens + FeedForward(d, name="ffn")(normed), COMPRESSED)
            return tokens, key, value
        return evolved, key, value

    def _read(self, tokens, source, earlier, history_lengths, source_lengths, axis_name, sown):
        """F_comp (eqs. 11, 12): (B, C, M, E)."""
        mechanism, d = self.mechanism, self.dimensions
        count, width = tokens.shape[2:]
        shape = (d.num_heads, width // d.num_heads)
        axes = ("compressed_embed", "heads", "head_dim")
        query = scale_scores(dense(d, shape, axes, name="compress_query")(tokens), d.head_score_factor)
        gamma: Any = None if mechanism.gamma == 0.0 else mechanism.gamma
        names = ("key", "value") if mechanism.gamma == 0.0 else ("key", "value", "contrast_key")
        project = dense(d, (len(names), *shape), ("embed", None, "heads", "head_dim"), name="compress_source")
        read, before = (
            {} if part is None else dict(zip(names, jnp.moveaxis(project(part), -3, 0)))
            for part in (source, earlier)
        )
        if mechanism.gamma is None:
            g = parameter(self, "gamma", nn.initializers.normal(0.1), (3, d.num_heads), (None, "heads"))
            gamma = jnp.exp(g[0] * g[1]) - jnp.exp(g[0] * g[2])
        scale = None if mechanism.compress_scale == "m1" else 1.0 / math.sqrt(shape[1])
        if mechanism.compress_scale == "learned":
            learned = parameter(
                self, "compress_scale", nn.initializers.ones_init(), (d.num_heads,), ("heads",)
            )
            query = query * learned.astype(d.dtype).reshape(1, 1, 1, d.num_heads, 1)
        if mechanism.compress_positions == "rope" and d.rope_theta is not None:
            in_blocks, whole_row = history_lengths is not None, axis_name is not None
            turn = functools.partial(rotate, theta=d.rope_theta)
            query, read, before = self._rotate(
                turn, query, read, before, source_lengths, in_blocks, whole_row
            )
        bias: Any = position_bias(self, "compress_bias")
        static = {"scale": scale, "score": mechanism.score, "implementation": d.implementation}
        if history_lengths is None:
            out = self._read_sequence(query[:, 0], read, gamma, bias, source_lengths, static)[:, None]
        else:
            if bias is not None:
                bias = bias(jnp.full((count,), mechanism.history), jnp.arange(mechanism.history))
            out = self._read_histories(
                query, read, before, gamma, bias, history_lengths, axis_name, static, sown
            )
        out = head_norm(d, d.norm, name="compress_norm")(out)
        return constrain(rearrange(out, "b c m n h -> b c m (n h)"), COMPRESSED)

    def _rotate(self, rotate, query, read, before, source_lengths, in_blocks, whole_row):
        """Rotates queries and keys by their positions, which count from the first token that block 0 can read."""
        blocks, count = query.shape[1:3]
        length, size, block = read["key"].shape[1], self.mechanism.history, self.mechanism.block

        def turn(keys, first):
            places = first + jnp.arange(keys["key"].shape[1], dtype=jnp.int32)[None]
            return {name: a if name == "value" else rotate(a, places) for name, a in keys.items()}

        if not in_blocks:
            places = spread(count, length, source_lengths)
            return rotate(query[:, 0], places)[:, None], turn(read, 0), before
        starts = size + jnp.arange(blocks, dtype=jnp.int32) * block
        query = jax.vmap(lambda q, start: rotate(q, start[None, None]), (1, 0), 1)(query, starts)
        # The source ends where the last block starts, unless it is the whole row.
        first = size if whole_row else size + (blocks - 1) * block - length
        return query, turn(read, first), turn(before, 0) if before else before

    def _read_sequence(self, query, read, gamma, bias, lengths, static):
        """`_read` in an encoder, whose single block reads the sequence itself."""
        count, length = query.shape[1], read["key"].shape[1]
        if bias is not None:
            tokens_at = jnp.arange(length)
            bias = jax.vmap(lambda places: bias(places, tokens_at))(spread(count, length, lengths))
        if maps_wanted(self):
            mask = None if lengths is None else existing(lengths, length)
            weigh = functools.partial(
                compress_weights,
                query,
                read["key"],
                gamma=gamma,
                scale=static["scale"],
                score=static["score"],
                bias=bias,
                mask=None if mask is None else mask[:, None, None],
            )
            self._sow(weigh, read)
        read = {"contrast_key": None, **read}
        return compress(query, **read, gamma=gamma, bias=bias, key_value_seq_lengths=lengths, **static)

    def _sow(self, weigh, read):
        self.sow("maps", "compress", weigh(read.get("contrast_key")))
        self.sow("maps", "compress_first", weigh(None))

    def _read_histories(self, query, read, before, gamma, bias, lengths, axis_name, static, sown):
        """`_read` in a decoder: each block reads the tokens before it."""
        mechanism = self.mechanism
        block, size = mechanism.block, mechanism.history
        if axis_name is None:
            missing = size + (query.shape[1] - 1) * block - read["key"].shape[1]
            padding = ((0, 0), (missing, 0), (0, 0), (0, 0))
            read = {name: jnp.pad(array, padding) for name, array in read.items()}
            function: Any = compress_blocks
            if sown and maps_wanted(self):
                weigh = functools.partial(
                    compress_blocks_weights,
                    query,
                    read["key"],
                    gamma=gamma,
                    block_size=block,
                    history_size=size,
                    history_lengths=lengths,
                    scale=static["scale"],
                    score=static["score"],
                    bias=bias,
                )
                self._sow(weigh, read)
        else:
            function = functools.partial(sharded.compress_blocks, axis_name=axis_name)
        before = {f"earlier_{name}": array for name, array in before.items()}
        return function(
            query, **{"contrast_key": None, **read}, **before, gamma=gamma, bias=bias, history_lengths=lengths,
            block_size=block, history_size=size, **static,
        )  # fmt: skip


def spread(count: int, length: int, lengths: Any) -> jax.Array:
    """Spreads the positions of `count` compressed tokens evenly over each sequence: (1, M), or (B, M) with lengths."""
    lengths = jnp.full((1,), length, jnp.int32) if lengths is None else jnp.minimum(lengths, length)
    return (2 * jnp.arange(count, dtype=jnp.int32) + 1)[None] * lengths[:, None] // (2 * count)


def position_bias(module: nn.Module, name: str) -> PositionBias | None:
    """Returns the relative bias [b_rel] of a BRL module: ALiBi, T5's with a learned table `name`, or None."""
    mechanism, d = module.mechanism, module.dimensions
    if mechanism.bias == "alibi":
        return ALiBi(alibi_slopes(d.num_heads))
    if mechanism.bias == "t5":
        table = parameter(module, name, nn.initializers.normal(0.02), (32, d.num_heads), (None, "heads"))
        return T5Bias(table, max_distance=mechanism.history, bidirectional=not d.is_causal)
    return None
