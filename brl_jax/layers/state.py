"""What the layers around attention with a state of fixed size share: their call and their decoding cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.layers.common import sow_weights, token_positions
from brl_jax.layers.mechanism import MemorylessLayer, check_call


class StateLayer(MemorylessLayer):
    """A layer whose cache is the state of its attention function; see `brl_jax.layers.mechanism` for the call.

    A mechanism gives `init_state` and `mix`.
    """

    def init_state(self, batch: int, length: int) -> Any:
        """The attention function's state before the first of up to `length` tokens."""
        raise NotImplementedError

    def mix(self, x: Float[Array, "B T D"], positions: Any, call: dict[str, Any]) -> tuple[Array, Any]:
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

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        carry: Any = None,
        cache: Any = None,
        positions: Any = None,
        lengths: Any = None,
        segment_ids: Any = None,
        count: Any = None,
        deterministic: bool = True,
    ):
        d = self.dimensions
        check_call(self.mechanism, segment_ids)
        batch, length, _ = x.shape
        call = {"is_causal": d.is_causal, "segment_ids": segment_ids, "implementation": d.implementation}
        if cache is None:
            positions = token_positions(length) if positions is None else positions
            call |= {
                "key_value_seq_lengths": None if d.is_causal else lengths,
                "state": None,
                "return_state": False,
            }
            y, _ = self.mix(x, positions, call)
            return y, carry, None
        positions = token_positions(length, cache["index"]) if positions is None else positions
        # Tokens that don't exist are padding, which leaves no trace in a state.
        exist = None if count is None else jnp.broadcast_to(jnp.asarray(count, jnp.int32), (batch,))
        call |= {"key_value_seq_lengths": exist, "state": cache["state"], "return_state": True}
        y, state = self.mix(x, positions, call)
        return y, carry, {"state": state, "index": cache["index"] + (length if count is None else count)}


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
