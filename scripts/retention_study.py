"""The study of retention on streams drawn from a pool of tasks: attempt 3, its check, and other arms at one rate.

    python scripts/retention_study.py DIRECTORY            runs what is missing; goes on where it was ended
    python scripts/retention_study.py DIRECTORY --last     the same from the end: a second process, beside the first
    python scripts/retention_study.py DIRECTORY --table    prints the tables of what has ended, and runs nothing

Each trial adds one row to DIRECTORY/trials.jsonl; docs/data/retention has the rows that docs/LOG.md reports. An arm
with more than one setting runs all of them on the development seeds of its plan; the one with the best mean final
accuracy runs on the seeds of the table. docs/design/0023-retention.md has the plans.

The rows of docs/data/retention are of commit 1450ad87, which has the losses of all arms and draws answers for
cross-entropy in a slightly different way; commit 371ca95b repeats those of `held`, `preset` and `preset_10`. In all of
these the weight was multiplied by the pass rate of the fresh prompts. Since then it is constant, as in the rows of
`constant` and `preset_constant`, which this tree repeats, so attempt 3 that runs here is not the proof. The rows of
attempts 1 and 2 were not kept. Arms whose term is no longer in the package (`is_former`) are not run, but shown by
--table.
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

from rllib_srl.algorithm.evaluation import GREEDY, several_answers
from rllib_srl.algorithm.named import MEMORIES
from rllib_srl.cli.shared.run_log import json_lines
from rllib_srl.cli.shared.settings import build_config
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
NUM_SAMPLED, NUM_ANSWERS = 256, 8  # held-out prompts at the end, sampled answers to each
STRONG = 0.2  # lost accuracy
RATE = 4e-4
WEIGHTS, SHARES = (0.3, 1.0, 3.0, 10.0), (0.1, 0.25, 0.4, 0.6)
OFF: dict[str, Any] = {"replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0}
MARGIN = 0.02
ALPHA = 0.05 / 3  # of an attempt
TESTED = "retention_revisits"  # of attempt 2; that of attempt 3 is `cross_entropy`
HELD, CONSTANT = "held", "constant"
# With which the others are compared.
COMPARED = (TESTED, HELD, CONSTANT, "preset_constant", "uniform_40", "uniform_twice", "uniform", "none")

Settings = Mapping[str, Any]


class Arm(NamedTuple):
    """What is compared: its settings unless they are tuned, and the one that is tuned at one rate, with its values."""

    fixed: dict[str, Any]
    tuned: str
    values: Sequence[float]
    is_former: bool = False  # its term is no longer in the package
    is_joint: bool = False  # all tasks from the start to the end
    like: str = ""  # the arm whose best setting it takes, instead of being tuned
    tokens: float = 1.0  # part of the others' generated tokens


AT_RATE = {**OFF, "lr": RATE}
NONE, RATES = {**OFF, "replay_capacity": 0}, (1e-4, 2e-4, 4e-4, 8e-4)
REVISITS = {**AT_RATE, "replay_revisit_fraction": 0.1}
PRESET = {**MEMORIES["srl"], "lr": RATE}
FIT = (0.03, 0.1, 0.3, 1.0)
ARMS = {
    "none": Arm(NONE, "lr", RATES),
    "uniform": Arm(AT_RATE, "replay_revisit_fraction", SHARES),
    TESTED: Arm(REVISITS, "replay_retain", WEIGHTS, is_former=True),
    "srl": Arm(PRESET, "replay_revisit_fraction", SHARES, is_former=True),
    "retention": Arm(AT_RATE, "replay_retain", WEIGHTS, is_former=True),
    "retention_60": Arm(AT_RATE, "replay_retain", WEIGHTS, is_former=True, like="retention", tokens=0.6),
    "cross_entropy": Arm(AT_RATE, "replay_retain", FIT),
    "importance": Arm(AT_RATE, "replay_retain", FIT, is_former=True),
    "from_start": Arm(AT_RATE, "replay_retain", WEIGHTS, is_former=True),
    "as_acted": Arm({**AT_RATE, "replay_retain_top_k": 0}, "replay_retain", WEIGHTS, is_former=True),
    "lwf": Arm(REVISITS, "lwf", FIT),
    "joint": Arm(NONE, "lr", RATES, is_joint=True),
    "uniform_twice": Arm({**OFF, "num_epochs": 2}, "replay_revisit_fraction", ()),  # twice the trained tokens
    "uniform_40": Arm(AT_RATE, "replay_revisit_fraction", (0.4,)),
    HELD: Arm(AT_RATE, "replay_retain", (1.0,), is_former=True),
    "preset": Arm(PRESET, "replay_revisit_fraction", SHARES, is_former=True),
    "preset_10": Arm(PRESET, "replay_revisit_fraction", (0.1,), is_former=True),
    CONSTANT: Arm(AT_RATE, "replay_retain", (1.0,)),  # cross-entropy as the package has it
    "preset_constant": Arm(PRESET, "replay_revisit_fraction", (0.1,)),
}
FROZEN = {  # by attempt 2 and its check, on four development seeds
    "conflict": {"none": 2e-4, "uniform": 0.4, TESTED: 3.0},
    "shared": {"uniform": 0.25, TESTED: 0.3},
}


class Plan(NamedTuple):
    """Arms on one kind of streams. All are tuned on the development seeds before the seeds of the table begin."""

    name: str
    kind: str
    development: Sequence[int]
    table: Sequence[int]
    grids: Mapping[str, Sequence[Settings]]  # arm -> the settings among which tuning chooses


def at_one_rate(kind: str, *arms: str) -> Plan:
    """Return a part of the plan for arms that decide nothing."""
    first = {"conflict": 7000, "shared": 8000}[kind]
    grids = {
        arm: [{ARMS[arm].tuned: value} for value in ([FROZEN[kind][arm]] if arm in FROZEN[kind] else ARMS[arm].values)]
        for arm in arms
    }
    seeds = (first + 1, first + 2), tuple(range(first + 101, first + 113))
    return Plan("one rate", kind, *seeds, grids)


def crossed(name: str, values: Sequence[float]) -> list[Settings]:
    """Return the settings of attempt 3 for an arm: two rates and two values."""
    return [{"lr": rate, name: value} for rate in (2e-4, RATE) for value in values]


ATTEMPT_3 = [
    Plan("attempt 3", "conflict", tuple(range(7101, 7109)), tuple(range(7201, 7249)), {
        "none": [{"lr": 2e-4}, {"lr": 4e-4}, {"lr": 1e-4, "num_epochs": 2}, {"lr": 2e-4, "num_epochs": 2}],
        "uniform": crossed("replay_revisit_fraction", (0.25, 0.4)),
        "cross_entropy": crossed("replay_retain", (1.0, 3.0)),
    }),
    Plan("attempt 3", "shared", tuple(range(8101, 8109)), tuple(range(8201, 8225)), {
        "uniform": crossed("replay_revisit_fraction", (0.25, 0.4)),
        "cross_entropy": crossed("replay_retain", (1.0, 3.0)),
    }),
]  # fmt: skip


def after_attempt_3(kind: str, num_seeds: int, *arms: str) -> Plan:
    """Return arms that run on the first seeds of attempt 3, beside its own, and decide nothing about it."""
    plan = next(plan for plan in ATTEMPT_3 if plan.kind == kind)
    grids = {arm: [{ARMS[arm].tuned: value} for value in ARMS[arm].values] for arm in arms}
    return plan._replace(development=plan.development[:2], table=plan.table[:num_seeds], grids=grids)


CHECK = [
    after_attempt_3("conflict", 24, "uniform_40", HELD, "preset"),
    after_attempt_3("shared", 24, HELD, "preset"),
    after_attempt_3("conflict", 48, "uniform_40"),
    after_attempt_3("shared", 24, "preset_10"),
    after_attempt_3("conflict", 24, CONSTANT, "preset_constant"),
    after_attempt_3("shared", 24, CONSTANT, "preset_constant"),
    after_attempt_3("conflict", 24, "uniform_twice")._replace(
        grids={"uniform_twice": crossed("replay_revisit_fraction", (0.25, 0.4))}
    ),
]
PLANS = [
    *(at_one_rate(kind, "none", "uniform", TESTED, "srl") for kind in ("conflict", "shared")),
    at_one_rate("conflict", "retention", "retention_60", "cross_entropy", "joint"),
    *ATTEMPT_3,
    *CHECK,
    at_one_rate("conflict", "importance", "from_start", "as_acted", "lwf"),
    at_one_rate("shared", "retention", "cross_entropy", "joint"),
    at_one_rate("shared", "importance", "from_start", "as_acted", "lwf"),
]


class Trial(NamedTuple):
    """One run."""

    kind: str
    arm: str
    seed: int
    settings: Settings  # those that are tuned


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

    On a seed that is in no table only the greedy accuracy at the end is measured. `entropy` is that of the last update
    on new answers, in nats a token.
    """
    marks = NUM_AT_MARKS if any(trial.seed in plan.table for plan in PLANS) else 0
    begin, seconds, trained, num_held, entropy = time.perf_counter(), 0.0, 0, 0, float("nan")
    algo = build_config(settings_of(trial, tasks)).build_algo()
    try:
        before, rows = accuracies(algo, tasks, marks), list[list[float]]()
        while len(rows) < len(tasks):
            start = time.perf_counter()
            result = algo.train()
            seconds += time.perf_counter() - start
            held = result.get("retention", {})
            learned = result["learners"].get("default_policy", {})
            trained += counted(learned, "num_tokens")
            entropy = latest if np.isfinite(latest := learned.get("entropy", np.nan)) else entropy
            num_held += counted(held, "num_held_tokens")
            if algo.source.progress.tokens >= tokens_of(trial) * (len(rows) + 1):
                is_last = len(rows) + 1 == len(tasks)
                rows.append(accuracies(algo, tasks, NUM_AT_END if is_last else marks))
        sampled, _ = several_answers(NUM_ANSWERS if marks else 0, algo.source.heldout(NUM_SAMPLED), algo.play)
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
        "held_tokens": num_held * algo.config.num_epochs,
        "entropy": round(float(entropy), 5),
        "sampled": {name: round(figure, 5) for name, figure in sampled.items()},
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }


