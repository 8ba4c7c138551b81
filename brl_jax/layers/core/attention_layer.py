"""The base of layers around attention functions without a recurrent state."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.rotary import RopeScaling
from brl_jax.attention.core.state import KeyValueCache
from brl_jax.fields import Even, Positive
from brl_jax.layers.core.modules import merge_heads, parameter, project_qkv, sow_weights, to_heads
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer, Residual


class AttentionLayer(MechanismLayer):
    """A layer that projects its tokens to queries, keys and values, attends, and merges the heads.

    A mechanism implements `attend` and overrides other methods as needed: by default `project_qkv` projects the tokens,
    and the decoding cache keeps the keys and values of all tokens. `heads` and `output` run inside a compact call, so
    they may create parameters.
    """

    def heads(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T N F"], Float[Array, "B T K F"], Float[Array, "B T K H"]]:
        """Returns queries, keys and values."""
        return project_qkv(self.dimensions, x, positions)

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Any:
        """Computes the attention function, (B, T, N, H).

        In training it gets the options key_value_seq_lengths and implementation, is_causal for mechanisms with a causal
        form, and segment_ids for those that pack. The default `step` passes is_causal, query_offset and
        implementation. Both add `attention_options`.
        """
        raise NotImplementedError

    def attention_options(self, call: LayerCall) -> dict[str, Any]:
        """Returns the mechanism's additional options of `attend`. Called once, inside a compact call."""
        return {}

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Returns the layer's output for its input x."""
        return merge_heads(self.dimensions, attended)

    def key_shape(self) -> tuple[int, int]:
        """Returns heads and features of the keys."""
        return self.dimensions.num_kv_heads, self.dimensions.head_dim

    def init_cache(self, batch: int, length: int) -> Any:
        d = self.dimensions
        value_shape = (batch, length, d.num_kv_heads, d.head_dim)
        return KeyValueCache.empty((batch, length, *self.key_shape()), value_shape, d.dtype)

    def step(self, query: Array, key: Array, value: Array, call: LayerCall) -> tuple[Array, Any]:
        """Attends from new tokens (B, T, ...) to themselves and the cached ones; also returns the new cache."""
        cache = call.cache.append(key, value, call.count)
        attended = self.attend(
            query,
            cache.key,
            cache.value,
            is_causal=True,
            query_offset=call.start,
            implementation=self.dimensions.implementation,
            **self.attention_options(call),
        )
        return attended, cache

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d = self.dimensions
        query, key, value = self.heads(x, call.positions)
        if call.cache is not None:
            call.check_one_sequence()
            attended, cache = self.step(query, key, value, call)
            return self.output(x, attended), cache
        options: dict[str, Any] = {
            "key_value_seq_lengths": None if d.is_causal else call.lengths,
            "implementation": d.implementation,
        }
        if self.mechanism.causal:
            options["is_causal"] = d.is_causal
        if self.mechanism.packs:
            options["segment_ids"] = call.segment_ids
        options |= self.attention_options(call)

        def attend(value: Array) -> Array:
            return self.attend(query, key, value, **options)

        sow_weights(self, attend, value)
        return self.output(x, attend(value)), None


class FunctionStateLayer(AttentionLayer):
    """An `AttentionLayer` whose cache is the state of its attention function."""

    def step(self, query: Array, key: Array, value: Array, call: LayerCall) -> tuple[Array, Any]:
        return self.attend(
            query,
            key,
            value,
            is_causal=True,
            state=call.cache,
            return_state=True,
            count=call.count,
            implementation=self.dimensions.implementation,
            **self.attention_options(call),
        )


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

    def heads(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        mechanism, d = self.mechanism, self.dimensions
        if mechanism.rope_theta is not None and d.rope_theta is not None:
            d = dataclasses.replace(d, rope_theta=mechanism.rope_theta)
        return project_qkv(
            d,
            x,
            positions,
            qk_norm=mechanism.qk_norm,
            qkv_bias=mechanism.qkv_bias,
            rope_scaling=mechanism.rope_scaling,
            rotary_dim=mechanism.rotary_dim,
        )

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        if self.mechanism.output_gate:
            attended = attended * jax.nn.sigmoid(to_heads(self.dimensions, x, "gate"))
        return super().output(x, attended)

    def attention_options(self, call: LayerCall) -> dict[str, Any]:
        mechanism, sinks = self.mechanism, None
        if mechanism.sinks:
            heads = self.dimensions.num_heads
            sinks = parameter(self, "sinks", nn.initializers.zeros_init(), (heads,), ("heads",))
        return {
            "sinks": sinks,
            "logits_soft_cap": mechanism.logits_soft_cap,
            "scale": mechanism.scale,
        }
