"""A masked language model: an encoder that predicts the tokens at chosen positions."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.modules import dense, norm, parameter
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import check_config
from brl_jax.models.encoder import Encoder, EncoderConfig
from brl_jax.models.inputs import check_ints, table_logits


class MaskedLM(nn.Module):
    """Float32 logits (B, P, V) of the tokens at P positions of each sequence, through the embedding table.

        model = MaskedLM(EncoderConfig(vocab_size=50265))
        logits = model.apply(variables, masked_tokens, places)

    The head is RoBERTa's (arXiv:1907.11692): a square map, GELU (by its tanh approximation), a norm, the embeddings and
    a bias. params["encoder"] also fit an `Encoder`, or a `Classifier`'s params["encoder"], of the same configuration.

    Args of the call:
      inputs: (B, T) ints, the tokens, some of them masked.
      places: (B, P) ints in 0..T-1.
      lengths: (B,) ints in 1..T; the first `lengths[b]` tokens of row b are valid, None: all.
      segment_ids: (B, T) ints for rows that pack several sequences; see `Encoder`.
      deterministic: False applies dropout, with the random stream "dropout".

    Raises:
      ValueError: inputs are not tokens, or a known place is out of range; otherwise as `Encoder`.
    """

    config: EncoderConfig

    def setup(self):
        check_config(self.config, EncoderConfig)
        if self.config.inputs != "embed":
            raise ValueError(f"inputs must be 'embed' in a masked language model, got {self.config.inputs!r}")
        self.encoder = Encoder(self.config)
        self.head = _MaskedHead(self.config, self.config.dimensions)

    def __call__(
        self,
        inputs: Int[Array, "B T"],
        places: Int[Array, "B P"],
        *,
        lengths: Int[Array, "B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B P V"]:
        batch, length = inputs.shape[:2]
        shape = (batch, *getattr(places, "shape", ())[1:2])
        check_ints("places", places, (shape,), within=(0, length - 1))
        outputs = self.encoder(inputs, lengths=lengths, segment_ids=segment_ids, deterministic=deterministic)
        chosen = jnp.take_along_axis(outputs, places[..., None], axis=1)
        return self.head(chosen, self.encoder.inputs.embedding)


class _MaskedHead(nn.Module):
    config: EncoderConfig
    dimensions: Dimensions

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"], embedding: Any) -> Float[Array, "B P V"]:
        c, d = self.config, self.dimensions
        hidden = dense(d, c.d_model, ("embed", "mlp"), name="dense", use_bias=True)(x)
        hidden = norm(d, name="norm")(jax.nn.gelu(hidden))
        logits = table_logits(d, hidden, embedding)
        bias = parameter(self, "bias", nn.initializers.zeros_init(), (c.vocab_size,), ("vocab",))
        return logits + bias.astype(jnp.float32)[None, None]
