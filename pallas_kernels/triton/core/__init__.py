"""Shared by the GPU kernels: the bridge from JAX to Triton and to its interpreter."""
