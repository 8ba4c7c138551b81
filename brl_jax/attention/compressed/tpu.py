"""Compression and propagation on the TPU kernels: what they cannot serve, and the calls."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from brl_jax.attention.core.dispatch import Backend, bias_obstacle

# Pallas is imported where it is needed: it costs import time.


def compress_backend(query, key, contrast_key, value, bias, mask, **static: Any) -> Backend:
    """The kernel of `compress` for operands (query, key, contrast_key, value, gamma, bias, mask, lengths)."""

    def obstacle() -> str | None:
        from pallas_kernels import tpu

        if mask is not None:
            return "mask must be None, got an array"
        return bias_obstacle(bias) or tpu.compress_obstacle(query, key, contrast_key, value)

    def run(query, key, contrast_key, value, gamma, bias, mask, lengths, *, interpret):
        from pallas_kernels import tpu

        return tpu.compress(
            query, key, contrast_key, value, gamma=gamma, key_lengths=lengths, interpret=interpret, **static
        )

    return Backend("pallas", run, obstacle)


def compress_blocks_backend(
    query, key, contrast_key, value, bias, *, block_size: int, history_size: int, **static: Any
) -> Backend:
    """The kernel of `compress_blocks` for operands (query, key, contrast_key, value, gamma, bias, lengths)."""
    sizes: dict[str, Any] = {"block_size": block_size, "history_size": history_size}

    def obstacle() -> str | None:
        from pallas_kernels import tpu

        return bias_obstacle(bias) or tpu.compress_blocks_obstacle(query, key, contrast_key, value, **sizes)

    def run(query, key, contrast_key, value, gamma, bias, lengths, *, interpret):
        from pallas_kernels import tpu

        return tpu.compress_blocks(
            query, key, contrast_key, value, gamma=gamma, history_lengths=lengths, interpret=interpret,
            **sizes, **static,
        )  # fmt: skip

    return Backend("pallas", run, obstacle)


def propagate_backend(query, key, value, bias, **static: Any) -> Backend:
    """The kernel of `propagate` for operands (query, key, value, strength, bias)."""

    def obstacle() -> str | None:
        from pallas_kernels import tpu

        return bias_obstacle(bias) or tpu.propagate_obstacle(query, key, value)

    def run(query, key, value, strength, bias, *, interpret):
        from pallas_kernels import tpu

        strength = strength.astype(jnp.float32)
        return tpu.propagate(query, key, value, strength=strength, interpret=interpret, **static)

    return Backend("pallas", run, obstacle)
