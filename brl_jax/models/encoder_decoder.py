"""The encoder-decoder: the encoder reads a source, and the decoder writes a target token by token."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

import flax.linen as nn
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import zero_padding
from brl_jax.fields import Count, Range
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.config import StackConfig, check_config, check_mechanism
from brl_jax.models.cross_attention import CrossConfig, CrossSizes, Encoded
from brl_jax.models.decoder import DecoderConfig, DecoderLM
from brl_jax.models.networks import make_stack

SequencePositions = Literal["rope", "sinusoidal", "none"]


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(DecoderConfig):
    """Sizes and options of an encoder-decoder.

        config = EncoderDecoderConfig(vocab_size=8000, num_layers=4, encoder_layers=4)
        model = EncoderDecoder(config)

    The fields of `DecoderConfig` describe the decoder. The encoder shares its width, heads, feed-forward networks and
    norms.
    """

    encoder_layers: Annotated[int, Range(1, 10_000)] = 4
    """Layers of the encoder."""
    encoder_mechanism: Mechanism | None = None
    """The mechanism of the encoder's layers; None: the bidirectional form of the decoder's."""
    cross_window: Count | None = None
    """Token t of the decoder sees the encoder's tokens t - cross_window // 2 to t + cross_window // 2; None: all of
    them. A window suits targets that follow their source position by position."""
    cross_compressed: bool = True
    """Whether the decoder also reads the tokens into which the encoder compresses its sequence (BRL)."""
    positions: SequencePositions = "rope"
    """Rotary positions (of base rope_theta) in the layers and in the cross-attention, sines and cosines added to both
    inputs, or none."""

    def __post_init__(self):
        if self.encoder_mechanism is not None:
            check_mechanism("encoder_mechanism", self.encoder_mechanism)
        super().__post_init__()
        if self.reversible:
            raise ValueError(
                "reversible must be False in an encoder-decoder, whose layers also read the encoder"
            )
        if self.lora_rank:
            raise ValueError(f"lora_rank must be 0 in an encoder-decoder, got {self.lora_rank}")
        if self.mechanisms[0].network is not None:
            raise ValueError(
                f"mechanism {self.mechanism.name} arranges its layers itself and has no cross-attention"
            )
        _ = self.encoder_dimensions  # raises for mechanisms without a bidirectional form

    def for_training(self, length: int) -> Self:
        config, encoder = super().for_training(length), self.encoder_mechanism
        return (
            config
            if encoder is None
            else dataclasses.replace(config, encoder_mechanism=encoder.for_training(length))
        )

    @property
    def encoder(self) -> StackConfig:
        """The encoder's configuration."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(StackConfig)}
        own = {
            "num_layers": self.encoder_layers,
            "mechanism": self.mechanism if self.encoder_mechanism is None else self.encoder_mechanism,
            "late_mechanism": None,
            "schedule": "split",
            "early_layers": None,
            "swap_mechanisms": False,
            "rope_theta": self.rotary_base,
        }
        return StackConfig(**(shared | own))

    @property
    def encoder_dimensions(self) -> Dimensions:
        """The dimensions that each layer of the encoder is built with."""
        return self.encoder.make_dimensions(is_causal=False)

    @property
    def num_summary(self) -> int:
        """How many compressed tokens of the encoder the decoder reads."""
        return self.encoder.mechanism.num_summary if self.cross_compressed else 0

    @property
    def cross_attention(self) -> CrossConfig:
        return CrossConfig(self.cross_window, rope=self.positions == "rope")


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder whose every layer reads its outputs (Vaswani et al. 2017, arXiv:1706.03762). Any listed
    mechanism works in both, with its bidirectional form in the encoder and its causal form in the decoder. Source,
    target and logits share one embedding table.

    Four calls, all through `apply`:
      logits, _ = model(tokens, source, source_lengths=lengths)                          teacher forcing
      encoded = model.encode(source, lengths)                                            generation: once,
      logits, cache = model(tokens, cache=cache, encoded=encoded)                        with the first tokens,
      logits, cache = model(tokens, cache=cache)                                         with all others
    The cache comes from `init_cache` and keeps the keys and values of the encoder's outputs. `brl_jax.generate` makes
    these calls. Source tokens beyond `lengths` are ignored.
    """

    config: EncoderDecoderConfig

    def setup(self):
        c = self.config
        check_config(c, EncoderDecoderConfig)
        self.decoder = DecoderLM(c)
        self.encoder = make_stack(c.encoder.mechanisms, c.encoder_dimensions, c.remat)
        self.dropout = nn.Dropout(c.dropout)

    def encode(
        self,
        source: Int[Array, "B S"],
        lengths: Int[Array, "B"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Encoded:
        """Returns what the decoder reads: the encoder's outputs (B, S, D) and, if the decoder reads them, its
        compressed tokens.

        Args:
          source: (B, S) ints in 0..vocab_size-1.
          lengths: (B,) ints in 1..S; the first `lengths[b]` tokens of row b are valid, None: all.
          deterministic: False applies dropout, with the random stream "dropout".

        Raises:
          ValueError: source or lengths have the wrong shape or type, or values out of range. Traced values cannot be
            checked: a token outside the vocabulary then gives NaN.
        """
        inputs = self.decoder.inputs
        inputs.check(source, lengths)
        # A token outside the vocabulary is NaN even where it is padding.
        x = self.dropout(zero_padding(inputs.place(source), lengths), deterministic=deterministic)
        encoded = self.encoder.encode(x, lengths=lengths, deterministic=deterministic)
        return encoded if self.config.num_summary else encoded._replace(compressed=None)

    def init_cache(self, batch: int, length: int, source_length: int) -> Any:
        """Returns an empty decoding cache for `batch` targets of up to `length` tokens and sources of `source_length`
        tokens.

        Raises:
          ValueError: batch, length or source_length is below 1.
        """
        if source_length < 1:
            raise ValueError(f"source_length of a cache must be at least 1, got {source_length}")
        sizes = CrossSizes(source_length, self.config.num_summary)
        return DecoderLM(self.config, parent=None).init_cache(batch, length, sizes)

    def absorbable(self, length: int) -> int:
        """Returns 0: no mechanism supported here absorbs tokens without computing their outputs."""
        return 0

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        source: Int[Array, "B S"] | None = None,
        *,
        source_lengths: Int[Array, "B"] | None = None,
        encoded: Encoded | None = None,
        cache: Any = None,
        deterministic: bool = True,
    ):
        """Returns the decoder's last hidden states (B, T, D), normalised, and the new cache.

        Args:
          tokens: (B, T) ints in 0..vocab_size-1, the target's tokens that are not in the cache yet.
          source, source_lengths: as for `encode`; or
          encoded: the result of `encode`. With a cache that has read it, give neither.
          cache: of the tokens so far, or None.
          deterministic: False applies dropout, with the random stream "dropout".

        Raises:
          ValueError: source and encoded are both given, or both missing without a cache; otherwise as `encode`.
        """
        if (source is None) == (encoded is None) and (cache is None or source is not None):
            raise ValueError(
                "exactly one of source and encoded must be given, or neither with a cache that has read them, got "
                f"{'neither' if source is None else 'both'}"
            )
        if source is not None:
            encoded = self.encode(source, source_lengths, deterministic=deterministic)
        return self.decoder.hidden(tokens, cache=cache, encoded=encoded, deterministic=deterministic)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the logits (B, T, V) in float32."""
        return self.decoder.logits(hidden)

    def __call__(self, tokens: Int[Array, "B T"], source: Int[Array, "B S"] | None = None, **kwargs: Any):
        """Returns the logits (B, T, V) in float32 and the new cache; arguments as for `hidden`."""
        hidden, cache = self.hidden(tokens, source, **kwargs)
        return self.logits(hidden), cache
