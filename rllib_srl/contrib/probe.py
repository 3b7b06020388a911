"""Probes of recall (TFC-SR): held-out prompts of each domain are played greedily, at growing gaps while it is mastered.

    config.callbacks("contrib.probe")

    probed at `due`;  mastered: gap x growth, due += round(gap);  not: gap = first, due += first
    first 1, growth 1.5, always mastered:  1 3 5 8 13       (1.5, 2.25, 3.375, 5.06 rounded to even)

A probe plays other prompts than evaluation does, with its own random stream. It advances no generator of training and
grades no item, so training samples the same tokens with and without probes. Its recall replaces the average accuracy in
`contrib.forgetting`. The published gain of this schedule came from replay in both arms; here the schedule is a
measurement, and only the use of its results changes training.

Source: task-focused consolidation with spaced recall (TFC-SR) 2025, arXiv 2507.21109.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rllib_srl.common.callbacks import SRLCallback, hooks
from rllib_srl.curriculum.curriculum import Plan


class Probe(SRLCallback):
    """The schedule; subclass it to change its parameters. Invariant: `get_state` holds its whole state."""

    first_gap = 1  # iterations, also after a recall below `mastery`
    num_prompts = 16  # of a probe
    mastery = 0.5  # lowest recall with which the gap grows, in [0, 1]
    growth = 1.5  # factor of the gap, at least 1

    def __init__(self) -> None:
        """Start without domains."""
        super().__init__()
        self.schedule: dict[str, list[float]] = {}  # domain -> iteration of the next probe, gap

    def after(self, gap: float, recall: float, now: int) -> list[float]:
        """Return iteration and gap of the next probe after one with this recall."""
        if recall < self.mastery:
            return [now + self.first_gap, float(self.first_gap)]
        return [now + max(1, round(gap * self.growth)), gap * self.growth]

    def change_plan(self, *, algorithm: Any, plan: Plan, now: int, metrics_logger: Any, **kwargs: Any) -> Plan:
        """Play the probes that are due; the plan stays as it is."""
        for name, weight in algorithm.source.domain_weights().items():
            if weight > 0:
                self.schedule.setdefault(name, [now + self.first_gap - 1, float(self.first_gap)])
        names = [name for name, (due, _) in self.schedule.items() if due <= now]
        held = algorithm.config.evaluation_duration
        prompts = [prompt for name in names for prompt in algorithm.source.probes(name, self.num_prompts, held)]
        options = {"group_size": 1, "temperature": 0.0, "as_groups": False, "num_transcripts": 0}
        batches = list(algorithm.play(prompts, "probe", **options)) if prompts else []
        groups = [group for batch in batches for group in batch.groups]
        for name in names:
            is_right = [group.is_right_G()[0] for group in groups if group.prompt.domain == name]
            if not is_right:  # infrastructure ended all episodes: the probe stays due
                continue
            recall = float(np.mean(is_right))
            self.schedule[name] = self.after(self.schedule[name][1], recall, now)
            for hook in hooks(algorithm):
                if (recalled := getattr(hook, "recalled", None)) is not None:
                    recalled(name, recall)
            metrics_logger.log_value(("planner", "recall", name), recall, reduce="mean", window=1)
        num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in groups))
        for name, number in {"num_probe_prompts": len(prompts), "num_probe_tokens": num_tokens}.items():
            metrics_logger.log_value(("planner", name), number, reduce="lifetime_sum")
        return plan

    def get_state(self) -> dict[str, Any]:
        """Return the schedule by domain."""
        return {name: list(row) for name, row in self.schedule.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the schedule of a checkpoint."""
        self.schedule = {name: list(row) for name, row in state.items()}


probe = Probe
