"""The study of retention on streams drawn from a pool of tasks: tuning, then the proof (docs/design/0023-retention.md).

    python scripts/retention_study.py DIRECTORY            runs what is missing; goes on where it was ended
    python scripts/retention_study.py DIRECTORY --table    prints the tables of what has ended, and runs nothing

Each trial adds one row to DIRECTORY/trials.jsonl. An arm's settings are all run on the development seeds; those with
the best mean final accuracy are frozen, and run on the seeds of the proof.
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
from rllib_srl.studies.seeds import bootstrap_interval, holm, is_not_worse, paired_test
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
SEEDS = {  # of development, of the proof of the second attempt
    "conflict": ((6001, 6002, 7001, 7002), tuple(range(7101, 7125))),
    "shared": ((6101, 6102, 8001, 8002), tuple(range(8101, 8125))),
}
STRONG = 0.2  # lost accuracy
RATES = (1e-4, 2e-4, 4e-4, 8e-4)
WEIGHTS, SHARES = (0.3, 1.0, 3.0, 10.0), (0.1, 0.25, 0.4, 0.6)
WIDER = {"lr": (5e-5, 1.6e-3), "replay_retain": (0.1, 30.0), "replay_revisit_fraction": (0.05, 0.8)}
OFF: dict[str, Any] = {"replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0}
MARGIN, ALPHA = 0.02, 0.05 / 3
TESTED, CONTROLS = "retention_revisits", ("uniform", "none")

Settings = Mapping[str, Any]


class Arm(NamedTuple):
    """A setting under comparison: what it fixes, and the two settings that are tuned, with their values."""

    fixed: dict[str, Any]
    grid: Mapping[str, Sequence[Any]]
    wider: Mapping[str, tuple[Any, Any]] = WIDER  # values next to the grid's
    learner: type | None = None  # in place of the ordinary one
    is_joint: bool = False  # all tasks from the start to the end
    like: str = ""  # the arm whose frozen setting it takes, instead of being tuned
    tokens: float = 1.0  # part of the others' generated tokens


PASSES: dict[str, Sequence[Any]] = {"lr": RATES, "passes_and_clip": ((1, 0.28), (2, 0.2), (2, 0.28), (4, 0.28))}
HOLD: dict[str, Sequence[Any]] = {"lr": RATES, "replay_retain": WEIGHTS}
FIT: dict[str, Sequence[Any]] = {"lr": RATES, "replay_retain": (0.03, 0.1, 0.3, 1.0)}
FIT_WIDER = {**WIDER, "replay_retain": (0.01, 3.0), "lwf": (0.01, 3.0)}
ARMS = {
    "none": Arm({**OFF, "replay_capacity": 0}, PASSES),
    "uniform": Arm(OFF, {"lr": RATES, "replay_revisit_fraction": SHARES}),
    TESTED: Arm({**OFF, "replay_revisit_fraction": 0.1}, HOLD),
    "retention": Arm(OFF, HOLD),
    "retention_60": Arm(OFF, HOLD, like="retention", tokens=0.6),
    "cross_entropy": Arm(OFF, FIT, FIT_WIDER, CrossEntropy),
    "importance": Arm(OFF, FIT, FIT_WIDER, Importance),
    "from_start": Arm(OFF, HOLD, learner=FromStart),
    "as_acted": Arm({**OFF, "replay_retain_top_k": 0}, HOLD, learner=AsActed),
    "lwf": Arm({**OFF, "replay_revisit_fraction": 0.1}, {"lr": RATES, "lwf": (0.03, 0.1, 0.3, 1.0)}, FIT_WIDER),
    "srl": Arm(MEMORIES["srl"], {"lr": RATES, "replay_revisit_fraction": SHARES}),
    "joint": Arm({**OFF, "replay_capacity": 0}, PASSES, is_joint=True),
}
PHASES = [  # kind and arms; all of a phase are tuned before its proof begins
    ("conflict", ("none", "uniform", TESTED)),
    ("shared", ("uniform", TESTED)),
    *((kind, ("srl",)) for kind in SEEDS),
    ("conflict", ("retention", "retention_60")),
    ("shared", ("none",)),
    *((kind, (arm,)) for kind in SEEDS for arm in ("cross_entropy", "joint")),
    *((kind, (arm,)) for kind in SEEDS for arm in ("importance", "from_start", "as_acted", "lwf")),
    ("shared", ("retention",)),
]
DECIDING = PHASES[:2]  # their arms are tuned on four seeds of development, the others on the last two of these
CHECKED = {  # conflict streams: beside the proof, without a test, both arms at the rate that attempt 1 froze
    "uniform": {"lr": 4e-4, "replay_revisit_fraction": 0.4},
    TESTED: {"lr": 4e-4, "replay_retain": 3.0},
}
ON_HALF = ("joint", "srl", "importance", "from_start", "as_acted", "lwf")  # of the proof's seeds; others on all


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
        stage = {"world": KINDS[task]["env"], "domain": task, "env_config": KINDS[task]["env_config"]}
        stream.append(stage if arm.is_joint else {**stage, "tokens": tokens_of(trial)})
    if "passes_and_clip" in tuned:
        tuned["num_epochs"], tuned["clip_high"] = tuned.pop("passes_and_clip")
    if "lwf" in tuned:
        tuned["regularisers"] = {"lwf": {"coeff": tuned.pop("lwf")}}
    given = {"domains": stream, "schedule": [[0, dict.fromkeys(tasks, 1.0)]]} if arm.is_joint else stream
    return {**COMMON, **arm.fixed, **tuned, "stream": given, "seed": trial.seed}


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
        "before": before,
        "after": rows,
        "final": fmean(rows[-1]),
        "seconds": round(seconds, 1),
        "trained_tokens": trained * algo.config.num_epochs,
        "held_tokens": num_held,
        "retention": {name: value for name, value in held.items() if isinstance(value, int | float)},
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }


# --- the plan -------------------------------------------------------------------------------------


def grid_of(arm: str) -> list[dict[str, Any]]:
    """Return the 16 settings of an arm."""
    (one, ones), (other, others) = ARMS[arm].grid.items()
    return [{one: a, other: b} for a in ones for b in others]


def wider(arm: str, best: Settings) -> list[dict[str, Any]]:
    """Return four settings on each side of the grid that the best setting touches."""
    found = []
    for name, values in ARMS[arm].grid.items():
        if name not in ARMS[arm].wider or best[name] not in (values[0], values[-1]):
            continue
        at = ARMS[arm].wider[name][best[name] == values[-1]]
        (other, others) = next(item for item in ARMS[arm].grid.items() if item[0] != name)
        found += [{name: at, other: value} for value in others]
    return [{name: setting[name] for name in ARMS[arm].grid} for setting in found]


def best_of(rows: Sequence[Mapping[str, Any]], settings: Sequence[Settings], num_seeds: int) -> dict[str, Any] | None:
    """Return the setting with the best mean final accuracy; None if one has not all its development seeds."""
    finals = [[row["final"] for row in rows if key_of(row["settings"]) == key_of(setting)] for setting in settings]
    if any(len(found) < num_seeds for found in finals):
        return None
    return dict(settings[int(np.argmax([fmean(found) for found in finals]))])


def key_of(settings: Settings) -> str:
    """Return the same text for equal settings, read from a file or not."""
    return json.dumps(settings, sort_keys=True)


def development_seeds(kind: str, arm: str) -> tuple[int, ...]:
    """Return the seeds on which an arm is tuned."""
    return SEEDS[kind][0] if any(kind == other and arm in arms for other, arms in DECIDING) else SEEDS[kind][0][-2:]


def frozen(
    rows: Sequence[Mapping[str, Any]], kind: str, arm: str
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the frozen setting of an arm, None if tuning has not ended, and the settings to run for it."""
    if other := ARMS[arm].like:
        return frozen(rows, kind, other)[0], []
    seeds = development_seeds(kind, arm)
    own = [row for row in rows if (row["kind"], row["arm"]) == (kind, arm) and row["seed"] in seeds]
    settings = grid_of(arm)
    if (best := best_of(own, settings, len(seeds))) is None:
        return None, settings
    settings += wider(arm, best)
    return best_of(own, settings, len(seeds)), settings


