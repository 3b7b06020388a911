"""Explain one item of a journal in words: its state, and why it was or was not drawn.

find(readings, "4b9d") -> Found -> described   name and value, with units
                                -> why         "drawn for iteration 12: due 3 iterations ago, ..."
turns(group, g, decode)                        the token stream of a stored episode as turns by role
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rllib_srl.replay.admission.secrets import token_spans
from rllib_srl.replay.diversity.measures import interval_factor
from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.journal.reader import Reading
from rllib_srl.replay.selection.pool import COLUMNS as POOL_COLUMNS
from rllib_srl.replay.selection.pool import (
    DISCOUNTED_BY,
    HISTORY,
    SlotClock,
    Surprise,
    context_of,
    discounted,
    pool_candidates,
)
from rllib_srl.replay.selection.rules import WHOLE_POOL, make_settings
from rllib_srl.replay.selection.sampler import drawn_in
from rllib_srl.replay.selection.signal import DomainSlots, Factors, factors, slots_by_domain
from rllib_srl.replay.store.records import LEECH, SCHEDULED, WAITING
from rllib_srl.types import Group, Prompt

Decode = Callable[[Sequence[int]], str]


def turns(group: Group, g: int, decode: Decode) -> list[tuple[str, str]]:
    """Return the role ("environment" or "policy") and the text of each turn of an episode.

    Args:
        group: a stored group.
        g: index of the episode.
        decode: token ids -> text, with special tokens.
    """
    mask_T = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]
    text, starts_T, _ = token_spans(group.stream(g).tolist(), decode)
    cuts = (np.flatnonzero(np.diff(mask_T)) + 1).tolist()
    borders = [0, *starts_T[cuts].tolist(), len(text)]
    roles = ["policy" if mask_T[at] else "environment" for at in [0, *cuts]]
    return [(role, text[a:b]) for role, (a, b) in zip(roles, pairwise(borders), strict=True)]


GRADE_NAMES = ("", "Again", "Hard", "Good", "Easy")
STATUS_NAMES = {WAITING: "waiting", SCHEDULED: "scheduled", LEECH: "leech"}
MOST_NAMED = 5  # maximum number of candidates in an error message


@dataclass(frozen=True)
class Found:
    """One item of one reading. Invariant: `row` and `prompt` are the entries at position `at`."""

    reading: Reading
    at: int

    @property
    def row(self) -> np.void:
        """Return the item's record."""
        row: np.void = self.reading.stored.items[self.at]
        return row

    @property
    def prompt(self) -> Prompt:
        """Return the item's prompt."""
        return self.reading.stored.prompts[self.at]

    @property
    def slot(self) -> int:
        """Return the item's slot in the store's table."""
        return int(self.reading.stored.slots[self.at])

    @property
    def key(self) -> str:
        """Return the key of its prompt, 16 hex digits."""
        return f"{int(self.row['key']):016x}"

    @property
    def recall(self) -> float:
        """Return the predicted recall now; nan if the item was never reviewed, or no spacing rule predicts it."""
        return float(self.reading.recall[self.at]) if self.reading.settings.has_due_dates else float("nan")

    def reviews(self) -> np.ndarray:
        """Return the item's reviews, oldest first."""
        reviews_N: np.ndarray = self.reading.reviews[self.reading.reviews["key"] == self.row["key"]]
        return reviews_N


def all_items(reading: Reading) -> list[Found]:
    """Return every item."""
    return [Found(reading, at) for at in range(len(reading.stored.items))]


