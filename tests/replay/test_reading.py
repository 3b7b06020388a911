"""What is dropped from a run is in none of its files, and a resumed run goes on with the rest."""

from pathlib import Path

import pytest

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.payloads import encode
from rllib_srl.replay.reading import drop
from rllib_srl.replay.store import StoreError
from rllib_srl.storage.checkpoints import CheckpointError, seal, verify_own
from rllib_srl.storage.seal_key import make_key
from rllib_srl.types import Prompt
from scripts.memory_laws import check_valid
from tests.replay.groups import a_group
from tests.small_buffer import said

CHECKPOINTS = ("checkpoint_000002", "earlier-attempts/1/checkpoint_000004")


def opened(directory: Path) -> SRLReplayBuffer:
    settings = {"admit": None, "min_buffer_size": 1, "capacity": 50, "embedding": "ngram", "selection": "balanced"}
    return SRLReplayBuffer(directory=directory / "replay", run="mine", seed=3, **settings)


@pytest.fixture
def run(tmp_path):
    """Return the directory of a run of four iterations with two checkpoints: `secret-7` is of domain "private"."""
    buffer = opened(tmp_path)
    for now in range(1, 5):
        groups = [a_group(now * 10 + n, now, n) for n in range(3)]
        groups.append(a_group(Prompt("env", "secret-7", "private", ("told in confidence",)), now, 3))
        buffer.add(groups, now, f"x/{now}.add")
        buffer.draw_prompts(4, now, f"x/{now}.draw_prompts")
        buffer.draw_groups(4, now, f"x/{now}.draw_groups")
        if now % 2 == 0:
            checkpoint = tmp_path / CHECKPOINTS[now // 2 - 1]
            (checkpoint / "memory").mkdir(parents=True)
            buffer.snapshot(checkpoint / "memory/snapshot.db")
            seal(checkpoint, {"iteration": now}, make_key())
    buffer.snapshot(tmp_path / "replay/state_0/snapshot.db")  # as `SRL.get_state` does
    buffer.close()
    return tmp_path


def holding(directory: Path, *words: bytes) -> set[str]:
    """Return the files that contain one of the words."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.name for path in files if any(word in path.read_bytes() for word in words)}


def secrets_of(now: int) -> list[bytes]:
    """Return bytes that only the dropped item has: texts, and the tokens of its group."""
    group = a_group(Prompt("env", "secret-7", "private", ("told in confidence",)), now, 3)
    assert group.token_ids_N.tobytes() in bytes(encode(group))
    return [b"secret-7", b"told in confidence", group.token_ids_N.tobytes()]


@pytest.mark.parametrize("way", [["secret-7"], ["--domain", "private"]])
def test_no_byte_of_a_dropped_item_is_left(run, way, capsys):
    words = [word for now in range(1, 5) for word in secrets_of(now)]
    for word in secrets_of(4):
        assert holding(run, word) == {"memory.db", "snapshot.db"}
    text, snapshots = said(capsys, "drop", run, *way), [*(f"{name}/memory" for name in CHECKPOINTS), "replay/state_0"]
    assert holding(run, *words) == set()
    assert text.splitlines() == [
        f"1 item removed from {path}"
        for path in (run / "replay/memory.db", *(run / name / "snapshot.db" for name in snapshots))
    ]
    for name in CHECKPOINTS:
        assert verify_own(run / name) == {"iteration": int(name[-1])}
    buffer = opened(run)
    check_valid(buffer)
    assert len(buffer) == 12 and all(p.domain == "sums" for p in buffer.draw_prompts(12, 9))
    assert buffer.restore(run / CHECKPOINTS[0] / "memory/snapshot.db") == 8 and len(buffer) == 6
    check_valid(buffer)
    buffer.close()


def test_items_that_were_not_visited_lately_are_dropped(run):
    """In the first checkpoint `secret-7` was visited last in iteration 2, in the rest of the files in iteration 4."""
    assert list(drop(run, [], before=3).values()) == [6, 7, 6, 6]
    assert holding(run, *secrets_of(2)[2:]) == set()
    assert holding(run, *secrets_of(4)[2:]) == {"memory.db", "snapshot.db"}


def test_what_cannot_be_dropped_is_named_and_nothing_changes(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "has the prompt id or key 'secret-8'" in said(capsys, "drop", run, "secret-8", status=1)
    assert "nothing to remove; expected an ITEM" in said(capsys, "drop", run, status=1)
    with pytest.raises(ValueError, match="is part of a checkpoint; expected the directory of the checkpoint or its"):
        drop(run / CHECKPOINTS[0] / "memory/snapshot.db", ["secret-7"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    buffer = opened(run)
    with pytest.raises(StoreError, match="in use by process"):
        drop(run, ["secret-7"])
    assert len(buffer) == 13
    buffer.close()
    (run / CHECKPOINTS[1] / "memory/snapshot.db").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=f"{CHECKPOINTS[1]}"):
        drop(run, ["secret-7"])
