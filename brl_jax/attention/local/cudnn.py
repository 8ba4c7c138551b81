"""Local attention on an NVIDIA GPU: plain causal windows by cuDNN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import require
from brl_jax.attention.local.call import CallArrays, PatternCall
from brl_jax.attention.local.patterns import SlidingWindow


def attend(call: PatternCall, x: CallArrays) -> Float[Array, "B T N H"]:
    """`local_attention` by `jax.nn.dot_product_attention`.

    Raises:
      ValueError: where cuDNN does not serve the call, naming all that stands in the way.
    """
    pattern, dtype = call.pattern, x.query.dtype
    needs_array = x.bias is not None and not isinstance(x.bias, jax.Array)
    missing = [
        reason
        for reason, fails in {
            f"a sliding window (got {type(pattern).__name__})": not isinstance(pattern, SlidingWindow),
            "keys up to the query only (is_causal=True or a right side of 0)": not (
                call.is_causal or (isinstance(pattern, SlidingWindow) and pattern.right == 0)
            ),
            f"bfloat16 or float16 (got {dtype})": dtype == jnp.float32,
            "no segment_ids": x.query_segments is not None,
            f"query_offset=0 (got {call.query_offset})": call.query_offset != 0,
            f"as many queries as keys (got {call.num_queries} and {call.num_keys})": call.num_queries
            != call.num_keys,
            "a bias given as an array, or none": needs_array,
            "no sinks": x.sinks is not None,
            "no logits_soft_cap": call.logits_soft_cap is not None,
        }.items()
        if fails
    ]
    require(not missing, "implementation='cudnn' serves local attention only with " + "; with ".join(missing))
    assert isinstance(pattern, SlidingWindow)
    return jax.nn.dot_product_attention(
        x.query, x.key, x.value, x.bias, scale=call.scale, is_causal=True, query_seq_lengths=x.query_lengths,
        key_value_seq_lengths=x.key_lengths, local_window_size=(pattern.left, 0), implementation="cudnn",
    )  # fmt: skip
