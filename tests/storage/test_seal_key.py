"""The key that checkpoints are sealed with: made once, for its owner's eyes only, or refused with a remedy."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from rllib_srl.storage.seal_key import VARIABLE, SealKeyError, key_id, key_place, make_key, read_key

WORD = "5e" * 32


def test_the_setting_goes_before_the_variable_and_that_before_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "shared.key"))
    assert key_place("~/mine.key") == tmp_path / "mine.key"
    assert key_place() == tmp_path / "shared.key"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert key_place() == tmp_path / ".config/rllib_srl/seal.key"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert key_place() == tmp_path / "xdg/rllib_srl/seal.key"


def test_it_is_made_once_for_its_owner_alone_and_no_other_file_stays(tmp_path):
    place = tmp_path / "new" / "seal.key"
    assert read_key(place) is None and not place.parent.exists()  # reading makes nothing
    key = make_key(place)
    assert (len(key), make_key(place), read_key(place)) == (64, key, key)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600 and os.listdir(place.parent) == ["seal.key"]
    assert key_id(key) != key_id(make_key(tmp_path / "other.key")) and key_id(key) not in key.decode()


def _make(place: Path, barrier, made) -> None:
    barrier.wait(timeout=60)
    made.put(make_key(place))


def test_processes_that_make_it_at_the_same_time_get_one_key(tmp_path):
    for attempt in range(3):
        place = tmp_path / f"{attempt}.key"
        context = multiprocessing.get_context("fork")
        barrier, made = context.Barrier(8), context.Queue()
        workers = [context.Process(target=_make, args=(place, barrier, made)) for _ in range(8)]
        for worker in workers:
            worker.start()
        keys = {made.get(timeout=60) for _ in workers}
        for worker in workers:
            worker.join(timeout=60)
        assert keys == {read_key(place)}
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_one_that_others_can_read_or_write_is_refused(tmp_path, mode):
    place = tmp_path / "seal.key"
    place.write_text(WORD)
    place.chmod(mode)
    for use in (read_key, make_key):
        with pytest.raises(SealKeyError, match=rf"has mode 0{mode:o}, .*expected 0600: .*chmod 600 {place}$"):
            use(place)
    place.chmod(0o400)  # as a secret is mounted
    assert make_key(place) == WORD.encode()


@pytest.mark.parametrize("content", ["", "\n", "too short"])
def test_what_is_no_key_is_refused(tmp_path, content):
    place = tmp_path / "seal.key"
    place.write_text(content)
    place.chmod(0o600)
    with pytest.raises(SealKeyError, match="expected at least 64: remove it, and a new one is created"):
        make_key(place)


def test_a_place_that_cannot_be_used_says_where_to_put_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SealKeyError, match=r"cannot be .* \(Not a directory\); set another path by seal_key_file"):
        make_key(tmp_path / "file" / "seal.key")
    (tmp_path / "directory").mkdir()
    with pytest.raises(SealKeyError, match=rf"\(Is a directory\); set another path by seal_key_file or \${VARIABLE}"):
        make_key(tmp_path / "directory")

    def read_only(*args: object, **kwargs: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(SealKeyError, match=r"cannot be created \(Read-only file system\); set another path by"):
        make_key(tmp_path / "home" / "seal.key")
