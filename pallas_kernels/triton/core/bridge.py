"""Runs Triton kernels from JAX programs: through jax-triton on CUDA, or in Triton's interpreter for tests on a CPU.

A kernel is a plain Python function in Triton's language. `launch` compiles it for CUDA through jax-triton, whose
versions 0.3 and 0.4 name their arguments differently. If TRITON_INTERPRET=1 is set before Triton is imported, the same
call runs the kernel in Triton's interpreter, on any machine. Float32 and float16 are correct there, but products of
bfloat16 are not (a limitation of Triton).

Triton is imported with a kernel's module, at its first launch. Importing this module or any `api.py` therefore costs
nothing and works without Triton.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

#: Compute capability to compile for without a device to ask.
DEFAULT_CAPABILITY = 90
#: Minimum compute capability: Triton's matrix products need at least Ampere.
LEAST_CAPABILITY = 80
#: Triton 3.4 to 3.7.0 compile wrong gradients on Hopper where a matrix product's result is transposed into another.
LEAST_TRITON = (3, 7, 1)
# From this capability on (GeForce RTX 50, RTX PRO, DGX Spark), a block has 99 KiB of shared memory; a B200's has 227.
_SMALL_MEMORY = 120
# Kernels index an array's elements in int32.
_ADDRESSABLE = 2**31
#: Packages that a launch needs.
_PACKAGES = ("triton", "jax_triton")
_IMPORTING = threading.Lock()


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_interpretation(wanted: bool) -> None:
    """Raises NotImplementedError unless this process interprets (or compiles) kernels as `wanted`."""
    if wanted != interprets():
        raise NotImplementedError(
            "Triton's interpreter is chosen for a whole process: TRITON_INTERPRET=1 must be "
            f"{'set' if wanted else 'unset'} before Triton is imported"
        )


def unsupported() -> str | None:
    """Returns why this installation cannot launch Triton kernels; None if it can."""
    needed = ("triton",) if interprets() else _PACKAGES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed (pip install 'brl-jax[gpu]')"
    if interprets():
        return None
    version = triton_version()
    if version and tuple(int(n) for n in re.findall(r"\d+", version)[:3]) < LEAST_TRITON:
        return f"Triton must be {'.'.join(map(str, LEAST_TRITON))} or newer, got {version}"
    capability = target_capability()
    if capability < LEAST_CAPABILITY:
        return f"the GPU must have compute capability 8.0 or more, got {capability / 10}"
    _import_packages()
    return None


@functools.cache
def _import_packages() -> None:
    """Two threads that import Triton at the same time each see half of it, and programs are compiled from threads."""
    with _IMPORTING, contextlib.suppress(ImportError):  # the launch that needs a broken package says so
        for name in _PACKAGES:
            importlib.import_module(name)


@functools.cache
def triton_version() -> str:
    """The version of the module that is imported, from its source: several packages bring it, and importing is slow."""
    found = importlib.util.find_spec("triton")
    source = Path(found.origin).read_text() if found is not None and found.origin else ""
    version = re.search(r"^__version__ = ['\"](.*?)['\"]", source, re.MULTILINE)
    return version[1] if version else ""


def dtype_unsupported(query: Any) -> str | None:
    """Returns why kernels do not run here on queries of this dtype; None if they do."""
    missing = unsupported()
    if missing is None and query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"query must be float32, bfloat16 or float16, got {query.dtype}"
    return missing


def array_unsupported(query: Any, value: Any, *, most_head_dim: int) -> str | None:
    """Returns why kernels with up to `most_head_dim` features do not support these arrays; None if they do."""
    if (reason := dtype_unsupported(query)) is not None:
        return reason
    if query.shape[-1] > most_head_dim:
        return f"head_dim must be at most {most_head_dim}, got {query.shape[-1]}"
    if value.shape[-1] != query.shape[-1]:
        return f"value must have query's head_dim {query.shape[-1]}, got {value.shape[-1]}"
    return row_unsupported(query=query.shape, value=value.shape)


def row_unsupported(**shapes: tuple[int, ...]) -> str | None:
    """Returns why kernels that address a row in int32 do not support arrays of these shapes; None if they do."""
    for name, shape in shapes.items():
        if (numbers := math.prod(shape[1:])) >= _ADDRESSABLE:
            return f"a row of {name} must have fewer than 2^31 numbers, got {numbers}"
    return None


def refuse(reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason why the kernels do not support a call."""
    if reason is not None:
        raise NotImplementedError(reason)


