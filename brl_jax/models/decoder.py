"""The decoder language model: any listed mechanism, one network."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_at_least
from brl_jax.layers.compressed.tlinformer import TLinFormerConfig
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import StackConfig
from brl_jax.models.losses import cross_entropy
from brl_jax.models.stack import Stack
from brl_jax.models.tlinformer.stack import TLinFormerStack, make_stack
from brl_jax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class DecoderConfig(StackConfig):
    """Size and parts of a decoder language model."""

    vocab_size: int = 256
    """Number of tokens."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, "vocab_size")
        self.make_dimensions(is_causal=True)  # refuses mechanisms that cannot serve

    @property
    def dimensions(self) -> Dimensions:
        """What each layer is told."""
        return self.make_dimensions(is_causal=True)


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
            nn.with_logical_partitioning(nn.initializers.normal(c.embedding_width**-0.5), ("vocab", "embed")),
            (c.vocab_size, c.d_model),
            c.dimensions.param_dtype,
        )
        self.stack = make_stack(c.mechanisms, c.dimensions, c.remat)
        self.dropout = nn.Dropout(c.dropout)

    def _unbound_stack(self) -> Stack:
        return make_stack(self.config.mechanisms, self.config.dimensions, self.config.remat, parent=None)

    def init_cache(self, batch: int, length: int) -> Any:
        """A decoding cache for `batch` sequences of up to `length` tokens."""
        if batch < 1 or length < 1:
            raise ValueError(f"batch and length of a cache must be at least 1, got {batch} and {length}")
        stack = self._unbound_stack()
        if isinstance(stack, TLinFormerStack):
            return stack.init_cache(batch, length, tokens=True)
        return stack.init_cache(batch, length)

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
        x = self.dropout(self._embed(tokens), deterministic=deterministic)
        call = {} if cache is None else self._recall(tokens, cache)
        return self.stack(
            x,
            **{"cache": memory if cache is None else cache, **call},
            positions=positions,
            segment_ids=segment_ids,
            deterministic=deterministic,
        )

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # Inputs of size 1 beside logits of size 1, from one table: else what layers add drowns the tokens at first.
        x = jnp.take(constrain(self.embedding, ("vocab", None)), tokens, axis=0)
        x = (x * math.sqrt(self.config.embedding_width)).astype(self.config.dimensions.dtype)
        return constrain(x, ("batch", "length", "embed"))

    def _recall(self, tokens: Int[Array, "B T"], cache: Any) -> dict[str, Any]:
        """What a stack's call needs that goes back to the tokens: a cache that holds them, and their embedding."""
        if not isinstance(self.stack, TLinFormerStack):
            return {}
        places = cache["index"] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        past = cache["past"].at[:, places].set(tokens.astype(jnp.int32), mode="drop")
        return {"cache": {**cache, "past": past}, "embed": self._embed}

    def unread(self, length: int) -> int:
        """How many of the first `length` tokens of a sequence `absorb` can take, if only the last one's output
        counts."""
        mechanism = self.config.mechanism
        if not isinstance(mechanism, TLinFormerConfig):
            return 0
        return (length - 1) // mechanism.window * mechanism.window

    def absorb(self, tokens: Int[Array, "B T"], cache: Any) -> Any:
        """The cache after tokens whose outputs nobody wants; see `unread` and `TLinFormerStack.absorb`."""
        cache = self._recall(tokens, cache)["cache"]
        return self.stack.absorb(self._embed(tokens), cache)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32."""
        base = self.config.mup_base_width
        # muP: the table's entries do not shrink with the width, so the products of a wider one are scaled down.
        hidden = hidden if base is None else hidden * jnp.asarray(base / self.config.d_model, hidden.dtype)
        embedding = self.embedding.astype(hidden.dtype)
        logits = jnp.einsum("btd,vd->btv", hidden, embedding, preferred_element_type=jnp.float32)
        return constrain(logits, ("batch", "length", "vocab"))

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
