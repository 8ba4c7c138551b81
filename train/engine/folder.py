"""Only one command at a time trains in a folder."""

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
    """Keeps other commands from training in this folder; two would mix their metrics and checkpoints.

    The first process creates the folder and takes the operating system's advisory lock on it. The lock ends with the
    process, however that ends, and leaves no file. Object storage and some network file systems have no such locks.
    If the folder cannot be created, the first write reports it. Folders that were created here and are still empty at
    the end are removed.

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
            except OSError:  # this file system has no locks
                pass
        if any(gather(is_taken)):
            raise UserError(f"--workdir: another command is training in {workdir}; expected another folder")
        yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    """Locks the folder until the stack is closed. Raises BlockingIOError if another process has the lock."""
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
                stack.callback(_remove_empty, missing)  # runs before the lock is released
                return


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # once one is not empty, neither are its parents
        for folder in folders:
            folder.rmdir()
