"""What the layers around attention with a state of fixed size share: their call and their decoding cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.layers.core.modules import sow_weights
from brl_jax.layers.core.protocol import Call, MemorylessLayer


class StateLayer(MemorylessLayer):
    """A layer whose cache is the state of its attention function; see `brl_jax.layers.core.protocol` for the call.

    A mechanism gives `init_state` and `run`.
    """

    def init_state(self, batch: int, length: int) -> Any:
        """The attention function's state before the first of up to `length` tokens."""
        raise NotImplementedError

    def run(self, x: Float[Array, "B T D"], positions: Any, call: dict[str, Any]) -> tuple[Array, Any]:
        """The layer's output and, where call["return_state"], the new state.

        `call` is passed to the attention function: is_causal, key_value_seq_lengths, segment_ids, state, return_state
        and implementation.
        """
        raise NotImplementedError

    def attend(
        self,
        function: Callable[..., Any],
        value: Array,
        call: dict[str, Any],
        weigh: Callable[..., Any] | None = None,
    ) -> tuple[Array, Any]:
        """function(value, **call) and its new state, None where call["return_state"] is False.

        Sows the matrix of `weigh`, or of `function` itself, which must be linear in the values; a state has no part
        in it.
        """
        if call["state"] is None and not call["return_state"]:
            sow_weights(self, functools.partial(weigh or function, **call), value)
        result = function(value, **call)
        return result if call["return_state"] else (result, None)

    def init_cache(self, batch: int, length: int) -> dict[str, Any]:
        """The state and the number of tokens in it."""
        return {"state": self.init_state(batch, length), "index": jnp.zeros((), jnp.int32)}

    def mix(self, x: Float[Array, "B T D"], call: Call) -> tuple[Array, Any]:
        d, cache, batch = self.dimensions, call.cache, x.shape[0]
        told = {"is_causal": d.is_causal, "segment_ids": call.segment_ids, "implementation": d.implementation}
        if cache is None:
            told |= {
                "key_value_seq_lengths": None if d.is_causal else call.lengths,
                "state": None,
                "return_state": False,
            }
            return self.run(x, call.positions, told)[0], None
        # Tokens that don't exist are padding, which leaves no trace in a state.
        count = call.count
        exist = None if count is None else jnp.broadcast_to(jnp.asarray(count, jnp.int32), (batch,))
        told |= {"key_value_seq_lengths": exist, "state": cache["state"], "return_state": True}
        y, state = self.run(x, call.positions, told)
        return y, {"state": state, "index": cache["index"] + call.new(x.shape[1])}


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
