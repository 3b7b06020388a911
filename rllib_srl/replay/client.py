"""The driver's proxy of the buffers: computes replay shares, routes calls to shards, handles timeouts and restarts.

    memory.due(P, now)      revisits for P slots        memory.add(groups, now)     visits by group id
    memory.sample(P, now)   groups to reuse             memory.snapshot / restore   one file a shard

Tokens never pass through the driver. Ray restarts a shard that dies; the shard reads its journal, and the call is
repeated under the same request name. The shard returns the committed answer if there is one, else it does the work.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, gather
from rllib_srl.replay.actor import ReplayBufferActor
from rllib_srl.replay.buffer_metrics import merged
from rllib_srl.replay.journal.file import holder_of
from rllib_srl.replay.journal.transaction import JOURNAL
from rllib_srl.replay.rated import RatedGroup, RatedUntil
from rllib_srl.replay.schedule.grading import GRADES, Evidence
from rllib_srl.replay.schedule.load import Share, reuse_share
from rllib_srl.replay.selection.shares import DomainShares
from rllib_srl.replay.selection.today import Today
from rllib_srl.replay.settings import AUTO, ReplaySettings, users_rules
from rllib_srl.replay.visits import Visit
from rllib_srl.types import GroupMeta, Prompt, listed

RETRY_S = 0.2
RELEASE_S = 10.0  # for a killed process to give up its journal
COUNTS = ("num_revisits_owed", "num_revisits_short", "num_reuses_owed", "num_reuses_short", "num_groups_lost")
TIDY_EVERY = 8  # iterations; run before the rollout, when no call waits for the journal

Result = TypeVar("Result")
Drawn = TypeVar("Drawn", Prompt, GroupMeta)


class ReplayClient:
    """Client of the shards of one run's memory.

    Invariant: every remote call times out after 2 `timeout_s` (snapshot and restore: 31 `timeout_s`), and its effect is
    applied at most once.
    """

    def __init__(
        self, settings: ReplaySettings, shards: Sequence[Any], is_local: bool, journals: Sequence[Path] = ()
    ) -> None:
        """Wrap shards that have been created.

        Args:
            settings: replay settings.
            shards: actor handles, or one `ReplayBufferActor` of this process.
            is_local: True for a `ReplayBufferActor` of this process.
            journals: paths of the shards' journals.
        """
        self._journals = journals
        self.is_auto = settings.revisit_fraction == AUTO
        self.settings = replace(settings, revisit_fraction=settings.first_revisit_fraction)  # from now on a number
        self._shards, self._is_local = list(shards), is_local
        self._has_pool = False
        self._revisits = Share(settings.first_revisit_fraction)
        self._reuses = reuse_share(settings.reuse_fraction)
        self._rules: Any = None
        self.num_items = 0
        self.num_restarts = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
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
        """Start one actor a shard, on this node, and wait until each has opened its journal.

        Args:
            settings: replay settings.
            directory: parent of the journals' directories.
            seed: of the first shard; shard i gets seed + i.
            run: name of the run.
            is_local: use one buffer in this process, without actors.
            timeout_s: timeout of the start, in seconds.
            arguments: further arguments of `SRLReplayBuffer`.

        Raises:
            ActorFailure: a shard did not start in time.
            ValueError: a user-defined rule cannot be sent to another process.
            Exception: raised by a shard's constructor.
        """
        if settings.gpu_share and (is_local or get_current_placement_group() is not None):
            where = "the main process (num_env_runners = 0)" if is_local else "a trial of Tune"
            raise ValueError(
                f"replay diversity.device = 'gpu' in {where}, which reserves no share of a card for it; expected 'cpu'"
            )
        arguments["rules"] = users_rules(settings) if is_local else _sent(users_rules(settings))
        shards = []
        for index in range(settings.num_shards):
            given = {"directory": directory / f"shard_{index}", "seed": seed + index, "run": run, **arguments}
            shards.append(
                ReplayBufferActor(settings, **given)
                if is_local
                else _remote_class(f"rllib_srl.memory.{run}.{index}", settings.gpu_share).remote(settings, **given)
            )
        memory = cls(settings, shards, is_local, [directory / f"shard_{i}" / JOURNAL for i in range(len(shards))])
        memory._rules = arguments["rules"]  # keep the reference alive: a restarted actor fetches the rules again
        memory._call(memory._on_all(Call.of(ReplayBufferActor.check_started)), "starting", timeout_s)
        return memory

    @property
    def revisit_fraction(self) -> float:
        """Return the revisit fraction in use, which "auto" and a planner change; nan for a finite pool."""
        return float("nan") if self._has_pool else self.settings.first_revisit_fraction

    # --- an iteration ----------------------------------------------------------------------------

    def due(
        self, num_prompts: int, now: int, shares: DomainShares | None = None, in_play: Collection[str] = ()
    ) -> list[Prompt]:
        """Draw the revisits of an iteration of `num_prompts` prompts, at most `revisit_fraction` of them.

        Slots without an available item are counted in `num_revisits_short` and not carried over.

        Args:
            num_prompts: of the iteration.
            now: the training iteration.
            shares: domain shares of a planner; None: `domain_quotas` applies.
            in_play: keys of prompts that are being played and must not be drawn.
        """
        if self.num_items < self.settings.min_buffer_size:
            return []
        num = self._revisits.owed(num_prompts)
        room = self.revisit_fraction * num_prompts / len(self._shards)

        def due(part: int, request: str, without: Collection[str]) -> Call[list[Prompt]]:
            taken = [*in_play, *without]
            return Call.of(ReplayBufferActor.due, part, now, request, room, taken, shares)

        prompts = self._drawn(due, "due", num, now)
        self.counts["num_revisits_owed"] += num
        self.counts["num_revisits_short"] += num - len(prompts)
        if now % TIDY_EVERY == 0:
            self._tidy()
        return prompts

    def enrol(self, prompts: Sequence[Prompt], now: int) -> int:
        """Make every prompt of a finite pool an item, and draw by `from_pool` from now on; return how many are new.

        Raises:
            ValueError: the memory has no room, or several shards: each would walk through a part of the pool alone.
        """
        if len(self._shards) > 1:
            raise ValueError(f"replay_num_shards = {len(self._shards)} with a finite pool of prompts; expected 1")
        self._has_pool = True
        call = Call.of(ReplayBufferActor.enrol, list(prompts), now, self._request(now, "enrol"))
        return self._call({0: call}, "adding the pool")[0]

    def from_pool(self, num: int, now: int, shares: DomainShares | None = None) -> tuple[list[Prompt], int]:
        """Draw `num` prompts of the pool, visited ones first, and their number; see `SRLReplayBuffer.from_pool`.

        Slots without an available prompt are counted in `num_revisits_short`.
        """
        call = Call.of(ReplayBufferActor.from_pool, num, now, self._request(now, "due"), shares)
        prompts, num_revisits = self._call({0: call}, "drawing")[0]
        self.counts["num_revisits_short"] += num - len(prompts)
        if now % TIDY_EVERY == 0:
            self._tidy()
        return prompts, num_revisits

    def _tidy(self) -> None:
        tidy = Call.of(ReplayBufferActor.tidy)
        for shard in self._shards:
            tidy.run(shard) if self._is_local else tidy.submit(shard)

    def add(self, groups: Sequence[GroupMeta], now: int, policy_kl: float = 0.0) -> dict[str, Visit]:
        """Store and grade played groups; return the visits by group id. `policy_kl` as in `SRLReplayBuffer.add`."""
        parts: dict[int, list[GroupMeta]] = {}
        for group in groups:
            parts.setdefault(self._shard_of(group.prompt.key), []).append(group)
        request, timeout_s = self._request(now, "add"), self.settings.timeout_s
        calls = {
            i: Call.of(ReplayBufferActor.add, [group.ref for group in part], now, request, timeout_s, policy_kl)
            for i, part in parts.items()
        }
        answers = self._call(calls, "storing groups")
        self.counts["num_groups_lost"] += sum(len(lost) for _, lost in answers.values())
        return {visit.group_id: visit for visits, _ in answers.values() for visit in visits}

    def sample(
        self, num_played: int, now: int, shares: DomainShares | None = None, today: Today | None = None
    ) -> list[GroupMeta]:
        """Draw stored groups to train on beside `num_played` played prompts, at most `reuse_fraction`; see `due`.

        `today` as in `SRLReplayBuffer.draw`; each shard judges by its own histories and domains.
        """
        if self.num_items < self.settings.min_buffer_size:
            return []
        num = self._reuses.owed(num_played)

        def sample(part: int, request: str, without: Collection[str]) -> Call[list[GroupMeta]]:
            if self._is_local:
                return Call.of(ReplayBufferActor.sample, part, now, request, without, shares, today)
            return Call.of_first(ReplayBufferActor.sample_apart, part, now, request, without, shares, today)

        groups = self._drawn(sample, "sample", num, now)
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

    def successes(self, groups: Sequence[GroupMeta], now: int) -> dict[str, GroupMeta]:
        """Return prompt key -> an older stored group with a success, for those played groups that have one."""
        parts: dict[int, list[str]] = {}
        for key in dict.fromkeys(group.prompt.key for group in groups):
            parts.setdefault(self._shard_of(key), []).append(key)

        def look_up(keys: list[str]) -> Call[list[GroupMeta]]:
            if self._is_local:
                return Call.of(ReplayBufferActor.successes, keys, now)
            return Call.of_first(ReplayBufferActor.successes_apart, keys, now)

        answers = self._call({i: look_up(keys) for i, keys in parts.items()}, "looking up successes")
        return {meta.prompt.key: meta for answer in answers.values() for meta in answer}

    def embed(self, vectors: Sequence[Any], groups: Sequence[GroupMeta], now: int) -> None:
        """Send references to the learners' hidden states to the shards that store the groups.

        Args:
            vectors: one mapping a learner, group id -> float32 [G, D], or a reference to one.
            groups: the played groups.
            now: the training iteration.
        """
        keys: dict[int, dict[str, str]] = {}
        for group in groups:
            keys.setdefault(self._shard_of(group.prompt.key), {})[group.group_id] = group.prompt.key
        request = self._request(now, "embed")
        calls = {
            i: Call.of(ReplayBufferActor.embed, list(vectors), part, now, request) for i, part in keys.items()
        }
        self._call(calls, "taking embeddings")

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
            self._call(self._on_all(call), "dropping groups")
        if self.settings.grade_reuse:
            parts: dict[int, dict[str, float]] = {}
            for group in reused:
                if group.group_id in told:
                    key = group.prompt.key
                    parts.setdefault(self._shard_of(key), {})[key] = told[group.group_id]["success_change"]
            request = self._request(now, "rehearse")
            calls = {i: Call.of(ReplayBufferActor.rehearse, part, now, request) for i, part in parts.items()}
            self._call(calls, "grading reused groups")

    def rate(self, ratings: Mapping[str, float], now: int) -> int:
        """Grade items by human ratings; return the number graded.

        Args:
            ratings: prompt key -> rating, on the scale of `replay_rating_scale`.
            now: the training iteration.

        Raises:
            ValueError: a rating outside its scale; nothing was graded.
        """
        GRADES["rating"](Evidence(rating_N=np.array(list(ratings.values()), float)), scale=self.settings.rating_scale)
        parts: dict[int, dict[str, float]] = {}
        for key, rating in ratings.items():
            parts.setdefault(self._shard_of(key), {})[key] = float(rating)
        request = self._request(now, "rate")
        calls = {i: Call.of(ReplayBufferActor.rate, part, now, request) for i, part in parts.items()}
        return sum(self._call(calls, "taking ratings").values())

    def rate_answers(self, groups: Sequence[RatedGroup], source: str, position: int, now: int) -> dict[str, int]:
        """Apply ratings of stored answers; see `SRLReplayBuffer.rate_answers`. Every shard notes the position."""
        parts: dict[int, list[RatedGroup]] = {i: [] for i in range(len(self._shards))}
        for group in groups:
            parts[self._shard_of(group.key)].append(group)
        request = self._request(now, f"ratings.{position}")
        calls = {
            i: Call.of(ReplayBufferActor.rate_answers, part, source, position, now, request)
            for i, part in parts.items()
        }
        total: Counter[str] = Counter()
        for counts in self._call(calls, "applying ratings").values():
            total.update(counts)
        return dict(total)

    def rated_until(self, source: str) -> RatedUntil:
        """Return how far the ratings of a file were applied in every shard; to 0 if one has applied another file's."""
        found = list(self._call(self._on_all(Call.of(ReplayBufferActor.rated_until)), "reading its ratings").values())
        position = min(one.position if one.source == source else 0 for one in found)
        return RatedUntil(source, position, tuple(group_id for one in found for group_id in one.unused))

    def stats(self, now: int) -> dict[str, float]:
        """Return the shards' gauges and counts, summed; means and ratios are averaged."""
        answers = list(self._call(self._on_all(Call.of(ReplayBufferActor.stats, now)), "counting").values())
        self.num_items = int(sum(answer["num_items"] for answer in answers))
        return {**merged(answers), "num_restarts": self.num_restarts, **self.counts}

    # --- checkpoints -----------------------------------------------------------------------------

    def snapshot(self, directory: Path) -> None:
        """Write one snapshot a shard into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        calls = {i: Call.of(ReplayBufferActor.snapshot, path) for i, path in self._snapshots_in(directory).items()}
        self._call_long(calls, "writing a snapshot")

    def restore(self, directory: Path) -> int:
        """Restore the snapshots in `directory`; return the number of orphans."""
        calls = {i: Call.of(ReplayBufferActor.restore, path) for i, path in self._snapshots_in(directory).items()}
        orphans = self._call_long(calls, "restoring a snapshot")
        self.num_items = sum(self.sizes())
        self._asked.clear()
        return sum(orphans.values())

    def sizes(self) -> list[int]:
        """Return the number of items of each shard."""
        return list(self._call(self._on_all(Call.of(ReplayBufferActor.size)), "counting").values())

    def check_valid(self) -> None:
        """Check every invariant of every shard; for tests, since it reads whole shards."""
        self._call(self._on_all(Call.of(ReplayBufferActor.check_valid)), "checking")

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    def check_fits(self, num_shards: int) -> None:
        """Check that a checkpoint of `num_shards` shards can be restored here.

        Raises:
            ValueError: it was written by another number of shards, or without a memory.
        """
        if num_shards != len(self._shards):
            raise ValueError(
                f"the checkpoint's memory has {num_shards} shards (0: none), this run's has {len(self._shards)}; "
                f"expected replay_num_shards = {num_shards}, or replay_capacity = 0 for a checkpoint without one"
            )

    def get_state(self) -> dict[str, Any]:
        """Return carried remainders and counts; everything else is in the snapshots."""
        return {
            "revisits": self._revisits.get_state(),
            "reuses": self._reuses.get_state(),
            "counts": dict(self.counts),
            "num_items": self.num_items,
            "num_shards": len(self._shards),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._revisits.set_state(state["revisits"])
        self._reuses.set_state(state["reuses"])
        self.counts, self.num_items = Counter({**dict.fromkeys(COUNTS, 0), **state["counts"]}), state["num_items"]

    def stop(self) -> None:
        """End the buffers; return when their journals can be opened again, after at most `RELEASE_S` seconds."""
        for shard in self._shards:
            if self._is_local:
                shard.close()
            else:
                ray.kill(shard)  # Ray answers before the process has ended
        deadline = time.monotonic() + RELEASE_S
        while any(holder_of(journal) is not None for journal in self._journals) and time.monotonic() < deadline:
            time.sleep(0.02)

    # --- calls -----------------------------------------------------------------------------------

    def _drawn(
        self, draw: Callable[[int, str, Collection[str]], Call[list[Drawn]]], name: str, num: int, now: int
    ) -> list[Drawn]:
        """Draw `num` from all shards: equal parts first, then the missing ones from shards that have more.

        Args:
            draw: (number, request name, names drawn before) -> the call of one shard.
            name: of the draw, for the names of its requests.
            num: items or groups to draw.
            now: the training iteration.
        """
        num_shards, request = len(self._shards), self._request(now, name)
        parts = {i: (num + (i - now) % num_shards) // num_shards for i in range(num_shards)}
        calls = {i: draw(part, request, ()) for i, part in parts.items() if part}
        drawn = [one for answer in self._call(calls, "drawing").values() for one in answer]
        for i in range(num_shards if num_shards > 1 else 0):
            if missing := num - len(drawn):
                names = [one.key if isinstance(one, Prompt) else one.group_id for one in drawn]
                more = {i: draw(missing, self._request(now, f"{name}.more"), names)}
                drawn += self._call(more, "drawing")[i]
        return drawn

    def _request(self, now: int, method: str) -> str:
        """Return a new request name; the suffix keeps names unique if an iteration is retried after an error."""
        self._asked[f"{now}.{method}"] += 1
        num = self._asked[f"{now}.{method}"]
        return f"{now}.{method}" + (f".{num}" if num > 1 else "")

    def _shard_of(self, key: str) -> int:
        return int(key, 16) % len(self._shards)

    def _snapshots_in(self, directory: Path) -> dict[int, Path]:
        return {i: directory / f"shard_{i}.sqlite" for i in range(len(self._shards))}

    def _on_all(self, call: Call[Result]) -> dict[int, Call[Result]]:
        return dict.fromkeys(range(len(self._shards)), call)

    def _call(
        self,
        calls: Mapping[int, Call[Result]],
        what: str,
        timeout_s: float | None = None,
        restart_s: float | None = None,
    ) -> dict[int, Result]:
        """Run one call on each of some shards; retry a shard that died or timed out after its restart.

        Groups that a call returns as a second object stay in the object store; the metadata refers to them.

        Args:
            calls: shard -> its call.
            what: the shards are doing, for the error.
            timeout_s: limit of the first attempt; default: `replay_timeout_s`.
            restart_s: limit of a restart and what follows it, in addition; default: the same.

        Returns:
            The answers, in the order of the shards.

        Raises:
            ActorFailure: a shard gave no answer in time; the message names the shard and `what` it was doing.
        """
        if self._is_local:
            return {i: call.run(self._shards[i]) for i, call in calls.items()}
        limit_s = timeout_s or self.settings.timeout_s
        deadline, pending = time.monotonic() + limit_s + (restart_s or limit_s), dict(calls)
        answers: dict[int, Result] = {}
        failures: dict[int, Failure] = {}
        while pending and (left_s := deadline - time.monotonic()) > 0:
            wait_s = left_s if failures else min(limit_s, left_s)  # a slow restart is not killed again
            refs = {i: call.submit_all(self._shards[i]) for i, call in pending.items()}
            for i, answer in gather({i: first for i, (first, *_) in refs.items()}, wait_s):
                if not isinstance(answer, Failure):
                    answers[i] = answer if len(refs[i]) == 1 else _with_groups(answer, refs[i][1])
                    del pending[i]
                    continue
                if i not in failures:
                    self.num_restarts += 1
                failures.setdefault(i, answer)
                if answer.is_silent:
                    self._end(i)
            if pending:
                time.sleep(RETRY_S)
        if pending:
            shard = min(pending)
            raise ActorFailure(f"memory shard {shard} {failures[shard].reason} while {what}")
        return dict(sorted(answers.items()))

    def _call_long(self, calls: Mapping[int, Call[Result]], what: str) -> dict[int, Result]:
        """Run calls that may take 10 times as long; a shard that was silent before is still found in the usual time."""
        long_s = 10 * self.settings.timeout_s
        self._call(self._on_all(Call.of(ReplayBufferActor.check_started)), what, restart_s=long_s)
        return self._call(calls, what, long_s)

    def _end(self, shard: int) -> None:
        """Kill an unresponsive shard, so that Ray restarts it.

        SIGKILL goes to the process that holds the journal: a stopped (SIGSTOP) process ignores `ray.kill`.
        """
        holder = holder_of(self._journals[shard]) if self._journals else None
        if holder is None:
            ray.kill(self._shards[shard], no_restart=False)
            return
        with suppress(ProcessLookupError):
            os.kill(holder, signal.SIGKILL)


def _with_groups(metas: Any, groups: ray.ObjectRef[Any]) -> Any:
    return listed(metas, groups)


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


def _remote_class(name: str, num_gpus: float) -> Any:
    """Return the actor class, pinned to this node (its journal is a local file) and restarted without limit."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(ReplayBufferActor).options(
        name=name, num_cpus=0, num_gpus=num_gpus, max_restarts=-1, max_task_retries=0, scheduling_strategy=here
    )
