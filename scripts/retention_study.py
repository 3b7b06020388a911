"""All arms of the study of retention at one learning rate, on streams drawn from a pool of tasks.

    python scripts/retention_study.py DIRECTORY            runs what is missing; goes on where it was ended
    python scripts/retention_study.py DIRECTORY --table    prints the tables of what has ended, and runs nothing

Each trial adds one row to DIRECTORY/trials.jsonl; docs/data/retention has the rows that docs/LOG.md reports. An arm
with more than one setting runs all of them on the development seeds; the one with the best mean final accuracy runs on
the seeds of the table. The three arms of attempt 2 keep the settings that were frozen there
(docs/design/0023-retention.md).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.algorithm.evaluation import GREEDY
from rllib_srl.algorithm.named import MEMORIES
from rllib_srl.cli.shared.run_log import json_lines
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.contrib.retained import AsActed, CrossEntropy, FromStart, Importance
from rllib_srl.studies.accuracy import FinalParts, final_parts, forgetting
from rllib_srl.studies.seeds import bootstrap_interval, is_not_worse
from rllib_srl.tune_configs.arms import COMMON
from rllib_srl.tune_configs.kinds import KINDS

TASKS = (
    "compare_2_largest_low",
    "compare_2_largest_near",
    "compare_2_smallest_low",
    "compare_4_largest_near",
    "compare_4_smallest_near",
    "compare_5_largest_near",
    "compare_5_smallest_near",
    "compare_6_largest",
    "compare_6_largest_low",
    "compare_6_smallest",
    "compare_6_smallest_low",
    "copy_2_backwards",
    "copy_3_forwards",
    "registers_4_larger",
    "registers_4_smaller",
    "registers_6_larger",
    "registers_6_smaller",
    "registers_7_larger",
    "registers_7_smaller",
)
CONFLICT = {  # a task, and the accuracy that others cost it when trained on after it, if .1 or more (docs/LOG.md)
    "compare_2_largest_low": {"compare_2_smallest_low": 0.21, "compare_6_smallest": 0.10},
    "compare_2_largest_near": {"compare_4_smallest_near": 0.19, "compare_5_smallest_near": 0.12},
    "compare_2_smallest_low": {"compare_2_largest_low": 0.11},
    "compare_4_largest_near": {"compare_4_smallest_near": 0.48},
    "compare_4_smallest_near": {"compare_2_largest_near": 0.26, "compare_4_largest_near": 0.32},
    "compare_5_largest_near": {"compare_4_smallest_near": 0.68, "compare_5_smallest_near": 0.17},
    "compare_5_smallest_near": {"compare_2_largest_near": 0.23},
    "compare_6_largest_low": {"compare_2_smallest_low": 0.13},
    "compare_6_smallest": {"compare_6_largest": 0.12},
    "registers_4_larger": {"compare_2_smallest_low": 0.12, "compare_6_smallest": 0.36},
    "registers_4_smaller": {"compare_6_largest": 0.35, "compare_6_largest_low": 0.11},
    "registers_6_larger": {"compare_2_smallest_low": 0.12, "compare_6_smallest": 0.35},
    "registers_6_smaller": {"compare_6_largest": 0.35, "compare_6_largest_low": 0.11},
    "registers_7_larger": {"compare_6_smallest": 0.35},
    "registers_7_smaller": {"compare_6_largest": 0.35, "compare_6_largest_low": 0.11},
}
SHARED = {  # a task, and those that give it .1 or more
    "compare_2_largest_near": ("compare_4_largest_near", "compare_5_largest_near"),
    "registers_4_larger": ("compare_6_largest",),
    "registers_4_smaller": ("compare_2_smallest_low", "compare_6_smallest"),
    "registers_6_larger": ("compare_6_largest",),
    "registers_6_smaller": ("compare_2_smallest_low", "compare_6_smallest"),
    "registers_7_larger": ("compare_6_largest", "registers_6_larger"),
    "registers_7_smaller": ("compare_2_smallest_low", "compare_6_smallest"),
}
NUM_TASKS, TOKENS = 5, 20_000  # stages of a stream, generated tokens of each
NUM_AT_MARKS, NUM_AT_END = 768, 3_000  # held-out prompts of all tasks together
SEEDS = {  # of development, of the table
    "conflict": ((7001, 7002), tuple(range(7101, 7113))),
    "shared": ((8001, 8002), tuple(range(8101, 8113))),
}
STRONG = 0.2  # lost accuracy
RATE = 4e-4
WEIGHTS, SHARES = (0.3, 1.0, 3.0, 10.0), (0.1, 0.25, 0.4, 0.6)
OFF: dict[str, Any] = {"replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0}
MARGIN = 0.02
TESTED = "retention_revisits"

Settings = Mapping[str, Any]


class Arm(NamedTuple):
    """What is compared: the settings that it fixes, and the one that is tuned, with its values."""

    fixed: dict[str, Any]
    tuned: str
    values: Sequence[float]
    learner: type | None = None  # in place of the ordinary one
    is_joint: bool = False  # all tasks from the start to the end
    like: str = ""  # the arm whose best setting it takes, instead of being tuned
    tokens: float = 1.0  # part of the others' generated tokens


AT_RATE = {**OFF, "lr": RATE}
NONE, RATES = {**OFF, "replay_capacity": 0}, (1e-4, 2e-4, 4e-4, 8e-4)
REVISITS = {**AT_RATE, "replay_revisit_fraction": 0.1}
FIT = (0.03, 0.1, 0.3, 1.0)
ARMS = {
    "none": Arm(NONE, "lr", RATES),
    "uniform": Arm(AT_RATE, "replay_revisit_fraction", SHARES),
    TESTED: Arm(REVISITS, "replay_retain", WEIGHTS),
    "srl": Arm({**MEMORIES["srl"], "lr": RATE}, "replay_revisit_fraction", SHARES),
    "retention": Arm(AT_RATE, "replay_retain", WEIGHTS),
    "retention_60": Arm(AT_RATE, "replay_retain", WEIGHTS, like="retention", tokens=0.6),
    "cross_entropy": Arm(AT_RATE, "replay_retain", FIT, CrossEntropy),
    "importance": Arm(AT_RATE, "replay_retain", FIT, Importance),
    "from_start": Arm(AT_RATE, "replay_retain", WEIGHTS, FromStart),
    "as_acted": Arm({**AT_RATE, "replay_retain_top_k": 0}, "replay_retain", WEIGHTS, AsActed),
    "lwf": Arm(REVISITS, "lwf", FIT),
    "joint": Arm(NONE, "lr", RATES, is_joint=True),
}
FROZEN = {  # by attempt 2 and its check, on four development seeds
    "conflict": {"none": 2e-4, "uniform": 0.4, TESTED: 3.0},
    "shared": {"uniform": 0.25, TESTED: 0.3},
}
PHASES = [  # kind and arms; all of a phase are tuned before its table seeds begin
    *((kind, ("none", "uniform", TESTED, "srl")) for kind in SEEDS),
    ("conflict", ("retention", "retention_60", "cross_entropy", "joint")),
    ("conflict", ("importance", "from_start", "as_acted", "lwf")),
    ("shared", ("retention", "cross_entropy", "joint")),
    ("shared", ("importance", "from_start", "as_acted", "lwf")),
]


class Trial(NamedTuple):
    """One run."""

    kind: str
    arm: str
    seed: int
    settings: dict[str, Any]  # those that are tuned


# --- streams --------------------------------------------------------------------------------------


def fits(order: Sequence[str], kind: str) -> bool:
    """Return whether an order of tasks is a stream of this kind."""
    cost = {
        first: max(CONFLICT.get(first, {}).get(second, 0.0) for second in order[at:]) for at, first in enumerate(order)
    }
    if kind == "conflict":
        return sum(lost >= STRONG for lost in cost.values()) >= 2
    num_shared = sum(second in SHARED.get(first, ()) for first, second in combinations(order, 2))
    return not any(cost.values()) and num_shared >= 2


def draw_stream(kind: str, seed: int) -> list[str]:
    """Return the tasks of a stream in order: the first draw that fits."""
    draw = random.Random(seed)
    while not fits(order := draw.sample(TASKS, NUM_TASKS), kind):
        pass
    return order


# --- trials ---------------------------------------------------------------------------------------


def settings_of(trial: Trial, tasks: Sequence[str]) -> dict[str, Any]:
    """Return all settings of a trial."""
    arm, tuned, stream = ARMS[trial.arm], dict(trial.settings), []
    for task in tasks:
        stage = {"env": KINDS[task]["env"], "domain": task, "env_config": KINDS[task]["env_config"]}
        stream.append(stage if arm.is_joint else {**stage, "tokens": tokens_of(trial)})
    if "lwf" in tuned:
        tuned["regularisers"] = {"lwf": {"coeff": tuned.pop("lwf")}}
    stream_setting = {"domains": stream, "schedule": [[0, dict.fromkeys(tasks, 1.0)]]} if arm.is_joint else stream
    return {**COMMON, **arm.fixed, **tuned, "stream": stream_setting, "seed": trial.seed}


def tokens_of(trial: Trial) -> int:
    """Return the generated tokens of a stage."""
    return round(TOKENS * ARMS[trial.arm].tokens)


def accuracies(algo: Any, tasks: Sequence[str], num: int) -> list[float]:
    """Return the accuracy of greedy answers to about `num` held-out prompts, by task; [] for 0."""
    if not num:
        return []
    prompts = algo.source.heldout(-(-num // len(tasks)) * len(tasks))
    right: dict[str, list[bool]] = defaultdict(list)
    for batch in algo.play(prompts, "greedy", **GREEDY):
        for group in batch.groups:
            right[group.prompt.domain].append(bool(group.is_right_G()[0]))
    return [fmean(right[task]) for task in tasks]


def rounded(values: Sequence[float]) -> list[float]:
    """Return the values to five digits, more than 3,000 prompts tell."""
    return [round(value, 5) for value in values]


def counted(metrics: Mapping[str, Any], name: str) -> int:
    """Return a count, 0 if it is missing or NaN, as without an update."""
    return round(float(np.nan_to_num(metrics.get(name, 0.0))))


def run(trial: Trial, tasks: Sequence[str]) -> dict[str, Any]:
    """Train on a stream and return a row: accuracies before, after each stage and at the end, and costs.

    On a development seed only the end is measured.
    """
    marks = NUM_AT_MARKS if trial.seed in SEEDS[trial.kind][1] else 0
    begin, seconds, trained, num_held = time.perf_counter(), 0.0, 0, 0
    config = build_config(settings_of(trial, tasks))
    if (learner := ARMS[trial.arm].learner) is not None:
        config.learners(learner_class=learner)
    algo = config.build_algo()
    try:
        before, rows, held = accuracies(algo, tasks, marks), list[list[float]](), dict[str, Any]()
        while len(rows) < len(tasks):
            start = time.perf_counter()
            result = algo.train()
            seconds += time.perf_counter() - start
            held = result.get("retention", held)
            trained += counted(result["learners"].get("default_policy", {}), "num_tokens")
            num_held += counted(held, "num_held_tokens")
            if algo.source.progress.tokens >= tokens_of(trial) * (len(rows) + 1):
                is_last = len(rows) + 1 == len(tasks)
                rows.append(accuracies(algo, tasks, NUM_AT_END if is_last else marks))
    finally:
        algo.stop()
    return {
        **trial._asdict(),
        "tasks": list(tasks),
        "before": rounded(before),
        "after": [rounded(mark) for mark in rows],
        "final": round(fmean(rows[-1]), 5),
        "seconds": round(seconds, 1),
        "trained_tokens": trained * algo.config.num_epochs,
        "held_tokens": num_held,
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }


# --- the plan -------------------------------------------------------------------------------------


def grid_of(kind: str, arm: str) -> list[dict[str, Any]]:
    """Return the settings of an arm among which tuning chooses; one where attempt 2 has frozen it."""
    values = [FROZEN[kind][arm]] if arm in FROZEN[kind] else ARMS[arm].values
    return [{ARMS[arm].tuned: value} for value in values]


def best_of(rows: Sequence[Mapping[str, Any]], settings: Sequence[Settings], num_seeds: int) -> dict[str, Any] | None:
    """Return the setting with the best mean final accuracy; None if one has not all its development seeds."""
    finals = [{row["seed"]: row["final"] for row in rows if key_of(row["settings"]) == key_of(s)} for s in settings]
    if any(len(by_seed) < num_seeds for by_seed in finals):
        return None
    return dict(settings[int(np.argmax([fmean(by_seed.values()) for by_seed in finals]))])


def key_of(settings: Settings) -> str:
    """Return the same text for equal settings, read from a file or not."""
    return json.dumps(settings, sort_keys=True)


def best(rows: Sequence[Mapping[str, Any]], kind: str, arm: str) -> dict[str, Any] | None:
    """Return the setting that an arm runs with on the seeds of the table; None if tuning has not ended."""
    arm = ARMS[arm].like or arm
    settings, (seeds, _) = grid_of(kind, arm), SEEDS[kind]
    runs = [row for row in rows if (row["kind"], row["arm"]) == (kind, arm) and row["seed"] in seeds]
    return settings[0] if len(settings) == 1 else best_of(runs, settings, len(seeds))


def missing(rows: Sequence[Mapping[str, Any]]) -> Iterator[Trial]:
    """Yield the trials to run next, in order, as far as they are known."""
    done = {(r["kind"], r["arm"], r["seed"], key_of(r["settings"])) for r in rows}
    for kind, arms in PHASES:
        development, table = SEEDS[kind]
        chosen = {arm: best(rows, kind, arm) for arm in arms}
        tuned = [arm for arm in arms if len(grid_of(kind, arm)) > 1 and not ARMS[arm].like]
        wanted = [Trial(kind, arm, seed, s) for seed in development for arm in tuned for s in grid_of(kind, arm)]
        if None not in chosen.values():
            wanted += [Trial(kind, arm, seed, setting or {}) for seed in table for arm, setting in chosen.items()]
        todo = [t for t in wanted if (t.kind, t.arm, t.seed, key_of(t.settings)) not in done]
        if todo:
            yield from todo
            return


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are complete; a line that a kill cut short is left out."""
    return [row for row in json_lines(path, dict) if row is not None]


