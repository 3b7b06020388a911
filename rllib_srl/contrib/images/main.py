"""Class-incremental images: does the buffer's schedule remember more than a reservoir, at equal replay?

    python -m rllib_srl.contrib.images.main                           scikit-learn's digits: minutes on one core
    python -m rllib_srl.contrib.images.main --data PATH --seeds 5     CIFAR-100, images.npz or folders of PNG
    srl report results/images/digits                                  the report

A small classifier sees each image once, class after class. All arms start from the same weights and see the same
images in the same order; all that replay do so equally often, from equally many stored images, which is checked at
every update. --out holds the results; one that holds this study already is gone on with.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import torch

from rllib_srl.cli.shared.cluster import command, run_cleanly
from rllib_srl.cli.shared.display import duration, table
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.contrib.images.data import ImageSet, load
from rllib_srl.contrib.images.memory import Memory, NoMemory, Recent, Reservoir, Scheduled
from rllib_srl.contrib.images.model import Classifier, Recalled
from rllib_srl.contrib.images.study import REPLAYING, SHORT_IMAGES, Setup, domain_names, study_of
from rllib_srl.studies.contrasts import curves_of, findings_of, verdict_of
from rllib_srl.studies.curves import Curve
from rllib_srl.studies.measures import MEASURES
from rllib_srl.studies.recording import TrialWriter, finished_trials, open_trial
from rllib_srl.studies.results import Results, Row, read_results
from rllib_srl.studies.study import Arm

SHOWN = ("average_accuracy", "retention_area", "forgetting", "plasticity")


class Run:
    """One arm with one seed. Invariant: at every update, all replaying arms replay the same number of stored images."""

    def __init__(self, images: ImageSet, setup: Setup, arm: Arm, seed: int) -> None:
        """Initialise; weights, order of images and views depend on the seed only."""
        self._images, self._setup, self._replays = images, setup, arm.name in REPLAYING
        shape, num_classes = images.train_NCHW.shape[1:], images.num_classes
        self._classifier = Classifier(shape, num_classes, setup.num_hidden, setup.lr, seed)
        self._order = np.random.default_rng([seed, 1])
        self._memory = self._memory_of(arm, seed)
        self._now = self._num_seen = self._num_trained = self._num_looks = self._peak_bytes = 0
        self._training_s = self._testing_s = 0.0
        self._num_replayed_C: Counter[int] = Counter()  # by class

    def _memory_of(self, arm: Arm, seed: int) -> Memory:
        capacity = self._setup.capacity_per_class * self._images.num_classes
        if arm.name == "none":
            return NoMemory()
        if arm.name in ("recent", "reservoir"):
            return (Recent if arm.name == "recent" else Reservoir)(capacity, seed)
        names = domain_names(self._images)
        domains = [name for name, classes in zip(names, self._images.stages(), strict=True) for _ in classes]
        return Scheduled(capacity, seed, self._look, self._images.train_label_N, domains, **arm.settings)

    def into(self, trial: TrialWriter) -> None:
        """Train through all stages and write the test results to `trial`."""
        try:
            trial.add(self._rows(-1))
            for stage, classes in enumerate(self._images.stages()):
                own_N = np.flatnonzero(np.isin(self._images.train_label_N, classes))
                steps = _batches(self._order.permutation(own_N), self._setup.num_fresh)
                for part in np.array_split(np.arange(len(steps)), min(self._setup.num_tests, len(steps))):
                    began = time.perf_counter()
                    for step in part.tolist():
                        self._step(steps[step])
                    self._training_s += time.perf_counter() - began
                    trial.add(self._rows(stage))
            trial.finish()
        finally:
            self._memory.close()

    def _step(self, fresh: np.ndarray) -> None:
        setup, capacity = self._setup, self._setup.capacity_per_class * self._images.num_classes
        for update in range(setup.num_updates):
            self._now += 1
            owed = min(setup.num_replayed, self._num_seen, capacity) if self._replays else 0
            replayed = self._memory.draw(setup.num_replayed, self._now)
            if len(replayed) != owed or len(np.unique(replayed)) != owed:
                raise ValueError(f"update {self._now}: {len(replayed)} images were replayed; expected {owed} distinct")
            new = fresh if update == 0 else fresh[:0]
            self._memory.see(new, replayed, self._now)
            self._num_seen += len(new)
            both = np.concatenate([fresh, replayed])
            self._classifier.train(self._images.train_NCHW[both], self._images.train_label_N[both])
            self._num_trained += len(both)
            self._num_replayed_C.update(self._images.train_label_N[replayed].tolist())

    def _look(self, indices: np.ndarray) -> Recalled:
        self._num_looks += len(indices) * self._setup.num_views
        return self._classifier.recall(self._images.train_NCHW[indices], self._setup.num_views)

    def _rows(self, stage: int) -> list[Row]:
        began = time.perf_counter()
        images, stored = self._images, self._memory.stored()
        is_right_N = self._classifier.predict(images.test_NCHW) == images.test_label_N
        self._num_looks += len(is_right_N)
        self._testing_s += time.perf_counter() - began
        self._peak_bytes = max(self._peak_bytes, _bytes_in_use())
        own = self._memory.measures(self._now)
        rows = []
        for name, classes in zip(domain_names(images), images.stages(), strict=True):
            asked_N = np.isin(images.test_label_N, classes)
            counts = {
                "num_stored": float(np.isin(images.train_label_N[stored], classes).sum()),
                "num_replayed": float(sum(self._num_replayed_C[label] for label in classes.tolist())),
            }
            rows.append(
                Row(
                    stage, self._now, name, float(is_right_N[asked_N].mean()), self._num_seen, self._num_trained,
                    self._training_s, self._peak_bytes, int(asked_N.sum()), num_probe_tokens=self._num_looks,
                    probe_s=self._testing_s, measures={**own, **(counts if self._replays else {})},
                )
            )
        return rows


def _batches(indices: np.ndarray, size: int) -> list[np.ndarray]:
    return [indices[at : at + size] for at in range(0, len(indices), size)]


def _bytes_in_use() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", default="digits", metavar="digits|PATH", help="images (default: %(default)s)")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs per arm (default: 10; with --short 2)")
    parser.add_argument("--short", action="store_true", help="few images, as a smoke test")
    text = "directory of the results (default: results/images/NAME)"
    parser.add_argument("--out", type=local_directory, metavar="DIR", help=text)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> int:
    """Run the unfinished trials and show the results; return the exit status."""
    num_seeds = arguments.seeds if arguments.seeds is not None else 2 if arguments.short else 10
    if num_seeds < 2:
        raise ValueError(f"seeds = {num_seeds}; expected at least 2")
    torch.set_num_threads(1)
    images = load(arguments.data)
    if arguments.short:
        images = images.first_of_each_class(SHORT_IMAGES)
    study, setup = study_of(images, num_seeds, arguments.short)
    directory = arguments.out or Path("results/images") / (images.name + ("-short" if arguments.short else ""))
    finished = finished_trials(directory, study)
    for arm in study.arms:  # the arms of the primary comparison come first
        for seed in study.seeds:
            if (arm.name, seed) in finished:
                continue
            began = time.perf_counter()
            with open_trial(directory, study, arm.name, seed, study.settings_of(arm.name, seed)) as trial:
                Run(images, setup, arm, seed).into(trial)
            print(f"seed {seed}  {arm.title}: {duration(time.perf_counter() - began)}", flush=True)
    show(read_results(directory))
    print(f"all files  {directory}\nreport     {command('report', directory.absolute())}")
    return 0


def show(results: Results) -> None:
    """Print each arm's measures and the primary comparison.

    Raises:
        ValueError: two replaying arms did not train on equally many images.
    """
    curves = curves_of(results)
    _check_equal(curves)
    findings = findings_of(curves)
    rows = [("", *(MEASURES[name].title for name in SHOWN), "images trained on")]
    for arm in results.study.arms:
        found = findings[arm.name]
        shown = (f"{f.mean:.3f} [{f.interval.low:.3f}, {f.interval.high:.3f}]" for f in (found[n] for n in SHOWN))
        rows.append((arm.title, *shown, f"{found['num_trained_tokens'].mean:,.0f}"))
    print(table(rows, ""))
    verdict = verdict_of(results, findings)
    for c in verdict.contrasts:
        titles = " minus ".join(map(results.study.title_of, (c.first, c.second)))
        interval = f"[{c.interval.low:+.3f}, {c.interval.high:+.3f}]"
        print(f"{MEASURES[c.measure].title}, {titles}: {c.mean:+.3f} {interval}, p = {c.p_holm:.3f} (Holm)")
    answer = {True: "yes", False: "no", None: "undecided"}[verdict.holds]
    print("\n".join([f"{results.study.question} {answer}", *(f"  {reason}" for reason in verdict.reasons)]))


def _check_equal(curves: Mapping[str, Mapping[int, Curve]]) -> None:
    for seed in sorted({seed for of in curves.values() for seed in of}):
        counts = {arm: int(curves[arm][seed].num_trained_tokens_I[-1]) for arm in REPLAYING if seed in curves[arm]}
        if len(set(counts.values())) > 1:
            raise ValueError(f"seed {seed}: images trained on are {counts}; expected equal numbers in these arms")


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: run(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
