"""How RLlib starts the runners of a run: in limited time, and outside Tune spread over the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.rollout.runner_group import RunnerGroup


class StartedRunners(EnvRunnerGroup):
    """RLlib's group of runners, which waits for their engines no longer than `start_timeout_s`.

    Each runner is on the node with the fewest, unless they share a card with the learner or Tune places them.
    """

    def _setup(self, **settings: Any) -> None:
        config = settings["config"]
        needs_one_card = config.colocate or config.weight_transfer == "ipc"
        if not needs_one_card and ray.util.get_current_placement_group() is None:
            self._remote_args["scheduling_strategy"] = "SPREAD"  # also of a runner that Ray restarts
        super()._setup(**settings)

    def add_workers(self, num_workers: int, validate: bool = False) -> None:
        """Start runners, and wait until all have started, whatever `validate`: RLlib would do so without a timeout.

        Raises:
            RunnerFailure: a runner died or did not start in time; all are ended.
            Exception: raised by a runner's constructor.
        """
        super().add_workers(num_workers)
        if not num_workers:
            return
        try:
            RunnerGroup(self).check_started(self._remote_config.start_timeout_s)
        except BaseException:
            for actor in self._worker_manager.actors().values():
                ray.kill(actor)
            raise


@contextmanager
def runners_started_in_time() -> Iterator[None]:
    """Let algorithms that are set up inside the context start their runners as `StartedRunners`.

    RLlib 2.60 has no setting for it: `Algorithm.setup` creates the group by its class's name.
    """
    usual = algorithm.EnvRunnerGroup
    algorithm.EnvRunnerGroup = StartedRunners
    try:
        yield
    finally:
        algorithm.EnvRunnerGroup = usual
