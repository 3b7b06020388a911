"""Driver's side of the verified weight transfer: send weights and verify that every engine computes with them.

    start          self-test of all engines at once: load noise, send the weights, compare fingerprints and canary
    sync           send weights of version v, check receipts, compare the canary                     (every update)
    start(v, ids)  the self-test of restarted engines, which sends them the current weights          (after a failure)

Learner 0 packs, Ray's object store transfers, each engine verifies checksums and loads. The learner scores the canary
while the engines load, each in its own process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ray.exceptions import ObjectLostError

from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.engine.canary import CanaryGap, check_canary, check_fingerprints, update_sequences
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.learner.group.learners import LearnerFailure, Learners
from rllib_srl.learner.learner import Sent
from rllib_srl.rollout.batches import Loaded
from rllib_srl.rollout.runner_group import RunnerGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivered:
    """The engines' log-probs of the canary, by runner id, and the learner's under the same weights."""

    answers: dict[int, Loaded | Failure]
    learner_logps: list[np.ndarray]


class WeightSync:
    """Sends the learner's weights to runners and verifies that they are used.

    Invariant: when a method returns, its runners compute with the learner's weights, except those that `sync` returns
    as failures; otherwise it raises. At most one bundle of weights is alive, and none between two calls.
    """

    def __init__(
        self,
        learners: Learners,
        runners: RunnerGroup,
        sequences: list[list[int]],
        dtype: str,
        timeout_s: float,
        has_adapters: bool = False,
    ) -> None:
        """Set the parts.

        Args:
            learners: learner 0 sends the weights.
            runners: receive the weights.
            sequences: the canary's token ids.
            dtype: number format of the engines.
            timeout_s: timeout of each call.
            has_adapters: whether the engines receive adapters, which are in no file of the model.
        """
        self._has_adapters = has_adapters
        self._learners, self._runners, self._canary = learners, runners, update_sequences(sequences)
        self._dtype, self._timeout_s = dtype, timeout_s
        self._sent: tuple[int, Sent] | None = None  # the version and its bundle in the object store
        self.healthy: CanaryGap | None = None  # gap of the last self-test: rounding only
        self.seconds: dict[str, float] = {}  # duration of each step of the last sync

    def start(self, version: int, runner_ids: Sequence[int] | None = None) -> None:
        """Send the learner's weights to some runners, by default all, and run the self-test on each.

        Raises:
            WeightSyncError: an engine does not compute with the weights it received.
            RunnerFailure: a runner died or timed out.
            ActorFailure: a learner died or timed out.
        """
        ids = self._runners.ids if runner_ids is None else list(runner_ids)
        self._sent = None
        self._test(ids, version, is_same=version == 0 and not self._has_adapters)  # read from files
        self._sent = None

    def sync(self, version: int) -> tuple[CanaryGap | None, dict[int, Failure]]:
        """Send the weights of `version` to all runners.

        Returns:
            The largest canary gap (None if no runner is alive), and the runners that died or timed out, which must be
            restarted.

        Raises:
            WeightSyncError: verification failed; the message names the version and, for a failed receipt, the tensors.
            ActorFailure: the learner died or timed out.
        """
        delivered, seconds = self._deliver(version, self._runners.ids)
        self._sent, answers = None, delivered.answers
        lost = {i: answer for i, answer in answers.items() if isinstance(answer, Failure)}
        loaded = [answer for answer in answers.values() if not isinstance(answer, Failure)]
        gaps = [CanaryGap.between(answer.logps, delivered.learner_logps) for answer in loaded]
        self._check(gaps, [i for i in answers if i not in lost], version)
        names = loaded[0].seconds if loaded else ()
        self.seconds = {**seconds, **{name: max(answer.seconds[name] for answer in loaded) for name in names}}
        return max(gaps, key=lambda gap: gap.max, default=None), lost

    def _check(self, gaps: Sequence[CanaryGap], ids: Sequence[int], version: int) -> None:
        """Check the canary after an update; in bf16, test the engines again before an update is refused.

        Training may sharpen a policy, and rounding then costs more nats than at version 0. The self-test distinguishes
        this from a stale matrix, and its gap becomes the new limit.

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
            self._sent = None
            logger.warning("the engines passed: they have the learner's weights; rounding gives %s", self.healthy)

    def _test(self, ids: Sequence[int], version: int, is_same: bool) -> None:
        """Run the self-test on runners, all at the same time; they then hold the weights of `version`.

        Args:
            ids: ids of the runners.
            version: version of the learner's weights.
            is_same: whether the engines hold these weights already.
        """
        prints = self._runners.load_noise(ids, self._timeout_s)
        delivered, _ = self._deliver(version, ids)
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

    def _deliver(self, version: int, ids: Sequence[int]) -> tuple[Delivered, dict[str, float]]:
        """Send weights to some runners, and score the canary on both sides; return seconds of the learner's steps too.

        Raises:
            LearnerFailure: a learner died or timed out, or the weights were lost with it after it had sent them.
        """
        if self._sent is None or self._sent[0] != version:
            self._sent = None  # frees the old bundle first
            self._sent = version, self._learners.send(version, self._timeout_s)
        sent = self._sent[1]
        loading = self._runners.start_loading(ids, sent.ref, self._canary, self._timeout_s)
        start = time.perf_counter()
        logps = self._learners.score_canary(self._canary, self._timeout_s)
        seconds = {**sent.seconds, "learner_canary_s": time.perf_counter() - start}
        try:
            return Delivered(self._runners.loaded(loading, self._timeout_s), logps), seconds
        except ObjectLostError as error:
            raise LearnerFailure(f"learner 0 died while the engines loaded weights version {version}") from error
