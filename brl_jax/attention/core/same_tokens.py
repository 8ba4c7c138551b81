"""Checks and prepares the arguments of bidirectional functions whose queries and keys are the same tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_dtypes, check_lengths, zero_padding
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import check_implementation


class SameTokens(NamedTuple):
    """The arrays of a call in float32, with zeros as padding.

    Attributes:
      lengths: the rows' lengths, or None.
      dtype: dtype of the given arrays and of the result.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    lengths: Int[Array, " B"] | None
    dtype: Any


def prepare_same_tokens(
    query: Array,
    key: Array,
    value: Array,
    key_value_seq_lengths: Any,
    implementation: Any,
) -> SameTokens:
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    check_implementation(implementation, None, "xla")
    require(
        query.shape[1] == key.shape[1],
        f"key must have query's length {query.shape[1]}, as both are the same tokens here, got {key.shape[1]}",
    )
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, *key.shape[:2])
    dtype = query.dtype
    query, key, value = (zero_padding(x, lengths).astype(jnp.float32) for x in (query, key, value))
    return SameTokens(query, key, value, lengths, dtype)
