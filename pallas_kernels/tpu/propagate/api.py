"""Propagation on TPU: the differentiable call, and why a call may be unsupported."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.scores import Score, check_score
from pallas_kernels.tpu.core.heads import pack, unpack
from pallas_kernels.tpu.core.inputs import positive_scale, refusal
from pallas_kernels.tpu.core.score_bias import gradient_like, lay_out
from pallas_kernels.tpu.propagate.backward import propagate_backward
from pallas_kernels.tpu.propagate.forward import propagate_forward
from pallas_kernels.tpu.propagate.plan import PropagateCall, plan_propagate
from pallas_kernels.varying import vary_alike


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed(query, key, value, bias, call: PropagateCall):
    return propagate_forward(query, key, value, bias, call)


def _packed_fwd(query, key, value, bias, call: PropagateCall):
    return _packed(query, key, value, bias, call), (query, key, value, bias)


def _packed_bwd(call: PropagateCall, residuals, grad):
    query, key, value, bias = residuals
    *grads, grad_bias = propagate_backward(query, key, value, bias, grad, call)
    return *grads, None if bias is None else gradient_like(bias, grad_bias, call.scale)


_packed.defvjp(_packed_fwd, _packed_bwd)


#: Why `propagate` does not support a call, with the same options. None if it does.
propagate_unsupported = refusal(plan_propagate)


def propagate(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B M N H"],
    value: Float[Array, "B M N H"],
    *,
    strength: Float[Array, " N"],
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #T #M"] | None = None,
    chip: str | None = None,
    block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"]:
    """Reads M compressed tokens from T positions: strength * sigma(scale query key^T) value.

    This is F_prop of BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl, eqs. 8-9). The compressed tokens stay in VMEM
    while the queries pass through once, forward and backward; only the inputs are kept for the backward pass.
    Differentiable in query, key, value, strength and bias.

    Args:
      query: (B, T, N, H), float32 or bfloat16, H up to 256.
      key, value: (B, M, N, H), the same dtype, M up to 1024.
      strength: (N,), one factor for each head.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      score: "softmax", or "relu2" and "laplace", which are not normalised.
      bias: added to the scaled scores, in float32; a query does not see a key where it is -inf. Its gradient is
        computed for each entry of the batch and head, then summed over those that share a bias.
      chip: "v4", "v5e", "v5p", "v6e" or "7x", for its block sizes. None takes the chip of query's mesh, of the mesh in
        use, or of this process; if none of these determines it, sizes that fit every chip.
      block: queries in a grid step, a multiple of 128; overrides the chip's.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      (B, T, N, H) in query's dtype.

    Raises:
      ValueError: shapes do not match, the score is unknown, there are more than 1024 compressed tokens, or a block
        exceeds the chip's memory.
      NotImplementedError: the dtype or the head dimension is not supported.
    """
    check_score(score)
    call = plan_propagate(query, key, value, bias=bias, chip=chip, block=block)
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
    added = None
    if call.bias is not None:
        shape, padded = (call.length, call.keys), (call.length, call.padded_keys)
        added = lay_out(bias, None, call.bias, layout, scale, shape, padded)
        packed_query, packed_key, packed_value, added = vary_alike(
            packed_query, packed_key, packed_value, added
        )
    return unpack(_packed(packed_query, packed_key, packed_value, added, call), layout, heads, head_dim)
