"""Causal attention over the tokens so far, with the same three functions for every mechanism: init, extend, step."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.declared import argument_checks
from brl_jax.attention.dense.diag import DiagState, diag_attention_step, init_diag_state
from brl_jax.attention.local.generation import LocalState, init_local_state, local_attention_step
from brl_jax.attention.low_rank.long_short_generation import (
    LongShortState,
    init_long_short_state,
    long_short_step,
)
from brl_jax.attention.recurrent.bsbr import BSBRState, Compression, bsbr_attention, init_bsbr_state
from brl_jax.attention.recurrent.cosformer import CosformerState, cosformer_attention, init_cosformer_state
from brl_jax.attention.recurrent.delta import (
    DeltaState,
    delta_rule,
    gated_delta_rule,
    init_delta_state,
    kimi_delta_rule,
)
from brl_jax.attention.recurrent.flowformer import (
    FlowformerState,
    flowformer_attention,
    init_flowformer_state,
)
from brl_jax.attention.recurrent.gau import GAUState, gau_attention, init_gau_state
from brl_jax.attention.recurrent.linear import LinearState, init_linear_state, linear_attention
from brl_jax.attention.recurrent.luna import LunaState, init_luna_state, luna_attention
from brl_jax.attention.recurrent.mixed_chunk import (
    MixedChunkState,
    init_mixed_chunk_state,
    mixed_chunk_attention,
)
from brl_jax.attention.recurrent.norm_attention import norm_attention
from brl_jax.attention.recurrent.performer import PerformerState, init_performer_state, performer_attention
from brl_jax.attention.structured.mlr import BlockSizes
from brl_jax.attention.structured.mlr_generation import MLRState, init_mlr_state, mlr_attention_step

State = TypeVar("State")
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
    "luna",
    "gau",
    "flash",
    "bsbr",
    "mlr",
    "long_short",
]


@dataclasses.dataclass(frozen=True)
class StateFunctions(Generic[State]):
    """The functions of one mechanism, pure and without parameters; see `state_functions`. State is a NamedTuple."""

    _init: Callable[[int, int, int, Any], State]
    _extend: Callable[..., Any]  # -> (Array, State); functions whose state is optional return a union

    def init(self, batch: int, num_kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> State:
        """Returns the state before the first token, a NamedTuple of arrays.

        Args:
          dtype: of keys and values, for mechanisms that keep tokens; sums are float32.

        Raises:
          ValueError: a size is below 1.
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
        """Returns the outputs of the next T tokens, which also see the state's tokens, and the state after them.

        Args:
          arrays: the function's additional inputs for each token: beta (B, T, K) for "deltanet", "gated_deltanet" and
            "kda"; log_decay for the last two, and for "linear" with normalize=False, whose state then decays;
            linear_query and linear_key for "flash"; retrieval_query and retrieval_key for "bsbr"; projection for
            "long_short".

        Raises:
          ValueError: as the mechanism's function.
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
        """`extend` by one token, as in generation. Raises ValueError for any other number of tokens."""
        require(query.shape[1] == 1, f"a step takes one token, got {query.shape[1]}; extend takes any number")
        return self.extend(query, key, value, state, **arrays)


@overload
def state_functions(name: Literal["local"], **settings: Any) -> StateFunctions[LocalState]: ...
@overload
def state_functions(name: Literal["diag"], **settings: Any) -> StateFunctions[DiagState]: ...
@overload
def state_functions(name: Literal["linear", "norm"], **settings: Any) -> StateFunctions[LinearState]: ...
@overload
def state_functions(name: Literal["cosformer"], **settings: Any) -> StateFunctions[CosformerState]: ...
@overload
def state_functions(name: Literal["performer"], **settings: Any) -> StateFunctions[PerformerState]: ...
@overload
def state_functions(
    name: Literal["deltanet", "gated_deltanet", "kda"], **settings: Any
) -> StateFunctions[DeltaState]: ...
@overload
def state_functions(name: Literal["flowformer"], **settings: Any) -> StateFunctions[FlowformerState]: ...
@overload
def state_functions(name: Literal["luna"], **settings: Any) -> StateFunctions[LunaState]: ...
@overload
def state_functions(name: Literal["gau"], **settings: Any) -> StateFunctions[GAUState]: ...
@overload
def state_functions(name: Literal["flash"], **settings: Any) -> StateFunctions[MixedChunkState]: ...
@overload
def state_functions(name: Literal["bsbr"], **settings: Any) -> StateFunctions[BSBRState]: ...
@overload
def state_functions(name: Literal["mlr"], **settings: Any) -> StateFunctions[MLRState]: ...
@overload
def state_functions(name: Literal["long_short"], **settings: Any) -> StateFunctions[LongShortState]: ...
def state_functions(name: Name, **settings: Any) -> StateFunctions[Any]:
    """Returns `init`, `extend` and `step` of a mechanism's causal attention, for decoding in any code base.

    (B, T, N, H), (B, T, K, H) x 2, a state -> (B, T, N, H), the state after these tokens::

        linear = state_functions("linear", feature_map="relu")
        state = linear.init(batch, num_kv_heads, head_dim)
        out, state = linear.extend(query, key, value, state)   # a prompt
        out, state = linear.step(query, key, value, state)     # a token

    Args:
      name: "local" (settings: window), "diag" (block_size), "linear", "norm", "cosformer" (max_length), "performer"
        (projection, from `performer_projection`), "deltanet" (`delta_rule`, whose extend and step take beta),
        "gated_deltanet" and "kda" (`gated_delta_rule` and `kimi_delta_rule`, with beta and log_decay), "flowformer"
        (init takes the number of query heads), "luna" (packed), "gau" (length, and value_dim if it differs from
        head_dim), "flash" (`mixed_chunk_attention`: chunk_size, value_dim), "bsbr" (length, num_heads, chunk_size,
        compression), "mlr" (length, ranks, block_sizes) or "long_short" (length, rank, window, chunk_size). `length` is
        the state's capacity in tokens.
      settings: the options of the mechanism's function that do not change from token to token.

    Raises:
      ValueError: the name is unknown, or a setting has the wrong type or range.
      TypeError: a setting is unknown or missing; for "cosformer", `extend` raises it if max_length is missing.
    """
    hint = _DECAYED.get(name, "")
    require(name in _MAKERS, f"name must be one of {', '.join(_MAKERS)}, got {name!r}{hint}")
    maker, function = _MAKERS[name]
    own = inspect.signature(maker).parameters
    known = [*own, *(x for x in inspect.signature(function).parameters if x not in own)]
    _check_settings(name, settings, [x for x in known if x not in _OF_CALLS])
    missing = [x for x, parameter in own.items() if parameter.default is inspect.Parameter.empty]
    missing = [x for x in missing if x not in settings and x != "settings"]
    if missing:
        raise TypeError(f"state_functions({name!r}) needs {', '.join(missing)}")
    argument_checks(function)((), {x: value for x, value in settings.items() if x not in own})
    return maker(**settings)


def _check_settings(name: str, settings: Mapping[str, Any], known: Sequence[str]) -> None:
    for setting in settings:
        near = difflib.get_close_matches(setting, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if setting not in known:
            raise TypeError(f"state_functions({name!r}) takes {', '.join(known)}, got {setting!r}{hint}")


def _local(*, window: int, **settings: Any) -> StateFunctions[LocalState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_local_state(batch, heads, dim, window=window, dtype=dtype),
        functools.partial(local_attention_step, **settings),
    )


def _diag(*, block_size: int = 64, **settings: Any) -> StateFunctions[DiagState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_diag_state(
            batch, heads, dim, block_size=block_size, dtype=dtype
        ),
        functools.partial(diag_attention_step, **settings),
    )


def _performer(*, projection: Float[Array, "F H"], **settings: Any) -> StateFunctions[PerformerState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_performer_state(batch, heads, projection.shape[0], dim),
        functools.partial(
            performer_attention, projection=projection, is_causal=True, return_state=True, **settings
        ),
    )


def _linear(*, normalize: bool = True, **settings: Any) -> StateFunctions[LinearState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_linear_state(batch, heads, dim, dim, normalize=normalize),
        functools.partial(
            linear_attention, normalize=normalize, is_causal=True, return_state=True, **settings
        ),
    )


def _luna(*, packed: Float[Array, "M K H"], **settings: Any) -> StateFunctions[LunaState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_luna_state(batch, heads, dim, packed.shape[0], dim),
        functools.partial(luna_attention, packed=packed, return_state=True, **settings),
    )


def _gau(*, length: int, value_dim: int | None = None, **settings: Any) -> StateFunctions[GAUState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_gau_state(
            batch, length, heads, dim, dim if value_dim is None else value_dim, dtype=dtype
        ),
        functools.partial(gau_attention, is_causal=True, return_state=True, **settings),
    )


def _flash(
    *, chunk_size: int = 256, value_dim: int | None = None, **settings: Any
) -> StateFunctions[MixedChunkState]:
    def extend(query: Array, key: Array, value: Array, *, linear_query: Array, linear_key: Array, state: Any):
        return mixed_chunk_attention(
            query, key, linear_query, linear_key, value, is_causal=True, chunk_size=chunk_size, state=state,
            return_state=True, **settings,
        )  # fmt: skip

    return StateFunctions(
        lambda batch, heads, dim, dtype: init_mixed_chunk_state(
            batch, heads, dim, dim if value_dim is None else value_dim, chunk_size=chunk_size, dtype=dtype
        ),
        extend,
    )


def _bsbr(
    *,
    length: int,
    num_heads: int | None = None,
    retrieval_dim: int | None = None,
    chunk_size: int = 64,
    compression: Compression | None = None,
    **settings: Any,
) -> StateFunctions[BSBRState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_bsbr_state(
            batch, length, heads if num_heads is None else num_heads, heads, dim, retrieval_dim=retrieval_dim,
            compressed=None if compression is None else compression[0].shape[2], chunk_size=chunk_size, dtype=dtype,
        ),
        functools.partial(
            bsbr_attention, is_causal=True, return_state=True, chunk_size=chunk_size, compression=compression,
            **settings,
        ),
    )  # fmt: skip


def _mlr(
    *, length: int, ranks: Sequence[int], block_sizes: BlockSizes, **settings: Any
) -> StateFunctions[MLRState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_mlr_state(
            batch, length, heads, dim, ranks=ranks, block_sizes=block_sizes, dtype=dtype
        ),
        functools.partial(mlr_attention_step, ranks=ranks, block_sizes=block_sizes, **settings),
    )


def _long_short(
    *, length: int, rank: int = 1, window: int = 128, chunk_size: int = 16, **settings: Any
) -> StateFunctions[LongShortState]:
    return StateFunctions(
        lambda batch, heads, dim, dtype: init_long_short_state(
            batch, length, heads, dim, rank, window=window, chunk_size=chunk_size, dtype=dtype
        ),
        functools.partial(long_short_step, **settings),
    )


def _sums(
    function: Callable[..., Any], init: Callable[..., State], **always: Any
) -> Callable[..., StateFunctions[State]]:
    """Returns a maker for a mechanism whose state has no options."""

    def make(**settings: Any) -> StateFunctions[State]:
        return StateFunctions(
            lambda batch, heads, dim, dtype: init(batch, heads, dim, dim),
            functools.partial(function, return_state=True, **always, **settings),
        )

    return make


# Arguments of a mechanism's function that are not settings.
_OF_CALLS = ("settings", "query", "key", "value", "state", "return_state", "is_causal")
_DECAYED = dict.fromkeys(
    ("mamba2", "retnet", "gla"), "; use 'linear' with normalize=False, whose extend and step take log_decay"
)
# For each name, the maker of its functions, and the mechanism's function, which takes the maker's other settings.
_MAKERS: dict[str, tuple[Callable[..., StateFunctions[Any]], Callable[..., Any]]] = {
    "local": (_local, local_attention_step),
    "diag": (_diag, diag_attention_step),
    "linear": (_linear, linear_attention),
    "norm": (
        _sums(norm_attention, functools.partial(init_linear_state, normalize=False), is_causal=True),
        norm_attention,
    ),
    "cosformer": (_sums(cosformer_attention, init_cosformer_state, is_causal=True), cosformer_attention),
    "performer": (_performer, performer_attention),
    "deltanet": (_sums(delta_rule, init_delta_state), delta_rule),
    "gated_deltanet": (_sums(gated_delta_rule, init_delta_state), gated_delta_rule),
    "kda": (_sums(kimi_delta_rule, init_delta_state), kimi_delta_rule),
    "flowformer": (_sums(flowformer_attention, init_flowformer_state, is_causal=True), flowformer_attention),
    "luna": (_luna, luna_attention),
    "gau": (_gau, gau_attention),
    "flash": (_flash, mixed_chunk_attention),
    "bsbr": (_bsbr, bsbr_attention),
    "mlr": (_mlr, mlr_attention_step),
    "long_short": (_long_short, long_short_step),
}
