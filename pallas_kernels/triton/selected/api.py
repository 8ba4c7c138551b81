"""Attention to listed blocks of keys on GPUs: the differentiable call, and the transpose of its lists."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import adjustable, padded
from pallas_kernels.varying import vary_alike

#: Maximum number of query heads that share a key head; one program handles them all.
MOST_GROUP = 64
#: Pairs of a token and a block in one part of a tile's gradient.
_PAIRS_OF_PART = 2048


class SelectedTile(NamedTuple):
    """Keys in a tile, how many pairs of a query head and a block to compute at a time, and Triton's warps and
    stages."""

    block_k: int
    rows: int
    num_warps: int
    num_stages: int


class SelectedTiles(NamedTuple):
    """The kernels' sizes; `by_query` does not use `rows`."""

    by_query: SelectedTile
    by_key: SelectedTile


# By minimum compute capability. Chosen by the compiler's counts of registers and spills (`python -m eval.gpu_costs`).
_TILES = {
    90: SelectedTiles(SelectedTile(64, 16, 4, 2), SelectedTile(64, 64, 8, 1)),
    80: SelectedTiles(SelectedTile(64, 16, 4, 1), SelectedTile(64, 32, 8, 1)),
}
_FLOAT32 = SelectedTiles(SelectedTile(32, 16, 4, 1), SelectedTile(32, 16, 8, 1))
_INTERPRETED = SelectedTiles(SelectedTile(16, 16, 4, 1), SelectedTile(16, 32, 4, 1))


class _SelectedCall(NamedTuple):
    """Everything static about one call."""

    size: int
    scale: float


def selected_unsupported(query: Any, key: Any) -> str | None:
    """Returns why the kernels do not support arrays of these shapes and dtypes; None if they do."""
    group = query.shape[2] // key.shape[2]
    if group > MOST_GROUP:
        return f"at most {MOST_GROUP} query heads may share a key head, got {group}"
    return bridge.array_unsupported(query, key, most_head_dim=128)


def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    starts: Int[Array, "B T K M"],
    positions: Int[Array, "B T"],
    *,
    size: int,
    scale: float,
    return_log_sum_exp: bool = False,
    known: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]] | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention of each token to the keys of M blocks, up to its position (arXiv:2502.11089).

    One launch forward. In the backward pass, the pairs of token and block are sorted by their blocks, so no kernel
    needs atomic additions. Memory is linear in T M. Differentiable in query, key and value.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16, H up to 128.
      key, value: (B, S, K, H) of the same dtype; K divides N.
      starts: int32, the first keys of the blocks, which must not overlap; S marks a missing block.
      positions: int32, the tokens' positions among the keys.
      size: keys in a block.
      scale: multiplies the scores.
      return_log_sum_exp: also return the logarithm of each row's sum of exponentials, in base 2 and without a gradient.
      known: the results of an earlier call, with its log-sum-exp. The forward kernel is then skipped, and the gradient
        is the earlier call's.

    Returns:
      (B, T, N, H) in float32, 0 where a token sees nothing; with `return_log_sum_exp` also (B, T, N), inf there.

    Raises:
      NotImplementedError: `selected_unsupported` gives a reason.
    """
    bridge.refuse(selected_unsupported(query, key))
    arrays = vary_alike(query, key, value, starts.astype(jnp.int32), positions.astype(jnp.int32))
    found = _attend(*arrays, known, _SelectedCall(size, float(scale)))
    return found if return_log_sum_exp else found[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(query, key, value, starts, positions, known, call: _SelectedCall):
    return _attend_forward(query, key, value, starts, positions, known, call)[0]


def _attend_forward(query, key, value, starts, positions, known, call: _SelectedCall):
    if known is None:
        known = _run_forward(call, query, key, value, starts, positions)
    return tuple(known), (query, key, value, starts, positions, *known)


def _attend_backward(call: _SelectedCall, saved, gradients):
    query, key, value, starts, positions, out, log_sums = saved
    d_out, _ = gradients
    deltas = jnp.einsum("btnh,btnh->btn", d_out, out)
    rest = (positions, d_out.astype(query.dtype), log_sums, deltas)
    (d_query,) = _run_query_gradient(call, query, key, value, starts, *rest)
    tile = choose_tiles(query.dtype).by_key.block_k
    lists = transposed_lists(starts, key.shape[1], call.size, tile)
    d_key, d_value = _run_key_gradient(call, query, key, value, *lists, *rest)
    return d_query, d_key, d_value, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


@adjustable("selected")
def choose_tiles(dtype: Any) -> SelectedTiles:
    """Returns the kernels' sizes for a dtype on the target GPU."""
    if bridge.interprets():
        return _INTERPRETED
    return _FLOAT32 if jnp.dtype(dtype).itemsize > 2 else _TILES[bridge.tuned_for(_TILES)]


class Transposed(NamedTuple):
    """Which pairs of a token and a block touch each tile of keys; see `backward`.

    Attributes:
      pairs, pair_starts: all pairs, sorted by the first keys of their blocks, and those keys.
      tiles, begins, ends: each part's tile and pairs; unneeded parts have no pairs.
      firsts: the first part of each tile, then the number of parts.
    """

    pairs: Int[Array, "B K E"]
    pair_starts: Int[Array, "B K E"]
    tiles: Int[Array, "B K P"]
    begins: Int[Array, "B K P"]
    ends: Int[Array, "B K P"]
    firsts: Int[Array, "B K J1"]


