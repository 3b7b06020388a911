"""The law by which the stub answers, learns and forgets: one skill per domain, in logits.

    readable chance   q = sigmoid(logit(chance) + skill[domain] - spread * z(prompt))    z: fixed, standard normal
    outcomes          right (1 - malformed) q     wrong (1 - malformed)(1 - q)     malformed
    gain of a batch   gain[d] = sum over episodes of domain d of weight * max(0, advantage)
    one update        skill[d] <- skill[d] * exp(-forgets * sum of the other domains' gains) + learns * gain[d]

`weight` is the share of an episode in the real loss: its scale times its loss tokens, so the weights of the played
episodes sum to about 1. A domain that is right everywhere or nowhere has silent groups, no advantages and no gain. A
skill decays only when other domains gain, towards 0, where the domain has its first chance again.

Skills lie in `NUM_SLOTS` slots; a domain's slot is a hash of its name, so that learners and engines agree without a
list of names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from rllib_srl.types import Group, Prompt

NUM_SLOTS = 1 << 16
OUTCOMES = ("right", "wrong", "malformed")
_NORMAL = NormalDist()
_SIGNS = np.where(np.arange(NUM_SLOTS) % 2, 0.01, -0.01)


@dataclass(frozen=True)
class Law:
    """The numbers of the law; see the module. Invariant: `faults_of_law` finds nothing in them."""

    chance: float | Mapping[str, float] = 0.2  # at skill 0 and for a prompt of average difficulty; or by domain
    malformed: float = 0.05
    learns: float = 0.1
    forgets: float = 0.01
    spread: float = 1.0

    @classmethod
    def of(cls, settings: Any) -> Law:
        """Return the law in the settings of an `SRLConfig`."""
        rates = (settings.stub_learns, settings.stub_forgets)
        return cls(settings.stub_chance, settings.stub_malformed, *rates, settings.stub_spread)

    def logps(self, prompt: Prompt, skills_S: np.ndarray) -> np.ndarray:
        """Return the log-probs of the `OUTCOMES` of a prompt, float64 [3], nats; all are finite."""
        chance = self.chance if not isinstance(self.chance, Mapping) else self.chance.get(domain_of(prompt), FIRST)
        logit = math.log(chance / (1 - chance)) + float(skills_S[slot_of(domain_of(prompt))])
        logit -= self.spread * difficulty(prompt.key)
        readable = math.log1p(-self.malformed)
        malformed = math.log(self.malformed) if self.malformed else -1e30
        return np.array([readable - _softplus(-logit), readable - _softplus(logit), malformed])

    def moved(self, skills_S: np.ndarray, gains_S: np.ndarray) -> np.ndarray:
        """Return the skills after one update, in the number format of `skills_S`."""
        interference_S = gains_S.sum() - gains_S
        new_S: np.ndarray = skills_S.astype(np.float64) * np.exp(-self.forgets * interference_S)
        return (new_S + self.learns * gains_S).astype(skills_S.dtype)


FIRST = 0.2  # chance of a domain that `Law.chance` does not name


def domain_of(prompt: Prompt) -> str:
    """Return the domain of a prompt, its environment if it has none."""
    return prompt.domain or prompt.env_id


@lru_cache(maxsize=4096)
def slot_of(domain: str) -> int:
    """Return the slot of a domain, the same in every process."""
    return int.from_bytes(hashlib.blake2b(domain.encode(), digest_size=8).digest()) % NUM_SLOTS


@lru_cache(maxsize=65_536)
def difficulty(key: str) -> float:
    """Return z of a prompt by its key (16 hex digits): standard normal over prompts, fixed for each."""
    return _NORMAL.inv_cdf((int(key, 16) + 0.5) / 2**64)


def uniform(*words: object) -> float:
    """Return a number in [0, 1) that is a hash of `words`."""
    text = "\0".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def drawn(logps_K: np.ndarray, temperature: float, point: float) -> int:
    """Return the outcome at `point` in [0, 1) of softmax(logps / temperature); temperature 0: the most likely one."""
    if temperature == 0:
        return int(logps_K.argmax())
    highest = float(logps_K.max())
    masses = [math.exp((logp - highest) / temperature) for logp in logps_K.tolist()]
    left = point * sum(masses)
    for outcome, mass in enumerate(masses):
        if (left := left - mass) < 0:
            return outcome
    return max(outcome for outcome, mass in enumerate(masses) if mass)  # rounding


@dataclass
class Gains:
    """The gains of a batch by domain. Invariant: no two of its domains share a slot."""

    names: dict[int, str] = field(default_factory=dict)  # by slot, of every domain since the start
    gains_S: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SLOTS))

    def clear(self) -> None:
        """Set all gains to 0."""
        self.gains_S[:] = 0

    def add(self, group: Group, advantages_G: np.ndarray, scale: float | np.ndarray) -> None:
        """Add the gain of a group.

        Raises:
            ValueError: its domain shares the slot of another one.
        """
        domain = domain_of(group.prompt)
        slot = slot_of(domain)
        if self.names.setdefault(slot, domain) != domain:
            raise ValueError(
                f"the domains {self.names[slot]!r} and {domain!r} have the same slot in the stub; expected another "
                "name for one of them, such as 'environment#name' in worlds"
            )
        weights_G = np.asarray(scale, np.float64) * group.num_loss_tokens_G()
        self.gains_S[slot] += float((weights_G * np.maximum(advantages_G, 0)).sum())


def canary_logps(skills_S: np.ndarray, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return log-probs of tokens 1..T-1 that depend on the skills: how engine and learner compare their weights.

    -softplus(skill of a slot chosen by the token and the one before it + a signed sum of all skills / 100).
    """
    skills_S = skills_S.astype(np.float64)
    common = float(skills_S @ _SIGNS)
    found = []
    for sequence in sequences:
        ids = np.asarray(sequence, np.int64)
        slots = (ids[1:] * 31 + ids[:-1]) % NUM_SLOTS
        found.append((-np.logaddexp(0, skills_S[slots] + common)).astype(np.float32))
    return found


def faults_of_law(chance: Any, malformed: Any, learns: Any, forgets: Any, spread: Any) -> dict[str, str]:
    """Return parameter -> what is expected, for each one out of its range."""

    def is_in(value: Any, low: float, high: float) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    chances = list(chance.values()) if isinstance(chance, Mapping) else [chance]
    checks = {
        "chance": (all(is_in(one, 1e-6, 1 - 1e-6) for one in chances), "a number between 0 and 1, or one by domain"),
        "malformed": (is_in(malformed, 0, 0.99), "a number from 0 to 0.99"),
        "learns": (is_in(learns, 0, 100), "a number from 0 to 100"),
        "forgets": (is_in(forgets, 0, 100), "a number from 0 to 100"),
        "spread": (is_in(spread, 0, 10), "a number from 0 to 10"),
    }
    return {name: expected for name, (is_right, expected) in checks.items() if not is_right}


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
