"""Checks of arguments, reasons why a call is not supported, and absent tokens, given by lengths and segment ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.absent import existing, mark_absent, zero_absent
from pallas_kernels.tpu.core.heads import MAX_HEAD_DIM
from pallas_kernels.varying import vary_alike

#: Maximum number of compressed tokens that compress and propagate keep in VMEM.
MAX_COMPRESSED = 1024

#: The arrays for a call's plan, of which only shape, dtype and mesh matter.
Shaped = Array | jax.ShapeDtypeStruct


_P = ParamSpec("_P")


def refusal(plan: Callable[_P, object]) -> Callable[_P, str | None]:
    """Makes a function of `plan` that returns the message of the error that it raises; None if it raises none.

    Arrays may be tracers or `jax.ShapeDtypeStruct`: only shape, dtype and mesh matter, and nothing is traced.
    """

    def refused(*arguments: _P.args, **options: _P.kwargs) -> str | None:
        try:
            plan(*arguments, **options)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return None

    return refused


def check_arrays(arrays: dict[str, Shaped]) -> None:
    """Checks that all arrays have four axes, none empty, and share a dtype and head dimension that the kernels support.

    Raises:
      ValueError: shapes differ or are empty, or dtypes differ.
      NotImplementedError: no kernel supports the dtype or the head dimension.
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
        raise NotImplementedError(
            f"TPU kernels support a head_dim up to {MAX_HEAD_DIM}, got {first.shape[3]}"
        )


def check_attention(query: Shaped, key: Shaped, value: Shaped) -> None:
    """`check_arrays` for attention: key and value have the same shape, and their heads divide the query's.

    Raises:
      ValueError, NotImplementedError: as `check_arrays`.
    """
    check_arrays({"query": query, "key": key, "value": value})
    if value.shape != key.shape:
        raise ValueError(f"value must have key's shape {key.shape}, got {value.shape}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the heads of query must be a multiple of those of key, got {query.shape[2]} and {key.shape[2]}"
        )


def check_multiple_of_128(**sizes: int) -> None:
    """Raises ValueError unless each size is a positive multiple of 128."""
    for name, size in sizes.items():
        if size < 128 or size % 128:
            raise ValueError(f"{name} must be a positive multiple of 128, got {size}")


def check_compressed(name: str, count: int) -> None:
    """Raises ValueError if there are more compressed tokens than the kernels keep in VMEM."""
    if count > MAX_COMPRESSED:
        raise ValueError(f"{name} must hold at most {MAX_COMPRESSED} compressed tokens, got {count}")


def positive_scale(query: Float[Array, "..."], scale: float | None) -> tuple[Float[Array, "..."], float]:
    """Returns (query, scale) with a positive scale that gives the same scores; the default is 1 / sqrt(head_dim).

    The kernels take a row's maximum before they scale it, so that the scale and log2(e) are one multiplication.

    Raises:
      ValueError: the scale is infinite or NaN.
    """
    if scale is None:
        return query, 1.0 / math.sqrt(query.shape[-1])
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if scale > 0:
        return query, float(scale)
    return query * jnp.asarray(-1 if scale < 0 else 0, query.dtype), abs(float(scale)) or 1.0


def _check_ids(name: str, ids: Int[Array, "B T"] | None, batch: int, length: int) -> None:
    if ids is not None and (ids.shape != (batch, length) or not jnp.issubdtype(ids.dtype, jnp.integer)):
        raise ValueError(
            f"{name}_segment_ids must be ints of shape {(batch, length)}, got {ids.dtype} of {ids.shape}"
        )


def _existing(
    name: str, lengths: Int[Array, " B"] | None, batch: int, length: int
) -> Bool[Array, "B T"] | None:
    """Returns which tokens exist; None for all."""
    if lengths is None:
        return None
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{name}_lengths must be ints of shape {(batch,)}, got {lengths.dtype} of {lengths.shape}"
        )
    return existing(lengths, length)


class MarkedTokens(NamedTuple):
    """A call's arrays, in which absent tokens are zero and have separate segment ids.

    Attributes:
      query, key, value: with zeros at absent tokens.
      segments: ids of queries and keys; None if all tokens exist and see each other.
      shift: as given. All arrays vary over the same mesh axes.
      query_exists: which queries exist; None for all.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]] | None
    shift: Int[Array, "1"] | None
    query_exists: Bool[Array, "B T"] | None


def mark_tokens(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    query_segment_ids: Int[Array, "B T"] | None,
    key_segment_ids: Int[Array, "B S"] | None,
    query_lengths: Int[Array, " B"] | None,
    key_lengths: Int[Array, " B"] | None,
    shift: Int[Array, "1"] | None = None,
) -> MarkedTokens:
    """Combines segment ids and lengths into one pair of segment ids.

    Raises:
      ValueError: only queries or only keys have segment ids, or a shape or dtype is wrong.
    """
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("query_segment_ids and key_segment_ids belong together: give both or neither")
    rows: list[Array] = []
    query_exists = None
    if any(x is not None for x in (query_segment_ids, query_lengths, key_lengths)):
        batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
        _check_ids("query", query_segment_ids, batch, length)
        _check_ids("key", key_segment_ids, batch, keys)
        query_exists = _existing("query", query_lengths, batch, length)
        key_exists = _existing("key", key_lengths, batch, keys)
        query, key, value = (
            zero_absent(query, query_exists),
            zero_absent(key, key_exists),
            zero_absent(value, key_exists),
        )
        query_mask, key_mask = query_exists, key_exists
        if query_segment_ids is None:
            query_mask = jnp.ones((1, length), bool) if query_mask is None else query_mask
            key_mask = jnp.ones((1, keys), bool) if key_mask is None else key_mask
        ids = mark_absent(query_segment_ids, key_segment_ids, query_mask, key_mask, batch)
        rows = [x[:, None, :] for x in ids]
    query, key, value, *rest = vary_alike(query, key, value, *rows, *([] if shift is None else [shift]))
    segments = (rest[0], rest[1]) if rows else None
    return MarkedTokens(query, key, value, segments, None if shift is None else rest[-1], query_exists)
