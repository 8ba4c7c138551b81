"""The metrics of a run as TensorBoard events: what `--tensorboard` writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECONDS_BETWEEN_FLUSHES = 30.0


class TensorboardLog:
    """An event file of a run.

    tensorboardX's `SummaryWriter` leaves events to a thread. Where a full disk ends that thread, the queue before it
    fills and its caller waits for ever. Its `EventsWriter` below writes at once.

    Args:
      folder: the run's folder.
      last_step: the last step whose events of an earlier process stay.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, last_step: int):
        # Its package takes a while to load, so that commands that write no events don't.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._events = EventsWriter(str(folder / "events"))
        # TensorBoard hides what an earlier file has of this step and those after it.
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=last_step + 1, wall_time=time.time(), session_log=start))
        self._flushed = time.monotonic()

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds the metrics of a step; `line` has "step", and numbers otherwise. Raises OSError where it cannot."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name != "step"
        ]
        event = Event(step=line["step"], wall_time=time.time(), summary=Summary(value=values))
        self._events.write_event(event)
        if time.monotonic() - self._flushed > _SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        """Brings all events to the disk. Raises OSError where it cannot."""
        self._events.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the file. Events for which the disk has no room are lost; metrics.jsonl has their numbers."""
        with contextlib.suppress(OSError):
            self._events.close()
