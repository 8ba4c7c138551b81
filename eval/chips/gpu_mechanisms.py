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
from eval.chips import gpu_operations

#: The most launches of a pass over the longer of the lengths.
MOST = {"forward": 60, "forward + backward": 150}
LENGTHS = (4096, 16384)
#: The most launches of the longer length over the launches of the shorter one. Four times the tokens add two levels to
#: a tree over chunks; in a loop they would take four times the launches.
GROWTH = 1.5
NAMES = (
    "linear", "norm", "cosformer", "performer", "deltanet", "gau", "flash", "bsbr", "diag", "brl-encoder",
    "brl-decoder",
)  # fmt: skip


def program(name: str, length: int, heads: int, head_dim: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The mechanism's causal call, and the shapes of its arguments, in bfloat16. GAU has one head and a bias, as in its
    layer."""
    if name.startswith("brl-"):
        return _brl_layer(length, heads, head_dim, is_causal=name == "brl-decoder")
    tokens = jax.ShapeDtypeStruct((1, length, 1 if name == "gau" else heads, head_dim), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((1, head_dim), jnp.float32)
    features = jax.ShapeDtypeStruct((2 * head_dim, head_dim), jnp.float32)
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "cosformer": (lambda *qkv: brl_jax.cosformer_attention(*qkv, max_length=length, is_causal=True), ()),
        "performer": (
            lambda q, k, v, w: brl_jax.performer_attention(q, k, v, projection=w, is_causal=True),
            (features,),
        ),
        "gau": (
            lambda q, k, v, *sides: brl_jax.gau_attention(
                q, k, v, bias=brl_jax.RotaryBias(*sides), is_causal=True
            ),
            (vector, vector),
        ),
    }
    if name in functions:
        function, more = functions[name]
        return function, (tokens, tokens, tokens, *more)
    operation, size = (
        {"deltanet": "delta"}.get(name, name),
        gpu_operations.Size(length, heads, head_dim=head_dim),
    )
    arrays = gpu_operations.arrays(operation, size, jnp.bfloat16)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return gpu_operations.OPERATIONS[operation].call(size, None), shapes


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
