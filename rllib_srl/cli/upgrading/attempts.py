"""One attempt at an upgrade: an algorithm that evaluates, fills its memory, trains, saves and exports."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import LEARNER_RESULTS

from rllib_srl.algorithm.checkpointing import export_checkpoint
from rllib_srl.algorithm.tracking.choice import TENSORBOARD
from rllib_srl.algorithm.tracking.tracking import tracks
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.cluster import hushed_stderr
from rllib_srl.cli.shared.display import Progress
from rllib_srl.cli.shared.run_log import Iteration, RunLog
from rllib_srl.cli.shared.settings import model_config_of
from rllib_srl.cli.shared.stopping import StopRequest
from rllib_srl.cli.upgrading.order import Order
from rllib_srl.engine.models import local_model
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.storage.checkpoints import MANIFEST, place_for, prune
from rllib_srl.storage.seal_key import make_key
from rllib_srl.types import Prompt

CHECKPOINTS = "checkpoints"  # of all attempts, in the directory of an upgrade
CHUNK = 512  # held-out prompts per call, which has one timeout
NONFINITE = ("num_nonfinite_gradients", "num_nonfinite_logps")  # metrics of the learner
SEED_SLOT = 1 << 20  # first group number when filling the memory; iteration 1 numbers its groups from 0
Answers = dict[str, bool]  # key of a prompt -> whether its greedy answer was right


class Attempt:
    """An algorithm with the settings of one rung of the ladder. Use it in a `with` block, which ends its processes."""

    def __init__(
        self, config: Any, directory: Path, checkpoints: Path, progress: Progress, verbose: bool, trust: bool = False
    ) -> None:
        """Start the algorithm.

        Args:
            config: validated.
            directory: of its logs.
            checkpoints: directory of its checkpoints.
            progress: the progress line to update.
            verbose: keep the output of native code.
            trust: `back_to` accepts checkpoints sealed with any key.
        """
        self._checkpoints, self._progress, self._trust = checkpoints, progress, trust
        directory.mkdir(parents=True, exist_ok=True)
        make_key(config.seal_key_file)
        with hushed_stderr(verbose):
            self.algo = config.build_algo()
        has_scalars = not tracks(config, TENSORBOARD)
        self._log = RunLog(directory, self.algo.report.writer, has_scalars)

    def __enter__(self) -> Attempt:
        """Return the attempt."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop runners and learners."""
        self._log.close()
        self.algo.stop()

    def answers(self, prompts: Iterable[Prompt]) -> Answers:
        """Play held-out prompts greedily; episodes ended by infrastructure are omitted."""
        listed, found = list(prompts), Answers()
        greedy = {"group_size": 1, "temperature": 0.0, "as_groups": False, "num_transcripts": 0}
        for at in range(0, len(listed), CHUNK):
            self._progress.begin(f"playing held-out prompts {at + 1} to {min(at + CHUNK, len(listed))} ...")
            for batch in self.algo.play(listed[at : at + CHUNK], "greedy", **greedy):
                found |= {group.prompt.key: bool(group.is_right_G()[0]) for group in batch.groups}
        return found

    def fill_memory(self, domains: Iterable[str], num_prompts: int) -> int:
        """Fill the memory with groups of old domains, before iteration 1; return the number of groups stored.

        The starting model plays them, so that the memory stores its behaviour and its first grades.
        """
        shares = dict.fromkeys(domains, 1.0)
        prompts = self.algo.source.draw(num_prompts * len(shares), shares)
        self._progress.begin(f"filling the memory with {len(prompts)} prompts of old domains ...")
        groups = [group for batch in self.algo.play(prompts, first_slot=SEED_SLOT) for group in batch.groups]
        visits = self.algo.memory.add(groups, 0)
        self.algo.memory.stats(0)  # also updates the driver's number of items
        self.algo.source.advance(0)  # the stream advances to the new domain
        return len(visits)

    def train(self, last: int, request: StopRequest) -> tuple[list[float], int, str]:
        """Train up to iteration `last`, or until a stop is requested.

        Returns:
            KL to the starting model after each update, the count of non-finite values, and the error that ended
            training, or "".
        """
        kls, num_bad = list[float](), 0
        while self.algo.iteration < last and not request.is_made:
            try:
                result = self.algo.train()
            except WeightSyncError as error:  # the canary fails, for example after a far too large step
                return kls, num_bad, str(error)
            self._log.write(self.algo.iteration, result)
            shown = Iteration.of(result)
            self._progress.iteration(shown.number, shown.reward, shown.tokens_per_s, shown.seconds)
            learned = result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})
            num = sum(float(learned.get(name, math.nan)) for name in NONFINITE)
            if not math.isnan(num):  # nan: no group taught anything, so the weights were not updated
                kls.append(float(learned["kl"]))
                num_bad += int(num)
        return kls, num_bad, ""

    def save(self) -> Path:
        """Write a checkpoint and delete older ones."""
        place = place_for(self._checkpoints, self.algo.iteration)
        if not (place / MANIFEST).is_file():
            self.algo.save_to_path(place)
            prune(self._checkpoints, 1)
        return place

    def back_to(self, checkpoint: Path) -> None:
        """Restore a checkpoint of this upgrade."""
        self._progress.begin(f"restoring {checkpoint.name} ...")
        self.algo.restore_from_path(str(checkpoint), trust=self._trust)


def starting_model(order: Order, target: Path, progress: Progress) -> Path:
    """Return the directory of the model to upgrade; the model of a checkpoint is exported to `target`, once."""
    if order.checkpoint is None:
        return local_model(order.what)
    if target.is_dir():
        return target
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    progress.begin(f"writing the model of {order.checkpoint.name} ...")
    export_checkpoint(order.checkpoint, model_config_of(runs.settings_of(order.checkpoint)), unfinished)
    return unfinished.rename(target)
