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


def _backward_kernel(query, key, value, grad, grad_query, grad_key, grad_value, *, call: PropagateCall):
    layout = call.layout
    parts: list[Array] = []

    @pl.when(pl.program_id(2) == 0)
    def _():
        grad_key[...] = jnp.zeros_like(grad_key)
        grad_value[...] = jnp.zeros_like(grad_value)

    def score(unit):
        q, _ = call.load(query, unit)
        g, _ = call.load(grad, unit)
        return arithmetic.dot(key[0], q, NT), arithmetic.dot(value[0], g, NT), q, g

    def differentiate(unit, products, grads, q, g):
        weights = call.weights(products)
        if call.score == "softmax":
            exact = query.dtype == jnp.float32
            (changes,) = arithmetic.softmax_changes([weights], [grads], None, exact)
        else:
            changes = elementwise_slopes(call.score, products * call.scale) * grads
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
    grad: Float[Array, "B T L"],
    call: PropagateCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B M L"], Float[Array, "B M L"]]:
    """Gradients of packed arrays; those of key and value in their own dtype, summed in float32."""
    by_query, by_key = call.specs()
    grad_query, grad_key, grad_value = pl.pallas_call(
        functools.partial(_backward_kernel, call=call),
        grid=call.grid(query),
        in_specs=[by_query, by_key, by_key, by_query],
        out_specs=[by_query, by_key, by_key],
        out_shape=[
            result_like(query, query.shape, query.dtype),
            *[result_like(query, key.shape, jnp.float32)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name="propagate_backward",
    )(query, key, value, grad)
    return grad_query, grad_key.astype(key.dtype), grad_value.astype(value.dtype)
