"""Encoders that classify sequences, or pairs of them: any listed mechanism that has a bidirectional form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_at_least, check_choice
from brl_jax.layers.core.modules import dense, parameter
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import StackConfig
from brl_jax.models.stack import Stack
from brl_jax.sharding import constrain

Inputs = Literal["embed", "scale"]
Positions = Literal["rope", "learned", "sinusoidal"]
Pooling = Literal["mean", "max", "cls"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig(StackConfig):
    """Size and parts of an encoder and of the classifier on it."""

    inputs: Inputs = "embed"
    """How tokens come in: a learned vector for each ("embed"), or their number, scaled to -1..1, through a linear map
    ("scale"), for tokens that are grey levels."""
    positions: Positions = "rope"
    """Rotary positions (of base rope_theta), or vectors added to the tokens: learned, or sines and cosines."""
    pooling: Pooling = "mean"
    """What of the outputs is classified: their mean, their maximum, or that of a learned token put in front."""
    vocab_size: int = 256
    """Number of tokens."""
    max_length: int = 1024
    """Tokens of the longest sequence; "learned" positions have a vector for each."""
    num_classes: int = 2
    """Number of classes."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, "vocab_size", "max_length")
        if self.num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {self.num_classes}")
        for name, kind in (("inputs", Inputs), ("positions", Positions), ("pooling", Pooling)):
            check_choice(name, getattr(self, name), get_args(kind))
        self.make_dimensions(is_causal=False)  # refuses mechanisms that cannot serve

    @property
    def dimensions(self) -> Dimensions:
        """What each layer is told."""
        dimensions = self.make_dimensions(is_causal=False)
        return dimensions if self.positions == "rope" else dataclasses.replace(dimensions, rope_theta=None)


