"""Programs compiled as for users; the other tests compile with few optimizations (`tests/conftest.py`)."""

from typing import Any

import jax

_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
if jax.__version_info__ < (0, 11):
    _OPTIONS["xla_cpu_use_fusion_emitters"] = True


def optimised(lowered: Any) -> Any:
    """Compiles a lowered program with all optimizations, which decide what arrays are copied."""
    return lowered.compile(_OPTIONS)
