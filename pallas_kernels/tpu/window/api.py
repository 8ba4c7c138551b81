"""Sliding-window attention on TPU: the call that takes heads as they come and can be differentiated."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import heads, inputs
from pallas_kernels.tpu.core import sizes as block_sizes
from pallas_kernels.tpu.core.heads import Layout
from pallas_kernels.tpu.core.sizes import WindowBlocks
from pallas_kernels.tpu.window import backward as window_backward
from pallas_kernels.tpu.window import forward as window_forward
from pallas_kernels.tpu.window.plan import WindowPlan


@dataclasses.dataclass(frozen=True)
class _Call:
    """All that is static about one call."""

    forward: WindowPlan
    backward: WindowPlan
    layout: Layout
    scale: float
    forward_limit: int | None
    backward_limit: int | None
    with_log_sum: bool
    interpret: bool | pltpu.InterpretParams

    def run_forward(self, query, key, value, segments):
        return window_forward.forward(
            query,
            key,
            value,
            segments,
            plan=self.forward,
            layout=self.layout,
            scale=self.scale,
            vmem_limit=self.forward_limit,
            interpret=self.interpret,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed(query, key, value, segments, call: _Call):
    return _packed_fwd(query, key, value, segments, call)[0]


def _packed_fwd(query, key, value, segments, call: _Call):
    out, statistics = call.run_forward(query, key, value, segments)
    result = (out, heads.log_sum_exp(statistics, call.scale)) if call.with_log_sum else out
    return result, (query, key, value, segments, statistics)


def _packed_bwd(call: _Call, kept, grads):
    query, key, value, segments, statistics = kept
    grad, shift = grads if call.with_log_sum else (grads, None)
    grads = window_backward.backward(
        query,
        key,
        value,
        segments,
        statistics,
        shift,
        grad,
        plan=call.backward,
        layout=call.layout,
        scale=call.scale,
        vmem_limit=call.backward_limit,
        interpret=call.interpret,
    )
    return *grads, None


_packed.defvjp(_packed_fwd, _packed_bwd)


def _table(query, layout: Layout, left: int, right: int, chip: str | None) -> WindowBlocks | None:
    length, itemsize = query.shape[1], query.dtype.itemsize
    return block_sizes.window_blocks(left, right, length, layout, itemsize, chip)


def window_fits(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    left: int,
    right: int,
    chip: str | None = None,
) -> bool:
    """Whether `window_attention` has block sizes for a window; wider ones are for `block_attention`.

    Raises:
      ValueError, NotImplementedError: on arrays that neither takes.
    """
    inputs.check_attention(query, key, key)
    layout = heads.layout_of(query.shape[2], key.shape[2], query.shape[3])
    last, chip = query.shape[1] - 1, block_sizes.resolve_chip(chip, query)
    return _table(query, layout, min(left, last), min(right, last), chip) is not None


def window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    left: int,
    right: int,
    scale: float | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B T"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    return_log_sum_exp: bool = False,
    chip: str | None = None,
    blocks: WindowBlocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention in which query i sees keys i - left to i + right, at linear cost and memory.

    One softmax pass over each query's window, each block of keys read once and its halo of at most a
    window's side once more. Differentiable in query, key and value (000 eq. 1 over a sliding window; the
    weights are recomputed in the backward pass from the log-sum-exp, as in Dao et al. 2022, arXiv
    2205.14135).

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, T, K, H), the same dtype, N a multiple of K; query head g reads key head g // (N / K).
      left, right: how many keys a query sees before and after its own. Causal attention over w keys is (w -
        1, 0).
      scale: multiplies the scores; 1 / sqrt(H) by default.
      query_segment_ids, key_segment_ids: (B, T) ints, both or neither; a query sees the keys of its own
        segment.
      query_lengths, key_lengths: (B,) ints, how many tokens exist; what lies beyond is never read into a
        result.
      return_log_sum_exp: also return the natural log of each row's sum of exponentials.
      chip: "v4", "v5e", "v5p", "v6e" or "7x" picks its block sizes; None takes that of the mesh which query lies
        on, or which is in use, else of the chip that this process runs on; where nothing says it, sizes that fit
        every chip.
      blocks: sizes to use instead of the table's.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, T, N, H) in query's dtype, zero where a query sees nothing; with `return_log_sum_exp` also (B, T,
      N) float32, -inf where a query sees nothing.

    Raises:
      ValueError: on shapes that don't fit, one kind of segment ids without the other, a negative window
        side, a window too wide for the kernel, blocks that do not hold the window or do not fit in the
        chip's memory.
      NotImplementedError: on another dtype or a wider head.
    """
    inputs.check_attention(query, key, value)
    chip = block_sizes.resolve_chip(chip, query)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"key must be as long as query ({query.shape[1]} tokens), got {key.shape[1]}")
    for name, side in (("left", left), ("right", right)):
        if not isinstance(side, (int, np.integer)) or isinstance(side, bool) or side < 0:
            raise ValueError(f"{name} must be an int of at least 0, got {side!r}")
    length, count, head_dim = query.shape[1:]
    # A window never reaches further than the sequence; what it would see beyond costs tiles.
    left, right = min(int(left), length - 1), min(int(right), length - 1)
    tokens = inputs.mark_tokens(
        query, key, value, query_segment_ids, key_segment_ids, query_lengths, key_lengths
    )
    query, scale = inputs.positive_scale(tokens.query, scale)
    packed_query, packed_key, packed_value, layout = heads.pack(query, tokens.key, tokens.value)

    if blocks is None:
        blocks = _table(query, layout, left, right, chip)
    if blocks is None:
        raise ValueError(
            f"a window of {left} keys before and {right} after is too wide for the window kernel "
            f"(head width {layout.width}, {query.dtype.itemsize} bytes a number): use the block-sparse kernel"
        )
    plans = (
        WindowPlan(left, right, length, blocks.tile, blocks.block),
        WindowPlan(left, right, length, blocks.backward_tile, blocks.backward_block),
    )
    forward_limit, backward_limit = (
        block_sizes.vmem_limit(
            f"window_attention's {name} pass",
            block_sizes.window_bytes(plan, layout, query.dtype.itemsize, backward=name == "backward"),
            chip,
            f"choose a block below {plan.block}",
        )
        for name, plan in zip(("forward", "backward"), plans)
    )
    call = _Call(*plans, layout, scale, forward_limit, backward_limit, return_log_sum_exp, interpret)
    result = _packed(packed_query, packed_key, packed_value, tokens.segments, call)
    out = heads.unpack(result[0] if return_log_sum_exp else result, layout, count, head_dim)
    out = inputs.only(out, tokens.query_there)
    if not return_log_sum_exp:
        return out
    return out, heads.unpack_rows(result[1], count)
