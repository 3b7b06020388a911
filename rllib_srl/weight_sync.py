"""Verified weight transfer, seen from the driver: every engine computes what the learner computes.

    start:    perturbed weights out, canary must move and follow, true weights back           (self-test)
    sync:     weights of version v out, receipts checked, canary compared                      (every update)
    restore:  a restarted engine gets the current weights and the self-test                    (after a failure)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_srl.deadlines import ActorFailure, Failure
from rllib_srl.engine.canary import CanaryGap, check_canary, self_test
from rllib_srl.learners import call_learners
from rllib_srl.runners import Runners
from rllib_srl.weights import Sent


class WeightSync:
    """Sends the learner's weights to runners and checks that they act.

    Invariant: after each method the runners it named compute with the learner's weights, or it raised.
    """

    def __init__(
        self, learners: LearnerGroup, runners: Runners, sequences: list[list[int]], dtype: str, timeout_s: float
    ) -> None:
        """Take the two groups, the canary's token ids, the engines' number format and the deadline of each call."""
        self._learners, self._runners = learners, runners
        self._sequences, self._dtype, self._timeout_s = sequences, dtype, timeout_s
        self._sent: dict[tuple[int, float], Sent] = {}
        self.healthy: CanaryGap | None = None

    def start(self, version: int, runner_ids: Sequence[int] | None = None) -> None:
        """Bring some runners, by default all, to the learner's weights and run the self-test on each.

        Raises:
            WeightSyncError: an engine does not compute with what it was sent.
            ActorFailure: a learner or runner died or was silent.
        """
        for runner_id in self._runners.ids if runner_ids is None else runner_ids:
            if version > 0:  # a restarted engine has the weights of its files
                self._load(runner_id, version, 0.0)
            report = self_test(
                partial(self._call, runner_id, "score", sequences=self._sequences),
                lambda scale: self._from_learner(version, scale)[1],
                partial(self._load, runner_id, version),
                partial(self._call, runner_id, "fingerprint"),
                dtype=self._dtype,
                version=version,
                healthy=self.healthy,
            )
            self.healthy = self.healthy or report.healthy
        self._sent.clear()

    def sync(self, version: int) -> tuple[CanaryGap, dict[int, Failure]]:
        """Send the weights of `version` to all runners.

        Returns:
            The widest gap, and the runners that died or were silent, which must be restored.

        Raises:
            WeightSyncError: naming the version and, if a receipt failed, the tensors.
            ActorFailure: the learner died or was silent, or all runners.
        """
        arguments = self._arguments(*self._from_learner(version))
        self._sent.clear()
        answers = dict(self._runners.each("load_weights", dict.fromkeys(self._runners.ids, arguments), self._timeout_s))
        lost = {i: answer for i, answer in answers.items() if isinstance(answer, Failure)}
        gaps = [answer for answer in answers.values() if not isinstance(answer, Failure)]
        for gap in gaps:
            check_canary(gap, self.healthy, self._dtype, version)
        if not gaps:
            raise ActorFailure(f"no runner took weights version {version}: runner {min(lost)} {lost[min(lost)].reason}")
        return max(gaps, key=lambda gap: gap.max), lost

    def _load(self, runner_id: int, version: int, scale: float) -> None:
        self._call(runner_id, "load_weights", **self._arguments(*self._from_learner(version, scale)))

    def _arguments(self, ref: Any, logps: list[np.ndarray]) -> dict[str, Any]:
        return {"ref": ref, "learner_logps": logps, "sequences": self._sequences, "timeout_s": self._timeout_s}

    def _call(self, runner_id: int, method: str, **arguments: Any) -> Any:
        what = f"testing weights ({method})"
        return self._runners.all(method, {runner_id: arguments}, self._timeout_s, what)[runner_id]

    def _from_learner(self, version: int, scale: float = 0.0) -> Sent:
        """Return what the learner sends; the self-test asks for the same weights once per runner."""
        if (version, scale) not in self._sent:
            self._sent.clear()  # so that one bundle at a time lies in the object store
            arguments = [(version, self._sequences, scale)]
            what = f"sending weights version {version}"
            self._sent[version, scale] = call_learners(self._learners, "send", arguments, self._timeout_s, what)[0]
        return self._sent[version, scale]
