"""Checks of arguments, whose errors name the argument, its value and what was expected, and one normal form for each
argument that attention functions share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from brl_jax.attention.core.biases import PositionBias
from pallas_kernels.absent import existing


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the (static) condition holds."""
    if not condition:
        raise ValueError(message)


def check_qkv(query, key, value, names: Sequence[str] = ("query", "key", "value")) -> None:
    """Checks (B, T, N, H), (B, S, K, H), (B, S, K, H) with N a multiple of K and nothing empty."""
    # Not with `require`, which would format its message in every call.
    for array, name in zip((query, key, value), names):
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ValueError(f"{name} must be an array, got {type(array).__name__}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, length, heads, head_dim), got {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    q, k, v = names
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{v} must have {k}'s batch, length and heads {key.shape[:3]}, got {value.shape[:3]}"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"{k} must have {q}'s batch size {query.shape[0]}, got {key.shape[0]}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"{k} must have {q}'s head_dim {query.shape[3]}, got {key.shape[3]}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the heads of {q} must be a multiple of the heads of {k}, got {query.shape[2]} and {key.shape[2]}"
        )


def check_bias_shape(bias: Any, shape: tuple[int, ...], axes: str) -> None:
    """Raises ValueError unless a bias has 4 axes, each of full size or 1; `axes` names them in the message."""
    require(hasattr(bias, "ndim"), f"bias must be a PositionBias or an array, got {type(bias).__name__}")
    require(bias.ndim == 4, f"bias must have 4 axes {axes}, got shape {bias.shape}")
    fits = all(size in (1, full) for size, full in zip(bias.shape, shape))
    require(fits, f"bias must broadcast to {axes} = {shape}, got shape {bias.shape}")


def check_floating(**arrays) -> None:
    """Raises ValueError unless all arrays are floating point and have the first one's dtype."""
    first, dtype = next((name, array.dtype) for name, array in arrays.items())
    for name, array in arrays.items():
        require(array.dtype == dtype, f"{name} must have {first}'s dtype {dtype}, got {array.dtype}")
        require(
            jnp.issubdtype(array.dtype, jnp.floating), f"{name} must be floating point, got {array.dtype}"
        )


def check_within(name: str, values: Any, most: int) -> None:
    """Raises ValueError unless integers whose values are known lie between 0 and `most`."""
    known = concrete_values(values)
    if known is not None and not ((known >= 0) & (known <= most)).all():
        raise ValueError(f"{name} must be from 0 to {most}, got {known}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError, suggesting the nearest choice, unless value is one of them."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}")


def concrete_values(array: Any) -> np.ndarray | None:
    """The values of an array; None if it is traced, or partly on devices of another process."""
    if array is None or isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    return np.asarray(array)


def check_dtype(name: str, array: Array) -> None:
    require(
        array.dtype in (jnp.float32, jnp.bfloat16, jnp.float16),
        f"{name} must be float32, bfloat16 or float16, got {array.dtype}",
    )


def check_dtypes(query: Array, key: Array, value: Array) -> None:
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        check_dtype("query", query)
    for array, name in ((key, "key"), (value, "value")):
        if array.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}, got {array.dtype}")


def is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def starts(*places: Any) -> tuple[Any, ...]:
    """Makes a slice's start indices all int32: with `jax_enable_x64` an int would be int64, and types must match."""
    return tuple(np.int32(p) if is_int(p) else p for p in places)


def check_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    is_number = isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool)
    require(is_number, f"scale must be a Python number (multiply the query by a traced one), got {scale!r}")
    require(math.isfinite(scale), f"scale must be finite, got {scale!r}")
    return float(scale)


def check_offset(name: str, offset: Any) -> None:
    """Raises ValueError for an array that is not an int scalar; annotations check the rest."""
    if not (is_int(offset) or (offset.shape == () and jnp.issubdtype(offset.dtype, jnp.integer))):
        raise ValueError(f"{name} must be an integer scalar, got {offset.dtype} of shape {offset.shape}")


def check_sinks(sinks: Any, heads: int) -> Array | None:
    """The sinks in float32, one for each of the query's heads."""
    if sinks is None:
        return None
    require(
        sinks.shape == (heads,) and jnp.issubdtype(sinks.dtype, jnp.floating),
        f"sinks must be a floating-point array of shape ({heads},), one logit per query head, got {sinks.dtype} of "
        f"shape {sinks.shape}",
    )
    return jnp.asarray(sinks).astype(jnp.float32)


def check_bias(bias: Any, query: Array, key: Array) -> Any:
    """The bias; an array gets the shape (B or 1, N or 1, T or 1, S or 1)."""
    if bias is None:
        return bias
    if isinstance(bias, PositionBias):
        require(
            not any(leaf is bias for leaf in jax.tree.leaves(bias)),
            f"bias must be a pytree if it is called with positions (ALiBi and T5Bias are; a dataclass becomes one by "
            f"jax.tree_util.register_dataclass), got {type(bias).__name__}",
        )
        return bias
    require(
        hasattr(bias, "shape") and hasattr(bias, "dtype"),
        f"bias must be a PositionBias or an array, got {type(bias).__name__}",
    )
    bias = _of_pairs("bias", bias, query, key)
    require(jnp.issubdtype(bias.dtype, jnp.floating), f"bias must be floating point, got {bias.dtype}")
    return bias


