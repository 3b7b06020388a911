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
from rllib_srl.replay.journal.reader import Reading
from rllib_srl.replay.selection.sampler import drawn_in
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
    raise ValueError(f"none of {len(items)} items has the prompt id or key {name!r}; expected one that ls shows")


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
        if method.startswith("draw_prompts"):
            for facts in (drawn["why"] for drawn in answer if drawn["why"]["key"] in at_of):
                yield Draw(int(first), Found(reading, at_of[facts["key"]]), True, facts_in_words(facts))
        elif method.startswith("draw_groups"):
            for group in (groups[group_of[seq]] for seq in drawn_in(answer)[0] if seq in group_of):
                reason = f"its group of iteration {int(group['born'])} was trained on again"
                yield Draw(int(first), Found(reading, at_of_slot[int(group["slot"])]), False, reason)


def facts_in_words(facts: Mapping[str, Any]) -> str:
    """Return the result of `Draws.why` as part of a sentence."""
    if not facts["has_due_dates"]:
        ago = f"{counted(facts['elapsed'], 'iteration')} after its last visit" if facts["visits"] else "never played"
        return f"{ago}, pass rate {facts['pass_rate']:.2f}, {counted(facts['visits'], 'visit')} before"
    recall = facts["recall"]
    parts = [
        lateness(facts["late"]) + (" (drawn early)" if facts["late"] < 0 else ""),
        "never reviewed" if recall is None else f"predicted recall {recall:.2f}",
        f"lapses {facts['lapses']}",
        *([f"novelty {facts['novelty']:.2f} (diversity {facts['diversity']:.2f})"] if "novelty" in facts else []),
    ]
    return ", ".join(parts)


def next_draw(item: Found) -> str:
    """Return a sentence about the next draw: that the item may be drawn, or why it will not be."""
    settings, row, now = item.reading.settings, item.row, item.reading.now
    rows, coming = item.reading.stored.items, now + 1
    if len(rows) < settings.min_buffer_size:
        return (
            f"not drawn for iteration {coming}: nothing is revisited below min_buffer_size = "
            f"{settings.min_buffer_size} items"
        )
    rests = int(row["last_review"]) + settings.min_recall_interval
    expected = "" if np.isnan(item.recall) else f", predicted recall {item.recall:.2f} now"
    rule = f"rule {settings.selection}"
    if row["due"] > coming and not settings.has_due_dates:
        return f"not drawn for iteration {coming}: rests until iteration {rests} (min_recall_interval)"
    if row["due"] > coming:
        kept = f"; rests until iteration {rests} (min_recall_interval)" if rests > coming else ""
        early = "; before that only if too few items are due" if settings.selection == "srl" and not kept else ""
        until = f"{_figure(row['due'])} ({lateness(now - float(row['due'])).removeprefix('due ')})"
        return f"not drawn for iteration {coming}: not due until iteration {until}{expected}{kept}{early}"
    others = int((rows["due"] <= coming).sum()) - 1
    if not settings.has_due_dates:
        since = counted(now - int(row["last_review"]), "iteration")
        known = f"last visited {since} ago" if row["visits"] else "never played"
        return f"may be drawn for iteration {coming}: {known}; so may {others} other items, {rule}"
    late = lateness(now - float(row["due"]))
    return f"may be drawn for iteration {coming}: {late}{expected}; {others} other items are due, {rule}"


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
    if reading.settings.has_due_dates:
        until = lateness(now - float(row["due"])).removeprefix("due ")
        yield "due", f"at iteration {_figure(row['due'])} ({until})"
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
    if row["reps"] or reading.settings.has_due_dates:
        yield "reviews", f"{row['reps']}, {counted(row['lapses'], 'lapse')}, {_streak(int(row['streak']))}"
    if row["visits"]:
        yield "last visit", _last_visit(row)
    yield "visits", f"{row['visits']}, first met in iteration {row['created']}"
    if reading.settings.embedding_used:
        parts = ", ".join(f"{name} {float(row[name]):.2f}" for name in ("variance", "novelty"))
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
