"""Writes TensorBoard event files in the caller's thread.

    events = EventFile(directory)
    events.add_scalar("loss", .5, 1)      buffered
    events.flush()                        appended to the file, all of it or nothing

tensorboardX's own writer has a background thread: on a full disk it dies, its queue fills up, and the next
`add_scalar` blocks without a timeout.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from rllib_srl.storage.disk import append


class EventFile:
    """The event file of a directory. Invariant: it holds complete records only."""

    def __init__(self, directory: str | Path) -> None:
        """Write into `directory`; the first flush creates the file."""
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        number = sum(1 for _ in Path(directory).glob(f"{name}*"))  # several files can start within a second
        self._path = Path(directory) / (f"{name}.{number}" if number else name)
        self._records: list[bytes] = []
        self._add(file_version="brain.Event:2")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._add(step=step, summary=summary.scalar(name, value))

    def add_text(self, name: str, text: str, step: int) -> None:
        self._add(step=step, summary=summary.text(name, text))

    def hide_from(self, step: int) -> None:
        """Let TensorBoard hide what is written already of `step` and later ones, as `purge_step` of tensorboardX."""
        self._add(step=step, session_log=SessionLog(status=SessionLog.START))

    def flush(self) -> None:
        """Append what was added; DiskFull: the disk is full, and it is lost."""
        records, self._records = self._records, []
        if records:
            append(self._path, b"".join(records))

    def _add(self, **content: Any) -> None:
        """Add a record of the TFRecord format: length, its checksum, data, its checksum."""
        data = Event(wall_time=time.time(), **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(each)) for each in (length, data)]
        self._records.append(length + checksums[0] + data + checksums[1])
