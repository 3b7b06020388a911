"""Measure bias and noise of policy gradients under each baseline, against the exact gradient of a small problem.

    python -m scripts.bench.baselines                  the table of docs/losses.md, about a minute
    python -m scripts.bench.baselines --repeats 200    a quick look

64 prompts with four answers each, one of them right, and a softmax policy with a logit per answer: an exact gradient.
Each prompt was visited eight times by earlier policies, whose logit of the right answer was lower by about .15 a visit
(.3 standard deviation); histories come from these visits. Then one batch of 64 episodes is drawn: 64 / G prompts, G
answers each. The estimate is the mean of A grad log pi.

    bias    |E[estimate] / c - gradient| / |gradient|, c the factor that fits best (a scale is no bias of direction)
    noise   root mean square of |estimate / c - gradient| / |gradient|, at equal numbers of episodes
    live    share of groups that are trained on

SPO's tracker starts with eight samples of the first policy and halves after eight episodes, as does the history of the
posterior. The critic is a value for each prompt that moves by .1 of its error at each episode. Neither uses peers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rllib_srl.batch.estimators import group_relative
from rllib_srl.batch.posterior import posterior
from rllib_srl.types import History
from scripts.bench.common import add_output, write

NUM_PROMPTS, NUM_ANSWERS, NUM_EPISODES, NUM_VISITS = 64, 4, 64, 8
SIZES = (1, 2, 4, 8)
HALF_LIFE = 8  # episodes
STEP = 0.1  # of the critic, an episode


@dataclass(frozen=True)
class Problem:
    """A policy after `NUM_VISITS` updates. Invariant: answer 0 is right; `right_VP` is of the earlier policies."""

    policy_PK: np.ndarray  # probability of each answer
    right_VP: np.ndarray  # pass rate at each earlier visit, oldest first

    @classmethod
    def of(cls, seed: int) -> Problem:
        """Draw a problem: pass rates from near 0 to near 1, and the moves of the policy that led to them."""
        generator = np.random.default_rng(seed)
        logits_PK = generator.normal(0, 1, (NUM_PROMPTS, NUM_ANSWERS))
        logits_PK[:, 0] = generator.normal(1.0, 2.5, NUM_PROMPTS)
        moves_VP = generator.normal(0.15, 0.3, (NUM_VISITS, NUM_PROMPTS))
        behind_VP = np.cumsum(moves_VP[::-1], axis=0)[::-1]
        others_P = np.log(np.exp(logits_PK[:, 1:]).sum(axis=1))
        right_VP = 1 / (1 + np.exp(others_P - logits_PK[:, 0] + behind_VP))
        policy_PK = np.exp(logits_PK) / np.exp(logits_PK).sum(axis=1, keepdims=True)
        return cls(policy_PK, right_VP)

    @property
    def gradient(self) -> np.ndarray:
        """Return the exact gradient of the mean pass rate by the logits: p_right (1[k = right] - p_k) / P."""
        right_P1 = self.policy_PK[:, :1]
        gradient_PK: np.ndarray = right_P1 * (np.eye(NUM_ANSWERS)[0] - self.policy_PK) / NUM_PROMPTS
        return gradient_PK


@dataclass(frozen=True)
class Batch:
    """One batch and what is known before it."""

    rewards: list[np.ndarray]  # [G] per group
    histories: list[History]  # of the posterior
    tracked: list[History]  # of SPO
    values: list[float]  # of the critic


Rule = Callable[[Batch], list[np.ndarray]]


def _critic(batch: Batch) -> list[np.ndarray]:
    return [rewards_G - value for rewards_G, value in zip(batch.rewards, batch.values, strict=True)]


def _spo(batch: Batch) -> list[np.ndarray]:
    """Return (r - v - mean) / std, also for several episodes of a prompt: they share the tracker's value."""
    each = [reward_G for rewards_G in batch.rewards for reward_G in np.split(rewards_G, len(rewards_G))]
    size = len(batch.rewards[0])
    tracked = [history for history in batch.tracked for _ in range(size)]
    flat = np.concatenate(posterior(each, tracked, 0.0, "centred"))
    return np.split(flat, len(batch.rewards))


def _skipping(rule: Rule, least: float) -> Rule:
    def skipped(batch: Batch) -> list[np.ndarray]:
        return [a_G if np.abs(a_G).max() >= least else np.zeros_like(a_G) for a_G in rule(batch)]

    return skipped


def _posterior(scale: str) -> Rule:
    return lambda batch: posterior(batch.rewards, batch.histories, 2.0, scale)


RULES: dict[str, tuple[Rule, int]] = {  # name -> rule, least group size
    "GRPO `group`": (lambda batch: group_relative(batch.rewards, "group"), 2),
    "RLOO `leave_one_out`": (lambda batch: group_relative(batch.rewards, "leave_one_out"), 2),
    "SPO": (_spo, 1),
    "critic": (_critic, 1),
    "`posterior`, not scaled": (_posterior("none"), 1),
    "`posterior`": (_posterior("rms"), 1),
    "`posterior`, `min_surprise` .1": (_skipping(_posterior("rms"), 0.1), 1),
    "`posterior`, `min_surprise` .5": (_skipping(_posterior("rms"), 0.5), 1),
}


@dataclass(frozen=True)
class Figures:
    """Bias and noise as shares of the gradient's norm; `live` is a share of groups."""

    bias: float
    noise: float
    live: float


