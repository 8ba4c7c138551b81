"""Encoders and classifiers, for any listed mechanism with a bidirectional form."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import zero_padding
from brl_jax.attention.core.segments import places_in_sequences
from brl_jax.fields import Count, Length, Range, Width
from brl_jax.layers.core.modules import dense
from brl_jax.models.config import StackConfig, check_config
from brl_jax.models.inputs import InputKind, Inputs, Positions, check_ints, check_lengths
from brl_jax.models.networks import make_stack
from brl_jax.models.pooling import Pooling, PoolingKind


@dataclasses.dataclass(frozen=True)
class EncoderConfig(StackConfig):
    """Sizes and options of an encoder and of the classifier on top of it.

        config = EncoderConfig(num_layers=6, d_model=512, num_heads=8, num_classes=10, mechanism=LocalConfig())
        model = Classifier(config)

    Raises:
      ValueError: an option is out of range or contradicts another, or the mechanism has no bidirectional form.
    """

    is_causal: ClassVar[bool] = False

    inputs: InputKind = "embed"
    """What a sequence consists of: tokens that each have a learned vector ("embed"); tokens that are grey levels,
    scaled to -1..1 and mapped linearly ("scale"); or vectors of num_features numbers, mapped linearly ("features")."""
    positions: Positions = "rope"
    """Rotary positions (of base rope_theta), vectors added to the inputs (learned, or sines and cosines), or none. With
    none, a mechanism that ignores order sees a set."""
    pooling: PoolingKind = "mean"
    """What is classified: the outputs' mean, their maximum, or the output of a learned token in front ("cls")."""
    vocab_size: Count = 256
    """Number of tokens."""
    num_features: Width = 1
    """Numbers in each input vector; only for inputs "features"."""
    max_length: Length = 1024
    """Tokens of the longest sequence; "learned" positions have one vector for each."""
    num_classes: Annotated[int, Range(2, 2**20)] = 2
    """Number of classes."""

    @property
    def packs(self) -> bool:
        """Whether every layer takes segment_ids, so that one row can hold several independent sequences."""
        return all(mechanism.packs_bidirectional for mechanism in self.mechanisms)


