"""The folder of a run is one command's at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from train.engine.errors import UserError
from train.engine.hosts import gather, is_lead
from train.engine.storage import is_remote


@contextlib.contextmanager
def alone_in(workdir: str) -> Iterator[None]:
    """A context in which no other command trains in this folder; two would mix their metrics and checkpoints.

    The first process makes the folder and takes the operating system's advisory lock of it, which ends with the
    process however that ends and leaves no file. Object storage and network file systems without such locks have none,
    nor has a folder that cannot be made, which is reported where it is written to. Folders that were made here and are
    still empty at the end are removed.

    Raises:
      UserError: another command trains there; raised by all processes.
    """
    with contextlib.ExitStack() as stack:
        is_taken = False
        if is_lead() and not is_remote(workdir) and importlib.util.find_spec("fcntl") is not None:
            try:
                _lock(Path(workdir), stack)
            except BlockingIOError:
                is_taken = True
            except OSError:  # it cannot be locked
                pass
        if any(gather(is_taken)):
            raise UserError(f"--workdir: another command is training in {workdir}; expected another folder")
        yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    """Locks the folder until the stack is closed. Raises BlockingIOError where another process has the lock."""
    import fcntl

    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A command that has just failed may have removed the folder that was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                stack.callback(_remove_empty, missing)  # called while the lock is there
                return


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # one is not empty, nor are those above it
        for folder in folders:
            folder.rmdir()
