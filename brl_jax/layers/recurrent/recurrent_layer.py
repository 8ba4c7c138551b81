"""The base of layers around recurrent attention functions, whose state a decoding cache keeps."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.caches import StateCache
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Mechanism):
    """What most recurrent mechanisms share."""

    linear_cost: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    chunk_size: Count = 64
    """Tokens in a chunk; changes time and memory, not results."""


class RecurrentLayer(AttentionLayer):
    """An `AttentionLayer` whose cache has the state of its attention function, which each row of a batch may continue
    with another number of tokens. A mechanism also implements `init_state`."""

    packs_cache: ClassVar[bool] = True

    def init_state(self, batch: int, length: int) -> Any:
        """Returns the attention function's state before the first of up to `length` tokens."""
        raise NotImplementedError

    def init_cache(self, batch: int, length: int) -> Any:  # a `StateCache`
        return StateCache(self.init_state(batch, length), jnp.zeros((), jnp.int32))

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, Any]:
        batch, length = attention.value.shape[:2]
        if self.mechanism.packs:
            options["segment_ids"] = call.segment_ids
        # Invalid new tokens are padding, which a state ignores.
        if call.count is not None:
            options["key_value_seq_lengths"] = jnp.full((batch,), call.count, jnp.int32)
        attended, state = attention(state=call.cache.state, return_state=True, **options)
        end = call.start + call.num_new(length)
        return attended, call.cache._replace(state=state, length=end, **attention.kept)
