"""What differs between local folders and object storage (gs://BUCKET/FOLDER).

An object appears complete or not at all, but it cannot be appended to or renamed, and a request may fail or take long.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from etils import epath

from train.engine.errors import UserError, is_client_error, one_line, reason

P = TypeVar("P", Path, epath.Path)

# Orbax writes checkpoints there, and etils reads and writes files. Its support of s3:// is incomplete.
SCHEMES = ("gs",)
# From the search for credentials to the first answer of a store.
_ANSWER_SECONDS = 20
# How often files that grow are copied to object storage, which takes at most one write of an object a second.
_SECONDS_BETWEEN_COPIES = 30.0


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address, SCHEME://..., and not local."""
    return "://" in os.fspath(path)


def check_address(name: str, path: str) -> None:
    """Raises ValueError for a folder's address that runs cannot be kept at; local paths always work."""
    if path.encode(errors="replace").decode() != path:  # Orbax cannot write there
        raise ValueError(f"{name} must be a path in UTF-8, got {path!r}")
    scheme, mark, rest = path.partition("://")
    if mark and (scheme not in SCHEMES or "/" not in rest.strip("/")):
        raise ValueError(f"{name} must be a local folder or gs://BUCKET/FOLDER, got {path!r}")


def check_local(name: str, path: str | None) -> None:
    """Raises ValueError for an address of object storage, where only a local folder works."""
    if path is not None and is_remote(path):
        raise ValueError(f"{name} must be a local folder, got {path!r}")


def check_client(option: str, path: str | os.PathLike[str]) -> None:
    """Checks that object storage can be reached at all, before a run's folder is used."""
    if not is_remote(path):
        return
    try:
        check_address(option, os.fspath(path))
    except ValueError as error:
        raise UserError(str(error)) from error
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{option}: {os.fspath(path)} needs gcsfs: pip install -e '.[gcs]'")
    import fsspec

    # The client logs tracebacks; when it gives up, we report one line.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # A cached listing would hide what other processes write.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    try:
        wait_for_answer(os.fspath(path))
    except TimeoutError as error:
        raise UserError(f"{option}: {os.fspath(path)} cannot be reached: {error}") from error


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Turns the exceptions of an object store's client into OSErrors, as local files raise them."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or not is_client_error(error):
            raise
        raise OSError(one_line(error)) from error


def wait_for_answer(address: str) -> None:
    """Raises TimeoutError for a store that does not answer soon; its client would try for more than a minute."""
    import fsspec

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # the next request says what the store refuses
            files, path = fsspec.core.url_to_fs(address)
            files.exists(path)
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(_ANSWER_SECONDS):
        raise TimeoutError(f"no answer within {_ANSWER_SECONDS} seconds")


def move(source: epath.Path, target: epath.Path) -> None:
    """Renames a folder. Its new parent need not exist, because object storage has no empty folders."""
    if not is_remote(target):
        source.rename(target)
        return
    import fsspec

    files, _ = fsspec.core.url_to_fs(os.fspath(source))
    files.mv(os.fspath(source), os.fspath(target), recursive=True)


def beside(path: P) -> P:
    """A temporary name next to `path` that no other process uses, to be renamed once it is written."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}"


@contextlib.contextmanager
def writing(*paths: P) -> Iterator[list[P]]:
    """Gives temporary names to local files, and renames them at the end, in this order. An error removes them."""
    asides = [beside(path) for path in paths]
    try:
        yield asides
        for aside, path in zip(asides, paths):
            aside.replace(path)
    finally:
        for aside in asides:
            aside.unlink(missing_ok=True)


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file (text as UTF-8) under a temporary name and renames it; the folder must exist. In object storage a
    file is complete as soon as it appears."""
    content = content.encode() if isinstance(content, str) else content
    with contextlib.nullcontext([path]) if is_remote(path) else writing(path) as [aside]:
        try:
            aside.write_bytes(content)
        except OSError as error:
            error.filename = os.fspath(path)  # a full disk names no file
            raise


def copy_files(source: epath.Path | Path, target: epath.Path | Path, names: Iterable[str]) -> None:
    """Copies files from folder to folder, in order. Each appears complete or not at all."""
    with as_os_errors():
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            final = epath.Path(target / name)
            aside = final if is_remote(target) else beside(final)
            epath.Path(source / name).copy(aside, overwrite=True)
            if aside != final:
                aside.replace(final)


def try_to_write(folder: str | os.PathLike[str]) -> None:
    """Raises OSError if no file can be made in a local folder, or in the first of its parents that exists.

    Permissions alone do not tell: root passes them, and a read-only file system or /proc refuses all the same.
    """
    path = Path(folder).absolute()
    with tempfile.TemporaryFile(dir=next(place for place in (path, *path.parents) if place.exists())):
        pass


def check_writable(option: str, folder: str | os.PathLike[str]) -> None:
    """Raises UserError, with the option, for a local folder in which no file can be made. The folder is not made."""
    if is_remote(folder):
        return
    try:
        try_to_write(folder)
    except OSError as error:
        raise UserError(f"{option}: cannot write under {folder}: {reason(error)}") from error


def user_cache() -> Path:
    """The user's cache folder."""
    return Path.home() / ".cache" / "brl-jax"


def digest(*parts: Any) -> str:
    """The hash, in hexadecimal, of values that JSON can represent; it names what is cached."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Mirror:
    """A local folder whose files are copied to a remote folder, in the background and when `sync` is called.
    Object storage cannot append to a file. If the store fails for a while, the files stay in the local folder and are
    copied as soon as it answers; the run goes on.

    Args:
      log: called with a line when the store begins to fail, and when it answers again.
    """

    def __init__(
        self, remote: epath.Path, log: Callable[[str], None], seconds: float = _SECONDS_BETWEEN_COPIES
    ):
        name = hashlib.sha256(os.fspath(remote).encode()).hexdigest()[:16]
        self.folder = user_cache() / "unsent" / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remote, self._log, self._seconds = remote, log, seconds
        self._sent: dict[str, tuple[int, int]] = {}
        self._failing = False
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._copy_now_and_then, name="mirror", daemon=True)
        self._thread.start()

    def sync(self) -> bool:
        """Copies the files that have changed; returns whether the remote folder has all of them."""
        with self._lock:
            try:
                for path in sorted(self.folder.iterdir()):
                    stat = path.stat()
                    version = stat.st_size, stat.st_mtime_ns
                    if self._sent.get(path.name) != version:
                        copy_files(self.folder, self._remote, [path.name])
                        self._sent[path.name] = version
            except OSError as error:
                if not self._failing:
                    self._log(
                        f"cannot write under {self._remote}: {one_line(error)}; its metrics stay in {self.folder} "
                        "until it answers"
                    )
                self._failing = True
                return False
            if self._failing:
                self._failing = False
                self._log(f"{self._remote} answers again and has all metrics")
            return True

    def close(self) -> None:
        """Copies what is left, and empties the local folder if the store took all of it."""
        self._closed.set()
        self._thread.join()
        if self.sync():
            for path in self.folder.iterdir():
                path.unlink()

    def _copy_now_and_then(self) -> None:
        while not self._closed.wait(self._seconds):
            self.sync()
