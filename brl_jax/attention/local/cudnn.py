"""Local attention on an NVIDIA GPU: plain causal windows on cuDNN.

Every call passes is_causal=True, because JAX lets cuDNN look ahead if it only gets the window (left, 0) (jax#39576).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.by_platform import Form, gradient_of_known
from brl_jax.attention.core.checks import zero_padding
from brl_jax.attention.core.cudnn import Found, attention, cudnn_unsupported
from brl_jax.attention.local.patterns import CallArrays, PatternCall, SlidingWindow


def unsupported(call: PatternCall, x: CallArrays) -> str | None:
    """Why the automatic choice must not take cuDNN for a call, or None.

    `check` accepts more. Lengths can leave rows without a visible key, where cuDNN's output is unspecified. A bias
    would be an array of all pairs of tokens.
    """
    head_dim = x.query.shape[3]
    if x.bias is not None or x.query_lengths is not None or x.key_lengths is not None:
        return "cuDNN takes neither a bias nor lengths"
    if head_dim % 8 or head_dim > 128:
        return f"cuDNN takes a head_dim that is a multiple of 8 up to 128, got {head_dim}"
    if call.num_queries % 2:
        return f"cuDNN takes an even number of tokens, got {call.num_queries}"
    missing = _missing(call, x)
    if missing:
        return f"cuDNN needs {missing[0]}"
    return cudnn_unsupported(functools.partial(attend, call), x)


def form(call: PatternCall, x: CallArrays) -> Form:
    """How a call that passes `check` runs. With a bias its gradient runs it again: JAX refuses to return the statistics
    of an odd number of tokens."""
    run = functools.partial(attend, call)
    return Form(run, gradient_of_known(run) if x.bias is None else None)


def check(call: PatternCall, x: CallArrays) -> None:
    """Raises NotImplementedError, naming everything that cuDNN needs and the call does not have."""
    missing = _missing(call, x)
    if missing:
        raise NotImplementedError(
            f"implementation='cudnn' supports local attention only with {'; with '.join(missing)}"
        )


def attend(
    call: PatternCall, x: CallArrays, *, known: Found | None = None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"] | None]:
    """`local_attention`, and cuDNN's statistics unless there is a bias. With `known`, what an earlier run returned,
    only the backward pass does work."""
    assert isinstance(call.pattern, SlidingWindow)
    x = x.without_padding()
    options: dict[str, Any] = {
        "scale": call.scale, "is_causal": True, "query_seq_lengths": x.query_lengths,
        "key_value_seq_lengths": x.key_lengths, "local_window_size": (call.pattern.left, 0),
    }  # fmt: skip
    statistics = None
    if x.bias is None:
        out, statistics = attention(x.query, x.key, x.value, known=known, **options)
    else:
        arrays = (x.query, x.key, x.value, x.bias)
        out = jax.nn.dot_product_attention(*arrays, implementation="cudnn", **options)
    if x.key_lengths is not None:  # cuDNN's output for a row that sees nothing is unspecified
        first = jnp.maximum(jnp.arange(call.num_queries) - call.pattern.left, 0)
        seen = first[None] < x.key_lengths[:, None]
        out = jnp.where(seen[:, :, None, None], out, jnp.zeros((), out.dtype))
    return zero_padding(out, x.query_lengths), statistics


def _missing(call: PatternCall, x: CallArrays) -> list[str]:
    """The requirements of cuDNN that a call does not meet."""
    pattern, dtype = call.pattern, x.query.dtype
    needs_array = x.bias is not None and not isinstance(x.bias, jax.Array)
    return [
        reason
        for reason, fails in {
            f"a sliding window (got {type(pattern).__name__})": not isinstance(pattern, SlidingWindow),
            "keys up to the query only (is_causal=True or a right side of 0)": not (
                call.is_causal or (isinstance(pattern, SlidingWindow) and pattern.right == 0)
            ),
            f"bfloat16 or float16 (got {dtype})": dtype == jnp.float32,
            "no segment_ids": x.query_segments is not None,
            f"query_offset=0 (got {call.query_offset})": call.query_offset != 0,
            f"equal numbers of queries and keys (got {call.num_queries} and {call.num_keys})": call.num_queries
            != call.num_keys,
            "a bias given as an array, or without a bias": needs_array,
            "no sinks": x.sinks is not None,
            "no logits_soft_cap": call.logits_soft_cap is not None,
            "no return_residual": call.return_residual,
        }.items()
        if fails
    ]
