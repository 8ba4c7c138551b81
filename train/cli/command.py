"""Runs a command: what is set for its process, what its errors print, and its exit status."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from brl_jax.attention.core import dispatch
from train.engine.errors import (
    RunError,
    Stopped,
    UserError,
    is_client_error,
    is_memory_shortage,
    one_line,
    reason,
)
from train.engine.metrics import as_started

# <malloc.h> of glibc: parameters of mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# Without `triton_gemm`, XLA takes cuBLAS for matrix products outside kernels and has fewer forms to time before the
# first step. `dynamic_slice_fusion` runs a kernel twice where a scan over layers keeps its result. docs/gpu.md has the
# times.
_OFF = ("xla_gpu_enable_triton_gemm", "xla_gpu_enable_dynamic_slice_fusion")


def start(main: Callable[[Sequence[str]], None], name: str) -> None:
    """How `python -m train.NAME` and `python -m eval.NAME` start: runs a command and exits."""
    status = command(main, name)
    # While the process ends, Python would print a traceback for a Ctrl-C. Background jobs may ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def command(main: Callable[[Sequence[str]], None], name: str) -> int:
    """Runs a command on the program's arguments and returns its exit status.

    0; 2 for a UserError, devices that JAX does not find, or a backend that cannot compute a call; 1 for a RunError, a
    file that cannot be read or written, or too little memory; 128 + the signal's number where a signal stopped it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set for the imports, in train/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_freed_memory()
    set_gpu_options()
    try:
        with _heeding_interrupts():
            main(sys.argv[1:])
    except UserError as error:
        return _report(name, str(error), 2)
    except RunError as error:
        return _report(name, str(error), 1)
    except Stopped as error:
        return _report(name, str(error), 128 + error.signum)
    except KeyboardInterrupt:
        return _report(name, "stopped", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone, and nobody would see an error
        return 1
    except Exception as error:
        if is_memory_shortage(error):
            return _report(name, f"out of memory: {one_line(error)}", 1)
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            return _report(name, f"{reason(error)}{where}", 1)
        if is_client_error(error):
            return _report(name, f"object storage: {one_line(error)}", 1)
        if isinstance(error, NotImplementedError) and _last_module(error) == dispatch.__name__:
            return _report(name, str(error), 2)  # a backend that --implementation names cannot compute a call
        problem = _no_devices()
        if problem is None:
            raise
        return _report(name, problem, 2)
    return 0


def _last_module(error: Exception) -> str:
    """The name of the module that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"]


def _no_devices() -> str | None:
    """What is wrong where JAX finds no devices, as with a misspelt JAX_PLATFORMS; None where it has some."""
    try:
        jax.local_devices()
    except Exception as error:
        # JAX knows some platforms whose package is missing, and then fails without a message.
        why = f": {one_line(error)}" if str(error) else ""
        return f"JAX finds no devices with JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}{why}"
    return None


@contextlib.contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C, or a signal that is treated as one, that arrived where Python ignores exceptions.

    JAX's hook in the garbage collector is such a place. Imports and traces call it so often that it catches a large
    part of all interrupts."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            _thread.start_new_thread(interrupt_again, ())  # raised here, it would be ignored again
        else:
            before(unraisable)

    def interrupt_again() -> None:
        time.sleep(0.01)
        for signum in (signal.SIGINT, signal.SIGTERM):  # a background job ignores SIGINT
            if signal.getsignal(signum) is signal.default_int_handler:
                _thread.interrupt_main(signum)
                break

    # A hook that brl_jax.checkpoints set before this one must stay: abandoned tasks end after the command.
    hook.silences_abandoned_tasks = getattr(before, "silences_abandoned_tasks", False)  # type: ignore[attr-defined]
    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def _report(name: str, message: str, status: int) -> int:
    print(as_started(f"{name}: {message}"), file=sys.stderr, flush=True)
    if status in (1, 2) and jax.distributed.is_initialized():
        # An orderly exit would wait for the other processes, which may be gone or waiting for this one.
        sys.stdout.flush()
        os._exit(status)
    return status


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system. Does nothing with other C libraries.

    On a CPU, JAX allocates a program's temporary arrays again in every call. By default glibc maps
    allocations larger than 32 MiB from the system and unmaps them afterwards, and in threads those larger than their
    heaps of 64 MiB, so that each call pays for every page again: a third of the time of a layer over 8192 tokens.
    Arrays of 1 GiB and more are still returned. Must be called before other threads allocate."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def set_gpu_options() -> None:
    """Sets XLA's options for GPUs where JAX's plugin for NVIDIA GPUs is installed."""
    try:
        import jax_plugins
    except ImportError:
        return
    if any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(jax_plugins.__path__)):
        switch_off(*_OFF)


def switch_off(*names: str) -> None:
    """Sets options of XLA to false, except for those that XLA_FLAGS has already.

    XLA reads them once, when a process first compiles.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}=false" for name in names if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join((flags, *missing)).strip()
