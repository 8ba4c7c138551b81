"""Padding as segment ids, the single encoding that kernels and halos use.

A query sees the keys whose segment id equals its own. An absent token (beyond its sequence's length, in the padding of
a block, or outside the sequence) gets an id that no other token of its row has. It then sees nothing and nothing sees
it, whatever ids the caller uses.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def existing(lengths: Int[Array, " B"], length: int) -> Bool[Array, "B T"]:
    """Returns which of each row's `length` tokens exist: the first `lengths`."""
    lengths = jnp.asarray(lengths).astype(jnp.int32)  # int8 may not hold `length`
    return jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]


def zero_absent(x: Float[Array, "B T N H"], exists: Bool[Array, "B T"] | None) -> Float[Array, "B T N H"]:
    """Returns x with zeros at absent tokens, which may hold NaN that must not reach a sum or a gradient."""
    return x if exists is None else jnp.where(exists[:, :, None, None], x, jnp.zeros((), x.dtype))


def mark_absent(
    query_ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
    query_exists: Bool[Array, "#B T"] | None,
    key_exists: Bool[Array, "#B S"] | None,
    batch: int | None = None,
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Returns int32 segment ids of queries and keys in which absent tokens match no other token.

    The ids of absent queries and absent keys differ from each other and from every id in the same row. The caller may
    use any int32 as an id: a row of n ids leaves at least two of the numbers 0 .. n + 1 unused, and these mark absent
    tokens.

    Args:
      query_ids, key_ids: the caller's segment ids, both or neither; None means a single segment.
      query_exists, key_exists: which tokens exist; None for all.
      batch: B, required if all ids are None and both masks have a batch axis of 1 or are None.

    Raises:
      ValueError: only one kind of ids is given, or the arguments do not determine the sizes.
    """
    if (query_ids is None) != (key_ids is None):
        raise ValueError("query_ids and key_ids belong together: give both or neither")
    if query_ids is None or key_ids is None:
        if query_exists is None or key_exists is None:
            raise ValueError("query_exists and key_exists must be given if there are no ids")
        rows = max(query_exists.shape[0], key_exists.shape[0]) if batch is None else batch
        ids = [
            jnp.broadcast_to(jnp.where(exists, jnp.int32(0), jnp.int32(absent)), (rows, exists.shape[1]))
            for absent, exists in enumerate((query_exists, key_exists), start=1)
        ]
        return ids[0], ids[1]
    query_ids, key_ids = query_ids.astype(jnp.int32), key_ids.astype(jnp.int32)
    if query_exists is None and key_exists is None:
        return query_ids, key_ids
    used = jnp.concatenate([query_ids, key_ids], axis=1)
    rows, count = used.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    # Index count + 2 is out of bounds, so it is dropped; a negative index would count from the end.
    place = jnp.where(used < 0, jnp.int32(count + 2), used)
    taken = jnp.zeros((rows, count + 2), bool).at[row, place].set(True, mode="drop")
    first = jnp.argmin(taken, axis=1, keepdims=True).astype(jnp.int32)
    second = jnp.argmin(taken.at[row, first].set(True), axis=1, keepdims=True).astype(jnp.int32)
    if query_exists is not None:
        query_ids = jnp.where(query_exists, query_ids, first)
    if key_exists is not None:
        key_ids = jnp.where(key_exists, key_ids, second)
    return query_ids, key_ids
