"""The charts of a run: which metrics belong together, and their titles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from rllib_srl.cli.report.run_facts import ACCURACY, DOMAIN, LIVE_TOKENS, REWARD, RunFacts
from rllib_srl.studies.report.blocks import Chart, Charts
from rllib_srl.studies.report.charts import NUM_DRAWN, Line, chart, legend_line

UNKNOWN = "–"
MOST_POINTS = 200  # of a line
MEANINGS = {
    "Revisits, reuse, live tokens": "Realised shares since the start: prompts played again, and stored groups trained "
    "on again. Live: share of an iteration's generated tokens that are trained on.",
    "Pass rate of revisits": "Share of right answers to revisited prompts.",
}


def learning_plots(facts: RunFacts) -> list[Chart]:
    """Return the charts of reward, of each reward function, of held-out accuracy, and of the tokens trained on."""
    plots = [_plot(facts, {"reward": facts.values(REWARD)}, "Reward of training episodes", "mean reward")]
    for name in sorted(name for name in facts.columns if name.startswith("env_runners/reward/")):
        title = name.removeprefix("env_runners/reward/")
        plots.append(_plot(facts, {title: facts.values(name)}, f"Reward function {title}", "mean value"))
    if facts.has(ACCURACY):
        bands = {"accuracy": [facts.values(f"evaluation/accuracy_{side}") for side in ("low", "high")]}
        series = {"accuracy": facts.values(ACCURACY)}
        plots.append(_plot(facts, series, "Accuracy on held-out prompts", "accuracy", bands))
    live = {"live tokens": facts.values(LIVE_TOKENS)}
    return [*plots, _plot(facts, live, "Live tokens", "share of generated tokens")]


def domain_row(facts: RunFacts) -> Charts | None:
    """Return held-out accuracy by domain, of those that changed most; None with less than two domains."""
    first, last = DOMAIN
    changes = facts.domain_changes
    if len(changes) < 2:
        return None
    chosen = sorted(sorted(changes, key=lambda name: -abs(changes[name].last - changes[name].first))[:NUM_DRAWN])
    few = f"The {NUM_DRAWN} of {len(changes)} domains that changed most. " if len(changes) > NUM_DRAWN else ""
    series = {name: facts.values(f"{first}{name}{last}") for name in chosen}
    plot = _plot(facts, series, "Accuracy by domain", "accuracy")
    return Charts((plot,), f"{few}The table has all of them.", _legend(chosen))


def memory_rows(facts: RunFacts) -> Iterator[Charts]:
    """Yield the charts of the memory, each with its meaning."""
    shares = {
        "revisits, of prompts": facts.values("replay/revisit_share_prompts"),
        "reuse, of groups": facts.values("replay/reuse_share_prompts"),
        "live tokens": facts.values(LIVE_TOKENS),
    }
    recall = {"pass rate": facts.values("replay/revisit_pass_rate")}
    drawn = (
        ("Revisits, reuse, live tokens", shares),
        ("Pass rate of revisits", recall),
    )
    for title, series in drawn:
        if known := {name: values for name, values in series.items() if not np.isnan(values).all()}:
            legend = _legend(known) if len(known) > 1 else ()
            yield Charts((_plot(facts, known, title, "share"),), MEANINGS[title], legend)


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
) -> Chart:
    """Draw series over the iterations in which they are known; from 0 to 1 if they are shares."""
    lines, ends = {}, []
    for name, values in series.items():
        known = np.isfinite(values)
        low, high = (bands or {}).get(name, (values, values))
        lines[name] = thinned(Line(facts.iterations[known], values[known], low[known], high[known]))
        if known.any():
            ends.append(f"{name}: {number(values[known][0])} to {number(values[known][-1])}")
    every = np.concatenate([line.mean for line in lines.values()])
    is_share = bool(len(every)) and float(every.min()) >= 0 and float(every.max()) <= 1
    styles, words = {name: place for place, name in enumerate(lines)}, (title, "iteration", y)
    return chart(lines, styles, *words, f"{title}. {'; '.join(ends)}", with_band=bool(bands), is_share=is_share)


def thinned(line: Line) -> Line:
    """Return a line of at most `MOST_POINTS` points, each the mean of its neighbours."""
    if len(line.x) <= MOST_POINTS:
        return line
    parts = [np.array_split(column, MOST_POINTS) for column in line]
    return Line(*(np.array([one.mean() for one in part]) for part in parts))


def _legend(names: Iterable[str]) -> tuple[tuple[str, Chart], ...]:
    return tuple((name, legend_line(place, name)) for place, name in enumerate(names))
