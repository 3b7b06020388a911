"""A run with a memory that is saved and restored goes on draw for draw; what does not fit is refused whole."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from rllib_srl import SRL
from tests.algorithm.test_resume import assert_same
from tests.conftest import ROOT
from tests.small_memory import check_memory, go, memory_config, weights_of

pytestmark = pytest.mark.slow
NEW_PROCESS = """
import pickle, sys, ray
from rllib_srl import SRL
from tests.algorithm.test_memory_resume import go_on
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
algo = SRL.from_checkpoint(sys.argv[1])
pickle.dump(go_on(algo, 2), open(sys.argv[2], "wb"))
algo.stop()
"""
OF_THE_PROCESS = {"busy_s", "num_bytes_in_memory", "num_read_back", "num_spilled"}


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    # Full after its third iteration, so that evictions are drawn too.
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction=0.3, capacity=14, groups_per_item=2)
    return config.training(num_prompts_per_batch=6, lr=1e-4)


def go_on(algo, num_iterations: int) -> list[dict]:
    """Train, and return what each iteration drew, played and left behind, as plain values."""
    done = []
    for _ in range(num_iterations):
        (one,) = go(algo, 1)
        groups = [*one.played, *(meta.ref for meta in one.reused)]
        done.append(
            {
                "iteration": one.result["training_iteration"],
                "prompts": [group.prompt for group in groups],
                "revisits": one.revisits,
                "ids": [(group.group_id, group.origin) for group in groups],
                "tokens": np.concatenate([group.token_ids_N for group in groups]),
                "logps": np.concatenate([group.behaviour_logp_N for group in groups]),
                "visits": [str(visit) for visit in one.visits.values()],
                # But for groups that the run which is continued never had.
                "metrics": {k: repr(v) for k, v in one.replay.items() if k not in OF_THE_PROCESS},
                "weights": weights_of(algo),
            }
        )
    return done


@pytest.fixture
def straight(config, tmp_path):
    """Return a run of 5 iterations without a break, and the checkpoint after its third."""
    algo = config.build_algo()
    first = go_on(algo, 3)
    algo.save_to_path(tmp_path / "three")
    whole = first + go_on(algo, 2)
    assert all(one["revisits"] and len(one["ids"]) > 6 for one in whole[1:])
    yield algo, whole, tmp_path / "three"
    algo.stop()


def test_an_older_checkpoint_goes_into_the_running_algorithm_twice_and_into_a_clone(straight, build, tmp_path):
    """A clone as PBT makes it: the worse trial goes on from a checkpoint of the better one."""
    algo, whole, path = straight
    for _ in range(2):
        num_younger = num_stored(algo)
        algo.restore_from_path(path)
        num_younger -= num_stored(algo)
        assert_same(go_on(algo, 2), whole[3:])
        assert go(algo, 1)[0].result["num_groups_undone"] == num_younger > 3
        check_memory(algo)
    algo.restore_from_path(path)
    other = build(algo.config.copy(copy_frozen=False).debugging(seed=9))
    assert not np.array_equal(go_on(other, 1)[0]["tokens"], whole[0]["tokens"])
    other.restore_from_path(path)
    for at in (3, 4):  # in turns: neither disturbs the other
        assert_same(go_on(algo, 1), [whole[at]])
        assert_same(go_on(other, 1), [whole[at]])
    paths = [one.memory.process.actor.get_state()["path"] for one in (algo, other)]
    assert paths == [str(tmp_path / name / "replay/memory.db") for name in ("log", "log0")]
    check_memory(algo)


def test_a_journal_on_a_local_disk_goes_on_here_and_elsewhere_from_the_snapshot(config, tmp_path):
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    algo = config.replay(local_directory=str(disk)).build_algo()
    go_on(algo, 2)
    algo.save_to_path(tmp_path / "two")
    num_before = num_stored(algo)
    whole = go_on(algo, 2)
    num_younger = num_stored(algo) - num_before
    algo.stop()
    (journals,) = disk.iterdir()
    assert (tmp_path / "log/replay").resolve() == journals and (journals / "memory.db").is_file()
    for place, num_undone in ((None, num_younger), (elsewhere, 0)):
        if place is not None:
            disk.rename(place)  # another machine does not have it
        again = SRL.from_checkpoint(tmp_path / "two")
        assert_same(go_on(again, 2), whole)
        assert go(again, 1)[0].result["num_groups_undone"] == num_undone
        check_memory(again)
        again.stop()
    assert num_younger > 3 and len(list(disk.iterdir())) == 1


def num_stored(algo) -> int:
    """Return how many groups were ever stored."""
    return algo.memory.process.actor.tables.next_group_seq


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_state_in_memory_goes_into_the_running_algorithm(config, build, num_before):
    algo = build(config)
    go_on(algo, num_before)
    earlier, state = algo.get_state(), pickle.loads(pickle.dumps(algo.get_state()))
    assert len(pickle.dumps(state["srl"])) < 20_000  # a path, and no groups
    whole = go_on(algo, 3)
    with pytest.raises(ValueError, match="is gone; expected the newest state that get_state returned"):
        algo.set_state(earlier)
    algo.set_state(state)
    assert_same(go_on(algo, 3), whole)


@pytest.mark.smoke
def test_a_new_process_goes_on_exactly(straight, tmp_path):
    algo, whole, path = straight
    algo.stop()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", NEW_PROCESS, str(path), str(tmp_path / "out.pkl")]
    subprocess.run(command, check=True, timeout=240, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    assert_same(pickle.loads((tmp_path / "out.pkl").read_bytes()), whole[3:])
