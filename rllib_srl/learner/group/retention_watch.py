"""Warn, once each, where retention does not do what it is for: two domains in conflict, a held domain below its best.

    conflict     cosine of the gradient of a domain's held answers and that of the rest of the update below `CONFLICT`
    below best   the faded pass rate of a held domain more than `MARGIN` below its best, in `UPDATES` updates in turn

The faded pass rate of a domain moves by `RATE` of the way to each group that is played of it, fresh or revisited. One
batch of a few prompts does not move it by `MARGIN`: its standard deviation is at most a sixth of that of one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta

CONFLICT = -0.3  # cosine
RATE = 0.05  # of a group in the faded pass rate
LEAST_GROUPS = 20  # of a domain before its pass rate counts as its best
MARGIN = 0.1
UPDATES = 20


@dataclass
class DomainRecord:
    """How a domain does. Invariant: `best` is at least `rate` once `num_groups` is `LEAST_GROUPS`."""

    rate: float = 0.0  # faded pass rate
    num_groups: int = 0
    best: float = 0.0
    num_below: int = 0  # updates in turn that held the domain while it was below its best


class RetentionWatch:
    """The warnings of a run. Invariant: no line comes twice from one object."""

    def __init__(self, settings: ReplaySettings) -> None:
        """Use the settings of the memory."""
        self._settings = settings
        self._records: dict[str, DomainRecord] = {}
        self._told: set[tuple[str, ...]] = set()
        self._held: set[str] = set()
        self._learned = ""

    def observe(self, groups: Sequence[GroupMeta], held: Sequence[GroupMeta]) -> None:
        """Note the groups that were played in an iteration, and the answers that its update holds."""
        for group in groups:
            if group.has_reward_G is None or group.has_reward_G.all():
                self._note(group.prompt.domain, float(group.is_success_G(self._settings.pass_reward).mean()))
        self._held = {one.prompt.domain for one in held}
        fresh = Counter(group.prompt.domain for group in groups if group.origin == "fresh")
        self._learned = max(sorted(fresh), key=fresh.__getitem__, default="")

    def _note(self, domain: str, rate: float) -> None:
        record = self._records.setdefault(domain, DomainRecord(rate))
        record.rate += RATE * (rate - record.rate)
        record.num_groups += 1
        if record.num_groups >= LEAST_GROUPS:
            record.best = max(record.best, record.rate)

    def warnings(self, cosines: Mapping[str, float]) -> list[str]:
        """Return what is to be told after the update of an iteration.

        Args:
            cosines: by held domain, if the update compared gradients.
        """
        return [*self._conflicts(cosines), *self._below_best()]

    def _conflicts(self, cosines: Mapping[str, float]) -> Iterator[str]:
        for domain, cosine in sorted(cosines.items()):
            if cosine < CONFLICT and self._is_new("conflict", domain, self._learned):
                yield (
                    f"learning {self._learned!r} undoes {domain!r}: the cosine of their gradients is {cosine:.2f}. "
                    f"A larger replay_retain than {self._settings.retain:g} keeps more, a smaller one learns more"
                )

    def _below_best(self) -> Iterator[str]:
        for domain in sorted(self._held & self._records.keys()):
            record = self._records[domain]
            is_below = record.rate < record.best - MARGIN
            record.num_below = record.num_below + 1 if is_below else 0
            if record.num_below >= UPDATES and self._is_new("below best", domain):
                yield (
                    f"{domain!r} was held for {UPDATES} updates and still passes {record.rate:.0%} of its answers, "
                    f"at its best {record.best:.0%}: raise replay_retain ({self._settings.retain:g}), "
                    "replay_retain.answers or replay_revisit_fraction"
                )

    def _is_new(self, *warning: str) -> bool:
        is_new = warning not in self._told
        self._told.add(warning)
        return is_new

    def get_state(self) -> dict[str, Any]:
        """Return the records; what was told is told again after a resume."""
        return {domain: asdict(record) for domain, record in self._records.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._records = {domain: DomainRecord(**record) for domain, record in state.items()}
