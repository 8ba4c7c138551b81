"""Encoders and the classifiers on them: any listed mechanism that has a bidirectional form."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.segments import places_in_sequences
from brl_jax.fields import Count, Length, Range, Width
from brl_jax.layers.core.modules import dense
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import StackConfig
from brl_jax.models.inputs import InputKind, Inputs, Positions, check_ints, check_lengths, existing
from brl_jax.models.networks import make_stack
from brl_jax.models.pooling import Pooling, PoolingKind


@dataclasses.dataclass(frozen=True)
class EncoderConfig(StackConfig):
    """Size and parts of an encoder and of the classifier on it."""

    inputs: InputKind = "embed"
    """What a sequence consists of: tokens, each with a learned vector ("embed"); tokens that are grey levels, whose
    number, scaled to -1..1, goes through a linear map ("scale"); or vectors of num_features numbers, which go through
    a linear map ("features")."""
    positions: Positions = "rope"
    """Rotary positions (of base rope_theta), vectors added to the inputs (learned, or sines and cosines), or none: a
    mechanism that is itself free of order then sees a set."""
    pooling: PoolingKind = "mean"
    """What of the outputs is classified: their mean, their maximum, or that of a learned token put in front."""
    vocab_size: Count = 256
    """Number of tokens."""
    num_features: Width = 1
    """Numbers in each input vector; for inputs "features" only."""
    max_length: Length = 1024
    """Tokens of the longest sequence; "learned" positions have a vector for each."""
    num_classes: Annotated[int, Range(2, 2**20)] = 2
    """Number of classes."""

    def __post_init__(self):
        super().__post_init__()
        self.make_dimensions(is_causal=False)  # refuses mechanisms that cannot serve

    @property
    def dimensions(self) -> Dimensions:
        """The dimensions that each layer is built with."""
        return self.make_dimensions(is_causal=False)

    @property
    def rotary_base(self) -> float | None:
        return self.rope_theta if self.positions == "rope" else None

    @property
    def packs(self) -> bool:
        """Whether every layer takes segment_ids: several sequences in one row, none of which sees another."""
        return all(mechanism.packs_bidirectional for mechanism in self.mechanisms)


class Encoder(nn.Module):
    """Token outputs (B, T, D) of tokens (B, T) ints or, for inputs "features", of vectors (B, T, F) floats: an
    embedding or a linear map, positions, and a stack of blocks. The outputs are normalised, in the computation's dtype.

    Args of the call:
      inputs: the tokens or vectors.
      lengths: (B,) ints in 1..T, how many inputs of each row exist, the first ones; None: all. Whatever stands in the
        rest changes nothing, and its outputs are meaningless.
      segment_ids: (B, T) ints, equal for the tokens of one of several sequences packed in a row, none of which sees
        another; for mechanisms that pack in an encoder (docs/packing.md). A sequence is a run of equal ids, and no two
        sequences of a row have the same id. Positions start again with each sequence.
      prefix: (B, P, D) rows that stand in front of the inputs, without positions of their own kind added; the result
        is then (B, P + T, D), theirs first. It excludes segment_ids.
      deterministic: False applies dropout, with the random stream "dropout".

    Raises:
      ValueError: inputs, lengths or segment_ids of another shape or type, more than max_length tokens, segment_ids
        with a prefix or for a mechanism that does not pack, and, where the values are known (not traced), tokens
        outside the vocabulary and lengths outside 1..T. A traced token outside the vocabulary becomes a row of NaN.
    """

    config: EncoderConfig

    def setup(self):
        c, d = self.config, self.config.dimensions
        self.inputs = Inputs(
            d,
            c.num_features if c.inputs == "features" else c.vocab_size,
            kind=c.inputs,
            embedding_width=c.embedding_width,
            added=c.positions,
            max_length=c.max_length,
        )
        nn.share_scope(self, self.inputs)
        self.stack = make_stack(c.mechanisms, d, c.remat)
        self.dropout = nn.Dropout(c.dropout)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        *,
        lengths: Int[Array, "B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        prefix: Float[Array, "B P D"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B P+T D"]:
        self.inputs.check(inputs, lengths)
        check_ints("segment_ids", segment_ids, (inputs.shape[:2],))
        positions = None
        if segment_ids is not None:
            if prefix is not None:
                raise ValueError("segment_ids must be None with a prefix, which belongs to one sequence")
            # Rotary positions start again too: the features that Performer draws change when all are turned.
            positions = places_in_sequences(jnp.asarray(segment_ids))
        x = self.inputs.place(self.inputs.clear(inputs, lengths), positions)
        return self.transform(x, lengths, prefix, deterministic, segment_ids, positions)

    def transform(
        self,
        x: Float[Array, "B T D"],
        lengths: Int[Array, "B"] | None,
        prefix: Float[Array, "B P D"] | None,
        deterministic: bool,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B P+T D"]:
        """The outputs for embedded inputs; arguments as for the call. Packed rows have positions of their own."""
        if prefix is not None:
            x = jnp.concatenate([prefix.astype(x.dtype), x], axis=1)
            lengths = None if lengths is None else jnp.asarray(lengths).astype(jnp.int32) + prefix.shape[1]
        if lengths is not None:
            # A token outside the vocabulary is NaN, even where it is padding.
            x = jnp.where(existing(lengths, x.shape[1])[..., None], x, jnp.zeros((), x.dtype))
        x = self.dropout(x, deterministic=deterministic)
        y, _ = self.stack(
            x, lengths=lengths, segment_ids=segment_ids, positions=positions, deterministic=deterministic
        )
        return y


class _PooledEncoder(nn.Module):
    """One vector (B, D) float32 for each sequence; arguments as for `Encoder`. Its parameters are the encoder's."""

    config: EncoderConfig

    def setup(self):
        self.encoder = Encoder(self.config)
        self.pooling = Pooling(self.config.dimensions, self.config.pooling)
        nn.share_scope(self, self.encoder)
        nn.share_scope(self, self.pooling)

    def __call__(self, inputs: Array, *, lengths: Any = None, deterministic: bool = True):
        x = self.encoder.inputs(inputs, lengths)
        outputs = self.encoder.transform(x, lengths, self.pooling.prefix(x.shape[0]), deterministic)
        return self.pooling(outputs, lengths)


