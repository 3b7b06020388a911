"""A checkpoint is whole or refused; its user's own or refused; old ones go, unfinished ones are never chosen."""

import json
import os
from types import SimpleNamespace

import pytest

from rllib_srl.algorithm.checkpointing import SavedAlgorithm
from rllib_srl.storage import checkpoints
from rllib_srl.storage.checkpoints import CheckpointError, verify_own, verify_sealed
from rllib_srl.storage.seal_key import make_key


@pytest.fixture
def sealed(tmp_path):
    path = checkpoints.place_for(tmp_path, 3)
    (path / "learner").mkdir(parents=True)
    (path / "learner" / "state.pkl").write_bytes(b"weights" * 1000)
    (path / "algorithm_state.pkl").write_bytes(b"state")
    checkpoints.seal(path, {"version": 3}, make_key(tmp_path / "seal.key"))
    return path


@pytest.fixture(params=["sealed", "own"])
def verify(request, tmp_path):
    return {"sealed": verify_sealed, "own": lambda path: verify_own(path, tmp_path / "seal.key")}[request.param]


def test_a_sealed_checkpoint_verifies_until_a_file_is_missing(sealed, verify):
    assert verify(sealed) == {"version": 3}
    assert sealed.name == "checkpoint_000003"
    (sealed / "algorithm_state.pkl").unlink()
    with pytest.raises(CheckpointError, match="is damaged: algorithm_state.pkl"):
        verify(sealed)


@pytest.mark.parametrize("name", ["algorithm_state.msgpack", "learner/manifest.json", "new/class_and_ctor_args.pkl"])
def test_a_file_that_was_not_sealed_is_refused(sealed, verify, name):
    (sealed / name).parent.mkdir(exist_ok=True)
    (sealed / name).write_bytes(b"code")
    with pytest.raises(CheckpointError, match=f"has files that its manifest.json does not list: {name}; remove them"):
        verify(sealed)


def test_a_link_is_refused_wherever_it_leads(sealed, verify, tmp_path):
    (sealed / "learner").rename(tmp_path / "elsewhere")
    (sealed / "learner").symlink_to(tmp_path / "elsewhere")  # the same files, and whatever is put there later
    with pytest.raises(CheckpointError, match="has files that its manifest.json does not list: learner; remove them"):
        verify(sealed)
    (sealed / "learner").unlink()
    (tmp_path / "elsewhere").rename(sealed / "learner")
    (sealed / "algorithm_state.pkl").rename(tmp_path / "state")
    (sealed / "algorithm_state.pkl").symlink_to(tmp_path / "state")
    with pytest.raises(CheckpointError, match="is damaged: algorithm_state.pkl"):
        verify(sealed)


def test_an_unfinished_or_absent_checkpoint_says_so(sealed, verify, tmp_path):
    (sealed / checkpoints.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="so it is incomplete"):
        verify(sealed)
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": {}}', '{"files": [], "about": {}}', '{"files": {}, "about": {}, "digest": "crc32"}']
)
def test_another_manifest_is_refused(sealed, verify, text):
    (sealed / checkpoints.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json (is damaged|was not written by save_to_path)"):
        verify(sealed)


def changed(path, **parts):
    file = path / checkpoints.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))


@pytest.mark.parametrize(("forge", "reason"), [
    (lambda path, to: checkpoints.seal(path), "is not signed"),
    (lambda path, to: checkpoints.seal(path, key=make_key(to / "2.key")), "was sealed with another key than .*key"),
    (lambda path, to: (to / "seal.key").unlink(), "was sealed with a key, but .*seal.key has no key"),
    (lambda path, to: changed(path, about={"version": 4}), "has a manifest.json that was changed after it was"),
    (lambda path, to: changed(path, files={}), "has a manifest.json that was changed after it was sealed"),
    (lambda path, to: changed(path, signature={}), "was sealed with another key than"),
    (lambda path, to: changed(path, signature="mine"), "is not signed"),
])  # fmt: skip
def test_what_another_one_sealed_is_refused_in_one_line_that_says_how_to_trust_it(sealed, tmp_path, forge, reason):
    forge(sealed, tmp_path)
    with pytest.raises(CheckpointError, match=rf"_000003 {reason}.*--trust-checkpoint .*trust=True") as caught:
        verify_own(sealed, tmp_path / "seal.key")
    assert "\n" not in str(caught.value) and "seal_key_file" in str(caught.value)


def test_whoever_changes_a_file_can_write_its_digest_but_not_the_signature(sealed, tmp_path):
    (sealed / "algorithm_state.pkl").write_bytes(b"code!")
    signature = json.loads((sealed / checkpoints.MANIFEST).read_text())["signature"]
    checkpoints.seal(sealed, {"version": 3})
    changed(sealed, signature=signature)
    assert verify_sealed(sealed) == {"version": 3}
    with pytest.raises(CheckpointError, match="was changed after it was sealed"):
        verify_own(sealed, tmp_path / "seal.key")


@pytest.mark.parametrize("size", [0, 1, checkpoints.CHUNK, 2 * checkpoints.CHUNK + 3])
def test_every_chunk_of_a_file_counts(tmp_path, size):
    place = tmp_path / "one"
    place.mkdir()
    (place / "file").write_bytes(os.urandom(size))
    checkpoints.seal(place)
    verify_sealed(place)
    for at in {0, size // 2, size - 1} if size else ():
        with (place / "file").open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(CheckpointError, match="is damaged: file"):
            verify_sealed(place)
        with (place / "file").open("r+b") as file:
            file.seek(at)
            file.write(byte)
    verify_sealed(place)


def test_pruning_keeps_the_newest_and_ignores_unfinished_ones(tmp_path):
    for iteration in (1, 2, 10, 20):
        path = checkpoints.place_for(tmp_path, iteration)
        path.mkdir()
        (path / "state").write_text(str(iteration))
        if iteration != 20:
            checkpoints.seal(path)
    checkpoints.prune(tmp_path, 2)
    assert [p.name for p in checkpoints.checkpoints_in(tmp_path)] == ["checkpoint_000002", "checkpoint_000010"]
    assert checkpoints.place_for(tmp_path, 20).exists()  # unfinished: another process may be writing it


def test_a_run_keeps_what_it_writes_in_the_directory_of_an_earlier_one_or_after_it_went_back(tmp_path):
    def save(place):
        place.mkdir()
        checkpoints.seal(place)

    algo = SimpleNamespace(_is_due=True, logdir=tmp_path, config=SimpleNamespace(checkpoints_kept=2), save_to_path=save)
    for algo.iteration in (90, 100, 10, 20, 20):
        SavedAlgorithm.save_if_due(algo)
    assert [path.name for path in checkpoints.checkpoints_in(tmp_path)] == ["checkpoint_000010", "checkpoint_000020"]
    aside = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("earlier-attempts/*/*"))
    names = ["1/checkpoint_000090", "1/checkpoint_000100", "2/checkpoint_000020"]
    assert aside == [f"earlier-attempts/{name}" for name in names]
