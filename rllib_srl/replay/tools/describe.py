"""Describe one item of a memory in words.

find(reading, "4b9d") -> Found -> described   name and value, with units
turns(group, g, decode)                       the token stream of a stored episode as turns by role
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rllib_srl.replay.admission import turns_of
from rllib_srl.replay.reading import Reading
from rllib_srl.types import Group, Prompt

Decode = Callable[[Sequence[int]], str]
MOST_NAMED = 5  # maximum number of candidates in an error message


def turns(group: Group, g: int, decode: Decode) -> list[tuple[str, str]]:
    """Return the role ("environment" or "policy") and the text of each turn of an episode.

    Args:
        group: a stored group.
        g: index of the episode.
        decode: token ids -> text, with special tokens.
    """
    return [("policy" if one[0] else "environment", one[-1]) for one in turns_of(group, g, decode)]


@dataclass(frozen=True)
class Found:
    """One item of a reading, at position `at`."""

    reading: Reading
    at: int
    row: np.void  # its record
    prompt: Prompt
    recall: float  # predicted now; nan if it was never reviewed, or no spacing rule predicts it

    @property
    def key(self) -> str:
        """Return the key of its prompt, 16 hex digits."""
        return f"{int(self.row['key']):016x}"

    @property
    def groups(self) -> list[int]:
        """Return the positions of its groups in the reading's arrays of groups, oldest first."""
        positions: list[int] = self.reading.groups_at(int(self.reading.stored.slots[self.at])).tolist()
        return positions


def all_items(reading: Reading) -> list[Found]:
    """Return every item."""
    stored, num = reading.stored, len(reading.stored.items)
    recall = reading.recall.tolist() if reading.settings.has_due_dates else [float("nan")] * num
    return [Found(reading, at, stored.items[at], stored.prompts[at], recall[at]) for at in range(num)]


def find(reading: Reading, name: str) -> Found:
    """Return the item with the prompt id `name`, or else the one whose key begins with `name`.

    Raises:
        ValueError: no item or several match; the message names up to 5 candidates.
    """
    items = all_items(reading)
    found = [item for item in items if item.prompt.prompt_id == name]
    found = found or [item for item in items if item.key.startswith(name.lower())]
    if not found:
        raise ValueError(f"none of {len(items)} items has the prompt id or key {name!r}; see srl memory list")
    if len(found) > 1:
        named = [f"{item.key} ({item.prompt.env_id} [{item.prompt.prompt_id}])" for item in found[:MOST_NAMED]]
        listed = ", ".join(named) + ", ..." * (len(found) > MOST_NAMED)
        raise ValueError(f"{name!r} is {len(found)} items: {listed}; expected more digits of a key")
    return found[0]


def described(item: Found) -> Iterator[tuple[str, str]]:
    """Yield the name and the value, in words and with units, of each property of an item."""
    row, prompt, settings, now = item.row, item.prompt, item.reading.settings, item.reading.now
    yield "item", item.key
    yield "prompt", f"{prompt.env_id} [{prompt.prompt_id}]" + (f", step {prompt.step}" if prompt.step else "")
    for number, turn in enumerate(prompt.history, 1):
        yield f"history, turn {number}", repr(turn)
    yield "domain", prompt.domain
    if settings.has_due_dates:
        yield "due", f"at iteration {_figure(row['due'])} ({lateness(now - float(row['due']))})"
    if settings.has_due_dates and row["reps"]:
        asked = f"the rule asks for {settings.desired_retention:g}"
        yield "recall", f"{item.recall:.2f} expected now, iteration {now}; {asked}"
        days = counted(settings.iterations_per_day, "iteration")
        stability = f"stability {counted(row['stability'], 'day')}, difficulty {_figure(row['difficulty'])}"
        yield "memory state", f"{stability} ({days} a day)"
        yield "reviews", f"{row['reps']}, {counted(row['lapses'], 'lapse')}"
    if row["visits"]:
        passed = f"{row['num_success']} of {row['group_size']} episodes passed, mean reward {float(row['reward']):.2f}"
        yield "last visit", f"iteration {row['last_review']}, version {row['version']}: {passed}"
    yield "visits", f"{row['visits']}, first met in iteration {row['created']}"
    if settings.embedding_used:
        parts = ", ".join(f"{name} {float(row[name]):.2f}" for name in ("variance", "novelty"))
        yield "diversity", f"{float(row['diversity']):.2f} among the items ({parts})"


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
