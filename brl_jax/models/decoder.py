"""The decoder language model: any listed mechanism, one network."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.brl import BRLConfig
from brl_jax.layers.mechanism import Dimensions, Mechanism
from brl_jax.models.losses import cross_entropy
from brl_jax.models.stack import Remat, Stack


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Size and parts of a decoder language model."""

    vocab_size: int = 256
    """Number of tokens."""
    num_layers: int = 4
    """Layers."""
    d_model: int = 256
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads; None for as many as query heads."""
    d_ff: int | None = None
    """Width inside the gated feed-forward network; None for 4 * d_model."""
    mechanism: Mechanism = BRLConfig()
    """What mixes tokens."""
    late_mechanism: Mechanism | None = None
    """A second mechanism, for the later or for every second layer."""
    schedule: Literal["split", "alternate"] = "split"
    """Where the second mechanism stands: in the later half of the layers, or in every second one."""
    rope_theta: float | None = 10000.0
    """Base of the rotary frequencies; None for no rotary positions."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    use_bias: bool = False
    """Biases in projections and norms."""
    dropout: float = 0.0
    """Rate after the embedding and after each sublayer."""
    remat: Remat = "none"
    """What a layer's backward pass computes again: nothing, all but matrix products, or all ("full")."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; parameters are float32."""
    implementation: Literal["xla", "pallas", "cudnn"] | None = None
    """Of the attention functions; None picks by platform."""

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads={self.num_heads}, got {self.d_model}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.rope_theta is not None and (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"rotary positions need an even head_dim, got d_model / num_heads = {self.d_model // self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        for mechanism in set(self.mechanisms):
            mechanism.check(self.dimensions)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanism of each layer."""
        late = self.mechanism if self.late_mechanism is None else self.late_mechanism
        if self.schedule == "alternate":
            return tuple(late if i % 2 else self.mechanism for i in range(self.num_layers))
        early = (self.num_layers + 1) // 2
        return (self.mechanism,) * early + (late,) * (self.num_layers - early)

    @property
    def dimensions(self) -> Dimensions:
        """What each layer is told."""
        return Dimensions(
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=self.d_model // self.num_heads,
            d_ff=4 * self.d_model if self.d_ff is None else self.d_ff,
            is_causal=True,
            rope_theta=self.rope_theta,
            norm=self.norm,
            use_bias=self.use_bias,
            dropout=self.dropout,
            residual_scale=1.0 / (2 * self.num_layers),
            dtype=jnp.dtype(self.dtype),
            implementation=self.implementation,
        )


class DecoderLM(nn.Module):
    """Token embedding, a stack of blocks, and logits through the same embedding.

    Three calls, all through `apply`:
      logits, memory = model(tokens, memory=memory)      a training or evaluation batch of a stream
      nll, weight, memory = model.loss(tokens, targets, weights, memory=memory)
      logits, cache = model(tokens, cache=cache)         generation, any number of tokens at a time
    `memory` (from `init_memory`, or None to begin without a past) is what the mechanism carries from batch to batch
    of a stream, without gradient; `cache` comes from `init_cache`.
    """

    config: DecoderConfig

    def setup(self):
        c = self.config
        self.embedding: Any = self.param(
            "embedding",
            nn.with_logical_partitioning(nn.initializers.normal(c.d_model**-0.5), ("vocab", "embed")),
            (c.vocab_size, c.d_model),
            c.dimensions.param_dtype,
        )
        self.stack = Stack(c.mechanisms, c.dimensions, c.remat)
        self.dropout = nn.Dropout(c.dropout)

    def _unbound_stack(self) -> Stack:
        return Stack(self.config.mechanisms, self.config.dimensions, self.config.remat, parent=None)

    def init_cache(self, batch: int, length: int) -> Any:
        """A decoding cache for `batch` sequences of up to `length` tokens."""
        if batch < 1 or length < 1:
            raise ValueError(f"batch and length of a cache must be at least 1, got {batch} and {length}")
        return self._unbound_stack().init_cache(batch, length)

    def init_memory(self, batch: int) -> Any:
        """The memory at the start of `batch` streams; None if the mechanisms carry nothing."""
        return self._unbound_stack().init_memory(batch)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        memory: Any = None,
        cache: Any = None,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        deterministic: bool = True,
    ):
        """The last hidden states (B, T, D), normalised, and the new memory or cache."""
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must have shape (batch, length), not empty, got {tokens.shape}")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        if memory is not None and cache is not None:
            raise ValueError(
                "memory and cache exclude each other: memory is for training, cache for generation"
            )
        # Inputs of size 1 beside logits of size 1, from one table: else what layers add drowns the tokens at first.
        x = jnp.take(self.embedding, tokens, axis=0) * math.sqrt(self.config.d_model)
        x = x.astype(self.config.dimensions.dtype)
        x = self.dropout(x, deterministic=deterministic)
        return self.stack(
            x,
            cache=memory if cache is None else cache,
            positions=positions,
            segment_ids=segment_ids,
            deterministic=deterministic,
        )

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32."""
        embedding = self.embedding.astype(hidden.dtype)
        return jnp.einsum("btd,vd->btv", hidden, embedding, preferred_element_type=jnp.float32)

    def __call__(self, tokens: Int[Array, "B T"], **kwargs: Any):
        """Logits (B, T, V) in float32 and the new memory or cache; arguments as for `hidden`."""
        hidden, new = self.hidden(tokens, **kwargs)
        return self.logits(hidden), new

    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"] | None = None,
        **kwargs: Any,
    ):
        """Sum of the targets' negative log-likelihoods in nats, sum of weights, and the new memory."""
        hidden, new = self.hidden(tokens, **kwargs)
        total, weight = cross_entropy(
            hidden, self.logits, targets, weights, vocab_size=self.config.vocab_size
        )
        return total, weight, new
