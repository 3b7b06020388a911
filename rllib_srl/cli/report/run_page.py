"""Build the report page of a run: what it learned, on what, at which cost, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rllib_srl.cli.episodes import printable_lines
from rllib_srl.cli.report.run_facts import ACCURACY, REWARD, RunFacts, episodes_in
from rllib_srl.cli.report.run_plots import (
    UNKNOWN,
    domain_row,
    learning_plots,
    memory_rows,
    number,
)
from rllib_srl.cli.shared.display import duration
from rllib_srl.cli.shared.run_log import PARTS
from rllib_srl.cli.shared.settings import all_settings, listed
from rllib_srl.cli.shared.shown_settings import flat_settings
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

HIDDEN = ("seal_key_file",)
LONGEST = 4000  # characters of a turn on the page
MEMORY = {  # metric of the memory -> title and meaning
    "num_items": "items in the memory",
    "num_revisits": "prompts revisited",
    "num_reuses": "groups reused",
    "num_evicted": "items evicted",
    "num_refused": "groups refused",
    "num_groups_replaced": "groups replaced by newer ones",
    "revisit_pass_rate": "pass rate of revisits",
    "surprise_mean": "mean surprise, |reward - prediction from history|",
}

OF_DOMAIN = {  # metric of a domain -> title
    "num_items": "prompts stored",
    "num_stored_groups": "groups stored",
    "num_groups": "groups played",
    "num_groups_without_signal": "of equal rewards",
    "num_revisits": "revisits",
    "num_reuses": "reuses",
}


def page_of_run(facts: RunFacts, num_transcripts: int) -> Page:
    """Return the report of a run.

    Args:
        facts: of the run.
        num_transcripts: most episodes to show.
    """
    episodes, num_damaged = episodes_in(facts.directory) if num_transcripts else ([], 0)
    parts = (_opening, _learning, _domains, _memory, _cost, _endings, _settings)
    blocks = [block for part in parts for block in part(facts)]
    blocks += _transcripts(episodes, num_transcripts, num_damaged)
    return Page(f"Run {facts.directory.resolve().name}", tuple(blocks))


# --- parts ----------------------------------------------------------------------------------------


def _opening(facts: RunFacts) -> Iterator[Block]:
    """Yield what the run is, its results, and its warnings."""
    settings = facts.settings
    env = settings.get("env") or ", ".join(settings.get("worlds") or ())
    env = env or ("a stream of domains" if settings.get("stream") else "unknown environments")
    what = f"{settings.get('model', 'A model')} on {env}"
    planned = settings.get("iterations")
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
    reward = f"Mean reward {number(first)} at the start, {number(last)} at the end"
    how = "of training episodes, over the first and last iterations: five of each, or half of a shorter run."
    known = np.flatnonzero(~np.isnan(facts.values(ACCURACY)))
    if not len(known):
        return reward, (f"O{how[1:]}", "Held-out accuracy was not measured (evaluation_interval)."), "open"
    before, after = int(known[0]), int(known[-1])
    title = "Held-out accuracy " + ", ".join(dict.fromkeys(_interval(facts, at) for at in (before, after)))
    low, high = (facts.values(f"evaluation/accuracy_{side}") for side in ("low", "high"))
    is_better, is_worse = low[after] > high[before], high[after] < low[before]
    return title, (f"{reward}, {how}",), "good" if is_better else "bad" if is_worse else "open"


def _learning(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Reward and accuracy")
    caption = "By iteration. Shaded: 95% interval. Live tokens are in groups that are trained on."
    yield Charts(tuple(learning_plots(facts)), caption)


def _domains(facts: RunFacts) -> Iterator[Block]:
    if row := domain_row(facts):
        yield Heading("Held-out accuracy by domain")
        yield row
        yield _domain_table(facts)


def _domain_table(facts: RunFacts) -> Table:
    """Return the held-out accuracy of each domain, and how much of its best it has lost."""
    changes = facts.domain_changes.items()
    rows = [(Cell(name), *(Cell(f"{value:.3f}") for value in (*change, change.lost))) for name, change in changes]
    caption = "Lost: from the best to the last evaluation, forgetting or chance."
    return Table(caption, ("domain", "first", "best", "last", "lost"), tuple(rows))


def _memory(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Memory")
    if not facts.has("replay/num_items"):
        yield Text("This run had no memory (replay_capacity = 0, or both fractions 0).")
        return
    yield from memory_rows(facts)
    yield _memory_table(facts)
    if facts.domain_counts:
        yield _memory_of_domains(facts)


def _memory_table(facts: RunFacts) -> Table:
    """Return the counts and gauges of the memory."""
    rows = [(Cell(title), Cell(number(facts.last(f"replay/{name}")))) for name, title in MEMORY.items()]
    return Table("After the last iteration; counts since the start.", ("memory", "value"), tuple(rows))


def _memory_of_domains(facts: RunFacts) -> Table:
    """Return what the memory holds of each domain, and the counts of its groups and draws."""
    counts = facts.domain_counts
    rows = [(Cell(domain), *(Cell(number(of.get(name, 0.0))) for name in OF_DOMAIN)) for domain, of in counts.items()]
    return Table("After the last iteration; counts since the start.", ("domain", *OF_DOMAIN.values()), tuple(rows))


def _cost(facts: RunFacts) -> Iterator[Block]:
    yield Heading("Time")
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


def _transcripts(episodes: Sequence[Mapping[str, Any]], most: int, num_damaged: int) -> Iterator[Block]:
    yield Heading("Episodes")
    if num_damaged:
        yield Text(f"{num_damaged:,} damaged lines of transcripts are left out.")
    chosen = _chosen(episodes, most)
    if not chosen:
        yield Text("No transcripts are shown (num_transcripts, --transcripts).")
        return
    yield Text("The best and the worst of the first and last iterations with transcripts. srl episodes shows all.")
    for one in chosen:
        turns = tuple(Verbatim(shortened(turn["text"]), turn["role"]) for turn in one["turns"])
        where = f"iteration {one['iteration']}, {one['env_id']}"
        yield Details(f"Reward {one['reward']:g}, {where}, ended as {one['stop_reason']}", turns)


def _settings(facts: RunFacts) -> Iterator[Block]:
    if not facts.settings:
        return
    yield Heading("Settings")
    defaults = {name: listed(row.initial) for name, row in all_settings().items()}
    given = {name: value for name, value in facts.settings.items() if name not in HIDDEN}
    changed = {name: value for name, value in given.items() if listed(value) != defaults.get(name)}
    yield _table_of(changed, "Settings that differ from their defaults.")
    rest = {name: value for name, value in given.items() if name not in changed}
    yield Details(f"{len(rest)} settings with their defaults", (_table_of(rest, ""),))


# --- helpers --------------------------------------------------------------------------------------


def _chosen(episodes: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return episodes of the first and last iterations, the best and the worst of each, and so on inwards."""
    iterations = sorted({one["iteration"] for one in episodes})
    order = [iteration for pair in zip(iterations, reversed(iterations), strict=True) for iteration in pair]
    chosen: list[Mapping[str, Any]] = []
    for iteration in dict.fromkeys(order):
        ranked = sorted((one for one in episodes if one["iteration"] == iteration), key=lambda one: -one["reward"])
        pair = [ranked[0], ranked[-1]] if ranked[0]["reward"] > ranked[-1]["reward"] else ranked[:1]
        chosen += pair
        if len(chosen) >= most:
            break
    return sorted(chosen[:most], key=lambda one: one["iteration"])


def shortened(text: str) -> str:
    """Return a text for a page: control characters visible, at most `LONGEST` characters."""
    shown = printable_lines(text.removesuffix("\n"))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ... ({len(shown) - LONGEST} more characters)"


def _table_of(settings: Mapping[str, Any], caption: str) -> Table:
    rows = [(Cell(name), Cell(str(value))) for name, value in flat_settings(settings)]
    return Table(caption, ("setting", "value"), tuple(rows), is_text=True)


def _interval(facts: RunFacts, at: int) -> str:
    """Return an accuracy with its 95 % interval, and when it was measured."""
    value, low, high = (facts.values(f"evaluation/accuracy{side}")[at] for side in ("", "_low", "_high"))
    iteration = facts.iterations[at]
    return f"{value:.3f} [{low:.3f}, {high:.3f}] {f'after iteration {iteration}' if iteration else 'before training'}"
