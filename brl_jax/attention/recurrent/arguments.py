"""The arguments that the functions with a recurrent state share, checked and prepared in one place."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import (
    check_dtypes,
    check_lengths,
    check_segments,
    zero_padding,
)
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import check_implementation
from brl_jax.attention.recurrent.chunk_scan import segment_numbers

State = TypeVar("State", bound=tuple)


class PreparedInputs(NamedTuple):
    """The checked arrays of a call.

    Attributes:
      query, key, value: with zeros in place of padding.
      lengths: the lengths of the keys, or None.
      segments: from `segment_numbers` for the keys; None without lengths and segment ids.
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
    chunk_size: Any,
    implementation: Any,
    segment_ids: Any = None,
    same_tokens: bool | None = None,
    dispatched: bool = False,
) -> PreparedInputs:
    """Checks the shared arguments and sets padding to 0, so that NaN in it reaches neither results nor gradients.

    Args:
      query, key, value, is_causal, ...: as given to the public function.
      same_tokens: whether queries and keys are the same tokens, so that the lengths apply to both; they always are
        where is_causal, which is the default.
      dispatched: whether the implementation is checked where a backend is chosen (`core.dispatch`).

    Raises:
      ValueError: naming the argument that does not fit.
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


def check_state(state: Any, expected: State) -> State:
    """The state, or `expected` in place of None.

    Args:
      state: a NamedTuple of arrays, given by the caller.
      expected: a state of the right type, shapes and dtypes.

    Raises:
      ValueError: the state differs from `expected` in shapes or dtypes.
    """
    if state is None:
        return expected
    for name, leaf in expected._asdict().items():  # type: ignore[attr-defined]
        given = getattr(state, name)
        require(
            (leaf is None) == (given is None)
            and (leaf is None or (given.shape == leaf.shape and given.dtype == leaf.dtype)),
            f"state.{name} must be {_describe(leaf)}, got {_describe(given)}",
        )
    return state


def _describe(leaf: Any) -> str:
    return "None" if leaf is None else f"{leaf.dtype} of shape {leaf.shape}"
