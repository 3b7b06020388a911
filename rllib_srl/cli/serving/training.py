"""Train versions in the background: start the trainer when enough ratings are new, let it wait while answering.

    enough new ratings ─> job ─> trainer process ─> candidate ─> gates ─> push ─> active
                                  │  waits while an answer is under way or training is paused (trainer_process.py)
                                  └  killed: the next one continues with its newest slice

What is to be done follows from the states of the versions in the store, so a start of the server goes on where the last
one ended. The trainer writes no database and can be stopped at any instant.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from rllib_srl.cli.serving.job import FileError, Job, Progress, RatedTokens, Result
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.serving.serving import Serving
from rllib_srl.cli.serving.trainer_process import UP, TrainerProcess, start_trainer
from rllib_srl.cli.serving.version_files import checksums
from rllib_srl.cli.serving.vllm_server import ServerError
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.people.rating import SCHEMES
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.people.served_store import CANDIDATE, TRAINING, LineageError, StoreThread, Version

logger = logging.getLogger(__name__)

POLL_S = 0.25
AGAIN_S = 5.0  # after a full disk
PUSH_AGAIN_S = 10.0  # after a push that failed; an engine that ends is noticed meanwhile
QUIET_S = 0.05  # without an answer under way, before the trainer goes on
MAX_TRIES = 3  # of a trainer that fails without another slice
LOG = "train.log"
_LAST_WORDS = 300  # characters of a failed trainer's last line


class Training:
    """The training of one served model. Invariant: the trainer process runs only while nothing is being answered."""

    def __init__(self, served: ServedDirectory, db: StoreThread, serving: Serving, job: Job, after: int) -> None:
        """Train `job`s; `after` is the number of new ratings that start a version, 0: no training."""
        self._served, self._db, self._serving, self._job, self._after = served, db, serving, job, after
        # As the store has them.
        self._settings = job.settings.model_dump() | {"keep": [kept.domain for kept in job.keep]}
        self._trainer: TrainerProcess | None = None
        self._is_busy = False
        self._resuming: asyncio.TimerHandle | None = None
        self._tries, self._num_slices = 0, 0  # failures in turn without another slice, and slices at the last one
        self.is_paused, self.error = False, ""

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

    async def run(self) -> None:
        while True:
            try:
                await self._turn()
            except (OSError, RatingsError, LineageError) as error:  # such as a full disk
                logger.error("training waits: %s", error)
                await asyncio.sleep(AGAIN_S)
            except (ValueError, LookupError, TypeError) as error:  # of a damaged file: the server goes on
                self._halt(f"training failed: {type(error).__name__}: {error}")
            finally:
                self.kill()
            await asyncio.sleep(POLL_S)

    def kill(self) -> None:
        """End the trainer process, if one runs; its newest slice stays."""
        if self._trainer is not None:
            self._trainer.kill()
        self._trainer = None

    async def _turn(self) -> None:
        """Push what has passed its gates; then train a version to its end, an interrupted one or one that is due."""
        if self.is_paused or not self._serving.is_ready:
            return
        store = self._db.store
        for candidate in await self._db.run(store.in_state, CANDIDATE):
            if not await self._is_stale(candidate):
                await self._push(candidate)
        if not self._after:
            return
        version = await self._db.run(store.in_training)
        if version is None:
            free = await self._db.run(store.free_ratings)
            if len(free) < self._after:
                return
            version = await self._db.run(store.begin, free, self._settings)
            logger.info("version %d: training on %d ratings", version.number, len(free))
            self._tries = self._num_slices = 0
        if version.settings != self._settings:
            await self._reject(version, "srl serve was started with other settings of training", is_stale=True)
        elif not await self._is_stale(version):
            await self._train(version)

    async def _train(self, version: Version) -> None:
        """Run the trainer of a version to its end; a rollback of the parent ends it before."""
        number, directory = version.number, self._served.version(version.number)
        directory.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread((await self._db.run(self.job_of, version)).write, directory)
        (directory / UP).unlink(missing_ok=True)
        with open(os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            process = await asyncio.to_thread(start_trainer, directory, log)
        self._trainer = TrainerProcess(process, directory, on_card=self._job.served.is_on_card)
        while process.poll() is None and await self._is_training(number):
            self._steer()  # it may have been too early
            await asyncio.sleep(POLL_S)
        self.kill()
        if not await self._is_training(number):
            await asyncio.to_thread(shutil.rmtree, directory, True)
            return
        try:
            result, files = await asyncio.to_thread(_written, directory, process.returncode)
        except FileError as error:
            await self._failed(version, "the trainer", str(error))
            return
        self._tries = 0
        if reasons := [str(verdict) for verdict in result.verdicts if not verdict.is_passed]:
            await self._reject(version, "; ".join(reasons), result.model_dump())
        else:
            await self._db.run(self._db.store.finish, number, files, result.model_dump())

    async def _is_training(self, number: int) -> bool:
        return (await self._db.run(self._db.store.version, number)).state == TRAINING

    def job_of(self, version: Version) -> Job:
        """Return the job of a version; it belongs to the thread of the store."""
        store = self._db.store
        scheme, counts = SCHEMES[store.scheme], store.rewards()
        sums = scheme.neutral + sum(reward * num for reward, num in counts.items())
        answers = []
        for talk, rating in store.rated(version.number):
            assert talk.tokens is not None and rating.reward is not None
            answers.append(RatedTokens(id=talk.id, version=talk.version, reward=rating.reward, **vars(talk.tokens)))
        about = {
            "version": version.number,
            "parent": str(self._served.version(version.parent)) if version.parent else "",
            "answers": answers,
            "level": sums / (1 + sum(counts.values())),
            "good": scheme.good,
            "changed": [name.rpartition("/")[0] for name in store.changed(store.remembered(version.parent))],
        }
        return self._job.model_copy(update=about)

    async def _is_stale(self, version: Version) -> bool:
        """Return whether ratings of a version have changed since it was begun; such a version is rejected."""
        store = self._db.store
        changed = await self._db.run(lambda: store.changed(store.uses(version.number)))
        if changed:
            await self._reject(version, f"{len(changed)} of its ratings have changed since", is_stale=True)
        return bool(changed)

    async def _failed(self, version: Version, what: str, reason: str) -> None:
        """Note a failure of the trainer or a push; after `MAX_TRIES` without another slice training is paused.

        No rating is lost.
        """
        num = (await self._progress(version.number)).done
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

    async def _push(self, candidate: Version) -> None:
        try:
            gap = await self._serving.push(candidate)
        except (FileError, WeightSyncError) as error:
            await self._reject(candidate, str(error))
        except LineageError as error:
            await self._reject(candidate, str(error), is_stale=True)
        except ServerError as error:
            if not self._serving.server.has_ended():  # else it is started again, and the candidate waits for it
                await self._failed(candidate, "pushing", str(error))
            await asyncio.sleep(PUSH_AGAIN_S)
        else:
            self._tries = 0
            logger.info("version %d: active; canary gap %s", candidate.number, gap)

    async def _reject(
        self, version: Version, reason: str, metrics: dict[str, Any] | None = None, is_stale: bool = False
    ) -> None:
        """Reject a version and delete its files; the ratings of a stale one are free again."""
        logger.warning("version %d: %s: %s", version.number, "stale" if is_stale else "rejected", reason)
        await self._db.run(self._db.store.reject, version.number, reason, metrics, is_stale)
        await asyncio.to_thread(shutil.rmtree, self._served.version(version.number), True)

    async def status(self) -> dict[str, Any]:
        store = self._db.store
        status: dict[str, Any] = {"is_paused": self.is_paused, "starts_after": self._after}
        status["num_new_ratings"] = len(await self._db.run(store.free_ratings))
        status |= {"error": self.error} if self.error else {}
        if (version := await self._db.run(store.in_training)) is not None:
            status["version"] = version.number
            status["slices"] = (await self._progress(version.number)).model_dump()
        return status

    async def _progress(self, number: int) -> Progress:
        """Return how many slices of a version are done; none before the trainer says so in its file."""
        try:
            return await asyncio.to_thread(Progress.read, self._served.version(number))
        except FileError:
            return Progress(done=0, of=None)


def _written(directory: Path, status: int) -> tuple[Result, dict[str, str]]:
    """Return the result of a trainer that has ended, and the checksums of its version; FileError: it has failed."""
    if status:
        lines = (directory / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line[:_LAST_WORDS] for line in reversed(lines) if line.strip()), "no message")
        raise FileError(f"status {status}: {last}")
    return Result.read(directory), checksums(directory)
