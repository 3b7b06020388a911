"""Stores items and their groups on disk, and draws them by spaced repetition and diversity; runs without Ray.

    buffer = SRLReplayBuffer(capacity=10_000, directory=path)
    visits = buffer.add(groups, now)          store, grade, reschedule           one commit, then acknowledged
    prompts = buffer.due(4, now)              play again (revisit)               draws are committed too, so a
    groups = buffer.sample(4, now)            train again (reuse)                restart does not repeat them
    buffer.rate({key: 0.8}, now)              human ratings

Every call takes the training iteration as `now` and, from other processes, a request name. Calls are idempotent by
request name: a repeated request returns its stored answer and changes nothing. A call that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rllib_srl.replay.buffer_metrics import facts_of_item, gauges
from rllib_srl.replay.journal.codec import Opened, prompt_fields, prompt_of
from rllib_srl.replay.journal.journal import Stored
from rllib_srl.replay.journal.orphans import orphan_id
from rllib_srl.replay.journal.schema import FIRST_ORPHAN
from rllib_srl.replay.journal.transaction import Change
from rllib_srl.replay.persistent import OVERFLOW, PersistentBuffer
from rllib_srl.replay.schedule.grading import GRADES, Evidence
from rllib_srl.replay.selection.growth import revisited
from rllib_srl.replay.selection.sampler import drawn_in
from rllib_srl.replay.selection.shares import DomainShares
from rllib_srl.replay.visits import Visit
from rllib_srl.types import Group, Prompt


class SRLReplayBuffer(PersistentBuffer):
    """Replay buffer of items, their groups and their schedule.

    Invariant: `check_valid` passes; the effect of every call that has returned is in the journal.
    """

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.store)

    def _load(self, stored: Stored) -> None:
        super()._load(stored)
        self.store.groups_per_item = self.settings.groups_per_item
        if len(self.store) > self.settings.capacity or self._surplus_groups():  # written under larger limits
            with self._transaction("") as change:
                change.removed_groups += [self.store.remove_group(group) for group in self._surplus_groups()]
                self._evict(int(self.store.items["last_review"].max()), change)

    # --- calls of an iteration -------------------------------------------------------------------

    def add(self, groups: Sequence[Group], now: int, request: str = "", is_played: bool = True) -> list[Visit]:
        """Store and grade played groups, and reschedule their items.

        A refused group is not stored, but still grades an item that exists.

        Args:
            groups: processed in this order.
            now: the training iteration.
            request: name of the call.
            is_played: whether the current policy played them. If not, they are no recall test and grade only items
                that were never visited.

        Raises:
            JournalError: nothing was stored.
        """
        if (answer := self._answered(request)) is not None:
            return [Visit.from_dict(values) for values in answer]
        visits: list[Visit] = []
        with self._transaction(request) as change:
            for part in _apart(groups):
                visits += self.intake.take(self, part, now, change, is_played)
                self._evict(now, change)
            change.answer = [visit.as_dict() for visit in visits]
        return visits

    def due(
        self,
        num: int,
        now: int,
        request: str = "",
        slots: float | None = None,
        without: Collection[str] = (),
        shares: DomainShares | None = None,
    ) -> list[Prompt]:
        """Draw `num` prompts to revisit, fewer only if fewer have passed their minimum recall interval.

        Args:
            num: prompts wanted.
            now: the training iteration.
            request: name of the call.
            slots: average number of revisits an iteration, the budget of load control; None: `num`.
            without: keys of prompts that are already in this batch.
            shares: domain shares of a planner; None: `domain_quotas` applies.
        """
        if (answer := self._answered(request)) is not None:
            return [prompt_of(drawn["prompt"]) for drawn in answer]
        with self._transaction(request) as change:
            self.recall.slots = float(num if slots is None else slots)
            domains = self.draws.domains(shares)
            self.counts["num_admitted"] += self.recall.admit(now, domains, wanted=self.draws.entry_filter)
            taken = [slot for key in without if (slot := self.store.slot_of(int(key, 16))) is not None]
            drawn = self.draws.items(num, now, self.generators["revisit"], taken, shares)
            missing = num - len(drawn) if self.settings.fill_with_not_due else 0
            if missing and (forced := self.recall.admit(now, domains, missing, self.draws.entry_filter)):
                self.counts["num_admitted"] += forced
                drawn = self.draws.items(num, now, self.generators["revisit"], taken, shares)
            prompts = [self._asked(int(slot)) for slot in drawn]
            self.counts["num_revisits"] += len(prompts)
            change.answer = [
                {"prompt": prompt_fields(prompt), "why": facts_of_item(self, int(slot), now)}
                for prompt, slot in zip(prompts, drawn, strict=True)
            ]
        return prompts

    def sample(
        self,
        num: int,
        now: int,
        request: str = "",
        without: Collection[str] = (),
        shares: DomainShares | None = None,
    ) -> list[Group]:
        """Draw `num` stored groups as `draw` does, and return the groups without their weights."""
        return [drawn.group for drawn in self.draw(num, now, request, without, shares)]

    def draw(
        self,
        num: int,
        now: int,
        request: str = "",
        without: Collection[str] = (),
        shares: DomainShares | None = None,
    ) -> list[Opened]:
        """Draw `num` stored groups to reuse, fewer only if fewer are within `max_age` and `max_uses`.

        Args:
            num: groups wanted.
            now: the training iteration.
            request: name of the call.
            without: ids of groups that are already in this batch, drawn by the previous call.
            shares: domain shares of a planner; None: `domain_quotas` applies.

        Returns:
            Groups with `origin` "reuse".

        Raises:
            JournalError: nothing was drawn; or the request is a repeated one, and groups it drew have been removed.
        """
        if (answer := self._answered(request)) is not None:
            return [self._reused(*drawn) for drawn in zip(*drawn_in(answer), strict=True)]
        with self._transaction(request) as change:
            taken = {group_id: self.drawn[group_id] for group_id in without if group_id in self.drawn}
            drawn, weight_N = self.draws.groups(num, now, self.generators["reuse"], list(taken.values()), shares)
            self.store.update_groups(drawn, uses=self.store.groups["uses"][drawn] + 1)
            seqs = self.store.groups["seq"][drawn].tolist()
            seqs += self._drawn_orphans(num - len(seqs), now, change, set(taken.values()), shares)
            weights = weight_N.tolist() + [1.0] * (len(seqs) - len(weight_N))
            groups = [self._reused(*drawn) for drawn in zip(seqs, weights, strict=True)]
            self.drawn = taken | {one.group.group_id: seq for one, seq in zip(groups, seqs, strict=True)}
            self.counts["num_reuses"] += len(seqs)
            change.answer = seqs if set(weights) <= {1.0} else {"seqs": seqs, "weights": weights}
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
        if (answer := self._answered(request)) is not None:
            return answer
        with self._transaction(request) as change:
            slots = {key: self.store.slot_of(int(key, 16)) for key in vectors}
            found = {slot: vectors[key] for key, slot in slots.items() if slot is not None}
            self.intake.place_vectors(self, self.variety.receive(found, self.store), change)
            change.answer = len(found)
        return len(found)

    def drop(self, group_ids: Sequence[str], request: str = "") -> int:
        """Remove groups of the last draw that the learner found too far from its policy; return their number."""
        if (answer := self._answered(request)) is not None:
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
        if (answer := self._answered(request)) is not None:
            return answer
        with self._transaction(request) as change:
            slots = {key: self.store.slot_of(int(key, 16)) for key in grades}
            reviewed = {slot: grades[key] for key, slot in slots.items() if slot is not None and grades[key]}
            grade_N = np.array(list(reviewed.values()), np.int64)
            review = self.recall.review(list(reviewed), grade_N, now, np.zeros(len(reviewed), bool))
            for slot, graded in zip(reviewed, review, strict=True):
                # A rating counts as one episode: a success from grade 2 (Hard) upwards, as for the spacing rules.
                self.reviews.note(change, self.store.items[slot], graded, now, graded.grade > 1, 1)
            num = len(reviewed)
            self.counts["num_reviews_of_nothing"] += len(grades) - num
            self.counts[counted] += num
            change.answer = num
        return num

    def _asked(self, slot: int) -> Prompt:
        """Return the prompt to play for an item: its own, or with task growth a random prefix or another step."""
        prompt = self.store.prompt_of(slot)
        return revisited(prompt, self.generators["grow"], self.settings.p_div) if self.settings.task_growth else prompt

    def _reused(self, seq: int, weight: float) -> Opened:
        found = self.ledger.payloads.open(seq)
        found = found if weight == found.weight else replace(found, weight=weight)
        return found.renamed(orphan_id(found.group.group_id, seq)) if seq >= FIRST_ORPHAN else found

    def _drawn_orphans(
        self, num: int, now: int, change: Change, without: set[int], shares: DomainShares | None
    ) -> list[int]:
        is_wanted = partial(self.draws.is_orphan_wanted, now=now, shares=shares)
        return self.orphans.draw(num, now, self.generators["orphan"], change, is_wanted, without)

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
        self.recall.forget([slot])
        self.variety.forget(slot)
        change.removed_groups += self.store.remove_item(slot)
        change.removed_slots.add(slot)
        change.new_slots.discard(slot)
        change.vectors.pop(slot, None)
        self.counts["num_evicted"] += 1

    def _forget_group(self, seq: int, change: Change) -> bool:
        rows = self.store.groups
        found = np.flatnonzero((rows["seq"] == seq) & (rows["size"] > 0)).tolist()
        change.removed_groups += [self.store.remove_group(group) for group in found]
        return bool(found) or self.orphans.forget(seq, change)


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
