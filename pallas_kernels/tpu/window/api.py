"""Sliding-window attention on TPU: the differentiable call, and why a call may be unsupported."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.absent import zero_absent
from pallas_kernels.tpu.core.arithmetic import log_sum_exp
from pallas_kernels.tpu.core.distances import DistanceTable, Slopes, described
from pallas_kernels.tpu.core.heads import pack, pack_log_sums, pack_queries, unpack, unpack_rows
from pallas_kernels.tpu.core.inputs import mark_tokens, positive_scale, refusal
from pallas_kernels.tpu.window.backward import window_backward
from pallas_kernels.tpu.window.bias import lay_out
from pallas_kernels.tpu.window.forward import window_forward
from pallas_kernels.tpu.window.plan import WindowCall
from pallas_kernels.tpu.window.sizes import WindowBlocks, plan_window
from pallas_kernels.varying import vary_alike


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _packed(query, key, value, bias, segments, known, call: WindowCall):
    return _packed_fwd(query, key, value, bias, segments, known, call)[0]


def _packed_fwd(query, key, value, bias, segments, known, call: WindowCall):
    if known is None:
        operand = None if bias is None else lay_out(bias, call, call.forward)
        out, statistics = window_forward(query, key, value, segments, operand, call)
    else:
        out, statistics = known
    result = (out, log_sum_exp(statistics, call.scale)) if call.with_log_sum else out
    return result, (query, key, value, bias, segments, statistics)


def _packed_bwd(call: WindowCall, residuals, grads):
    query, key, value, bias, segments, statistics = residuals
    grad, grad_log_sum = grads if call.with_log_sum else (grads, None)
    operand, pull = None, None
    if bias is not None:
        operand, pull = jax.vjp(lambda numbers: lay_out(numbers, call, call.backward), bias)
    *of_arrays, grad_operand = window_backward(
        query, key, value, segments, operand, statistics, grad_log_sum, grad, call
    )
    return *of_arrays, None if pull is None else pull(grad_operand)[0], None, None


_packed.defvjp(_packed_fwd, _packed_bwd)


#: Why `window_attention` does not support a call, with the same options; `bias` is a description. None if it does.
#: `block_attention` supports windows that are too wide.
window_unsupported = refusal(plan_window)


def window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    left: int,
    right: int,
    bias: Slopes | DistanceTable | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B T"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    return_log_sum_exp: bool = False,
    known: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]] | None = None,
    chip: str | None = None,
    blocks: WindowBlocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention in which query i sees keys i - left to i + right, at linear cost and memory.

    One softmax pass runs over each query's window. Each block of keys is read once, and once more as the halo of its
    neighbours, as far as the window reaches. Differentiable in query, key, value and bias. This is BRL-Attention (Liu
    et al., OpenReview Vpyg3fqXbl) eq. 1 over a sliding window; the backward pass recomputes the weights from the
    log-sum-exp, as FlashAttention does (Dao et al., arXiv:2205.14135).

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, T, K, H), the same dtype, N a multiple of K; query head g reads key head g // (N / K).
      left, right: how many keys a query sees before and after its own. Causal attention over w keys is (w - 1, 0).
      bias: added to the scaled and capped scores: a slope for each query head times the distance of query and key, or a
        table of numbers by distance, in which -inf hides keys. Differentiable. It costs an addition for each score, and
        no memory for pairs.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      logits_soft_cap: c > 0, replaces the scaled scores s by c tanh(s / c).
      query_segment_ids, key_segment_ids: (B, T) ints of any value, both or neither; a query sees the keys of its own
        segment.
      query_lengths, key_lengths: (B,) ints, how many tokens exist; absent tokens never influence a result.
      return_log_sum_exp: also return the natural log of each row's sum of exponentials.
      known: the result of an earlier call, with its log-sum-exp. The forward kernel is then skipped, and the gradient
        is the earlier call's.
      chip: "v4", "v5e", "v5p", "v6e" or "7x", for its block sizes. None takes the chip of query's mesh, of the mesh in
        use, or of this process; if none of these determines it, sizes that fit every chip.
      blocks: block sizes; override the chip's.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, T, N, H) in query's dtype, zero where a query sees nothing; with `return_log_sum_exp` also (B, T, N) float32,
      -inf where a query sees nothing.

    Raises:
      ValueError: shapes do not match (including the bias's), only queries or only keys have segment ids, a window side
        is negative, the window is too wide for the kernel, or blocks do not hold the window or exceed the chip's
        memory.
      NotImplementedError: the dtype or the head dimension is not supported.
    """
    kind = described(bias, query.shape[2])
    call = plan_window(query, key, value, left=left, right=right, chip=chip, blocks=blocks, bias=kind)
    heads, head_dim = query.shape[2:]
    tokens = mark_tokens(query, key, value, query_segment_ids, key_segment_ids, query_lengths, key_lengths)
    query, scale = positive_scale(tokens.query, scale)
    call = dataclasses.replace(
        call,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        with_log_sum=return_log_sum_exp,
        interpret=interpret,
    )
    packed_query, packed_key, packed_value, layout = pack(query, tokens.key, tokens.value)
    numbers = None
    if bias is not None:
        # The gradient of what devices share is summed over them outside the derivative above.
        packed_query, packed_key, packed_value, numbers = vary_alike(
            packed_query, packed_key, packed_value, bias.slopes if isinstance(bias, Slopes) else bias.numbers
        )
    if known is not None:
        known_out, log_sums = known
        known = pack_queries(known_out, layout), pack_log_sums(log_sums, scale, layout)
    result = _packed(packed_query, packed_key, packed_value, numbers, tokens.segments, known, call)
    out = unpack(result[0] if return_log_sum_exp else result, layout, heads, head_dim)
    out = zero_absent(out, tokens.query_exists)
    if not return_log_sum_exp:
        return out
    return out, unpack_rows(result[1], heads)
