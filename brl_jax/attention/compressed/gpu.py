"""Compression and propagation on the GPU kernels: what they cannot serve, and the calls."""

from __future__ import annotations

from typing import Any

from brl_jax.attention.core.dispatch import Backend, bias_obstacle

# Triton is imported where it is needed: it costs import time.


def compress_backend(query, value, bias, mask, *, axis_name: str | None, **static: Any) -> Backend:
    """The kernel of `compress` for operands (query, key, contrast_key, value, gamma, bias, mask, lengths)."""

    def obstacle() -> str | None:
        from pallas_kernels import gpu

        if mask is not None:
            return "mask must be None, got an array"
        if axis_name is not None:
            return f"axis_name must be None, got {axis_name!r}"
        return bias_obstacle(bias) or gpu.compress_obstacle(query, value)

    def run(query, key, contrast_key, value, gamma, bias, mask, lengths, *, interpret):
        from pallas_kernels import gpu

        gpu.check_interpretation(interpret)
        return gpu.compress(query, key, contrast_key, value, gamma=gamma, key_lengths=lengths, **static)

    return Backend("triton", run, obstacle)


def propagate_backend(query, key, value, bias, **static: Any) -> Backend:
    """The kernel of `propagate` for operands (query, key, value, strength, bias)."""

    def obstacle() -> str | None:
        from pallas_kernels import gpu

        return bias_obstacle(bias) or gpu.propagate_obstacle(query, key, value)

    def run(query, key, value, strength, bias, *, interpret):
        from pallas_kernels import gpu

        gpu.check_interpretation(interpret)
        return gpu.propagate(query, key, value, strength=strength, **static)

    return Backend("triton", run, obstacle)
