"""Cross-attention from all tokens to a few compressed tokens on GPUs: the differentiable call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import SCORES, adjustable, padded, split
from pallas_kernels.varying import vary_alike

#: Maximum number of compressed tokens in one program.
MOST_TOKENS = 256


class RowTile(NamedTuple):
    """Rows in a block, compressed tokens in a block (None: all), Triton's warps and stages, and the programs that a
    multiprocessor runs at the same time (the keys' gradient: one)."""

    block_t: int
    block_m: int | None
    num_warps: int
    num_stages: int
    resident: int = 2


class RowTiles(NamedTuple):
    """The three kernels' sizes."""

    forward: RowTile
    query_gradient: RowTile
    key_gradient: RowTile


# By minimum compute capability, and whether there are more than 128 compressed tokens. Chosen by the compiler's counts
# of registers and spills (`python -m eval.gpu_costs`), and for 90 by times on an H200. There, `_SMALL` is for at most
# 64 compressed tokens of at most 64 features.
_TILES = {
    (90, False): RowTiles(RowTile(64, None, 4, 3), RowTile(64, None, 4, 2), RowTile(64, 128, 8, 2)),
    (90, True): RowTiles(RowTile(64, None, 8, 1), RowTile(32, None, 8, 1), RowTile(64, 64, 8, 2)),
    (80, False): RowTiles(RowTile(64, None, 8, 1), RowTile(32, None, 4, 1), RowTile(32, 64, 8, 1)),
    (80, True): RowTiles(RowTile(32, None, 8, 1), RowTile(32, None, 8, 1), RowTile(32, 64, 8, 1)),
}
_SMALL = RowTiles(
    RowTile(64, None, 4, 3, resident=4), RowTile(64, None, 4, 2, resident=4), RowTile(64, 64, 4, 3)
)
_FLOAT32 = {
    False: RowTiles(RowTile(32, None, 8, 1), RowTile(32, None, 8, 1), RowTile(32, 32, 8, 1)),
    True: RowTiles(RowTile(16, None, 8, 1), RowTile(16, None, 8, 1), RowTile(32, 32, 8, 1)),
}
_INTERPRETED = RowTiles(RowTile(32, None, 4, 1), RowTile(32, None, 4, 1), RowTile(16, 16, 4, 1))


@adjustable("propagate")
def choose_tiles(tokens: int, head_dim: int, dtype: Any) -> RowTiles:
    """Returns the sizes for a number of compressed tokens, a head dimension and a dtype on the target GPU."""
    if bridge.interprets():
        return _INTERPRETED
    many = padded(tokens) > 128
    if jnp.dtype(dtype).itemsize > 2:
        return _FLOAT32[many]
    capability = bridge.tuned_for(c for c, _ in _TILES)
    return _SMALL if capability == 90 and max(tokens, head_dim) <= 64 else _TILES[capability, many]


class _PropagateCall(NamedTuple):
    """Everything static about one call."""

    scale: float
    score: str


def propagate_unsupported(query: Any, key: Any, value: Any) -> str | None:
    """Returns why the kernels do not support arrays of these shapes and dtypes; None if they do."""
    if key.shape[1] > MOST_TOKENS:
        return f"there must be at most {MOST_TOKENS} compressed tokens, got {key.shape[1]}"
    return bridge.array_unsupported(query, value, most_head_dim=128)


def propagate(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B M N H"],
    value: Float[Array, "B M N H"],
    *,
    strength: Float[Array, "N"],
    scale: float,
    score: str = "softmax",
) -> Float[Array, "B T N H"]:
    """lambda sigma(c Q K^T) V over M compressed tokens, BRL-Attention (OpenReview Vpyg3fqXbl), equation 9.

    One launch forward, two backward and the sums of their parts. Differentiable in query, key, value and strength.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16, H up to 128.
      key, value: (B, M, N, H) of the same dtype, M up to 256.
      strength: (N,) float32, lambda.
      scale: c.
      score: "softmax", "relu2" or "laplace".

    Returns:
      (B, T, N, H) in query's dtype.

    Raises:
      NotImplementedError: `propagate_unsupported` gives a reason.
    """
    bridge.refuse(propagate_unsupported(query, key, value))
    rows = jnp.broadcast_to(strength.astype(jnp.float32), (query.shape[0], *strength.shape))
    return _propagate(*vary_alike(query, key, value, rows), _PropagateCall(float(scale), score))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _propagate(query, key, value, strength, call: _PropagateCall):
    return _propagate_forward(query, key, value, strength, call)[0]


def _propagate_forward(query, key, value, strength, call: _PropagateCall):
    (out,) = _run_forward(call, query, key, value, strength)
    return out, (query, key, value, strength)


def _propagate_backward(call: _PropagateCall, saved, d_out):
    query, key, _, _ = saved
    d_query, d_key, d_value, d_strength = _run_backward(call, *saved, d_out.astype(query.dtype))
    d_key, d_value = (x.sum(1).transpose(0, 2, 1, 3).astype(key.dtype) for x in (d_key, d_value))
    return d_query, d_key, d_value, d_strength.sum(2)


_propagate.defvjp(_propagate_forward, _propagate_backward)


def _constants(call: _PropagateCall, query: Array, key: Array, tile: RowTile) -> dict[str, Any]:
    return {
        "T": query.shape[1],
        "M": key.shape[1],
        "N": query.shape[2],
        "H": query.shape[3],
        "HP": padded(query.shape[3]),
        "SCALE": call.scale,
        "SCORE": SCORES[call.score],
        "PRECISION": "ieee" if query.dtype == jnp.float32 else "tf32",
        "BT": tile.block_t,
        "BM": min(tile.block_m or MOST_TOKENS, padded(key.shape[1])),
    }


@bridge.fold_vmap
def _run_forward(call: _PropagateCall, query, key, value, strength):
    from pallas_kernels.triton.propagate import forward

    batch, length, heads, _ = query.shape
    tile = choose_tiles(key.shape[1], query.shape[3], query.dtype).forward
    splits, segment = split(length, batch * heads, tile.block_t, tile.resident)
    return bridge.launch(
        forward.propagate_forward,
        (query, key, value, strength),
        (jax.ShapeDtypeStruct(query.shape, query.dtype),),
        (splits, heads, batch),
        _constants(call, query, key, tile) | {"SEGMENT": segment},
        tile,
    )


@bridge.fold_vmap
def _run_backward(call: _PropagateCall, query, key, value, strength, d_out):
    from pallas_kernels.triton.propagate import backward

    batch, length, heads, head_dim = query.shape
    tokens = key.shape[1]
    tiles = choose_tiles(tokens, head_dim, query.dtype)
    tile = tiles.query_gradient
    splits, segment = split(length, batch * heads, tile.block_t, tile.resident)
    rows = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    d_query, log_sums, deltas, d_strength = bridge.launch(
        backward.propagate_query_gradient,
        (query, key, value, strength, d_out),
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            rows,
            rows,
            jax.ShapeDtypeStruct((batch, heads, splits), jnp.float32),
        ),
        (splits, heads, batch),
        _constants(call, query, key, tile) | {"SEGMENT": segment},
        tile,
    )
    tile = tiles.key_gradient
    constants = _constants(call, query, key, tile)
    count = -(-tokens // constants["BM"])
    splits, segment = split(length, batch * heads * count, tile.block_t)
    parts = jax.ShapeDtypeStruct((splits, batch, heads, tokens, head_dim), jnp.float32)
    d_key, d_value = bridge.launch(
        backward.propagate_key_gradient,
        (query, key, value, strength, d_out, log_sums, deltas),
        (parts, parts),
        (splits * count, heads, batch),
        constants | {"TILES": count, "SEGMENT": segment},
        tile,
    )
    return d_query, jnp.moveaxis(d_key, 1, 0), jnp.moveaxis(d_value, 1, 0), d_strength
