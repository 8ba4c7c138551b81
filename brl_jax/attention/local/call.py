"""One call of local attention: what is known when it is traced, and its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from brl_jax.attention.local.patterns import Pattern

#: From the number of keys that a query sees besides its own to the number of queries in a block.
QueryBlock = Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class PatternCall:
    """The static side of one call.

    Attributes:
      pattern, is_causal: which keys a query sees; `is_causal` hides the keys after the query as well.
      scale: multiplies the scores.
      num_queries, num_keys: T and S.
      query_offset: query i stands at key index i + query_offset.
      key_offset: the absolute position of key 0; None if it is known only at run time.
      logits_soft_cap: bounds the scaled scores; None for no bound.
      return_residual: whether backends return (output, log-sum-exp), and not the output alone.
    """

    pattern: Pattern
    is_causal: bool
    scale: float
    num_queries: int
    num_keys: int
    query_offset: int
    key_offset: int | None
    logits_soft_cap: float | None = None
    return_residual: bool = False

    @property
    def first_position(self) -> int:
        """The absolute position of query 0 (key_offset must be static)."""
        assert self.key_offset is not None
        return self.query_offset + self.key_offset


class CallArrays(NamedTuple):
    """The arrays of one call; those that it lacks are None.

    Attributes:
      bias: a `PositionBias`, or an array (B or 1, N or 1, T or 1, S or 1).
      query_segments, key_segments: both or neither.
      key_offset: given if that of the `PatternCall` is None.
      sinks: in float32.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    bias: Any = None
    query_lengths: Int[Array, " B"] | None = None
    key_lengths: Int[Array, " B"] | None = None
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    key_offset: Int[Array, ""] | None = None
    sinks: Float[Array, " N"] | None = None
