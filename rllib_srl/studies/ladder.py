"""The escalation ladder of an upgrade: the countermeasures after failed gates, one rung after the other.

    several bad evaluations in a row, or one harmful ──> return to the last good checkpoint, and
      weight    double the weight of stored groups in the loss, and the quotas of the domains that dropped
      kl        double the KL coefficient (KL to the old model)
      share     double the share of rehearsals among the trained groups
      halt      end training; the last good checkpoint is tested by the gates of delivery
      (if those fail, roll back to the old model)

Each rung is used at most once, and its change stays in effect. A run thus ends after at most as many attempts as there
are rungs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rllib_srl.studies.gates import Outcome, Verdict

RUNGS = ("weight", "kl", "share", "halt")
FACTOR = 2.0
MAX_SHARE = 0.9  # largest share of rehearsals, so that new groups remain


class Action(StrEnum):
    """Action after an evaluation."""

    ACCEPT = "accept"  # keep the weights as the last good ones
    WAIT = "wait"  # continue training until the next evaluation
    CLIMB = "climb"  # return to the last good weights, one rung up
    HALT = "halt"


@dataclass(frozen=True)
class Step:
    """An action with its rung ("" without one) and the domains whose gates failed."""

    action: Action
    rung: str = ""
    fallen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """Strength of rehearsal of the retained domains. Invariant: `share` in (0, 1), `kl_coeff` above 0."""

    share: float  # share of rehearsals among the trained groups
    kl_coeff: float  # coefficient of the KL to the old model
    reuse_coeff: float = 1.0  # weight of stored groups in the loss, relative to played ones
    quotas: Mapping[str, float] = field(default_factory=dict)  # domain to be retained -> weight among rehearsals

    def after(self, rung: str, fallen: Sequence[str]) -> Rehearsal:
        """Return the rehearsal after a rung; `fallen` are the domains whose gates failed.

        Raises:
            ValueError: the rung is unknown, or "halt", which changes nothing.
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
        """Return the settings of SRL for this rehearsal.

        Revisits and reuse get the same fraction f. With f of the played prompts revisited and f of the trained groups
        stored, (1 - f)^2 of the trained groups are new: f = 1 - sqrt(1 - share).
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
    """Selects the action after each evaluation. Invariant: the `len(RUNGS)`-th climb and all later ones are `HALT`."""

    def __init__(self, patience: int) -> None:
        """Climb after `patience` bad evaluations in a row, at least 1."""
        self._patience = patience
        self._num_bad = 0
        self._num_climbed = 0

    def went_back(self) -> None:
        """Reset the count of bad evaluations after a return to the last good weights; the rung stays."""
        self._num_bad = 0

    def after(self, verdicts: Sequence[Verdict]) -> Step:
        """Return the action for the verdicts of one evaluation."""
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
