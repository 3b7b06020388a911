"""The charts of a run as data: which metrics belong together, and their titles; a report and a live page draw them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rllib_srl.cli.report.run_facts import ACCURACY, DOMAIN, LEARNER, LIVE_TOKENS, REWARD, RunFacts
from rllib_srl.studies.report.charts import NUM_DRAWN, Line

LIVE = "Live tokens are in groups that are trained on."
SILENT = "A silent group has equal rewards, mostly without a gradient."
UNKNOWN = "–"
LEARNED = {  # learner metric -> title
    "policy_loss": "policy loss",
    "gradients_default_optimizer_global_norm": "gradient norm",
    "entropy": "entropy, nats per token",
    "kl": "KL to the reference, nats per token",
    "clip_fraction": "share of clipped tokens",
    "rollout_logp_abs_diff": "learner and engine differ by, nats per token",
}
MEANINGS = {
    "Revisits, reuse, live tokens": "Realised shares since the start: prompts played again, and stored groups trained "
    "on again. Live: share of an iteration's generated tokens that are trained on.",
    "Pass rate of revisits": "Share of right answers to revisited prompts.",
    "Surprise by history": "Mean difference of a reward from the one that the prompt's history predicts.",
    "Items": "Prompts in the memory, and those that wait to be scheduled.",
}


@dataclass(frozen=True)
class Plot:
    """Metrics of a run by iteration, in one chart. Invariant: each series has a value or nan for each iteration."""

    title: str
    y: str  # label of the axis
    iterations: np.ndarray
    series: Mapping[str, np.ndarray]
    bands: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)  # low and high, of series with a band
    may_be_share: bool = True  # drawn from 0 to 1 if no value lies outside

    @property
    def lines(self) -> dict[str, Line]:
        """Return the points of each series that are known."""
        lines = {}
        for name, values in self.series.items():
            known = ~np.isnan(values)
            low, high = self.bands.get(name, (values, values))
            lines[name] = Line(self.iterations[known], values[known], low[known], high[known])
        return lines

    @property
    def is_share(self) -> bool:
        """Return whether all values are shares, drawn in percent."""
        every = np.concatenate([line.mean for line in self.lines.values()])
        return self.may_be_share and bool(len(every)) and float(every.min()) >= 0 and float(every.max()) <= 1

    @property
    def alt(self) -> str:
        """Return the first and last values in words, as the chart's text alternative."""
        ends = {name: (line.mean[0], line.mean[-1]) for name, line in self.lines.items() if len(line.x)}
        told = "; ".join(f"{name}: {number(first)} to {number(last)}" for name, (first, last) in ends.items())
        return f"{self.title}. {told}"


@dataclass(frozen=True)
class PlotRow:
    """Charts side by side with one caption; `legend` names the series of the only chart."""

    plots: tuple[Plot, ...]
    caption: str
    legend: tuple[str, ...] = ()
    kind: str = "plots"


def learning_plots(facts: RunFacts) -> list[Plot]:
    """Return the charts of reward, of each reward function, and of held-out accuracy."""
    plots = [_plot(facts, {"reward": facts.values(REWARD)}, "Reward of training episodes", "mean reward")]
    for name in sorted(name for name in facts.columns if name.startswith("env_runners/reward/")):
        title = name.removeprefix("env_runners/reward/")
        plots.append(_plot(facts, {title: facts.values(name)}, f"Reward function {title}", "mean value"))
    if facts.has(ACCURACY):
        bands = {"accuracy": [facts.values(f"evaluation/accuracy_{side}") for side in ("low", "high")]}
        series = {"accuracy": facts.values(ACCURACY)}
        plots.append(_plot(facts, series, "Accuracy on held-out prompts", "accuracy", bands))
    return plots


def live_plot(facts: RunFacts) -> tuple[Plot, str]:
    """Return the chart of the tokens that are trained on, and a caption; of runs without them, of the silent groups."""
    if facts.has(LIVE_TOKENS):
        series = {"live tokens": facts.values(LIVE_TOKENS)}
        return _plot(facts, series, "Live tokens", "share of generated tokens"), LIVE
    return _plot(facts, {"silent": facts.silent_shares}, "Silent groups", "share of groups"), SILENT


def domain_row(facts: RunFacts) -> PlotRow | None:
    """Return held-out accuracy by domain, of those that changed most; None with less than two domains."""
    first, last = DOMAIN
    changes = facts.domain_changes
    if len(changes) < 2:
        return None
    chosen = sorted(sorted(changes, key=lambda name: -abs(changes[name].last - changes[name].first))[:NUM_DRAWN])
    few = f"The {NUM_DRAWN} of {len(changes)} domains that changed most. " if len(changes) > NUM_DRAWN else ""
    series = {name: facts.values(f"{first}{name}{last}") for name in chosen}
    plot = _plot(facts, series, "Accuracy by domain", "accuracy")
    return PlotRow((plot,), f"{few}The table has all of them.", tuple(chosen))


def memory_rows(facts: RunFacts) -> Iterator[PlotRow]:
    """Yield the charts of the memory, each with its meaning."""
    shares = {
        "revisits, of prompts": facts.values("replay/revisit_share_prompts"),
        "reuse, of groups": facts.values("replay/reuse_share_prompts"),
        "live tokens": facts.values(LIVE_TOKENS),
    }
    recall = {"pass rate": facts.values("replay/revisit_pass_rate")}
    surprise = {"surprise": facts.values("replay/surprise_mean")}
    size = {"items": facts.values("replay/num_items")}
    drawn = (
        ("Revisits, reuse, live tokens", shares, "share"),
        ("Pass rate of revisits", recall, "share"),
        ("Surprise by history", surprise, "reward"),
        ("Items", size, "items"),
    )
    for title, series, y in drawn:
        if known := _known(series):
            legend = tuple(known) if len(known) > 1 else ()
            yield PlotRow((_plot(facts, known, title, y),), MEANINGS[title], legend)


def learner_plots(facts: RunFacts) -> list[Plot]:
    """Return the charts of the learner; metrics that are always 0 are left out."""
    found = {title: facts.values(f"{LEARNER}/{name}") for name, title in LEARNED.items()}
    known = {title: values for title, values in _known(found).items() if np.nanmax(abs(values))}
    return [_plot(facts, {title: values}, title, "", may_be_share=False) for title, values in known.items()]


def cost_plots(facts: RunFacts) -> list[Plot]:
    """Return the charts of tokens, time and speed."""
    tokens, seconds = facts.values("env_runners/num_generated_tokens"), facts.values("time_this_iter_s")
    rollout = facts.values("timers/rollout")
    speed = np.divide(tokens, rollout, out=np.full(len(tokens), math.nan), where=rollout > 0)
    drawn = (
        ("tokens", np.nancumsum(tokens), "Generated tokens", "tokens since the start"),
        ("s", seconds, "Duration of an iteration", "seconds"),
        ("speed", speed, "Speed of rollouts", "tokens per second"),
    )
    return [_plot(facts, {name: values}, title, y, may_be_share=False) for name, values, title, y in drawn]


def number(value: float) -> str:
    """Return a value in at most three digits, or with thousands separated."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _plot(
    facts: RunFacts,
    series: Mapping[str, np.ndarray],
    title: str,
    y: str,
    bands: Mapping[str, Sequence[np.ndarray]] | None = None,
    may_be_share: bool = True,
) -> Plot:
    return Plot(title, y, facts.iterations, series, bands or {}, may_be_share)


def _known(series: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values for name, values in series.items() if not np.isnan(values).all()}
