"""One attempt at an upgrade: an algorithm that measures, fills its memory, trains a stretch, saves, exports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import LEARNER_RESULTS

from rllib_srl.checkpoints import MANIFEST, place_for, prune
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.evaluation import RIGHT
from rllib_srl.models import local_model
from rllib_srl.types import Prompt
from scripts import runs
from scripts.cluster import StopRequest, hushed_stderr
from scripts.display import Progress
from scripts.run_log import Iteration, RunLog
from scripts.settings import build_config
from scripts.upgrade_order import Order

CHECKPOINTS = "checkpoints"  # of all attempts, in the directory of an upgrade
CHUNK = 512  # held-out prompts played in one call, which has one deadline
SEED_SLOT = 1 << 20  # group ids of what fills the memory begin there; iteration 1 numbers its own from 0
Answers = dict[str, bool]  # key of a prompt -> whether its greedy answer was right


class Attempt:
    """An algorithm with one setting of the ladder. Use it in a `with` block, which ends its processes."""

    def __init__(self, config: Any, directory: Path, checkpoints: Path, progress: Progress, verbose: bool) -> None:
        """Start it.

        Args:
            config: validated.
            directory: of its logs.
            checkpoints: where its checkpoints go.
            progress: where it shows what it does.
            verbose: leave native chatter on.
        """
        self._checkpoints, self._progress = checkpoints, progress
        directory.mkdir(parents=True, exist_ok=True)
        with hushed_stderr(verbose):
            self.algo = config.build_algo()
        self._log = RunLog(directory)

    def __enter__(self) -> Attempt:
        """Return the attempt."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End runners and learners."""
        self._log.close()
        self.algo.stop()

    def answers(self, prompts: Iterable[Prompt]) -> Answers:
        """Play held-out prompts greedily; one that infrastructure ended is left out."""
        listed, found = list(prompts), Answers()
        greedy = {"group_size": 1, "temperature": 0.0, "as_groups": False, "num_transcripts": 0}
        for at in range(0, len(listed), CHUNK):
            self._progress.begin(f"playing held-out prompts {at + 1} to {min(at + CHUNK, len(listed))} ...")
            for batch in self.algo.play(listed[at : at + CHUNK], "greedy", **greedy):
                found |= {group.prompt.key: bool(group.rewards_G[0] >= RIGHT) for group in batch.groups}
        return found

    def fill_memory(self, domains: Iterable[str], num_prompts: int) -> int:
        """Play prompts of old domains into the memory, before iteration 1; return how many groups it took.

        The starting model plays them, so that what is stored is its own behaviour, and the first grades are its own.
        """
        shares = dict.fromkeys(domains, 1.0)
        prompts = self.algo.source.draw(num_prompts * len(shares), shares)
        self._progress.begin(f"playing {len(prompts)} prompts of old domains into the memory ...")
        groups = [group for batch in self.algo.play(prompts, first_slot=SEED_SLOT) for group in batch.groups]
        visits = self.algo.memory.add(groups, 0)
        self.algo.memory.stats(0)  # which also tells the driver that there are items
        self.algo.source.advance(0)  # the stream goes on to the new domain
        return len(visits)

    def train(self, last: int, request: StopRequest) -> tuple[list[float], int, str]:
        """Train up to iteration `last`, or to a stop that is asked for.

        Returns:
            KL to the starting model after each update, numbers that were not finite, and why training broke, "" if not.
        """
        kls, num_bad = list[float](), 0
        while self.algo.iteration < last and not request.is_made:
            try:
                result = self.algo.train()
            except WeightSyncError as error:  # weights that no engine can follow, as after a step far too large
                return kls, num_bad, str(error)
            self._log.write(self.algo.iteration, result)
            shown = Iteration.of(result)
            self._progress.iteration(shown.number, shown.reward, shown.tokens_per_s, shown.seconds)
            learned = result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})
            if "kl" in learned:
                kls.append(float(learned["kl"]))
            num_bad += int(learned.get("num_nonfinite_gradients", 0) + learned.get("num_nonfinite_logps", 0))
        return kls, num_bad, ""

    def save(self) -> Path:
        """Write a checkpoint, the only one that is kept."""
        place = place_for(self._checkpoints, self.algo.iteration)
        if not (place / MANIFEST).is_file():
            self.algo.save_to_path(place)
            prune(self._checkpoints, 1)
        return place

    def back_to(self, checkpoint: Path) -> None:
        """Take the state of a checkpoint."""
        self._progress.begin(f"back to {checkpoint.name} ...")
        self.algo.restore_from_path(str(checkpoint))


def starting_model(order: Order, target: Path, progress: Progress, verbose: bool) -> Path:
    """Return the directory of the model to be upgraded; that of a checkpoint is written into `target`, once."""
    if order.checkpoint is None:
        return local_model(order.what)
    if target.is_dir():
        return target
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    progress.begin(f"writing the model of {order.checkpoint.name} ...")
    with tempfile.TemporaryDirectory(prefix="rllib_srl-") as scratch:
        earlier = runs.settings_of(order.checkpoint)
        config = build_config({**earlier, "log_directory": scratch, "checkpoint_every": 0})
        config.validate()
        with hushed_stderr(verbose):
            algo = config.build_algo()
        try:
            algo.restore_from_path(str(order.checkpoint))
            return algo.export_to_huggingface(unfinished).rename(target)
        finally:
            algo.stop()
