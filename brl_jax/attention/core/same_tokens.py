"""Checks and prepares the arguments of functions whose queries and keys are the same tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_scale,
    check_within,
    require,
    zero_padding,
)
from brl_jax.attention.core.dispatch import check_implementation
from brl_jax.attention.core.state import check_state_options


class SameTokens(NamedTuple):
    """The arrays of a call in float32, with zeros as padding.

    Attributes:
      lengths: the rows' lengths, or None.
      scale: of the scores.
      dtype: dtype of the given arrays and of the result.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    lengths: Int[Array, " B"] | None
    scale: float
    dtype: Any


def prepare_same_tokens(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: Any,
    key_value_seq_lengths: Any,
    implementation: Any,
    tied: bool = False,
    maker: str = "",
    is_causal: bool = False,
    state: Any = None,
    return_state: bool = False,
    count: Any = None,
) -> SameTokens:
    """Checks the shared arguments and zeroes padding.

    Args:
      tied: whether the queries are also the keys, which may then have more heads than the values.
      maker: name of the function that makes the states, for messages.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_state_options(
        maker, state=state, return_state=return_state, count=count, is_causal=is_causal,
        key_value_seq_lengths=key_value_seq_lengths,
    )  # fmt: skip
    if tied:
        check_qkv(query, query, query)
        check_qkv(value, value, value, ("value",) * 3)
        like_values = jax.ShapeDtypeStruct((*value.shape[:3], query.shape[3]), query.dtype)
        check_qkv(query, like_values, value, ("query", "value", "value"))
    else:
        check_qkv(query, key, value)
    check_dtypes(query, key, value)
    length = query.shape[1]
    require(
        length == value.shape[1],
        f"{'value' if tied else 'key'} must have query's length {length}, as both are the same tokens here, "
        f"got {value.shape[1]}",
    )
    check_within("count", count, length)
    check_implementation(implementation, None, "xla")
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0], length)
    dtype, scale = query.dtype, check_scale(scale, query.shape[3])
    query, key, value = (zero_padding(x, lengths).astype(jnp.float32) for x in (query, key, value))
    return SameTokens(query, key, value, lengths, scale, dtype)
