"""A full disk at the start of the memory, in a commit, a checkpoint or a transcript: one error, and nothing is lost."""

import errno
import json
import os
import re
import resource
import sqlite3
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError
from tensorboardX.proto import event_pb2

from rllib_srl.cli import train
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.reading import reading
from rllib_srl.replay.store import holder_of
from rllib_srl.storage import checkpoints
from rllib_srl.storage.disk import DiskFull, append, is_full, writing
from rllib_srl.storage.event_file import EventFile
from scripts.memory_laws import check_valid
from tests.cli.conftest import TINY
from tests.replay.groups import a_group

MESSAGE = r"^disk full: cannot write [^\n]*{} \(\d+ MiB free\)[^\n]*; free some space[^\n]*resume[^\n]*$"


class Tmpfs:
    """A file system in memory, which can be filled up and emptied again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def mounted(cls, path: Path, size: str) -> Iterator["Tmpfs"]:
        path.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path))
        try:
            yield cls(path)
        finally:
            _run("umount", "-l", str(path))

    @staticmethod
    def is_allowed(scratch: Path) -> bool:
        try:
            with Tmpfs.mounted(scratch / "may_i", "64k"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False

    def resize(self, size: str) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.path))

    def fill(self) -> None:
        with (self.path / "filler").open("wb", buffering=0) as stream:
            try:
                while True:
                    stream.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        (self.path / "filler").unlink()


class Limited:
    """Any file system, with a limit to the size of the files that this process writes. Python ignores the signal."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, self._before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def used(path: Path) -> set[str]:
    """Return the names of the files below a directory, but for the filler."""
    found = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return {str(file.relative_to(path)) for file in found} - {"filler"}


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request, tmp_path):
    if request.param == "limit":
        (tmp_path / "disk").mkdir()
        yield Limited(tmp_path / "disk")
    elif Tmpfs.is_allowed(tmp_path):
        with Tmpfs.mounted(tmp_path / "disk", "2m") as mounted:
            yield mounted
    else:
        pytest.skip("no mount; the same tests run with a limit to the size of files")


def fails_on_a_full(disk: Tmpfs | Limited, name: str, action) -> DiskFull:
    """Do something on a full disk: it is refused in one line with the path, and room is made again."""
    disk.fill()
    try:
        with pytest.raises(DiskFull) as caught:
            action()
    finally:
        disk.free()
    assert re.match(MESSAGE.format(name), str(caught.value)), str(caught.value)
    return caught.value


def a_buffer(directory: Path) -> SRLReplayBuffer:
    return SRLReplayBuffer(capacity=50, admit=None, directory=directory, run="one", seed=1)


def test_a_memory_without_room_does_not_start_and_later_does(disk):
    place = disk.path / "replay"
    fails_on_a_full(disk, "memory.db(.lock)?|replay", lambda: a_buffer(place))
    buffer = a_buffer(place)
    assert len(buffer.add([a_group(1)], 1, "1.add")) == 1
    buffer.close()


@pytest.mark.parametrize("call", [
    lambda buffer: buffer.add([a_group(index, 2, index) for index in range(20, 25)], 2, "2.add"),
    lambda buffer: buffer.draw_prompts(2, 2, "2.draw_prompts"),
    lambda buffer: buffer.draw_groups(2, 2, "2.draw_groups"),
])  # fmt: skip
def test_what_was_acknowledged_before_a_full_disk_is_there_after_it(disk, call):
    buffer = a_buffer(disk.path / "replay")
    buffer.add([a_group(index, 1, index) for index in range(20)], 1, "1.add")
    items, groups = len(buffer), buffer.tables.num_groups
    fails_on_a_full(disk, "memory.db", lambda: call(buffer))
    assert (len(buffer), buffer.tables.num_groups) == (items, groups) == (20, 20)
    check_valid(buffer)
    disk.fill()
    buffer.close()  # as a run that ends
    disk.free()
    again = a_buffer(disk.path / "replay")
    assert (len(again), again.tables.num_groups) == (20, 20)
    check_valid(again)
    assert call(again)
    check_valid(again)
    again.close()


def test_a_snapshot_without_room_leaves_nothing_and_a_restore_changes_nothing(disk, tmp_path):
    buffer = a_buffer(disk.path / "replay")
    buffer.add([a_group(index, 1, index) for index in range(20)], 1, "1.add")
    before = used(disk.path)
    fails_on_a_full(disk, "copy.sqlite", lambda: buffer.snapshot(disk.path / "checkpoint" / "copy.sqlite"))
    assert used(disk.path) == before
    buffer.snapshot(tmp_path / "copy.sqlite")
    buffer.add([a_group(30, 2, 30)], 2, "2.add")
    buffer.close()
    buffer = a_buffer(disk.path / "replay")  # without a log that a restore could take the room of
    fails_on_a_full(disk, "memory.db", lambda: buffer.restore(tmp_path / "copy.sqlite"))
    check_valid(buffer)
    assert len(buffer) == 21
    assert buffer.restore(tmp_path / "copy.sqlite") == 1 and len(buffer) == 20
    buffer.close()


def test_lines_are_appended_whole_or_not_at_all(disk):
    path = disk.path / "transcripts.jsonl"
    append(path, "ä first\n" * 30)
    fails_on_a_full(disk, "transcripts.jsonl", lambda: append(path, "second " * 5000 + "\n"))
    assert path.read_text() == "ä first\n" * 30
    append(path, "third\n")
    assert path.read_text() == "ä first\n" * 30 + "third\n"


