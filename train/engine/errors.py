"""The errors of a command, which its user sees as one line on stderr and an exit status."""

from __future__ import annotations

import errno
import lzma
import re
import zlib

#: What reading a missing, truncated or damaged file raises, compressed or not.
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class UserError(ValueError):
    """Input that a user can correct. The message is one line: the option, what it got and what is expected.

    Whatever reads an option, a file or a data set in train and eval raises it where it cannot; docstrings name it where
    there is more to say.
    """


class RunError(RuntimeError):
    """A run that cannot continue. The message is one line: the reason and the last good checkpoint."""


def is_memory_shortage(error: BaseException) -> bool:
    """Whether an exception says that the process or its devices are out of memory."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = (
        "RESOURCE_EXHAUSTED",
        "Out of memory",
        "bad_alloc",
        "can't start new thread",
        "Cannot allocate memory",
    )
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


# The clients of object stores raise their own exceptions as well as OSError.
_CLIENTS = ("aiohttp", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs")


def is_client_error(error: BaseException) -> bool:
    """Whether an exception comes from the client of an object store."""
    return type(error).__module__.partition(".")[0] in _CLIENTS


class Stopped(Exception):
    """A run that a signal stopped, after saving. The message says how to resume it.

    signum: the signal's number.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception's first cause in one line of at most `limit` characters: its beginning and its end, or its
    class's name if it has no message."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split())) or type(error).__name__
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def reason(error: BaseException) -> str:
    """Why a file cannot be read or written, for a message that names it already."""
    return getattr(error, "strerror", None) or one_line(error)
