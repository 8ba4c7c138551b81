"""The bases of layers around attention functions: their call and their decoding cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from brl_jax.attention.core.rotary import RopeScaling
from brl_jax.attention.core.state import KeyValueCache
from brl_jax.fields import Even, Positive
from brl_jax.layers.core.modules import merge_heads, parameter, project_qkv, sow_weights, to_heads
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer, Residual


class Attention(NamedTuple):
    """What a layer computes for its tokens.

    Attributes:
      function: function(query, key, value, **options) computes the attention; `AttentionLayer.mix` gives the options.
      query, key, value: (B, T, N, F), (B, T, K, F) and (B, T, K, V).
      linear_part: a similar function that is linear in the values, for computing the attention matrix; None if
        `function` itself is linear.
      kept: further fields of the new cache, next to its state and length.
    """

    function: Callable[..., Any]
    query: Float[Array, "B T N F"]
    key: Float[Array, "B T K F"]
    value: Float[Array, "B T K V"]
    linear_part: Callable[..., Any] | None = None
    kept: Mapping[str, Any] = MappingProxyType({})

    def __call__(self, **options: Any) -> Any:
        return self.function(self.query, self.key, self.value, **options)


class AttentionLayer(MechanismLayer):
    """A layer that attends and merges the heads.

    A mechanism implements `attention`, and overrides other methods as needed: by default the decoding cache keeps the
    keys and values of all tokens. `attention` and `output` run inside a compact call, so they may create parameters.
    """

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        """Returns the attention function with its arguments for these tokens."""
        raise NotImplementedError

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Returns the layer's output for its input x."""
        return merge_heads(self.dimensions, attended)

    def key_shape(self) -> tuple[int, int]:
        """Returns heads and features of the keys."""
        return self.dimensions.num_kv_heads, self.dimensions.head_dim

    def init_cache(self, batch: int, length: int) -> Any:
        d = self.dimensions
        value_shape = (batch, length, d.num_kv_heads, d.head_dim)
        return KeyValueCache.empty((batch, length, *self.key_shape()), value_shape, d.dtype)

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, Any]:
        """Attends from new tokens (B, T, ...) to themselves and the cached ones; also returns the new cache. `options`
        are the function's."""
        cache = call.cache.append(attention.key, attention.value, call.count)
        attention = attention._replace(key=cache.key, value=cache.value)
        return attention(query_offset=call.start, **options), cache

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        attention = self.attention(x, call)
        options: dict[str, Any] = {"implementation": d.implementation}
        if d.is_causal and m.bidirectional:
            options["is_causal"] = True
        if call.cache is not None:
            attended, cache = self.step(attention, call, **options)
            return self.output(x, attended), cache
        options["key_value_seq_lengths"] = None if d.is_causal else call.lengths
        if m.packs:
            options["segment_ids"] = call.segment_ids
        linear = functools.partial(
            attention.linear_part or attention.function, attention.query, attention.key, **options
        )
        sow_weights(self, linear, attention.value)
        return self.output(x, attention(**options)), None


class StateLayer(AttentionLayer):
    """An `AttentionLayer` whose cache is the state of its attention function."""

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, Any]:
        return attention(state=call.cache, return_state=True, count=call.count, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(Mechanism):
    """Options that all mechanisms around softmax attention share."""

    sinks: bool = False
    """Whether each head has a learned logit without a value, which joins the keys in the softmax (gpt-oss,
    arXiv:2508.10925)."""
    logits_soft_cap: Positive | None = None
    """Bounds the scaled scores smoothly (Gemma 2, arXiv:2408.00118); None leaves them unbounded."""
    scale: Positive | None = None
    """Factor on the scores; None for 1 / sqrt(head dimension)."""
    qk_norm: bool | Literal["merged"] = False
    """Whether to normalise queries and keys before they are rotated: in each head (True; Qwen 3, Gemma 3) or over all
    heads together ("merged"; OLMo 2, arXiv:2501.00656)."""
    qkv_bias: bool | None = None
    """Whether the query, key and value projections have biases (Qwen 2); None follows the network's use_bias."""
    rope_theta: Positive | None = None
    """Base of these layers' rotary frequencies; None for the network's. No effect if the network has no rotary
    positions."""
    rope_scaling: RopeScaling = RopeScaling()
    """How to change these layers' rotary frequencies for long sequences."""
    rotary_dim: Even | Literal[0] | None = None
    """How many features of a head, from the first, are rotated; an even number (Qwen3-Next), or 0 for layers without
    positions (SmolLM3, arXiv:2501.18795). None for all."""
    output_gate: bool = False
    """Whether a sigmoid of the layer's input gates each feature of the heads' outputs (Qwen3-Next,
    arXiv:2505.06708)."""
    post_norm: bool = False
    """Whether blocks normalise the outputs of this layer and its feed-forward network instead of their inputs
    (OLMo 2)."""

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        if self.rotary_dim is not None and self.rotary_dim > dimensions.head_dim:
            raise ValueError(
                f"rotary_dim must be at most head_dim={dimensions.head_dim}, got {self.rotary_dim}"
            )

    @property
    def any_head_dim(self) -> bool:
        return True

    @property
    def residual(self) -> Residual:
        return "post" if self.post_norm else "pre"


class SoftmaxLayer(AttentionLayer):
    """A layer around softmax attention; its mechanism is a `SoftmaxConfig`."""

    mechanism: SoftmaxConfig

    def softmax(
        self, function: Callable[..., Any], x: Float[Array, "B T D"], call: LayerCall, **options: Any
    ) -> Attention:
        """Returns a softmax attention function with these options and the mechanism's."""
        m, d, sinks = self.mechanism, self.dimensions, None
        if m.rope_theta is not None and d.rope_theta is not None:
            d = dataclasses.replace(d, rope_theta=m.rope_theta)
        heads = project_qkv(
            d,
            x,
            call.positions,
            qk_norm=m.qk_norm,
            qkv_bias=m.qkv_bias,
            rope_scaling=m.rope_scaling,
            rotary_dim=m.rotary_dim,
        )
        if m.sinks:
            sinks = parameter(self, "sinks", nn.initializers.zeros_init(), (d.num_heads,), ("heads",))
        options |= {"sinks": sinks, "logits_soft_cap": m.logits_soft_cap, "scale": m.scale}
        return Attention(functools.partial(function, **options), *heads)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        if self.mechanism.output_gate:
            attended = attended * jax.nn.sigmoid(to_heads(self.dimensions, x, "gate"))
        return merge_heads(self.dimensions, attended)
