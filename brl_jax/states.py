"""Causal attention over the tokens so far, with the same three functions for every mechanism: init, extend, step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import require
from brl_jax.attention.dense.diag import DiagState, diag_attention_step, init_diag_state
from brl_jax.attention.local.generation import LocalState, init_local_state, local_attention_step
from brl_jax.attention.recurrent.cosformer import CosformerState, cosformer_attention, init_cosformer_state
from brl_jax.attention.recurrent.delta import (
    DeltaState,
    delta_rule,
    gated_delta_rule,
    init_delta_state,
    kimi_delta_rule,
)
from brl_jax.attention.recurrent.flow import FlowState, flow_attention, init_flow_state
from brl_jax.attention.recurrent.linear import LinearState, init_linear_state, linear_attention
from brl_jax.attention.recurrent.norm_attention import norm_attention
from brl_jax.attention.recurrent.performer import PerformerState, init_performer_state, performer_attention

State = CosformerState | DeltaState | DiagState | FlowState | LinearState | LocalState | PerformerState
Name = Literal[
    "local",
    "diag",
    "linear",
    "norm",
    "cosformer",
    "performer",
    "deltanet",
    "gated_deltanet",
    "kda",
    "flowformer",
]


@dataclasses.dataclass(frozen=True)
class StateFunctions:
    """The functions of one mechanism, pure and without parameters; see `state_functions`."""

    _init: Callable[..., Any]
    _extend: Callable[..., Any]

    def init(self, batch: int, num_kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> State:
        """The state before the first token, a NamedTuple of arrays.

        Args:
          dtype: that of the keys and values, for mechanisms that keep tokens; sums are float32.

        Raises:
          ValueError: a size below 1.
        """
        return self._init(batch, num_kv_heads, head_dim, dtype)

    def extend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        state: State,
        **arrays: Array,
    ) -> tuple[Float[Array, "B T N H"], State]:
        """The outputs of the next T tokens, which see those of the state too, and the state after them.

        Args:
          arrays: what else the function needs of each token: beta (B, T, K) of "deltanet", "gated_deltanet" and "kda",
            and log_decay of the last two, and of "linear" with normalize=False, whose state then decays.

        Raises:
          ValueError: as the mechanism's own function.
        """
        return self._extend(query, key, value, state=state, **arrays)

    def step(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "B 1 K H"],
        value: Float[Array, "B 1 K H"],
        state: State,
        **arrays: Array,
    ) -> tuple[Float[Array, "B 1 N H"], State]:
        """`extend` by one token, as in generation. Raises ValueError for another number."""
        require(query.shape[1] == 1, f"a step takes one token, got {query.shape[1]}; extend takes any number")
        return self.extend(query, key, value, state, **arrays)


def state_functions(name: Name, **settings: Any) -> StateFunctions:
    """`init`, `extend` and `step` of causal attention by a mechanism, for decoding in any code base.

    (B, T, N, H), (B, T, K, H) x 2, a state -> (B, T, N, H), the state after these tokens::

        linear = state_functions("linear", feature_map="relu")
        state = linear.init(batch, num_kv_heads, head_dim)
        out, state = linear.extend(query, key, value, state)   # a prompt
        out, state = linear.step(query, key, value, state)     # a token

    Args:
      name: "local" (settings: window), "diag" (block_size), "linear", "norm", "cosformer" (max_length), "performer"
        (projection, from `performer_projection`), "deltanet" (`delta_rule`, whose extend and step take beta),
        "gated_deltanet" and "kda" (`gated_delta_rule` and `kimi_delta_rule`, with beta and log_decay) or "flowformer"
        (whose state has as many heads as the query: init gets their number).
      settings: the options of the mechanism's function that do not change from token to token.

    Raises:
      ValueError: an unknown name. TypeError: a setting that the mechanism needs is missing.
    """
    require(name in _MAKERS, f"name must be one of {', '.join(_MAKERS)}, got {name!r}")
    return _MAKERS[name](**settings)


def _local(*, window: int, **settings: Any) -> StateFunctions:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_local_state(batch, heads, dim, window=window, dtype=dtype),
        functools.partial(local_attention_step, **settings),
    )


def _diag(*, block_size: int = 64, **settings: Any) -> StateFunctions:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_diag_state(
            batch, heads, dim, block_size=block_size, dtype=dtype
        ),
        functools.partial(diag_attention_step, **settings),
    )


def _performer(*, projection: Float[Array, "F H"], **settings: Any) -> StateFunctions:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_performer_state(batch, heads, projection.shape[0], dim),
        functools.partial(
            performer_attention, projection=projection, is_causal=True, return_state=True, **settings
        ),
    )


def _linear(*, normalize: bool = True, **settings: Any) -> StateFunctions:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_linear_state(batch, heads, dim, dim, normalize=normalize),
        functools.partial(
            linear_attention, normalize=normalize, is_causal=True, return_state=True, **settings
        ),
    )


def _sums(
    function: Callable[..., Any], init: Callable[..., Any], **always: Any
) -> Callable[..., StateFunctions]:
    """The functions of a mechanism whose state has no options."""

    def make(**settings: Any) -> StateFunctions:
        return StateFunctions(
            lambda batch, heads, dim, dtype: init(batch, heads, dim, dim),
            functools.partial(function, return_state=True, **always, **settings),
        )

    return make


_MAKERS: dict[str, Callable[..., StateFunctions]] = {
    "local": _local,
    "diag": _diag,
    "linear": _linear,
    "norm": _sums(norm_attention, functools.partial(init_linear_state, normalize=False), is_causal=True),
    "cosformer": _sums(cosformer_attention, init_cosformer_state, is_causal=True),
    "performer": _performer,
    "deltanet": _sums(delta_rule, init_delta_state),
    "gated_deltanet": _sums(gated_delta_rule, init_delta_state),
    "kda": _sums(kimi_delta_rule, init_delta_state),
    "flowformer": _sums(flow_attention, init_flow_state, is_causal=True),
}
