"""Options of XLA for programs that run on an NVIDIA GPU."""

from __future__ import annotations

import os
import pkgutil

#: Without `triton_gemm`, XLA takes cuBLAS for matrix products outside kernels and has fewer forms to time before the
#: first step. `dynamic_slice_fusion` runs a kernel twice where a scan over layers keeps its result. docs/gpu.md has the
#: times.
_OFF = ("xla_gpu_enable_triton_gemm", "xla_gpu_enable_dynamic_slice_fusion")


def set_gpu_options() -> None:
    """Sets these options where JAX's plugin for NVIDIA GPUs is installed; those in XLA_FLAGS already stay as they are.

    XLA reads them once, when a process first compiles.
    """
    try:
        import jax_plugins
    except ImportError:
        return
    if any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__)):
        flags = os.environ.get("XLA_FLAGS", "")
        missing = [f"--{name}=false" for name in _OFF if name not in flags]
        os.environ["XLA_FLAGS"] = " ".join((flags, *missing)).strip()