def check_mask(mask: Any, query: Array, key: Array) -> Bool[Array, "#B #N #T #S"] | None:
    """The mask, with four axes; raises ValueError unless it broadcasts to (B, N, T, S)."""
    if mask is None:
        return None
    require(mask.dtype == jnp.bool_, f"mask must be a bool array, got {mask.dtype}")
    return _of_pairs("mask", mask, query, key)


def _of_pairs(name: str, array: Any, query: Array, key: Array) -> Any:
    """An array of pairs of tokens, with four axes."""
    full, shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1]), tuple(array.shape)
    require(
        len(shape) <= 4 and all(s in (1, f) for s, f in zip(shape[::-1], full[::-1])),
        f"{name} must broadcast to (batch, heads, queries, keys) = {full}, got shape {shape}",
    )
    return jnp.asarray(array).reshape((1,) * (4 - len(shape)) + shape)


def check_lengths(name: str, lengths: Any, batch: int, longest: int | None = None) -> Array | None:
    """Lengths (B,) as int32, clipped to `longest`."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    require(
        lengths.shape == (batch,) and jnp.issubdtype(lengths.dtype, jnp.integer),
        f"{name} must be ints of shape ({batch},), got {lengths.dtype} of shape {lengths.shape}",
    )
    lengths = lengths.astype(jnp.int32)
    return lengths if longest is None else jnp.minimum(lengths, longest)


def check_segments(segment_ids: Any, query_shape: tuple, key_shape: tuple) -> tuple:
    if segment_ids is None:
        return None, None
    if not isinstance(segment_ids, (tuple, list)):
        require(
            query_shape[1] == key_shape[1],
            f"segment_ids must be a pair (queries', keys') where their lengths differ: "
            f"{query_shape[1]} queries, {key_shape[1]} keys",
        )
        segment_ids = (segment_ids, segment_ids)
    if len(segment_ids) != 2:
        raise ValueError(f"segment_ids must be an array or a pair of them, got {len(segment_ids)}")
    ids = []
    for x, shape, whose in zip(segment_ids, (query_shape, key_shape), ("queries", "keys")):
        x = jnp.asarray(x)
        if x.shape != shape[:2] or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"segment_ids of the {whose} must be ints of shape {shape[:2]}, got {x.dtype} of shape {x.shape}"
            )
        ids.append(x.astype(jnp.int32))
    return tuple(ids)


def check_positions(positions: Any, query: Array, key: Array) -> Int[Array, "B T"]:
    """The positions of each row; raises ValueError unless they are (1, T) or (B, T), and queries and keys are the same
    tokens."""
    batch, length = query.shape[:2]
    shape = getattr(positions, "shape", type(positions).__name__)
    dtype = getattr(positions, "dtype", jnp.int32)
    require(jnp.issubdtype(dtype, jnp.integer), f"positions must be integers, got {dtype}")
    require(
        key.shape[1] == length and shape in ((1, length), (batch, length)),
        f"positions must have shape (1, {length}) or ({batch}, {length}), for queries and keys that are the same "
        f"tokens, got {shape} with {key.shape[1]} keys",
    )
    return jnp.broadcast_to(positions, (batch, length))


def given_or_drawn(
    name: str,
    given: Array | None,
    shape: tuple[int, ...],
    rng: PRNGKeyArray | None,
    draw: Callable[[PRNGKeyArray], Array],
    **count: int | None,
) -> Array:
    """Returns the random numbers of the argument `name` in float32; draws them with draw(rng) if None.

    Args:
      given: (F, *shape), for any F.
      count: F by its argument's name, which must agree with the given numbers.

    Raises:
      ValueError: the numbers and rng are both given or both missing, or do not fit.
    """
    require(
        (rng is None) != (given is None),
        f"rng (a random key to draw from) or {name} must be given, and not both, got "
        + ("neither" if rng is None else "both"),
    )
    if given is None:
        assert rng is not None
        return draw(rng)
    ((size, number),) = count.items()
    expected = ", ".join((size, *map(str, shape))) + ("" if shape else ",")
    require(
        given.ndim == 1 + len(shape) and given.shape[1:] == shape and given.shape[0] >= 1,
        f"{name} must have shape ({expected}), not empty, got {given.shape}",
    )
    require(
        number in (None, given.shape[0]),
        f"{size} must be None or the length of {name}, {given.shape[0]}, got {number!r}",
    )
    return given.astype(jnp.float32)


def zero_hidden(mask: Bool[Array, "#B #N #T S"], *arrays: Float[Array, "B S N H"] | None) -> list[Any]:
    """Sets keys and values that no query sees to zero: a NaN there must reach neither a sum nor a gradient."""
    seen = jnp.any(mask, axis=(1, 2))[:, :, None, None]
    return [None if x is None else jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in arrays]


def pad_features(x: Float[Array, "*rows H"], width: int) -> Float[Array, "*rows W"]:
    """x with zeros after its features, up to `width` of them."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def zero_padding(x: Array, lengths: Array | None) -> Array:
    """Sets x (B, T, ...) to zero from each length on, because a NaN in the padding times a weight of 0 is still NaN."""
    if lengths is None:
        return x
    inside = existing(lengths, x.shape[1])
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
