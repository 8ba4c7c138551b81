"""Recurrences over chunks on TPU: the differentiable call, and why a call may be unsupported."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core.inputs import Shaped, refusal
from pallas_kernels.tpu.recurrent.chunk import CHUNK, ROWS
from pallas_kernels.tpu.recurrent.kernels import recurrent_backward, recurrent_forward
from pallas_kernels.tpu.recurrent.plan import NUMBERS, RecurrentCall, plan_recurrent
from pallas_kernels.varying import vary_alike


class Factors(NamedTuple):
    """Numbers of each token and chunk of `recurrence`; None for the value that changes nothing.

    Attributes:
      start: factor on the state that a token reads.
      end: factor on a token's contribution to the state at the end of its chunk.
      log_decay: the logarithm, at most 0 and finite, of the factor by which the state shrinks before the token, or one
        for each feature. Then start, end and total do not contain decays.
      beta: the strength of the delta rule; None adds outer products without correcting them.
      total: factor by which the state shrinks over a chunk of `CHUNK` tokens.
    """

    start: Float[Array, "B T K"] | None = None
    end: Float[Array, "B T K"] | None = None
    log_decay: Float[Array, "B T K"] | Float[Array, "B T K F"] | None = None
    beta: Float[Array, "B T K"] | None = None
    total: Float[Array, "B chunks K"] | None = None


class Sums(NamedTuple):
    """The results of `recurrence`.

    Attributes:
      total: the weighted sums of the values.
      weight: the sums of the weights, or None.
      key_value, key: the state after the last token.
    """

    total: Float[Array, "B T N V"]
    weight: Float[Array, "B T N"] | None
    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _walk(state, arrays, call: RecurrentCall):
    return recurrent_forward(state, arrays, call)[:2]


def _walk_fwd(state, arrays, call: RecurrentCall):
    sums, last, before = recurrent_forward(state, arrays, call)
    return (sums, last), (before, arrays)


def _walk_bwd(call: RecurrentCall, residuals, grads):
    before, arrays = residuals
    d_sums, d_last = grads
    d_state, made = recurrent_backward(before, d_sums, d_last, arrays, call)
    if "segment" in arrays:
        made["segment"] = jnp.zeros(arrays["segment"].shape, jax.dtypes.float0)
    return d_state, made


_walk.defvjp(_walk_fwd, _walk_bwd)


def recurrence_unsupported(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    *,
    delta: bool = False,
    by_feature: bool = False,
    chip: str | None = None,
) -> str | None:
    """Returns why `recurrence` does not support a call, from shapes and dtypes without tracing it; None if it does."""
    numbers = NUMBERS if delta else NUMBERS[:-1]
    most = {"by_feature": by_feature, "totals": True, "weighs": True, "segments": True}
    return refusal(plan_recurrent)(query, key, value, numbers=numbers, **most, chip=chip)


def recurrence(
    query: Float[Array, "B T N F"],
    key: Float[Array, "B T K F"],
    value: Float[Array, "B T K V"],
    key_value: Float[Array, "B K F V"],
    key_sum: Float[Array, "B K F"] | None,
    factors: Factors,
    *,
    segments: Int[Array, "B T"] | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Sums:
    """Causal linear attention, or the delta rule, chunk by chunk with the state in VMEM.

    Within a chunk of `CHUNK` tokens, with D the decay between two tokens and M = tril(Q K^T * D)::

        total  = start (Q S) + M U
        weight = start (Q z) + M 1
        S      = factor S + (end K)^T U
        z      = factor z + (end K)^T 1

    U is V; with beta it is (I + A)^-1 diag(beta) (V - start K S), where A is the strictly lower part of
    diag(beta) (K K^T * D) (arXiv:2406.06484, section 3.2; with decay arXiv:2412.06464, section 3.3). With decay by
    feature, each feature of Q K^T and K K^T has its own D (arXiv:2312.06635, arXiv:2510.26692), and the kernels
    compute the decays of what tokens read and write.

    Args:
      query: (B, T, N, F), features; key: (B, T, K, F), K divides N; value: (B, T, K, V), all float32 or bfloat16.
        Products are computed in this dtype and summed in float32.
      key_value: S, (B, K, F, V) float32, before the first token. key_sum: z, (B, K, F), or None without weights.
      factors: see `Factors`. They also separate segments: a token that does not read the state has start 0.
      segments: (B, T) ints; a token sees only its own segment. Negative numbers mark padding, which no token sees.
      chip: as in `propagate`.
      interpret: True, or `pltpu.InterpretParams(...)`, runs the kernels on a CPU.

    Returns:
      `Sums` in float32.

    Raises:
      NotImplementedError, ValueError: the dtype or a size is not supported.
    """
    log_decay = factors.log_decay
    by_feature = log_decay is not None and log_decay.ndim == 4
    if by_feature:
        factors = factors._replace(log_decay=None)
    numbers = tuple(name for name in NUMBERS if getattr(factors, name) is not None)
    given = {
        "by_feature": by_feature,
        "totals": factors.total is not None,
        "weighs": key_sum is not None,
        "segments": segments is not None,
    }
    call = plan_recurrent(query, key, value, numbers=numbers, **given, chip=chip)
    call = dataclasses.replace(call, interpret=interpret)
    batch, length, heads, features = query.shape
    kv_heads, value_dim = value.shape[2:]
    padded = call.blocks * call.tokens

    def fill(x: Array, axis: int, size: int, value: float = 0) -> Array:
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, size - x.shape[axis])
        return jnp.pad(x, pads, constant_values=value) if size > x.shape[axis] else x

    def side_by_side(x: Array, size: int) -> Array:
        return fill(fill(x, 3, size), 1, padded).reshape(batch, padded, -1)

    arrays = {
        "query": side_by_side(query, call.features),
        "key": side_by_side(key, call.features),
        "value": side_by_side(value, call.value_dim),
    }
    if by_feature and log_decay is not None:
        arrays["decays"] = side_by_side(log_decay.astype(jnp.float32), call.features)
    if numbers:
        rows = jnp.stack([getattr(factors, name).astype(jnp.float32) for name in numbers], axis=1)
        arrays["numbers"] = fill(fill(jnp.moveaxis(rows, 3, 1), 2, ROWS), 3, padded)
    if factors.total is not None:
        total = fill(factors.total.astype(jnp.float32), 1, padded // CHUNK, 1.0)
        total = jnp.moveaxis(total, 1, 2).reshape(batch, kv_heads, call.blocks, call.chunks, 1)
        arrays["totals"] = jnp.broadcast_to(total, (*total.shape[:-1], call.value_dim))
    if segments is not None:
        arrays["segment"] = fill(segments.astype(jnp.int32), 1, padded, -1)[:, None, None]
    state = {"key_value": fill(fill(key_value, 3, call.value_dim), 2, call.features)}
    if key_sum is not None:
        alike = jnp.broadcast_to(key_sum[:, :, None], (batch, kv_heads, ROWS, features))
        state["key_sum"] = fill(alike, 3, call.features)
    leaves, structure = jax.tree.flatten((state, arrays))
    sums, last = _walk(*jax.tree.unflatten(structure, vary_alike(*leaves)), call)
    total = sums[0].reshape(batch, padded, heads, call.value_dim)[:, :length, :, :value_dim]
    weight = last_key = None
    if key_sum is not None:
        weight = jnp.moveaxis(sums[1].reshape(batch, heads, padded), 1, 2)[:, :length]
        last_key = last["key_sum"][:, :, 0, :features]
    return Sums(total, weight, last["key_value"][:, :, :features, :value_dim], last_key)
