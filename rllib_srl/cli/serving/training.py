"""Train versions in the background: start the trainer when enough ratings are new, let it wait while answering.

    enough new ratings ─> job ─> trainer process ─> candidate ─> gates ─> push ─> active
                                  │  waits while an answer is under way or training is paused (trainer/process.py)
                                  └  killed: the next one continues with its newest slice

The trainer writes no database, so it can be stopped at any instant.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_srl.cli.serving.adapter import AdapterError, Kinds, checksums, read_object
from rllib_srl.cli.serving.job import PROGRESS, RESULT, Job, KeptDomain, RatedTokens, TrainingSettings
from rllib_srl.cli.serving.served_directory import SETTINGS, ServedDirectory
from rllib_srl.cli.serving.serving import Serving
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.cli.serving.trainer.process import UP, TrainerProcess, start_trainer
from rllib_srl.cli.serving.vllm_server import ServerError
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.people.lineage.conversations import ConversationsError
from rllib_srl.people.lineage.versions import LineageError, Version
from rllib_srl.people.rating import good_reward, neutral_reward
from rllib_srl.people.rating_store import RatingsError

logger = logging.getLogger(__name__)

POLL_S = 0.25
PUSH_AGAIN_S = 10.0  # after a push that failed; an engine that ends is noticed meanwhile
QUIET_S = 0.05  # without an answer under way, before the trainer goes on
SEED = 0  # of held-out prompts, the same ones for all versions, and of the order of the answers
MAX_TRIES = 3  # of a trainer that fails without another slice
LOG = "train.log"
_OF_SETTINGS: Kinds = {"model": str, "context": int, "temperature": (int, float), "dtype": str}
_OF_PROGRESS: Kinds = {"done": int, "of": int}
_OF_RESULT: Kinds = {
    "is_passed": bool, "reasons": list, "metrics": dict, "verdicts": (list, dict), "changes": dict, "trained": dict
}  # fmt: skip
_LAST_WORDS = 300  # characters of a failed trainer's last line


class Training:
    """The training of one served model. Invariant: the trainer process runs only while nothing is being answered."""

    def __init__(
        self,
        served: ServedDirectory,
        stores: Stores,
        serving: Serving,
        settings: TrainingSettings,
        keep: Sequence[KeptDomain],
        after: int,
    ) -> None:
        """Prepare.

        Args:
            served: its directory.
            stores: of the served model.
            serving: pushes what passes.
            settings: of every version.
            keep: domains that must not be lost.
            after: number of new ratings that start a version; 0: no training.
        """
        self._served, self._stores, self._serving = served, stores, serving
        self._settings, self._keep, self._after = settings, list(keep), after
        self._trainer: TrainerProcess | None = None
        self._version: Version | None = None
        self._tries, self._is_busy = 0, False
        self._num_slices = 0  # of the version in training, when the trainer failed last
        self._resuming: asyncio.TimerHandle | None = None
        self._turning = asyncio.Lock()  # a rollback must not drop a version in mid-turn
        self._too_few_at = -1  # newest change of the ratings when there were too few new ones
        self._push_at = 0.0  # no push before, in the loop's time
        self._has_candidates = True  # perhaps: of an earlier start, or one that met an engine that had ended
        self.is_paused, self.error = False, ""

    # --- letting the trainer wait ------------------------------------------------------------------

    def on_busy(self, is_busy: bool) -> None:
        """Let the trainer wait while answers are under way, and go on shortly after the last one."""
        self._is_busy = is_busy
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if is_busy:
            self._steer()
        else:
            self._resuming = asyncio.get_running_loop().call_later(QUIET_S, self._steer)

    def pause(self, is_paused: bool) -> None:
        """Pause or resume training, for as long as the server runs."""
        self.is_paused = is_paused
        self.error = self.error if is_paused else ""
        self._steer()

    def _steer(self) -> None:
        if self._trainer is not None:
            self._trainer.hold(self._is_busy or self.is_paused)

    # --- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until cancelled; versions that were interrupted are continued first."""
        try:
            self._version = await self._stores.run(self._stores.lineage.in_training)
            while True:
                try:
                    async with self._turning:
                        await self._turn()
                except (OSError, RatingsError, ConversationsError, LineageError) as error:  # such as a full disk
                    logger.error("training waits: %s", error)
                    await asyncio.sleep(20 * POLL_S)
                except (ValueError, LookupError, TypeError) as error:  # of a damaged file: the server goes on
                    what = "training" if self._version is None else f"version {self._version.number}: training"
                    self._halt(f"{what} failed: {type(error).__name__}: {error}")
                await asyncio.sleep(POLL_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the trainer process; its newest slice stays."""
        if self._trainer is not None:
            self._trainer.kill()
        self._trainer = None

    async def drop(self, reason: str) -> None:
        """End the version in training, if there is one; its ratings are free again."""
        async with self._turning:
            await self._drop(reason)

    async def _drop(self, reason: str) -> None:
        if self._version is not None:
            self.kill()
            await self._reject(self._version, reason, is_stale=True)

    async def _turn(self) -> None:
        if self._trainer is not None:
            if (status := self._trainer.process.poll()) is not None:
                self._trainer.close()
                self._trainer = None
                await self._ended(status)
            else:
                self._steer()  # it may have been too early
        elif self.is_paused:
            return
        elif self._has_candidates:
            await self._push_candidates()
        elif not self._after:
            return
        elif self._version is not None:
            await self._start(self._version)
        else:
            newest = await self._stores.run(self._stores.ratings.newest_change)
            if newest == self._too_few_at:
                return
            free = await self._stores.run(self._stores.free_ratings)
            if len(free) >= self._after:
                self._version = await self._begin(free)
                self._tries = self._num_slices = 0
            else:
                self._too_few_at = newest

    async def _begin(self, uses: dict[str, str]) -> Version:
        """Begin a version in the lineage."""
        version = await self._stores.run(self._stores.lineage.begin, uses, self._about())
        logger.info("version %d: training on %d ratings", version.number, len(uses))
        return version

    def _about(self) -> dict[str, Any]:
        """Return the settings of a version, as the lineage has them."""
        return {**vars(self._settings), "keep": [one.domain for one in self._keep]}

    async def _job(self, version: Version) -> Job:
        stores = self._stores
        fixed = await asyncio.to_thread(read_object, self._served.path / SETTINGS, _OF_SETTINGS)
        uses = await stores.run(stores.lineage.uses, version.number)
        found = await stores.run(stores.conversations.trainable, [name.rpartition("/")[0] for name in uses])
        ratings = {one.answer.group_id: one for one in await stores.run(stores.ratings.all)}
        answers = []
        for one in found:
            rating, tokens = ratings[one.id], one.tokens
            if tokens is not None and rating.reward is not None:
                parts = list(tokens.prompt_ids), list(tokens.ids), list(tokens.logps)
                answers.append(RatedTokens(one.id, one.version, *parts, rating.reward, rating.rater))
        parent = str(self._served.version(version.parent)) if version.parent else ""
        where = (fixed["model"], parent, fixed["context"], fixed["temperature"])
        scheme = stores.ratings.scheme
        levels = neutral_reward(scheme), good_reward(scheme)
        today = await stores.run(stores.ratings_today)
        remembered = await stores.run(stores.lineage.remembered, version.parent)
        changed = [name.rpartition("/")[0] for name, value in remembered.items() if today.get(name, value) != value]
        how = (SEED, self._settings, self._keep, answers)
        return Job(version.number, *where, *how, *levels, changed, fixed["dtype"])

    async def _start(self, version: Version) -> None:
        if version.settings != self._about():
            await self._drop("srl serve was started with other settings of training")
            return
        if await self._is_stale(version):
            return
        directory = self._served.version(version.number)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            job = await self._job(version)
        except AdapterError as error:
            await self._failed(version, "starting the trainer", str(error))
            return
        await asyncio.to_thread(job.write, directory)
        (directory / UP).unlink(missing_ok=True)
        with open(os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            how: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            process = await asyncio.to_thread(start_trainer, directory, **how)
        self._trainer = TrainerProcess(process, directory, on_card=self._serving.server.dtype == "bfloat16")
        self._steer()

    async def _is_stale(self, version: Version) -> bool:
        """Return whether a rating of a version has changed since it was begun; such a version is dropped."""
        today = await self._stores.run(self._stores.ratings_today)
        changed = await self._stores.run(self._stores.lineage.stale_answers, version.number, today)
        if changed:
            await self._drop(f"{len(changed)} of its ratings have changed since")
        return bool(changed)

    async def _ended(self, status: int) -> None:
        version = self._version
        assert version is not None
        directory = self._served.version(version.number)
        if status != 0:
            last = await asyncio.to_thread(_last_line, directory / LOG)
            await self._failed(version, "the trainer", f"status {status}: {last}")
            return
        try:
            result = await asyncio.to_thread(read_object, directory / RESULT, _OF_RESULT)
            files = await asyncio.to_thread(checksums, directory)
        except AdapterError as error:
            await self._failed(version, "the trainer", str(error))
            return
        self._tries = 0
        about = {name: result[name] for name in ("metrics", "verdicts", "changes", "trained")}
        if not result["is_passed"]:
            await self._reject(version, "; ".join(map(str, result["reasons"])), about)
            return
        candidate = await self._stores.run(self._stores.lineage.finish, version.number, files, about)
        self._version = None
        await self._push(candidate)

    async def _failed(self, version: Version, what: str, reason: str) -> None:
        """Note a failure of the trainer or a push; after `MAX_TRIES` without another slice training is paused.

        No rating is lost.
        """
        try:
            num = (await self._progress(version.number))["done"]
        except AdapterError as error:  # it does not say that there is another slice
            num, reason = self._num_slices, f"{reason}; {error}"
        self._tries = self._tries + 1 if num <= self._num_slices else 1
        self._num_slices = num
        logger.warning("version %d: %s failed: %s", version.number, what, reason)
        if self._tries >= MAX_TRIES:
            self._halt(f"version {version.number}: {what} failed {self._tries} times, {reason}")
            self._tries = 0

    def _halt(self, error: str) -> None:
        """Pause training until somebody resumes it; `/v1/status` has the error."""
        self.error = error
        logger.error("training is paused: %s", error)
        self.pause(True)

    async def _push_candidates(self) -> None:
        """Push the candidates that wait, once the engine is ready."""
        if self._serving.is_ready and asyncio.get_running_loop().time() >= self._push_at:
            self._has_candidates = False
            for left in await self._stores.run(self._stores.lineage.candidates):
                await self._push(left)

    async def _push(self, candidate: Version) -> None:
        lineage, number = self._stores.lineage, candidate.number
        today = await self._stores.run(self._stores.ratings_today)
        changed = await self._stores.run(lineage.stale_answers, number, today)
        if changed:
            await self._reject(candidate, f"{len(changed)} of its ratings have changed since", is_stale=True)
            return
        try:
            gap = await self._serving.push(candidate)
        except (AdapterError, WeightSyncError) as error:
            await self._reject(candidate, str(error))
        except LineageError as error:
            await self._reject(candidate, str(error), is_stale=True)
        except ServerError as error:
            self._has_candidates = True
            self._push_at = asyncio.get_running_loop().time() + PUSH_AGAIN_S
            if not self._serving.server.has_ended():  # else it is started again, and the candidate waits for it
                await self._failed(candidate, "pushing", str(error))
        else:
            self._tries = 0
            logger.info("version %d: active; canary gap %s", number, gap)

    async def _reject(
        self, version: Version, reason: str, metrics: dict[str, Any] | None = None, is_stale: bool = False
    ) -> None:
        """Reject a version and delete its files; the ratings of a stale one are free again."""
        logger.warning("version %d: %s: %s", version.number, "stale" if is_stale else "rejected", reason)
        await self._stores.run(self._stores.lineage.reject, version.number, reason, metrics, is_stale)
        self._version = None if self._version and self._version.number == version.number else self._version
        self._too_few_at = -1 if is_stale else self._too_few_at
        await asyncio.to_thread(shutil.rmtree, self._served.version(version.number), True)

    async def status(self) -> dict[str, Any]:
        """Return what training does at present."""
        found: dict[str, Any] = {"is_paused": self.is_paused, "starts_after": self._after}
        found["num_new_ratings"] = len(await self._stores.run(self._stores.free_ratings))
        found |= {"error": self.error} if self.error else {}
        if self._version is not None:
            found["version"] = self._version.number
            try:
                found["slices"] = await self._progress(self._version.number)
            except AdapterError as error:
                found |= {"slices": {"done": 0, "of": None}, "error": self.error or str(error)}
        return found

    async def _progress(self, number: int) -> dict[str, Any]:
        """Return how many slices of a version are done, and of how many.

        Raises:
            AdapterError: the file of the trainer is damaged; the next slice writes it anew.
        """
        path = self._served.version(number) / PROGRESS
        if not path.exists():
            return {"done": 0, "of": None}
        progress = await asyncio.to_thread(read_object, path, _OF_PROGRESS)
        return {"done": progress["done"], "of": progress["of"]}


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line[:_LAST_WORDS] for line in reversed(lines) if line.strip()), "no message")
