"""What the GPU kernels share: the way from JAX to Triton, and its interpreter."""
