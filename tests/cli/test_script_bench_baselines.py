"""Bias and noise of baselines on a problem with a known gradient, in a short mode."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.bench import baselines
from scripts.bench.baselines import NUM_ANSWERS, NUM_PROMPTS, Problem, measure, table


def test_the_exact_gradient_is_that_of_finite_differences():
    problem = Problem.of(1)
    logits_PK, step = np.log(problem.policy_PK), 1e-5

    def pass_rate(logits_PK):
        weight_PK = np.exp(logits_PK)
        return float((weight_PK[:, 0] / weight_PK.sum(axis=1)).mean())

    for p, k in ((0, 0), (0, 3), (17, 1), (63, 2)):
        up_PK, down_PK = logits_PK.copy(), logits_PK.copy()
        up_PK[p, k] += step
        down_PK[p, k] -= step
        slope = (pass_rate(up_PK) - pass_rate(down_PK)) / (2 * step)
        assert problem.gradient[p, k] == pytest.approx(slope, abs=1e-9)
    assert problem.gradient.shape == (NUM_PROMPTS, NUM_ANSWERS)


def test_a_baseline_of_history_has_no_bias_and_less_noise_in_small_groups():
    found = measure(Problem.of(0), list(baselines.RULES)[:6], size=2, repeats=600, seed=0)
    rloo, posterior = found["RLOO `leave_one_out`"], found["`posterior`, not scaled"]
    assert rloo.bias < 0.05 and posterior.bias < 0.05
    assert posterior.noise < 0.8 * rloo.noise
    assert rloo.live < 0.3 and posterior.live == pytest.approx(1)


def test_the_script_prints_every_rule_and_size(capsys):
    assert baselines.main(["--repeats", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(baselines.RULES) and lines[0] == "| baseline | G = 1 | G = 2 | G = 4 | G = 8 |"
    assert lines[2].startswith("| GRPO `group` | - | ")  # it needs a group
    assert all(1 in row for name, row in table(2).items() if name.startswith("`posterior`"))
    with pytest.raises(SystemExit):
        baselines.main(["--repeats", "1"])
