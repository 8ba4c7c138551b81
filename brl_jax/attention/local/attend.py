"""Local attention of checked arguments: on the backend of the platform that a call is lowered for, or through XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp

from brl_jax.attention.core.by_platform import by_platform, gradient_of_known
from brl_jax.attention.core.checks import pad_features
from brl_jax.attention.core.dispatch import (
    Backend,
    Implementation,
    check_implementation,
    dispatch,
    triton_backend,
)
from brl_jax.attention.local import cudnn, gpu, tpu, xla
from brl_jax.attention.local.patterns import CallArrays, PatternCall


# Compiled on its own, so that calls outside jit are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(call: PatternCall, implementation: Implementation | None, x: CallArrays) -> Any:
    """`local_attention` of checked arguments, with a float32 residual."""
    head_dim, value_dim = x.key.shape[3], x.value.shape[3]
    if value_dim != head_dim:
        query, key, value = (pad_features(each, max(head_dim, value_dim)) for each in x[:3])
        found = attend(call, implementation, x._replace(query=query, key=key, value=value))
        out, *residual = found if call.return_residual else (found,)
        out = out[..., :value_dim]
        return (out, *residual) if call.return_residual else out
    batch, length, heads, _ = x.query.shape
    residual = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
    results = (x.query, residual) if call.return_residual else x.query
    kept = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    plain = functools.partial(xla.plain, call)
    if implementation == "cudnn":  # a request by name accepts more calls than the automatic choice
        cudnn.check(call, x)
        form = cudnn.form(call, x)
        return by_platform(lambda *_: form, x, results=results, kept=kept, plain=plain, needs_devices=True)
    backends = _backends(call)
    if implementation is not None:
        check_implementation(implementation, None, *get_args(Implementation))
        backends["cuda"] = backends["cuda"][1:]
    return dispatch(
        "local_attention",
        implementation,
        backends,
        plain,
        x,
        forms=xla.forms(call),
        results=results,
        kept=kept,
    )


def _backends(call: PatternCall) -> dict[str, list[Backend]]:
    # The kernels compute scores for whole tiles of queries; in a decoding step most of a tile would be empty.
    few = call.num_queries < min(128, call.num_keys)

    def of_call(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(function, call)

    def with_cudnn(x: CallArrays, *, interpret: bool, **known: Any) -> Any:
        return cudnn.attend(call, x, **known)

    return {
        "tpu": [Backend("pallas", of_call(tpu.attend), of_call(tpu.unsupported), few, of_call(tpu.gradient))],
        "cuda": [
            Backend("cudnn", with_cudnn, of_call(cudnn.unsupported), few, gradient_of_known(with_cudnn)),
            triton_backend(of_call(gpu.attend), of_call(gpu.unsupported), few, of_call(gpu.gradient)),
        ],
    }
