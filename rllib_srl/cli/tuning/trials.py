"""Runs the trials of a study with Ray Tune, and prints how far they are."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune

from rllib_srl.cli.shared.display import duration
from rllib_srl.studies.study import Study
from rllib_srl.studies.trial import CONFIG, StudyTrial

NO_LOGGERS = "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"  # Tune's logs would be megabytes per trial


def fit(
    configs: Sequence[dict[str, Any]], study: Study, directory: Path, max_failures: int, verbose: bool
) -> tune.ResultGrid:
    """Run one trial per config, Tune's files below `directory`; one that fails goes on from its checkpoint."""

    def named(trial: Any) -> str:
        label = trial.config[CONFIG]["_study"]
        return f"{label['arm']}--{label['seed']}"

    os.environ.setdefault(NO_LOGGERS, "1")
    tuner = tune.Tuner(
        StudyTrial,
        param_space={CONFIG: tune.grid_search(list(configs))},
        tune_config=tune.TuneConfig(trial_name_creator=named, trial_dirname_creator=named),
        run_config=tune.RunConfig(
            name=time.strftime("%Y%m%d-%H%M%S"),
            storage_path=str(directory),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=max_failures),
            callbacks=[Lines(study, len(configs))],
            verbose=int(verbose),
        ),
    )
    return tuner.fit()


class Lines(tune.Callback):
    """Prints a line at the end of each stage of a trial, with the remaining time of all trials."""

    def __init__(self, study: Study, num_trials: int) -> None:
        self._study, self._num, self._start = study, num_trials, time.monotonic()
        self._tokens: dict[str, int] = {}  # by trial
        self._first: dict[str, int] = {}  # that a resumed trial had already

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        about = result["study"]
        name, tokens = f"{about['arm']} seed {about['seed']}", about["num_generated_tokens"]
        self._first.setdefault(name, tokens)
        self._tokens[name] = tokens
        if "accuracy" not in about:
            return
        text = f"{name}: stage {about['stage'] + 1}/{self._study.num_stages}"
        text += f"  average accuracy {about['accuracy']:.3f}  {tokens:,} tokens"
        done = sum(tokens >= self._study.budget for tokens in self._tokens.values())
        print(f"{text}  {done}/{self._num} trials  {self._left()}".rstrip(), flush=True)

    def _left(self) -> str:
        written = sum(self._tokens.values()) - sum(self._first.values())
        ahead = self._num * self._study.budget - sum(min(n, self._study.budget) for n in self._tokens.values())
        seconds = (time.monotonic() - self._start) * ahead / max(written, 1)
        return f"{duration(seconds)} left" if written and ahead else ""
