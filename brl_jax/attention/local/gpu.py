"""Local attention on GPUs: one launch of the Triton kernel, for patterns that touch few blocks of keys."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float

import pallas_kernels as kernels
from brl_jax.attention.core.dispatch import bias_unsupported
from brl_jax.attention.local.far_patterns import Axial, Fixed, Strided
from brl_jax.attention.local.patterns import CallArrays, Dilated, PatternCall, SlidingWindow

# Each run of this many queries lists the keys it can see; no more than a kernel's block, so that lists stay tight.
_RUN = 32


def unsupported(call: PatternCall, x: CallArrays) -> str | None:
    """Why the kernel does not support a call, or None. Traces nothing."""
    if (reason := bias_unsupported(x.bias)) is not None:
        return reason
    name = type(call.pattern).__name__
    if isinstance(call.pattern, (Strided, Fixed, Axial)):
        return f"pattern must touch few blocks of keys, and the columns of {name} touch all of them"
    if call.key_offset is None and not isinstance(call.pattern, (SlidingWindow, Dilated)):
        return f"key_offset must be a static int with {name}, got a traced one"
    return kernels.triton.local_unsupported(x.query, x.key, x.value)


def attend(call: PatternCall, x: CallArrays) -> tuple[Any, Float[Array, "B N T"]]:
    """Returns the results of `local_attention`, with a float32 residual, and the log-sum-exp for `gradient`."""
    out, log_sums = _launch(call, x, return_log_sum_exp=True)
    return (out, log_sums) if call.return_residual else out, log_sums.swapaxes(1, 2)


def gradient(
    call: PatternCall,
    operands: tuple[CallArrays],
    results: Any,
    log_sums: Float[Array, "B N T"],
    d_results: Any,
) -> tuple[CallArrays]:
    """The gradient of `attend`."""
    out = results[0] if call.return_residual else results
    known = out, log_sums.swapaxes(1, 2)

    def again(x: CallArrays) -> Any:
        return _launch(call, x, return_log_sum_exp=call.return_residual, known=known)

    return jax.vjp(again, *operands)[1](d_results)


def _launch(call: PatternCall, x: CallArrays, **options: Any) -> Any:
    return kernels.triton.local_attention(
        x.query,
        x.key,
        x.value,
        pattern=_listed(call),
        scale=call.scale,
        logits_soft_cap=call.logits_soft_cap,
        sinks=x.sinks,
        query_segment_ids=x.query_segments,
        key_segment_ids=x.key_segments,
        query_lengths=x.query_lengths,
        key_lengths=x.key_lengths,
        **options,
    )


def _listed(call: PatternCall) -> kernels.triton.Pattern:
    """Describes the pattern to the kernel."""
    pattern = call.pattern
    # If key_offset is traced, the pattern depends only on distances, and any position of key 0 will do.
    key_position = call.key_offset or 0
    before, after = pattern.limits
    if before is not None and after is not None:
        rectangles = tuple(
            (
                first,
                first + _RUN,
                first + call.query_offset - before,
                first + call.query_offset + _RUN + after,
            )
            for first in range(0, call.num_queries, _RUN)
        )
    else:
        parts = pattern.parts(call, lambda width: _RUN)
        rectangles = tuple(rectangle for part in parts for rectangle in part.rectangles())
    return kernels.triton.Pattern(
        rectangles,
        pattern.visible,
        call.is_causal,
        call.num_queries,
        call.num_keys,
        query_position=call.query_offset + key_position,
        key_position=key_position,
    )