def events_in(directory: Path) -> list:
    """Return the events of the only event file, as any reader of TFRecords finds them."""
    (path,) = directory.glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_an_event_file_on_a_full_disk_neither_hangs_nor_is_torn(disk):
    writer = EventFile(disk.path)
    writer.add_scalar("loss", 0.5, 1)
    writer.flush()

    def write() -> None:
        for step in range(2000):
            writer.add_scalar("loss", 0.25, 2 + step)
        writer.flush()

    fails_on_a_full(disk, "events.out.tfevents[^ ]*", write)
    writer.add_text("transcript", "right", 3000)
    writer.flush()
    first, *rest = events_in(disk.path)
    assert first.file_version == "brain.Event:2" and [event.step for event in rest] == [1, 3000]
    assert rest[0].summary.value[0].tag == "loss" and rest[0].summary.value[0].simple_value == 0.5


def write_checkpoint(place: Path, num_bytes: int = 100_000) -> None:
    with checkpoints.written_whole(place):
        (place / "learner").mkdir(parents=True, exist_ok=True)
        (place / "learner" / "state.pkl").write_bytes(bytes(num_bytes))
        checkpoints.seal(place)


def test_a_checkpoint_without_room_is_gone_and_the_earlier_ones_stand(disk):
    write_checkpoint(disk.path / "checkpoint_000001")
    error = fails_on_a_full(disk, "checkpoint_000002", lambda: write_checkpoint(disk.path / "checkpoint_000002"))
    assert error.__notes__ == ["the checkpoint before, checkpoint_000001, has 0.1 MiB"]
    assert sorted(path.name for path in disk.path.glob("*point*")) == ["checkpoint_000001"]
    checkpoints.verify_sealed(disk.path / "checkpoint_000001")
    write_checkpoint(disk.path / "checkpoint_000002")
    assert len(checkpoints.checkpoints_in(disk.path)) == 2


def chained() -> ValueError:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        wrapped = ValueError("saving failed")
        wrapped.__cause__ = error
        return wrapped


@pytest.mark.parametrize(("error", "is_so"), [
    (OSError(errno.ENOSPC, "No space left on device"), True),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
    (OSError(errno.EFBIG, "File too large"), True),
    (chained(), True),
    (RayTaskError("save", "Traceback ...", OSError(errno.ENOSPC, "no room")), True),
    (RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'), True),
    (sqlite3.OperationalError("database or disk is full"), True),
    (DiskFull("disk full: x"), True),
    (PermissionError(errno.EACCES, "Permission denied"), False),
    (OSError(errno.EIO, "Input/output error"), False),
    (sqlite3.OperationalError("database is locked"), False),
    (ValueError("full of errors"), False),
])  # fmt: skip
def test_a_full_disk_is_told_from_other_errors(error, is_so, tmp_path):
    assert is_full(error) is is_so
    with pytest.raises(DiskFull if is_so else type(error)), writing(tmp_path / "file"):
        raise error


@pytest.fixture
def tmpfs(tmp_path):
    if not Tmpfs.is_allowed(tmp_path):
        pytest.skip("no mount; the quick tests above run with a limit to the size of files")
    with Tmpfs.mounted(tmp_path / "disk", "64k") as mounted:
        yield mounted


def num_groups_in(run: Path) -> int:
    """Return how many groups the memory of a run holds, once its actor has ended."""
    path, deadline = run / "replay" / "memory.db", time.monotonic() + 60
    while holder_of(path) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    with reading(path) as memory:
        return memory.tables.num_groups


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_fills_its_disk_ends_in_one_line_and_goes_on_once_there_is_room(tmpfs, ray_here, capfd):
    """Without room for its memory; with room for one checkpoint; with room enough."""
    run = tmpfs.path / "run"
    flags = [*TINY, "--num_env_runners", "1", "--checkpoint_every", "1", "--replay_min_buffer_size", "2"]

    def fails(*given: str) -> str:
        capfd.readouterr()
        assert train.main([*flags, *given]) == 1
        said = capfd.readouterr().err
        assert "Traceback" not in said
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        return line

    line = fails("--out", str(run), "--iterations", "30")
    assert "disk full: cannot write" in line and "memory.db" in line
    tmpfs.resize("30m")
    for name in used(run):
        (run / name).unlink()  # what a failed start leaves
    line = fails("--out", str(run), "--iterations", "30")
    assert "disk full: cannot write" in line and "MiB free" in line
    (newest,) = checkpoints.checkpoints_in(run)[-1:]
    assert not [path for path in run.glob("checkpoint_*") if not (path / checkpoints.MANIFEST).is_file()]
    num_stored = num_groups_in(run)
    for file in ("transcripts.jsonl", "metrics.jsonl"):
        for written in (run / file).read_text().splitlines():
            json.loads(written)
    tmpfs.resize("120m")
    last = int(newest.name.removeprefix("checkpoint_")) + 2
    assert train.main(["--resume", str(run), "--iterations", str(last)]) == 0
    assert num_groups_in(run) >= num_stored > 0  # what was stored after the checkpoint came along
    assert checkpoints.checkpoints_in(run)[-1].name == f"checkpoint_{last:06d}"
