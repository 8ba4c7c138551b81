"""Compression and propagation on the TPU kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import pallas_kernels as kernels
from brl_jax.attention.core.by_platform import gradient_of_known
from brl_jax.attention.core.checks import zero_hidden
from brl_jax.attention.core.dispatch import Backend


def compress_backend(**static: Any) -> Backend:
    """The kernel of `compress` for operands (query, key, contrast_key, value, gamma, bias, mask, lengths)."""

    def unsupported(query, key, contrast_key, value, gamma, bias, mask, lengths) -> str | None:
        return kernels.tpu.compress_unsupported(query, key, contrast_key, value, bias=bias, mask=mask)

    def run(query, key, contrast_key, value, gamma, bias, mask, lengths, *, interpret, known=None):
        if mask is not None:
            key, contrast_key, value = zero_hidden(mask, key, contrast_key, value)
        return kernels.tpu.compress(
            query, key, contrast_key, value, gamma=gamma, bias=bias, mask=mask, key_lengths=lengths,
            return_parts=True, known=known and known[1], interpret=interpret, **static,
        )  # fmt: skip

    return Backend("pallas", run, unsupported, gradient=gradient_of_known(run))


def compress_blocks_backend(*, block_size: int, history_size: int, **static: Any) -> Backend:
    """The kernel of `compress_blocks` for operands (query, key, contrast_key, value, gamma, bias, lengths)."""
    sizes: dict[str, Any] = {"block_size": block_size, "history_size": history_size}

    def unsupported(query, key, contrast_key, value, gamma, bias, lengths) -> str | None:
        return kernels.tpu.compress_blocks_unsupported(query, key, contrast_key, value, bias=bias, **sizes)

    def run(query, key, contrast_key, value, gamma, bias, lengths, *, interpret, known=None):
        return kernels.tpu.compress_blocks(
            query, key, contrast_key, value, gamma=gamma, history_lengths=lengths, bias=bias,
            return_parts=True, known=known and known[1], interpret=interpret, **sizes, **static,
        )  # fmt: skip

    return Backend("pallas", run, unsupported, gradient=gradient_of_known(run))


def propagate_backend(**static: Any) -> Backend:
    """The kernel of `propagate` for operands (query, key, value, strength, bias)."""

    def unsupported(query, key, value, strength, bias) -> str | None:
        return kernels.tpu.propagate_unsupported(query, key, value, bias=bias)

    def run(query, key, value, strength, bias, *, interpret):
        strength = strength.astype(jnp.float32)
        return kernels.tpu.propagate(
            query, key, value, strength=strength, bias=bias, interpret=interpret, **static
        )

    return Backend("pallas", run, unsupported)
