"""What `buffer.py` prints of items, reviews and stored groups: rows of tables, and lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from rllib_srl.replay.explain import GRADE_NAMES, Found, counted, lateness
from rllib_srl.replay.readings import Reading
from rllib_srl.replay.records import LEECH, WAITING
from rllib_srl.replay.turns import Decode, turns
from scripts.display import rounded
from scripts.episodes import printable

WIDEST_PROMPT = 36  # characters of a prompt in `ls`
ORDERS: dict[str, Callable[[Found], float]] = {  # smallest first; what has no value comes last
    "due": lambda item: math.inf if item.row["status"] == WAITING else float(item.row["due"]),
    "recall": lambda item: item.recall if item.row["reps"] else math.inf,
    "pass_rate": lambda item: float(item.row["pass_rate"]) if item.row["visits"] else math.inf,
    "lapses": lambda item: -int(item.row["lapses"]),
    "visits": lambda item: -int(item.row["visits"]),
    "diversity": lambda item: -float(item.row["diversity"]),
    "novelty": lambda item: -float(item.row["novelty"]),
    "created": lambda item: -int(item.row["created"]),
}
HEADING = ["key", "prompt", "domain", "due", "recall", "pass rate", "visits", "lapses", "diversity", "groups"]


def row_of(item: Found) -> list[str]:
    """Return an item's row in `ls`."""
    row, prompt = item.row, item.prompt
    late = item.reading.now - float(row["due"])
    due = "waiting" if row["status"] == WAITING else lateness(late).removeprefix("due ")
    name = printable(f"{prompt.env_id} [{prompt.prompt_id}]" + (f" +{len(prompt.history)}" if prompt.history else ""))
    return [
        item.key[:10],
        name if len(name) <= WIDEST_PROMPT else name[: WIDEST_PROMPT - 1] + "…",
        printable(prompt.domain),
        f"leech, {due}" if row["status"] == LEECH else due,
        rounded(item.recall),
        rounded(float(row["pass_rate"]) if row["visits"] else None),
        *(str(row[name]) for name in ("visits", "lapses")),
        rounded(float(row["diversity"])),
        str(row["num_groups"]),
    ]


def review_rows(reviews: Any) -> Iterator[list[str]]:
    """Yield the table of an item's reviews, oldest first."""
    yield ["iteration", "grade", "pass rate", "predicted recall", "after", "policy version", "tokens trained"]
    for row in reviews:
        is_first = math.isnan(row["predicted"])
        yield [
            str(row["now"]),
            f"{row['grade']} {GRADE_NAMES[row['grade']]}",
            f"{row['num_success'] / row['n']:.2f} ({row['num_success']} of {row['n']})",
            "-" if is_first else f"{row['predicted']:.2f}",
            "first" if is_first else counted(row["elapsed"], "iteration"),
            str(row["version"]),
            str(row["trained_tokens"]),
        ]


def group_lines(one: Reading, at: int, decode: Decode | None) -> Iterator[str]:
    """Yield the lines of a stored group: its numbers, then each episode."""
    row, seq = one.stored.groups[at], int(one.stored.seqs[at])
    group = one.group(seq)
    rewards = " ".join(f"{reward:g}" for reward in group.rewards_G)
    age, uses = counted(one.now - row["born"], "iteration"), counted(row["uses"], "time")
    yield (
        f"\ngroup {group.group_id}: age {age}, version {row['version']}, reused {uses}, {row['num_tokens']} tokens "
        f"({row['num_loss_tokens']} by the policy), rewards {rewards}"
    )
    for g in range(group.size if decode else 0):
        yield f"── episode {g}  reward {group.rewards_G[g]:g}  stop {group.stop_reasons[g].value}"
        assert decode is not None
        for role, text in turns(group, g, decode, one.settings.on_secret == "mask"):
            for number, line in enumerate(text.removesuffix("\n").split("\n")):
                yield f"{role if number == 0 else '':>11} │ {printable(line)}".rstrip()
