"""The metrics of a run as TensorBoard events: what `--tensorboard` writes."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


class TensorboardLog:
    """An event file of a run.

    tensorboardX, whose messages these are, leaves events to a thread. Where a full disk ends that thread, the queue
    before it fills and its caller waits for ever; here a write that fails is an error of the caller.

    Args:
      folder: the run's folder. last_step: the last step whose events of an earlier process stay.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, last_step: int):
        # Its package takes a while to load, so that commands that write no events don't.
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115
        first = {"step": last_step + 1, "wall_time": time.time()}
        self._write(Event(file_version="brain.Event:2", **first))
        # TensorBoard hides what an earlier file has of this step and those after it.
        self._write(Event(session_log=SessionLog(status=SessionLog.START), **first))

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds the metrics of a step; `line` has "step", and numbers otherwise. Raises OSError where it cannot."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name != "step"
        ]
        self._write(Event(step=line["step"], wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        """Closes the file, which has everything that was written."""
        self._file.close()

    def _write(self, event: Any) -> None:
        """Adds an event as TensorFlow frames records: its length and its bytes, each before its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        sums = (struct.pack("<I", masked_crc32c(part)) for part in (length, content))
        write_all(self._file, b"".join((length, next(sums), content, next(sums))))


def write_all(file: BinaryIO, content: bytes) -> None:
    """Writes to a file without a buffer, where a disk that becomes full takes a part without an error.

    Raises:
      OSError: not all of it could be written.
    """
    if file.write(content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