# --- the plan -------------------------------------------------------------------------------------


def best_of(rows: Sequence[Mapping[str, Any]], grid: Sequence[Settings], seeds: Sequence[int]) -> Settings | None:
    """Return the setting with the best mean final accuracy over seeds; None if one has not all of them."""
    finals = [[row["final"] for row in rows_of(rows, setting, seeds).values()] for setting in grid]
    if any(len(final) < len(seeds) for final in finals):
        return None
    return grid[int(np.argmax([fmean(final) for final in finals]))]


def key_of(arm: str, settings: Settings) -> str:
    """Return the same text for equal settings of an arm, tuned or fixed, read from a file or not."""
    return json.dumps({**ARMS[arm].fixed, **settings}, sort_keys=True)


def rows_of_arm(rows: Sequence[Mapping[str, Any]], kind: str, arm: str) -> list[Mapping[str, Any]]:
    """Return the rows of an arm on a kind of streams."""
    return [row for row in rows if (row["kind"], row["arm"]) == (kind, arm)]


def rows_of(
    rows: Sequence[Mapping[str, Any]], setting: Settings, seeds: Sequence[int]
) -> dict[int, Mapping[str, Any]]:
    """Return the row of each seed at one setting, of the rows of one arm."""
    own = [row for row in rows if key_of(row["arm"], row["settings"]) == key_of(row["arm"], setting)]
    return {row["seed"]: row for row in own if row["seed"] in seeds}


