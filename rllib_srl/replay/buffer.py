"""Stores items and their groups on disk, and draws them by a rule; runs without Ray.

    buffer = SRLReplayBuffer(capacity=10_000, directory=path)
    visits = buffer.add(groups, now)            store, grade, reschedule           one commit, then acknowledged
    prompts = buffer.draw_prompts(4, now)       play again (revisit)               draws are committed too, so a
    groups = buffer.draw_groups(4, now)         train again (reuse)                restart does not repeat them
    groups = buffer.draw_targets(4, now)        right answers to hold (retain)
    buffer.rate({key: 0.8}, now)                grades of items by people
    buffer.rate_answers(rated, ...)             rewards of stored answers by people

Every call takes the training iteration as `now` and, from other processes, a request name. Calls are idempotent by
request name: a repeated request returns its stored answer and changes nothing. A call that raises changes nothing:
the memory is loaded again from the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.batch.parts import part_of
from rllib_srl.common.decoder import decoder_of
from rllib_srl.replay.diversity.tracker import DiversityTracker
from rllib_srl.replay.history import DomainStatistics, Policy, UnstoredHistories, histories_without
from rllib_srl.replay.intake import Entry, Intake
from rllib_srl.replay.items import Tables, rows_at
from rllib_srl.replay.metrics import COUNTS, counts_of_domains
from rllib_srl.replay.payloads import (
    StoredGroup,
    compact_json,
    decode,
    decode_target,
    encode_target,
    prompt_fields,
    prompt_of,
)
from rllib_srl.replay.ratings import (
    RatedAnswer,
    RatedGroup,
    RatedGroups,
    corrected,
    grade_of,
    rewards_of,
    with_ratings,
)
from rllib_srl.replay.schedule.recall import Recall, grades_of_ratings
from rllib_srl.replay.selection.sampler import DrawnAnswer, Draws, drawn_in
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import Commit, Store
from rllib_srl.replay.visits import ON_GROUP, Visit, facts_of
from rllib_srl.types import PEOPLE, TARGET, Group, History, Prompt, Target

MOST_AT_ONCE = 128  # groups before items above capacity are evicted, so that new items are candidates too
STREAMS = ("revisit", "reuse", "retain", "grow", "evict")


class SRLReplayBuffer:
    """Replay buffer of items, their groups and their schedule.

    Invariant: `check_valid` passes; outside a call, memory and store agree; the effect of every call that has returned
    is in the store.
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
            directory: of the store; None uses a temporary directory.
            seed: of all draws.
            run: name of the run; a store of the same run is continued, that of another run is set aside. "" continues
                any.
            model_dir: of the policy, for its tokenizer.
            decode: token ids -> text, in place of that tokenizer.
            max_prompt_tokens: longest history that becomes an item, in tokens; None: no limit.
            kwargs: fields of `ReplaySettings`.

        Raises:
            ValueError: settings out of range, all at once, or a secret detector without a tokenizer or `decode`.
            StoreError: the store is in use, damaged or of another version.
        """
        self.settings = settings = (settings or ReplaySettings(**kwargs)).checked()
        if not settings.is_on:
            raise ValueError("capacity must be >= 1, got 0; use a run without a memory instead")
        if decode is None and model_dir is not None and settings.admit:
            decode = decoder_of(model_dir)
        if decode is None and settings.admit:
            raise ValueError(
                f"admit = {settings.admit!r} without a tokenizer; expected model_dir or decode, or admit = None for "
                "tokens that hold no text"
            )
        self._decode, self._seed, self._model_dir, self._max_prompt_tokens = decode, seed, model_dir, max_prompt_tokens
        self._on_group = None if settings.on_group is None else ON_GROUP.named(settings.on_group)
        self._settings_dict, self._embedding = settings.as_dict(), settings.embedding_used
        self._discounting = (settings.history_by, settings.history_half_life)
        self.tracker: DiversityTracker | None = None
        self.store = Store(None if directory is None else Path(directory), run)
        try:
            self._load()
        except BaseException:
            self.store.close()
            raise

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.tables)

    def _load(self) -> None:
        """Take everything from the store."""
        stored, settings = self.store.read(), self.settings
        state = stored.state
        self._seed = state.get("seed", self._seed)  # a restored run keeps its seed
        items, groups = (stored.slots, stored.items, stored.prompts), (stored.groups, stored.group_ids)
        self.tables = Tables(settings.groups_per_item, state.get("items"), items, groups, stored.targets)
        self.recall = Recall(settings, self.tables)
        self.draws = Draws(settings, self.tables, self.recall)
        self.generators = {
            name: np.random.default_rng(np.random.SeedSequence([self._seed, sum(name.encode())])) for name in STREAMS
        }
        for name, values in state.get("generators", {}).items():
            self.generators[name].bit_generator.state = values
        self.counts: Counter[str] = Counter(state.get("counts", {}))
        self.drawn: dict[str, int] = state.get("drawn", {})  # id of each group of the last draw -> its seq
        self.domain_statistics = DomainStatistics(state.get("domain_statistics", {}))
        self.rated = RatedGroups(state.get("rated", ""))
        self.unstored = UnstoredHistories(state.get("unstored", b""))
        if "draws" in state:
            self.draws.set_state(state["draws"])
        self._load_vectors(state, bool(len(stored.slots)))
        self.intake = Intake(
            settings,
            self.tables,
            self.recall,
            self.tracker,
            self.domain_statistics,
            self.unstored,
            self.counts,
            generator=self.generators["grow"],
            payload=self.store.payload,
            decode=self._decode,
            on_group=self._on_group,
            max_prompt_tokens=self._max_prompt_tokens,
        )
        if len(self) > settings.capacity or self._surplus_groups():  # written under larger limits
            with self._transaction("") as changes:
                changes.removed_groups += [self.tables.remove_group(group) for group in self._surplus_groups()]
                self._evict(int(stored.items["last_review"].max()), changes)

    def _load_vectors(self, state: Mapping[str, Any], has_items: bool) -> None:
        """Make a tracker with the vectors of the store, if something needs one.

        Raises:
            ValueError: the items were stored with another embedding, or without one.
        """
        name, written = self._embedding, state.get("embedding")
        if has_items and name != written:
            raise ValueError(
                f"this memory was written with embedding {written!r}, these settings need {name!r} (embedding, "
                "diversity, near_duplicate, least_diverse); expected the settings that wrote it, or a new memory"
            )
        if name is None:
            return
        self.tracker = DiversityTracker(name, self._model_dir, self.settings.diversity_device)
        self.tracker.load(self.store.vectors())
        if "embedder" in state:
            self.tracker.embedder.set_state(state["embedder"])

    # --- transactions ----------------------------------------------------------------------------

    def _answer(self, request: str) -> Any | None:
        """Return the stored answer of this request, or None."""
        return self.store.answer(request) if request else None

    @contextmanager
    def _transaction(self, request: str) -> Iterator[Commit]:
        """Commit the changes made inside, or load the store again on an error."""
        changes = Commit(request=request)
        try:
            yield changes
            items, groups = self.tables.changed()
            changes.items = [(slot, row, compact_json(prompt_fields(prompt))) for slot, row, prompt in items]
            changes.groups, seqs = groups, {seq for seq, _, _ in groups}
            changes.payloads = {seq: payload for seq, payload in changes.payloads.items() if seq in seqs}
            held = self.tables.targets
            changes.targets = {place: payload for place, payload in changes.targets.items() if place in held}
            changes.state = self._state()
            self.store.commit(changes)
        except BaseException:
            self._load()
            raise
        self.tables.committed()
        if self.tracker is not None:
            self.tracker.commit(changes.removed_slots, changes.vectors)

    def _state(self) -> dict[str, Any]:
        """Return all state that is not in rows, as JSON types or bytes."""
        return {
            "items": self.tables.header,
            "generators": {name: generator.bit_generator.state for name, generator in self.generators.items()},
            "counts": dict(self.counts),
            "draws": self.draws.get_state(),
            "drawn": self.drawn,
            "domain_statistics": self.domain_statistics.get_state(),
            "settings": self._settings_dict,  # so that a store can be read without the run that wrote it
            "seed": self._seed,
            "rated": self.rated.get_state() if self.rated.source else "",
            "unstored": self.unstored.get_state(),
            "embedding": self._embedding,
            **({} if self.tracker is None else {"embedder": self.tracker.embedder.get_state()}),
        }

    # --- adding groups ---------------------------------------------------------------------------

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
            StoreError: nothing was stored.
        """
        if (answer := self._answer(request)) is not None:
            return [Visit.from_dict(values) for values in answer]
        entries: list[Entry] = []
        with self._transaction(request) as changes:
            histories = self.intake.histories(groups, policy_kl)
            for part in _of_distinct_prompts(groups):
                entries += self.intake.take(part, now, changes, is_played, policy_kl)
                self._evict(now, changes)
            visits = [entry.visit(history) for entry, history in zip(entries, histories, strict=True)]
            changes.answer = [visit.as_dict() for visit in visits]
        return visits

    # --- drawing ---------------------------------------------------------------------------------

    def draw_prompts(self, num: int, now: int, request: str = "", without: Collection[str] = ()) -> list[Prompt]:
        """Draw `num` prompts to revisit, fewer only if fewer have passed their minimum recall interval.

        Args:
            num: prompts wanted.
            now: the training iteration.
            request: name of the call.
            without: keys of prompts that are already in this batch.
        """
        if (answer := self._answer(request)) is not None:
            return [prompt_of(fields) for _, fields in answer]
        with self._transaction(request) as changes:
            taken = [slot for key in without if (slot := self.tables.slot_of(int(key, 16))) is not None]
            drawn = self.draws.items(num, now, self.generators["revisit"], taken).tolist()
            prompts = [self.tables.prompt_of(slot) for slot in drawn]
            changes.answer = [(prompt.key, prompt_fields(prompt)) for prompt in prompts]  # `remove` looks for keys
            self.counts["num_revisits"] += len(prompts)
            self.intake.count_by_domain("num_revisits", prompts)
        return prompts

    def draw_groups(self, num: int, now: int, request: str = "", policy: Policy | None = None) -> list[StoredGroup]:
        """Draw `num` stored groups to reuse, fewer only if fewer are within `max_age` and `max_uses`.

        Args:
            num: groups wanted.
            now: the training iteration.
            request: name of the call.
            policy: in training, where the baseline is one from history; None leaves out groups of equal rewards.

        Returns:
            Groups with `origin` "reuse"; with `policy` also the history of each, without the group itself.

        Raises:
            StoreError: nothing was drawn; or the request is a repeated one, and groups it drew have been removed.
        """
        if (answer := self._answer(request)) is not None:
            drawing = drawn_in(answer)
            return self._stored_groups(drawing)
        with self._transaction(request) as changes:
            drawn, weight_N = self.draws.groups(num, now, self.generators["reuse"], must_vary=policy is None)
            self.tables.update_groups(drawn, uses=self.tables.groups["uses"][drawn] + 1)
            drawing = DrawnAnswer(self.tables.groups["seq"][drawn].tolist(), weight_N.tolist(), [None] * len(drawn))
            found = self._stored_groups(drawing)
            if policy is not None and found:
                histories = self._histories_without([one.group for one in found], drawn, policy)
                drawing = drawing._replace(histories=histories)
                found = [replace(one, history=history) for one, history in zip(found, histories, strict=True)]
            self.drawn = {one.group.group_id: seq for one, seq in zip(found, drawing.seqs, strict=True)}
            self.rated.note_trained(self.drawn)
            self.counts["num_reuses"] += len(found)
            self.intake.count_by_domain("num_reuses", [one.group.prompt for one in found])
            changes.answer = drawing.to_json()
        return found

    def _stored_groups(self, drawing: DrawnAnswer) -> list[StoredGroup]:
        found = []
        for seq, weight, history in zip(*drawing, strict=True):
            payload = self.store.payload(seq)
            found.append(StoredGroup(decode(payload, str(seq), "reuse"), payload, weight, history))
        return found

    def _histories_without(self, groups: Sequence[Group], drawn: np.ndarray, policy: Policy) -> list[History | None]:
        """Return the histories of drawn groups, by slot, without the groups themselves."""
        rows_N = rows_at(self.tables.groups, drawn)
        items_N = rows_at(self.tables.items, rows_N["slot"])
        sums_N = np.array([group.rewards_G[group.has_reward_G].astype(np.float64).sum() for group in groups])
        domains = [group.prompt.domain for group in groups]
        how = (*self._discounting, self.domain_statistics)
        return list(histories_without(policy, *how, domains, items_N, rows_N, sums_N))

    # --- targets ---------------------------------------------------------------------------------

    def add_targets(self, targets: Sequence[Target], now: int, request: str = "", per_domain: int | None = None) -> int:
        """Store the targets of right answers; return how many have a stored group.

        Args:
            targets: of distinct answers; one that is stored already is replaced.
            now: the training iteration.
            request: name of the call.
            per_domain: targets kept of each domain, those of the newest groups; None: no limit.
        """
        answer: int | None = self._answer(request)
        if answer is not None:
            return answer
        with self._transaction(request) as changes:
            num = 0
            for target in targets:
                if (at := self.tables.group_at(target.group_id)) is None:
                    continue
                if not 0 <= target.episode < self.tables.groups["size"][at]:
                    raise ValueError(f"target of group {target.group_id}: it has no episode {target.episode}")
                place = (int(self.tables.groups["seq"][at]), target.episode)
                changes.targets[place] = payload = encode_target(target)
                self.tables.targets[place] = len(payload)
                num += 1
            surplus = self.tables.surplus_targets(per_domain)
            changes.removed_targets += surplus
            for place in surplus:
                del self.tables.targets[place]
            self.counts["num_targets_replaced"] += len(surplus)
            changes.answer = num
        return num

    def draw_targets(
        self,
        num: int,
        now: int,
        request: str = "",
        without_domains: Collection[str] = (),
        without_keys: Collection[str] = (),
    ) -> list[Group]:
        """Draw stored right answers that have targets, fewer only if fewer are stored.

        A prompt comes a second time only after every prompt came once; domains take turns, and within a domain prompts
        are drawn uniformly.

        Args:
            num: answers wanted.
            now: the training iteration.
            request: name of the call.
            without_domains: domains that are left out, such as the one that is trained now.
            without_keys: keys of prompts that are left out, such as those in the batch.

        Returns:
            Groups of one episode, with `origin` "retain" and the target in `extra[TARGET]`.
        """
        places = self._answer(request)
        if places is None:
            with self._transaction(request) as changes:
                slots = {self.tables.slot_of(int(key, 16)) for key in without_keys}
                domains = {self.tables.domain_id(name) for name in without_domains}
                places = self.tables.draw_targets(num, self.generators["retain"], slots, domains)
                self.counts["num_retained"] += len(places)
                changes.answer = places
        return [self._retained(seq, episode) for seq, episode in places]

    def _retained(self, seq: int, episode: int) -> Group:
        group = part_of(decode(self.store.payload(seq), str(seq), "retain"), [episode])
        return replace(group, extra={**group.extra, TARGET: decode_target(self.store.target(seq, episode))})

    # --- grades and ratings ----------------------------------------------------------------------

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
        grades = grades_of_ratings(values_N, self.settings.rating_scale).tolist()
        return self._review_all(dict(zip(ratings, grades, strict=True)), now, request, "num_rated")

    def _review_all(self, grades: Mapping[str, int], now: int, request: str, counted: str) -> int:
        answer: int | None = self._answer(request)
        if answer is not None:
            return answer
        with self._transaction(request) as changes:
            slots = {key: self.tables.slot_of(int(key, 16)) for key in grades}
            reviewed = {slot: grades[key] for key, slot in slots.items() if slot is not None and grades[key]}
            self._review(reviewed, now)
            changes.answer = num = len(reviewed)
            self.counts["num_reviews_of_nothing"] += len(grades) - num
            self.counts[counted] += num
        return num

    def _review(self, grades: Mapping[int, int], now: int) -> None:
        """Review items, by slot, with grades of 1 to 4 that no visit gave."""
        self.recall.review(list(grades), np.array(list(grades.values()), np.int64), now)

    def rate_answers(
        self, groups: Sequence[RatedGroup], source: str, position: int, now: int, request: str = ""
    ) -> dict[str, int]:
        """Apply ratings of stored answers: rewards of their groups and grades of their items; see `replay/ratings.py`.

        Args:
            groups: of distinct ids, each with all of its ratings. Those of groups that are not stored are noted.
            source: id of the ratings file.
            position: of its newest change among these; `rated` remembers both.
            now: the last finished training iteration.
            request: name of the call.

        Returns:
            The numbers of ratings that are new to the memory (`num_applied`), of those that replaced or took back an
            earlier one (`num_changed`), of items graded (`num_graded`), and of groups that are older than
            `max_age` at the next draw (`num_too_old`).
        """
        answer: dict[str, int] | None = self._answer(request)
        if answer is not None:
            return answer
        rated, graded, num_too_old = self.rated, dict[int, list[RatedAnswer]](), 0
        num_applied, num_changed = rated.num_applied, rated.num_changed
        with self._transaction(request) as changes:
            for one in groups:
                slot = self.tables.slot_of(int(one.key, 16))
                at = self.tables.group_at(one.group_id)
                if slot is None or at is None or at not in self.tables.groups_of(slot):
                    rated.note_missing(one)
                    continue
                age = now + 1 - int(self.tables.groups["born"][at])  # at the next draw
                if answers := self._rate_group(slot, at, one, changes):
                    graded.setdefault(slot, []).extend(answers)
                    num_too_old += age > self.settings.max_age
            self._review({slot: grade_of(answers) for slot, answers in graded.items()}, now)
            rated.source, rated.position = source, position
            self.counts["num_rated"] += len(graded)
            counts = {
                "num_applied": rated.num_applied - num_applied,
                "num_changed": rated.num_changed - num_changed,
                "num_graded": len(graded),
                "num_too_old": num_too_old,
            }
            changes.answer = counts
        return counts

    def _rate_group(self, slot: int, at: int, one: RatedGroup, changes: Commit) -> list[RatedAnswer]:
        """Set the ratings of a stored group; return all of them if one is new or differs, else [].

        A payload is never changed, so the group is stored again under a new number, with the iteration, the policy
        versions and the number of uses that it had: the guards of reuse hold as before.
        """
        tables, row = self.tables, self.tables.groups[at].copy()
        seq, group = int(row["seq"]), self.intake.group(int(row["seq"]), changes)
        seen = one.seen(group)
        rewards, earlier = rewards_of(seen), group.extra.get(PEOPLE, {}).get("rated", {})
        self.rated.note_stored(one, rewards, earlier)
        if rewards == earlier:
            return []
        rated = with_ratings(group, rewards, one.pass_reward)
        before, after = (facts_of(group, self.settings.pass_reward) for group in (group, rated))
        fields, clock = corrected(tables.items[slot], row, *self._discounting, rated, before, after)
        targets = {place: changes.targets.get(place) or self.store.target(*place) for place in tables.targets_of(seq)}
        changes.removed_groups.append(tables.remove_group(at))
        new = tables.next_group_seq
        self.intake.store_group(  # the mean of the domain has none of its new rewards
            slot, rated, after, changes, born=int(row["born"]), uses=int(row["uses"]), history_clock=clock
        )
        for (_, episode), payload in targets.items():
            changes.targets[new, episode] = payload
            tables.targets[new, episode] = len(payload)
        if group.group_id in self.drawn:
            self.drawn[group.group_id] = new
        if fields:
            tables.update([slot], **fields)
        is_given = any(earlier.get(episode) != reward for episode, reward in rewards.items())  # not only taken back
        return [answer for answer in seen if answer.reward is not None] if is_given else []

    # --- what the learner knows ------------------------------------------------------------------

    def drop(self, group_ids: Sequence[str], request: str = "") -> int:
        """Remove groups of the last draw that the learner found too far from its policy; return their number."""
        answer: int | None = self._answer(request)
        if answer is not None:
            return answer
        with self._transaction(request) as changes:
            seqs = [self.drawn.pop(group_id) for group_id in group_ids if group_id in self.drawn]
            groups_N = self.tables.group_slots()
            drifted = groups_N[np.isin(self.tables.groups["seq"][groups_N], seqs)].tolist()  # some may be gone
            changes.removed_groups += [self.tables.remove_group(at) for at in drifted]
            self.counts["num_dropped_drifted"] += len(drifted)
            changes.answer = len(drifted)
        return len(drifted)

    # --- removing --------------------------------------------------------------------------------

    def remove(self, keys: Collection[str] = (), domain: str | None = None, before: int | None = None) -> int:
        """Remove items with their groups, answers and targets, so that no byte of them stays in the store's files.

        The names of domains and the counts stay. Checkpoints have copies of their own.

        Args:
            keys: of prompts.
            domain: all items of it.
            before: items that were visited last before this iteration, and groups that were played before it.

        Returns:
            The number of items removed.

        Raises:
            StoreError: the disk is full: the file is rewritten.
        """
        tables, words = self.tables, set[str]()
        with self._transaction("") as changes:
            slots_N = tables.slots()
            rows_N = rows_at(tables.items, slots_N)
            is_gone_N = np.isin(rows_N["key"], np.array([int(key, 16) for key in keys], np.uint64))
            if domain is not None:
                number = tables.domain_id(domain)
                is_gone_N |= rows_N["domain"] == (-1 if number is None else number)
            if before is not None:
                is_gone_N |= rows_N["last_review"] < before
                groups_N = tables.group_slots()
                old = groups_N[tables.groups["born"][groups_N] < before].tolist()
                changes.removed_groups += [tables.remove_group(at) for at in old]
            words.update(keys)
            for slot in slots_N[is_gone_N].tolist():
                words.add(tables.prompt_of(slot).key)
                self._remove_item(slot, changes)
            for word in words:
                self.unstored.take(int(word, 16))
        self.store.erase(words)
        return int(is_gone_N.sum())

    def _surplus_groups(self) -> list[int]:
        """Return the oldest groups of items that have more than `groups_per_item`."""
        slots_N, most = self.tables.slots(), self.settings.groups_per_item
        crowded = slots_N[self.tables.items["num_groups"][slots_N] > most].tolist()
        return [group for slot in crowded for group in self.tables.groups_of(slot)[:-most]]

    def _evict(self, now: int, changes: Commit) -> None:
        """Evict items until at most `capacity` are left."""
        while (num := len(self) - self.settings.capacity) > 0:
            for slot in self.draws.evicted(num, now, self.generators["evict"]).tolist():
                self._remove_item(slot, changes)
                self.counts["num_evicted"] += 1

    def _remove_item(self, slot: int, changes: Commit) -> None:
        """Remove an item with its groups and its vector."""
        changes.removed_groups += self.tables.remove_item(slot)
        changes.removed_slots.append(slot)
        changes.vectors.pop(slot, None)

    # --- copies and checks -----------------------------------------------------------------------

    def stats(self, now: int) -> dict[str, float]:
        """Return gauges of size, and all lifetime counts."""
        tables, rated = self.tables, self.rated
        whole = {name: num for name, num in self.counts.items() if not name.startswith("domains/")}
        counts = {**dict.fromkeys(COUNTS, 0), **whole}  # report zero counts, so that plots have no gaps
        return {
            "num_items": len(self),
            "num_due": tables.num_due(now),
            "num_stored_groups": tables.num_groups,
            "num_targets": len(tables.targets),
            "num_histories_without_item": len(self.unstored),
            "num_bytes_stored": tables.num_bytes,
            "num_bytes_targets": sum(tables.targets.values()),
            **counts,
            **{f"ratings/num_{name}": getattr(rated, f"num_{name}") for name in ("applied", "changed")},
            **{f"ratings/num_{name}": getattr(rated, f"num_{name}") for name in ("stale_groups", "unused")},
            "num_refused": sum(num for name, num in counts.items() if name.startswith("num_refused_")),
            **counts_of_domains(tables.num_by_domain(), self.counts),
        }

    def snapshot(self, path: Path) -> dict[str, Any]:
        """Write a consistent copy of the store to `path` atomically, in bounded memory; return its position.

        Raises:
            StoreError: the disk is full, or `path` cannot be written.
        """
        self.store.snapshot(path)
        return {"position": self.store.position, "num_items": len(self), "num_groups": self.tables.num_groups}

    def restore(self, path: Path) -> int:
        """Restore a snapshot; return the number of groups that were stored after it, which are dropped.

        Raises:
            StoreError: the snapshot cannot be read; nothing has changed.
        """
        num_dropped = self.store.restore(path)
        self._load()
        with self._transaction(""):  # writes this run's name into the store
            pass
        return num_dropped

    def describe(self) -> dict[str, Any]:
        """Return the path, position and lineage of the store."""
        return {"path": str(self.store.path), "position": self.store.position, "lineage": self.store.lineage}

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def check_valid(self) -> None:
        """Check every invariant: the tables, the vectors, and that the store holds the same.

        Raises:
            ValueError: naming every broken invariant.
        """
        faults: list[str] = []
        try:
            self.tables.check_valid()
        except ValueError as error:
            faults.append(str(error))
        if len(self) > self.settings.capacity:
            faults.append(f"there are at most capacity = {self.settings.capacity} items: {len(self)}")
        tables, stored = self.tables, self.store.read()
        slots_N, groups_N = tables.slots(), tables.group_slots()
        rows = {int(row["seq"]): row.tobytes() for row in tables.groups[groups_N]}
        # New settings are written with the next commit.
        state = {name: value for name, value in self._state().items() if name != "settings"} if stored.position else {}
        same = {
            "items": (stored.slots.tolist(), stored.items.tobytes())
            == (slots_N.tolist(), rows_at(tables.items, slots_N).tobytes()),
            "prompts": stored.prompts == [tables.prompt_of(slot) for slot in slots_N.tolist()],
            "groups": {int(row["seq"]): row.tobytes() for row in stored.groups} == rows,
            "targets": {(seq, episode): size for seq, episode, size in stored.targets} == tables.targets,
            "vectors": slots_N[tables.items["has_vector"][slots_N]].tolist()
            == [slot for slot, _ in self.store.vectors()]
            == ([] if self.tracker is None else self.tracker.slots()),
            "payloads": self.store.has_payloads(list(rows)),
            **{f"state {name!r}": stored.state.get(name) == value for name, value in state.items()},
        }
        faults += [f"the store has the {name} of the memory: not so" for name, is_same in same.items() if not is_same]
        if faults:
            raise ValueError("; ".join(faults))


def _of_distinct_prompts(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Split groups, in order, into parts of distinct prompts, each at most `MOST_AT_ONCE` long."""
    part: dict[str, Group] = {}
    for group in groups:
        key = group.prompt.key
        if len(part) == MOST_AT_ONCE or key in part:
            yield list(part.values())
            part = {}
        part[key] = group
    if part:
        yield list(part.values())