def transposed_lists(starts: Int[Array, "B T K M"], keys: int, size: int, tile: int) -> Transposed:
    """Transposes lists of blocks of `size` keys, for tiles of `tile` keys."""
    batch, length, kv_heads, blocks = starts.shape
    flat = jnp.moveaxis(starts, 2, 1).reshape(batch, kv_heads, length * blocks)
    pairs = jnp.broadcast_to(jnp.arange(length * blocks, dtype=jnp.int32), flat.shape)
    pair_starts, pairs = lax.sort((flat, pairs), dimension=2, num_keys=1, is_stable=True)
    tiles = math.ceil(keys / tile)
    places = jnp.arange(tiles, dtype=jnp.int32) * tile
    find = functools.partial(jnp.searchsorted, method="sort")
    search = jax.vmap(jax.vmap(find, (0, None)), (0, None))
    begin = search(pair_starts, places - size + 1).astype(jnp.int32)
    end = search(pair_starts, jnp.minimum(places + tile, keys)).astype(jnp.int32)
    needed = -(-(end - begin) // _PAIRS_OF_PART)
    firsts = jnp.pad(jnp.cumsum(needed, axis=2, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    # A block touches at most `touched` tiles, and in each tile all parts but one are full.
    touched = (size + tile - 2) // tile + 1
    parts = jnp.arange(tiles + length * blocks * touched // _PAIRS_OF_PART, dtype=jnp.int32)
    # A part belongs to the last tile that begins at or before it and has any parts.
    counted = jax.vmap(jax.vmap(functools.partial(find, side="right"), (0, None)), (0, None))
    of_part = jnp.minimum(counted(firsts[:, :, 1:], parts).astype(jnp.int32), tiles - 1)
    pick = functools.partial(jnp.take_along_axis, indices=of_part, axis=2)
    parts = parts[None, None]
    begins = pick(begin) + (parts - pick(firsts[:, :, :-1])) * _PAIRS_OF_PART
    ends = jnp.minimum(begins + _PAIRS_OF_PART, pick(end))
    exists = parts < firsts[:, :, -1:]
    begins, ends = (jnp.where(exists, x, 0) for x in (begins, ends))
    return Transposed(pairs, pair_starts, of_part, begins, ends, firsts)


def _sizes(call: _SelectedCall, query: Array, key: Array, blocks: int, tile: SelectedTile) -> dict[str, Any]:
    (_, length, heads, head_dim), (keys, kv_heads) = query.shape, key.shape[1:3]
    return {
        "T": length,
        "S": keys,
        "K": kv_heads,
        "G": heads // kv_heads,
        "GP": padded(heads // kv_heads),
        "H": head_dim,
        "HP": padded(head_dim),
        "M": blocks,
        "SIZE": call.size,
        "SCALE": call.scale,
        "PRECISION": "ieee" if query.dtype == jnp.float32 else "tf32",
        "BN": tile.block_k,
    }


@bridge.fold_vmap
def _run_forward(call: _SelectedCall, query, key, value, starts, positions):
    from pallas_kernels.triton.selected import forward

    batch, length, heads, _ = query.shape
    tile = choose_tiles(query.dtype).by_query
    return bridge.launch(
        forward.selected_forward,
        (query, key, value, starts, positions),
        (
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, length, heads), jnp.float32),
        ),
        (length, key.shape[2], batch),
        _sizes(call, query, key, starts.shape[3], tile),
        tile,
    )


@bridge.fold_vmap
def _run_query_gradient(call: _SelectedCall, query, key, value, starts, positions, d_out, log_sums, deltas):
    from pallas_kernels.triton.selected import backward

    tile = choose_tiles(query.dtype).by_query
    return bridge.launch(
        backward.selected_query_gradient,
        (query, key, value, starts, positions, d_out, log_sums, deltas),
        (jax.ShapeDtypeStruct(query.shape, query.dtype),),
        (query.shape[1], key.shape[2], query.shape[0]),
        _sizes(call, query, key, starts.shape[3], tile),
        tile,
    )


@bridge.fold_vmap
def _run_key_gradient(
    call: _SelectedCall,
    query,
    key,
    value,
    pairs,
    pair_starts,
    tiles,
    begins,
    ends,
    firsts,
    positions,
    d_out,
    log_sums,
    deltas,
):
    from pallas_kernels.triton.selected import backward

    batch, _, kv_heads, head_dim = key.shape
    tile = choose_tiles(query.dtype).by_key
    sizes = _sizes(call, query, key, pairs.shape[2] // query.shape[1], tile)
    group = 1 << (sizes["G"] - 1).bit_length()
    parts = jax.ShapeDtypeStruct((batch, kv_heads, tiles.shape[2], tile.block_k, head_dim), jnp.float32)
    sums = bridge.launch(
        backward.selected_key_gradient,
        (query, key, value, pairs, pair_starts, tiles, begins, ends, positions, d_out, log_sums, deltas),
        (parts, parts),
        (tiles.shape[2], kv_heads, batch),
        {**sizes, "GP": group, "BM": max(tile.rows, group), "PARTS": tiles.shape[2]},
        tile,
    )
    gradient = jax.ShapeDtypeStruct(key.shape, key.dtype)
    count = firsts.shape[2] - 1
    return bridge.launch(
        backward.selected_sum_of_parts,
        (*sums, firsts),
        (gradient, gradient),
        (count, kv_heads, batch),
        {**sizes, "PARTS": tiles.shape[2], "TILES": count},
        tile,
    )