def best(rows: Sequence[Mapping[str, Any]], plan: Plan, arm: str) -> Settings | None:
    """Return the setting that an arm runs with on the seeds of the table; None if tuning has not ended."""
    arm = ARMS[arm].like or arm
    grid = plan.grids[arm]
    return grid[0] if len(grid) == 1 else best_of(rows_of_arm(rows, plan.kind, arm), grid, plan.development)


def missing(rows: Sequence[Mapping[str, Any]]) -> Iterator[Trial]:
    """Yield the trials to run next, in order, as far as they are known."""
    done = {(row["kind"], row["arm"], row["seed"], key_of(row["arm"], row["settings"])) for row in rows}
    for plan in PLANS:
        grids = {arm: grid for arm, grid in plan.grids.items() if not ARMS[arm].is_former}
        chosen = {arm: best(rows, plan, arm) for arm in grids}
        tuned = {arm: grid for arm, grid in grids.items() if len(grid) > 1 and not ARMS[arm].like}
        wanted = [
            Trial(plan.kind, arm, seed, setting)
            for seed in plan.development
            for arm, grid in tuned.items()
            for setting in grid
        ]
        if None not in chosen.values():
            wanted += [
                Trial(plan.kind, arm, seed, setting or {}) for seed in plan.table for arm, setting in chosen.items()
            ]
        todo = [t for t in wanted if (t.kind, t.arm, t.seed, key_of(t.arm, t.settings)) not in done]
        if todo:
            yield from todo
            return


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are complete; a line that a kill cut short is left out."""
    return [row for row in json_lines(path, dict) if row is not None]


# --- tables ---------------------------------------------------------------------------------------


def tuning_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each setting that has ended: mean final accuracy over the development seeds."""
    for plan in PLANS:
        for arm, grid in plan.grids.items():
            own, chosen = rows_of_arm(rows, plan.kind, arm), best(rows, plan, arm)
            for setting in grid if len(grid) > 1 else ():
                if found := rows_of(own, setting, plan.development):
                    mean = fmean(row["final"] for row in found.values())
                    mark = "  <- best" if setting == chosen else ""
                    row = f"{plan.name}  {plan.kind:9} {arm:19} {json.dumps(setting):48}"
                    yield f"{row} {mean:.3f} ({len(found)}){mark}"


