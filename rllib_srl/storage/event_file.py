"""Writes TensorBoard event files in the caller's thread.

    writer = EventFile(directory)
    writer.add_scalar("loss", .5, 1)      buffered
    writer.flush()                        appended to the file, all of it or nothing

tensorboardX writes in a background thread. On a full disk that thread dies with a traceback, its queue fills up, and
the next `add_scalar` blocks without a timeout.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.writer import FileWriter

from rllib_srl.storage.disk import append


class EventFile(SummaryWriter):
    """A `SummaryWriter` for one directory. Invariant: the file holds complete records only."""

    def __init__(self, directory: str | Path) -> None:
        """Write into `directory`; the first flush creates the file."""
        super().__init__(str(directory))

    all_writers: dict[str, FileWriter] | None
    file_writer: FileWriter | None

    def _get_file_writer(self) -> FileWriter:
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _Writer(Path(self.logdir))
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer


class _Writer(FileWriter):
    """The `FileWriter` of a `SummaryWriter`."""

    def __init__(self, directory: Path) -> None:
        self.event_writer = _Events(directory)
        self._default_metadata: dict[str, Any] = {}


class _Events:
    """Buffer of event records. Invariant: a record is written once, or lost if `flush` raises."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        number = sum(1 for _ in directory.glob(f"{name}*"))  # several files can start within a second
        self._path = directory / (f"{name}.{number}" if number else name)
        first = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records = [_record(first.SerializeToString())]

    def get_logdir(self) -> str:
        return str(self._directory)

    def add_event(self, event: Any) -> None:
        self._records.append(_record(event.SerializeToString()))

    def flush(self) -> None:
        records, self._records = self._records, []
        if records:
            append(self._path, b"".join(records))

    def close(self) -> None:
        self.flush()

    def reopen(self) -> None:
        pass


def _record(data: bytes) -> bytes:
    """Return a record of the TFRecord format: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))])
