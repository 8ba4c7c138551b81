"""The base of layers around recurrent attention functions: their call and their decoding cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
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
      function: function(value, **options) computes the attention; `StateLayer.mix` gives the options.
      value: (B, T, K, V).
      linear_part: a similar function that is linear in the values, for computing the attention matrix; None if
        `function` itself is linear.
      kept: what the new cache has besides the state and the length, by field.
    """

    function: Callable[..., Any]
    value: Float[Array, "B T K V"]
    linear_part: Callable[..., Any] | None = None
    kept: Mapping[str, Any] = MappingProxyType({})


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
        d, cache = self.dimensions, call.cache
        function, value, linear_part, kept = self.attention(x, call)
        options: dict[str, Any] = {"implementation": d.implementation}
        if self.mechanism.bidirectional:
            options["is_causal"] = d.is_causal
        if self.mechanism.packs:
            options["segment_ids"] = call.segment_ids
        if cache is None:
            options["key_value_seq_lengths"] = None if d.is_causal else call.lengths
            sow_weights(self, functools.partial(linear_part or function, **options), value)
            return self.output(x, function(value, **options)), None
        # Invalid new tokens are padding, which a state ignores.
        if call.count is not None:
            options["key_value_seq_lengths"] = jnp.full((value.shape[0],), call.count, jnp.int32)
        attended, state = function(value, state=cache.state, return_state=True, **options)
        y = self.output(x, attended)
        return y, cache._replace(state=state, length=call.start + call.num_new(x.shape[1]), **kept)
