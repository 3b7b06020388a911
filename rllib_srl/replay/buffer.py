"""Stores items and their groups on disk, and draws them by a rule; runs without Ray.

    buffer = SRLReplayBuffer(capacity=10_000, directory=path)
    visits = buffer.add(groups, now)          store, grade, reschedule           one commit, then acknowledged
    prompts = buffer.draw_prompts(4, now)     play again (revisit)               draws are committed too, so a
    groups = buffer.draw_groups(4, now)       train again (reuse)                restart does not repeat them
    buffer.rate({key: 0.8}, now)              grades of items by people
    buffer.rate_answers(rated, ...)           rewards of stored answers by people

Every call takes the training iteration as `now` and, from other processes, a request name. Calls are idempotent by
request name: a repeated request returns its stored answer and changes nothing. A call that raises changes nothing.

    journal --load--> store, generators, counts, calibrators --calls--> transaction --commit--> journal

The content of a buffer is the journal's rows (items, groups, vectors) and its state (plain values by name).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.buffer_metrics import gauges
from rllib_srl.replay.diversity.tracker import DiversityTracker
from rllib_srl.replay.history import DomainStatistics, Policy, UnstoredHistories, histories_without
from rllib_srl.replay.ingest import Ingestion
from rllib_srl.replay.journal.codec import StoredGroup, prompt_fields, prompt_of
from rllib_srl.replay.journal.journal import Stored
from rllib_srl.replay.journal.transaction import Change, Ledger
from rllib_srl.replay.rated import RatedGroup, RatedGroups, apply
from rllib_srl.replay.schedule.grading import GRADES, Evidence
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.sampler import DrawnAnswer, Draws, drawn_in
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import Header, rows_at
from rllib_srl.replay.visits import Visit
from rllib_srl.types import Group, History, Prompt

OVERFLOW = 256  # items above capacity held until the end of a call, so that new items are candidates of eviction too
STREAMS = ("revisit", "reuse", "grow", "evict")


class SRLReplayBuffer:
    """Replay buffer of items, their groups and their schedule.

    Invariant: `check_valid` passes; outside a call, memory and journal agree, and a call that raises leaves both
    unchanged; the effect of every call that has returned is in the journal.
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
        """Open the buffer and load its journal.

        Args:
            settings: replay settings; None builds them from `kwargs`.
            directory: of the journal; None uses a temporary directory.
            seed: of all draws.
            run: name of the run; a journal of the same run is continued, that of another run is set aside. ""
                continues any.
            model_dir: of the policy, for its tokenizer.
            decode: token ids -> text, in place of that tokenizer.
            max_prompt_tokens: longest history that becomes an item, in tokens; None: no limit.
            kwargs: fields of `ReplaySettings`.

        Raises:
            ValueError: settings out of range, all at once.
            JournalError: the journal is in use, damaged or of another version.
        """
        self.settings = (settings or ReplaySettings(**kwargs)).checked()
        if not self.settings.is_on:
            raise ValueError("capacity = 0; expected at least 1: a buffer without room is no buffer")
        self._seed, self._model_dir = seed, model_dir
        self._settings_dict, self._embedding = self.settings.as_dict(), self.settings.embedding_used
        self.max_prompt_tokens = max_prompt_tokens
        self.ingestion = Ingestion(self.settings, model_dir, decode, max_prompt_tokens)
        self.ledger = Ledger(None if directory is None else Path(directory), run, self.settings.max_bytes)
        try:
            self._load(self.ledger.stored())
        except BaseException:
            self.ledger.close()
            raise

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.store)

    def _load(self, stored: Stored) -> None:
        settings = self.settings
        self._seed = stored.state.get("seed", self._seed)  # a restored run keeps its seed
        self.store = (
            ItemStore.load(
                max(settings.capacity, len(stored.slots)) + OVERFLOW,
                int(stored.items["num_groups"].max(initial=settings.groups_per_item)),
                Header.from_json(stored.state["store"]),
                items=(stored.slots, stored.items, stored.prompts),
                groups=stored.groups,
            )
            if "store" in stored.state
            else ItemStore(settings.capacity + OVERFLOW, settings.groups_per_item)
        )
        self.recall = Recall(settings, self.store)
        self.domain_statistics = DomainStatistics()
        self.draws = Draws(settings, self.store, self.recall)
        self.tracker = self._make_tracker(stored)
        self.generators = {
            name: np.random.default_rng(np.random.SeedSequence([self._seed, sum(name.encode())])) for name in STREAMS
        }
        self.counts: Counter[str] = Counter()
        self.drawn: dict[str, int] = {}  # id of each group of the last draw -> its seq
        self.rated = RatedGroups()
        self.unstored = UnstoredHistories()
        if "store" in stored.state:
            self._set_state(stored.state)
        self.store.groups_per_item = settings.groups_per_item
        if len(self.store) > settings.capacity or self._surplus_groups():  # written under larger limits
            with self._transaction("") as change:
                change.removed_groups += [self.store.remove_group(group) for group in self._surplus_groups()]
                self._evict(int(self.store.items["last_review"].max()), change)

    def _make_tracker(self, stored: Stored) -> DiversityTracker | None:
        """Return a tracker with the stored vectors, None if nothing needs one.

        Raises:
            ValueError: the items were stored with another embedding, or without one.
        """
        name, written = self._embedding, stored.state.get("embedding")
        if len(stored.slots) and name != written:
            raise ValueError(
                f"this memory was written with embedding {written!r}, these settings need {name!r} (embedding, "
                "diversity, near_duplicate, least_diverse); expected the settings that wrote it, or a new memory"
            )
        if name is None:
            return None
        tracker = DiversityTracker(name, self._model_dir, self.settings.diversity_device)
        tracker.load(self.ledger.journal.vectors())
        return tracker

    # --- calls of an iteration -------------------------------------------------------------------

    def add(
        self,
        groups: Sequence[Group],
        now: int,
        request: str = "",
        is_played: bool = True,
        policy_kl: float = 0.0,
    ) -> list[Visit]:
        """Store and grade played groups, and reschedule their items.

        A refused group is not stored, but still grades an item that exists. The history in each visit is that before
        this call: no reward of `groups` is part of it.

        Args:
            groups: processed in this order.
            now: the training iteration.
            request: name of the call.
            is_played: whether the current policy played them. If not, they are no recall test and grade only items
                that were never visited.
            policy_kl: nats per token by which the policy has moved since the start of the run, for `history_by` "kl".

        Raises:
            JournalError: nothing was stored.
        """
        if (answer := self._answered(request)) is not None:
            return [Visit.from_dict(values) for values in answer]
        visits: list[Visit] = []
        with self._transaction(request) as change:
            histories = self.ingestion.histories(self, groups, policy_kl)
            for part in _apart(groups):
                visits += self.ingestion.take(self, part, now, change, is_played, policy_kl)
                self._evict(now, change)
            visits = [replace(visit, history=one) for visit, one in zip(visits, histories, strict=True)]
            change.answer = [visit.as_dict() for visit in visits]
        return visits

    def draw_prompts(
        self,
        num: int,
        now: int,
        request: str = "",
        without: Collection[str] = (),
    ) -> list[Prompt]:
        """Draw `num` prompts to revisit, fewer only if fewer have passed their minimum recall interval.

        Args:
            num: prompts wanted.
            now: the training iteration.
            request: name of the call.
            without: keys of prompts that are already in this batch.
        """
        if (answer := self._answered(request)) is not None:
            return [prompt_of(drawn["prompt"]) for drawn in answer]
        with self._transaction(request) as change:
            taken = [slot for key in without if (slot := self.store.slot_of(int(key, 16))) is not None]
            drawn = self.draws.items(num, now, self.generators["revisit"], taken)
            prompts = [self.store.prompt_of(int(slot)) for slot in drawn]
            change.answer = [
                {"prompt": prompt_fields(prompt), "why": self.draws.why(int(slot), now)}
                for prompt, slot in zip(prompts, drawn, strict=True)
            ]
            self.counts["num_revisits"] += len(prompts)
            self.count_by_domain("num_revisits", prompts)
        return prompts

    def count_by_domain(self, name: str, prompts: Iterable[Prompt]) -> None:
        """Add the prompts to a lifetime count of their domains, as part of a transaction."""
        self.counts.update(f"domains/{prompt.domain}/{name}" for prompt in prompts)

    def add_item(self, key: int, prompt: Prompt, now: int, change: Change, **fields: Any) -> int:
        """Add an item, with the history of its prompt's refused groups, as part of a transaction; return its slot.

        Args:
            key: of the prompt.
            prompt: the prompt.
            now: the training iteration.
            change: the open transaction.
            fields: of its row.
        """
        fields |= {"due": now + self.settings.min_recall_interval, **self.unstored.take(key)}
        slot = self.store.add_item(key, prompt, prompt.domain, now, **fields)
        change.new_slots.add(slot)
        return slot

    def draw_groups(
        self,
        num: int,
        now: int,
        request: str = "",
        policy: Policy | None = None,
    ) -> list[StoredGroup]:
        """Draw `num` stored groups to reuse, fewer only if fewer are within `max_age` and `max_uses`.

        Args:
            num: groups wanted.
            now: the training iteration.
            request: name of the call.
            policy: in training, where the baseline is one from history; None leaves out groups of equal rewards.

        Returns:
            Groups with `origin` "reuse"; with `policy` also the history of each, without the group itself.

        Raises:
            JournalError: nothing was drawn; or the request is a repeated one, and groups it drew have been removed.
        """
        if (answer := self._answered(request)) is not None:
            answered = drawn_in(answer)
            return self._drawn(list(map(self.ledger.payloads.open, answered.seqs)), answered)
        with self._transaction(request) as change:
            drawn, weight_N = self.draws.groups(num, now, self.generators["reuse"], must_vary=policy is None)
            self.store.update_groups(drawn, uses=self.store.groups["uses"][drawn] + 1)
            seqs = self.store.groups["seq"][drawn].tolist()
            found = list(map(self.ledger.payloads.open, seqs))
            drawing = DrawnAnswer(seqs, weight_N.tolist(), self._histories(found, drawn, policy))
            groups = self._drawn(found, drawing)
            self.drawn = {one.group.group_id: seq for one, seq in zip(groups, seqs, strict=True)}
            if self.rated.is_used:
                self.rated.note_trained(one.group.group_id for one in groups)
            self.counts["num_reuses"] += len(seqs)
            self.count_by_domain("num_reuses", [one.group.prompt for one in groups])
            change.answer = drawing.to_json()
        return groups

    def rate(self, ratings: Mapping[str, float], now: int, request: str = "") -> int:
        """Grade items by human ratings, on the scale of `rating_scale`; return the number of items graded.

        Args:
            ratings: prompt key -> rating; keys without an item are counted, not graded.
            now: the training iteration.
            request: name of the call.

        Raises:
            ValueError: a rating outside its scale; nothing was graded.
        """
        values_N = np.array(list(ratings.values()), np.float64)
        grades = GRADES["rating"](Evidence(rating_N=values_N), scale=self.settings.rating_scale).tolist()
        return self._review_all(dict(zip(ratings, grades, strict=True)), now, request, "num_rated")

    def rate_answers(
        self, groups: Sequence[RatedGroup], source: str, position: int, now: int, request: str = ""
    ) -> dict[str, int]:
        """Apply ratings of stored answers: rewards of their groups and grades of their items; see `replay/rated.py`.

        Args:
            groups: of distinct ids, each with all of its ratings. Those of groups that are not stored are noted.
            source: id of the ratings file.
            position: of its newest change among these; `rated` remembers both.
            now: the training iteration.
            request: name of the call.

        Returns:
            The numbers of ratings that are new to the memory (`num_applied`), of those that replaced or took back an
            earlier one (`num_changed`), of items graded (`num_graded`), and of groups that are older than
            `max_age` at the next draw (`num_too_old`).
        """
        answer: dict[str, int] | None = self._answered(request)
        if answer is not None:
            return answer
        with self._transaction(request) as change:
            counts = apply(self, groups, now, change)
            self.counts["num_rated"] += counts["num_graded"]
            self.rated.advance(source, position)
            change.answer = counts
        return counts

    def rehearse(self, changes: Mapping[str, float], now: int, request: str = "") -> int:
        """Grade items of reused groups by the likelihood of their stored successes; return the number graded.

        Args:
            changes: prompt key -> mean of logp - behaviour_logp over the tokens of its successes, in nats.
            now: the training iteration.
            request: name of the call.
        """
        change_N = np.array(list(changes.values()), np.float64)
        grades = GRADES["likelihood"](Evidence(logp_change_N=change_N)).tolist()
        return self._review_all(dict(zip(changes, grades, strict=True)), now, request, "num_rehearsed")

    def embed(self, vectors: Mapping[str, np.ndarray], now: int, request: str = "") -> int:
        """Store the learner's hidden states as embeddings; return the number of items embedded.

        Args:
            vectors: prompt key -> float32 [G, D], one row for each episode of its newest group.
            now: the training iteration.
            request: name of the call.
        """
        answer: int | None = self._answered(request)
        if answer is not None:
            return answer
        with self._transaction(request) as change:
            slots = {key: self.store.slot_of(int(key, 16)) for key in vectors}
            found = {slot: vectors[key] for key, slot in slots.items() if slot is not None}
            measured = {} if self.tracker is None else self.tracker.receive(found)
            self.ingestion.place_vectors(self, measured, change)
            change.answer = len(found)
        return len(found)

    def drop(self, group_ids: Sequence[str], request: str = "") -> int:
        """Remove groups of the last draw that the learner found too far from its policy; return their number."""
        answer: int | None = self._answered(request)
        if answer is not None:
            return answer
        with self._transaction(request) as change:
            seqs = [self.drawn.pop(group_id) for group_id in group_ids if group_id in self.drawn]
            num = sum(self._forget_group(seq, change) for seq in seqs)  # some may have been replaced since
            self.counts["num_dropped_drifted"] += num
            change.answer = num
        return num

    def stats(self, now: int) -> dict[str, float]:
        """Return gauges and lifetime counts; see `buffer_metrics.gauges`."""
        return gauges(self, now)

    # --- parts -----------------------------------------------------------------------------------

    def _review_all(self, grades: Mapping[str, int], now: int, request: str, counted: str) -> int:
        answer: int | None = self._answered(request)
        if answer is not None:
            return answer
        with self._transaction(request) as change:
            slots = {key: self.store.slot_of(int(key, 16)) for key in grades}
            reviewed = {slot: grades[key] for key, slot in slots.items() if slot is not None and grades[key]}
            self.review(reviewed, now)
            num = len(reviewed)
            self.counts["num_reviews_of_nothing"] += len(grades) - num
            self.counts[counted] += num
            change.answer = num
        return num

    def review(self, grades: Mapping[int, int], now: int) -> None:
        """Review items, by slot, with grades of 1 to 4 that no visit gave, in a transaction."""
        self.recall.review(list(grades), np.array(list(grades.values()), np.int64), now)

    @staticmethod
    def _drawn(found: Sequence[StoredGroup], answer: DrawnAnswer) -> list[StoredGroup]:
        """Return stored groups, which are cached, with what belongs to a draw."""
        groups = []
        for one, _, weight, history in zip(found, *answer, strict=True):
            if weight != one.weight or history != one.history:
                one = replace(one, weight=weight, history=history)
            groups.append(one)
        return groups

    def _histories(
        self, found: Sequence[StoredGroup], drawn: np.ndarray, policy: Policy | None
    ) -> list[History | None]:
        """Return the histories of drawn groups without the groups themselves; None each without `policy`.

        Args:
            found: the drawn groups.
            drawn: their slots.
            policy: as in `draw_groups`.
        """
        if policy is None or not found:
            return [None] * len(found)
        groups = [one.group for one in found]
        rows_N = rows_at(self.store.groups, drawn)
        items_N = rows_at(self.store.items, rows_N["slot"])
        sums_N = np.array([group.rewards_G[group.has_reward_G].astype(np.float64).sum() for group in groups])
        how = (self.settings.history_by, self.settings.history_half_life, self.domain_statistics)
        domains = [group.prompt.domain for group in groups]
        return list(histories_without(policy, *how, domains, items_N, rows_N, sums_N))

    def _surplus_groups(self) -> list[int]:
        """Return the oldest groups of items that have more than `groups_per_item`."""
        slots_N, most = self.store.slots(), self.settings.groups_per_item
        crowded = slots_N[self.store.items["num_groups"][slots_N] > most].tolist()
        return [group for slot in crowded for group in self.store.groups_of(slot)[:-most]]

    def _evict(self, now: int, change: Change) -> None:
        """Evict items until at most `capacity` are left."""
        while (num := len(self.store) - self.settings.capacity) > 0:
            for slot in self.draws.evicted(num, now, self.generators["evict"]).tolist():
                self.remove(slot, change)

    def remove(self, slot: int, change: Change) -> None:
        """Remove an item with its groups and its vector, as part of a transaction."""
        if self.tracker is not None:
            self.tracker.forget(slot)
        change.removed_groups += self.store.remove_item(slot)
        change.removed_slots.add(slot)
        change.new_slots.discard(slot)
        change.vectors.pop(slot, None)
        self.counts["num_evicted"] += 1

    def _forget_group(self, seq: int, change: Change) -> bool:
        rows = self.store.groups
        found = np.flatnonzero((rows["seq"] == seq) & (rows["size"] > 0)).tolist()
        change.removed_groups += [self.store.remove_group(group) for group in found]
        return bool(found)

    # --- transactions ----------------------------------------------------------------------------------

    def _answered(self, request: str) -> Any | None:
        """Return the stored answer of this request, or None."""
        return self.ledger.journal.answer(request) if request else None

    @contextmanager
    def _transaction(self, request: str) -> Iterator[Change]:
        """Commit the changes made inside the context; roll back on an error."""
        before = self.ledger.agreed or self._state()
        with self.ledger.transaction(self.store, self._state, lambda: self._undo(before), request) as change:
            yield change
        if self.tracker is not None:
            self.tracker.commit()

    def _undo(self, before: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.rollback()
        self._set_state(before)

    def _state(self) -> dict[str, Any]:
        """Return all state that is not in rows, as JSON types or bytes."""
        return {
            "store": self.store.header.to_json(),
            "generators": {name: generator.bit_generator.state for name, generator in self.generators.items()},
            "counts": dict(self.counts),
            "draws": self.draws.get_state(),
            "drawn": dict(self.drawn),
            "domain_statistics": self.domain_statistics.get_state(),
            "settings": self._settings_dict,  # so that a journal can be read without the run that wrote it
            "seed": self._seed,
            **({"rated": self.rated.get_state()} if self.rated.is_used else {}),
            **({} if (unstored := self.unstored.get_state()) is None else {"unstored": unstored}),
            "embedding": self._embedding,
            **({} if self.tracker is None else {"embedder": self.tracker.get_state()}),
        }

    def _set_state(self, state: dict[str, Any]) -> None:
        for name, generator in self.generators.items():
            generator.bit_generator.state = state["generators"][name]
        self.counts = Counter(state["counts"])
        self.draws.set_state(state["draws"])
        self.drawn = dict(state["drawn"])
        self.domain_statistics.set_state(state["domain_statistics"])
        self.rated.set_state(state.get("rated", ""))
        self.unstored.set_state(state.get("unstored"))
        if self.tracker is not None:
            self.tracker.set_state(state["embedder"])

    # --- copies ----------------------------------------------------------------------------------

    def snapshot(self, path: Path) -> dict[str, Any]:
        """Write a consistent copy of the journal to `path` atomically, in bounded memory; return its position.

        Raises:
            JournalError: the disk is full, or `path` cannot be written.
        """
        position = self.ledger.journal.snapshot(path)
        return {"position": position, "num_items": len(self.store), "num_groups": self.store.num_groups}

    def restore(self, path: Path) -> int:
        """Restore a snapshot; return the number of groups that were stored after it, which are dropped.

        Raises:
            JournalError: the snapshot cannot be read; nothing has changed.
        """
        num_dropped = self.ledger.restore(path)
        self._load(self.ledger.stored())
        with self._transaction(""):  # writes this run's name into the journal
            pass
        return num_dropped

    def describe(self) -> dict[str, Any]:
        """Return the path, position and lineage of the journal."""
        journal = self.ledger.journal
        return {"path": str(journal.path), "position": journal.position, "lineage": journal.lineage}

    def tidy(self) -> None:
        """Run journal maintenance that would otherwise delay a commit; call when idle."""
        self.ledger.journal.tidy()

    def close(self) -> None:
        """Close the journal."""
        self.ledger.close()

    def check_valid(self) -> None:
        """Check every invariant: the tables and their indexes, the vectors, the journal.

        Raises:
            ValueError: naming every broken invariant.
        """
        faults: list[str] = []
        checks = [self.store.check_valid]
        if self.tracker is not None:
            checks.append(partial(self.tracker.check, self.store))
        for check in checks:
            try:
                check()
            except ValueError as error:
                faults.append(str(error))
        if len(self.store) > self.settings.capacity:
            faults.append(f"there are at most capacity = {self.settings.capacity} items: {len(self.store)}")
        faults += self._faults_of_journal()
        if faults:
            raise ValueError("; ".join(faults))

    def _faults_of_journal(self) -> Iterator[str]:
        journal = self.ledger.journal
        stored = journal.load()
        slots_N = self.store.slots()
        if stored.slots.tolist() != slots_N.tolist() or stored.items.tobytes() != self.store.items[slots_N].tobytes():
            yield "the journal has exactly the items of the table"
        held = self.store.groups[self.store.groups["size"] > 0]  # size 0 marks a free row
        rows = {int(row["seq"]): row.tobytes() for row in held}
        if {int(seq): row.tobytes() for seq, row in zip(stored.seqs, stored.groups, strict=True)} != rows:
            yield "the journal has exactly the groups of the table"
        if missing := [seq for seq in rows if not journal.has_group(seq)]:
            yield f"every group can be read: not so for {missing[:5]}"
        if [slot for slot, _ in journal.vectors()] != slots_N[self.store.items[slots_N]["has_vector"]].tolist():
            yield "the journal has exactly the vectors of the items with has_vector"
        # New settings are written with the next commit.
        kept = {name: value for name, value in self._state().items() if name != "settings"}
        if journal.position and (wrong := [name for name, value in kept.items() if stored.state.get(name) != value]):
            yield f"the journal has the state of memory: not so for {wrong}"


def _apart(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Split groups, in order, into parts of distinct prompts, each at most half of `OVERFLOW` long."""
    part: dict[str, Group] = {}
    for group in groups:
        key = group.prompt.key
        if len(part) == OVERFLOW // 2 or key in part:
            yield list(part.values())
            part = {}
        part[key] = group
    if part:
        yield list(part.values())