def sinusoidal_positions(length: int, width: int) -> Float[Array, "T D"]:
    """Sines in the even features, cosines in the odd ones, of t / 10000^(i / width) for feature i (float32).

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    feature = jnp.arange(width, dtype=jnp.int32)
    even = (feature - feature % 2).astype(jnp.float32)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * jnp.exp(even * (-math.log(1e4) / width))[None]
    return jnp.where(feature[None] % 2 == 0, jnp.sin(angle), jnp.cos(angle))


class Encoder(nn.Module):
    """Tokens (B, T) ints to one vector each (B, D) float32: embedding, positions, a stack of blocks, pooling.

    `encoder(tokens, lengths=...)`: lengths (B,) ints in 1..T, how many tokens of each row exist, the first ones; None:
    all. What stands in the rest changes nothing. Raises ValueError for tokens of another shape or type, or more than
    max_length of them.
    """

    config: EncoderConfig

    def setup(self):
        c, d = self.config, self.config.dimensions
        self.dimensions = d
        if c.inputs == "embed":
            init = nn.initializers.normal(c.embedding_width**-0.5)
            self.embedding: Any = parameter(
                self, "embedding", init, (c.vocab_size, c.d_model), ("vocab", "embed")
            )
        else:
            self.embedding = dense(d, c.d_model, ("pixel", "embed"), name="embedding", use_bias=True)
        unit = nn.initializers.normal(1.0)  # the size of the tokens
        if c.positions == "learned":
            self.position_table: Any = parameter(
                self, "positions", unit, (c.max_length, c.d_model), ("position", "embed")
            )
        if c.pooling == "cls":
            self.cls: Any = parameter(self, "cls", unit, (c.d_model,), ("embed",))
        self.stack = Stack(c.mechanisms, d, c.remat)
        self.dropout = nn.Dropout(c.dropout)

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        c, dtype = self.config, self.dimensions.dtype
        if c.inputs == "embed":
            x = jnp.take(constrain(self.embedding, ("vocab", None)), tokens, axis=0)
            x = x * math.sqrt(c.embedding_width)
        else:
            x = self.embedding(tokens.astype(jnp.float32)[..., None] * (2.0 / max(c.vocab_size - 1, 1)) - 1.0)
        if c.positions == "learned":
            x = x + self.position_table[: tokens.shape[1]].astype(x.dtype)[None]
        elif c.positions == "sinusoidal":
            x = x + sinusoidal_positions(tokens.shape[1], c.d_model).astype(x.dtype)[None]
        return constrain(x.astype(dtype), ("batch", "length", "embed"))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        lengths: Int[Array, "B"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B D"]:
        c = self.config
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must have shape (batch, length), not empty, got {tokens.shape}")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        if tokens.shape[1] > c.max_length:
            raise ValueError(f"tokens must be at most max_length={c.max_length} a row, got {tokens.shape[1]}")
        x = self._embed(tokens)
        if c.pooling == "cls":
            first = jnp.broadcast_to(self.cls.astype(x.dtype), (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([first, x], axis=1)
            lengths = None if lengths is None else lengths + 1
        exists = None
        if lengths is not None:
            exists = jnp.arange(x.shape[1], dtype=lengths.dtype)[None] < lengths[:, None]
            # A token outside the vocabulary is NaN, also where none exists.
            x = jnp.where(exists[..., None], x, jnp.zeros((), x.dtype))
        x = self.dropout(x, deterministic=deterministic)
        y, _ = self.stack(x, lengths=lengths, deterministic=deterministic)
        return _pool(y.astype(jnp.float32), exists, c.pooling)


def _pool(y: Float[Array, "B T D"], exists: Array | None, pooling: Pooling) -> Float[Array, "B D"]:
    if pooling == "cls":
        return y[:, 0]
    if exists is None:
        return y.mean(axis=1) if pooling == "mean" else y.max(axis=1)
    there = exists[..., None]
    if pooling == "max":
        return jnp.where(there, y, -jnp.inf).max(axis=1)
    return jnp.where(there, y, 0.0).sum(axis=1) / there.sum(axis=1).astype(jnp.float32)


class _Head(nn.Module):
    """Features to logits in float32, through one hidden layer as wide as the feed-forward networks."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, features: Float[Array, "B E"], deterministic: bool) -> Float[Array, "B C"]:
        d = self.config.dimensions
        x = nn.Dropout(d.dropout)(features.astype(d.dtype), deterministic=deterministic)
        x = jax.nn.relu(dense(d, d.d_ff, ("features", "mlp"), name="hidden", use_bias=True)(x))
        scale = 1.0 if d.base_width is None else 0.0  # muP's read-out says nothing at first
        logits = dense(
            d, self.config.num_classes, ("mlp", "classes"), name="out", use_bias=True, scale=scale
        )(x)
        return logits.astype(jnp.float32)


class Classifier(nn.Module):
    """Logits (B, C) float32 of sequences (B, T) ints; arguments as for `Encoder`."""

    config: EncoderConfig

    def setup(self):
        self.encoder = Encoder(self.config)
        self.head = _Head(self.config)

    def __call__(self, tokens: Int[Array, "B T"], *, lengths: Any = None, deterministic: bool = True):
        pooled = self.encoder(tokens, lengths=lengths, deterministic=deterministic)
        return self.head(pooled, deterministic)


class PairClassifier(nn.Module):
    """Logits (B, C) float32 of pairs (B, 2, T) ints with lengths (B, 2): one encoder reads both, and the head sees
    [a, b, a * b, a - b] of their vectors, as the Long Range Arena's retrieval (Tay et al. 2020, arXiv:2011.04006).

    Raises ValueError as `Encoder`, and for tokens that are no pairs.
    """

    config: EncoderConfig

    def setup(self):
        self.encoder = Encoder(self.config)
        self.head = _Head(self.config)

    def __call__(self, tokens: Int[Array, "B 2 T"], *, lengths: Any = None, deterministic: bool = True):
        if tokens.ndim != 3 or tokens.shape[1] != 2:
            raise ValueError(f"tokens must have shape (batch, 2, length), got {tokens.shape}")
        pairs = tokens.reshape(-1, tokens.shape[2])
        lengths = None if lengths is None else lengths.reshape(-1)
        pooled = self.encoder(pairs, lengths=lengths, deterministic=deterministic)
        a, b = pooled[0::2], pooled[1::2]
        return self.head(jnp.concatenate([a, b, a * b, a - b], axis=-1), deterministic)