class _Head(nn.Module):
    """Features to logits in float32, through one hidden layer as wide as the feed-forward networks."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, features: Float[Array, "*B E"], deterministic: bool) -> Float[Array, "*B C"]:
        d = self.config.dimensions
        x = nn.Dropout(d.dropout)(features.astype(d.dtype), deterministic=deterministic)
        x = jax.nn.relu(dense(d, d.d_ff, ("features", "mlp"), name="hidden", use_bias=True)(x))
        scale = 1.0 if d.base_width is None else 0.0  # muP's read-out starts at zero
        logits = dense(
            d, self.config.num_classes, ("mlp", "classes"), name="out", use_bias=True, scale=scale
        )(x)
        return logits.astype(jnp.float32)


class Classifier(nn.Module):
    """Logits (B, C) float32 of sequences, one a row, (B, T) ints or (B, T, F) floats; arguments and errors as for
    `Encoder`."""

    config: EncoderConfig

    def setup(self):
        self.encoder = _PooledEncoder(self.config)
        self.head = _Head(self.config)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        *,
        lengths: Int[Array, "B"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B C"]:
        return self.head(self.features(inputs, lengths=lengths, deterministic=deterministic), deterministic)

    def features(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        *,
        lengths: Int[Array, "B"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B D"]:
        """What the head reads, float32: the pooled outputs of the encoder. Arguments as for the call."""
        return self.encoder(inputs, lengths=lengths, deterministic=deterministic)


class TokenClassifier(nn.Module):
    """Logits (B, T, C) float32 of each token of sequences; arguments and errors as for `Encoder`.

    The parameters under "encoder" are those of an `Encoder`, and of the encoder inside a `Classifier`, of the same
    configuration.
    """

    config: EncoderConfig

    def setup(self):
        self.encoder = Encoder(self.config)
        self.head = _Head(self.config)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T F"],
        *,
        lengths: Int[Array, "B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B T C"]:
        outputs = self.encoder(inputs, lengths=lengths, segment_ids=segment_ids, deterministic=deterministic)
        return self.head(outputs, deterministic)


class PairClassifier(nn.Module):
    """Logits (B, C) float32 of pairs (B, 2, T) ints, or (B, 2, T, F) floats, with lengths (B, 2): one encoder reads
    both, and the head gets [a, b, a * b, a - b] of their vectors, as in the Long Range Arena's retrieval (Tay et al.
    2020, arXiv:2011.04006).

    Raises ValueError as `Encoder` does, and for inputs that are no pairs.
    """

    config: EncoderConfig

    def setup(self):
        self.encoder = _PooledEncoder(self.config)
        self.head = _Head(self.config)

    def __call__(
        self,
        inputs: Int[Array, "B 2 T"] | Float[Array, "B 2 T F"],
        *,
        lengths: Int[Array, "B 2"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B C"]:
        return self.head(self.features(inputs, lengths=lengths, deterministic=deterministic), deterministic)

    def features(
        self,
        inputs: Int[Array, "B 2 T"] | Float[Array, "B 2 T F"],
        *,
        lengths: Int[Array, "B 2"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B 4*D"]:
        """What the head reads, [a, b, a * b, a - b], float32. Arguments and errors as for the call."""
        name, last = ("inputs", ", features") if self.config.inputs == "features" else ("tokens", "")
        if inputs.ndim != (4 if last else 3) or inputs.shape[1] != 2:
            raise ValueError(f"{name} must have shape (batch, 2, length{last}), got {inputs.shape}")
        check_lengths(lengths, inputs.shape[:2], inputs.shape[2])
        pairs = inputs.reshape(-1, *inputs.shape[2:])
        lengths = None if lengths is None else lengths.reshape(-1)
        pooled = self.encoder(pairs, lengths=lengths, deterministic=deterministic)
        a, b = pooled[0::2], pooled[1::2]
        return jnp.concatenate([a, b, a * b, a - b], axis=-1)