def draw(problem: Problem, size: int, generator: np.random.Generator) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Return a batch of groups of `size`, its prompts [P] and its answers [P, G]."""
    prompts_P = generator.choice(NUM_PROMPTS, NUM_EPISODES // size, replace=False)
    ends_PK = problem.policy_PK[prompts_P].cumsum(axis=1)[:, :-1]  # the last answer takes the rest
    chosen_PG = (generator.random((len(prompts_P), size, 1)) > ends_PK[:, None]).sum(axis=2)
    keep = 0.5 ** (size / HALF_LIFE)
    right_VP = problem.right_VP[:, prompts_P]
    won_VP = generator.binomial(size, right_VP)
    weight_V1 = (keep ** np.arange(NUM_VISITS, 0, -1))[:, None]
    sum_P, num = (weight_V1 * won_VP).sum(axis=0), float((weight_V1 * size).sum())
    start_P = keep**NUM_VISITS * generator.binomial(HALF_LIFE, right_VP[0])
    started = keep**NUM_VISITS * HALF_LIFE
    value_P = np.full(len(prompts_P), 0.5)
    for won_P in won_VP:
        value_P += (1 - (1 - STEP) ** size) * (won_P / size - value_P)
    mean = float(problem.right_VP[-1].mean())
    histories = [History(total, num, mean) for total in sum_P.tolist()]
    tracked = [History(total, num + started) for total in (sum_P + start_P).tolist()]
    batch = Batch([row.astype(float) for row in chosen_PG == 0], histories, tracked, value_P.tolist())
    return batch, prompts_P, chosen_PG


def measure(problem: Problem, rules: Sequence[str], size: int, repeats: int, seed: int) -> dict[str, Figures]:
    """Return the figures of some rules for groups of `size`, from the same batches."""
    generator, gradient_PK = np.random.default_rng([seed, size]), problem.gradient
    num_P, live = np.zeros(NUM_PROMPTS), dict.fromkeys(rules, 0.0)
    total = {name: np.zeros_like(gradient_PK) for name in rules}  # over the batches that have the prompt
    squares = {name: np.zeros(NUM_PROMPTS) for name in rules}
    for _ in range(repeats):
        batch, prompts_P, chosen_PG = draw(problem, size, generator)
        score_PGK = np.eye(NUM_ANSWERS)[chosen_PG] - problem.policy_PK[prompts_P][:, None]
        num_P[prompts_P] += 1
        for name in rules:
            advantage_PG = np.stack(RULES[name][0](batch))
            estimate_PK = np.einsum("pg,pgk->pk", advantage_PG, score_PGK) / NUM_EPISODES
            total[name][prompts_P] += estimate_PK
            squares[name][prompts_P] += (estimate_PK**2).sum(axis=1)
            live[name] += float((np.abs(advantage_PG) > 1e-9).any(axis=1).mean()) / repeats
    return {
        name: _figures(gradient_PK, total[name], squares[name], num_P, size, repeats, live[name]) for name in rules
    }


def _figures(
    gradient_PK: np.ndarray,
    total_PK: np.ndarray,
    squares_P: np.ndarray,
    num_P: np.ndarray,
    size: int,
    repeats: int,
    live: float,
) -> Figures:
    """Return the figures from sums over the batches that have each prompt, a share of all that is the same for each."""
    share, norm = NUM_EPISODES / size / NUM_PROMPTS, float((gradient_PK**2).sum())
    mean_PK = share * total_PK / num_P[:, None]
    factor = float((mean_PK * gradient_PK).sum()) / norm
    # The means are themselves noisy; their variance is no bias.
    spread_P = share**2 * squares_P / num_P - (mean_PK**2).sum(axis=1)
    bias = float(((mean_PK / factor - gradient_PK) ** 2).sum()) - float((spread_P / num_P).sum()) / factor**2
    variance = float(squares_P.sum()) / repeats - float((mean_PK**2).sum())
    noise = max(0.0, bias) + variance / factor**2
    return Figures(math.sqrt(max(0.0, bias) / norm), math.sqrt(noise / norm), live)


def table(repeats: int, seed: int = 0) -> dict[str, dict[int, Figures]]:
    """Return rule -> group size -> figures."""
    problem, found = Problem.of(seed), {name: dict[int, Figures]() for name in RULES}
    for size in SIZES:
        able = [name for name, (_, least) in RULES.items() if size >= least]
        for name, one in measure(problem, able, size, repeats, seed).items():
            found[name][size] = one
    return found


def shown(found: dict[str, dict[int, Figures]]) -> str:
    """Return the table in Markdown: bias, noise, and in brackets the share of live groups."""
    lines = ["| baseline | " + " | ".join(f"G = {size}" for size in SIZES) + " |", "|---" * (len(SIZES) + 1) + "|"]
    for name, row in found.items():
        cells = [
            f"{row[size].bias:.2f}, {row[size].noise:.2f} ({row[size].live:.0%})" if size in row else "-"
            for size in SIZES
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=4_000, help="batches a group size")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.repeats < 2:
        parser.error(f"--repeats = {arguments.repeats}; expected at least 2")
    found = table(arguments.repeats, arguments.seed)
    print(shown(found))
    figures = {name: {size: vars(one) for size, one in row.items()} for name, row in found.items()}
    write(arguments, "baselines", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