def target_capability() -> int:
    """Returns ten times the compute capability to compile kernels for.

    It is BRL_JAX_GPU_CAPABILITY (80, 90, 100, ...) if that is set, for example to compile for a device that is not
    there; otherwise the capability of this process's first GPU, or Hopper's without a GPU.
    """
    given = os.environ.get("BRL_JAX_GPU_CAPABILITY")
    if given and not given.isdigit():
        raise ValueError(f"BRL_JAX_GPU_CAPABILITY must be a whole number such as 80 or 90, got {given!r}")
    return int(given) if given else _device_capability()


def tuned_for(capabilities: Iterable[int]) -> int:
    """Returns the largest of a table's capabilities that the target has; for GPUs with less shared memory than a data
    centre's (12.0 and above), the smallest."""
    target = max(target_capability(), LEAST_CAPABILITY)
    target = LEAST_CAPABILITY if target >= _SMALL_MEMORY else target
    return max(capability for capability in capabilities if capability <= target)


def tuned(table: Mapping[tuple, Any], dtype: Any, size: int, float32: Any, interpreted: Any) -> Any:
    """Returns a table's sizes for the target's capability and for `size`, unless the others are for this call."""
    if interprets():
        return interpreted
    if jnp.dtype(dtype).itemsize > 2:
        return float32
    return table[tuned_for(capability for capability, _ in table), size]


@functools.cache
def _device_capability() -> int:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return DEFAULT_CAPABILITY
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else DEFAULT_CAPABILITY


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    tile: Any,
) -> tuple[Array, ...]:
    """Returns the results of `kernel(*arrays, *results, **constants)` over a grid of programs.

    A kernel gets those of the constants that it names.

    Args:
      kernel: a function in Triton's language, not decorated.
      arrays: its inputs, contiguous, in order.
      results: shapes and dtypes of the arrays that it writes; a kernel writes every element.
      grid: number of programs along each axis.
      constants: its `tl.constexpr` arguments by name.
      tile: sizes, with Triton's `num_warps` and `num_stages`.
    """
    results, named = tuple(results), inspect.signature(kernel).parameters
    constants = {name: x for name, x in constants.items() if name in named}
    if interprets():
        run = functools.partial(_interpret, kernel, grid, results, constants)
        out = jax.pure_callback(run, results, *arrays)
    else:
        out = _launch.bind(
            *arrays,
            kernel=kernel,
            results=results,
            grid=grid,
            constants=tuple(constants.items()),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            compute_capability=target_capability(),
        )
    # Under shard_map, results vary over the same mesh axes as the inputs.
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return tuple(lax.pcast(x, tuple(axes), to="varying") for x in out) if axes else tuple(out)


# A launch is our own primitive, which is lowered to jax-triton's for CUDA. A program with jax-triton's primitive could
# not be lowered for several platforms at a time, and with jax-triton 0.4.1, JAX 0.12 fails to drop unused operations
# from it.
_launch = Primitive("gpu_kernel_launch")
_launch.multiple_results = True
_launch.def_abstract_eval(
    lambda *arrays, results, **_: [jax.core.ShapedArray(x.shape, x.dtype) for x in results]
)
_launch.def_impl(lambda *arrays, **static: jax.jit(functools.partial(_launch.bind, **static))(*arrays))


def _lower_for_cuda(context: mlir.LoweringRuleContext, *arrays: Any, **static: Any) -> Any:
    return mlir.lower_fun(functools.partial(_triton_call, **static), multiple_results=True)(context, *arrays)


