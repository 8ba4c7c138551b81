"""One call of local attention: what is known when it is traced, and its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from brl_jax.attention.local.parts import Extent
from brl_jax.attention.local.patterns import Pattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternCall(Extent):
    """The static side of one call.

    Attributes:
      pattern: which keys a query sees.
      scale: multiplies the scores.
      logits_soft_cap: bounds the scaled scores; None for no bound.
      return_residual: whether the call returns (output, log-sum-exp) instead of the output alone.
    """

    pattern: Pattern
    scale: float
    logits_soft_cap: float | None = None
    return_residual: bool = False


class CallArrays(NamedTuple):
    """The arrays of one call; None for an absent one.

    Attributes:
      bias: a `PositionBias`, or an array (B or 1, N or 1, T or 1, S or 1).
      query_segments, key_segments: both or neither.
      key_offset: given if the `PatternCall` has no static one.
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