class Encoder(nn.Module):
    """Outputs (B, T, D) for tokens (B, T) or, with inputs "features", for vectors (B, T, F).

        model = Encoder(EncoderConfig(vocab_size=1000))
        y = model.apply(model.init(key, tokens), tokens, lengths=lengths)

    An embedding or a linear map, positions, and a stack of blocks. The outputs are normalised and have the
    computation's dtype.

    Args of the call:
      inputs: the tokens (ints) or vectors (floats).
      lengths: (B,) ints in 1..T; the first `lengths[b]` inputs of row b are valid, None: all. The rest is ignored and
        its outputs are meaningless.
      segment_ids: (B, T) ints for rows that pack several sequences, each a run of equal ids that no other sequence of
        the row uses. Sequences do not see each other, and positions restart with each. Only for mechanisms that pack in
        an encoder (docs/packing.md).
      prefix: (B, P, D) rows to put in front of the inputs, without adding positions to them. The result is then
        (B, P + T, D) and starts with their outputs. Excludes segment_ids.
      deterministic: False applies dropout, with the random stream "dropout".

    Raises:
      ValueError: an argument has the wrong shape or type, a row has more than max_length tokens, segment_ids come with
        a prefix or with a mechanism that does not pack, a token is outside the vocabulary, or a length is outside 1..T.
        Traced values cannot be checked: a token outside the vocabulary then becomes a row of NaN.
    """

    config: EncoderConfig

    def setup(self):
        check_config(self.config, EncoderConfig)
        c, d = self.config, self.config.dimensions
        self.inputs = Inputs(
            d,
            c.num_features if c.inputs == "features" else c.vocab_size,
            kind=c.inputs,
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
            # Rotary positions must restart too: rotating all tokens alike changes Performer's random features.
            positions = places_in_sequences(jnp.asarray(segment_ids))
        x = self.inputs.place(self.inputs.clear(inputs, lengths), positions)
        if prefix is not None:
            x = jnp.concatenate([prefix.astype(x.dtype), x], axis=1)
            lengths = None if lengths is None else jnp.asarray(lengths).astype(jnp.int32) + prefix.shape[1]
        # A token outside the vocabulary is NaN even where it is padding.
        x = self.dropout(zero_padding(x, lengths), deterministic=deterministic)
        y, _ = self.stack(
            x, lengths=lengths, segment_ids=segment_ids, positions=positions, deterministic=deterministic
        )
        return y


class _PooledEncoder(nn.Module):
    """One float32 vector (B, D) for each sequence; arguments and parameters are `Encoder`'s."""

    config: EncoderConfig

    def setup(self):
        self.encoder = Encoder(self.config)
        self.pooling = Pooling(self.config.dimensions, self.config.pooling)
        nn.share_scope(self, self.encoder)
        nn.share_scope(self, self.pooling)

    def __call__(self, inputs: Array, *, lengths: Any = None, deterministic: bool = True):
        # Checks before the prefix reads the shape; the embedding also draws its random numbers first.
        self.encoder.inputs.check(inputs, lengths)
        prefix = self.pooling.prefix(inputs.shape[0])
        outputs = self.encoder(inputs, lengths=lengths, prefix=prefix, deterministic=deterministic)
        return self.pooling(outputs, lengths)


class _Head(nn.Module):
    """Float32 logits of features, through one hidden layer as wide as the feed-forward networks."""

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
    """Float32 logits (B, C) of sequences, (B, T) ints or (B, T, F) floats. Arguments and errors are `Encoder`'s.

    model = Classifier(EncoderConfig(num_classes=10))
    logits = model.apply(variables, tokens, lengths=lengths)
    """

    config: EncoderConfig

    def setup(self):
        check_config(self.config, EncoderConfig)
        self.encoder = _PooledEncoder(self.config)
        self.head = _Head(self.config)

    def __call__(
        self,
        inputs: Int[Array, "B *P T"] | Float[Array, "B *P T F"],
        *,
        lengths: Int[Array, "B *P"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B C"]:
        return self.head(self.features(inputs, lengths=lengths, deterministic=deterministic), deterministic)

    def features(
        self,
        inputs: Int[Array, "B *P T"] | Float[Array, "B *P T F"],
        *,
        lengths: Int[Array, "B *P"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B E"]:
        """Returns the head's inputs: the encoder's pooled outputs in float32. Arguments as for the call."""
        return self.encoder(inputs, lengths=lengths, deterministic=deterministic)


class TokenClassifier(nn.Module):
    """Float32 logits (B, T, C) of each token of sequences. Arguments and errors are `Encoder`'s.

    Its params["encoder"] also fit an `Encoder`, or a `Classifier`'s params["encoder"], of the same configuration.
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


class PairClassifier(Classifier):
    """Float32 logits (B, C) of pairs of sequences, (B, 2, T) ints or (B, 2, T, F) floats, with lengths (B, 2).

        model = PairClassifier(EncoderConfig(num_classes=2))
        logits = model.apply(variables, pairs, lengths=lengths)

    One encoder reads both sequences, and the head gets [a, b, a * b, a - b] of their vectors, as in the Long Range
    Arena's retrieval task (Tay et al. 2020, arXiv:2011.04006).

    Raises ValueError as `Encoder` does, and if the inputs do not come in pairs.
    """

    def features(
        self,
        inputs: Int[Array, "B 2 T"] | Float[Array, "B 2 T F"],
        *,
        lengths: Int[Array, "B 2"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B 4*D"]:
        """Returns the head's inputs [a, b, a * b, a - b] in float32. Arguments and errors as for the call."""
        name, last = ("inputs", ", features") if self.config.inputs == "features" else ("tokens", "")
        if inputs.ndim != (4 if last else 3) or inputs.shape[1] != 2:
            raise ValueError(f"{name} must have shape (batch, 2, length{last}), got {inputs.shape}")
        check_lengths(lengths, inputs.shape[:2], inputs.shape[2])
        pairs = inputs.reshape(-1, *inputs.shape[2:])
        lengths = None if lengths is None else lengths.reshape(-1)
        pooled = self.encoder(pairs, lengths=lengths, deterministic=deterministic)
        a, b = pooled[0::2], pooled[1::2]
        return jnp.concatenate([a, b, a * b, a - b], axis=-1)
