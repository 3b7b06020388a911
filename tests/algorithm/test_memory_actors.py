"""The memory as an actor: killed, silent; nothing acknowledged is missing and nothing is trained twice.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from tests.algorithm.test_kills import running
from tests.small_memory import check_memory, go, memory_config, stored_of, watched, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
BACK_S = 60.0  # for machines that do other things


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path / "log", timeout_s=BACK_S, groups_per_item=99, max_logp_gap=None)
    return config.env_runners(num_env_runners=1, num_transcripts=0).training(lr=1e-4, update_timeout_s=60.0)


def pid_of(algo) -> int:
    """Return the actor's process id, once it is up."""
    deadline = time.monotonic() + BACK_S
    while True:
        try:
            return ray.get(algo.memory.process.actor.__ray_call__.remote(lambda self: os.getpid()), timeout=BACK_S)
        except RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def same(one, other) -> None:
    """Two runs drew, played and learnt the same."""
    for a, b in zip(one, other, strict=True):
        assert [m.prompt for m in a.metas] == [m.prompt for m in b.metas]
        assert [m.group_id for m in a.reused] == [m.group_id for m in b.reused]
        pairs = zip(a.played, b.played, strict=True)
        assert all(np.array_equal(x.token_ids_N, y.token_ids_N) for x, y in pairs)
        assert list(a.visits.values()) == list(b.visits.values())


def check_books(algo, iterations, directory: Path) -> None:
    """Compare stored groups, and how often each was drawn, with what was acknowledged: nothing leaves these runs."""
    check_memory(algo)
    with stored_of(algo, directory) as memory:
        rows = memory.tables.groups[memory.tables.groups.slots()]
        groups = {group.group_id: group for group in (memory.store.group(int(row["seq"])) for row in rows)}
        uses = Counter({memory.store.group(int(row["seq"])).group_id: int(row["uses"]) for row in rows})
    visits = {name: visit for one in iterations for name, visit in one.visits.items()}
    played = {group.group_id: group for one in iterations for group in one.played}
    assert visits.keys() == played.keys() and groups.keys() == {name for name in played if not visits[name].refused}
    for name, group in groups.items():
        assert np.array_equal(group.token_ids_N, played[name].token_ids_N)
        assert np.array_equal(group.behaviour_logp_N, played[name].behaviour_logp_N)
    assert Counter(meta.group_id for one in iterations for meta in one.reused) == +uses


def dies_in(method: str, is_done: bool):
    """Return a function for the actor: its next call of a method ends in death, before or after its commit."""

    def arrange(self):
        call = getattr(self, method)

        def dying(*args, **kwargs):
            if is_done:
                call(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, method, dying)

    return arrange


def test_death_at_every_call_changes_nothing_that_is_drawn_or_learnt(config, tmp_path):
    """Seven iterations, in six of them the actor dies: before and after the commit of each call."""
    deaths = [(method, is_done) for method in ("draw_prompts", "add", "draw_groups") for is_done in (False, True)]
    with running(config.copy(copy_frozen=False)) as algo:
        calm = go(algo, 8)
        calm_weights = weights_of(algo)
    with running(config.training(log_directory=str(tmp_path / "other"))) as algo, watched(algo) as iterations:
        algo.train()
        algo.train()
        for method, is_done in deaths:
            pid = pid_of(algo)
            ray.get(algo.memory.process.actor.__ray_call__.remote(dies_in(method, is_done)))
            algo.train()
            assert pid_of(algo) != pid
        same(iterations, calm)
        assert np.array_equal(weights_of(algo), calm_weights)
        assert iterations[-1].replay["num_restarts"] == 6
        check_books(algo, iterations, tmp_path / "copy")


def test_a_silent_actor_is_replaced(config, tmp_path):
    with running(config.replay(timeout_s=30.0)) as algo, watched(algo) as iterations:
        algo.train()
        pid = pid_of(algo)
        os.kill(pid, signal.SIGSTOP)
        algo.train()
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert iterations[-1].replay["num_restarts"] == 1 and pid_of(algo) != pid
        algo.train()
        check_books(algo, iterations, tmp_path / "copy")


def test_drawn_groups_outlive_the_actor_that_drew_them(config, tmp_path):
    """The actor dies for good between the draw and the fetch: what it answered is trained on all the same."""
    config.learners(num_learners=2).training(num_prompts_per_batch=8)
    with running(config) as algo, watched(algo) as iterations:
        algo.train()
        sample, actor, first_life = algo.memory.draw_groups, algo.memory.process.actor, pid_of(algo)

        def doomed(*args):
            groups = sample(*args)
            process = psutil.Process(first_life)
            process.kill()
            process.wait(60)
            time.sleep(1)  # for Ray to notice; its next life does not know these objects
            return groups

        algo.memory.draw_groups = doomed
        algo.train()
        algo.memory.draw_groups = sample
        one = iterations[-1]
        learnt = one.result["learners"]["default_policy"]
        assert learnt["reuse/num_tokens"] == sum(int(m.num_loss_tokens_G.sum()) for m in one.reused) > 0
        assert len(one.reused) == one.replay["num_groups_reuse"] == 2 and algo.version == 2
        assert pid_of(algo) != first_life and algo.memory.process.actor is actor
        algo.train()
        check_books(algo, iterations, tmp_path / "copy")
