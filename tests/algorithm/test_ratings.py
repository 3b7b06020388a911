"""People's ratings on the real path: what the learner is given, what a resumed run has, and what a kill cannot lose."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from rllib_srl import SRL
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.people.stored_answers import StoredAnswers
from rllib_srl.replay.payloads import decode
from rllib_srl.types import Group
from tests.algorithm.test_memory_resume import go_on
from tests.algorithm.test_resume import assert_same
from tests.conftest import ROOT
from tests.small_memory import check_memory, go, memory_config

pytestmark = pytest.mark.slow
COUNTS = ("num_applied", "num_changed", "num_unused")


def rate(directory: Path | str, **values: str) -> None:
    """Rate answers by id; a letter for a dot and a slash: g1_0e2="good" is "1.0/2"."""
    directory = Path(directory)
    named = {name[1:].replace("_", ".").replace("e", "/"): value for name, value in values.items()}
    with StoredAnswers.of_run(directory, lambda: str) as answers:
        known = {one.answer_id: one for one in answers.newest_first()}
    with RatingStore(directory / RATINGS) as store:
        for answer_id, value in named.items():
            assert store.rate(known[answer_id], value)


def relative(*rewards: float) -> list[float]:
    """Return the advantages of a group: rewards less their mean, by their standard deviation."""
    return ((np.array(rewards) - np.mean(rewards)) / np.std(rewards, ddof=1)).tolist()


def counts_of(result: dict) -> list[float]:
    return [result["ratings"][name] for name in COUNTS]


@pytest.mark.smoke
def test_ratings_are_the_rewards_of_reused_groups_and_grades(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path, reuse_fraction=0.5)
    config.env_config = {"num_prompts": 400, "pay": 0.0}  # without ratings nothing is ever trained on
    algo = build(config)
    (first,) = go(algo, 1)
    assert counts_of(first.result) == [0, 0, 0] and first.trained == []
    assert not (Path(algo.logdir) / RATINGS).exists()
    played = first.played[0]
    rate(algo.logdir, g1_0e0="good", g1_0e2="4", g1_0e3="bad")
    (second,) = go(algo, 1)
    assert counts_of(second.result) == [3, 0, 0] and second.replay["num_rated"] == 1
    ((origin, group, advantage_G),) = second.trained
    assert (origin, group.group_id, group.rewards_G.tolist()) == ("reuse", "1.0", [1.0, 0.0, 0.75, 0.0])
    assert advantage_G == pytest.approx(relative(1.0, 0.0, 0.75, 0.0), rel=1e-3)
    assert np.array_equal(group.behaviour_logp_N, played.behaviour_logp_N) and group.versions_G2.max() == 0
    rate(algo.logdir, g1_0e0="bad")
    (third,) = go(algo, 1)
    assert counts_of(third.result) == [3, 1, 0]
    ((_, group, advantage_G),) = third.trained
    assert group.rewards_G.tolist() == [0.0, 0.0, 0.75, 0.0]
    assert advantage_G == pytest.approx(relative(0.0, 0.0, 0.75, 0.0), rel=1e-3)


def test_a_rated_answer_that_is_too_old_to_train_is_warned_of(random_llama_dir, tmp_path, ray_here, build, caplog):
    config = memory_config(random_llama_dir, tmp_path, reuse_fraction=0.5, max_age=1)
    config.env_config = {"num_prompts": 400, "pay": 0.0}
    algo = build(config)
    go(algo, 2)
    rate(algo.logdir, g1_0e0="good")
    (third,) = go(algo, 1)
    assert counts_of(third.result) == [1, 0, 0] and third.trained == []
    assert "answers of 1 rated groups are older than replay_max_age = 1 iterations: their ratings grade" in caplog.text


def test_a_file_that_cannot_be_read_ends_no_run(random_llama_dir, tmp_path, ray_here, build, caplog):
    algo = build(memory_config(random_llama_dir, tmp_path))
    go(algo, 1)
    (Path(algo.logdir) / RATINGS).write_bytes(b"damaged" * 1000)
    (one,) = go(algo, 1)
    assert "new ratings are not applied in this iteration: ratings" in caplog.text and counts_of(one.result)[0] == 0


@pytest.mark.parametrize("advantage", ["group", "posterior"])
def test_without_rewards_the_learner_gets_rated_episodes_only(random_llama_dir, tmp_path, ray_here, build, advantage):
    algo = build(memory_config(random_llama_dir, tmp_path, env="Unpaid", reuse_fraction=0.5), advantage=advantage)
    (first,) = go(algo, 1)
    assert first.trained == [] and np.isnan(first.result["env_runners"]["episode_return_mean"])
    rate(algo.logdir, g1_1e1="5", g1_1e3="2")
    (second,) = go(algo, 1)
    ((origin, group, advantage_G),) = second.trained
    whole = first.played[1]
    assert origin == "reuse" and group.rewards_G.tolist() == [1.0, 0.25]
    assert [group.stream(g).tolist() for g in range(2)] == [whole.stream(g).tolist() for g in (1, 3)]
    if advantage == "group":
        assert advantage_G == pytest.approx(relative(1.0, 0.25), rel=1e-3)
    else:  # w0 m = 2 * .5, nothing else is known: b = (1 + the other) / 3, in units of the two themselves
        surprise_G = np.array([1 - 1.25 / 3, 0.25 - 2 / 3])
        assert advantage_G == pytest.approx(surprise_G / np.sqrt(np.mean(surprise_G**2)))
    rate(algo.logdir, g1_1e1="none", g1_1e3="none")
    (third,) = go(algo, 1)
    assert third.trained == []


def test_a_resumed_run_applies_again_what_came_after_its_checkpoint(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction=0.3)
    algo = config.training(num_prompts_per_batch=6, lr=1e-4, advantage="posterior").build_algo()
    first = go_on(algo, 1)
    rate(algo.logdir, g1_0e0="bad", g1_1e1="4")
    go_on(algo, 2)
    algo.save_to_path(tmp_path / "three")
    rate(algo.logdir, g1_0e0="good", g3_2e0="2", g3_2e1="5")
    whole = go_on(algo, 2)
    assert len(first[0]["ids"]) == 6
    state = asdict(algo.memory.process.actor.rated)
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "three")
    assert again.memory.process.actor.rated.num_applied == 2
    assert_same(go_on(again, 2), whole)
    assert vars(again.memory.process.actor.rated) == state
    check_memory(again)
    again.stop()


KILLED = """
import sys, ray
from pathlib import Path
from tests.small_memory import go, memory_config
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
where = Path(sys.argv[2])
algo = memory_config(Path(sys.argv[1]), where / "log").build_algo()
go(algo, 2)
algo.save_to_path(where / "two")
go(algo, 1)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_kill_between_acknowledgement_and_use_loses_nothing(random_llama_dir, tmp_path, ray_here):
    """One answer of before the checkpoint, and one of after it, which the resumed run plays again."""
    command = [sys.executable, "-c", KILLED, str(random_llama_dir), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        assert any(line.strip() == "ready" for line in process.stdout)
        rate(tmp_path / "log", g1_0e0="2", g3_0e1="4")
        process.send_signal(signal.SIGKILL)
    algo = SRL.from_checkpoint(tmp_path / "two")
    results = [one.result for one in go(algo, 2)]
    assert [counts_of(one) for one in results] == [[1, 0, 1], [2, 0, 0]]
    assert rewards_of(algo, "1.0")[0] == 0.25 and rewards_of(algo, "3.0")[1] == 0.75
    check_memory(algo)
    algo.stop()


def rewards_of(algo: SRL, group_id: str) -> list[float]:
    buffer = algo.memory.process.actor
    seqs = buffer.tables.groups["seq"][buffer.tables.groups["size"] > 0].tolist()
    groups: list[Group] = [decode(buffer.store.payload(int(seq))) for seq in seqs]
    (found,) = [group for group in groups if group.group_id == group_id]
    return found.rewards_G.tolist()