def _lower_elsewhere(context: mlir.LoweringRuleContext, *arrays: Any, **static: Any) -> Any:
    """Returns zeros if the program is for CUDA and others, which never run them; raises an error otherwise."""
    if "cuda" not in context.module_context.platforms:
        raise NotImplementedError(
            f"the kernel {static['kernel'].__name__} runs only on CUDA, and this call is lowered for "
            f"{' and '.join(context.module_context.platforms)}"
        )
    zeros = lambda *arrays: tuple(jnp.zeros(x.shape, x.dtype) for x in static["results"])  # noqa: E731
    return mlir.lower_fun(zeros, multiple_results=True)(context, *arrays)


mlir.register_lowering(_launch, _lower_for_cuda, platform="cuda")
mlir.register_lowering(_launch, _lower_elsewhere)


def _triton_call(*arrays, kernel, results, grid, constants, num_warps, num_stages, compute_capability):
    import jax_triton

    names = inspect.signature(jax_triton.triton_call).parameters
    results_name = "out_type" if "out_type" in names else "out_shape"
    return jax_triton.triton_call(
        *arrays,
        kernel=_jitted(kernel),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        name=kernel.__name__,
        compute_capability=compute_capability,
        **{results_name: results},
        **dict(constants),
    )


@functools.cache
def _jitted(kernel):
    import triton

    return triton.jit(kernel)


# --- Triton's interpreter ---


# It replaces functions of Triton's language while it runs, and JAX calls back from one thread per device.
_INTERPRETER = threading.Lock()


class _Tensor:
    """The parts of a tensor that Triton's interpreter uses, over the memory of a NumPy array."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        pass

    def new_empty(self, *shape, **options):
        return _Tensor(self.array)

    def set_(self, *source):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return [step // self.array.itemsize for step in self.array.strides]


def _interpret(kernel, grid, results, constants, *arrays):
    from triton.runtime.interpreter import InterpretedFunction

    inputs = [_Tensor(np.array(x, copy=True, order="C")) for x in arrays]
    # NaN, or the largest integer, reveals what a kernel leaves unwritten.
    outputs = [
        np.full(s.shape, np.nan if np.issubdtype(s.dtype, np.floating) else np.iinfo(s.dtype).max, s.dtype)
        for s in results
    ]
    with _INTERPRETER:
        InterpretedFunction(kernel)[grid](*inputs, *map(_Tensor, outputs), **constants)
    return tuple(outputs)


# --- Long batches, and vmap ---

# Maximum number of elements in a launch's largest input; a result may be larger.
_NUMBERS = 2**30
# Maximum number of programs along the third axis of a CUDA grid, which is the batch.
_ROWS = 65_535


def fold_vmap(function: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """Wraps `function` of something static and of arrays with a leading batch axis.

    `jax.vmap` then makes one call with a longer batch, and a batch beyond a launch's limits makes several calls.
    """

    @functools.lru_cache(maxsize=64)
    def of(static: Any) -> Callable[..., tuple[Array, ...]]:
        @custom_vmap
        def batched(*arrays: Array) -> tuple[Array, ...]:
            batch = arrays[0].shape[0]
            row = max(math.prod(x.shape[1:]) for x in arrays)
            rows = max(1, min(_ROWS, _NUMBERS // max(row, 1)))
            if batch <= rows:
                return function(static, *arrays)
            parts = [
                function(static, *(x[first : first + rows] for x in arrays))
                for first in range(0, batch, rows)
            ]
            return tuple(jnp.concatenate(part) for part in zip(*parts))

        @batched.def_vmap
        def rule(size, mapped, *arguments):
            rows = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in zip(arguments, mapped)]
            out = batched(*(x.reshape(-1, *x.shape[2:]) for x in rows))
            return tuple(y.reshape(size, -1, *y.shape[1:]) for y in out), (True,) * len(out)

        return batched

    return lambda static, *arrays: of(static)(*arrays)
