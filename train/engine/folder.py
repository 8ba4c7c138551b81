"""Only one command at a time trains in a folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from train.engine.errors import UserError
from train.engine.hosts import gather, is_lead
from train.engine.storage import check_writable, is_remote


@contextlib.contextmanager
def alone_in(workdir: str) -> Iterator[None]:
    """Keeps other commands from training in this folder; two would mix their metrics and checkpoints.

    The first process creates the folder and takes the operating system's advisory lock on it. The lock ends with the
    process, however that ends, and leaves no file. Object storage and some network file systems have no such locks.
    Folders that were created here and are still empty at the end are removed.

    Raises:
      UserError: another command trains there, or nothing can be written there; raised by all processes.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        if is_lead() and not is_remote(workdir):
            try:
                check_writable("--workdir", workdir)
                if importlib.util.find_spec("fcntl") is not None:
                    _lock(Path(workdir), stack)
            except UserError as error:
                problem = str(error)
            except BlockingIOError:
                problem = f"--workdir: another command is training in {workdir}; expected another folder"
            except OSError:  # this file system has no locks
                pass
        problem = next(filter(None, gather(problem)), None)
        if problem is not None:
            raise UserError(problem)
        yield


def _lock(folder: Path, stack: contextlib.ExitStack) -> None:
    """Locks the folder until the stack is closed. Raises BlockingIOError if another process has the lock."""
    import fcntl

    missing = _missing(folder)
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


@contextlib.contextmanager
def leaving_no_empty(folder: Path) -> Iterator[None]:
    """Removes the folder, its new parents and the folders in it at the end, if it is new and they are empty."""
    missing = _missing(folder)
    try:
        yield
    finally:
        _remove_empty(missing)


def _missing(folder: Path) -> list[Path]:
    """The folder and its parents, those that do not exist."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    inside = [Path(place) for place, _, _ in os.walk(folders[0], topdown=False)] if folders else []
    for place in (*inside, *folders[1:]):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(place)
