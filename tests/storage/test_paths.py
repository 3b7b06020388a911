"""Where a run may write: a path of this machine, not a folder named like a URI; its memory, behind a link."""

from pathlib import Path

import pytest

from rllib_srl import SRLConfig
from rllib_srl.storage.paths import MEMORY, local_path, memory_directory


@pytest.mark.parametrize(("text", "path"), [
    ("results/first", "results/first"),
    ("file:///data/a%20b", "/data/a b"),
    ("file://localhost/data", "/data"),
    ("FILE:/data", "/data"),
    ("c:/data", "c:/data"),  # a drive
    ("a:b/c", "a:b/c"),
    ("run:/x", None),
    ("s3://bucket/run", None),
    ("file://server/share", None),
    (Path("s3://bucket/run"), None),  # "s3:/bucket/run" by now
])  # fmt: skip
def test_a_uri_is_no_path(text: str, path: str | None) -> None:
    if path is not None:
        assert local_path(text) == Path(path)
        return
    with pytest.raises(ValueError, match="is a URI; expected a path on this machine, such as that of a mounted bucket"):
        local_path(text)


@pytest.mark.parametrize(("directory", "message"), [
    ("s3://bucket/run", "log_directory = 's3://bucket/run'; s3://bucket/run is a URI; expected a path"),
    (7, "log_directory = 7; expected a path, or None"),
])  # fmt: skip
def test_a_run_does_not_log_into_a_uri(tmp_path: Path, monkeypatch, directory, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    config = SRLConfig().environment("compare").training(log_directory=directory)
    with pytest.raises(ValueError) as caught:
        config.validate()
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def run(tmp_path):
    return tmp_path / "out" / "run"


def test_without_a_local_directory_they_lie_in_the_run_and_nothing_is_made(run):
    assert memory_directory(run, None) == run / "replay"
    assert not run.exists()


def test_a_local_directory_is_private_and_found_again_by_the_link(run, tmp_path):
    local = tmp_path / "disk" / "srl"
    first = memory_directory(run, str(local))
    assert (first.parent, (run / MEMORY).resolve()) == (local, first)
    assert first.stat().st_mode & 0o777 == 0o700
    (first / "memory.db").touch()
    assert memory_directory(run, str(local)) == first and (run / "replay/memory.db").is_file()
    assert [path.name for path in run.iterdir()] == [MEMORY]


def test_on_another_machine_the_link_is_replaced(run, tmp_path):
    local = str(tmp_path / "disk")
    first = memory_directory(run, local)
    first.rmdir()
    second = memory_directory(run, local)
    assert second != first and second.is_dir() and (run / MEMORY).resolve() == second


def test_another_local_directory_is_used_and_the_earlier_one_kept(run, tmp_path):
    first = memory_directory(run, str(tmp_path / "disk"))
    second = memory_directory(run, str(tmp_path / "other"))
    assert (second.parent, (run / MEMORY).resolve()) == (tmp_path / "other", second)
    assert first.is_dir()
