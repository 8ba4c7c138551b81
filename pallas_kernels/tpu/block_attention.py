"""Block-sparse attention on TPU: the call that takes heads as they come and can be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu import block_kernels, block_sizes, heads, inputs
from pallas_kernels.tpu.block_kernels import BlockCall, Mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _packed(query, key, value, segments, call: BlockCall, with_log_sum: bool):
    return _packed_fwd(query, key, value, segments, call, with_log_sum)[0]


def _packed_fwd(query, key, value, segments, call: BlockCall, with_log_sum: bool):
    out, statistics = block_kernels.forward(query, key, value, segments, call)
    result = (out, heads.log_sum_exp(statistics, call.scale)) if with_log_sum else out
    return result, (query, key, value, segments, out, statistics)


def _packed_bwd(call: BlockCall, with_log_sum: bool, kept, grads):
    query, key, value, segments, out, statistics = kept
    grad, shift = grads if with_log_sum else (grads, None)
    # A product with ones, not a reduction over (heads, head_dim): that shape would be copied into another layout.
    number = jnp.arange(out.shape[2], dtype=jnp.int32) // call.layout.head_dim
    ones = jax.nn.one_hot(number, out.shape[2] // call.layout.head_dim, dtype=jnp.float32)
    mean = jnp.einsum(
        "btl,ln->bnt",
        out.astype(jnp.float32) * grad.astype(jnp.float32),
        ones,
        precision=jax.lax.Precision.HIGHEST,
    )
    mean = mean.reshape(*statistics.shape[:2], call.layout.packed, -1)
    mean = mean if shift is None else mean - shift
    statistics = jnp.concatenate([statistics, mean], axis=2)
    return *block_kernels.backward(query, key, value, segments, grad, statistics, call), None


_packed.defvjp(_packed_fwd, _packed_bwd)


def block_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    key_blocks: Sequence[Sequence[int]],
    block_q: int,
    block_k: int,
    mask: Mask | None = None,
    scale: float | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    return_log_sum_exp: bool = False,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over any pattern that is a list of key blocks for each block of queries.

    Cost follows the listed pairs; the mask inside a block is computed from positions, so that no mask lies in memory.
    Differentiable in query, key and value (000 eq. 1; online softmax and recomputation as in Dao et al. 2022, arXiv
    2205.14135).

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, S, K, H), the same dtype, N a multiple of K; query head g reads key head g // (N / K).
      key_blocks: for each block of `block_q` queries, the blocks of `block_k` keys that it meets, each once.
      block_q, block_k: rows in a block, multiples of 128.
      mask: takes int32 query and key positions of one shape and says which keys are seen; traced into the kernel. Use
        jax.lax.div and jax.lax.rem there: `//` asks JAX for the chip, which a CPU host that compiles for TPUs lacks.
      scale, query_segment_ids, key_segment_ids, query_lengths, key_lengths, return_log_sum_exp, chip, interpret: as in
        `window_attention`.

    Returns:
      As `window_attention`.

    Raises:
      ValueError: on shapes that don't fit, a list that names a block that does not exist or names one twice, more pairs
        than scalar memory holds, or blocks that do not fit in the chip's memory.
      NotImplementedError: on another dtype or a wider head.
    """
    inputs.check_attention(query, key, value)
    block_sizes.check_chip(chip)
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("query_segment_ids and key_segment_ids belong together: give both or neither")
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size < 128 or size % 128:
            raise ValueError(f"{name} must be a positive multiple of 128, got {size}")
    batch, length, count, head_dim = query.shape
    keys = key.shape[1]
    rows = tuple(tuple(int(k) for k in row) for row in key_blocks)
    blocks_q, blocks_k = -(-length // block_q), -(-keys // block_k)
    if len(rows) != blocks_q:
        raise ValueError(
            f"key_blocks must have a list for each of {blocks_q} blocks of queries, got {len(rows)}"
        )
    for number, row in enumerate(rows):
        if any(k < 0 or k >= blocks_k for k in row) or len(set(row)) != len(row):
            raise ValueError(
                f"key_blocks[{number}] must name blocks from 0 to {blocks_k - 1}, each once, got {list(row)[:8]}"
            )
    block_sizes.check_pairs(sum(len(row) or 1 for row in rows) + blocks_k)
    segments = None
    if any(x is not None for x in (query_segment_ids, query_lengths, key_lengths)):
        query_rows, query_there = inputs.token_rows(
            "query", batch, length, query_segment_ids, query_lengths, -2
        )
        key_rows, key_there = inputs.token_rows("key", batch, keys, key_segment_ids, key_lengths, -1)
        segments = query_rows, key_rows
        query = inputs.only(query, query_there)
        key, value = inputs.only(key, key_there), inputs.only(value, key_there)
    if segments is None:
        query, key, value = heads.alike(query, key, value)
    else:
        query, key, value, *segments = heads.alike(query, key, value, *segments)
        segments = tuple(segments)
    query, scale = inputs.positive_scale(query, scale)
    packed_query, packed_key, packed_value, layout = heads.pack(query, key, value)
    needed = block_sizes.pair_bytes(block_q, block_k, layout.width, query.dtype.itemsize)
    limit = block_sizes.vmem_limit("block_attention", needed, chip, "choose smaller blocks")
    call = BlockCall(
        length, keys, block_q, block_k, 128, rows, mask, segments is not None, layout, scale, limit, interpret
    )
    result = _packed(packed_query, packed_key, packed_value, segments, call, return_log_sum_exp)
    out = heads.unpack(result[0] if return_log_sum_exp else result, layout, count, head_dim)
    if query_lengths is not None:
        out = inputs.only(out, query_there)
    if not return_log_sum_exp:
        return out
    return out, heads.unpack_rows(result[1], count)
