"""How RLlib starts the runners of a run: while the learners start, and outside Tune spread over the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.rollout.env_runner import token_spaces
from rllib_srl.rollout.runner_group import RunnerGroup


class StartedRunners(EnvRunnerGroup):
    """RLlib's group of runners, whose engines start while the driver goes on to start the learners.

    RLlib asks remote runners for their spaces and states at the start, and so would wait for them, without a timeout.
    Here the driver answers; `wait_until_started` waits. Runners that share a card with a learner are waited for before
    the learners start, since an engine measures the free memory of its card.

    Each runner is on the node with the fewest, unless they share a card with the learner or Tune places them.
    """

    def _setup(self, **settings: Any) -> None:
        config = settings["config"]
        needs_one_card = config.colocate or config.weight_transfer == "ipc"
        if not needs_one_card and ray.util.get_current_placement_group() is None:
            self._remote_args["scheduling_strategy"] = "SPREAD"  # also of a runner that Ray restarts
        super()._setup(**settings)

    def add_workers(self, num_workers: int, validate: bool = False) -> None:
        """Start runners, without waiting for them unless they may share a card with a learner, whatever `validate`.

        Raises:
            RunnerFailure: as `wait_until_started`.
        """
        super().add_workers(num_workers)
        shares_card = self._remote_config.colocate or 0 < (self._remote_config.num_gpus_per_env_runner or 0) < 1
        if num_workers and shares_card:
            self.wait_until_started()

    def wait_until_started(self) -> RunnerGroup:
        """Wait until all runners have started, at most `start_timeout_s`; return their proxy.

        Raises:
            RunnerFailure: a runner died or did not start in time; all are ended.
            Exception: raised by a runner's constructor.
        """
        runners = RunnerGroup(self)
        try:
            runners.check_started(self._remote_config.start_timeout_s)
        except BaseException:
            for actor in self._worker_manager.actors().values():
                ray.kill(actor)
            raise
        return runners

    def get_spaces(self) -> dict[str, Any]:
        """Return the spaces of the model's tokens, read from the tokenizer here."""
        return token_spaces(len(load_tokenizer(self._remote_config.model_dir())))

    def sync_env_runner_states(self, **states: Any) -> None:
        """Do nothing: runners have no state of their own."""

    def sync_weights(self, *args: Any, **weights: Any) -> None:
        """Do nothing: `weights/sync.py` sends weights, and verifies them."""


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
