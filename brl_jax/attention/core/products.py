"""Matrix products of attention, over heads split into key heads and groups."""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

#: For factors whose rounding the result would amplify: by default a TPU rounds them to 8 bits.
multiply_precisely = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

#: Bytes of scores for one step of a loop on a CPU: about what fits in a core's second-level cache.
CACHE_BYTES = 2**21


def split_heads(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K G T H"]:
    b, t, n, h = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, kv_heads, n // kv_heads, t, h)


def merge_heads(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    b, k, g, t, h = x.shape
    return x.reshape(b, k * g, t, h).transpose(0, 2, 1, 3)


@runtime_checkable
class Product(Protocol):
    """An einsum of two arrays, accumulated in float32."""

    def __call__(self, subscripts: str, x: Array, y: Array, /) -> Array: ...


def product(subscripts: str, x: Array, y: Array, /) -> Array:
    """Keeps all axes separate, because they may be sharded."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def merged_product(subscripts: str, x: Array, y: Array, /) -> Array:
    """Merges the axes b and k into one, and g and t into one, before the product.

    XLA's CPU backend passes products with one batch axis straight to its library. With more batch axes it first writes
    a transposed copy of the right factor, which takes a quarter of the whole time.
    """
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    sizes = dict(zip(left, x.shape)) | dict(zip(right, y.shape))
    merged = {**sizes, "n": sizes["b"] * sizes["k"], "t": sizes["g"] * sizes["t"]}
    names = [axes.replace("bk", "n").replace("gt", "t") for axes in (left, right, result)]
    x, y = (a.reshape([merged[c] for c in axes]) for a, axes in zip((x, y), names))
    return product(f"{names[0]},{names[1]}->{names[2]}", x, y).reshape([sizes[c] for c in result])
