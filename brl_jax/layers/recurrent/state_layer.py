"""The base of layers around recurrent attention functions: their call and their decoding cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.fields import Count
from brl_jax.layers.core.caches import StateCache
from brl_jax.layers.core.modules import merge_heads, sow_weights
from brl_jax.layers.core.protocol import LayerCall, Mechanism, MechanismLayer


class StateAttention(NamedTuple):
    """An attention function with fixed queries and keys.

    Attributes:
      function: function(value, **options) computes the attention; `StateLayer.attend` gives the options.
      value: (B, T, K, V).
      linear_part: a similar function that is linear in the values, for computing the attention matrix; None if
        `function` itself is linear.
    """

    function: Callable[..., Any]
    value: Float[Array, "B T K V"]
    linear_part: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateConfig(Mechanism):
    """What most recurrent mechanisms share."""

    linear_cost: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    chunk_size: Count = 64
    """Tokens in a chunk; changes time and memory, not results."""


class StateLayer(MechanismLayer):
    """A layer whose cache is the state of its attention function; see `brl_jax.layers.core.protocol` for the call.

    A mechanism implements `init_state` and `attention`, and overrides `output` if it does more than merge the heads.
    `attention` and `output` run inside a compact call, so they may create parameters.
    """

    def init_state(self, batch: int, length: int) -> Any:
        """Returns the attention function's state before the first of up to `length` tokens."""
        raise NotImplementedError

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> StateAttention:
        """Returns the attention function and its values for these tokens."""
        raise NotImplementedError

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Returns the layer's output."""
        return merge_heads(self.dimensions, attended)

    def init_cache(self, batch: int, length: int) -> Any:  # a `StateCache`
        return StateCache(self.init_state(batch, length), jnp.zeros((), jnp.int32))

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        cache = call.cache
        attention = self.attention(x, call)
        attended, state = self.attend(attention, call, None if cache is None else cache.state)
        y = self.output(x, attended)
        if cache is None:
            return y, None
        return y, cache._replace(state=state, length=call.start + call.num_new(x.shape[1]))

    def attend(
        self, attention: StateAttention, call: LayerCall, state: Any
    ) -> tuple[Float[Array, "B T N V"], Any]:
        """Computes a call's attention and the state after its tokens; training passes None for the state."""
        d, (function, value, linear_part) = self.dimensions, attention
        options: dict[str, Any] = {"implementation": d.implementation}
        if self.mechanism.bidirectional:
            options["is_causal"] = d.is_causal
        if self.mechanism.packs:
            options["segment_ids"] = call.segment_ids
        if state is None:
            options["key_value_seq_lengths"] = None if d.is_causal else call.lengths
            sow_weights(self, functools.partial(linear_part or function, **options), value)
            return function(value, **options), None
        # Invalid new tokens are padding, which a state ignores.
        if call.count is not None:
            options["key_value_seq_lengths"] = jnp.full((value.shape[0],), call.count, jnp.int32)
        return function(value, state=state, return_state=True, **options)
