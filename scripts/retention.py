"""Simulate, without a model, the desired retention at which revisits have most signal, for every spacing rule.

    python scripts/retention.py                    two learners, every spacing rule, desired retentions of .3 to .95

GRPO learns from a group only if its episodes differ: of G episodes at pass rate p, that is 1 - p^G - (1 - p)^G,
which is .99 at p = .5, .57 at .9 and .08 at .99 for G = 8. A person learns from every review. So while people should
review at a recall of about .9, a policy may learn more per generated token if it waits longer. Assumptions:

1. Item i passes with b + (peak - b) f(t / S) at t iterations after it was last strengthened: b ~ Beta(1, 4) is the
   policy's pass rate without it, S (median 8 iterations, log deviation .7) the item's own true stability,
   f(x) = 0.9^x ("exponential") or FSRS's power curve ("power").
2. A visit strengthens: peak <- p + 0.7 (1 - p), S <- 1.6 S, t <- 0. For the learner "grpo", only if the group's
   episodes differ; otherwise nothing changes and forgetting goes on. The learner "person" is strengthened by all.
3. Visits cost the same, so signal per revisit is signal per generated token. Every due item is visited: rules differ in
   the number of visits, not in the allocation of slots.
4. Items arrive evenly over the first third. An iteration is a day. Grades come from the pass rate, as in training.

"signal" is the share of revisits (without first visits, which do not depend on the rule) whose group has signal: the
yield of replay per token. "pass rate" is the retained skill: the mean over all items and the last third of iterations.
Read both: almost no reviews give the purest signal. The result is a prior for measurements with models.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import rounded, table
from rllib_srl.replay.schedule.grading import PRIOR, Evidence, by_pass_rate, posterior
from rllib_srl.replay.schedule.spacing import SPACINGS, SpacingRule, SpacingState, make_spacing

RETENTIONS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
IGNORE_RETENTION = ("fixed", "none")  # their intervals do not depend on it
LEARNED, GROWTH = 0.7, 1.6  # share of 1 - p that a visit adds; factor of stability
MEDIAN_STABILITY, LOG_DEVIATION = 8.0, 0.7  # iterations
POWER = 0.1542  # FSRS's decay


@dataclass(frozen=True)
class Learner:
    """The forgetting of a simulated policy, and the visits that strengthen it."""

    name: str
    is_power: bool = False
    needs_signal: bool = True

    def kept(self, time_N: np.ndarray) -> np.ndarray:
        """Return the share of the learned pass rate that is left after `time_N` stabilities; 0.9 after one."""
        if self.is_power:
            power_N: np.ndarray = (1 + (0.9 ** (-1 / POWER) - 1) * time_N) ** -POWER
            return power_N
        exponential_N: np.ndarray = 0.9**time_N
        return exponential_N


LEARNERS = (
    Learner("grpo, exponential forgetting"),
    Learner("grpo, power forgetting", is_power=True),
    Learner("person, power forgetting", is_power=True, needs_signal=False),
)


@dataclass(frozen=True)
class Outcome:
    """The results of a rule. Invariant: shares and means are over revisits, nan without any, except `pass_rate`."""

    reviews_per_item: float  # median, the first visit included
    signal: float  # share of revisits with signal
    recall: float  # pass rate at revisits, in expectation
    pass_rate: float  # over all items and the last third of iterations


def signal(pass_rate: np.ndarray | float, group_size: int) -> np.ndarray | float:
    """Return the chance that a group holds a success and a failure: 1 - p^G - (1 - p)^G."""
    return 1 - pass_rate**group_size - (1 - pass_rate) ** group_size


def simulate(
    learner: Learner, rule: SpacingRule, num_items: int, iterations: int, group_size: int, seed: int
) -> Outcome:
    """Let `rule` schedule `num_items` items of a learner.

    Args:
        iterations: days, at least 3.
        group_size: episodes of a visit.
        seed: of the items and of every episode.
    """
    generator = np.random.default_rng(seed)
    arrival_N = np.arange(num_items) * (iterations // 3) // num_items
    base_N = generator.beta(1, 4, num_items)
    true_N = MEDIAN_STABILITY * np.exp(generator.normal(0, LOG_DEVIATION, num_items))
    peak_N, since_N = base_N.copy(), np.zeros(num_items)
    state, due_N, last_N = SpacingState.new(num_items).columns(), arrival_N.astype(float), np.zeros(num_items)
    alpha_N, beta_N = np.full(num_items, PRIOR[0]), np.full(num_items, PRIOR[1])
    signals: list[np.ndarray] = []
    recalls: list[np.ndarray] = []
    held: list[float] = []
    for now in range(iterations):
        recall_N = base_N + (peak_N - base_N) * learner.kept((now - since_N) / true_N)
        if now >= iterations - iterations // 3:
            held.append(float(recall_N.mean()))
        due = np.flatnonzero(due_N <= now)
        if not len(due):
            continue
        success_N = generator.binomial(group_size, recall_N[due])
        mixed_N = (success_N > 0) & (success_N < group_size)
        size_N = np.full(len(due), group_size)
        alpha_N[due], beta_N[due] = posterior(success_N, size_N, alpha_N[due], beta_N[due])
        grade_N = by_pass_rate(Evidence(size_N=size_N, alpha_N=alpha_N[due], beta_N=beta_N[due]), min_graded=1)
        after = rule.review(SpacingState.of(state)[due], grade_N, now - last_N[due], mixed_N)
        for name, column in after.columns().items():
            state[name][due] = column
        last_N[due], due_N[due] = now, now + np.maximum(1.0, after.interval_N)
        taught = due[mixed_N] if learner.needs_signal else due
        peak_N[taught] = recall_N[taught] + LEARNED * (1 - recall_N[taught])
        true_N[taught] *= GROWTH
        since_N[taught] = now
        again_N = state["reps"][due] > 1
        signals.append(mixed_N[again_N])
        recalls.append(recall_N[due][again_N])
    return Outcome(
        reviews_per_item=float(np.median(state["reps"])),
        signal=_mean(np.concatenate(signals)),
        recall=_mean(np.concatenate(recalls)),
        pass_rate=float(np.mean(held)),
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def sweep(learner: Learner, names: Sequence[str], arguments: argparse.Namespace) -> Iterator[tuple[str, str, Outcome]]:
    """Yield each rule's outcome at each desired retention ("-" where it does not matter)."""
    for name in names:
        ignores = name in IGNORE_RETENTION
        for retention in RETENTIONS[-1:] if ignores else RETENTIONS:
            rule = make_spacing(name, retention, untrained_gain=arguments.untrained_gain)
            sizes = (arguments.items, arguments.iterations, arguments.group_size, arguments.seed)
            yield name, "-" if ignores else f"{retention:g}", simulate(learner, rule, *sizes)


def rows_of(found: Sequence[tuple[str, str, Outcome]]) -> Iterator[list[str]]:
    """Yield the table, heading first."""
    yield ["rule", "retention", "reviews/item", "signal", "recall at revisits", "pass rate"]
    for name, retention, outcome in found:
        figures = (outcome.signal, outcome.recall, outcome.pass_rate)
        yield [name, retention, f"{outcome.reviews_per_item:g}", *map(rounded, figures)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--rules", nargs="+", choices=sorted(SPACINGS), default=sorted(SPACINGS))
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--untrained_gain", type=float, default=1.0, help="share of the stability gain without signal")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    chances = ", ".join(f"{signal(p, arguments.group_size):.2f} at {p:g}" for p in (0.5, 0.7, 0.9, 0.95, 0.99))
    print(f"chance that a group of {arguments.group_size} has signal, by pass rate: {chances}")
    for learner in LEARNERS:
        print(f"\n{learner.name}: {arguments.items} items, {arguments.iterations} iterations")
        print(table(list(rows_of(list(sweep(learner, arguments.rules, arguments))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