# --- tables ---------------------------------------------------------------------------------------


def tuning_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each setting that has ended: mean final accuracy over the development seeds."""
    for kind, arm in [(kind, arm) for kind, arms in PHASES for arm in arms]:
        finals = defaultdict(list)
        for row in rows:
            if (row["kind"], row["arm"]) == (kind, arm) and row["seed"] in SEEDS[kind][0]:
                finals[key_of(row["settings"])].append(row["final"])
        chosen = best(rows, kind, arm)
        for name in map(key_of, grid_of(kind, arm)):
            if values := finals[name]:
                mark = "  <- best" if chosen is not None and name == key_of(chosen) else ""
                yield f"{kind:9} {arm:19} {name:40} {fmean(values):.3f} ({len(values)}){mark}"


def result_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each arm whose seeds have all ended, and its differences to the tested form and to uniform revisits."""
    for kind, (_, seeds) in SEEDS.items():
        by_arm = {arm: rows_of(rows, kind, arm, best(rows, kind, arm)) for arm in ARMS}
        by_arm = {arm: by_seed for arm, by_seed in by_arm.items() if len(by_seed) == len(seeds)}
        for arm, by_seed in by_arm.items():
            settings = key_of(next(iter(by_seed.values()))["settings"])
            yield f"{kind:9} {arm:19} {settings:40} {parts_of(list(by_seed.values()))}"
        for other in [arm for arm in (TESTED, "uniform", "none") if arm in by_arm]:
            for arm in [arm for arm in by_arm if arm != other]:
                yield f"{kind:9} {arm} - {other}: {in_words(gain_of(by_arm[arm], by_arm[other]))}"
        if {TESTED, "srl"} <= set(by_arm):
            is_level = is_not_worse(gain_of(by_arm["srl"], by_arm[TESTED]), MARGIN)
            yield f"{kind:9} srl is {'' if is_level else 'not '}shown to be no worse than {TESTED} by {MARGIN}"


