"""Propagation on TPU: n queries read m compressed tokens that stay in VMEM, one pass forward, one
backward."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu.core import heads, inputs, scores
from pallas_kernels.tpu.core import sizes as block_sizes
from pallas_kernels.tpu.core.heads import LOG2E, MASKED, NN, NT, Layout
from pallas_kernels.tpu.core.scores import Score


@dataclasses.dataclass(frozen=True)
class _Call:
    """All that is static about one call. A grid step holds `block` queries, cut in tiles of `tile`."""

    length: int
    keys: int
    tile: int
    block: int
    layout: Layout
    scale: float
    score: Score
    vmem_limit: int | None
    interpret: bool | pltpu.InterpretParams

    @property
    def ragged(self) -> bool:
        return self.length % self.block != 0

    def load(self, ref, unit: int) -> tuple[Float[Array, "tile width"], slice]:
        """One head's queries (or their gradients) of one tile, zero past the end of the sequence; its
        rows."""
        tile, head = divmod(unit, self.layout.packed)
        rows = slice(tile * self.tile, (tile + 1) * self.tile)
        x = ref[0, rows, :]
        if self.ragged:
            x = heads.rows_below(x, self.length - pl.program_id(2) * self.block - tile * self.tile)
        return heads.lanes_of_head(x, head, self.layout), rows

    def weights(self, products: Float[Array, "m tile"]) -> Float[Array, "m tile"]:
        """Weights of the keys, in rows, from unscaled scores; rows of padding weigh nothing."""
        there = None
        if products.shape[0] != self.keys:
            there = jax.lax.broadcasted_iota(jnp.int32, products.shape, 0) < self.keys
        if self.score == "softmax":
            s = products if there is None else jnp.where(there, products, MASKED)
            w = jnp.exp2((s - s.max(axis=0, keepdims=True)) * (self.scale * LOG2E))
            return w * heads.reciprocal(w.sum(axis=0, keepdims=True))
        w = scores.weigh(self.score, products * self.scale)
        return w if there is None else jnp.where(there, w, 0.0)


def _forward_kernel(query, key, value, output, *, call: _Call):
    layout = call.layout
    parts: list[Array] = []

    def score(unit):
        q, _ = call.load(query, unit)
        return (heads.dot(key[0], q, NT),)

    def weigh(unit, products):
        return (call.weights(products).astype(query.dtype),)

    def read_out(unit, weights):
        head = unit % layout.packed
        _, rows = call.load(query, unit)
        parts.append(heads.turned_product(value[0], weights, head, layout))
        if head + 1 == layout.packed:
            output[0, rows, :] = jnp.concatenate(parts, axis=0).T.astype(output.dtype)
            parts.clear()

    heads.pipelined(call.block // call.tile * layout.packed, score, weigh, read_out)


def _backward_kernel(query, key, value, grad, grad_query, grad_key, grad_value, *, call: _Call):
    layout = call.layout
    parts: list[Array] = []

    @pl.when(pl.program_id(2) == 0)
    def _():
        grad_key[...] = jnp.zeros_like(grad_key)
        grad_value[...] = jnp.zeros_like(grad_value)

    def score(unit):
        q, _ = call.load(query, unit)
        g, _ = call.load(grad, unit)
        return heads.dot(key[0], q, NT), heads.dot(value[0], g, NT), q, g

    def differentiate(unit, products, grads, q, g):
        weights = call.weights(products)
        if call.score == "softmax":
            (changes,) = heads.softmax_changes([weights], [grads], None, query.dtype == jnp.float32)
        else:
            changes = scores.slope(call.score, products * call.scale) * grads
        return weights.astype(query.dtype), changes.astype(query.dtype), q, g

    def read_out(unit, weights, changes, q, g):
        head = unit % layout.packed
        _, rows = call.load(query, unit)
        parts.append(heads.turned_product(key[0], changes, head, layout) * call.scale)
        if head + 1 == layout.packed:
            grad_query[0, rows, :] = jnp.concatenate(parts, axis=0).T.astype(grad_query.dtype)
            parts.clear()
        grad_value[0] += heads.dot(weights, g, NN)
        grad_key[0] += heads.dot(changes, q, NN) * call.scale

    heads.pipelined(call.block // call.tile * layout.packed, score, differentiate, read_out)


def _specs(call: _Call, keys: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    width = call.layout.width
    return (
        pl.BlockSpec((1, call.block, width), lambda b, t, i: (b, i, t)),
        pl.BlockSpec((1, keys, width), lambda b, t, i: (b, 0, t)),
    )


def _grid(call: _Call, query) -> tuple[int, int, int]:
    return query.shape[0], query.shape[2] // call.layout.width, -(-call.length // call.block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _packed(query, key, value, call: _Call):
    by_query, by_key = _specs(call, key.shape[1])
    return pl.pallas_call(
        functools.partial(_forward_kernel, call=call),
        grid=_grid(call, query),
        in_specs=[by_query, by_key, by_key],
        out_specs=by_query,
        out_shape=heads.result(query.shape, query.dtype, query),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name="propagate_forward",
    )(query, key, value)


def _packed_fwd(query, key, value, call: _Call):
    return _packed(query, key, value, call), (query, key, value)


def _packed_bwd(call: _Call, kept, grad):
    query, key, value = kept
    by_query, by_key = _specs(call, key.shape[1])
    grad_query, grad_key, grad_value = pl.pallas_call(
        functools.partial(_backward_kernel, call=call),
        grid=_grid(call, query),
        in_specs=[by_query, by_key, by_key, by_query],
        out_specs=[by_query, by_key, by_key],
        out_shape=[
            heads.result(query.shape, query.dtype, query),
            *[heads.result(key.shape, jnp.float32, query)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name="propagate_backward",
    )(query, key, value, grad)
    return grad_query, grad_key.astype(key.dtype), grad_value.astype(value.dtype)


_packed.defvjp(_packed_fwd, _packed_bwd)


def propagate(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B M N H"],
    value: Float[Array, "B M N H"],
    *,
    strength: Float[Array, " N"],
    scale: float | None = None,
    score: Score = "softmax",
    chip: str | None = None,
    block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"]:
    """Reads M compressed tokens from T positions: strength * sigma(scale query key^T) value (000 eq. 8,
    F_prop).

    The compressed tokens stay in VMEM; queries stream through once, forward and backward, and nothing but
    the inputs is kept for the backward pass. Differentiable in query, key, value and strength.

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, M, N, H), the same dtype, M up to 1024.
      strength: (N,), one factor a head.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      score: "softmax", or "relu2" and "laplace", which are not normalised.
      chip: "v4", "v5e", "v5p", "v6e" or "7x"; None takes that of the mesh which query lies
        on, or which is in use, else of the chip that this process runs on; where nothing says it, sizes that fit
        every chip.
      block: queries in a grid step, a multiple of 128, instead of the table's.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, T, N, H) in query's dtype.

    Raises:
      ValueError: on shapes that don't fit, an unknown score, more than 1024 compressed tokens, or a block
        that does not fit in the chip's memory.
      NotImplementedError: on another dtype or a wider head.
    """
    inputs.check_attention(query, key, value)
    scores.check_score(score)
    chip = block_sizes.resolve_chip(chip, query)
    _, length, count, head_dim = query.shape
    keys = key.shape[1]
    if key.shape[2] != count:
        raise ValueError(f"key must have query's {count} heads, got {key.shape[2]}")
    if keys > block_sizes.MAX_COMPRESSED:
        raise ValueError(f"key must hold at most {block_sizes.MAX_COMPRESSED} compressed tokens, got {keys}")
    if strength.shape != (count,):
        raise ValueError(f"strength must have shape {(count,)}, got {strength.shape}")
    query, key, value, strength = heads.alike(query, key, value, strength)
    query, scale = inputs.positive_scale(query, scale)
    value = (value.astype(jnp.float32) * strength.astype(jnp.float32)[None, None, :, None]).astype(
        value.dtype
    )
    packed_query, packed_key, packed_value, layout = heads.pack(query, key, value)
    rows = -keys % 16
    if rows:
        pad = ((0, 0), (0, rows), (0, 0))
        packed_key, packed_value = jnp.pad(packed_key, pad), jnp.pad(packed_value, pad)
    tile, chosen = block_sizes.propagate_blocks(length, keys + rows, layout.width, query.dtype.itemsize)
    if block is not None:
        if block < 128 or block % 128:
            raise ValueError(f"block must be a positive multiple of 128, got {block}")
        tile, chosen = math.gcd(tile, block), block
    needed = block_sizes.propagate_bytes(chosen, tile, keys + rows, layout.width, query.dtype.itemsize)
    limit = block_sizes.vmem_limit("propagate", needed, chip, f"choose a block below {chosen}")
    call = _Call(length, keys, tile, chosen, layout, scale, score, limit, interpret)
    return heads.unpack(_packed(packed_query, packed_key, packed_value, call), layout, count, head_dim)
