"""A transformer block: a mechanism, optionally attention to an encoder's outputs, and a feed-forward network."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.layers.core.modules import FeedForward, norm
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.cross_attention import CrossAttention, CrossCache, CrossCall, CrossConfig
from brl_jax.sharding import constrain


class BlockCache(NamedTuple):
    """The decoding cache of a block that keeps the keys and values of its cross-attention, beside its mixer's cache."""

    mixer: Any
    cross: CrossCache


class Block(nn.Module):
    """A mechanism and (mostly) a feed-forward network, each added to the residual stream (see `Mechanism.residual`).

    With `output_norms` of the dimensions, what each of them gives is normalised before it is added, besides its input
    (Gemma 2, arXiv:2408.00118): h = x + norm(mix(norm(x))).

    With `cross_attention` there is a second mixer between them, `CrossAttention` to what `cross` names, normalised as
    the feed-forward network is.
    """

    mechanism: Mechanism
    dimensions: Dimensions
    cross_attention: CrossConfig | None = None

    def setup(self):
        d = self.dimensions
        self.mixer = self.mechanism.layer(d)
        if self.mechanism.residual != "ffn":
            self.mixer_norm = norm(d, name="mixer_norm")
        if self.cross_attention is not None:
            self.cross_mixer = CrossAttention(self.cross_attention, d)
            self.cross_norm = norm(d, name="cross_norm")
        if self.mechanism.residual != "mixer":
            self.feed_forward = FeedForward(d)
            self.feed_forward_norm = norm(d, name="feed_forward_norm")
        if d.output_norms:
            self.mixer_output_norm = norm(d, name="mixer_output_norm")
            if self.cross_attention is not None:
                self.cross_output_norm = norm(d, name="cross_output_norm")
            if self.mechanism.residual != "mixer":
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
        """The output, the new carry and the new cache; `call` holds the layer's other arguments."""
        mixed, carry, cache = self.mix(x, carry, cache, call, deterministic)
        x = constrain_stream(x + mixed)
        if cross is not None:
            mixed, cache = self.attend(x, cross, cache, deterministic)
            x = constrain_stream(x + mixed)
        if self.mechanism.residual != "mixer":
            x = constrain_stream(x + self.transform(x, deterministic))
        return x, carry, cache

    def mix(
        self, x: Float[Array, "B T D"], carry: Any, cache: Any, call: dict[str, Any], deterministic: bool
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """What the mechanism adds to the residual stream, the new carry and the new cache."""
        residual = self.mechanism.residual
        kept = isinstance(cache, BlockCache)
        mixed, carry, mixer_cache = self.mixer(
            self.mixer_norm(x) if residual in ("pre", "mixer") else x,
            carry=carry,
            cache=cache.mixer if kept else cache,
            deterministic=deterministic,
            **call,
        )
        if residual == "post":
            mixed = self.mixer_norm(mixed)
        if self.dimensions.output_norms:
            mixed = self.mixer_output_norm(mixed)
        cache = BlockCache(mixer_cache, cache.cross) if kept else mixer_cache
        return self.dropout(mixed, deterministic=deterministic), carry, cache

    def attend(
        self, x: Float[Array, "B T D"], cross: CrossCall, cache: Any, deterministic: bool
    ) -> tuple[Float[Array, "B T D"], Any]:
        """What attention to the encoder's outputs adds to the residual stream, and the block's new cache."""
        kept = isinstance(cache, BlockCache)
        read = x if self.mechanism.residual == "post" else self.cross_norm(x)
        mixed, cross_cache = self.cross_mixer(read, cross, cache.cross if kept else None)
        if self.mechanism.residual == "post":
            mixed = self.cross_norm(mixed)
        if self.dimensions.output_norms:
            mixed = self.cross_output_norm(mixed)
        cache = cache._replace(cross=cross_cache) if kept else cache
        return self.dropout(mixed, deterministic=deterministic), cache

    def transform(self, x: Float[Array, "B T D"], deterministic: bool) -> Float[Array, "B T D"]:
        """What the feed-forward network adds to the residual stream."""
        if self.mechanism.residual == "post":
            mixed = self.feed_forward_norm(self.feed_forward(x))
        else:
            mixed = self.feed_forward(self.feed_forward_norm(x))
        if self.dimensions.output_norms:
            mixed = self.feed_forward_output_norm(mixed)
        return self.dropout(mixed, deterministic=deterministic)


def constrain_stream(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream. Each device of a mesh has its rows at full width, so that norms need no exchange."""
    return constrain(x, ("batch", "length", "embed"))
