"""Runs a command: what its errors print, and its exit status."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from train.cli.allocator import keep_freed_memory
from train.cli.xla import set_gpu_options
from train.engine.errors import RunError, Stopped, UserError, is_client_error, is_memory_shortage, one_line
from train.engine.metrics import as_started


def command(main: Callable[[Sequence[str]], None], name: str) -> int:
    """Runs a command on the program's arguments and returns its exit status.

    0; 2 for a UserError; 1 for a RunError, a file that cannot be read or written, or too little memory; 128 + the
    signal's number where a signal stopped it.
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
            return _report(name, f"{error.strerror or one_line(error)}{where}", 1)
        if not is_client_error(error):
            raise
        return _report(name, f"object storage: {one_line(error)}", 1)
    return 0


@contextlib.contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that arrived where Python ignores exceptions.

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
        _thread.interrupt_main()

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
