"""Compression and propagation on the GPU kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import pallas_kernels as kernels
from brl_jax.attention.compressed.xla_blocks import block_windows
from brl_jax.attention.core.by_platform import gradient_of_known
from brl_jax.attention.core.dispatch import Backend, bias_unsupported, triton_backend


def compress_backend(*, axis_name: str | None, **static: Any) -> Backend:
    """The kernel of `compress` for operands (query, key, contrast_key, value, gamma, bias, mask, lengths)."""

    def unsupported(query, key, contrast_key, value, gamma, bias, mask, lengths) -> str | None:
        if mask is not None:
            return "mask must be None, got an array"
        if axis_name is not None:
            return f"axis_name must be None, got {axis_name!r}"
        return bias_unsupported(bias) or kernels.triton.compress_unsupported(query, value)

    def run(query, key, contrast_key, value, gamma, bias, mask, lengths, *, known=None):
        return kernels.triton.compress(
            query, key, contrast_key, value, gamma=gamma, key_lengths=lengths, return_parts=True,
            known=known and known[1], **static,
        )  # fmt: skip

    return triton_backend(run, unsupported, gradient=gradient_of_known(run))


def compress_blocks_backend(*, block_size: int, history_size: int, scale: float, **static: Any) -> Backend:
    """The kernel of `compress_blocks` for operands (query, key, contrast_key, value, gamma, bias, lengths).

    Each block's history becomes a row of the batch.
    """

    def unsupported(query, key, contrast_key, value, gamma, bias, lengths) -> str | None:
        rows = jax.ShapeDtypeStruct((1, *query.shape[2:]), query.dtype)
        return bias_unsupported(bias) or kernels.triton.compress_unsupported(rows, value)

    def run(query, key, contrast_key, value, gamma, bias, lengths, *, known=None):
        batch, blocks = query.shape[:2]
        sizes = {"blocks": blocks, "block_size": block_size, "history_size": history_size}

        def windows(x: Array) -> Array:
            # Reversed, because the kernel counts existing keys from the first one. Their order does not matter.
            return block_windows(x, **sizes)[:, ::-1]

        if lengths is not None:
            lengths = jnp.broadcast_to(lengths, (batch, blocks)).reshape(batch * blocks)
        found = kernels.triton.compress(
            query.reshape(batch * blocks, *query.shape[2:]),
            windows(key),
            None if contrast_key is None else windows(contrast_key),
            windows(value),
            gamma=gamma,
            scale=scale,
            key_lengths=lengths,
            return_parts=True,
            known=jax.tree.map(lambda x: x.reshape(batch * blocks, *x.shape[2:]), known and known[1]),
            **static,
        )
        return jax.tree.map(lambda x: x.reshape(batch, blocks, *x.shape[1:]), found)

    return triton_backend(run, unsupported, gradient=gradient_of_known(run))


def propagate_backend(**static: Any) -> Backend:
    """The kernel of `propagate` for operands (query, key, value, strength, bias)."""

    def unsupported(query, key, value, strength, bias) -> str | None:
        return bias_unsupported(bias) or kernels.triton.propagate_unsupported(query, key, value)

    def run(query, key, value, strength, bias):
        return kernels.triton.propagate(query, key, value, strength=strength, **static)

    return triton_backend(run, unsupported)
