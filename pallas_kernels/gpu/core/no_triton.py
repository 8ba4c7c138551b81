"""Stands in for Triton's language where Triton is not installed, so that kernels can be imported and read."""

constexpr = object()


def jit(function):
    return function
