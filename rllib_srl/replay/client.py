"""The driver's proxy of the buffer: computes replay shares, names the calls, handles timeouts and restarts.

    memory.draw_prompts(P, now)   revisits for P slots      memory.add(groups, now)     visits by group id
    memory.draw_groups(P, now)    groups to reuse           memory.snapshot / restore   a copy of the journal

Tokens never pass through the driver. Ray restarts a buffer that dies; it reads its journal, and the call is repeated
under the same request name. The buffer returns the committed answer if there is one, else it does the work.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, gather
from rllib_srl.replay.actor import ReplayBufferActor
from rllib_srl.replay.history import Policy
from rllib_srl.replay.journal.file import holder_of
from rllib_srl.replay.journal.transaction import JOURNAL, SNAPSHOT
from rllib_srl.replay.rated import RatedGroup, RatedUntil
from rllib_srl.replay.schedule.grading import GRADES, Evidence
from rllib_srl.replay.schedule.slots import Share, reuse_share
from rllib_srl.replay.settings import AUTO, ReplaySettings, users_rules
from rllib_srl.replay.visits import Visit
from rllib_srl.types import GroupMeta, Prompt, listed

RETRY_S = 0.2
RELEASE_S = 10.0  # for a killed process to give up its journal
COUNTS = ("num_revisits_owed", "num_revisits_short", "num_reuses_owed", "num_reuses_short", "num_groups_lost")
TIDY_EVERY = 8  # iterations; run before the rollout, when no call waits for the journal

Result = TypeVar("Result")


class ReplayClient:
    """Client of one run's memory.

    Invariant: every remote call times out after 2 `timeout_s` (snapshot and restore: 31 `timeout_s`), and its effect is
    applied at most once.
    """

    is_on = True

    def __init__(self, settings: ReplaySettings, actor: Any, is_local: bool, journal: Path) -> None:
        """Wrap a buffer that has been created.

        Args:
            settings: replay settings.
            actor: handle of the actor, or a `ReplayBufferActor` of this process.
            is_local: True for a `ReplayBufferActor` of this process.
            journal: path of its journal.
        """
        self._journal = journal
        self.is_auto = settings.revisit_fraction == AUTO
        self.settings = replace(settings, revisit_fraction=settings.first_revisit_fraction)  # from now on a number
        self._actor, self._is_local = actor, is_local
        self._revisits = Share(settings.first_revisit_fraction)
        self._reuses = reuse_share(settings.reuse_fraction)
        self._rules: Any = None
        self.num_items = 0
        self.num_restarts = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._incarnation = _incarnation()
        self._asked: Counter[str] = Counter()  # requests of each name

    @classmethod
    def start(
        cls,
        settings: ReplaySettings,
        *,
        directory: Path,
        seed: int,
        run: str,
        is_local: bool,
        timeout_s: float,
        **arguments: Any,
    ) -> ReplayClient:
        """Start the actor on this node, and wait until it has opened its journal.

        Args:
            settings: replay settings.
            directory: of the journal.
            seed: of all draws.
            run: name of the run.
            is_local: use a buffer in this process, without an actor.
            timeout_s: timeout of the start, in seconds.
            arguments: further arguments of `SRLReplayBuffer`.

        Raises:
            ActorFailure: the actor did not start in time.
            ValueError: a user-defined rule cannot be sent to another process.
            Exception: raised by the buffer's constructor.
        """
        arguments |= {"directory": directory, "seed": seed, "run": run}
        arguments["rules"] = users_rules(settings) if is_local else _sent(users_rules(settings))
        actor = (
            ReplayBufferActor(settings, **arguments)
            if is_local
            else _remote_class(f"rllib_srl.memory.{run}", settings.searches_on_gpu).remote(settings, **arguments)
        )
        memory = cls(settings, actor, is_local, directory / JOURNAL)
        memory._rules = arguments["rules"]  # keep the reference alive: a restarted actor fetches the rules again
        memory._call(Call.of(ReplayBufferActor.check_started), "starting", timeout_s)
        return memory

    @property
    def revisit_fraction(self) -> float:
        """Return the revisit fraction in use, which "auto" and a planner change."""
        return self.settings.first_revisit_fraction

    # --- an iteration ----------------------------------------------------------------------------

    def draw_prompts(self, num_prompts: int, now: int, in_play: Collection[str] = ()) -> list[Prompt]:
        """Draw the revisits of an iteration of `num_prompts` prompts, at most `revisit_fraction` of them.

        Slots without an available item are counted in `num_revisits_short` and not carried over.

        Args:
            num_prompts: of the iteration.
            now: the training iteration.
            in_play: keys of prompts that are being played and must not be drawn.
        """
        if self.num_items < self.settings.min_buffer_size:
            return []
        num = self._revisits.owed(num_prompts)
        prompts: list[Prompt] = []
        if num:
            call = Call.of(ReplayBufferActor.draw_prompts, num, now, self._request(now, "draw_prompts"), list(in_play))
            prompts = self._call(call, "drawing")
        self.counts["num_revisits_owed"] += num
        self.counts["num_revisits_short"] += num - len(prompts)
        if now % TIDY_EVERY == 0:
            self._tidy()
        return prompts

    def _tidy(self) -> None:
        tidy = Call.of(ReplayBufferActor.tidy)
        tidy.run(self._actor) if self._is_local else tidy.submit(self._actor)

    def add(self, groups: Sequence[GroupMeta], now: int, policy_kl: float = 0.0) -> dict[str, Visit]:
        """Store and grade played groups; return the visits by group id. `policy_kl` as in `SRLReplayBuffer.add`."""
        if not groups:
            return {}
        request, timeout_s = self._request(now, "add"), self.settings.timeout_s
        refs = [group.ref for group in groups]
        visits, lost = self._call(
            Call.of(ReplayBufferActor.add, refs, now, request, timeout_s, policy_kl), "storing groups"
        )
        self.counts["num_groups_lost"] += len(lost)
        return {visit.group_id: visit for visit in visits}

    def draw_groups(self, num_played: int, now: int, policy: Policy | None = None) -> list[GroupMeta]:
        """Draw stored groups to train on beside `num_played` played prompts, at most `reuse_fraction`.

        `policy` as in `SRLReplayBuffer.draw_groups`.
        """
        if self.num_items < self.settings.min_buffer_size:
            return []
        num = self._reuses.owed(num_played)
        groups: list[GroupMeta] = []
        if num:
            drawing = (num, now, self._request(now, "draw_groups"), policy)
            call = (
                Call.of(ReplayBufferActor.sample, *drawing)
                if self._is_local
                else Call.of_first(ReplayBufferActor.draw_groups, *drawing)
            )
            groups = self._call(call, "drawing")
        self.counts["num_reuses_owed"] += num
        self.counts["num_reuses_short"] += num - len(groups)
        return groups

    def set_fractions(self, revisit: float | None, reuse: float | None) -> None:
        """Change the replay fractions from now on; None leaves one unchanged. Carried remainders are kept."""
        settings = self.settings
        if revisit is not None and revisit != self.revisit_fraction:
            self._revisits = self._revisits.carried_into(Share(revisit))
        if reuse is not None and reuse != settings.reuse_fraction:
            self._reuses = self._reuses.carried_into(reuse_share(reuse))
        self.settings = replace(
            settings,
            revisit_fraction=settings.revisit_fraction if revisit is None else revisit,
            reuse_fraction=settings.reuse_fraction if reuse is None else reuse,
        )

    def embed(self, vectors: Sequence[Any], groups: Sequence[GroupMeta], now: int) -> None:
        """Send references to the learners' hidden states to the buffer.

        Args:
            vectors: one mapping a learner, group id -> float32 [G, D], or a reference to one.
            groups: the played groups.
            now: the training iteration.
        """
        keys = {group.group_id: group.prompt.key for group in groups}
        if keys:
            call = Call.of(ReplayBufferActor.embed, list(vectors), keys, now, self._request(now, "embed"))
            self._call(call, "taking embeddings")

    def look_back(self, reused: Sequence[GroupMeta], told: Mapping[str, Mapping[str, float]], now: int) -> None:
        """Apply the learners' feedback on reused groups: drop drifted groups; with `grade_reuse`, grade items.

        A group has drifted if all its episodes were left out of the update.

        Args:
            reused: the stored groups that were trained on.
            told: `reuse_report` of the learners, by group id.
            now: the training iteration.
        """
        trained = {g.group_id: len(g.rewards_G) if g.has_reward_G is None else g.has_reward_G.sum() for g in reused}
        gone = [name for name, num in trained.items() if told.get(name, {}).get("num_over_gap", 0) == num]
        if gone:
            call = Call.of(ReplayBufferActor.drop, gone, self._request(now, "drop"))
            self._call(call, "dropping groups")
        if self.settings.grade_reuse:
            changes = {g.prompt.key: told[g.group_id]["success_change"] for g in reused if g.group_id in told}
            if changes:
                rehearse = Call.of(ReplayBufferActor.rehearse, changes, now, self._request(now, "rehearse"))
                self._call(rehearse, "grading reused groups")

    def rate(self, ratings: Mapping[str, float], now: int) -> int:
        """Grade items by human ratings; return the number graded.

        Args:
            ratings: prompt key -> rating, on the scale of `replay_rating_scale`.
            now: the training iteration.

        Raises:
            ValueError: a rating outside its scale; nothing was graded.
        """
        GRADES["rating"](Evidence(rating_N=np.array(list(ratings.values()), float)), scale=self.settings.rating_scale)
        if not ratings:
            return 0
        values = {key: float(rating) for key, rating in ratings.items()}
        return self._call(Call.of(ReplayBufferActor.rate, values, now, self._request(now, "rate")), "taking ratings")

    def rate_answers(self, groups: Sequence[RatedGroup], source: str, position: int, now: int) -> dict[str, int]:
        """Apply ratings of stored answers; see `SRLReplayBuffer.rate_answers`."""
        request = self._request(now, f"ratings.{position}")
        call = Call.of(ReplayBufferActor.rate_answers, list(groups), source, position, now, request)
        return self._call(call, "applying ratings")

    def rated_until(self, source: str) -> RatedUntil:
        """Return how far the ratings of a file were applied; to 0 if those of another file were."""
        found = self._call(Call.of(ReplayBufferActor.rated_until), "reading its ratings")
        return RatedUntil(source, found.position if found.source == source else 0, found.unused)

    def stats(self, now: int) -> dict[str, float]:
        """Return the buffer's gauges and counts, and those of this client."""
        found = self._call(Call.of(ReplayBufferActor.stats, now), "counting")
        self.num_items = int(found["num_items"])
        gauges = {name: float(value) for name, value in found.items()}
        return {**gauges, "num_restarts": self.num_restarts, **self.counts}

    # --- checkpoints -----------------------------------------------------------------------------

    def snapshot(self, directory: Path) -> None:
        """Write a copy of the journal into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._call_long(Call.of(ReplayBufferActor.snapshot, directory / SNAPSHOT), "writing a snapshot")

    def restore(self, directory: Path) -> int:
        """Restore the snapshot in `directory`; return the number of groups stored after it, which are dropped."""
        num_dropped = self._call_long(Call.of(ReplayBufferActor.restore, directory / SNAPSHOT), "restoring a snapshot")
        self.num_items = self.size()
        self._incarnation = _incarnation()
        self._asked.clear()
        return num_dropped

    def size(self) -> int:
        """Return the number of items."""
        return self._call(Call.of(ReplayBufferActor.size), "counting")

    def check_valid(self) -> None:
        """Check every invariant of the buffer; for tests, since it reads all of it."""
        self._call(Call.of(ReplayBufferActor.check_valid), "checking")

    def check_fits(self, has_memory: bool) -> None:
        """Check that a checkpoint with or without a memory can be restored here.

        Raises:
            ValueError: it was written without a memory.
        """
        if not has_memory:
            raise ValueError("the checkpoint has no memory, this run has one; expected replay_capacity = 0")

    def get_state(self) -> dict[str, Any]:
        """Return carried remainders and counts; everything else is in the snapshots."""
        return {
            "revisits": self._revisits.get_state(),
            "reuses": self._reuses.get_state(),
            "counts": dict(self.counts),
            "num_items": self.num_items,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._revisits.set_state(state["revisits"])
        self._reuses.set_state(state["reuses"])
        self.counts, self.num_items = Counter({**dict.fromkeys(COUNTS, 0), **state["counts"]}), state["num_items"]

    def stop(self) -> None:
        """End the buffer; return when its journal can be opened again, after at most `RELEASE_S` seconds."""
        if self._is_local:
            self._actor.close()
        else:
            ray.kill(self._actor)  # Ray answers before the process has ended
        deadline = time.monotonic() + RELEASE_S
        while holder_of(self._journal) is not None and time.monotonic() < deadline:
            time.sleep(0.02)

    # --- calls -----------------------------------------------------------------------------------

    def _request(self, now: int, method: str) -> str:
        """Return a new request name, such as "3f2a91c0/12.add".

        The incarnation keeps a run that was started again, or has gone back, from getting answers of its past; the
        suffix does so for an iteration that is retried after an error.
        """
        self._asked[f"{now}.{method}"] += 1
        num = self._asked[f"{now}.{method}"]
        return f"{self._incarnation}/{now}.{method}" + (f".{num}" if num > 1 else "")

    def _call(
        self, call: Call[Result], what: str, timeout_s: float | None = None, restart_s: float | None = None
    ) -> Result:
        """Run one call; repeat it once the buffer that died or timed out is back.

        Groups that a call returns as a second object stay in the object store; the metadata refers to them.

        Args:
            call: the call.
            what: the buffer is doing, for the error.
            timeout_s: limit of the first attempt; default: `replay_timeout_s`.
            restart_s: limit of a restart and what follows it, in addition; default: the same.

        Raises:
            ActorFailure: no answer came in time; the message says `what` the buffer was doing.
        """
        if self._is_local:
            return call.run(self._actor)
        limit_s = timeout_s or self.settings.timeout_s
        deadline = time.monotonic() + limit_s + (restart_s or limit_s)
        failure: Failure | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            refs = call.submit_all(self._actor)
            wait_s = left_s if failure else min(limit_s, left_s)  # a slow restart is not killed again
            ((_, answer),) = gather({0: refs[0]}, wait_s)
            if not isinstance(answer, Failure):
                result: Result = answer if len(refs) == 1 else _with_groups(answer, refs[1])
                return result
            if failure is None:
                self.num_restarts += 1
                failure = answer
            if answer.is_silent:
                self._end()
            time.sleep(RETRY_S)
        raise ActorFailure(f"the memory {failure.reason if failure else 'had no time'} while {what}")

    def _call_long(self, call: Call[Result], what: str) -> Result:
        """Run a call that may take 10 times as long; a buffer that was silent before is still found in usual time."""
        long_s = 10 * self.settings.timeout_s
        self._call(Call.of(ReplayBufferActor.check_started), what, restart_s=long_s)
        return self._call(call, what, long_s)

    def _end(self) -> None:
        """Kill an unresponsive buffer, so that Ray restarts it.

        SIGKILL goes to the process that holds the journal: a stopped (SIGSTOP) process ignores `ray.kill`.
        """
        holder = holder_of(self._journal)
        if holder is None:
            ray.kill(self._actor, no_restart=False)
            return
        with suppress(ProcessLookupError):
            os.kill(holder, signal.SIGKILL)


def _with_groups(metas: Any, groups: ray.ObjectRef[Any]) -> Any:
    return listed(metas, groups)


def _incarnation() -> str:
    return uuid.uuid4().hex[:8]


def _sent(rules: Mapping[str, Any]) -> list[ray.ObjectRef[Any]] | None:
    """Return a reference to the rules, in a list so that only an actor's constructor fetches it; None without rules.

    Ray passes it again to every restarted actor. Functions and classes of user modules are pickled by value, because
    another process may be unable to import them.

    Raises:
        ValueError: a rule cannot be pickled; the message names it and the reason.
    """
    for name, rule in rules.items():
        with _by_value(rule):
            try:
                ray.cloudpickle.dumps(rule)
            except Exception as error:  # of any type: pickling runs user-defined `__reduce__` methods
                fault = f"expected a rule that can be pickled, or an import path: {type(error).__name__}: {error}"
                raise ValueError(f"replay_{name} = {rule!r}; {fault}") from error
    with ExitStack() as stack:
        for rule in rules.values():
            stack.enter_context(_by_value(rule))
        return [ray.put(dict(rules))] if rules else None


@contextmanager
def _by_value(rule: Any) -> Iterator[None]:
    """Context in which functions and classes of a rule's modules are pickled by value, not by name."""
    parts = [rule, getattr(rule, "func", None), *(() if isinstance(rule, type) else vars(rule).values())]
    found = [sys.modules.get(str(getattr(part, "__module__", None))) for part in parts if callable(part)]
    known = ray.cloudpickle.list_registry_pickle_by_value()
    users = [one for one in dict.fromkeys(found) if one and one.__name__ not in known and _is_users(one)]
    for module in users:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in users:
            ray.cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    """Return whether a module is the user's: neither installed nor ours. `__main__` is pickled by value anyway."""
    name, file = module.__name__, getattr(module, "__file__", None) or ""
    is_installed = any(file.startswith(path) for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")))
    return not is_installed and name != "__main__" and name.partition(".")[0] not in ("builtins", "rllib_srl", "ray")


def _remote_class(name: str, sees_gpus: bool) -> Any:
    """Return the actor class, pinned to this node (its journal is a local file) and restarted without limit.

    Args:
        name: of the actor.
        sees_gpus: whether it sees the node's GPUs. It reserves none of them in Ray, which would hide them.
    """
    shown = {"runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}} if sees_gpus else {}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(ReplayBufferActor).options(
        name=name, num_cpus=0, max_restarts=-1, max_task_retries=0, scheduling_strategy=here, **shown
    )
