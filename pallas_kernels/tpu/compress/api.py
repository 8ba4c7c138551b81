"""Compression on TPU: the calls that take heads as they come and can be differentiated."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu.compress import kernels as compress_kernels
from pallas_kernels.tpu.compress.kernels import CompressCall
from pallas_kernels.tpu.core import heads, inputs, scores
from pallas_kernels.tpu.core import sizes as block_sizes
from pallas_kernels.tpu.core.scores import Score

#: Blocks of a sequence start at multiples of this: a register's rows of the narrowest dtype.
_ROWS = 16


def _to_rows(x: Float[Array, "B tiles R width lanes"], call: CompressCall) -> Float[Array, "B sets Q L"]:
    """Transposed results as (batch, set of keys, readers * queries, tiles * width)."""
    batch, tiles, readers, width, lanes = x.shape
    x = x.reshape(batch, tiles, readers, width, lanes // call.queries, call.queries)
    return x.transpose(0, 4, 2, 5, 1, 3).reshape(batch, -1, readers * call.queries, tiles * width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed(bounds, query, keys, value, call: CompressCall):
    return _packed_fwd(bounds, query, keys, value, call)[0]


def _packed_fwd(bounds, query, keys, value, call: CompressCall):
    sums, statistics = compress_kernels.merge(
        *compress_kernels.forward(bounds, query, keys, value, call), call
    )
    out = _to_rows(sums, call)
    return out, (bounds, query, keys, value, out, statistics)


def _packed_bwd(call: CompressCall, kept, grad):
    bounds, query, keys, value, out, statistics = kept
    batch, sets, _, lanes = out.shape
    packed, tiles = call.layout.packed, lanes // call.layout.width
    # The softmax's derivative needs each row's sum of weight times change: the output times its gradient, rounded as
    # the kernel gets it.
    grad = grad.astype(query.dtype)
    mean = (
        (out * grad.astype(jnp.float32))
        .reshape(batch, sets, -1, call.queries, tiles, packed, call.layout.head_dim)
        .sum(-1)
    )
    mean = mean.transpose(0, 4, 2, 5, 1, 3).reshape(*statistics.shape[:3], packed, -1)
    bounds, query, value, grad, statistics, *keys = heads.alike(
        bounds, query, value, grad, jnp.concatenate([statistics, mean], axis=3), *keys
    )
    grad_query, grad_keys, grad_value = compress_kernels.backward(
        bounds, query, keys, value, grad, statistics, call
    )
    if not call.own_queries:
        grad_query = grad_query.sum(axis=2, keepdims=True)
    grad_query = _to_rows(grad_query, call)[:, 0].astype(query.dtype)

    covered = _covered(call)

    def over_slots(x):
        if not covered.all():
            x = jnp.where(jnp.asarray(covered)[:, None, :, None], x, jnp.zeros((), x.dtype))
        return x[0] if call.slots == 1 else x.astype(jnp.float32).sum(0).astype(x.dtype)

    return None, grad_query, [over_slots(x) for x in grad_keys], over_slots(grad_value)


_packed.defvjp(_packed_fwd, _packed_bwd)


def _covered(call: CompressCall) -> Bool[np.ndarray, "slots S"]:
    """Which tokens some reader of a slot reads."""
    covered = np.zeros((call.slots, call.length), bool)
    for reader in range(call.readers):
        first = reader * call.stride * call.block
        covered[reader % call.slots, first : first + call.steps * call.block] = True
    return covered


@dataclasses.dataclass(frozen=True)
class _Readers:
    """How the history is read; see `CompressCall`."""

    block: int
    readers: int
    steps: int
    stride: int
    own_queries: bool
    slots: int
    above: bool
    below: bool


def _run(
    query, key, contrast_key, value, gamma, scale, score, bounds, chip, interpret, plan, axis_name=None
) -> Array:
    """Compression of (B, R, M, N, H) queries within bounds (B or 1, R, 2); `plan(width, itemsize, sets)` gives the
    readers."""
    batch, groups, count, heads_count, head_dim = query.shape
    flat = query.reshape(batch, groups * count, heads_count, head_dim)
    inputs.check_arrays({"query": flat, "key": key, "value": value})
    length = key.shape[1]
    expected = (batch, length, heads_count, head_dim)
    for name, x in (("key", key), ("contrast_key", contrast_key), ("value", value)):
        if x is not None and (x.shape != expected or x.dtype != query.dtype):
            raise ValueError(f"{name} must be {query.dtype} of shape {expected}, got {x.dtype} of {x.shape}")
    scores.check_score(score)
    chip = block_sizes.resolve_chip(chip, query)
    if (contrast_key is None) != (gamma is None):
        raise ValueError("contrast_key and gamma belong together: give both or neither")
    if gamma is not None and gamma.shape != (heads_count,):
        raise ValueError(f"gamma must have shape {(heads_count,)}, got {gamma.shape}")
    if count > block_sizes.MAX_COMPRESSED:
        raise ValueError(
            f"query must hold at most {block_sizes.MAX_COMPRESSED} compressed tokens, got {count}"
        )
    query, scale = inputs.positive_scale(
        query, 1.0 / (count * math.sqrt(head_dim)) if scale is None else scale
    )

    pad = -count % heads.LANES
    query = jnp.pad(query, ((0, 0), (0, 0), (0, pad), (0, 0), (0, 0)))
    query = query.reshape(batch, groups * (count + pad), heads_count, head_dim)
    packed_query, packed_key, packed_value, layout = heads.pack(query, key, value)
    keys = [packed_key]
    if contrast_key is not None:
        keys.append(heads.pack(query, contrast_key, value)[1])
    readers: _Readers = plan(layout.width, query.dtype.itemsize, len(keys))
    needed = block_sizes.compress_bytes(
        readers.block, count + pad, layout.width, query.dtype.itemsize, len(keys), layout.packed
    )
    limit = block_sizes.vmem_limit("compress", needed, chip, f"choose a block below {readers.block}")
    call = CompressCall(
        length=length,
        queries=count + pad,
        **dataclasses.asdict(readers),
        keys=len(keys),
        layout=layout,
        scale=scale,
        score=score,
        axis_name=axis_name,
        vmem_limit=limit,
        interpret=interpret,
    )
    bounds = jnp.broadcast_to(bounds, (batch, *bounds.shape[1:]))[:, :, None, :]
    bounds, packed_query, packed_value, *keys = heads.alike(bounds, packed_query, packed_value, *keys)
    out = _packed(bounds, packed_query, keys, packed_value, call)
    out = out.reshape(batch, len(keys), groups, count + pad, -1, layout.head_dim)
    out = out[:, :, :, :count, :heads_count, :head_dim]
    result = out[:, 0]
    if gamma is not None:
        result = result - gamma.astype(jnp.float32)[None, None, None, :, None] * out[:, 1]
    return result.astype(query.dtype)


def compress(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, " N"] | None,
    scale: float | None = None,
    score: Score = "softmax",
    key_lengths: Int[Array, " B"] | None = None,
    axis_name: str | None = None,
    chip: str | None = None,
    block: int | None = None,
    splits: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B M N H"]:
    """Reads S tokens into M: (sigma(scale Q K1^T) - gamma sigma(scale Q K2^T)) V (000 eqs. 11-12, F_comp).

    Both attentions in one pass that reads each of key, contrast_key and value once; the sequence may be
    split into parts that run side by side and are merged by their log-sum-exp. Differentiable in query, both
    keys, value and gamma.

    Args:
      query: (B, M, N, H), float32 or bfloat16, M up to 1024, H up to 256.
      key, contrast_key, value: (B, S, N, H), the same dtype; contrast_key and gamma None for a single
        attention.
      gamma: (N,), the second attention's weight.
      scale: multiplies the scores; 1 / (M sqrt(H)) by default.
      score: "softmax", or "relu2" and "laplace", which are not normalised.
      key_lengths: (B,) ints, how many tokens exist; what lies beyond is never read into a result.
      axis_name: inside `shard_map`, the mesh axis over which sequences are cut: key, contrast_key and value are this
        device's part, query and the result are the same on all. Merged like splits.
      chip: "v4", "v5e", "v5p", "v6e" or "7x"; None takes that of the mesh which query lies
        on, or which is in use, else of the chip that this process runs on; where nothing says it, sizes that fit
        every chip.
      block: tokens in a grid step, a multiple of 128, instead of the table's.
      splits: parts of the sequence; by default 1 where the heads of a batch fill two cores, else 2.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, M, N, H) in query's dtype, zero where no token exists.

    Raises:
      ValueError: on shapes that don't fit, an unknown score, more than 1024 compressed tokens, or a block
        that does not fit in the chip's memory.
      NotImplementedError: on another dtype or a wider head.
    """
    if query.ndim != 4:
        raise ValueError(f"query must have shape (batch, length, heads, head_dim), got {query.shape}")
    if block is not None and (block < 128 or block % 128):
        raise ValueError(f"block must be a positive multiple of 128, got {block}")
    if splits is not None and splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")

    def plan(width, itemsize, sets):
        rows = -(-query.shape[1] // heads.LANES) * heads.LANES
        packed = max(1, width // query.shape[3])
        size = block or block_sizes.compress_block(key.shape[1], rows, width, itemsize, sets, packed)
        parts = splits or (1 if query.shape[0] * query.shape[2] * query.shape[3] >= 2 * width else 2)
        # Parts are equal: each block of keys belongs to one, and has its gradient written once.
        while size > heads.LANES and -(-key.shape[1] // size) % parts:
            size //= 2
        blocks = -(-key.shape[1] // size)
        parts = max(n for n in range(1, parts + 1) if blocks % n == 0)
        steps = blocks // parts
        above = key_lengths is not None or length % size != 0
        return _Readers(size, parts, steps, steps, own_queries=False, slots=1, above=above, below=False)

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
    out = _run(
        query[:, None],
        key,
        contrast_key,
        value,
        gamma,
        scale,
        score,
        bounds,
        chip,
        interpret,
        plan,
        axis_name,
    )
    return out[:, 0]


def compress_blocks(
    query: Float[Array, "B R M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, " N"] | None,
    block_size: int,
    history_size: int,
    history_lengths: Int[Array, "B R"] | None = None,
    scale: float | None = None,
    score: Score = "softmax",
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B R M N H"]:
    """`compress` for each of R blocks of a sequence: block r reads tokens r * block_size to + history_size.

    This is the blockwise form of `memory="layer"`: with the first history_size tokens being what precedes block 0,
    each block reads what precedes it, and all run in parallel.

    Args:
      query: (B, R, M, N, H), the compressed tokens of each block.
      key, contrast_key, value: (B, S, N, H), S at least history_size + (R - 1) * block_size.
      block_size: a multiple of 16 where there are several blocks.
      history_size: tokens that a block reads at the most, any number from 1 on.
      history_lengths: (B, R) or (1, R) ints, how many of them, the last ones, exist; what precedes these is never
        read into a result, and a block that has none gets 0. All by default.
      gamma, scale, score, chip, interpret: as in `compress`.

    Returns:
      (B, R, M, N, H) in query's dtype.

    Raises:
      ValueError: as `compress`, and on sizes that don't fit.
      NotImplementedError: as `compress`, and on a block size that is no multiple of 16.
    """
    if query.ndim != 5:
        raise ValueError(f"query must have shape (batch, blocks, length, heads, head_dim), got {query.shape}")
    readers, needed = query.shape[1], history_size + (query.shape[1] - 1) * block_size
    if readers < 1 or block_size < 1 or history_size < 1 or key.shape[1] < needed:
        raise ValueError(
            f"key must hold history_size + (blocks - 1) * block_size = {history_size} + {readers - 1} * "
            f"{block_size} tokens, got {key.shape[1]}"
        )
    if readers > 1 and block_size % _ROWS:
        raise NotImplementedError(f"block_size must be a multiple of {_ROWS}, got {block_size}")

    def plan(width, itemsize, sets):
        rows = -(-query.shape[2] // heads.LANES) * heads.LANES
        packed = max(1, heads.LANES // query.shape[4])
        size = block_sizes.compress_block(history_size, rows, width, itemsize, sets, packed)
        if readers > 1:
            size = max(n for n in range(_ROWS, size + 1, _ROWS) if block_size % n == 0)
        stride, steps = max(block_size // size, 1), -(-history_size // size)
        return _Readers(
            size,
            readers,
            steps,
            stride,
            own_queries=True,
            slots=min(-(-steps // stride), readers),
            above=history_size % size != 0,
            below=history_lengths is not None,
        )

    stop = jnp.arange(readers, dtype=jnp.int32)[None] * block_size + history_size
    start = stop - history_size
    if history_lengths is not None:
        if history_lengths.shape not in ((1, readers), (query.shape[0], readers)):
            raise ValueError(
                f"history_lengths must have shape {(query.shape[0], readers)}, got {history_lengths.shape}"
            )
        start = stop - jnp.minimum(history_lengths.astype(jnp.int32), history_size)
    bounds = jnp.stack(jnp.broadcast_arrays(start, stop), axis=-1)
    return _run(query, key, contrast_key, value, gamma, scale, score, bounds, chip, interpret, plan)
