"""Argument checks and the two ways of saying that a token is not there: lengths and segment ids."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu.core.heads import MAX_HEAD_DIM, alike


def check_arrays(arrays: dict[str, Array]) -> None:
    """Checks that all have four axes, nothing empty, one dtype that the kernels compute in, and a head dim
    they hold.

    Raises:
      ValueError: on shapes or dtypes that differ or are empty.
      NotImplementedError: on a dtype or a head dim that no kernel has.
    """
    first_name, first = next(iter(arrays.items()))
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, head_dim), got {x.shape}")
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, got shape {x.shape}")
        if x.dtype != first.dtype:
            raise ValueError(f"{name} must have {first_name}'s dtype {first.dtype}, got {x.dtype}")
        if x.shape[0] != first.shape[0] or x.shape[3] != first.shape[3]:
            raise ValueError(
                f"{name} must have {first_name}'s batch and head_dim {(first.shape[0], first.shape[3])}, "
                f"got {x.shape[0], x.shape[3]}"
            )
    if first.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"TPU kernels compute in float32 or bfloat16, got {first_name} of {first.dtype}"
        )
    if first.shape[3] > MAX_HEAD_DIM:
        raise NotImplementedError(f"TPU kernels take a head_dim up to {MAX_HEAD_DIM}, got {first.shape[3]}")


def check_attention(query, key, value) -> None:
    """`check_arrays` for attention, with as many queries' heads as a multiple of the keys'."""
    check_arrays({"query": query, "key": key, "value": value})
    if value.shape != key.shape:
        raise ValueError(f"value must have key's shape {key.shape}, got {value.shape}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the heads of query must be a multiple of those of key, got {query.shape[2]} and {key.shape[2]}"
        )


def positive_scale(query: Float[Array, ...], scale: float | None) -> tuple[Float[Array, ...], float]:
    """(query, scale) with a scale above zero, the default being 1 / sqrt(head_dim).

    The kernels take a row's maximum before they scale, so that scaling and log2(e) are one multiplication.
    """
    if scale is None:
        return query, 1.0 / math.sqrt(query.shape[-1])
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if scale > 0:
        return query, float(scale)
    return query * jnp.asarray(-1 if scale < 0 else 0, query.dtype), abs(float(scale)) or 1.0


def token_rows(
    name: str,
    batch: int,
    length: int,
    segment_ids: Int[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    absent: int,
) -> tuple[Int[Array, "B 1 T"], Bool[Array, "B T"] | None]:
    """Segment ids as the kernels read them, `absent` where there is no token, and which tokens there are."""
    if segment_ids is None:
        ids = jnp.zeros((batch, length), jnp.int32)
    elif segment_ids.shape != (batch, length) or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"{name}_segment_ids must be ints of shape {(batch, length)}, "
            f"got {segment_ids.dtype} of {segment_ids.shape}"
        )
    else:
        ids = segment_ids.astype(jnp.int32)
    if lengths is None:
        return ids[:, None, :], None
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{name}_lengths must be ints of shape {(batch,)}, got {lengths.dtype} of {lengths.shape}"
        )
    there = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths.astype(jnp.int32)[:, None]
    return jnp.where(there, ids, jnp.int32(absent))[:, None, :], there


def only(x: Float[Array, "B T N H"], there: Bool[Array, "B T"] | None) -> Float[Array, "B T N H"]:
    """x with zeros where there is no token: what lies there may be NaN, and must reach no sum and no
    gradient."""
    return x if there is None else jnp.where(there[:, :, None, None], x, jnp.zeros((), x.dtype))


class Tokens(NamedTuple):
    """A call's arrays with what does not exist marked and set to zero.

    Attributes:
      segments: ids of the queries and of the keys as the kernels read them; None where every token is there and sees
        every other.
      shift: passed through; all arrays vary over the same mesh axes.
      query_there: which queries exist; None for all.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]] | None
    shift: Int[Array, "1"] | None
    query_there: Bool[Array, "B T"] | None


def mark_tokens(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    query_segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    query_lengths: Int[Array, " B"] | None,
    key_lengths: Int[Array, " B"] | None,
    shift: Int[Array, "1"] | None = None,
) -> Tokens:
    """Segment ids and lengths as one pair of ids.

    Raises:
      ValueError: on one kind of segment ids without the other, and on shapes or dtypes that don't fit.
    """
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("query_segment_ids and key_segment_ids belong together: give both or neither")
    rows: list[Array] = []
    query_there = None
    if any(x is not None for x in (query_segment_ids, query_lengths, key_lengths)):
        batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
        query_rows, query_there = token_rows("query", batch, length, query_segment_ids, query_lengths, -2)
        key_rows, key_there = token_rows("key", batch, keys, key_segment_ids, key_lengths, -1)
        query, key, value = only(query, query_there), only(key, key_there), only(value, key_there)
        rows = [query_rows, key_rows]
    query, key, value, *rest = alike(query, key, value, *rows, *([] if shift is None else [shift]))
    segments = (rest[0], rest[1]) if rows else None
    return Tokens(query, key, value, segments, None if shift is None else rest[-1], query_there)