def find(reading: Reading, name: str) -> Found:
    """Return the item with the prompt id `name`, or else the one whose key begins with `name`.

    Raises:
        ValueError: no item or several match; the message names up to 5 candidates.
    """
    items = all_items(reading)
    found = [item for item in items if item.prompt.prompt_id == name]
    found = found or [item for item in items if item.key.startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        named = ", ".join(f"{item.key} ({item.prompt.env_id} [{item.prompt.prompt_id}])" for item in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise ValueError(f"{name!r} is {len(found)} items: {named}{more}; expected more digits of a key")
    times = [int(row["now"]) for row in reading.reviews if f"{int(row['key']):016x}".startswith(name)]
    gone = f"; one was evicted, reviewed {len(times)} times, last in iteration {max(times)}" if times else ""
    raise ValueError(f"none of {len(items)} items has the prompt id or key {name!r}{gone}; expected one that ls shows")


# --- why ------------------------------------------------------------------------------------------


def why(item: Found, limit: int) -> list[str]:
    """Return one line for each of the last `limit` draws of an item, oldest first, and one for the next draw."""
    drawn = list(_draws(item))
    lines = [f"{len(drawn) - limit} earlier draws left out"] if len(drawn) > limit else []
    return [*lines, *drawn[-limit:], next_draw(item)]


def _draws(item: Found) -> Iterator[str]:
    """Yield one line for each draw whose answer the journal still has."""
    rule = item.reading.settings.selection
    for draw in _draws_of_all(item.reading):
        if draw.item.at == item.at:
            yield (
                f"drawn for iteration {draw.iteration}: {draw.reason}, rule {rule}"
                if draw.is_revisit
                else f"reused in iteration {draw.iteration}: {draw.reason}"
            )


@dataclass(frozen=True)
class Draw:
    """An item that was drawn: played again (`is_revisit`) or trained on again."""

    iteration: int
    item: Found
    is_revisit: bool
    reason: str


def newest_draws(reading: Reading, limit: int) -> list[Draw]:
    """Return the newest draws whose answers the journal still has, the newest first; evicted items are left out."""
    found = _draws_of_all(reading)
    return sorted(found, key=lambda draw: draw.iteration, reverse=True)[:limit]  # stable: reuses after revisits


def _draws_of_all(reading: Reading) -> Iterator[Draw]:
    """Yield the draws of all items of a journal, in the order in which it was asked."""
    at_of = {f"{key:016x}": at for at, key in enumerate(reading.stored.items["key"].tolist())}
    at_of_slot = {slot: at for at, slot in enumerate(reading.stored.slots.tolist())}
    groups = reading.stored.groups
    group_of = {seq: at for at, seq in enumerate(groups["seq"].tolist())}
    for name, answer in reading.answers:
        first, _, method = name.partition(".")
        if not first.isdigit():
            continue
        if method.startswith("due"):
            for facts in (drawn["why"] for drawn in answer if drawn["why"]["key"] in at_of):
                yield Draw(int(first), Found(reading, at_of[facts["key"]]), True, facts_in_words(facts))
        elif method.startswith("sample"):
            for group in (groups[group_of[seq]] for seq in drawn_in(answer)[0] if seq in group_of):
                reason = f"its group of iteration {int(group['born'])} was trained on again"
                yield Draw(int(first), Found(reading, at_of_slot[int(group["slot"])]), False, reason)


def facts_in_words(facts: Mapping[str, Any]) -> str:
    """Return the result of `buffer_metrics.facts_of_item` at a draw as part of a sentence."""
    recall, factor = facts["recall"], facts.get("domain_factor", 1.0)  # older journals have no domain_factor
    early = " (drawn for its domain's lapses)" if facts.get("is_due_by_domain") else " (drawn early)"
    if "signal" in facts:
        first = "never played before" if not facts["visits"] else f"visit {facts['visits'] + 1}"
        domain = facts.get("signal_domain")  # older journals have none, nor have draws that chose no domain first
        rest = f"; {domain_in_words(domain, 'got')}" if domain else ""
        return f"{first}, {priority_in_words(facts['signal'])}{rest}"
    if not facts.get("has_due_dates", True):  # older journals always had them
        ago = f"{counted(facts['elapsed'], 'iteration')} after its last visit" if facts["visits"] else "never played"
        leech = "a leech, tested again, " if facts["is_leech"] else ""
        return f"{leech}{ago}, pass rate {facts['pass_rate']:.2f}, {counted(facts['visits'], 'visit')} before"
    parts = [
        *(["a leech, tested again"] if facts["is_leech"] else []),
        lateness(facts["late"]) + (early if facts["late"] < 0 else ""),
        "never reviewed" if recall is None else f"predicted recall {recall:.2f}",
        *([f"its domain recalls {factor:.2f} of what was predicted"] if factor < 1 else []),
        f"lapses {facts['lapses']}",
        f"novelty {facts['novelty']:.2f} (diversity {facts['diversity']:.2f})",
    ]
    return ", ".join(parts)


def priority_in_words(factors: Mapping[str, float]) -> str:
    """Return the factors of a priority by `signal` (`selection/signal.py`) as an equation."""
    return (
        f"priority {factors['priority']:.3g} = weight {factors['weight']:.3g} / cost {factors['cost']:.3g} * "
        f"{counted(factors['elapsed'], 'iteration')} * chance of signal {factors['chance']:.2f} * chance of progress "
        f"{factors['progress']:.2f}"
    )


def domain_in_words(domain: Mapping[str, float], got: str) -> str:
    """Return how a domain came by its slots, from `DomainSlots.facts_of`; `got` is the verb."""
    base, wait, num_slots = domain["base"], domain["wait"], domain["num_slots"]
    return (
        f"its domain, number {domain['rank']} of {domain['num_domains']} with value {base * wait:.3g} = base {base:.3g}"
        f" * {counted(wait, 'slot')} waited, {got} {num_slots} of {counted(domain['num_drawn'], 'slot')}"
    )


def _next_of_pool(item: Found) -> str:
    """Return a sentence about the next draw by a rule to which every item is a candidate."""
    row, settings, coming = item.row, item.reading.settings, item.reading.now + 1
    last = max(int(row["last_drawn"]), int(row["last_review"]) if row["visits"] else 0)
    if last and (rests := last + settings.min_recall_interval) > coming:
        return f"not drawn for iteration {coming}: rests until iteration {rests} (min_recall_interval)"
    rule = f"{_slots(item.reading)} slots an iteration, rule {settings.selection}"
    if settings.selection != "signal":
        silent = counted(float(row["num_silent"]), "silent group")
        past = f"rewards {_figure(row['history_sum'])} of {_figure(row['history_count'])} in its history"
        since = f"last drawn {counted(coming - last, 'iteration')} before" if last else "never drawn"
        return f"may be drawn for iteration {coming}: {since}, {silent} in a row, {past}; {rule}"
    found, rows_N, domains = _next_by_signal(item.reading)
    at, domain_N = int(np.searchsorted(rows_N, item.at)), item.reading.stored.items["domain"][rows_N]
    priority, is_here_N = found.priority[at], domain_N == row["domain"]
    rank, here = (int(np.count_nonzero(one > priority)) + 1 for one in (found.priority, found.priority[is_here_N]))
    factors = {name: float(column_N[at]) for name, column_N in found._asdict().items()}
    first = "" if last else "never played, "
    of_domain = "" if domains is None else f"{domain_in_words(domains.facts_of(int(row['domain'])), 'would get')}; "
    return (
        f"may be drawn for iteration {coming}: {first}{priority_in_words(factors)}; number {rank} of {len(domain_N)} "
        f"items and {here} of {int(is_here_N.sum())} of its domain; {of_domain}{rule}"
    )


def _next_by_signal(reading: Reading) -> tuple[Factors, np.ndarray, DomainSlots | None]:
    """Return the factors of the items that may be drawn next, the positions of these items, and the domains' slots.

    The domains are None where none is chosen first, and where quotas, a planner or a filter of domains come first.
    """
    settings, state, coming = reading.settings, reading.stored.state, reading.now + 1
    names, every_N = reading.header.domains, reading.stored.items
    reviewed_N = np.where(every_N["visits"] > 0, every_N["last_review"], 0)
    last_N = np.maximum(every_N["last_drawn"], reviewed_N)
    at_N = np.flatnonzero((last_N == 0) | (last_N + settings.min_recall_interval <= coming))
    rows = every_N[at_N]
    statistics, clock, drawing = DomainStatistics(), SlotClock(), state.get("draws", {})
    statistics.set_state(state.get("domain_statistics", {}))
    clock.set_state(drawing.get("clock", {}))
    surprise = Surprise(*drawing["surprise"]) if drawing.get("surprise") else None
    own = make_settings("signal", settings.selection_config, [settings.reuse_selection]).signal
    columns = {name: rows[name] for name in (*POOL_COLUMNS, *HISTORY, *DISCOUNTED_BY[settings.history_by])}
    columns |= discounted(columns, settings.history_by, settings.history_half_life)
    context = context_of(statistics, names, clock, surprise)
    candidates = pool_candidates(columns, coming, context, names, own.weights)
    slots = max(1.0, float(state.get("slots", 0.0)))
    found = factors(candidates, max(1.0, len(rows) / slots), own)
    is_divided = settings.domain_quotas is not None or drawing.get("planned_items", {}).get("domains")
    if is_divided or settings.domains != "all":
        return found, at_N, None
    num = min(round(slots), len(rows))
    return found, at_N, slots_by_domain(candidates, found.chance, num, np.random.default_rng(0), own)


def next_draw(item: Found) -> str:
    """Return a sentence about the next draw: that the item may be drawn, or why it will not be."""
    settings = item.reading.settings
    if settings.selection in WHOLE_POOL or item.reading.stored.state.get("counts", {}).get("num_enrolled"):
        return _next_of_pool(item)
    row, now = item.row, item.reading.now
    coming, recall = now + 1, item.recall
    rests = int(row["last_review"]) + settings.min_recall_interval
    expected = "" if np.isnan(recall) else f", predicted recall {recall:.2f} now"
    must_wait = settings.load_control == "throttle_new" or not item.reading.stored.state.get("slots")
    if row["status"] == WAITING and must_wait:
        return f"not drawn for iteration {coming}: {_why_waiting(item.reading)}"
    if row["status"] == LEECH and row["due"] > coming:
        return (
            f"not drawn for iteration {coming}: a leech, failed {-int(row['streak'])} times in a row; tested again "
            f"from iteration {_figure(row['due'])}, leeches taking at most {settings.leech_share:.0%} of revisits"
        )
    if row["due"] > coming and not settings.has_due_dates:
        return f"not drawn for iteration {coming}: rests until iteration {rests} (min_recall_interval)"
    if row["due"] > coming:
        kept = f"; rests until iteration {rests} (min_recall_interval)" if rests > coming else ""
        early = "; before that only if too few items are due" if settings.selection == "srl" and not kept else ""
        until = f"{_figure(row['due'])} ({lateness(now - float(row['due'])).removeprefix('due ')})"
        return f"not drawn for iteration {coming}: not due until iteration {until}{expected}{kept}{early}"
    rows = item.reading.stored.items
    may_come_N = np.where(rows["status"] == WAITING, not must_wait, rows["due"] <= coming)
    others = int(may_come_N.sum()) - 1
    if not settings.has_due_dates:
        since = counted(now - int(row["last_review"]), "iteration")
        known = f"last visited {since} ago" if row["visits"] else "never played"
        return (
            f"may be drawn for iteration {coming}: {known}; so may {others} other items, for {_slots(item.reading)} "
            f"slots an iteration, rule {settings.selection}"
        )
    late = "new" if row["status"] == WAITING else lateness(now - float(row["due"]))
    return (
        f"may be drawn for iteration {coming}: {late}{expected}; {others} other items are due for "
        f"{_slots(item.reading)} slots an iteration, rule {settings.selection}"
    )


def _why_waiting(reading: Reading) -> str:
    settings, rows = reading.settings, reading.stored.items
    if not reading.stored.state.get("slots"):
        return f"it waits, as all do: nothing is revisited below min_buffer_size = {settings.min_buffer_size} items"
    load = load_of(reading)
    waiting, scheduled = (int((rows["status"] == status).sum()) for status in (WAITING, SCHEDULED))
    return (
        f"it waits outside the schedule with {waiting - 1} others: reviews of the {scheduled} scheduled items take "
        f"{load:.2f} of {_slots(reading)} slots an iteration; where there is room, the most learnable and diverse enter"
    )


def load_of(reading: Reading) -> float:
    """Return the expected reviews per iteration of the scheduled items, as in `schedule.load.LoadControl`."""
    settings, rows = reading.settings, reading.stored.items[reading.stored.items["status"] == SCHEDULED]
    interval_N = rows["interval"] * settings.iterations_per_day
    if "interval" in settings.diversity_on:
        interval_N = interval_N * interval_factor(rows["diversity"], settings.diversity_coeff)
    return float((1 / np.maximum(max(1.0, settings.min_recall_interval), interval_N)).sum())


def _slots(reading: Reading) -> str:
    return f"{float(reading.stored.state.get('slots', 0.0)):g}"


# --- what it is -----------------------------------------------------------------------------------


def described(item: Found) -> Iterator[tuple[str, str]]:
    """Yield the name and the value, in words and with units, of each property of an item."""
    row, reading, now = item.row, item.reading, item.reading.now
    prompt = item.prompt
    yield "item", item.key
    yield "prompt", f"{prompt.env_id} [{prompt.prompt_id}]" + (f", step {prompt.step}" if prompt.step else "")
    for number, turn in enumerate(prompt.history, 1):
        yield f"history, turn {number}", repr(turn)
    yield "domain", prompt.domain
    status = STATUS_NAMES[int(row["status"])]
    if row["status"] != WAITING and (reading.settings.has_due_dates or row["status"] == LEECH):
        status += f", due at iteration {_figure(row['due'])} ({lateness(now - float(row['due'])).removeprefix('due ')})"
    yield "status", status
    if row["reps"] and reading.settings.has_due_dates:
        asked = f"the rule asks for {reading.settings.desired_retention:g}"
        yield "recall", f"{item.recall:.2f} expected now, iteration {now}; {asked}"
        iterations = counted(row["interval"] * reading.settings.iterations_per_day, "iteration")
        yield "base interval", f"{iterations}, before diversity shortens it"
        stability = f"stability {counted(row['stability'], 'day')}, difficulty {_figure(row['difficulty'])}"
        yield "memory state", f"{stability} ({counted(reading.settings.iterations_per_day, 'iteration')} a day)"
    if row["reps"]:
        mean = row["alpha"] / (row["alpha"] + row["beta"])
        yield "pass rate, posterior", f"Beta({_figure(row['alpha'])}, {_figure(row['beta'])}), mean {mean:.2f}"
    yield "reviews", f"{row['reps']}, {counted(row['lapses'], 'lapse')}, {_streak(int(row['streak']))}"
    if row["visits"]:
        yield "last visit", _last_visit(row)
    tokens = f"{row['trained_tokens']} tokens in groups whose rewards differ"
    yield "visits", f"{row['visits']}, {tokens}, first met in iteration {row['created']}"
    measured = ("novelty", "centroid", "rarity", "spread")
    parts = ", ".join(f"{name} {float(row[name]):.2f}" for name in ("variance", *measured))
    yield "diversity", f"{float(row['diversity']):.2f} among the items ({parts})"
    yield "journal", str(reading.path)


def _last_visit(row: np.void) -> str:
    recalled = f"{row['num_success']} of {row['group_size']} episodes recalled"
    return (
        f"iteration {row['last_review']}, version {row['version']}: {recalled}, mean reward {float(row['reward']):.2f}"
    )


def _streak(streak: int) -> str:
    return f"failed the last {-streak}" if streak < 0 else f"recalled the last {streak}"


def lateness(late: float) -> str:
    """Return "due 3 iterations ago", "due now" (0 <= late < 1) or "due in 2 iterations"."""
    if 0 <= late < 1:
        return "due now"
    return f"due {counted(late, 'iteration')} ago" if late > 0 else f"due in {counted(-late, 'iteration')}"


def counted(number: float, unit: str) -> str:
    """Return "1 iteration" or "2.5 iterations"."""
    figure = _figure(number)
    return f"{figure} {unit}" if figure == "1" else f"{figure} {unit}s"


def _figure(value: float) -> str:
    """Return a number with one decimal below 100 and none from there on, without a trailing ".0"."""
    return f"{float(value):.1f}".removesuffix(".0") if abs(value) < 100 else f"{float(value):.0f}"