def result_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each arm whose seeds have all ended, with its differences to those of `COMPARED`, and what is decided."""
    for name, kind in dict.fromkeys((plan.name, plan.kind) for plan in PLANS):
        found = dict[str, dict[int, Mapping[str, Any]]]()
        for plan in [plan for plan in PLANS if (plan.name, plan.kind) == (name, kind)]:
            for arm in plan.grids:
                setting = best(rows, plan, arm)
                ended = rows_of(rows_of_arm(rows, kind, arm), setting, plan.table) if setting is not None else {}
                if len(ended) == len(plan.table):
                    found[arm] = ended
                    parts = parts_of(list(ended.values()))
                    yield f"{name}  {kind:9} {arm:19} {json.dumps(setting):48} {parts}"
        for other in [arm for arm in COMPARED if arm in found]:
            for arm in [arm for arm in found if arm != other]:
                yield f"{name}  {kind:9} {arm} - {other}: {in_words(gain_of(found[arm], found[other]))}"
        yield from decision(name, kind, found)


def decision(name: str, kind: str, found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield what a plan decides on a kind of streams, once the arms that it needs have ended."""
    of_constant = 0.01 if kind == "conflict" else MARGIN
    for arm, other, margin in (
        ("srl", TESTED, MARGIN), ("preset", HELD, MARGIN), ("preset_10", HELD, MARGIN),
        (CONSTANT, HELD, of_constant), ("preset_constant", CONSTANT, MARGIN),
    ):  # fmt: skip
        if {arm, other} <= set(found):
            shown = "shown" if is_not_worse(gain_of(found[arm], found[other]), margin) else "not shown"
            yield f"{kind:9} {arm} is {shown} to be no worse than {other} by {margin}"
    if name != "attempt 3" or "cross_entropy" not in found:
        return
    tested = found["cross_entropy"]
    if kind == "shared":
        is_level = is_not_worse(gain_of(tested, found["uniform"]), MARGIN)
        yield f"co-primary: {'holds' if is_level else 'missed'}: not worse than uniform by {MARGIN}"
        return
    gains = [gain_of(tested, found[other]) for other in ("uniform", "none")]
    p_values = holm([paired_test(gain).p for gain in gains])
    holds = all(p < ALPHA and gain.mean() >= MARGIN for p, gain in zip(p_values, gains, strict=True))
    against_uniform, against_none = p_values
    verdict = "holds" if holds else "missed"
    yield f"primary: {verdict}: p after Holm {against_uniform:.4f} (uniform), {against_none:.4f} (none)"


def gain_of(tested: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]) -> np.ndarray:
    """Return the differences in final accuracy, one a seed that both have."""
    return np.array([tested[seed]["final"] - other[seed]["final"] for seed in sorted(set(tested) & set(other))])


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
    trained, held, seconds = (fmean(row[name] for row in rows) for name in ("trained_tokens", "held_tokens", "seconds"))
    final = fmean(row["final"] for row in rows)
    line = f"final {final:.3f} ({named}), forgetting {lost:.3f}, {trained:.0f} + {held:.0f} trained and held tokens, "
    line += f"{seconds:.0f} s"
    if all(row.get("sampled") for row in rows):  # older rows lack it
        entropy = np.nanmean([row["entropy"] for row in rows])  # NaN where no update came last
        one, several = (fmean(row["sampled"][name] for row in rows) for name in ("pass_at_1", "pass_at_k"))
        line += f", entropy {entropy:.3f}, pass@1 {one:.3f}, pass@{NUM_ANSWERS} {several:.3f}"
    return line


def main() -> None:
    """Run what is missing, one trial after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--table", action="store_true", help="print the tables, and run nothing")
    parser.add_argument("--last", action="store_true", help="begin with the last of the missing trials")
    arguments = parser.parse_args()
    path = arguments.directory / "trials.jsonl"
    if arguments.table:
        rows = read_rows(path)
        print(*tuning_table(rows), *result_table(rows), sep="\n")
        return
    arguments.directory.mkdir(parents=True, exist_ok=True)
    while todo := list(missing(read_rows(path))):
        if arguments.last and len(todo) == 1:
            time.sleep(20)  # the other process runs it
            continue
        trial = todo[-1 if arguments.last else 0]
        row = run(trial, draw_stream(trial.kind, trial.seed))
        if trial in missing(read_rows(path)):
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(trial.kind, trial.arm, trial.seed, json.dumps(trial.settings), f"{row['wall_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