def proof_seeds(kind: str, arm: str) -> tuple[int, ...]:
    """Return the seeds on which an arm is proved."""
    seeds = SEEDS[kind][1]
    return seeds[: len(seeds) // 2] if arm in ON_HALF else seeds


def missing(rows: Sequence[Mapping[str, Any]]) -> Iterator[Trial]:
    """Yield the trials to run next, in order, as far as they are known."""
    done = {(r["kind"], r["arm"], r["seed"], key_of(r["settings"])) for r in rows}
    for kind, arms in PHASES:
        found = {arm: frozen(rows, kind, arm) for arm in arms}
        wanted = [
            Trial(kind, arm, seed, setting)
            for seed in SEEDS[kind][0]
            for arm, (_, settings) in found.items()
            for setting in settings
            if seed in development_seeds(kind, arm)
        ]
        if all(best is not None for best, _ in found.values()):
            wanted += [
                Trial(kind, arm, seed, best or {})
                for seed in SEEDS[kind][1]
                for arm, (best, _) in found.items()
                if seed in proof_seeds(kind, arm)
            ]
        if (kind, arms) == DECIDING[-1]:
            checks = [(seed, *check) for seed in SEEDS["conflict"][1] for check in CHECKED.items()]
            wanted += [Trial("conflict", arm, seed, setting) for seed, arm, setting in checks]
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
        best, settings = frozen(rows, kind, arm)
        for name in (key_of(setting) for setting in settings):
            if found := finals[name]:
                mark = "  <- frozen" if best is not None and name == key_of(best) else ""
                yield f"{kind:9} {arm:19} {name:55} {fmean(found):.3f} ({len(found)}){mark}"


def proof_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the arms of the proof, and what decides, for each kind whose seeds have all ended."""
    for kind, (_, seeds) in SEEDS.items():
        found = {arm: proof_of(rows, kind, arm, frozen(rows, kind, arm)[0]) for arm in ARMS}
        needed = next(arms for other, arms in PHASES if other == kind)
        if num := sum(len(seeds) - len(found[arm]) for arm in needed):
            yield f"{kind}: trials that are missing: {num}; nothing is shown before"
            continue
        found = {arm: by_seed for arm, by_seed in found.items() if len(by_seed) == len(proof_seeds(kind, arm))}
        yield from (f"{kind:9} {arm:19} {parts_of(list(by_seed.values()))}" for arm, by_seed in found.items())
        tested = found.pop(TESTED)
        gains = {arm: gain_of(tested, by_seed) for arm, by_seed in found.items()}
        deciding = [arm for arm in CONTROLS if arm in needed]
        adjusted = dict(zip(deciding, holm([paired_test(gains[arm]).p for arm in deciding]), strict=True))
        for arm, gain in gains.items():
            yield f"{kind:9} {TESTED} - {arm}: {in_words(gain, adjusted.get(arm))}"
        if kind == "conflict":
            holds = all(adjusted[arm] < ALPHA and gains[arm].mean() >= MARGIN for arm in CONTROLS)
            yield f"primary: {'holds' if holds else 'missed'}"
        else:
            yield f"co-primary: {'holds' if is_not_worse(gains['uniform'], MARGIN) else 'missed'}"


def proof_of(
    rows: Sequence[Mapping[str, Any]], kind: str, arm: str, setting: Settings | None
) -> dict[int, Mapping[str, Any]]:
    """Return the row of each seed of the proof at one setting of an arm."""
    own = [row for row in rows if (row["kind"], row["arm"]) == (kind, arm) and row["seed"] in SEEDS[kind][1]]
    return {row["seed"]: row for row in own if setting and key_of(row["settings"]) == key_of(setting)}


def check_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield both arms of the check at one rate, and their difference, when all its trials have ended."""
    found = {arm: proof_of(rows, "conflict", arm, setting) for arm, setting in CHECKED.items()}
    seeds = SEEDS["conflict"][1]
    if num := sum(len(seeds) - len(by_seed) for by_seed in found.values()):
        yield f"check: trials that are missing: {num}"
        return
    yield from (f"check     {arm:19} {parts_of(list(by_seed.values()))}" for arm, by_seed in found.items())
    yield f"check     {TESTED} - uniform: {in_words(gain_of(found[TESTED], found['uniform']))}"


def gain_of(tested: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]) -> np.ndarray:
    """Return the differences in final accuracy, one a seed of `other`."""
    return np.array([tested[seed]["final"] - row["final"] for seed, row in sorted(other.items())])


def in_words(gain: np.ndarray, p: float | None = None) -> str:
    """Return a mean difference with its interval, its p value if there is one, and the seeds ahead."""
    (low, high), ahead = bootstrap_interval(gain), int((gain > 0).sum())
    tested = "" if p is None else f", p {p:.4f}"
    return f"{gain.mean():+.4f} [{low:+.4f}, {high:+.4f}]{tested}, {ahead} of {len(gain)}"


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
        print(*tuning_table(rows), *proof_table(rows), *check_table(rows), sep="\n")
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
