"""Build the report page of a run: what it learned, on what, at which cost, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rllib_srl.algorithm.tracking.tracking import flat_settings
from rllib_srl.cli.episodes import printable_lines
from rllib_srl.cli.report.run_facts import ACCURACY, DOMAIN, LEARNER, REWARD, RunFacts
from rllib_srl.cli.shared.display import duration
from rllib_srl.cli.shared.run_log import PARTS
from rllib_srl.cli.shared.settings import ITERATIONS, all_settings
from rllib_srl.studies.report.blocks import (
    Block,
    Cell,
    Charts,
    Details,
    Heading,
    Notice,
    Page,
    Table,
    Text,
    Verbatim,
)
from rllib_srl.studies.report.charts import NUM_DRAWN, Line, chart, legend_line

UNKNOWN = "–"
HIDDEN = ("seal_key_file",)
LONGEST = 4000  # characters of a turn on the page
LEARNED = {  # learner metric -> title
    "policy_loss": "policy loss",
    "gradients_default_optimizer_global_norm": "gradient norm",
    "entropy": "entropy, nats per token",
    "kl": "KL to the reference, nats per token",
    "clip_fraction": "share of clipped tokens",
    "rollout_logp_abs_diff": "learner and engine differ by, nats per token",
}
MEMORY = {  # metric of the memory -> title and meaning
    "num_items": "items in the memory",
    "num_revisits": "prompts revisited",
    "num_reuses": "groups reused",
    "num_evicted": "items evicted",
    "num_refused": "groups refused",
    "num_groups_replaced": "groups replaced by newer ones",
    "observed_recall_mean": "recall, observed",
    "predicted_recall_mean": "recall, predicted",
    "surprise_mean": "mean surprise, |reward - prediction from history|",
    "reward_calibration_error": "calibration error of that prediction",
}


def page_of_run(facts: RunFacts, num_transcripts: int) -> Page:
    """Return the report of a run.

    Args:
        facts: of the run.
        num_transcripts: most episodes to show.
    """
    parts: Sequence[Callable[[RunFacts], Iterator[Block]]] = (
        _opening, _learning, _domains, _memory, _learner, _cost, _endings, _settings
    )
    blocks = [block for part in parts[:-1] for block in part(facts)]
    blocks += [*_transcripts(facts, num_transcripts), *parts[-1](facts)]
    return Page(f"Run {facts.directory.resolve().name}", tuple(blocks))


# --- parts ----------------------------------------------------------------------------------------


def _opening(facts: RunFacts) -> Iterator[Block]:
    settings = facts.settings
    env = settings.get("env") or ", ".join(settings.get("worlds") or ())
    env = env or ("a stream of domains" if settings.get("stream") else "unknown environments")
    what = f"{settings.get('model', 'A model')} on {env}"
    planned = settings.get(ITERATIONS.name)
    done = int(facts.iterations[-1])
    of = f" of {planned}" if planned else ""
    seconds, tokens = facts.total("time_this_iter_s"), facts.total("env_runners/num_generated_tokens")
    yield Text(f"{what}: {done}{of} iterations, {tokens:,.0f} generated tokens, {duration(seconds)}.")
    yield Notice(*_outcome(facts))
    if warnings := facts.warnings():
        yield Notice("Warnings", tuple(line[:1].upper() + line[1:] + "." for line in warnings), "warn")


def _outcome(facts: RunFacts) -> tuple[str, tuple[str, ...], str]:
    """Return title, lines and tone of the box with the results."""
    first, last = facts.span(REWARD)
    title = f"Mean reward {_number(first)} at the start, {_number(last)} at the end"
    lines = ["Of training episodes, over the first and last iterations: five of each, or half of a shorter run."]
    known = [number for number, row in enumerate(facts.rows) if ACCURACY in row]
    tone = "open"
    if not known:
        lines.append("Held-out accuracy was not measured (evaluation_interval).")
    else:
        before, after = (facts.rows[known[at]] for at in (0, -1))
        shown = [f"{_interval(row)} in iteration {row['iteration']:.0f}" for row in (before, after)]
        lines.append(f"Held-out accuracy, 95% interval: {'; '.join(shown if len(known) > 1 else shown[:1])}.")
        is_better = after["evaluation/accuracy_low"] > before["evaluation/accuracy_high"]
        is_worse = after["evaluation/accuracy_high"] < before["evaluation/accuracy_low"]
        tone = "good" if is_better else "bad" if is_worse else "open"
    return title, tuple(lines), tone


def _learning(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Reward and accuracy")
    charts = [_drawn(facts, {"reward": facts.values(REWARD)}, "Reward of training episodes", "mean reward")]
    for name in sorted({name for row in facts.rows for name in row if name.startswith("env_runners/reward/")}):
        title = name.removeprefix("env_runners/reward/")
        charts.append(_drawn(facts, {title: facts.values(name)}, f"Reward function {title}", "mean value"))
    if facts.has(ACCURACY):
        bounds = [facts.values(f"evaluation/accuracy_{side}") for side in ("low", "high")]
        title = "Accuracy on held-out prompts"
        series = {"accuracy": facts.values(ACCURACY)}
        charts.append(_drawn(facts, series, title, "accuracy", bands={"accuracy": bounds}))
    silent = {"silent": facts.silent_shares}
    charts.append(_drawn(facts, silent, "Silent groups", "share of groups"))
    yield Charts(
        tuple(charts),
        "By iteration. Shaded: 95% interval. A silent group has equal rewards and, with most settings, no gradient.",
    )


def _domains(facts: RunFacts) -> Iterator[Block]:
    first, last = DOMAIN
    found = {name: facts.values(f"{first}{name}{last}") for name in facts.domains}
    if len(found) < 2:
        return
    yield Heading("Held-out accuracy by domain")
    changes = {name: _change(values) for name, values in found.items()}
    chosen = sorted(sorted(found, key=lambda name: -abs(changes[name][2] - changes[name][0]))[:NUM_DRAWN])
    styles = {name: number for number, name in enumerate(chosen)}
    few = f"The {NUM_DRAWN} of {len(found)} domains that changed most. " if len(found) > NUM_DRAWN else ""
    picture = _drawn(facts, {name: found[name] for name in chosen}, "Accuracy by domain", "accuracy")
    legend = tuple((name, legend_line(number, name)) for name, number in styles.items())
    yield Charts((picture,), f"{few}The table below has all of them.", legend)
    rows = []
    for name, (start, best, end) in changes.items():
        lost = best - end
        rows.append((Cell(name), *(Cell(f"{value:.3f}") for value in (start, best, end, lost))))
    caption = "Lost: from the best to the last evaluation, forgetting or chance."
    yield Table(caption, ("domain", "first", "best", "last", "lost"), tuple(rows))


def _memory(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Memory")
    if not facts.has("replay/num_items"):
        yield Text("This run had no memory (replay_capacity = 0, or both fractions 0).")
        return
    shares = {
        "revisits, of prompts": facts.values("replay/revisit_share_prompts"),
        "reuse, of groups": facts.values("replay/reuse_share_prompts"),
        "live tokens": facts.values("env_runners/live_token_share"),
    }
    recall = {name: facts.values(f"replay/{name}_recall_mean") for name in ("observed", "predicted")}
    surprise = {"surprise": facts.values("replay/surprise_mean")}
    size = {"items": facts.values("replay/num_items"), "waiting": facts.values("replay/num_waiting")}
    drawn = (
        ("Revisits, reuse, live tokens", shares, "share"),
        ("Recall of revisited prompts", recall, "share"),
        ("Surprise by history", surprise, "reward"),
        ("Items", size, "items"),
    )
    for title, series, y in drawn:
        known = {name: values for name, values in series.items() if not np.isnan(values).all()}
        if known:
            legend = tuple((name, legend_line(number, name)) for number, name in enumerate(known))
            yield Charts((_drawn(facts, known, title, y),), _MEANINGS[title], legend if len(known) > 1 else ())
    rows = [(Cell(title), Cell(_number(facts.last(f"replay/{name}")))) for name, title in MEMORY.items()]
    yield Table("After the last iteration; counts since the start.", ("memory", "value"), tuple(rows))


_MEANINGS = {
    "Revisits, reuse, live tokens": "Realised shares since the start: prompts played again, and stored groups trained "
    "on again. Live: share of an iteration's generated tokens that are trained on.",
    "Recall of revisited prompts": "Share of revisits that succeed, over the newest reviews.",
    "Surprise by history": "Mean difference of a reward from the one that the prompt's history predicts.",
    "Items": "Prompts in the memory, and those that wait to be scheduled.",
}


def _learner(facts: RunFacts) -> Iterator[Block]:
    found = {title: facts.values(f"{LEARNER}/{name}") for name, title in LEARNED.items()}
    known = {title: values for title, values in found.items() if not np.isnan(values).all() and np.nanmax(abs(values))}
    if known:
        yield Heading("Learner")
        charts = tuple(_drawn(facts, {title: values}, title, "", is_share=False) for title, values in known.items())
        yield Charts(charts, "By iteration. Metrics that are always 0 are left out.")


def _cost(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Tokens and time")
    tokens, seconds = facts.values("env_runners/num_generated_tokens"), facts.values("time_this_iter_s")
    rollout = facts.values("timers/rollout")
    speed = np.divide(tokens, rollout, out=np.full(len(tokens), math.nan), where=rollout > 0)
    charts = (
        _drawn(facts, {"tokens": np.nancumsum(tokens)}, "Generated tokens", "tokens since the start", is_share=False),
        _drawn(facts, {"s": seconds}, "Duration of an iteration", "seconds", is_share=False),
        _drawn(facts, {"speed": speed}, "Speed of rollouts", "tokens per second", is_share=False),
    )
    yield Charts(charts, "By iteration.")
    total = facts.total("time_this_iter_s")
    by_part = {name: facts.total(f"timers/{name}") for name in PARTS}
    by_part["other, such as evaluation"] = max(0.0, total - sum(by_part.values()))
    share = {name: f"{spent / total:.0%}" if total else UNKNOWN for name, spent in by_part.items()}
    rows = [(Cell(name), Cell(f"{spent:.1f}"), Cell(share[name])) for name, spent in by_part.items()]
    yield Table("Where the time went.", ("part of an iteration", "seconds", "share"), tuple(rows))


def _endings(facts: RunFacts) -> Iterator[Block]:
    endings = facts.endings
    num = sum(endings.values())
    if not num:
        return
    yield Heading("How episodes ended")
    rows = [(Cell(name), Cell(f"{count:,.0f}"), Cell(f"{count / num:.1%}")) for name, count in endings.items()]
    yield Table("Of training episodes.", ("reason", "episodes", "share"), tuple(rows))
    if faults := facts.faults:
        listed = [(name.rpartition("/")[2], f"{count:,}", meaning) for name, (count, meaning) in faults.items()]
        cells = tuple(tuple(map(Cell, row)) for row in listed)
        yield Table("Faults.", ("metric", "count", "meaning"), cells, is_text=True)


def _transcripts(facts: RunFacts, most: int) -> Iterator[Block]:
    yield Heading("Episodes")
    chosen = _chosen(facts.episodes, most)
    if not chosen:
        yield Text("No transcripts are shown (num_transcripts, --transcripts).")
        return
    yield Text("The best and the worst of the first and last iterations with transcripts. srl episodes shows all.")
    for one in chosen:
        turns = tuple(Verbatim(_shortened(turn["text"]), turn["role"]) for turn in one["turns"])
        where = f"iteration {one['iteration']}, {one['env_id']}"
        yield Details(f"Reward {one['reward']:g}, {where}, ended as {one['stop_reason']}", turns)


def _settings(facts: RunFacts) -> Iterator[Block]:
    if not facts.settings:
        return
    yield Heading("Settings")
    defaults = {name: _plain(setting.default) for name, setting in all_settings().items()}
    given = {name: value for name, value in facts.settings.items() if name not in HIDDEN}
    changed = {name: value for name, value in given.items() if _plain(value) != defaults.get(name)}
    yield _table_of(changed, "Settings that differ from their defaults.")
    rest = {name: value for name, value in given.items() if name not in changed}
    yield Details(f"{len(rest)} settings with their defaults", (_table_of(rest, ""),))


# --- helpers --------------------------------------------------------------------------------------


def _drawn(
    facts: RunFacts,
    series: Mapping[str, np.ndarray],
    title: str,
    y: str,
    bands: Mapping[str, Sequence[np.ndarray]] | None = None,
    is_share: bool = True,
) -> Any:
    """Draw metrics by iteration; a share if no value lies outside [0, 1]."""
    lines = {}
    for name, values in series.items():
        known = ~np.isnan(values)
        low, high = (bands or {}).get(name, (values, values))
        lines[name] = Line(facts.iterations[known], values[known], low[known], high[known])
    every = np.concatenate([line.mean for line in lines.values()])
    is_share = is_share and bool(len(every)) and float(every.min()) >= 0 and float(every.max()) <= 1
    ends = {name: (line.mean[0], line.mean[-1]) for name, line in lines.items() if len(line.x)}
    told = "; ".join(f"{name}: {_number(first)} to {_number(last)}" for name, (first, last) in ends.items())
    styles, words = {name: number for number, name in enumerate(lines)}, (title, "iteration", y, f"{title}. {told}")
    return chart(lines, styles, *words, with_band=bands is not None, is_share=is_share)


def _change(values: np.ndarray) -> tuple[float, float, float]:
    known = values[~np.isnan(values)]
    return float(known[0]), float(known.max()), float(known[-1])


def _chosen(episodes: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return episodes of the first and last iterations, the best and the worst of each, and so on inwards."""
    iterations = sorted({one["iteration"] for one in episodes})
    order = [number for pair in zip(iterations, reversed(iterations), strict=True) for number in pair]
    chosen: list[Mapping[str, Any]] = []
    for number in dict.fromkeys(order):
        ranked = sorted((one for one in episodes if one["iteration"] == number), key=lambda one: -one["reward"])
        pair = [ranked[0], ranked[-1]] if ranked[0]["reward"] > ranked[-1]["reward"] else ranked[:1]
        chosen += pair
        if len(chosen) >= most:
            break
    return sorted(chosen[:most], key=lambda one: one["iteration"])


def _shortened(text: str) -> str:
    shown = printable_lines(text.removesuffix("\n"))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ... ({len(shown) - LONGEST} more characters)"


def _table_of(settings: Mapping[str, Any], caption: str) -> Table:
    rows = [(Cell(name), Cell(str(value))) for name, value in flat_settings(settings)]
    return Table(caption, ("setting", "value"), tuple(rows), is_text=True)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _interval(row: Mapping[str, float]) -> str:
    low, high = (row[f"evaluation/accuracy_{side}"] for side in ("low", "high"))
    return f"{row[ACCURACY]:.3f} [{low:.3f}, {high:.3f}]"


def _number(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
