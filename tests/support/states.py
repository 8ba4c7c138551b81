"""Every function with a state, with small settings."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import brl_jax
from brl_jax import state_functions

T, N, K, H = 11, 4, 2, 8
RNG = np.random.default_rng(9)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)  # slices of NumPy's arrays need no compiler


class Case(NamedTuple):
    """A mechanism's function, its settings, the further arguments of tokens with these queries, keys and values, and
    settings of the state alone."""

    function: Callable[..., Any]
    settings: Mapping[str, Any] = MappingProxyType({})
    more: Callable[[Any, Any, Any], Mapping[str, Any]] = lambda *_: {}
    of_state: Mapping[str, Any] = MappingProxyType({})

    def at_once(self, query, key, value, **options):
        """The function on the whole sequence."""
        causal = {"is_causal": True} if "is_causal" in inspect.signature(self.function).parameters else {}
        # Gates are not differentiated: what they are in padding must not matter.
        gates = jax.lax.stop_gradient(self.more(query, key, value))
        return self.function(
            query=query, key=key, value=value, **gates, **{**self.settings, **causal, **options}
        )

    def functions(self, name, **settings):
        return state_functions(name.split(",")[0], **{**self.settings, **self.of_state, **settings})


def beta(query, key, value):
    return {"beta": jax.nn.sigmoid(3 * value[..., 0])}


def gated(query, key, value):
    return beta(query, key, value) | {"log_decay": -jnp.exp(2 * value[..., 1])}


def gated_by_feature(query, key, value):
    return beta(query, key, value) | feature_decay(query, key, value)


def feature_decay(query, key, value):
    return {"log_decay": -jnp.exp(2 * key)}


def two_gates(query, key, value):
    gates = {"erase": jax.nn.sigmoid(3 * value), "write": jax.nn.sigmoid(2 * key)}
    return gates | feature_decay(query, key, value)


def removal(query, key, value):
    gates = {"removal_key": key[..., ::-1], "learning_rate": jax.nn.sigmoid(3 * value)}
    return gates | feature_decay(query, key, value)


def retrieval(query, key, value):
    return {"retrieval_query": query[..., ::-1], "retrieval_key": -key}


def second_linear(query, key, value):
    return {"linear_query": query[..., ::-1], "linear_key": -key}


def projected(query, key, value):
    return {"projection": -jnp.exp(3 * key[..., :3])}


IDENTITY = {"normalize": False, "feature_map": "identity"}
LEVELS = {"ranks": (4, 2, 2), "block_sizes": (None, 8, 2)}
BIAS = {"bias": brl_jax.RotaryBias(jnp.asarray(normal(N, H) / 4), jnp.asarray(normal(N, H) / 4))}
ROOM = {"length": 2048}
# More tokens than the settings of the cases are for.
LONG = {"cosformer": {"max_length": 2**16}}
CASES = {
    "local": Case(brl_jax.local_attention, {"local_window_size": (3, 0)}),
    "diag": Case(brl_jax.diag_attention, {"block_size": 4}),
    "linear": Case(brl_jax.linear_attention, {"feature_map": "relu"}),
    "linear, head decay": Case(brl_jax.linear_attention, {**IDENTITY, "log_decay": jnp.full((K,), -0.1)}),
    "linear, decayed": Case(brl_jax.linear_attention, {**IDENTITY, "feature_map": "elu"}, feature_decay),
    "norm": Case(brl_jax.norm_attention),
    "cosformer": Case(brl_jax.cosformer_attention, {"max_length": 16}),
    "performer": Case(brl_jax.performer_attention, {"projection": normal(16, H)}),
    "deltanet": Case(brl_jax.delta_rule, {}, beta),
    "gated_deltanet": Case(brl_jax.gated_delta_rule, {}, gated),
    "kda": Case(brl_jax.kimi_delta_rule, {}, gated_by_feature),
    "gated_deltanet_2": Case(brl_jax.gated_delta_rule_2, {}, two_gates),
    "rwkv7": Case(brl_jax.rwkv7_attention, {}, removal),
    "flowformer": Case(brl_jax.flowformer_attention),
    "luna": Case(brl_jax.luna_attention, {"packed": normal(3, K, H)}),
    "gau": Case(brl_jax.gau_attention, BIAS, of_state=ROOM),
    "flash": Case(brl_jax.mixed_chunk_attention, {"chunk_size": 4, **BIAS}, second_linear),
    "bsbr": Case(brl_jax.bsbr_attention, {"chunk_size": 4}, retrieval, {**ROOM, "num_heads": N}),
    "bsbr, compressed": Case(
        brl_jax.bsbr_attention,
        {"chunk_size": 4, "strength": normal(N), "compression": (normal(H, H, 3), normal(3, H, H))},
        retrieval, {**ROOM, "num_heads": N},
    ),
    "mlr": Case(brl_jax.mlr_attention, LEVELS, of_state={"length": T}),
    "mlr, doubling": Case(brl_jax.mlr_attention, {"ranks": (4, 2, 2)}, of_state={"length": T}),
    "mlr, no common block": Case(
        brl_jax.mlr_attention, {"ranks": (4, 4), "block_sizes": (6, 3)}, of_state={"length": T}
    ),
    "long_short": Case(
        brl_jax.long_short_attention, {"window": 3, "chunk_size": 4}, projected, {"length": T, "chunk_rank": 3}
    ),
}  # fmt: skip


def at_once(name):
    """The function on the whole of a long sequence."""
    return functools.partial(CASES[name].at_once, **LONG.get(name, {}))
