"""Rate answers by majority vote when nobody does: further answers are sampled in idle time, and the majority is right.

    a conversation without a rating for a while ─> N more answers, one at a time, while nothing else is answered
       ─> logged as ID-s0 ... ID-s(N-1) ─> more than half agree ─> good, the others bad, by the rater "majority"

Where all answers agree, or no half of them does, nothing is rated: nothing can be learned from them. A person's rating
counts whenever it comes. What was sampled is in the log of conversations, so a killed server continues.

Source: Zuo et al. 2025, arXiv 2504.16084 (TTRL), as in the environment `self_label`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from rllib_srl.cli.serving.serving import NotReady, Serving
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.cli.serving.training import Training
from rllib_srl.cli.serving.translation import Collected, Sampling, ServedRequest, forwarded
from rllib_srl.cli.serving.vllm_server import ServerError
from rllib_srl.envs.agents.requests import read_request
from rllib_srl.envs.agents.web import Refusal
from rllib_srl.envs.wrappers.self_label import agreement, plain_vote
from rllib_srl.people.lineage.conversations import Conversation, ConversationsError
from rllib_srl.people.rating_store import RatingsError

logger = logging.getLogger(__name__)

RATER = "majority"
POLL_S = 1.0
LOOK_S = 0.02  # between two looks whether somebody asks meanwhile
_SAMPLE = "-s"  # between the id of a conversation and the number of a sample


class SelfLabels:
    """The votes of one served model. Invariant: an answer with a rating, also one taken back, is never rated here."""

    def __init__(
        self, stores: Stores, serving: Serving, training: Training, usual: Sampling, num: int, after_s: float
    ) -> None:
        """Prepare.

        Args:
            stores: of the served model.
            serving: answers.
            training: while it is paused, nothing is sampled.
            usual: how answers are sampled.
            num: answers to sample beside the first one.
            after_s: without a rating.
        """
        self._stores, self._serving, self._training, self._usual = stores, serving, training, usual
        self._num, self._after_s = num, after_s
        self._done: set[str] = set()

    async def run(self) -> None:
        """Sample and vote until cancelled."""
        while True:
            try:
                if not (self._is_idle() and await self.turn()):
                    await asyncio.sleep(POLL_S)
            except (OSError, RatingsError, ConversationsError, ServerError, NotReady, Refusal) as error:
                logger.warning("the vote waits: %s", error)
                await asyncio.sleep(10 * POLL_S)

    def _is_idle(self) -> bool:
        return self._serving.is_ready and not self._serving.num_under_way and not self._training.is_paused

    async def turn(self) -> bool:
        """Sample one answer, or vote; return whether there was anything to do."""
        before = (datetime.now(UTC) - timedelta(seconds=self._after_s)).isoformat(timespec="seconds")
        due = await self._stores.run(self._due, before)
        if due is None:
            return False
        samples = await self._stores.run(self._samples, due.id)
        if len(samples) < self._num:
            return await self._sample(due, f"{due.id}{_SAMPLE}{len(samples)}")
        await self._stores.run(self._vote, [due, *samples])
        self._done.add(due.id)
        return True

    async def _sample(self, first: Conversation, name: str) -> bool:
        """Sample an answer to the same messages and log it; return False if somebody asked meanwhile."""
        sampling = asyncio.create_task(self._answer(first, name))
        try:
            while not sampling.done():
                if self._serving.num_under_way > 1:  # this one and another
                    return False
                await asyncio.wait({sampling}, timeout=LOOK_S)
            await self._stores.run(self._stores.conversations.log, sampling.result())
            return True
        finally:
            sampling.cancel()

    async def _answer(self, first: Conversation, name: str) -> Conversation:
        """Sample an answer.

        Raises:
            Refusal: the engine refuses the request.
            ServerError: the engine fails.
        """
        asked = read_request(json.dumps({"model": RATER, "messages": list(first.messages)}).encode(), ServedRequest)
        with self._serving.answering() as (number, served_name):
            answer = Collected(name, number, asked)
            body, why_not = forwarded(asked, self._usual, served_name)
            try:
                answer.take(await self._serving.server.chat(body))
            except Refusal:  # it will not be taken later, either
                self._done.add(first.id)
                raise
        tokens, why = answer.tokens(why_not)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return Conversation(name, number, at, first.messages, answer.text, answer.finish_reason or "cut", tokens, why)

    # --- in the thread of the stores ---------------------------------------------------------------

    def _due(self, before: str) -> Conversation | None:
        """Return the oldest conversation until a time that nobody has rated and no vote was held on."""
        rated = self._stores.ratings.group_ids()
        for name in self._stores.conversations.trainable_ids(before):
            if _SAMPLE not in name and name not in rated and name not in self._done:
                return self._stores.conversations.find(name)
        return None

    def _samples(self, name: str) -> list[Conversation]:
        found = (self._stores.conversations.find(f"{name}{_SAMPLE}{number}") for number in range(self._num))
        return [one for one in found if one is not None]

    def _vote(self, answers: Sequence[Conversation]) -> None:
        votes = [plain_vote([one.answer], ()) for one in answers]
        rewards = agreement(votes, str.__eq__, len(votes) // 2 + 1, "none")
        if not 0 < sum(rewards) < len(rewards):
            return
        for one, reward in zip(answers, rewards, strict=True):
            answer = one.as_answer()
            if self._stores.ratings.of_answer(answer.answer_id) is None:
                self._stores.ratings.rate(answer, "good" if reward else "bad", RATER)
        logger.info("%s: %d of %d answers agree; they are rated good", answers[0].id, sum(rewards), len(rewards))
