"""Compression on TPU: the differentiable calls, and why a call may be unsupported."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.scores import Score, check_score
from pallas_kernels.tpu.compress.differentiable import compress_packed
from pallas_kernels.tpu.compress.parts import Parts, from_parts, to_parts
from pallas_kernels.tpu.compress.plan import CompressCall, plan_compress, plan_compress_blocks
from pallas_kernels.tpu.core.heads import pack
from pallas_kernels.tpu.core.inputs import positive_scale, refusal
from pallas_kernels.tpu.core.score_bias import lay_out
from pallas_kernels.varying import vary_alike


def _run(
    query: Float[Array, "B R M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    gamma: Float[Array, " N"] | None,
    scale: float | None,
    bounds: Int[Array, "#B R 2"],
    bias: Float[Array, "#B #N #M #S"] | None,
    mask: Bool[Array, "#B #N #M #S"] | None,
    known: Parts | None,
    call: CompressCall,
) -> tuple[Float[Array, "B R M N H"], Parts]:
    """Compresses R sets of queries, each within its own bounds."""
    batch, groups, count, heads, head_dim = query.shape
    check_score(call.score)
    if (contrast_key is None) != (gamma is None):
        raise ValueError("contrast_key and gamma belong together: give both or neither")
    if gamma is not None and gamma.shape != (heads,):
        raise ValueError(f"gamma must have shape {(heads,)}, got {gamma.shape}")
    query, scale = positive_scale(query, 1.0 / (count * math.sqrt(head_dim)) if scale is None else scale)
    call = dataclasses.replace(call, scale=scale)

    query = jnp.pad(query, ((0, 0), (0, 0), (0, call.queries - count), (0, 0), (0, 0)))
    query = query.reshape(batch, groups * call.queries, heads, head_dim)
    packed_query, packed_key, packed_value, layout = pack(query, key, value)
    keys = [packed_key]
    if contrast_key is not None:
        keys.append(pack(query, contrast_key, value)[1])
    bounds = jnp.broadcast_to(bounds, (batch, *bounds.shape[1:]))[:, :, None, :]
    added = None
    if call.bias is not None:
        # Blocks have a bias as long as their histories; a sequence's bias may have one number for all its keys.
        tokens = bias.shape[3] if bias is not None and call.own_queries else key.shape[1]
        sizes = (call.queries, call.bias_tokens)
        added = lay_out(bias, mask, call.bias, layout, call.scale, (count, tokens), sizes)
    given = [packed_query, packed_value, bounds, *keys, *([] if added is None else [added])]
    packed_query, packed_value, bounds, *rest = vary_alike(*given)
    keys, added = rest[: len(keys)], None if added is None else rest[-1]
    again = None if known is None else from_parts(known, call)
    found = compress_packed(bounds, packed_query, keys, packed_value, added, again, call)
    outs, log_sums = to_parts(*found, heads, head_dim, call)
    result = outs[0]
    if gamma is not None:
        result = result - gamma.astype(jnp.float32)[None, None, None, :, None] * outs[1]
    return result.astype(query.dtype), (outs, log_sums)


#: Why `compress` does not support a call, with the same options. None if it does.
compress_unsupported = refusal(plan_compress)


def compress(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, " N"] | None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #M #S"] | None = None,
    mask: Bool[Array, "#B #N #M #S"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    axis_name: str | None = None,
    chip: str | None = None,
    block: int | None = None,
    splits: int | None = None,
    return_parts: bool = False,
    known: Parts | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B M N H"] | tuple[Float[Array, "B M N H"], Parts]:
    """Reads S tokens into M compressed tokens: (sigma(scale Q K1^T) - gamma sigma(scale Q K2^T)) V.

    This is F_comp of BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl, eqs. 11-12). Both attentions run in one pass
    that reads each of key, contrast_key and value once. The sequence may be divided into parts that run in parallel and
    are merged by their log-sum-exp. Differentiable in query, both keys, value, gamma and bias.

    Args:
      query: (B, M, N, H), float32 or bfloat16, M up to 1024, H up to 256.
      key, contrast_key, value: (B, S, N, H), the same dtype; contrast_key=None and gamma=None for a single attention.
      gamma: (N,), the weight of the second attention.
      scale: multiplies the scores; 1 / (M sqrt(H)) by default.
      score: "softmax", or "relu2" and "laplace", which are not normalised.
      bias: added to the scaled scores of both attentions; float32 numbers that the kernel reads. Its gradient is
        computed for each entry of the batch and head, then summed over those that share a bias.
      mask: where it is False, a query does not see a key, as if the bias were -inf. A mask without queries (M = 1)
        takes a number for each key; keys that no query sees must be finite.
      key_lengths: (B,) ints, how many tokens exist; absent tokens never influence a result.
      axis_name: inside `shard_map`, the mesh axis that shards sequences: key, contrast_key and value are this device's
        part, while query and the result are the same on all devices. The parts are merged as above.
      chip: "v4", "v5e", "v5p", "v6e" or "7x", for its block sizes. None takes the chip of query's mesh, of the mesh in
        use, or of this process; if none of these determines it, sizes that fit every chip.
      block: tokens in a grid step, a multiple of 128; overrides the chip's.
      splits: parts of the sequence; by default 1 if the heads of a batch occupy two cores, else 2.
      return_parts: also return what `known` takes.
      known: the parts of an earlier call. The forward kernel is then skipped, and the gradient is the earlier call's.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, M, N, H) in query's dtype, zero where no token exists. With return_parts also, without gradients, each
      attention's output (B, M, N, H) in float32 and log-sum-exp (B, N, M), inf where no token exists; None unless the
      score is softmax.

    Raises:
      ValueError: shapes do not match, the score is unknown, there are more than 1024 compressed tokens, or a block
        exceeds the chip's memory.
      NotImplementedError: the dtype or the head dimension is not supported.
    """
    call = plan_compress(
        query, key, contrast_key, value, bias=bias, mask=mask, chip=chip, block=block, splits=splits
    )
    length = key.shape[1]
    bounds = jnp.asarray([[[0, length]]], jnp.int32)
    if key_lengths is not None:
        if key_lengths.shape != query.shape[:1] or not jnp.issubdtype(key_lengths.dtype, jnp.integer):
            raise ValueError(
                f"key_lengths must be ints of shape {query.shape[:1]}, "
                f"got {key_lengths.dtype} of {key_lengths.shape}"
            )
        stop = jnp.minimum(key_lengths.astype(jnp.int32), length)
        bounds = jnp.stack([jnp.zeros_like(stop), stop], axis=-1)[:, None]
    above = call.above or key_lengths is not None
    call = dataclasses.replace(call, above=above, score=score, axis_name=axis_name, interpret=interpret)
    known = jax.tree.map(lambda x: x[:, None], known)
    found = _run(query[:, None], key, contrast_key, value, gamma, scale, bounds, bias, mask, known, call)
    result, parts = jax.tree.map(lambda x: x[:, 0], found)
    return (result, parts) if return_parts else result


#: The same for `compress_blocks`.
compress_blocks_unsupported = refusal(plan_compress_blocks)


def compress_blocks(
    query: Float[Array, "B R M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, " N"] | None,
    block_size: int,
    history_size: int,
    history_lengths: Int[Array, "#B R"] | None = None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "N M S"] | None = None,
    chip: str | None = None,
    return_parts: bool = False,
    known: Parts | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B R M N H"] | tuple[Float[Array, "B R M N H"], Parts]:
    """`compress` for each of R blocks of a sequence: block r reads history_size tokens from r * block_size on.

    This is the blockwise form of `memory="layer"`. If the first history_size tokens are those before block 0, each
    block reads the tokens before it, and all blocks run in parallel.

    Args:
      query: (B, R, M, N, H), the compressed tokens of each block.
      key, contrast_key, value: (B, S, N, H), S at least history_size + (R - 1) * block_size.
      block_size: a multiple of 16 if there are several blocks.
      history_size: the largest number of tokens that a block reads, at least 1.
      history_lengths: (B, R) or (1, R) ints; only the last `history_lengths` of these tokens exist, and the others
        never influence a result. A block without any gives 0. All exist by default.
      gamma, scale, score, chip, return_parts, known, interpret: as in `compress`.
      bias: (N, M, history_size), added to the scaled scores of each block. Its gradient stays in VMEM.

    Returns:
      (B, R, M, N, H) in query's dtype. With return_parts also each attention's output (B, R, M, N, H) and log-sum-exp
      (B, R, N, M), as from `compress`.

    Raises:
      ValueError: as `compress`, or sizes do not match.
      NotImplementedError: as `compress`, or the block size is not a multiple of 16.
    """
    call = plan_compress_blocks(
        query,
        key,
        contrast_key,
        value,
        block_size=block_size,
        history_size=history_size,
        bias=bias,
        chip=chip,
    )
    batch, readers = query.shape[:2]
    stop = jnp.arange(readers, dtype=jnp.int32)[None] * block_size + history_size
    start = stop - history_size
    if history_lengths is not None:
        if history_lengths.shape not in ((1, readers), (batch, readers)):
            raise ValueError(
                f"history_lengths must have shape {(batch, readers)}, got {history_lengths.shape}"
            )
        start = stop - jnp.minimum(history_lengths.astype(jnp.int32), history_size)
    bounds = jnp.stack(jnp.broadcast_arrays(start, stop), axis=-1)
    call = dataclasses.replace(call, below=history_lengths is not None, score=score, interpret=interpret)
    added = None if bias is None else bias[None]
    found = _run(query, key, contrast_key, value, gamma, scale, bounds, added, None, known, call)
    return found if return_parts else found[0]
