"""Functions that need whole rows, on devices along a mesh axis that share them: each device takes some of the heads."""

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
    """function(*arrays, *rows, *whole), which treats heads separately, of rows that the devices of a mesh may share.

    The devices exchange stretches of all heads for rows of some heads (`all_to_all`), and the outputs back (DeepSpeed
    Ulysses, Jacobs et al. 2023, arXiv:2309.14509). With n devices and a number of heads whose greatest common divisor
    with n is g, n / g devices compute the same heads. Without a mesh it is a plain call.

    Args:
      arrays: (B, T, heads, features); the numbers of heads may differ, where each divides the first or is a multiple
        of it, and heads stay with those that they are grouped with.
      rows: arrays (B, ...) or None.
      whole: arrays of no row and head.
    """
    axis = sequence_axis(arrays[0].shape[1])
    if axis is None:
        return function(*arrays, *rows, *whole)

    def stretch(*operands: Array) -> Array:
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
    return shard_call(stretch, (*arrays, *rows, *whole), names, tokens)
