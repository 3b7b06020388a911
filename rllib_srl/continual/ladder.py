"""The ladder of an upgrade: what is done when gates stay shut, one rung after the other, each at most once.

    bad evaluations in a row, or one harmful ──> back to the last good checkpoint, and
      weight    what falls is rehearsed and weighs in the loss twice as much
      kl        the KL to the model that is upgraded weighs twice as much
      share     twice as many of the trained groups are rehearsals
      halt      training ends; the last good checkpoint stands for the gates of delivery
      (roll back to the model itself, where those do not open)

Rungs add up: what an earlier one changed stays. A run therefore ends after at most as many attempts as there are rungs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rllib_srl.continual.gates import Outcome, Verdict

RUNGS = ("weight", "kl", "share", "halt")
FACTOR = 2.0
MAX_SHARE = 0.9  # of rehearsals: something must be left to learn from


class Action(StrEnum):
    """What follows an evaluation."""

    ACCEPT = "accept"  # the weights become the last good ones
    WAIT = "wait"  # train on, and see whether it stays bad
    CLIMB = "climb"  # back to the last good weights, one rung up
    HALT = "halt"


@dataclass(frozen=True)
class Step:
    """An action with its rung, "" without one, and the domains that fell."""

    action: Action
    rung: str = ""
    fallen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """How strongly what is to be kept is rehearsed. Invariant: `share` in (0, 1), `kl_coeff` above 0."""

    share: float  # of the trained groups that are rehearsals
    kl_coeff: float  # weight of the KL to the model that is upgraded
    reuse_coeff: float = 1.0  # weight of stored groups in the loss, beside the played ones'
    quotas: Mapping[str, float] = field(default_factory=dict)  # domain to be kept -> weight among rehearsals

    def after(self, rung: str, fallen: Sequence[str]) -> Rehearsal:
        """Return what a rung makes of it.

        Raises:
            ValueError: a rung that changes nothing, or none at all.
        """
        if rung == "weight":
            heavier = {name: weight * (FACTOR if name in fallen else 1) for name, weight in self.quotas.items()}
            return replace(self, reuse_coeff=FACTOR * self.reuse_coeff, quotas=heavier)
        if rung == "kl":
            return replace(self, kl_coeff=FACTOR * self.kl_coeff)
        if rung == "share":
            return replace(self, share=min(MAX_SHARE, FACTOR * self.share))
        raise ValueError(f"rung = {rung!r}; expected one of {', '.join(RUNGS[:-1])}")

    def settings(self) -> dict[str, Any]:
        """Return the settings of SRL that carry it out.

        The share is reached half by playing again and half by stored groups. With f of the played prompts revisited
        and f of the trained groups stored, (1 - f)^2 of the trained groups are new: f = 1 - sqrt(1 - share).
        """
        fraction = 1 - math.sqrt(1 - self.share)
        return {
            "kl_coeff": self.kl_coeff,
            "replay_revisit_fraction": fraction,
            "replay_reuse_fraction": fraction,
            "replay_reuse_coeff": self.reuse_coeff,
            "replay_domains": sorted(self.quotas),
            "replay_domain_quotas": dict(self.quotas),
        }


class Ladder:
    """Says what follows each evaluation. Invariant: `HALT` after at most `len(RUNGS)` climbs, and then for good."""

    def __init__(self, patience: int) -> None:
        """Climb after `patience` bad evaluations in a row, at least 1."""
        self._patience = patience
        self._num_bad = 0
        self._num_climbed = 0

    def went_back(self) -> None:
        """Count bad evaluations anew: training begins again at the last good weights, on the rung it had reached."""
        self._num_bad = 0

    def after(self, verdicts: Sequence[Verdict]) -> Step:
        """Return what to do about the verdicts of one evaluation."""
        shut = [verdict for verdict in verdicts if not verdict.is_passed]
        if not shut:
            self._num_bad = 0
            return Step(Action.ACCEPT)
        fallen = tuple(sorted({verdict.domain for verdict in shut if verdict.domain}))
        self._num_bad += 1
        is_harmful = any(verdict.outcome is Outcome.HARMFUL for verdict in shut)
        if self._num_bad < self._patience and not is_harmful:
            return Step(Action.WAIT, fallen=fallen)
        rung = RUNGS[min(self._num_climbed, len(RUNGS) - 1)]
        self._num_bad, self._num_climbed = 0, self._num_climbed + 1
        return Step(Action.HALT if rung == "halt" else Action.CLIMB, rung, fallen)
