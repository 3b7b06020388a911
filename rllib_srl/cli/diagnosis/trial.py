"""A short real run with the settings of the user: gradient and checkpoint.

Everything is written to a directory that is removed afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRLConfig
from rllib_srl.cli.diagnosis.lines import FAILURE, OK, WARNING, Line
from rllib_srl.cli.shared.cluster import hushed_stderr, message_of

MOST_PROMPTS = 4  # of an iteration
NORM = "gradients_default_optimizer_global_norm"


def of_training(config: SRLConfig, verbose: bool) -> Iterator[Line]:
    """Train two small iterations; check gradient, checkpoint and restore."""
    own = _small(config)
    try:
        with _running(own, verbose) as algo:
            first = algo.train()
            yield _gradient(first)
            before, version = _weights(algo), algo.version
            path = algo.save_to_path(Path(algo.logdir) / "doctor")
            algo.train()
            algo.restore_from_path(path)
            after = _weights(algo)
    except Exception as error:  # any: see above
        yield _failed("training", error)
        return
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    if changed or algo.version != version:
        yield Line(FAILURE, "checkpoint", f"restored weights differ from the saved ones: {', '.join(changed[:3])}")
    else:
        yield Line(OK, "checkpoint", f"saved and restored: {len(before)} weight arrays are the same, bit by bit")


def _gradient(result: dict[str, Any]) -> Line:
    played, learned = result["env_runners"], result.get("learners", {}).get(DEFAULT_MODULE_ID, {})
    norm = float(learned.get(NORM, 0.0))
    num_silent, num, live = (played[name] for name in ("num_groups_without_signal", "num_groups", "live_token_share"))
    trained = f"{live:.0%} of the generated tokens are trained on"
    reward = f"mean reward {played['episode_return_mean']:.2f}"
    if not num:
        return Line(FAILURE, "gradient", f"no group was played: {int(played['num_episodes_lost'])} episodes were lost")
    if not np.isfinite(norm) or learned.get("num_nonfinite_gradients"):
        return Line(FAILURE, "gradient", f"not finite, so that the step was skipped; {reward}")
    if norm > 0:
        return Line(OK, "gradient", f"norm {norm:.3g}, {trained}; {reward}")
    if not live > 0:
        why = f"the answers to {num_silent:.0f} of {num:.0f} prompts earned the same"
        return Line(WARNING, "gradient", f"none: {why}; {reward}; try easier or harder questions")
    return Line(FAILURE, "gradient", f"0 although {trained}; {reward}")


def _weights(algo: Any) -> dict[str, np.ndarray]:
    algo.learners.gather(algo.config.sync_timeout_s)  # of shards; does nothing otherwise
    weights = algo.learner_group.get_weights()[DEFAULT_MODULE_ID]
    return {name: np.array(value) for name, value in weights.items()}


def _small(config: SRLConfig) -> SRLConfig:
    """Return a copy with few prompts that leaves nothing behind.

    It runs in this process, unless it needs GPUs, a runner, or learners that hold a shard each.
    """
    own: SRLConfig = config.copy(copy_frozen=False)
    own.callbacks(None)
    changed = {"num_prompts_per_batch": min(config.num_prompts_per_batch, MOST_PROMPTS), "num_transcripts": 0}
    changed |= {"checkpoint_every": 0, "evaluation_interval": None}
    if not (config.num_gpus_per_env_runner or config.num_gpus_per_learner):
        if config.is_sharded:  # learners are processes, and so must be what plays
            changed |= {"num_env_runners": 1}
        else:
            changed |= {"num_env_runners": _num_runners(config), "num_learners": 0}
    for name, value in changed.items():
        setattr(own, name, value)
    return own


def _num_runners(config: SRLConfig) -> int:
    """Return the number of runner processes: one if rollouts go on during updates, else this process plays."""
    return 1 if config.max_lag else 0


@contextmanager
def _running(config: SRLConfig, verbose: bool) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="rllib_srl-") as scratch, hushed_stderr(verbose):
        config.log_directory = scratch
        algo = config.build_algo()
        try:
            yield algo
        finally:
            algo.stop()


def _failed(topic: str, error: Exception) -> Line:
    lines = message_of(error).splitlines()
    return Line(FAILURE, topic, f"the short run failed: {type(error).__name__}: {' '.join(lines[:3])}")
