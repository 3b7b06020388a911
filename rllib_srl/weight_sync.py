"""Verified weight transfer, seen from the driver: every engine computes what the learner computes.

    start:    perturbed weights out, canary must move and follow, true weights back           (self-test)
    sync:     weights of version v out, receipts checked, canary compared                      (every update)
    start of one: a restarted engine gets the current weights and the self-test                (after a failure)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rllib_srl.carriers import Direct, ObjectStore
from rllib_srl.deadlines import ActorFailure, Failure
from rllib_srl.engine.canary import CanaryGap, check_canary, self_test
from rllib_srl.runners import Runners


class WeightSync:
    """Sends the learner's weights to runners and checks that they act.

    Invariant: after each method the runners it named compute with the learner's weights, or it raised.
    """

    def __init__(
        self,
        carrier: ObjectStore | Direct,
        runners: Runners,
        sequences: list[list[int]],
        dtype: str,
        timeout_s: float,
    ) -> None:
        """Take carrier, runners, the canary's token ids, the engines' number format and each call's deadline."""
        self._carrier, self._runners = carrier, runners
        self._sequences, self._dtype, self._timeout_s = sequences, dtype, timeout_s
        self.healthy: CanaryGap | None = None
        self.seconds: dict[str, float] = {}  # where the last sync's time went

    def start(self, version: int, runner_ids: Sequence[int] | None = None) -> None:
        """Bring some runners, by default all, to the learner's weights and run the self-test on each.

        Raises:
            WeightSyncError: an engine does not compute with what it was sent.
            ActorFailure: a learner or runner died or was silent.
        """
        self._carrier.forget()
        for runner_id in self._runners.ids if runner_ids is None else runner_ids:
            if version > 0:  # a restarted engine has the weights of its files
                self._load(runner_id, version, 0.0)
            report = self_test(
                partial(self._call, runner_id, "score", sequences=self._sequences),
                partial(self._carrier.logps, version),
                partial(self._load, runner_id, version),
                partial(self._call, runner_id, "fingerprint"),
                dtype=self._dtype,
                version=version,
                healthy=self.healthy,
            )
            self.healthy = self.healthy or report.healthy
        self._carrier.forget()

    def sync(self, version: int) -> tuple[CanaryGap | None, dict[int, Failure]]:
        """Send the weights of `version` to all runners.

        Returns:
            The widest gap, None if no runner lives; and the runners that died or were silent, which must be restored.

        Raises:
            WeightSyncError: naming the version and, if a receipt failed, the tensors.
            ActorFailure: the learner died or was silent.
        """
        answers = self._carrier.deliver(version, 0.0, self._runners.ids)
        lost = {i: answer for i, answer in answers.items() if isinstance(answer, Failure)}
        loaded = [answer for answer in answers.values() if not isinstance(answer, Failure)]
        if lost or isinstance(self._carrier, ObjectStore):
            self._carrier.forget()
        for one in loaded:
            check_canary(one.gap, self.healthy, self._dtype, version)
        names = loaded[0].seconds if loaded else ()
        self.seconds = {**self._carrier.seconds, **{name: max(one.seconds[name] for one in loaded) for name in names}}
        return max((one.gap for one in loaded), key=lambda gap: gap.max, default=None), lost

    def _load(self, runner_id: int, version: int, scale: float) -> None:
        answer = self._carrier.deliver(version, scale, [runner_id])[runner_id]
        if isinstance(answer, Failure):
            raise ActorFailure(f"runner {runner_id} {answer.reason} while testing weights version {version}")

    def _call(self, runner_id: int, method: str, **arguments: Any) -> Any:
        what = f"testing weights ({method})"
        return self._runners.all(method, {runner_id: arguments}, self._timeout_s, what)[runner_id]
