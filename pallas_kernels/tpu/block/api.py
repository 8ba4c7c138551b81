"""Block-sparse attention on TPU: the differentiable call, and why a call may be unsupported."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.absent import zero_absent
from pallas_kernels.tpu.block.backward import block_backward
from pallas_kernels.tpu.block.distances import lay_out
from pallas_kernels.tpu.block.forward import block_forward
from pallas_kernels.tpu.block.launch import Hidden
from pallas_kernels.tpu.block.plan import (
    BlockCall,
    ChosenKeys,
    Granules,
    PositionMask,
    plan_block,
)
from pallas_kernels.tpu.core.arithmetic import log_sum_exp
from pallas_kernels.tpu.core.distances import DistanceTable, Slopes, described
from pallas_kernels.tpu.core.heads import pack, pack_log_sums, pack_queries, pack_rows, unpack, unpack_rows
from pallas_kernels.tpu.core.inputs import mark_tokens, positive_scale, refusal
from pallas_kernels.varying import vary_alike


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _packed(query, key, value, bias, hidden, shift, known, call: BlockCall, with_log_sum: bool):
    return _packed_fwd(query, key, value, bias, hidden, shift, known, call, with_log_sum)[0]


def _packed_fwd(query, key, value, bias, hidden, shift, known, call: BlockCall, with_log_sum: bool):
    if known is None:
        out, statistics = block_forward(query, key, value, bias, hidden, shift, call)
    else:
        out, statistics = known
    result = (out, log_sum_exp(statistics, call.scale)) if with_log_sum else out
    return result, (query, key, value, bias, hidden, shift, out, statistics)


def _packed_bwd(call: BlockCall, with_log_sum: bool, residuals, grads):
    query, key, value, bias, hidden, shift, out, statistics = residuals
    grad, grad_log_sum = grads if with_log_sum else (grads, None)
    # Use a product with ones: XLA would copy the array to another layout for a reduction over (heads, head_dim).
    number = jnp.arange(out.shape[2], dtype=jnp.int32) // call.layout.head_dim
    ones = jax.nn.one_hot(number, out.shape[2] // call.layout.head_dim, dtype=jnp.float32)
    mean = jnp.einsum(
        "btl,ln->bnt",
        out.astype(jnp.float32) * grad.astype(jnp.float32),
        ones,
        precision=jax.lax.Precision.HIGHEST,
    )
    mean = mean.reshape(*statistics.shape[:2], call.layout.packed, -1)
    grads = block_backward(query, key, value, bias, hidden, shift, grad, statistics, mean, grad_log_sum, call)
    return *grads, None, None, None


_packed.defvjp(_packed_fwd, _packed_bwd)


#: Why `block_attention` does not support a call, with the same options. `chosen_runs` is M of its chosen_starts, and
#: `bias` a description. None if it does.
block_unsupported = refusal(plan_block)


def block_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    key_blocks: Sequence[Sequence[int]],
    block_q: int,
    block_k: int,
    mask: PositionMask | None = None,
    granules: Granules | None = None,
    query_position: int = 0,
    key_position: int = 0,
    shift: Int[Array, ""] | None = None,
    causal: bool = False,
    bias: Slopes | DistanceTable | None = None,
    chosen_starts: Int[Array, "B T K M"] | None = None,
    chosen_size: int = 1,
    chosen_aligned: bool = False,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    return_log_sum_exp: bool = False,
    known: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]] | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over any pattern given as a list of key blocks for each block of queries.

    The cost is proportional to the listed pairs. Masks inside blocks are computed from positions and take no memory.
    Differentiable in query, key, value and bias. This is BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl) eq. 1, with
    FlashAttention's online softmax and recomputation in the backward pass (Dao et al., arXiv:2205.14135).

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, S, K, H), the same dtype, N a multiple of K; query head g reads key head g // (N / K).
      key_blocks: for each block of `block_q` queries, the blocks of `block_k` keys that it reads, each once. Lists too
        long for scalar memory are divided into several launches.
      block_q, block_k: rows in a block, multiples of 128.
      mask: maps int32 positions of queries (1, rows) and of keys (rows, 1) to a bool array, True where the key is seen.
        It is traced into the kernel; for divisions it must use `pallas_kernels.positions`.
      granules: visibility from a table, in addition to the mask: see `Granules`.
      query_position, key_position: positions of the first query and the first key, for the mask and the granules.
      shift: an int32 scalar that is added to both positions if they are known only at run time; not with granules.
      causal: hides keys at positions after the query's, in addition to the mask. The shift is then added to the
        queries' positions only. A listed pair of blocks in which all keys are hidden costs a grid step but no products;
        a pair without hidden keys computes no mask.
      bias: added to the scaled and capped scores: a slope for each query head times the distance of positions, or a
        table of numbers by distance. Differentiable. It costs about as much as a mask, and no memory for pairs.
      chosen_starts: (B, T, K, M) ints, the positions of the first keys of M runs for each query and key head, or any
        position past the last key. Queries see only the keys of their runs. Lists are not shortened, but with
        chosen_aligned a pair of blocks costs no products if no query chooses a key of it.
      chosen_size: keys in a run.
      chosen_aligned: whether all runs begin at multiples of chosen_size. If block_k is a multiple of chosen_size and
        chosen_size is a multiple of 8, visibility is then computed for whole runs.
      scale, logits_soft_cap, query_segment_ids, key_segment_ids, query_lengths, key_lengths, return_log_sum_exp, chip,
        interpret: as in `window_attention`.

    Returns:
      As `window_attention`.

    Raises:
      ValueError: shapes do not match, a list names a block twice or one that does not exist, a single block's list
        exceeds scalar memory, or blocks exceed the chip's memory.
      NotImplementedError: the dtype or the head dimension is not supported.
    """
    call = plan_block(
        query,
        key,
        value,
        key_blocks=key_blocks,
        block_q=block_q,
        block_k=block_k,
        granules=granules,
        chosen_runs=0 if chosen_starts is None else chosen_starts.shape[3],
        bias=described(bias, query.shape[2]),
        chip=chip,
    )
    heads, head_dim = query.shape[2:]
    if shift is not None and granules is not None:
        raise ValueError("shift must be None with granules, whose positions are static")
    shift = None if shift is None else jnp.asarray(shift, jnp.int32).reshape(1)
    tokens = mark_tokens(
        query, key, value, query_segment_ids, key_segment_ids, query_lengths, key_lengths, shift
    )
    query, scale = positive_scale(tokens.query, scale)
    packed_query, packed_key, packed_value, layout = pack(query, tokens.key, tokens.value)
    call = dataclasses.replace(
        call,
        mask=mask,
        query_position=query_position,
        key_position=key_position,
        shifted=tokens.shift is not None,
        causal=causal,
        segments=tokens.segments is not None,
        chosen=None
        if chosen_starts is None
        else ChosenKeys(chosen_size, chosen_starts.shape[3], chosen_aligned and key_position == 0),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        interpret=interpret,
    )
    rows = None if chosen_starts is None else pack_rows(chosen_starts, heads, layout)
    numbers = None
    if bias is not None:
        numbers = lay_out(bias, call, tokens.shift)
        # The gradient of what devices share is summed over them outside the derivative below.
        packed_query, packed_key, packed_value, numbers = vary_alike(
            packed_query, packed_key, packed_value, numbers
        )
    hidden = Hidden(tokens.segments, rows)
    if known is not None:
        known_out, log_sums = known
        known = pack_queries(known_out, layout), pack_log_sums(log_sums, scale, layout)
    result = _packed(
        packed_query, packed_key, packed_value, numbers, hidden, tokens.shift, known, call, return_log_sum_exp
    )
    out = unpack(result[0] if return_log_sum_exp else result, layout, heads, head_dim)
    out = zero_absent(out, tokens.query_exists)
    if not return_log_sum_exp:
        return out
    return out, unpack_rows(result[1], heads)
