"""cuDNN's attention: whether a program can use it, and a form whose gradient does not run it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels

#: What cuDNN returns: its output and the statistics of each row's softmax, which only its backward pass reads.
Found = tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]


def cudnn_unsupported(with_cudnn: Callable[..., Any], *arguments: Any) -> str | None:
    """Why a function that calls cuDNN cannot be compiled for the target GPU, or None."""
    capability = kernels.triton.target_capability()
    if capability < kernels.triton.LEAST_CAPABILITY:
        return f"the GPU must have compute capability 8.0 or more, got {capability / 10}"
    # JAX refuses to trace the call, on any platform, if cuDNN is missing or its version does not support the call.
    try:
        jax.eval_shape(with_cudnn, *arguments)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"cuDNN: {error}"
    return None


def attention(query: Array, key: Array, value: Array, *, known: Found | None = None, **options: Any) -> Found:
    """`jax.nn.dot_product_attention` on cuDNN without a bias; the statistics have no gradient.

    With `known`, the results of an earlier run, only the backward pass does work.
    """
    lengths = {name: options.pop(name, None) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    return _attention(query, key, value, lengths, known, tuple(options.items()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(query, key, value, lengths, known, options):
    return _forward(query, key, value, lengths, known, options)[0]


def _forward(query, key, value, lengths, known, options):
    attend = functools.partial(
        jax.nn.dot_product_attention, **lengths, **dict(options), implementation="cudnn"
    )
    out, pull = jax.vjp(attend, query, key, value)
    # JAX returns the statistics rounded to query's dtype. They are exact among what it keeps for the gradient.
    kept, structure = jax.tree.flatten(pull)
    shape = (query.shape[0], query.shape[2], query.shape[1])
    found = out, next(x for x in kept if x.shape == shape and x.dtype == jnp.float32)
    if known is None:
        return found, pull
    # Nothing reads what cuDNN returned now, so the compiler drops the call.
    kept = [next((old for old, new in zip(known, found) if new is x), x) for x in kept]
    return known, jax.tree.unflatten(structure, kept)


def _backward(options, pull, gradients):
    return *pull(gradients[0]), None, None


_attention.defvjp(_forward, _backward)
