"""Start the algorithm of a run, and train it with progress and logged metrics; `srl train` and `srl quickstart` do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_srl.cli import supervisor
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.cluster import hushed_stderr, start_ray
from rllib_srl.cli.shared.display import Progress, showing_progress, with_interval
from rllib_srl.cli.shared.run_log import RunLog, keep_until
from rllib_srl.cli.shared.runs import METRICS
from rllib_srl.cli.shared.stopping import ENDING, StopRequest
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.storage.paths import TRANSCRIPTS
from rllib_srl.storage.seal_key import make_key

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig


@contextmanager
def built(config: SRLConfig, verbose: bool, progress: Progress) -> Iterator[Any]:
    """Start Ray and the algorithm of a config, and yield it; stop it at the end."""
    progress.begin("starting Ray ...")
    start_ray(verbose)
    with hushed_stderr(verbose):
        algo = config.build_algo()
    try:
        yield algo
    finally:
        progress.end()
        algo.stop()


@contextmanager
def started(
    config: SRLConfig, plan: runs.RunPlan, last: int, verbose: bool, *words: object
) -> Iterator[tuple[Any, Progress]]:
    """Start Ray and the algorithm of a run, and yield it with the progress up to iteration `last`; stop it at the end.

    An error says how to resume the run, with additional `words`; a run that fails before an iteration has finished
    leaves no files.
    """
    with showing_progress(last) as progress, runs.gone_if_it_fails(plan.directory, supervisor.starts_again):
        make_key(config.seal_key_file)  # of the checkpoint at the end or at Ctrl-C, even with checkpoint_every = 0
        with built(config, verbose, progress) as algo:
            try:
                if plan.checkpoint is not None:
                    _resume(algo, plan, plan.checkpoint, progress)
                runs.write_settings(plan.directory, plan.values, algo)
                ENDING.last_words = partial(runs.how_to_resume, plan.directory, *words)
                yield algo, progress
            except (Exception, KeyboardInterrupt) as error:
                if not supervisor.starts_again(error):
                    error.add_note(runs.how_to_resume(plan.directory, *words))
                raise
            finally:
                ENDING.last_words = str


def _resume(algo: Any, plan: runs.RunPlan, checkpoint: Path, progress: Progress) -> None:
    """Restore a checkpoint; remove what the logs say of later iterations, and take the ratings to another directory.

    Ratings that the other directory has already, of an attempt that was lost there, are kept.
    """
    algo.restore_from_path(str(checkpoint), trust=plan.is_trusted)
    algo.report.writer.hide_from(algo.iteration + 1)
    for name in (METRICS, TRANSCRIPTS):
        if num := keep_until(plan.directory / name, algo.iteration):
            progress.note(f"removed {num} lines of {name} about iterations after {algo.iteration}")
    ratings, place = (directory / RATINGS for directory in (checkpoint.parent, plan.directory))
    if ratings.exists() and not place.exists():
        scratch = place.with_suffix(".tmp")
        scratch.unlink(missing_ok=True)
        with RatingStore(ratings) as store:
            store.copy_to(scratch)
        scratch.replace(place)


def train_until(
    algo: Any, last: int, directory: Path, progress: Progress, request: StopRequest | None = None
) -> Iterator[Mapping[str, Any]]:
    """Train up to iteration `last`, or until a stop is requested; yield the result of each iteration."""
    log = RunLog(directory, algo.report.writer)
    others = algo.result_logs
    algo.result_logs = (*others, log.write)  # written before a checkpoint of the iteration
    num_empty, num_resampled = (
        algo.metrics.peek(name, default=0) for name in ("num_empty_batches", "num_prompts_resampled")
    )
    try:
        if algo.iteration < last:
            progress.begin(f"iteration {algo.iteration + 1}/{last} ...")
        while algo.iteration < last and not (request and request.is_made):
            result = algo.train()
            number, played, rollout_s = result["training_iteration"], result["env_runners"], result["timers"]["rollout"]
            tokens_per_s = played["num_generated_tokens"] / rollout_s if rollout_s else 0.0
            num_before, num_resampled = num_resampled, result.get("num_prompts_resampled", 0)
            shown = number, played["episode_return_mean"], tokens_per_s, result["time_this_iter_s"]
            progress.iteration(*shown, int(num_resampled - num_before))
            if result.get("num_empty_batches", 0) > num_empty:
                num_empty = result["num_empty_batches"]
                progress.note(f"iteration {number}: no update, since no group had anything to learn from")
            if number == 1 and played["num_unparsed"]:
                progress.note(f"iteration {number}: {parsed_share(played)}")
            if evaluation := result.get("evaluation"):
                progress.note(f"iteration {number}: held-out accuracy {with_interval(evaluation)}")
            yield result
    finally:
        algo.result_logs = others


def parsed_share(played: Mapping[str, Any]) -> str:
    """Return a text with the number and share of an iteration's answers that could not be parsed."""
    endings = sum(number for name, number in played.items() if name.startswith("stop_reason/"))
    num_unparsed, num = int(played["num_unparsed"]), int(endings - played["num_episodes_lost"])
    return f"{num_unparsed} of {num} answers could not be parsed ({num_unparsed / max(num, 1):.0%})"
