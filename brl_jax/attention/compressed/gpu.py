"""Compression and propagation on the GPU kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import pallas_kernels as kernels
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


def compress_blocks_backend(**static: Any) -> Backend:
    """The kernel of `compress_blocks` for operands (query, key, contrast_key, value, gamma, bias, lengths)."""

    def unsupported(query, key, contrast_key, value, gamma, bias, lengths) -> str | None:
        return bias_unsupported(bias) or kernels.triton.compress_unsupported(query, value)

    def run(query, key, contrast_key, value, gamma, bias, lengths, *, known=None):
        if lengths is not None:
            lengths = jnp.broadcast_to(lengths, query.shape[:2])
        return kernels.triton.compress_blocks(
            query,
            key,
            contrast_key,
            value,
            gamma=gamma,
            history_lengths=lengths,
            known=known and known[1],
            **static,
        )

    return triton_backend(run, unsupported, gradient=gradient_of_known(run))


def propagate_backend(**static: Any) -> Backend:
    """The kernel of `propagate` for operands (query, key, value, strength, bias)."""

    def unsupported(query, key, value, strength, bias) -> str | None:
        return bias_unsupported(bias) or kernels.triton.propagate_unsupported(query, key, value)

    def run(query, key, value, strength, bias):
        return kernels.triton.propagate(query, key, value, strength=strength, **static)

    return triton_backend(run, unsupported)
