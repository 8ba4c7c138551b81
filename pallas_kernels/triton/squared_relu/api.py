"""Attention with squared ReLU on GPUs: the differentiable call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import PairTile, adjustable, padded
from pallas_kernels.varying import vary_alike

#: Maximum number of features of queries and keys in one program.
MOST_FEATURES = 256


class PairTiles(NamedTuple):
    """The four kernels' sizes."""

    forward: PairTile
    query_gradient: PairTile
    key_gradient: PairTile
    value_gradient: PairTile


# By minimum compute capability and the padded features of queries. Chosen by the compiler's counts of registers and
# spills (`python -m eval.gpu_costs`).
_TILES = {
    (90, 128): PairTiles(
        PairTile(128, 64, 8, 2), PairTile(64, 64, 8, 2), PairTile(64, 64, 8, 2), PairTile(64, 128, 8, 2)
    ),
    (90, 256): PairTiles(
        PairTile(64, 64, 8, 1), PairTile(64, 32, 8, 1), PairTile(32, 64, 8, 1), PairTile(64, 64, 8, 1)
    ),
    (80, 128): PairTiles(
        PairTile(64, 64, 8, 1), PairTile(64, 32, 8, 1), PairTile(32, 64, 8, 1), PairTile(32, 64, 8, 1)
    ),
    (80, 256): PairTiles(
        PairTile(64, 32, 8, 1), PairTile(32, 32, 8, 1), PairTile(32, 32, 8, 1), PairTile(32, 32, 8, 1)
    ),
}
# float32 needs twice the registers and shared memory of a 16-bit type.
_FLOAT32 = PairTiles(*(PairTile(32, 32, 8, 1) for _ in range(4)))
# Small tiles keep Triton's interpreter fast and exercise every kind of edge.
_INTERPRETED = PairTiles(
    *(PairTile(32, 16, 4, 1) for _ in range(2)), *(PairTile(16, 32, 4, 1) for _ in range(2))
)


class Ranges(NamedTuple):
    """Who sees whom.

    Attributes:
      first, stop: query i sees the keys first[i] .. stop[i].
      begin, end: begin[j] .. end[j] contains all queries that see key j, and maybe others.
    """

    first: Int[Array, "B T"]
    stop: Int[Array, "B T"]
    begin: Int[Array, "B S"]
    end: Int[Array, "B S"]


def squared_relu_unsupported(query: Any, key: Any, value: Any) -> str | None:
    """Returns why the kernels do not support arrays of these shapes and dtypes; None if they do."""
    if (reason := bridge.dtype_unsupported(query)) is not None:
        return reason
    if query.shape[3] > MOST_FEATURES:
        return f"head_dim must be at most {MOST_FEATURES}, got {query.shape[3]}"
    result = (*query.shape[:3], value.shape[3])
    return bridge.row_unsupported(query=query.shape, key=key.shape, value=value.shape, result=result)


def squared_relu_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ranges: Ranges,
) -> Float[Array, "B T N V"]:
    """out_i = sum_j ReLU(q_i . k_j)^2 v_j over the keys that query i sees: gated attention units (arXiv:2202.10447).

    One launch forward and three backward, which need no memory beyond their results. Differentiable in query, key and
    value. Blocks of keys that no query of a block sees are not read.

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256, scaled. In float16 the squares of small numbers would be 0.
      key: (B, S, K, H) and value: (B, S, K, V), of the same dtype, V of any size; K divides N.
      ranges: int32; keys outside are read too, so they must be finite.

    Returns:
      (B, T, N, V) in query's dtype, zero where a query sees nothing.

    Raises:
      NotImplementedError: `squared_relu_unsupported` gives a reason.
    """
    bridge.refuse(squared_relu_unsupported(query, key, value))
    return _attend(*vary_alike(query, key, value, *(x.astype(jnp.int32) for x in ranges)))


@jax.custom_vjp
def _attend(query, key, value, first, stop, begin, end):
    return _attend_forward(query, key, value, first, stop, begin, end)[0]


def _attend_forward(query, key, value, first, stop, begin, end):
    (out,) = _run_forward(None, query, key, value, first, stop)
    return out, (query, key, value, first, stop, begin, end)


def _attend_backward(saved, d_out):
    return *_run_backward(None, *saved, d_out), None, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


@adjustable("squared_relu")
def choose_tiles(features: int, dtype: Any) -> PairTiles:
    """Returns the sizes for a number of query features and a dtype on the target GPU."""
    return bridge.tuned(_TILES, dtype, max(128, padded(features)), _FLOAT32, _INTERPRETED)


def _sizes(query: Array, key: Array, value: Array, tile: PairTile) -> dict[str, Any]:
    (_, length, heads, features), (num_keys, kv_heads) = query.shape, key.shape[1:3]
    return {
        "T": length,
        "S": num_keys,
        "N": heads,
        "G": heads // kv_heads,
        "H": features,
        "HP": padded(features),
        "V": value.shape[3],
        "VB": _value_tile(value),
        "PRECISION": "ieee" if query.dtype == jnp.float32 else "tf32",
        "BM": tile.block_q,
        "BN": tile.block_k,
    }


def _value_tile(value: Array) -> int:
    """Returns how many features of the values one program holds."""
    most = 16 if bridge.interprets() else 64 if value.dtype.itemsize > 2 else 128
    return min(most, padded(value.shape[3]))


@bridge.fold_vmap
def _run_forward(_, query, key, value, first, stop):
    from pallas_kernels.triton.squared_relu import forward

    batch, length, heads, features = query.shape
    tile = choose_tiles(features, query.dtype).forward
    value_tiles = -(-value.shape[3] // _value_tile(value))
    return bridge.launch(
        forward.squared_relu_forward,
        (query, key, value, first, stop),
        (jax.ShapeDtypeStruct((batch, length, heads, value.shape[3]), query.dtype),),
        (-(-length // tile.block_q), heads * value_tiles, batch),
        _sizes(query, key, value, tile),
        tile,
    )


@bridge.fold_vmap
def _run_backward(_, query, key, value, first, stop, begin, end, d_out):
    from pallas_kernels.triton.squared_relu import backward

    batch, length, heads, features = query.shape
    num_keys, kv_heads = key.shape[1:3]
    tiles = choose_tiles(features, query.dtype)
    value_tiles = -(-value.shape[3] // _value_tile(value))

    def launch(kernel, tile, arrays, result, grid):
        (gradient,) = bridge.launch(
            kernel, arrays, (jax.ShapeDtypeStruct(result.shape, result.dtype),), grid,
            _sizes(query, key, value, tile), tile,
        )  # fmt: skip
        return gradient

    seen, seen_by = (first, stop), (begin, end)
    tile = tiles.query_gradient
    d_query = launch(
        backward.squared_relu_query_gradient, tile, (query, key, value, d_out, *seen), query,
        (-(-length // tile.block_q), heads, batch),
    )  # fmt: skip
    tile = tiles.key_gradient
    d_key = launch(
        backward.squared_relu_key_gradient, tile, (query, key, value, d_out, *seen, *seen_by), key,
        (-(-num_keys // tile.block_k), kv_heads, batch),
    )  # fmt: skip
    tile = tiles.value_gradient
    d_value = launch(
        backward.squared_relu_value_gradient, tile, (query, key, d_out, *seen, *seen_by), value,
        (-(-num_keys // tile.block_k), kv_heads * value_tiles, batch),
    )  # fmt: skip
    return d_query, d_key, d_value
