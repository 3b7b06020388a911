"""Online accuracy: the answers to each prompt when it is played for the first time, before anything is learned from it.

    iteration:  fresh prompts --played with the weights so far--> answers: counted here --> update

An answer is counted before the update that trains on it (test, then train), so no answer profits from its own prompt,
and none is generated for the measurement. A prompt is answered G times by one policy: its G answers count as one, by
the share that is right, which is the expectation of answering once. Revisits and later passes do not count.

    online accuracy of a task = mean over its prompts of the share of right answers at their first play

Sources: prequential evaluation, Gama, Sebastiao and Rodrigues 2013, Machine Learning 90; average online accuracy of
continual learning, Cai, Sener and Koltun 2021, arXiv 2108.09020, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rllib_srl.types import GroupMeta

ONLINE_ACCURACY, ONLINE_PROMPTS = "online_accuracy", "online_prompts"  # in a row's measures


class FirstAnswers:
    """Shares of right answers at the first play, by domain. Invariant: each prompt is counted at most once."""

    def __init__(self) -> None:
        """Start without answers."""
        self._seen: set[str] = set()
        self._sum: dict[str, float] = {}
        self._num: dict[str, int] = {}

    def add(self, groups: Iterable[GroupMeta]) -> None:
        """Count the groups of prompts that have not been played before; those without rewards are left out."""
        for group in groups:
            key, domain = group.prompt.key, group.prompt.domain
            if group.origin != "fresh" or group.has_reward_G is not None or key in self._seen:
                continue
            self._seen.add(key)
            self._sum[domain] = self._sum.get(domain, 0.0) + float(group.is_right_G().mean())
            self._num[domain] = self._num.get(domain, 0) + 1

    def measures(self) -> dict[str, dict[str, float]]:
        """Return online accuracy and number of prompts of each domain that has any."""
        return {
            domain: {ONLINE_ACCURACY: self._sum[domain] / num, ONLINE_PROMPTS: float(num)}
            for domain, num in self._num.items()
        }

    def get_state(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return {"seen": sorted(self._seen), "sum": dict(self._sum), "num": dict(self._num)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`."""
        self._seen, self._sum, self._num = set(state["seen"]), dict(state["sum"]), dict(state["num"])
