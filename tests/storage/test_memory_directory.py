"""Where journals lie: in the run's directory, or behind a link on a local disk."""

import pytest

from rllib_srl.storage.memory_directory import MEMORY, memory_directory


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
