"""A checkpoint is whole or refused; old ones go, unfinished ones are never chosen."""

from __future__ import annotations

import pytest

from rllib_srl import checkpoints


@pytest.fixture
def sealed(tmp_path):
    path = checkpoints.place_for(tmp_path, 3)
    (path / "learner").mkdir(parents=True)
    (path / "learner" / "state.pkl").write_bytes(b"weights" * 1000)
    (path / "algorithm_state.pkl").write_bytes(b"state")
    checkpoints.seal(path)
    return path


def test_a_sealed_checkpoint_verifies(sealed):
    checkpoints.verify_sealed(sealed)
    assert sealed.name == "checkpoint_000003"


def test_one_flipped_byte_is_named(sealed):
    file = sealed / "learner" / "state.pkl"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(checkpoints.CheckpointError, match="is damaged: learner/state.pkl"):
        checkpoints.verify_sealed(sealed)


def test_a_missing_file_is_named(sealed):
    (sealed / "algorithm_state.pkl").unlink()
    with pytest.raises(checkpoints.CheckpointError, match="is damaged: algorithm_state.pkl"):
        checkpoints.verify_sealed(sealed)


def test_an_unfinished_or_absent_checkpoint_says_so(sealed, tmp_path):
    (sealed / checkpoints.MANIFEST).unlink()
    with pytest.raises(checkpoints.CheckpointError, match="its writing did not finish"):
        checkpoints.verify_sealed(sealed)
    with pytest.raises(checkpoints.CheckpointError, match="does not exist"):
        checkpoints.verify_sealed(tmp_path / "nowhere")


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