def rows_of(
    rows: Sequence[Mapping[str, Any]], kind: str, arm: str, setting: Settings | None
) -> dict[int, Mapping[str, Any]]:
    """Return the row of each seed of the table at one setting of an arm."""
    arm_rows = [row for row in rows if (row["kind"], row["arm"]) == (kind, arm) and row["seed"] in SEEDS[kind][1]]
    return {row["seed"]: row for row in arm_rows if setting and key_of(row["settings"]) == key_of(setting)}


def gain_of(tested: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]) -> np.ndarray:
    """Return the differences in final accuracy, one a seed of `other`."""
    return np.array([tested[seed]["final"] - row["final"] for seed, row in sorted(other.items())])


def in_words(gain: np.ndarray) -> str:
    """Return a mean difference with its interval, and the seeds ahead."""
    (low, high), ahead = bootstrap_interval(gain), int((gain > 0).sum())
    return f"{gain.mean():+.4f} [{low:+.4f}, {high:+.4f}], {ahead} of {len(gain)}"


def parts_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean final accuracy, its parts, forgetting and costs in words."""
    stages = np.arange(NUM_TASKS)
    matrices = [(np.array(row["after"]), np.array(row["before"])) for row in rows]
    parts = np.mean([final_parts(after, stages, before) for after, before in matrices], axis=0)
    named = ", ".join(f"{name} {part:+.3f}" for name, part in zip(FinalParts._fields, parts, strict=True))
    lost = fmean(forgetting(after, stages) for after, _ in matrices)
    trained, seconds = (fmean(row[name] for row in rows) for name in ("trained_tokens", "seconds"))
    final = fmean(row["final"] for row in rows)
    return f"final {final:.3f} ({named}), forgetting {lost:.3f}, {trained:.0f} trained tokens, {seconds:.0f} s"


def main() -> None:
    """Run what is missing, one trial after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--table", action="store_true", help="print the tables, and run nothing")
    arguments = parser.parse_args()
    path = arguments.directory / "trials.jsonl"
    if arguments.table:
        rows = read_rows(path)
        print(*tuning_table(rows), *result_table(rows), sep="\n")
        return
    arguments.directory.mkdir(parents=True, exist_ok=True)
    while (trial := next(missing(read_rows(path)), None)) is not None:
        row = run(trial, draw_stream(trial.kind, trial.seed))
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        is_of_proof = trial.seed in SEEDS[trial.kind][1]
        print(*trial, "" if is_of_proof else f"final {row['final']:.3f}", f"{row['wall_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
