"""Driver's side of the verified weight transfer: send weights and verify that every engine computes with them.

    start          self-test of all engines at once: send perturbed weights, the canary must follow, send true ones
    sync           send weights of version v, check receipts, compare the canary                     (every update)
    start(v, ids)  send current weights to restarted engines, then the self-test                     (after a failure)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.engine.canary import CanaryGap, check_canary, self_tests
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.rollout.runner_group import RunnerGroup
from rllib_srl.weights.transports import ObjectStoreTransport, VLLMTransport

logger = logging.getLogger(__name__)


class WeightSync:
    """Sends the learner's weights to runners and verifies that they are used.

    Invariant: when a method returns, its runners compute with the learner's weights, except those that `sync` returns
    as failures; otherwise it raises.
    """

    def __init__(
        self,
        transport: ObjectStoreTransport | VLLMTransport,
        runners: RunnerGroup,
        sequences: list[list[int]],
        dtype: str,
        timeout_s: float,
        has_adapters: bool = False,
    ) -> None:
        """Set the parts.

        Args:
            transport: of the weights.
            runners: that receive them.
            sequences: the canary's token ids.
            dtype: number format of the engines.
            timeout_s: of each call.
            has_adapters: whether the engines receive adapters, which are in no file of the model.
        """
        self._has_adapters = has_adapters
        self._transport, self._runners = transport, runners
        self._dtype, self._timeout_s = dtype, timeout_s
        self._sequences = [*transport.of_updates, *sequences]  # of the self-test
        self.healthy: CanaryGap | None = None  # gaps that are rounding only: of the self-test, and of updates
        self.healthy_update: CanaryGap | None = None
        self.seconds: dict[str, float] = {}  # duration of each step of the last sync

    def start(self, version: int, runner_ids: Sequence[int] | None = None) -> None:
        """Send the learner's weights to some runners, by default all, and run the self-test on each.

        Raises:
            WeightSyncError: an engine does not compute with the weights it received.
            RunnerFailure: a runner died or timed out.
            ActorFailure: a learner died or timed out.
        """
        ids = self._runners.ids if runner_ids is None else list(runner_ids)
        self._transport.forget()
        if version > 0 or self._has_adapters:  # a new engine has loaded the weights of the model's files
            self._load(ids, version, 0.0)
        self._test(ids, version)
        self._transport.forget()

    def sync(self, version: int) -> tuple[CanaryGap | None, dict[int, Failure]]:
        """Send the weights of `version` to all runners.

        Returns:
            The largest canary gap (None if no runner is alive), and the runners that died or timed out, which must be
            restarted.

        Raises:
            WeightSyncError: verification failed; the message names the version and, for a failed receipt, the tensors.
            ActorFailure: the learner died or timed out.
        """
        delivered = self._transport.update(version, self._runners.ids)
        answers = delivered.answers
        lost = {i: answer for i, answer in answers.items() if isinstance(answer, Failure)}
        loaded = [answer for answer in answers.values() if not isinstance(answer, Failure)]
        if lost or isinstance(self._transport, ObjectStoreTransport):
            self._transport.forget()
        gaps = [CanaryGap.between(one.logps, delivered.learner_logps) for one in loaded]
        self._check(gaps, [i for i in answers if i not in lost], version)
        names = loaded[0].seconds if loaded else ()
        self.seconds = {**self._transport.seconds, **{name: max(one.seconds[name] for one in loaded) for name in names}}
        return max(gaps, key=lambda gap: gap.max, default=None), lost

    def _check(self, gaps: Sequence[CanaryGap], ids: Sequence[int], version: int) -> None:
        """Check the canary after an update; in bf16, test the engines again before an update is refused.

        Training may sharpen a policy, and rounding then costs more nats than at version 0. The self-test tells this
        from a stale matrix, and its gap becomes the new limit.

        Raises:
            WeightSyncError: an engine does not compute with the weights it received.
            RunnerFailure: a runner died or timed out in the second test.
        """
        try:
            for gap in gaps:
                check_canary(gap, self.healthy_update, self._dtype, version)
        except WeightSyncError as error:
            if self._dtype == "float32":
                raise
            before = self.healthy, self.healthy_update
            self.healthy = self.healthy_update = None
            logger.warning("%s; testing the engines again", error)
            try:
                self._test(ids, version)
            except WeightSyncError as second:
                self.healthy, self.healthy_update = before
                raise error from second
            self._transport.forget()
            now = self.healthy_update
            logger.warning("the engines compute with the learner's weights; the canary's gap is now %s", now)

    def _test(self, ids: Sequence[int], version: int) -> None:
        """Run the self-test on runners that hold the weights of `version`, all at the same time."""
        reports = self_tests(
            partial(self._runners.score, ids, self._sequences, self._timeout_s),
            partial(self._transport.logps, sequences=self._sequences),
            partial(self._load, ids, version),
            partial(self._runners.fingerprint, ids, self._timeout_s),
            dtype=self._dtype,
            version=version,
            healthy=self.healthy,
            num_of_updates=len(self._transport.of_updates),
        )
        for report in reports.values():
            self.healthy = self.healthy or report.healthy
            self.healthy_update = self.healthy_update or report.healthy_update

    def _load(self, ids: Sequence[int], version: int, scale: float) -> None:
        for runner_id, answer in self._transport.load(version, scale, ids).items():
            if isinstance(answer, Failure):
                raise RunnerFailure(runner_id, answer, f"testing weights version {version}")
