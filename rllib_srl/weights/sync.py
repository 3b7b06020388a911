"""Driver's side of the verified weight transfer: send weights and verify that every engine computes with them.

    start          send perturbed weights, canary must move and match the learner, send true weights (self-test)
    sync           send weights of version v, check receipts, compare the canary                     (every update)
    start(v, ids)  send current weights to restarted engines, then the self-test                     (after a failure)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.engine.canary import CanaryGap, check_canary, self_test
from rllib_srl.rollout.runner_group import RunnerGroup
from rllib_srl.weights.transports import ObjectStoreTransport, VLLMTransport


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
    ) -> None:
        """Set transport, runners, the canary's token ids, the engines' number format and the timeout of each call."""
        self._transport, self._runners = transport, runners
        self._sequences, self._dtype, self._timeout_s = sequences, dtype, timeout_s
        self.healthy: CanaryGap | None = None
        self.seconds: dict[str, float] = {}  # duration of each step of the last sync

    def start(self, version: int, runner_ids: Sequence[int] | None = None) -> None:
        """Send the learner's weights to some runners, by default all, and run the self-test on each.

        Raises:
            WeightSyncError: an engine does not compute with the weights it received.
            RunnerFailure: a runner died or timed out.
            ActorFailure: a learner died or timed out.
        """
        self._transport.forget()
        for runner_id in self._runners.ids if runner_ids is None else runner_ids:
            if version > 0:  # a restarted engine has loaded the weights of the model's files
                self._load(runner_id, version, 0.0)
            report = self_test(
                partial(self._runners.score, runner_id, self._sequences, self._timeout_s),
                partial(self._transport.logps, version),
                partial(self._load, runner_id, version),
                partial(self._runners.fingerprint, runner_id, self._timeout_s),
                dtype=self._dtype,
                version=version,
                healthy=self.healthy,
            )
            self.healthy = self.healthy or report.healthy
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
        answers = self._transport.deliver(version, 0.0, self._runners.ids)
        lost = {i: answer for i, answer in answers.items() if isinstance(answer, Failure)}
        loaded = [answer for answer in answers.values() if not isinstance(answer, Failure)]
        if lost or isinstance(self._transport, ObjectStoreTransport):
            self._transport.forget()
        for one in loaded:
            check_canary(one.gap, self.healthy, self._dtype, version)
        names = loaded[0].seconds if loaded else ()
        self.seconds = {**self._transport.seconds, **{name: max(one.seconds[name] for one in loaded) for name in names}}
        return max((one.gap for one in loaded), key=lambda gap: gap.max, default=None), lost

    def _load(self, runner_id: int, version: int, scale: float) -> None:
        answer = self._transport.deliver(version, scale, [runner_id])[runner_id]
        if isinstance(answer, Failure):
            raise RunnerFailure(runner_id, answer, f"testing weights version {version}")
