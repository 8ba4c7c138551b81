"""Propagation on TPU: the differentiable call, and what stands in its way."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.scores import Score, check_score
from pallas_kernels.tpu.core.heads import pack, unpack
from pallas_kernels.tpu.core.inputs import Shaped, obstacle_of, positive_scale
from pallas_kernels.tpu.propagate.backward import propagate_backward
from pallas_kernels.tpu.propagate.forward import propagate_forward
from pallas_kernels.tpu.propagate.plan import PropagateCall, plan_propagate
from pallas_kernels.varying import vary_alike


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _packed(query, key, value, call: PropagateCall):
    return propagate_forward(query, key, value, call)


def _packed_fwd(query, key, value, call: PropagateCall):
    return _packed(query, key, value, call), (query, key, value)


def _packed_bwd(call: PropagateCall, residuals, grad):
    query, key, value = residuals
    return propagate_backward(query, key, value, grad, call)


_packed.defvjp(_packed_fwd, _packed_bwd)


def propagate_obstacle(
    query: Shaped, key: Shaped, value: Shaped, *, chip: str | None = None, block: int | None = None
) -> str | None:
    """Why `propagate` cannot serve a call, known from shapes and dtypes without tracing it.

    Args:
      query, key, value: arrays, tracers or `jax.ShapeDtypeStruct`, of which only the shape, the dtype and the mesh
        count.
      chip, block: as in `propagate`.

    Returns:
      The message of the error that `propagate` would raise: a dtype or head dimension that no kernel supports, shapes
      that do not match, too many compressed tokens, or too little VMEM. None where nothing stands in the way.
    """
    return obstacle_of(plan_propagate, query, key, value, block=block, chip=chip)


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
    """Reads M compressed tokens from T positions: strength * sigma(scale query key^T) value.

    This is F_prop of BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl, eqs. 8-9). The compressed tokens stay in VMEM;
    the queries pass through once, forward and backward, and nothing but the inputs is kept for the backward pass.
    Differentiable in query, key, value and strength.

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, M, N, H), the same dtype, M up to 1024.
      strength: (N,), one factor for each head.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      score: "softmax", or "relu2" and "laplace", which are not normalised.
      chip: "v4", "v5e", "v5p", "v6e" or "7x", whose block sizes are used. None takes the chip of the mesh on which
        query lies, or of the mesh in use, or of this process; where none of these determines it, sizes that fit every
        chip.
      block: queries in a grid step, a multiple of 128, instead of the chip's.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, T, N, H) in query's dtype.

    Raises:
      ValueError: on shapes that do not match, an unknown score, more than 1024 compressed tokens, or a block that does
        not fit in the chip's memory.
      NotImplementedError: on another dtype or a wider head.
    """
    check_score(score)
    call = plan_propagate(query, key, value, block=block, chip=chip)
    heads, head_dim = query.shape[2:]
    if strength.shape != (heads,):
        raise ValueError(f"strength must have shape {(heads,)}, got {strength.shape}")
    query, key, value, strength = vary_alike(query, key, value, strength)
    query, scale = positive_scale(query, scale)
    value = (value.astype(jnp.float32) * strength.astype(jnp.float32)[None, None, :, None]).astype(
        value.dtype
    )
    packed_query, packed_key, packed_value, layout = pack(query, key, value)
    rows = call.padded_keys - call.keys
    if rows:
        pad = ((0, 0), (0, rows), (0, 0))
        packed_key, packed_value = jnp.pad(packed_key, pad), jnp.pad(packed_value, pad)
    call = dataclasses.replace(call, scale=scale, score=score, interpret=interpret)
    return unpack(_packed(packed_query, packed_key, packed_value, call), layout, heads, head_dim)
