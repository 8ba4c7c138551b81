"""The backward kernel of propagate: the gradients of the compressed tokens are summed in VMEM while the queries pass
through once."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.scores import elementwise_slopes
from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import NN, NT
from pallas_kernels.tpu.core.pipeline import pipelined
from pallas_kernels.tpu.propagate.plan import PropagateCall
from pallas_kernels.varying import result_like


def _backward_kernel(query, key, value, *refs, call: PropagateCall):
    bias, grad_bias = (refs[0], refs[-1]) if call.bias is not None else (None, None)
    grad, grad_query, grad_key, grad_value = refs if call.bias is None else refs[1:-1]
    layout = call.layout
    parts: list[Array] = []

    @pl.when(pl.program_id(2) == 0)
    def _():
        grad_key[...] = jnp.zeros_like(grad_key)
        grad_value[...] = jnp.zeros_like(grad_value)

    def score(unit):
        q, _ = call.load(query, unit)
        g, _ = call.load(grad, unit)
        products = call.biased(arithmetic.dot(key[0], q, NT), bias, unit)
        return products, arithmetic.dot(value[0], g, NT), q, g

    def differentiate(unit, products, grads, q, g):
        weights = call.weights(products)
        if call.score == "softmax":
            exact = query.dtype == jnp.float32
            (changes,) = arithmetic.softmax_changes([weights], [grads], None, exact)
        else:
            changes = elementwise_slopes(call.score, products * call.scale) * grads
        if grad_bias is not None:
            _, rows = call.load(query, unit)
            grad_bias[0, 0, unit % layout.packed, :, rows] = changes
        return weights.astype(query.dtype), changes.astype(query.dtype), q, g

    def read_out(unit, weights, changes, q, g):
        head = unit % layout.packed
        _, rows = call.load(query, unit)
        parts.append(heads.transposed_product(key[0], changes, head, layout) * call.scale)
        if head + 1 == layout.packed:
            grad_query[0, rows, :] = jnp.concatenate(parts, axis=0).T.astype(grad_query.dtype)
            parts.clear()
        grad_value[0] += arithmetic.dot(weights, g, NN)
        grad_key[0] += arithmetic.dot(changes, q, NN) * call.scale

    pipelined(call.units, score, differentiate, read_out)


def propagate_backward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B M L"],
    value: Float[Array, "B M L"],
    bias: Float[Array, "..."] | None,
    grad: Float[Array, "B T L"],
    call: PropagateCall,
) -> tuple[
    Float[Array, "B T L"],
    Float[Array, "B M L"],
    Float[Array, "B M L"],
    Float[Array, "B tiles packed M T"] | None,
]:
    """Returns the gradients of packed arrays (key's and value's are summed in float32 and cast), and of the bias in the
    unit of scaled scores."""
    by_query, by_key = call.specs()
    given, specs, results = [], [], []
    if bias is not None and call.bias is not None:
        batch, tiles, _ = call.grid(query)
        given, specs = [bias], [call.bias_spec(call.bias, gradient) for gradient in (False, True)]
        shape = (batch, tiles, call.layout.packed, call.padded_keys, call.length)
        results = [result_like(query, shape, jnp.float32)]
    grad_query, grad_key, grad_value, *grad_bias = pl.pallas_call(
        functools.partial(_backward_kernel, call=call),
        grid=call.grid(query),
        in_specs=[by_query, by_key, by_key, *specs[:1], by_query],
        out_specs=[by_query, by_key, by_key, *specs[1:]],
        out_shape=[
            result_like(query, query.shape, query.dtype),
            *[result_like(query, key.shape, jnp.float32)] * 2,
            *results,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name="propagate_backward",
    )(query, key, value, *given, grad)
    return (
        grad_query,
        grad_key.astype(key.dtype),
        grad_value.astype(value.dtype),
        grad_bias[0] if grad_bias else None,
    )
