"""Compression of packed arrays, with its derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tpu.compress.backward import compress_backward
from pallas_kernels.tpu.compress.forward import compress_forward, merge_readers
from pallas_kernels.tpu.compress.plan import CompressCall
from pallas_kernels.tpu.core.score_bias import gradient_like
from pallas_kernels.varying import vary_alike


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def compress_packed(
    bounds: Int[Array, "B #R 1 2"],
    query: Float[Array, "B Q L"],
    keys: list[Float[Array, "B S L"]],
    value: Float[Array, "B S L"],
    bias: Float[Array, "..."] | None,
    known: tuple[Float[Array, "B sets Q L"], Float[Array, "B tiles #R statistics lanes"]] | None,
    call: CompressCall,
) -> tuple[Float[Array, "B sets Q L"], Float[Array, "B tiles #R statistics lanes"]]:
    """Returns the contribution of each set of keys in float32, differentiable in query, keys, value and a bias with
    numbers for each compressed token, and the statistics of `merge_readers`, without gradients. With `known`, the
    results of an earlier call, only the backward pass does work."""
    return _forward(bounds, query, keys, value, bias, known, call)[0]


def _forward(bounds, query, keys, value, bias, known, call: CompressCall):
    if known is None:
        sums, statistics = merge_readers(*compress_forward(bounds, query, keys, value, bias, call), call)
        known = _to_rows(sums, call), statistics
    return known, (bounds, query, keys, value, bias, *known)


def _backward(call: CompressCall, residuals, grads):
    bounds, query, keys, value, bias, out, statistics = residuals
    grad, _ = grads
    if call.axis_name is not None and call.axis_name not in jax.typeof(query).manual_axis_type.varying:
        # Without shard_map's check_vma, each device gets a part of the gradient of the shared result.
        grad = jax.lax.psum(grad, call.axis_name)
    batch, sets, _, lanes = out.shape
    packed, tiles = call.layout.packed, lanes // call.layout.width
    # The softmax's derivative needs each row's sum of weight times change, which is the output times its gradient.
    # Round the gradient as for the kernel.
    grad = grad.astype(query.dtype)
    mean = (
        (out * grad.astype(jnp.float32))
        .reshape(batch, sets, -1, call.queries, tiles, packed, call.layout.head_dim)
        .sum(-1)
    )
    mean = mean.transpose(0, 4, 2, 5, 1, 3).reshape(*statistics.shape[:3], packed, -1)
    bounds, query, value, grad, statistics, *keys = vary_alike(
        bounds, query, value, grad, jnp.concatenate([statistics, mean], axis=3), *keys
    )
    grad_query, grad_keys, grad_value, grad_bias = compress_backward(
        bounds, query, keys, value, bias, grad, statistics, call
    )
    if bias is not None:
        grad_bias = gradient_like(bias, grad_bias, call.scale)
    if not call.own_queries:
        grad_query = grad_query.sum(axis=2, keepdims=True)
    grad_query = _to_rows(grad_query, call)[:, 0].astype(query.dtype)

    covered = _covered(call)

    def over_slots(x):
        if not covered.all():
            x = jnp.where(jnp.asarray(covered)[:, None, :, None], x, jnp.zeros((), x.dtype))
        return x[0] if call.slots == 1 else x.astype(jnp.float32).sum(0).astype(x.dtype)

    grads = grad_query, [over_slots(x) for x in grad_keys], over_slots(grad_value), grad_bias
    return None, *grads, None


compress_packed.defvjp(_forward, _backward)


def _to_rows(x: Float[Array, "B tiles R width lanes"], call: CompressCall) -> Float[Array, "B sets Q L"]:
    """Returns transposed results as (batch, set of keys, readers * queries, tiles * width)."""
    batch, tiles, readers, width, lanes = x.shape
    x = x.reshape(batch, tiles, readers, width, lanes // call.queries, call.queries)
    return x.transpose(0, 4, 2, 5, 1, 3).reshape(batch, -1, readers * call.queries, tiles * width)


def _covered(call: CompressCall) -> Bool[np.ndarray, "slots S"]:
    """Returns which tokens some reader of each slot reads."""
    covered = np.zeros((call.slots, call.length), bool)
    for reader in range(call.readers):
        first = reader * call.stride * call.block
        covered[reader % call.slots, first : first + call.steps * call.block] = True
    return covered
