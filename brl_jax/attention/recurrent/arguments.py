"""Checks and prepares the arguments that functions with a recurrent state share."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_segments,
    require,
    zero_padding,
)
from brl_jax.attention.core.dispatch import check_implementation
from brl_jax.attention.recurrent.chunk_scan import segment_numbers


class PreparedInputs(NamedTuple):
    """The checked arrays of a call.

    Attributes:
      query, key, value: with zeros as padding.
      lengths: the lengths of the keys, or None.
      segments: the keys' `segment_numbers`, or None without lengths and segment ids.
      packed: whether segment ids were given.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    lengths: Int[Array, "B"] | None
    segments: Int[Array, "B S"] | None
    packed: bool


def prepare_inputs(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool,
    key_value_seq_lengths: Any,
    state: Any,
    return_state: bool,
    implementation: Any,
    segment_ids: Any = None,
    same_tokens: bool | None = None,
    dispatched: bool = False,
) -> PreparedInputs:
    """Checks the shared arguments and zeroes padding, so that NaN in it reaches neither results nor gradients.

    Args:
      query, key, value, is_causal, ...: as given to the public function.
      same_tokens: whether queries and keys are the same tokens, so that lengths apply to both; by default, if causal.
      dispatched: whether `core.dispatch` checks the implementation.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    same_tokens = is_causal if same_tokens is None else same_tokens
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    require(
        not same_tokens or query.shape[1] == key.shape[1],
        f"key must have query's length {query.shape[1]}, as both are the same tokens here, got {key.shape[1]}",
    )
    for name, given in (("state", state is not None), ("return_state", return_state)):
        require(
            is_causal or not given, f"{name} needs is_causal=True: a state summarises the earlier tokens only"
        )
    if not dispatched:
        check_implementation(implementation, None, "xla")
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, key.shape[0])
    if segment_ids is not None:
        require(
            not isinstance(segment_ids, (tuple, list)) and query.shape[1] == key.shape[1],
            "segment_ids must be one array for queries and keys, which must be the same tokens, got "
            f"{type(segment_ids).__name__} with {query.shape[1]} queries and {key.shape[1]} keys",
        )
    key_segment_ids = check_segments(segment_ids, query.shape, key.shape)[1]
    return PreparedInputs(
        zero_padding(query, lengths) if same_tokens else query,
        zero_padding(key, lengths),
        zero_padding(value, lengths),
        lengths,
        segment_numbers(key.shape[0], key.shape[1], lengths, key_segment_ids),
        segment_ids is not None,
    )
