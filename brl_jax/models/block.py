"""A transformer block: a mechanism, optionally attention to an encoder's outputs, and a feed-forward network."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.dense.full import full_attention
from brl_jax.layers.core.modules import FeedForward, dense, merge_heads, norm, scale_scores
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.sharding import constrain


class Encoded(NamedTuple):
    """What a decoder reads from an encoder.

    Attributes:
      outputs: (B, S, D), the encoder's outputs.
      lengths: (B,) ints, how many of each row exist, the first ones; None for all. The rest changes nothing.
    """

    outputs: Any
    lengths: Any = None


class CrossAttention(nn.Module):
    """Softmax attention of x (B, T, D) to an encoder's outputs (B, S, D) (Vaswani et al. 2017, arXiv:1706.03762,
    section 3.2.3), without positions: the encoder's outputs carry theirs. A row of length 0 gives zeros.

    Keys and values are projected anew in every call, also in generation.
    """

    dimensions: Dimensions

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], encoded: Encoded) -> Float[Array, "B T D"]:
        d = self.dimensions
        heads = (d.num_kv_heads, d.head_dim)
        query = dense(d, (d.num_heads, d.head_dim), ("embed", "heads", "head_dim"), name="query")(x)
        key = dense(d, heads, ("embed", "kv_heads", "head_dim"), name="key")(encoded.outputs)
        value = dense(d, heads, ("embed", "kv_heads", "head_dim"), name="value")(encoded.outputs)
        attended = full_attention(
            scale_scores(query, d.head_score_factor),
            key,
            value,
            key_value_seq_lengths=encoded.lengths,
            # There is no Pallas kernel of full attention; a network may ask for those of its mechanism.
            implementation=d.implementation if d.implementation in ("xla", "cudnn") else None,
        )
        return merge_heads(d, attended)


class Block(nn.Module):
    """A mechanism and (mostly) a feed-forward network, each added to the residual stream (see `Mechanism.residual`).

    With `output_norms` of the dimensions, what each of them gives is normalised before it is added, besides its input
    (Gemma 2, arXiv:2408.00118): h = x + norm(mix(norm(x))).

    With `cross_attention` there is a second mixer between them, `CrossAttention` to what `encoded` holds, normalised
    as the feed-forward network is.
    """

    mechanism: Mechanism
    dimensions: Dimensions
    cross_attention: bool = False

    def setup(self):
        d = self.dimensions
        self.mixer = self.mechanism.layer(d)
        if self.mechanism.residual != "ffn":
            self.mixer_norm = norm(d, name="mixer_norm")
        if self.cross_attention:
            self.cross_mixer = CrossAttention(d)
            self.cross_norm = norm(d, name="cross_norm")
        if self.mechanism.residual != "mixer":
            self.feed_forward = FeedForward(d)
            self.feed_forward_norm = norm(d, name="feed_forward_norm")
        if d.output_norms:
            self.mixer_output_norm = norm(d, name="mixer_output_norm")
            if self.cross_attention:
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
        encoded: Encoded | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """The output, the new carry and the new cache; `call` holds the layer's other arguments."""
        mixed, carry, cache = self.mix(x, carry, cache, call, deterministic)
        x = constrain_stream(x + mixed)
        if encoded is not None:
            x = constrain_stream(x + self.attend(x, encoded, deterministic))
        if self.mechanism.residual != "mixer":
            x = constrain_stream(x + self.transform(x, deterministic))
        return x, carry, cache

    def mix(
        self, x: Float[Array, "B T D"], carry: Any, cache: Any, call: dict[str, Any], deterministic: bool
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """What the mechanism adds to the residual stream, the new carry and the new cache."""
        residual = self.mechanism.residual
        mixed, carry, cache = self.mixer(
            self.mixer_norm(x) if residual in ("pre", "mixer") else x,
            carry=carry,
            cache=cache,
            deterministic=deterministic,
            **call,
        )
        if residual == "post":
            mixed = self.mixer_norm(mixed)
        if self.dimensions.output_norms:
            mixed = self.mixer_output_norm(mixed)
        return self.dropout(mixed, deterministic=deterministic), carry, cache

    def attend(
        self, x: Float[Array, "B T D"], encoded: Encoded, deterministic: bool
    ) -> Float[Array, "B T D"]:
        """What attention to the encoder's outputs adds to the residual stream."""
        if self.mechanism.residual == "post":
            mixed = self.cross_norm(self.cross_mixer(x, encoded))
        else:
            mixed = self.cross_mixer(self.cross_norm(x), encoded)
        if self.dimensions.output_norms:
            mixed = self.cross_output_norm(mixed)
        return self.dropout(mixed, deterministic=deterministic)

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
