"""A short real run with the settings of the user: replay shares with the stub, gradient and checkpoint with the model.

Everything is written to a directory that is removed afterwards.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRLConfig
from rllib_srl.algorithm.stub_validation import WITHOUT_MODEL
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.cli.diagnosis.lines import FAILURE, OK, WARNING, Line
from rllib_srl.cli.shared.cluster import hushed_stderr, message_of
from rllib_srl.replay.realised import ORIGINS, shares_of

NUM_REPLAYED, NUM_FIRST = 12, 4  # iterations with the stub; of these, the first ones are not counted
MOST_PROMPTS, MOST_REPLAYED = 4, 8  # of an iteration, with the model and with the stub
TOLERANCE = 0.1  # of a realised share
NORM = "gradients_default_optimizer_global_norm"


def of_replay(config: SRLConfig, verbose: bool) -> Iterator[Line]:
    """Compare the realised shares of revisits and reuses with the set ones, in a run without a model."""
    settings = config.replay_settings()
    wanted = {"revisit": settings.revisit_fraction, "reuse": settings.reuse_fraction}
    if not any(wanted.values()):
        text = "revisit and reuse fractions are 0: the memory is never drawn from, and training is plain GRPO"
        yield Line(WARNING, "replay", text)
        return
    own = _without_model(config)
    if faults := faults_of(own):
        yield Line(WARNING, "replay", f"not measured: the stub cannot play these settings ({faults[0]})")
        return
    try:
        with _running(own, verbose) as algo:
            results = [algo.train() for _ in range(NUM_REPLAYED)][NUM_FIRST:]
    except Exception as error:  # any: the run may fail in many ways
        yield _failed("replay", error)
        return
    counts: Counter[str] = Counter()
    for result in results:
        counts.update({f"num_groups_{origin}": result["replay"][f"num_groups_{origin}"] for origin in ORIGINS})
    yield from _shares(wanted, shares_of(counts))


def _shares(wanted: dict[str, Any], realised: dict[str, float]) -> Iterator[Line]:
    for name, share in wanted.items():
        found = realised[f"{name}_share_prompts"]
        if not isinstance(share, int | float):
            yield Line(OK, "replay", f"{name} fraction {share!r}: {found:.0%} realised")
            continue
        text = f"{name} fraction {share:.2f}: {found:.2f} realised in {NUM_REPLAYED - NUM_FIRST} iterations of the stub"
        is_near = abs(found - share) <= TOLERANCE
        status = OK if is_near else FAILURE if not found > 0 else WARNING
        yield Line(status, "replay", text if is_near else f"{text}; expected a share near the fraction")


def of_training(config: SRLConfig, verbose: bool) -> Iterator[Line]:
    """Train two small iterations; check gradient, checkpoint and restore."""
    own = _small(config, MOST_PROMPTS)
    try:
        with _running(own, verbose) as algo:
            first = algo.train()
            yield _gradient(first, config.is_stub)
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


def _gradient(result: dict[str, Any], is_stub: bool) -> Line:
    played, learned = result["env_runners"], result.get("learners", {}).get(DEFAULT_MODULE_ID, {})
    norm = float(learned.get("stub/step_norm" if is_stub else NORM, 0.0))
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


def _small(config: SRLConfig, num_prompts: int) -> SRLConfig:
    """Return a copy with few prompts that leaves nothing behind.

    It runs in this process, unless it needs GPUs, a runner, or learners that hold a shard each.
    """
    own: SRLConfig = config.copy(copy_frozen=False)
    changed = {"num_prompts_per_batch": min(config.num_prompts_per_batch, num_prompts), "num_transcripts": 0}
    changed |= {"checkpoint_every": 0, "evaluation_interval": None, "callbacks": None}
    if not (config.num_gpus_per_env_runner or config.num_gpus_per_learner):
        if config.is_sharded:  # learners are processes, and so must be what plays
            changed |= {"num_env_runners": 1}
        else:
            changed |= {"num_env_runners": _num_runners(config), "num_learners": 0}
    for name, value in changed.items():
        setattr(own, name, value)
    return own


def _without_model(config: SRLConfig) -> SRLConfig:
    own = _small(config, MOST_REPLAYED)
    changed: dict[str, Any] = {"engine": {"name": "stub", "chance": 0.5}, "compute_dtype": "float32"}
    changed |= {"num_env_runners": _num_runners(config), "num_learners": 0}
    changed |= {"num_gpus_per_env_runner": 0, "num_gpus_per_learner": 0}
    changed |= {"replay_min_buffer_size": 1, "weight_transfer": "object_store"}
    for name, value in changed.items():
        setattr(own, name, value)
    for name, value in WITHOUT_MODEL.items():
        is_set = name != "lora_rank" or "lora" in own._aliases  # else by its own name, `lora`
        setattr(own, name if is_set else "lora", value)
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
