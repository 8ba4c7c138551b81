"""The common part of the layers around attention functions without a recurrent state."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.caches import KeyValueCache
from brl_jax.layers.core.modules import merge_heads, parameter, project_qkv, sow_weights
from brl_jax.layers.core.protocol import LayerCall, MechanismLayer


class AttentionLayer(MechanismLayer):
    """A layer that projects its tokens to queries, keys and values, attends, and merges the heads.

    A mechanism gives `attend`. It replaces the other methods where it differs: by default tokens are projected by
    `project_qkv`, and the decoding cache has the keys and values of all tokens. `heads` and `output` run inside a
    compact call, so they may create parameters.
    """

    def heads(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T N F"], Float[Array, "B T K F"], Float[Array, "B T K H"]]:
        """Queries, keys and values."""
        return project_qkv(self.dimensions, x, positions)

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Float[Array, "B T N H"]:
        """The attention function.

        Its options in training: is_causal, key_value_seq_lengths, implementation, and segment_ids for mechanisms that
        pack. In the default `step`: is_causal, query_offset, implementation. In both: `attention_options`.
        """
        raise NotImplementedError

    def attention_options(self) -> dict[str, Any]:
        """Options of `attend` that are the mechanism's own. It runs inside a compact call, once."""
        return {}

    def output(self, attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The layer's output."""
        return merge_heads(self.dimensions, attended)

    def key_shape(self) -> tuple[int, int]:
        """Heads and features of the keys."""
        return self.dimensions.num_kv_heads, self.dimensions.head_dim

    def init_cache(self, batch: int, length: int) -> Any:
        d = self.dimensions
        value_shape = (batch, length, d.num_kv_heads, d.head_dim)
        return KeyValueCache.empty((batch, length, *self.key_shape()), value_shape, d.dtype)

    def step(self, query: Array, key: Array, value: Array, call: LayerCall) -> tuple[Array, Any]:
        """What new tokens (B, T, ...) attend to, with those in the decoding cache, and the new cache."""
        cache = call.cache.append(key, value, call.count)
        attended = self.attend(
            query,
            cache.key,
            cache.value,
            is_causal=True,
            query_offset=call.start,
            implementation=self.dimensions.implementation,
            **self.attention_options(),
        )
        return attended, cache

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d = self.dimensions
        query, key, value = self.heads(x, call.positions)
        if call.cache is not None:
            attended, cache = self.step(query, key, value, call)
            return self.output(attended), cache
        options: dict[str, Any] = {
            "is_causal": d.is_causal,
            "key_value_seq_lengths": None if d.is_causal else call.lengths,
            "implementation": d.implementation,
        }
        if self.mechanism.packs:
            options["segment_ids"] = call.segment_ids
        options |= self.attention_options()

        def attend(value: Array) -> Array:
            return self.attend(query, key, value, **options)

        sow_weights(self, attend, value)
        return self.output(attend(value)), None


class SoftmaxLayer(AttentionLayer):
    """A layer around softmax attention, whose mechanism has the fields `sinks` and `logits_soft_cap`."""

    def attention_options(self) -> dict[str, Any]:
        mechanism: Any = self.mechanism
        sinks = None
        if mechanism.sinks:
            heads = self.dimensions.num_heads
            sinks = parameter(self, "sinks", nn.initializers.zeros_init(), (heads,), ("heads",))
        return {"sinks": sinks, "logits_soft_cap": mechanism.logits_soft_cap}
