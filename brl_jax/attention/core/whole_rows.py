"""Functions that need whole rows, for rows that are sharded over a mesh axis: each device takes some of the heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jax import lax
from jaxtyping import Array, Float

from brl_jax.sharding import Names, sequence_axis, shard_call


def by_heads(
    function: Callable[..., Array],
    arrays: Sequence[Float[Array, "B T _ _"]],
    rows: Sequence[Array | None] = (),
    whole: Sequence[Array] = (),
) -> Float[Array, "B T N V"]:
    """function(*arrays, *rows, *whole), for a function that treats heads separately and rows that may be sharded.

    The devices exchange shards of all heads for whole rows of some heads (`all_to_all`), and then exchange the outputs
    back (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv:2309.14509). If n devices and the number of heads have the
    greatest common divisor g, each head is computed by n / g devices. Without a mesh it is a plain call.

    Args:
      arrays: (B, T, heads, features). Numbers of heads may differ if each divides the first or is a multiple of it;
        grouped heads stay together.
      rows: arrays (B, ...) or None.
      whole: arrays without rows and heads.
    """
    axis = sequence_axis(arrays[0].shape[1])
    if axis is None:
        return function(*arrays, *rows, *whole)

    def on_shards(*operands: Array) -> Array:
        size = lax.axis_size(axis)
        parts = math.gcd(size, *(x.shape[2] for x in operands[: len(arrays)]))
        # Neighbours exchange heads; then those that have the same heads exchange their tokens.
        near = [[first + i for i in range(parts)] for first in range(0, size, parts)]
        far = [[first + i for first in range(0, size, parts)] for i in range(parts)]

        def swap(x: Array, split: int, join: int) -> Array:
            if parts == 1:
                return x
            return lax.all_to_all(
                x, axis, split_axis=split, concat_axis=join, tiled=True, axis_index_groups=near
            )

        def gather(x: Array) -> Array:
            x = swap(x, 2, 1)
            return x if parts == size else lax.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=far)

        out = function(*map(gather, operands[: len(arrays)]), *operands[len(arrays) :])
        count = out.shape[1] // len(near)
        out = lax.dynamic_slice_in_dim(out, lax.axis_index(axis) // parts * count, count, axis=1)
        return swap(out, 1, 2)

    tokens = ("batch", "length", "heads", None)
    names: list[Names] = [tokens] * len(arrays)
    names += [() if x is None else ("batch", *[None] * (x.ndim - 1)) for x in rows]
    names += [(None,) * x.ndim for x in whole]
    return shard_call(on_shards, (*arrays, *rows, *whole), names, tokens)
