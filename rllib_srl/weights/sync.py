"""Driver's side of the verified weight transfer: send weights and verify that every engine computes with them.

    start          self-test of all engines at once: load noise, send the weights, compare fingerprints and canary
    sync           send weights of version v, check receipts, compare the canary                     (every update)
    start(v, ids)  the self-test of restarted engines, which sends them the current weights          (after a failure)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.engine.canary import CanaryGap, check_canary, check_fingerprints
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.rollout.batches import Loaded
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
        dtype: str,
        timeout_s: float,
        has_adapters: bool = False,
    ) -> None:
        """Set the parts.

        Args:
            transport: of the weights.
            runners: that receive them.
            dtype: number format of the engines.
            timeout_s: of each call.
            has_adapters: whether the engines receive adapters, which are in no file of the model.
        """
        self._has_adapters = has_adapters
        self._transport, self._runners = transport, runners
        self._dtype, self._timeout_s = dtype, timeout_s
        self.healthy: CanaryGap | None = None  # of the last self-test: rounding only
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
        self._test(ids, version, is_same=version == 0 and not self._has_adapters)  # a new engine has read the files
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
                check_canary(gap, self.healthy, self._dtype, version)
        except WeightSyncError as error:
            if self._dtype == "float32":
                raise
            before, self.healthy = self.healthy, None
            logger.warning("%s; testing the engines again", error)
            try:
                self._test(ids, version, is_same=True)
            except WeightSyncError as second:
                self.healthy = before
                raise error from second
            self._transport.forget()
            logger.warning("the engines compute with the learner's weights; the canary's gap is now %s", self.healthy)

    def _test(self, ids: Sequence[int], version: int, is_same: bool) -> None:
        """Run the self-test on runners, all at the same time; they then hold the weights of `version`.

        Args:
            ids: of the runners.
            version: of the learner's weights.
            is_same: whether the engines hold these weights already.
        """
        prints = self._runners.load_noise(ids, self._timeout_s)
        delivered = self._transport.update(version, ids)
        answers = {i: self._arrived(i, delivered.answers, version) for i in ids}
        after = self._runners.fingerprint(ids, self._timeout_s)
        for i in ids:
            who = f"engine {i}: " if len(ids) > 1 else ""
            check_fingerprints(*prints[i], after[i], is_same=is_same, version=version, who=who)
        for answer in answers.values():
            gap = CanaryGap.between(answer.logps, delivered.learner_logps)
            check_canary(gap, self.healthy, self._dtype, version)
            self.healthy = self.healthy or gap

    def _arrived(self, runner_id: int, answers: Mapping[int, Loaded | Failure], version: int) -> Loaded:
        if isinstance(answer := answers[runner_id], Failure):
            raise RunnerFailure(runner_id, answer, f"testing weights version {version}")
        return answer
