"""Write the report of a run or a study: one self-contained HTML page.

    srl report results/first                       a run of srl train
    srl report results/tune/replay                 a study of srl tune
    srl report results/first --transcripts 1000    all episodes that the run has written down

The directory decides: that of a study has study.json and trials/, that of a run metrics.jsonl. The file is
report.html, there or in --out. A run may still be training; srl dashboard serves its report live. Secrets in settings
are left out, but read the transcripts before you share a page. Unfinished trials of a study are listed; its numbers
come from finished ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.cli.shared.display import duration, printable_lines, text_of
from rllib_srl.cli.shared.flags import Program, integer_from, local_directory
from rllib_srl.cli.shared.run_log import ACCURACY, LIVE_TOKENS, PARTS, REWARD, RunFacts, episodes_in
from rllib_srl.cli.shared.runs import METRICS, SETTINGS_FILE, RunError, missing
from rllib_srl.cli.shared.settings import all_settings, flat_settings, listed
from rllib_srl.replay.metrics import by_domain
from rllib_srl.storage.disk import writing
from rllib_srl.studies.records import STUDY_FILE, read_results
from rllib_srl.studies.report.charts import NUM_DRAWN, Line, chart
from rllib_srl.studies.report.page import (
    Block,
    Chart,
    Charts,
    Details,
    Heading,
    Notice,
    Page,
    Table,
    Text,
    Verbatim,
    to_html,
)
from rllib_srl.studies.report.study_page import page_of

NAME = "report.html"
OF_RUN = (METRICS, SETTINGS_FILE)  # a directory with one of these is that of a run
NUM_TRANSCRIPTS = 6
UNKNOWN = "–"
HIDDEN = ("seal_key_file",)
LONGEST = 4000  # characters of a turn on the page
MOST_POINTS = 200  # of a line in a chart
NUM_AVERAGED = 5  # iterations at the start and at the end
MEMORY = {  # metric of the memory -> title
    "num_items": "items in the memory",
    "num_revisits": "prompts revisited",
    "num_reuses": "groups reused",
    "num_evicted": "items evicted",
    "num_refused": "groups refused",
    "num_groups_replaced": "groups replaced by newer ones",
}
HELD = {  # metric of retention -> title
    "num_held": "stored answers held by the last update",
    "weight": "their weight in the loss",
    "delta": "how much less likely than when they were written, nats per answer (below 0: likelier)",
}
OF_DOMAIN = {  # metric of a domain -> title
    "num_items": "prompts stored",
    "num_groups": "groups played",
    "num_groups_zero_variance": "of equal rewards",
    "num_revisits": "revisits",
    "num_reuses": "reuses",
}
MEMORY_LINES = {  # metric -> title
    "replay/revisit_share_prompts": "revisits, of prompts",
    "replay/reuse_share_prompts": "reuse, of groups",
    "replay/revisit_pass_rate": "pass rate of revisits",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=local_directory, metavar="DIR", help="directory of a run or a study")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="directory of the report (DIR)")
    text = "episodes of a run (default: %(default)s)"
    parser.add_argument("--transcripts", type=integer_from(0), default=NUM_TRANSCRIPTS, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    page = page_in(arguments.results, arguments.transcripts)
    directory = arguments.out or arguments.results
    directory.mkdir(parents=True, exist_ok=True)
    with writing(directory / NAME):
        (directory / NAME).write_text(to_html(page), encoding="utf-8")
    print(page.title)
    print(text_of(block for block in page.blocks if isinstance(block, Notice)))
    print(f"wrote {directory / NAME}")
    return 0


def page_in(directory: Path, num_transcripts: int = NUM_TRANSCRIPTS) -> Page:
    """Return the report of the run or the study in a directory; RunError: it has neither, or nothing to show yet."""
    if (directory / STUDY_FILE).is_file():
        return page_of(read_results(directory))
    if any((directory / name).is_file() for name in OF_RUN):
        return page_of_run(RunFacts.read(directory), num_transcripts)
    there = "has neither" if directory.is_dir() else missing(directory)
    raise RunError(f"{directory} {there}; expected the directory of a run ({METRICS}) or of a study ({STUDY_FILE})")


def page_of_run(facts: RunFacts, num_transcripts: int) -> Page:
    """Return the report of a run with at most `num_transcripts` episodes."""
    parts = (_opening, _learning, _domains, _memory, _cost, _endings, _settings)
    blocks = [block for part in parts for block in part(facts)]
    blocks += _transcripts(facts, num_transcripts)
    return Page(f"Run {facts.directory.resolve().name}", blocks)


def _opening(facts: RunFacts) -> Iterator[Block]:
    settings = facts.settings
    env = settings.get("env") or ", ".join(settings.get("envs") or ())
    env = env or ("a stream of domains" if settings.get("stream") else "unknown environments")
    of = f" of {settings['iterations']}" if settings.get("iterations") else ""
    seconds, tokens = facts.total("time_this_iter_s"), facts.total("env_runners/num_generated_tokens")
    what = f"{settings.get('model', 'A model')} on {env}: {facts.iterations[-1]}{of} iterations"
    yield Text(f"{what}, {tokens:,.0f} generated tokens, {duration(seconds)}.")
    yield _outcome(facts)
    if warnings := [line[:1].upper() + line[1:] + "." for line in facts.warnings()]:
        yield Notice("Warnings", warnings, "warn")


def _outcome(facts: RunFacts) -> Notice:
    rewards = facts.known(REWARD)
    num = max(1, min(NUM_AVERAGED, len(rewards) // 2))
    first, last = (float(of.mean()) if len(of) else math.nan for of in (rewards[:num], rewards[-num:]))
    reward = f"Mean reward {number(first)} at the start, {number(last)} at the end"
    scope = "of training episodes, over the first and last iterations: five of each, or half of a shorter run."
    known = np.flatnonzero(~np.isnan(facts.values(ACCURACY)))
    if not len(known):
        lines = (f"O{scope[1:]}", "Held-out accuracy was not measured (evaluation_interval).")
        return Notice(reward, lines, "open")
    before, after = int(known[0]), int(known[-1])
    title = "Held-out accuracy " + ", ".join(dict.fromkeys(_interval(facts, at) for at in (before, after)))
    low, high = (facts.values(f"evaluation/accuracy_{side}") for side in ("low", "high"))
    is_better, is_worse = low[after] > high[before], high[after] < low[before]
    return Notice(title, (f"{reward}, {scope}",), "good" if is_better else "bad" if is_worse else "open")


def _interval(facts: RunFacts, at: int) -> str:
    """Return an accuracy with its 95 % interval, and when it was measured."""
    value, low, high = (facts.values(f"evaluation/accuracy{side}")[at] for side in ("", "_low", "_high"))
    iteration = facts.iterations[at]
    return f"{value:.3f} [{low:.3f}, {high:.3f}] {f'after iteration {iteration}' if iteration else 'before training'}"


def _learning(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Reward and accuracy")
    charts = [_chart(facts, {"reward": REWARD}, "Reward of training episodes", "mean reward")]
    for name, metric in facts.by_name("env_runners/reward/").items():
        charts.append(_chart(facts, {name: metric}, f"Reward function {name}", "mean value"))
    if len(facts.known(ACCURACY)):
        charts.append(_chart(facts, {"accuracy": ACCURACY}, "Accuracy on held-out prompts", "accuracy"))
    charts.append(_chart(facts, {"live": LIVE_TOKENS}, "Live tokens", "share of generated tokens"))
    yield Charts(charts, "By iteration. Shaded: 95% interval. Live tokens are in groups that are trained on.")


def _domains(facts: RunFacts) -> Iterator[Block]:
    """Yield the held-out accuracy of each domain, and how much of its best it has lost."""
    metrics = facts.by_name("evaluation/by_domain/", "/accuracy")
    if len(metrics) < 2:
        return
    known = {name: facts.known(metric) for name, metric in metrics.items()}
    known = {name: values for name, values in known.items() if len(values)}
    most = sorted(known, key=lambda name: -abs(known[name][-1] - known[name][0]))[:NUM_DRAWN]
    few = f"The {NUM_DRAWN} of {len(known)} domains that changed most. " if len(known) > NUM_DRAWN else ""
    yield Heading("Held-out accuracy by domain")
    drawn = _chart(facts, {name: metrics[name] for name in sorted(most)}, "Accuracy by domain", "accuracy")
    yield Charts((drawn,), f"{few}The table has all of them.")
    figures = {name: (curve[0], curve.max(), curve[-1], curve.max() - curve[-1]) for name, curve in known.items()}
    rows = [(name, *(f"{value:.3f}" for value in row)) for name, row in figures.items()]
    caption = "Lost: from the best to the last evaluation, forgetting or chance."
    yield Table(("domain", "first", "best", "last", "lost"), rows, caption)


def _memory(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Memory")
    if not len(facts.known("replay/num_items")):
        yield Text("This run had no memory (replay_capacity = 0).")
        return
    lines = {title: metric for metric, title in MEMORY_LINES.items() if len(facts.known(metric))}
    yield Charts((_chart(facts, lines, "Revisits and reuse", "share"),), "Realised shares since the start.")
    caption = "After the last iteration; counts since the start."
    rows = [(title, number(facts.last(f"replay/{name}"))) for name, title in MEMORY.items()]
    if len(facts.known("retention/num_held")):
        rows += [(title, number(facts.last(f"retention/{name}"))) for name, title in HELD.items()]
    yield Table(("memory", "value"), rows, caption)
    if counts := by_domain({metric: facts.last(metric) for metric in facts.by_name("domains/").values()}):
        of_domains = [(domain, *(number(of.get(name, 0.0)) for name in OF_DOMAIN)) for domain, of in counts.items()]
        yield Table(("domain", *OF_DOMAIN.values()), of_domains, caption)


def _cost(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Time")
    total = facts.total("time_this_iter_s")
    seconds = {name: facts.total(f"timers/{name}") for name in PARTS}
    seconds["other, such as evaluation"] = max(0.0, total - sum(seconds.values()))
    rows = [(name, f"{spent:.1f}", f"{spent / total:.0%}" if total else UNKNOWN) for name, spent in seconds.items()]
    yield Table(("part of an iteration", "seconds", "share"), rows, "Where the time went.")


def _endings(facts: RunFacts) -> Iterator[Block]:
    endings = facts.endings
    if num := sum(endings.values()):
        yield Heading("How episodes ended")
        rows = [(name, f"{count:,.0f}", f"{count / num:.1%}") for name, count in endings.items()]
        yield Table(("reason", "episodes", "share"), rows, "Of training episodes.")


def _transcripts(facts: RunFacts, most: int) -> Iterator[Block]:
    """Yield episodes, spread evenly over those that were written down."""
    yield Heading("Episodes")
    episodes, num_damaged = episodes_in(facts.directory) if most else ([], 0)
    if num_damaged:
        yield Text(f"{num_damaged:,} damaged lines of transcripts are left out.")
    if not episodes:
        yield Text("No transcripts are shown (num_transcripts, --transcripts).")
        return
    chosen = np.unique(np.linspace(0, len(episodes) - 1, most).round().astype(int))
    yield Text(f"{len(chosen)} of {len(episodes)}, spread evenly; --transcripts shows more.")
    for at in chosen:
        episode = episodes[at]
        turns = [Verbatim(shortened(turn["text"]), turn["role"]) for turn in episode["turns"]]
        where = f"iteration {episode['iteration']}, {episode['env_id']}"
        yield Details(f"Reward {episode['reward']:g}, {where}, ended as {episode['stop_reason']}", turns)


def _settings(facts: RunFacts) -> Iterator[Block]:
    if not facts.settings:
        return
    yield Heading("Settings")
    defaults = {name: listed(row.initial) for name, row in all_settings().items()}
    settings = {name: value for name, value in facts.settings.items() if name not in HIDDEN}
    changed = {name: value for name, value in settings.items() if listed(value) != defaults.get(name)}
    yield _table_of(changed, "Settings that differ from their defaults.")
    unchanged = {name: value for name, value in settings.items() if name not in changed}
    yield Details(f"{len(unchanged)} settings with their defaults", (_table_of(unchanged, ""),))


def _table_of(settings: Mapping[str, Any], caption: str) -> Table:
    rows = [(name, str(value)) for name, value in flat_settings(settings)]
    return Table(("setting", "value"), rows, caption, is_text=True)


def _chart(facts: RunFacts, metrics: Mapping[str, str], title: str, y: str) -> Chart:
    """Draw metrics, by the name of each line, over the iterations that have them; from 0 to 1 if they are shares."""
    lines = {}
    for name, metric in metrics.items():
        values = facts.values(metric)
        known = np.isfinite(values)
        low, high = (facts.columns.get(f"{metric}_{side}", np.full(len(values), math.nan)) for side in ("low", "high"))
        lines[name] = thinned(Line(facts.iterations[known], values[known], low[known], high[known]))
    every = np.concatenate([line.mean for line in lines.values()])
    is_share = bool(len(every)) and float(every.min()) >= 0 and float(every.max()) <= 1
    return chart(lines, title, "iteration", y, is_share=is_share)


def thinned(line: Line) -> Line:
    """Return a line of at most `MOST_POINTS` points, each the mean of its neighbours."""
    if len(line.x) <= MOST_POINTS:
        return line
    parts = [np.array_split(column, MOST_POINTS) for column in line]
    return Line(*(np.array([points.mean() for points in part]) for part in parts))


def shortened(text: str) -> str:
    """Return a text for a page: control characters visible, at most `LONGEST` characters."""
    shown = printable_lines(text.removesuffix("\n"))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ... ({len(shown) - LONGEST} more characters)"


def number(value: float) -> str:
    """Return a value in at most three digits, or with thousands separated."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


main = Program(__doc__, add_flags, run)
