"""The forward kernel of propagate: the compressed tokens stay in VMEM while the queries pass through once."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import NT
from pallas_kernels.tpu.core.pipeline import pipelined
from pallas_kernels.tpu.propagate.plan import PropagateCall
from pallas_kernels.varying import result_like


def _forward_kernel(query, key, value, *refs, call: PropagateCall):
    *bias, output = refs
    bias_ref = bias[0] if bias else None
    layout = call.layout
    parts: list[Array] = []

    def score(unit):
        q, _ = call.load(query, unit)
        return (call.biased(arithmetic.dot(key[0], q, NT), bias_ref, unit),)

    def weigh(unit, products):
        return (call.weights(products).astype(query.dtype),)

    def read_out(unit, weights):
        head = unit % layout.packed
        _, rows = call.load(query, unit)
        parts.append(heads.transposed_product(value[0], weights, head, layout))
        if head + 1 == layout.packed:
            output[0, rows, :] = jnp.concatenate(parts, axis=0).T.astype(output.dtype)
            parts.clear()

    pipelined(call.units, score, weigh, read_out)


def propagate_forward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B M L"],
    value: Float[Array, "B M L"],
    bias: Float[Array, "..."] | None,
    call: PropagateCall,
) -> Float[Array, "B T L"]:
    """Returns the output of packed arrays; see `heads.pack`."""
    by_query, by_key = call.specs()
    specs = [] if call.bias is None else [call.bias_spec(call.bias, gradient=False)]
    return pl.pallas_call(
        functools.partial(_forward_kernel, call=call),
        grid=call.grid(query),
        in_specs=[by_query, by_key, by_key, *specs],
        out_specs=by_query,
        out_shape=result_like(query, query.shape, query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name="propagate_forward",
    )(query, key, value, *([] if bias is None else [bias]))
