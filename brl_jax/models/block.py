"""A transformer block: a mechanism, optional cross-attention to an encoder, and a feed-forward network."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.layers.core.modules import FeedForward, norm
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.cross_attention import CrossAttention, CrossCache, CrossCall, CrossConfig
from brl_jax.sharding import constrain

#: Shards the residual stream by batch and length only: full-width rows let norms run without communication.
constrain_stream = functools.partial(constrain, names=("batch", "length", "embed"))


class BlockCache(NamedTuple):
    """The decoding cache of a block with cross-attention: its mixer's cache and the keys and values it reads."""

    mixer: Any
    cross: CrossCache


class Block(nn.Module):
    """A mechanism and, for most mechanisms, a feed-forward network; each adds to the residual stream
    (see `Mechanism.residual`).

    If `dimensions.output_norms` is set, outputs are normalised as well as inputs: h = x + norm(mix(norm(x)))
    (Gemma 2, arXiv:2408.00118).

    With `cross_attention`, a `CrossAttention` sits between the two. It reads `cross` and has norms like the
    feed-forward network's.
    """

    mechanism: Mechanism
    dimensions: Dimensions
    cross_attention: CrossConfig | None = None

    def setup(self):
        d = self.dimensions
        self.residual = self.mechanism.residual
        self.mixer = self.mechanism.layer(d)
        if self.residual != "ffn":
            self.mixer_norm = norm(d, name="mixer_norm")
        if self.cross_attention is not None:
            self.cross_mixer = CrossAttention(self.cross_attention, d)
            self.cross_norm = norm(d, name="cross_norm")
        if self.residual != "mixer":
            self.feed_forward = FeedForward(d)
            self.feed_forward_norm = norm(d, name="feed_forward_norm")
        if d.output_norms:
            self.mixer_output_norm = norm(d, name="mixer_output_norm")
            if self.cross_attention is not None:
                self.cross_output_norm = norm(d, name="cross_output_norm")
            if self.residual != "mixer":
                self.feed_forward_output_norm = norm(d, name="feed_forward_output_norm")
        self.dropout = nn.Dropout(d.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        carry: Any,
        cache: Any,
        call: dict[str, Any],
        deterministic: bool,
        cross: CrossCall | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Returns the output, the new carry and the new cache; `call` holds the layer's other arguments."""
        mixed, carry, cache = self.mix(x, carry, cache, call, deterministic)
        x = constrain_stream(x + mixed)
        if cross is not None:
            mixed, cache = self.attend(x, cross, cache, deterministic)
            x = constrain_stream(x + mixed)
        if self.residual != "mixer":
            x = constrain_stream(x + self.transform(x, deterministic))
        return x, carry, cache

    def mix(
        self, x: Float[Array, "B T D"], carry: Any, cache: Any, call: dict[str, Any], deterministic: bool
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Returns the mechanism's contribution to the residual stream, the new carry and the new cache."""
        residual = self.residual
        crossed = isinstance(cache, BlockCache)
        read = self.mixer_norm(x) if residual in ("pre", "mixer") else x
        options = {
            "carry": carry,
            "cache": cache.mixer if crossed else cache,
            "deterministic": deterministic,
            **call,
        }
        kept = options.pop("kept", None)
        if kept is not None:
            # All tokens are valid, but those that the cache does not keep need not fit into it.
            options["count"] = jnp.int32(x.shape[1])
        mixed, carry, mixer_cache = self.mixer(read, **options)
        if kept is not None:
            # The compiler merges what the two calls share and drops the second one's output.
            _, _, mixer_cache = self.mixer(read, **{**options, "count": kept})
        if residual == "post":
            mixed = self.mixer_norm(mixed)
        if self.dimensions.output_norms:
            mixed = self.mixer_output_norm(mixed)
        cache = BlockCache(mixer_cache, cache.cross) if crossed else mixer_cache
        return self.dropout(mixed, deterministic=deterministic), carry, cache

    def attend(
        self, x: Float[Array, "B T D"], cross: CrossCall, cache: Any, deterministic: bool
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the cross-attention's contribution to the residual stream and the block's new cache."""
        kept = isinstance(cache, BlockCache)
        read = x if self.residual == "post" else self.cross_norm(x)
        mixed, cross_cache = self.cross_mixer(read, cross, cache.cross if kept else None)
        if self.residual == "post":
            mixed = self.cross_norm(mixed)
        if self.dimensions.output_norms:
            mixed = self.cross_output_norm(mixed)
        cache = cache._replace(cross=cross_cache) if kept else cache
        return self.dropout(mixed, deterministic=deterministic), cache

    def transform(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        """Returns the feed-forward network's contribution to the residual stream."""
        if self.residual == "post":
            mixed = self.feed_forward_norm(self.feed_forward(x))
        else:
            mixed = self.feed_forward(self.feed_forward_norm(x))
        if self.dimensions.output_norms:
            mixed = self.feed_forward_output_norm(mixed)
        return self.dropout(mixed, deterministic=deterministic)
