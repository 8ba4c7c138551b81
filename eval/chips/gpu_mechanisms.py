"""The mechanisms whose chunks a GPU computes all at once, for `eval.gpu_costs`: how many kernels a call launches.

A loop over chunks launches kernels in proportion to the tokens, and a GPU waits for each of them. XLA compiles these
programs from JAX operations; some launch kernels in Triton too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import brl_jax
from brl_jax.layers import BRLConfig, Dimensions

#: The most launches of a pass over the longer of the lengths.
MOST = {"forward": 60, "forward + backward": 150}
LENGTHS = (4096, 16384)
#: The most launches of the longer length over the launches of the shorter one. Four times the tokens add two levels to
#: a tree over chunks; in a loop they would take four times the launches.
GROWTH = 1.5
NAMES = (
    "linear",
    "norm",
    "cosformer",
    "performer",
    "deltanet",
    "gau",
    "flash",
    "bsbr",
    "diag",
    "brl-encoder",
    "brl-decoder",
)


def program(name: str, length: int, heads: int, head_dim: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The mechanism's causal call, and the shapes of its arguments, in bfloat16. GAU has one head and a bias, as in its
    layer."""
    if name.startswith("brl-"):
        return _brl_layer(length, heads, head_dim, is_causal=name == "brl-decoder")
    heads = 1 if name == "gau" else heads
    tokens = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((1, head_dim), jnp.float32)
    more: dict[str, tuple[Any, ...]] = {
        "gau": (vector, vector),
        "deltanet": (jax.ShapeDtypeStruct((1, length, heads), jnp.float32),),
        "performer": (jax.ShapeDtypeStruct((2 * head_dim, head_dim), jnp.float32),),
        "flash": (tokens, tokens),
        "bsbr": (tokens, tokens),
    }
    functions: dict[str, Callable[..., Any]] = {
        "linear": lambda q, k, v: brl_jax.linear_attention(q, k, v, is_causal=True),
        "norm": lambda q, k, v: brl_jax.norm_attention(q, k, v, is_causal=True),
        "cosformer": lambda q, k, v: brl_jax.cosformer_attention(q, k, v, max_length=length, is_causal=True),
        "performer": lambda q, k, v, w: brl_jax.performer_attention(q, k, v, projection=w, is_causal=True),
        "deltanet": lambda q, k, v, beta: brl_jax.delta_rule(q, k, v, beta=beta),
        "gau": lambda q, k, v, left, right: brl_jax.gau_attention(
            q, k, v, bias=brl_jax.RotaryBias(left, right), is_causal=True
        ),
        "flash": lambda q, k, v, lq, lk: brl_jax.mixed_chunk_attention(q, k, lq, lk, v, is_causal=True),
        "bsbr": lambda q, k, v, rq, rk: brl_jax.bsbr_attention(q, k, v, rq, rk, is_causal=True),
        "diag": lambda q, k, v: brl_jax.diag_attention(q, k, v, is_causal=True),
    }
    return functions[name], (tokens, tokens, tokens, *more.get(name, ()))


def _brl_layer(
    length: int, heads: int, head_dim: int, *, is_causal: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A BRL layer with its default options, as a function of its inputs and parameters."""
    width = heads * head_dim
    dimensions = Dimensions(width, heads, heads, head_dim, 4 * width, is_causal=is_causal, dtype=jnp.bfloat16)
    layer = BRLConfig().layer(dimensions)
    carrier: Any = BRLConfig().carrier(dimensions)
    inputs = jax.ShapeDtypeStruct((1, length, width), jnp.bfloat16)
    key = jax.random.key(0)
    carry, before = jax.eval_shape(lambda x: carrier.init_with_output(key, x, None), inputs)
    _, within = jax.eval_shape(lambda x, carry: layer.init_with_output(key, x, carry=carry), inputs, carry)
    leaves, structure = jax.tree.flatten((before, within))

    def run(inputs: Any, *leaves: Any) -> Any:
        before, within = jax.tree.unflatten(structure, leaves)
        return layer.apply(within, inputs, carry=carrier.apply(before, inputs, None))[0]

    return run, (inputs, *leaves)


def problems(name: str, passes: str, counts: tuple[int, int], temporary: tuple[int, int]) -> list[str]:
    """What is wrong with the launches and the temporary bytes at the two lengths."""
    short, long = LENGTHS
    found = []
    if counts[1] > MOST[passes]:
        found.append(f"{name}, {passes}: {counts[1]} launches for {long} tokens, more than {MOST[passes]}")
    if counts[1] > GROWTH * counts[0]:
        found.append(
            f"{name}, {passes}: {counts[0]} launches for {short} tokens grow to {counts[1]} for {long}"
        )
    if temporary[1] > 1.1 * long / short * temporary[0]:
        found.append(
            f"{name}, {passes}: {temporary[0]} bytes of temporary memory for {short} tokens grow to "
            f"{temporary[1]} for {long}"
        )
    return found
