"""Block-sparse attention on TPU: the call that takes heads as they come and can be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.block import kernels as block_kernels
from pallas_kernels.tpu.block.plan import BlockCall, Granules, Mask
from pallas_kernels.tpu.core import heads, inputs
from pallas_kernels.tpu.core import sizes as block_sizes

TILE = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _packed(query, key, value, segments, shift, call: BlockCall, with_log_sum: bool):
    return _packed_fwd(query, key, value, segments, shift, call, with_log_sum)[0]


def _packed_fwd(query, key, value, segments, shift, call: BlockCall, with_log_sum: bool):
    out, statistics = block_kernels.forward(query, key, value, segments, shift, call)
    result = (out, heads.log_sum_exp(statistics, call.scale)) if with_log_sum else out
    return result, (query, key, value, segments, shift, out, statistics)


def _packed_bwd(call: BlockCall, with_log_sum: bool, kept, grads):
    query, key, value, segments, shift, out, statistics = kept
    grad, grad_log_sum = grads if with_log_sum else (grads, None)
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
    grads = block_kernels.backward(
        query, key, value, segments, shift, grad, statistics, mean, grad_log_sum, call
    )
    return *grads, None, None


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
    granules: Granules | None = None,
    query_position: int = 0,
    key_position: int = 0,
    shift: Int[Array, ""] | None = None,
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
      key_blocks: for each block of `block_q` queries, the blocks of `block_k` keys that it meets, each once. Lists
        too long for scalar memory are run in pieces.
      block_q, block_k: rows in a block, multiples of 128.
      mask: takes int32 positions of queries (1, rows) and of keys (rows, 1) and says which keys are seen; traced into
        the kernel. Divide by `pallas_kernels.positions` there.
      granules: besides, what can only be looked up: see `Granules`.
      query_position, key_position: positions of the first query and the first key, as mask and granules count.
      shift: an int32 scalar added to both, where they are known only at run time; not with granules.
      scale, query_segment_ids, key_segment_ids, query_lengths, key_lengths, return_log_sum_exp, chip, interpret: as in
        `window_attention`.

    Returns:
      As `window_attention`.

    Raises:
      ValueError: on shapes that don't fit, a list that names a block that does not exist or names one twice, a single
        list longer than scalar memory, or blocks that do not fit in the chip's memory.
      NotImplementedError: on another dtype or a wider head.
    """
    inputs.check_attention(query, key, value)
    chip = block_sizes.resolve_chip(chip, query)
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size < 128 or size % 128:
            raise ValueError(f"{name} must be a positive multiple of 128, got {size}")
    length, count, head_dim = query.shape[1:]
    keys = key.shape[1]
    rows = tuple(tuple(int(k) for k in row) for row in key_blocks)
    _check_lists(rows, -(-length // block_q), -(-keys // block_k), granules)
    if shift is not None and granules is not None:
        raise ValueError("granules lie at known positions: shift must be None with them")
    shift = None if shift is None else jnp.asarray(shift, jnp.int32).reshape(1)
    tokens = inputs.mark_tokens(
        query, key, value, query_segment_ids, key_segment_ids, query_lengths, key_lengths, shift
    )
    query, scale = inputs.positive_scale(tokens.query, scale)
    packed_query, packed_key, packed_value, layout = heads.pack(query, tokens.key, tokens.value)
    needed = block_sizes.pair_bytes(block_q, block_k, layout.width, query.dtype.itemsize)
    limit = block_sizes.vmem_limit("block_attention", needed, chip, "choose smaller blocks")
    call = BlockCall(
        queries=length,
        keys=keys,
        block_q=block_q,
        block_k=block_k,
        tile=TILE,
        rows=rows,
        mask=mask,
        granules=granules,
        query_position=query_position,
        key_position=key_position,
        shifted=tokens.shift is not None,
        segments=tokens.segments is not None,
        layout=layout,
        scale=scale,
        vmem_limit=limit,
        interpret=interpret,
    )
    call.check_lists()
    result = _packed(
        packed_query, packed_key, packed_value, tokens.segments, tokens.shift, call, return_log_sum_exp
    )
    out = heads.unpack(result[0] if return_log_sum_exp else result, layout, count, head_dim)
    out = inputs.only(out, tokens.query_there)
    if not return_log_sum_exp:
        return out
    return out, heads.unpack_rows(result[1], count)


def _check_lists(rows, blocks_q: int, blocks_k: int, granules: Granules | None) -> None:
    if len(rows) != blocks_q:
        raise ValueError(
            f"key_blocks must have a list for each of {blocks_q} blocks of queries, got {len(rows)}"
        )
    for number, row in enumerate(rows):
        if any(k < 0 or k >= blocks_k for k in row) or len(set(row)) != len(row):
            raise ValueError(
                f"key_blocks[{number}] must name blocks from 0 to {blocks_k - 1}, each once, got {list(row)[:8]}"
            )
    if granules is not None and [len(bits) for bits in granules.bits] != [len(row) for row in rows]:
        raise ValueError("granules must hold bits for each block that key_blocks lists")
