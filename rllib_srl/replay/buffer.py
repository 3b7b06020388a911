"""Stores items and their groups on disk, and draws them by a rule; runs without Ray.

    buffer = SRLReplayBuffer(capacity=10_000, directory=path)
    visits = buffer.add(groups, now)            store, grade, reschedule           one commit, then acknowledged
    prompts = buffer.draw_prompts(4, now)       play again (revisit)               draws are committed too, so a
    groups = buffer.draw_groups(4, now)         train again (reuse)                restart does not repeat them
    groups = buffer.draw_answers(4, now)        right answers to hold (retain)
    buffer.rate_answers(rated, ...)             rewards of stored answers by people

Every call takes the training iteration as `now` and, from other processes, the name of the call as `request`: a call
that is repeated by name returns its stored answer and changes nothing. A call that raises, even a `StoreError` of a
full disk, changes nothing either: the memory is loaded again from the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rllib_srl.batch.parts import part_of
from rllib_srl.common.decoder import decoder_of
from rllib_srl.replay.answers import draw_answers
from rllib_srl.replay.diversity.embedders import EMBEDDINGS, Embedder
from rllib_srl.replay.diversity.neighbours import check_card
from rllib_srl.replay.history import DomainStatistics, history_of, right_answers
from rllib_srl.replay.intake import ON_GROUP, Intake, Visit, parts_of
from rllib_srl.replay.metrics import stats_of
from rllib_srl.replay.payloads import prompt_fields, prompt_of
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, RatedGroups, grade_of
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.sampler import Draws
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import Store
from rllib_srl.types import HISTORY, Group, History, Prompt

Answer = TypeVar("Answer")
STREAMS = ("revisit", "reuse", "retain", "grow", "evict")


class SRLReplayBuffer:
    """Replay buffer of items, their groups and their schedule.

    Invariant: outside a call, memory and store agree; the effect of every call that has returned is in the store.
    """

    def __init__(
        self,
        settings: ReplaySettings | None = None,
        *,
        directory: Path | str | None = None,
        seed: int = 0,
        run: str = "",
        model_dir: Path | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_prompt_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Open the buffer and load its store.

        Args:
            settings: replay settings; None builds them from `kwargs`.
            directory: directory of the store; None uses a temporary directory.
            seed: seed of all draws; a restored run keeps its own.
            run: name of the run; a store of the same run is continued, that of another run is set aside. "" continues
                any.
            model_dir: the policy's model directory, for its tokenizer.
            decode: token ids -> text, instead of that tokenizer.
            max_prompt_tokens: longest history that becomes an item, in tokens; None: no limit.
            kwargs: fields of `ReplaySettings`.

        Raises:
            ValueError: settings out of range, all at once, or a secret detector without a tokenizer or `decode`.
            StoreError: the store is in use, damaged or of another version.
        """
        self.settings = settings = (settings or ReplaySettings(**kwargs)).checked()
        if not settings.is_on:
            raise ValueError("capacity must be >= 1, got 0; use a run without a memory instead")
        if decode is None and settings.admit:
            if model_dir is None:
                raise ValueError(
                    f"admit = {settings.admit!r} without a tokenizer; expected model_dir or decode, or admit = None "
                    "for tokens that hold no text"
                )
            decode = decoder_of(model_dir)
        self._decode, self._seed, self._model_dir, self._max_prompt_tokens = decode, seed, model_dir, max_prompt_tokens
        self._on_group = None if settings.on_group is None else ON_GROUP.named(settings.on_group)
        self._settings_dict, self._embedding = settings.as_dict(), settings.embedding_used
        self.store = Store(None if directory is None else Path(directory), run)
        try:
            self._load()
        except BaseException:
            self.store.close()
            raise

    def __len__(self) -> int:
        return len(self.tables)

    def _load(self) -> None:
        self.tables, state = self.store.read()
        settings = self.settings
        self._seed = state.get("seed", self._seed)  # a restored run keeps its seed
        self.recall = Recall(settings, self.tables)
        self.draws = Draws(settings, self.tables, self.recall)
        self.generators = {
            name: np.random.default_rng(np.random.SeedSequence([self._seed, sum(name.encode())])) for name in STREAMS
        }
        for name, values in state.get("generators", {}).items():
            self.generators[name].bit_generator.state = values
        self.counts: Counter[str] = Counter(state.get("counts", {}))
        self.domain_statistics = DomainStatistics(state.get("domain_statistics", {}))
        self.rated = RatedGroups(**state.get("rated", {}))
        self.embedder = self._make_embedder(state)
        self.intake = Intake(
            settings,
            self.tables,
            self.recall,
            self.embedder,
            self.domain_statistics,
            self.counts,
            self.store,
            generator=self.generators["grow"],
            decode=self._decode,
            on_group=self._on_group,
            max_prompt_tokens=self._max_prompt_tokens,
        )

    def _make_embedder(self, state: Mapping[str, Any]) -> Embedder | None:
        """Return an embedder if something needs one; a ValueError says that the items have another embedding."""
        name, written = self._embedding, state.get("embedding")
        if len(self.tables) and name != written:
            without = "diversity_coeff = 0, no embedding and no least_diverse"
            raise ValueError(
                f"this memory was written with embedding {written!r}, these settings need {name!r}; expected "
                f"{f'embedding = {written!r}' if written else without}, or a new memory"
            )
        if name is None:
            return None
        if self.settings.searches_on_gpu:
            check_card()
        embedder = EMBEDDINGS.named(name)()
        embedder.model_dir = self._model_dir
        if "embedder" in state:
            embedder.set_state(state["embedder"])
        return embedder

    # --- transactions ----------------------------------------------------------------------------

    def _once(self, request: str, work: Callable[[], Answer]) -> Answer:
        """Return the stored answer of a request, or do the work as one transaction; its answer is of JSON types."""
        answer: Answer | None = self.store.answer(request) if request else None
        if answer is None:
            with self._transaction():
                answer = work()
                if request:
                    self.store.put_answer(request, answer)
        return answer

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self.store.transaction():
                yield
                self.store.write(self.tables)
                self.store.put_state(self._state())
        except BaseException:
            self._load()
            raise
        self.tables.committed()

    def _state(self) -> dict[str, Any]:
        return {
            "items": self.tables.header,
            "generators": {name: generator.bit_generator.state for name, generator in self.generators.items()},
            "counts": dict(self.counts),
            "domain_statistics": {name: list(sums) for name, sums in self.domain_statistics.sums.items()},
            "settings": self._settings_dict,  # so that a store can be read without the run that wrote it
            "seed": self._seed,
            "rated": asdict(self.rated) if self.rated.source else {},
            "embedding": self._embedding,
            **({} if self.embedder is None else {"embedder": self.embedder.get_state()}),
        }

    # --- adding groups ---------------------------------------------------------------------------

    def add(self, batch: Sequence[Group], now: int = 0, request: str = "", is_played: bool = True) -> list[Visit]:
        """Store and grade played groups, and reschedule their items.

        A refused group is not stored, but still grades an item that exists. The history in each visit is that before
        this call: no reward of `batch` is part of it.

        Args:
            batch: groups, processed in this order.
            is_played: whether the current policy played them. If not, they are not a recall test and grade only items
                that were never visited.
        """

        def work() -> list[dict[str, Any]]:
            visits = [Visit(g.group_id, g.prompt.key, history=self.intake.history_of(g)) for g in batch]
            for part in parts_of(zip(batch, visits, strict=True)):
                self.intake.take(part, now, is_played)
                self._evict(now)
            return [vars(visit) for visit in visits]

        return [Visit.from_dict(values) for values in self._once(request, work)]

    # --- drawing ---------------------------------------------------------------------------------

    def draw_prompts(self, num: int, now: int, request: str = "", without: Collection[str] = ()) -> list[Prompt]:
        """Draw `num` prompts to revisit, fewer only if fewer are rested and wait for no rating.

        `without` has the keys of prompts that are already in this batch.
        """
        _check_lists(without=without)

        def work() -> list[dict[str, Any]]:
            drawn = self.draws.items(num, now, self.generators["revisit"], self._slots_of(without))
            prompts = [self.tables.prompt_of(slot) for slot in drawn.tolist()]
            self.counts["num_revisits"] += len(prompts)
            self.intake.count_by_domain("num_revisits", prompts)
            return [prompt_fields(prompt) for prompt in prompts]

        return [prompt_of(fields) for fields in self._once(request, work)]

    def _slots_of(self, keys: Collection[str]) -> list[int]:
        return [slot for key in keys if (slot := self.tables.slot_of(int(key, 16))) is not None]

    def draw_groups(self, num: int, now: int, request: str = "", version: int | None = None) -> list[Group]:
        """Draw `num` stored groups to reuse, fewer only if fewer are within `max_age` and `max_uses`.

        They have the `origin` "reuse". In training with a baseline from history, `version` is the policy's: each
        group has the history of its prompt, without the group itself, in `extra[HISTORY]`; None leaves out groups of
        equal rewards. A repeated request whose groups have been removed is a StoreError.
        """
        drawn = list[Group]()

        def work() -> list[Any]:
            slots = self.draws.groups(num, now, self.generators["reuse"], must_vary=version is None)
            rows = self.tables.groups.at(slots)
            self.tables.groups.update(slots, uses=rows["uses"] + 1)
            seqs = rows["seq"].tolist()
            groups = [self.store.group(seq, "reuse") for seq in seqs]
            pasts = [self._without(group, row, version) for group, row in zip(groups, rows, strict=True)]
            drawn.extend(map(_with_history, groups, pasts))
            self.counts["num_reuses"] += len(drawn)
            self.intake.count_by_domain("num_reuses", [group.prompt for group in groups])
            return list(zip(seqs, pasts, strict=True))

        answer = self._once(request, work)
        return drawn or [_with_history(self.store.group(seq, "reuse"), past) for seq, past in answer]

    def _without(self, group: Group, row: np.void, version: int | None) -> History | None:
        if version is None:
            return None
        mean, item = self.domain_statistics.mean(group.prompt.domain), self.tables.items[row["slot"]]
        return history_of(item, version, self.settings.history_half_life, mean, group, row)

    def draw_answers(
        self,
        num: int,
        now: int,
        request: str = "",
        without_domains: Collection[str] = (),
        without_keys: Collection[str] = (),
    ) -> list[Group]:
        """Draw stored right answers to hold, fewer only if fewer can be drawn; see `answers.draw_answers`.

        Left out are domains by name, such as the one that is trained now, and prompts by key, such as those in the
        batch. Returned are groups of one episode, with the `origin` "retain". A repeated request whose groups have been
        removed is a StoreError.
        """
        _check_lists(without_domains=without_domains, without_keys=without_keys)
        drawn = list[Group]()

        def work() -> list[tuple[int, int]]:
            domains = [number for number, name in enumerate(self.tables.domains) if name in without_domains]
            slots, episodes = self._slots_of(without_keys), list[tuple[int, int]]()
            for seq, number in draw_answers(self.tables, num, self.generators["retain"], slots, domains):
                group = self.store.group(seq, "retain")
                right = right_answers(group, self.settings.pass_reward)
                if number < len(right):  # not if `pass_reward` was raised since the group was stored
                    drawn.append(part_of(group, [right[number]]))
                    episodes.append((seq, right[number]))
            self.counts["num_retained"] += len(drawn)
            return episodes

        answer = self._once(request, work)
        return drawn or [part_of(self.store.group(seq, "retain"), [episode]) for seq, episode in answer]

    def drop_answers(self, env_ids: Collection[str], request: str = "") -> int:
        """Never hold the stored answers of some environments, whose grading has changed; return their number."""
        _check_lists(env_ids=env_ids)

        def work() -> int:
            groups, slots = self.tables.groups, self.tables.slots().tolist()
            of_envs = [slot for slot in slots if self.tables.prompt_of(slot).env_id in env_ids]
            ats = [at for slot in of_envs for at in self.tables.groups_of(slot)]
            num = int(groups["num_answers"][ats].sum())
            groups.update(ats, num_answers=0)
            self.counts["num_answers_outdated"] += num
            return num

        return self._once(request, work)

    def rate_answers(
        self, groups: Sequence[RatedGroup], source: str, position: int, now: int, request: str = ""
    ) -> dict[str, int]:
        """Apply ratings of stored answers: rewards of their groups and grades of their items; see `replay/ratings.py`.

        Groups have distinct ids and all of their ratings; those that are not stored are noted. `source` is the id of
        the ratings file, and `position` that of its newest change among these. Returned are the numbers of new ratings
        (`num_applied`), of those that replaced or took back an earlier one (`num_changed`), of items graded
        (`num_graded`), and of groups beyond `max_age` at the next draw (`num_too_old`).
        """

        def work() -> dict[str, int]:
            rated, tables, num_too_old = self.rated, self.tables, 0
            num_applied, num_changed = rated.num_applied, rated.num_changed
            graded = dict[int, list[RatedAnswer]]()  # by slot
            for group in groups:
                slot, at = tables.slot_of(int(group.key, 16)), tables.group_at(group.group_id)
                if slot is None or at is None or at not in tables.groups_of(slot):
                    rated.note(group)
                elif answers := self.intake.rate(slot, at, group, rated):
                    graded.setdefault(slot, []).extend(answers)
                    num_too_old += now + 1 - int(tables.groups["born"][at]) > self.settings.max_age
            grades = [grade_of(answers) for answers in graded.values()]
            self.recall.review(list(graded), np.array(grades, np.int64), now)
            rated.source, rated.position = source, position
            self.counts["num_rated"] += len(graded)
            return {
                "num_applied": rated.num_applied - num_applied,
                "num_changed": rated.num_changed - num_changed,
                "num_graded": len(graded),
                "num_too_old": num_too_old,
            }

        return self._once(request, work)

    def drop(self, group_ids: Sequence[str], request: str = "") -> int:
        """Remove groups that the learner found too far from its policy; return their number."""
        _check_lists(group_ids=group_ids)

        def work() -> int:
            places = [at for name in group_ids if (at := self.tables.group_at(name)) is not None]  # some may be gone
            for at in places:
                self.tables.remove_group(at)
            self.counts["num_dropped_drifted"] += len(places)
            return len(places)

        return self._once(request, work)

    def remove(self, keys: Collection[str] = (), domain: str | None = None, before: int | None = None) -> int:
        """Remove items with their groups and answers, so that no byte of them stays in the store's files.

        Removed are items by `keys`, those of a domain, and items and groups that were visited last `before` an
        iteration. The names of domains and the counts stay, and checkpoints have copies. Returns the number of items.
        """
        _check_lists(keys=keys)
        with self._transaction():
            num = self.tables.remove(keys, domain, before)
        self.store.erase()
        return num

    def _evict(self, now: int) -> None:
        while (num := len(self) - self.settings.capacity) > 0:
            for slot in self.draws.evicted(num, now, self.generators["evict"]).tolist():
                self.tables.remove_item(slot)
                self.counts["num_evicted"] += 1

    # --- copies ----------------------------------------------------------------------------------

    def stats(self, now: int) -> dict[str, float]:
        return stats_of(self.tables, self.counts, self.rated, now)

    def snapshot(self, path: Path) -> None:
        self.store.snapshot(path)

    def restore(self, path: Path) -> int:
        """Restore a snapshot, or change nothing; return the number of groups stored after it, which are dropped."""
        try:
            return self.store.restore(path)
        finally:
            self._load()

    def close(self) -> None:
        self.store.close()


def _with_history(group: Group, past: Sequence[float] | None) -> Group:
    return group if past is None else replace(group, extra={**group.extra, HISTORY: History(*past)})


def _check_lists(**arguments: Collection[str]) -> None:
    """Raise a ValueError for a string, each letter of which would count as a name."""
    for name, value in arguments.items():
        if isinstance(value, str):
            raise ValueError(f"{name} = {value!r}; expected a list, such as [{value!r}]")
