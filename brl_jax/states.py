"""Causal attention over the tokens so far, with the same three functions for every mechanism: init, extend, step."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.diag import diag_attention, init_diag_state
from brl_jax.attention.local.generation import init_local_state
from brl_jax.attention.low_rank.long_short import (
    init_long_short_state,
    long_short_attention,
)
from brl_jax.attention.recurrent.bsbr import bsbr_attention, init_bsbr_state
from brl_jax.attention.recurrent.cosformer import cosformer_attention, init_cosformer_state
from brl_jax.attention.recurrent.delta import (
    delta_rule,
    gated_delta_rule,
    gated_delta_rule_2,
    init_delta_state,
    kimi_delta_rule,
    rwkv7_attention,
)
from brl_jax.attention.recurrent.flowformer import (
    flowformer_attention,
    init_flowformer_state,
)
from brl_jax.attention.recurrent.gau import gau_attention, init_gau_state
from brl_jax.attention.recurrent.linear import LinearState, init_linear_state, linear_attention
from brl_jax.attention.recurrent.luna import init_luna_state, luna_attention
from brl_jax.attention.recurrent.mixed_chunk import (
    init_mixed_chunk_state,
    mixed_chunk_attention,
)
from brl_jax.attention.recurrent.norm_attention import norm_attention
from brl_jax.attention.recurrent.performer import init_performer_state, performer_attention
from brl_jax.attention.recurrent.summary import Summary, summarize_delta, summarize_sums
from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.attention.structured.mlr_generation import init_mlr_state
from brl_jax.fields import argument_checks

State = Any


@dataclasses.dataclass(frozen=True)
class StateFunctions:
    """The functions of one mechanism, pure and without parameters; see `state_functions`. States are NamedTuples."""

    _name: str
    _init: Callable[..., State]
    _extend: Callable[..., Any]  # -> (Array, State); functions whose state is optional return a union

    def init(self, batch: int, num_kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> State:
        """Returns the state before the first token, a NamedTuple of arrays.

        Args:
          dtype: of keys and values, for mechanisms that keep tokens; sums are float32.

        Raises:
          ValueError: a size is below 1.
        """
        options = {"dtype": dtype} if "dtype" in inspect.signature(self._init).parameters else {}
        return self._init(batch, num_kv_heads, head_dim, **options)

    def extend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        state: State,
        *,
        return_states: int | None = None,
        **arrays: Any,
    ) -> tuple[Float[Array, "B T N H"], State]:
        """Returns the outputs of the next T tokens, which also see the state's tokens, and the state after them.

        Args:
          return_states: k, from 1 to T, returns the states after each of the last k tokens instead, stacked along a
            new first axis, so that a caller who accepts only some of the tokens can go back:
            `jax.tree.map(lambda x: x[i], states)`. These k tokens are read one by one, as `step` reads them.
          arrays: the function's additional inputs for each token: beta (B, T, K) for "deltanet", "gated_deltanet" and
            "kda"; erase and write for "gated_deltanet_2"; removal_key and learning_rate for "rwkv7"; log_decay for all
            of these but "deltanet", and for "linear" with normalize=False, whose state then decays; linear_query and
            linear_key for "flash"; retrieval_query and retrieval_key for "bsbr"; projection for "long_short".

        Raises:
          ValueError: as the mechanism's function, or `return_states` is out of range, or comes with padding or
            packed rows.
        """
        arrays = {"query": query, "key": key, "value": value, **arrays}
        if return_states is None:
            return self._extend(state=state, **arrays)
        length = query.shape[1]
        require(
            1 <= return_states <= length,
            f"return_states must be from 1 to the number of tokens {length}, got {return_states}",
        )
        for name in ("key_value_seq_lengths", "segment_ids"):
            require(arrays.get(name) is None, f"{name} must be None with return_states")
        first = length - return_states
        fixed = {name: x for name, x in arrays.items() if x.ndim == 1}  # the decay of each head
        tokens = {name: x for name, x in arrays.items() if x.ndim > 1}
        out = None
        if first:
            out, state = self._extend(
                state=state, **fixed, **{name: x[:, :first] for name, x in tokens.items()}
            )

        def one(state: State, token: dict[str, Array]) -> tuple[State, tuple[Array, State]]:
            out, state = self._extend(state=state, **fixed, **token)
            return state, (out[:, 0], state)

        each = {name: jnp.moveaxis(x[:, first:], 1, 0)[:, :, None] for name, x in tokens.items()}
        _, (outs, states) = lax.scan(one, vary_like(state, jax.tree.leaves(each)), each)
        outs = jnp.moveaxis(outs, 0, 1)
        return (outs if out is None else jnp.concatenate([out, outs], axis=1)), states

    def step(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "B 1 K H"],
        value: Float[Array, "B 1 K H"],
        state: State,
        **arrays: Any,
    ) -> tuple[Float[Array, "B 1 N H"], State]:
        """`extend` by one token, as in generation. Raises ValueError for any other number of tokens."""
        require(query.shape[1] == 1, f"a step takes one token, got {query.shape[1]}; extend takes any number")
        return self.extend(query, key, value, state, **arrays)

    def summarize(
        self, key: Float[Array, "B T K H"], value: Float[Array, "B T K H"], **arrays: Any
    ) -> Summary:
        """Returns what T tokens do to any state before them. The `Summary` of a shard of a sequence is all that the
        devices with later shards need, so you can divide sequences over a mesh as you like.

        For "linear", "deltanet", "gated_deltanet", "kda", "gated_deltanet_2" and "rwkv7".

        Args:
          arrays: the delta rules' additional inputs, or log_decay and positions, as for `extend`. A log_decay of -inf
            drops the tokens before, except in "rwkv7", whose tokens read the state before it decays.

        Raises:
          ValueError: as `extend`, or the mechanism's state is not A S + B.
        """
        require(
            self._name in ("linear", *_DELTA_RULES),
            f"summarize needs one of linear, {', '.join(_DELTA_RULES)}, got {self._name!r}",
        )
        check_qkv(key, key, value)
        known = _DELTA_RULES.get(self._name, ("log_decay", "positions"))
        for name in arrays:
            require(name in known, f"summarize of {self._name!r} takes {', '.join(known)}, got {name!r}")
        if "write" in arrays:  # the columns with which `summarize_delta` finds A have no values
            arrays["write"] = jnp.pad(arrays["write"], [(0, 0)] * 3 + [(0, key.shape[3])])
        extend = functools.partial(self.extend, **arrays)
        if self._name in _DELTA_RULES:
            return summarize_delta(self._init, extend, key, value)
        log_decay = arrays.get("log_decay", getattr(self._extend, "keywords", {}).get("log_decay"))
        return summarize_sums(self._init, extend, key, value, log_decay)


def state_functions(name: str, **settings: Any) -> StateFunctions:
    """Returns `init`, `extend` and `step` of a mechanism's causal attention, for decoding in any code base.

    (B, T, N, H), (B, T, K, H) x 2, a state -> (B, T, N, H), the state after these tokens::

        linear = state_functions("linear", feature_map="relu")
        state = linear.init(batch, num_kv_heads, head_dim)
        out, state = linear.extend(query, key, value, state)   # a prompt
        out, state = linear.step(query, key, value, state)     # a token

    Args:
      name: "local" (local_window_size), "diag" (block_size), "linear", "norm", "cosformer" (max_length), "performer"
        (projection, from `performer_projection`), "deltanet" (`delta_rule`, whose extend and step take beta),
        "gated_deltanet" and "kda" (`gated_delta_rule` and `kimi_delta_rule`, with beta and log_decay),
        "gated_deltanet_2" (`gated_delta_rule_2`, with erase, write and log_decay), "rwkv7" (`rwkv7_attention`, with
        removal_key, learning_rate and log_decay), "flowformer" (num_heads), "luna" (packed), "gau" (length), "flash"
        (`mixed_chunk_attention`: chunk_size), "bsbr" (length, num_heads, chunk_size, compression), "mlr" (length,
        ranks, block_sizes) or "long_short" (length, chunk_rank, window, chunk_size). `length` is the state's capacity
        in tokens; num_heads are the query heads, num_kv_heads by default.
      settings: further options of init_NAME_state, such as value_dim, and of the mechanism's function, if they do not
        change from token to token.

    Raises:
      ValueError: the name is unknown, or a setting has the wrong type or range.
      TypeError: a setting is unknown or missing; for "cosformer", `extend` raises it if max_length is missing.
    """
    hint = _DECAYED.get(name, "")
    require(name in _MECHANISMS, f"name must be one of {', '.join(_MECHANISMS)}, got {name!r}{hint}")
    init, function = _MECHANISMS[name]
    for_init, for_function = (inspect.signature(x).parameters for x in (init, function))
    known = [*for_init, *(x for x in for_function if x not in for_init)]
    _check_settings(name, settings, [x for x in known if x not in _NO_SETTINGS])
    of_init, of_function = (
        {x: value for x, value in settings.items() if x in own} for own in (for_init, for_function)
    )
    for setting, (size, read) in _SIZES.items():
        if size in for_init and settings.get(setting) is not None:
            of_init[size] = read(settings[setting])
    names = {size: setting for setting, (size, _) in _SIZES.items()}
    missing = [x for x, parameter in for_init.items() if parameter.default is inspect.Parameter.empty]
    missing = [names.get(x, x) for x in missing if x not in of_init and x not in _OF_INIT]
    if missing:
        raise TypeError(f"state_functions({name!r}) needs {', '.join(missing)}")
    argument_checks(function)((), of_function)
    always = {x: True for x in ("is_causal", "return_state") if x in for_function}
    return StateFunctions(
        name,
        functools.partial(init, **of_init),
        functools.partial(function, **always, **of_function),
    )


def _check_settings(name: str, settings: Mapping[str, Any], known: Sequence[str]) -> None:
    for setting in settings:
        near = difflib.get_close_matches(setting, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if setting not in known:
            raise TypeError(f"state_functions({name!r}) takes {', '.join(known)}, got {setting!r}{hint}")


def _init_norm_state(
    batch: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None
) -> LinearState:
    return init_linear_state(batch, num_kv_heads, head_dim, value_dim, normalize=False)


# Settings from whose shapes init takes a size.
_SIZES: dict[str, tuple[str, Callable[[Any], int]]] = {
    "projection": ("num_features", lambda projection: projection.shape[0]),
    "packed": ("num_packed", lambda packed: packed.shape[0]),
    "compression": ("num_compressed", lambda compression: compression[0].shape[2]),
}
# Parameters of a mechanism's functions that are not settings.
_OF_INIT = ("batch", "num_kv_heads", "head_dim", "dtype")
_OF_CALLS = ("query", "key", "value", "state", "return_state", "is_causal")
_NO_SETTINGS = (*_OF_INIT, *_OF_CALLS, "num_packed", "num_compressed")
# The additional inputs of each.
_DELTA_RULES: dict[str, tuple[str, ...]] = {
    "deltanet": ("beta",),
    "gated_deltanet": ("beta", "log_decay"),
    "kda": ("beta", "log_decay"),
    "gated_deltanet_2": ("erase", "write", "log_decay"),
    "rwkv7": ("removal_key", "learning_rate", "log_decay"),
}
_DECAYED = dict.fromkeys(
    ("mamba2", "retnet", "gla"), "; use 'linear' with normalize=False, whose extend and step take log_decay"
)
_MECHANISMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "local": (init_local_state, local_attention),
    "diag": (init_diag_state, diag_attention),
    "linear": (init_linear_state, linear_attention),
    "norm": (_init_norm_state, norm_attention),
    "cosformer": (init_cosformer_state, cosformer_attention),
    "performer": (init_performer_state, performer_attention),
    "deltanet": (init_delta_state, delta_rule),
    "gated_deltanet": (init_delta_state, gated_delta_rule),
    "kda": (init_delta_state, kimi_delta_rule),
    "gated_deltanet_2": (init_delta_state, gated_delta_rule_2),
    "rwkv7": (init_delta_state, rwkv7_attention),
    "flowformer": (init_flowformer_state, flowformer_attention),
    "luna": (init_luna_state, luna_attention),
    "gau": (init_gau_state, gau_attention),
    "flash": (init_mixed_chunk_state, mixed_chunk_attention),
    "bsbr": (init_bsbr_state, bsbr_attention),
    "mlr": (init_mlr_state, mlr_attention),
    "long_short": (init_long_short_state, long_short_attention),
}
