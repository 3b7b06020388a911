"""Ingests played groups: checks, measures, grades and stores each, and grows new items from it.

    group -> admit? -> item, new or known -> diversity -> grade, due date, history -> children

A refused group still grades an item that exists, because the recall test has happened; the episodes that its visit
names get no loss. A group with too few valid
episodes grades nothing. Both count in the history of their prompt, with an item or without (`replay/history.py`). A
broken group (`admission.fault_of`) is ignored: its
numbers never reach a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.admission.admission import SHARED, AdmissionSettings, Nearest, admit, fault_of
from rllib_srl.replay.admission.hooks import Refusal
from rllib_srl.replay.diversity.measures import diversity
from rllib_srl.replay.diversity.tracker import Measured
from rllib_srl.replay.history import after_visit, discounts
from rllib_srl.replay.journal import codec
from rllib_srl.replay.journal.transaction import Change
from rllib_srl.replay.on_group import ON_GROUP
from rllib_srl.replay.schedule.recall import Graded
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.records import key_of, rows_at
from rllib_srl.replay.visits import OF_GROUP, GroupFacts, Visit, facts_of
from rllib_srl.types import Group, History

if TYPE_CHECKING:
    from rllib_srl.replay.buffer import SRLReplayBuffer


@dataclass
class _PendingGroup:
    """A group with its item."""

    group: Group
    facts: GroupFacts
    measured: Measured
    slot: int
    refusal: Refusal | None  # why it is not stored, None if it is
    is_new: bool
    is_visit: bool = False  # of its item
    domain_place: int = 0  # number of the group among those of its domain, from 1; 0: it is not among them
    graded: Graded = field(default_factory=lambda: Graded(0))


class Ingestion:
    """Ingests groups into a buffer.

    Invariant: it has no state that a restart would lose.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        model_dir: Path | None,
        decode: Callable[[Sequence[int]], str] | None,
        max_prompt_tokens: int | None,
    ) -> None:
        """Prepare the checks.

        Args:
            settings: replay settings.
            model_dir: of the policy, for its tokenizer.
            decode: token ids -> text, in place of that tokenizer.
            max_prompt_tokens: longest history that becomes an item, in tokens.

        Raises:
            ValueError: admission settings out of range, or secret detection is on without a tokenizer or `decode`.
        """
        self._settings, self._max_prompt_tokens = settings, max_prompt_tokens
        self._reads_recall = settings.reads_recall
        self._on_group = None if settings.on_group is None else ON_GROUP.named(settings.on_group)
        self._admission = AdmissionSettings(**{name: getattr(settings, name) for name in SHARED})
        if faults := self._admission.faults():
            raise ValueError("admission: " + "; ".join(faults))
        if decode is None and model_dir is not None and settings.admit:
            decode = decoder_of(model_dir)
        if decode is None and settings.admit:
            raise ValueError(
                f"admit = {settings.admit!r} without a tokenizer; expected model_dir or decode, or admit = None for "
                "tokens that hold no text"
            )
        self._decode = decode

    def histories(self, buffer: SRLReplayBuffer, groups: Sequence[Group], policy_kl: float) -> list[History]:
        """Return the history of each group's prompt as a visit by its policy finds it."""
        found = [(n, buffer.store.slot_of(key_of(group.prompt))) for n, group in enumerate(groups) if group.size]
        slots = {n: slot for n, slot in found if slot is not None}
        others = [n for n, slot in found if slot is None]
        sums: dict[int, float] = {}
        counts: dict[int, float] = {}
        for at, rows_N in (
            (list(slots), rows_at(buffer.store.items, list(slots.values()))),
            (others, buffer.unstored.rows([key_of(groups[n].prompt) for n in others])),
        ):
            version_N = np.array([groups[n].versions_G2.min() for n in at], np.float64)
            rho_N = self._discounts(rows_N, version_N, policy_kl)
            sums |= dict(zip(at, (rho_N * rows_N["history_sum"]).tolist(), strict=True))
            counts |= dict(zip(at, (rho_N * rows_N["history_count"]).tolist(), strict=True))
        mean_of = {domain: buffer.domain_statistics.mean(domain) for domain in {g.prompt.domain for g in groups}}
        return [
            History(sums.get(n, 0.0), counts.get(n, 0.0), mean_of[group.prompt.domain])
            for n, group in enumerate(groups)
        ]

    def _discounts(self, rows_N: np.ndarray, version_N: np.ndarray, policy_kl: float) -> np.ndarray:
        settings = self._settings
        return discounts(settings.history_by, settings.history_half_life, rows_N, version_N, policy_kl)

    def take(
        self,
        buffer: SRLReplayBuffer,
        groups: Sequence[Group],
        now: int,
        change: Change,
        is_played: bool = True,
        policy_kl: float = 0.0,
    ) -> list[Visit]:
        """Ingest groups of distinct prompts, and return their visits in the same order, without their history.

        Args:
            buffer: the buffer to change.
            groups: the played groups.
            now: the training iteration.
            change: the open transaction.
            is_played: whether the current policy played them; if not, they grade only items that were never visited.
            policy_kl: as in `SRLReplayBuffer.add`.
        """
        faults = [fault_of(group) for group in groups]
        whole = [group for group, fault in zip(groups, faults, strict=True) if fault is None]
        all_facts = [facts_of(group, self._settings.pass_reward) for group in whole]
        slots = [buffer.store.slot_of(key_of(group.prompt)) for group in whole]
        measured = iter(self._measured(buffer, whole, slots))
        facts = iter(all_facts)
        entered = [
            self._enter(buffer, group, next(facts), next(measured), now, change)
            if fault is None
            else self._refused(buffer, group, Refusal(fault.value, tuple(range(group.size))))
            for group, fault in zip(groups, faults, strict=True)
        ]
        pending_groups = [one for one in entered if isinstance(one, _PendingGroup)]
        tested = [
            pending
            for pending in pending_groups
            if (is_played or buffer.store.items["visits"][pending.slot] == 0) and pending.group.has_reward_G.any()
        ]
        if tested:
            self._grade(buffer, tested, now, change, policy_kl)
        taken = [one for one, fault in zip(entered, faults, strict=True) if fault is None]
        for group, of, one in zip(whole, all_facts, taken, strict=True):
            self._note(buffer, group.prompt.domain, of, one, is_played)
        if is_played:
            rewarded = [(group.prompt, of.variance) for group, of in zip(whole, all_facts) if of.num_rewarded]
            buffer.count_by_domain("num_groups", [prompt for prompt, _ in rewarded])
            buffer.count_by_domain("num_groups_without_signal", [prompt for prompt, spread in rewarded if not spread])
            self._note_unstored(buffer, zip(whole, all_facts, taken, strict=True), policy_kl)
        for pending in pending_groups:
            if pending.refusal is None:
                self._store(buffer, pending, now, change, policy_kl)
        grown = [self._grow(buffer, pending, now, change) if is_played else 0 for pending in pending_groups]
        visits = iter([self._visit(pending, num) for pending, num in zip(pending_groups, grown, strict=True)])
        return [next(visits) if isinstance(one, _PendingGroup) else one for one in entered]

    @staticmethod
    def _refused(buffer: SRLReplayBuffer, group: Group, refusal: Refusal, pass_rate: float = 0.0) -> Visit:
        buffer.counts[f"num_refused_{refusal.reason}"] += 1
        buffer.counts["num_episodes_without_loss"] += len(refusal.without_loss)
        return Visit(
            group.group_id,
            group.prompt.key,
            refused=refusal.reason,
            without_loss=refusal.without_loss,
            pass_rate=pass_rate,
        )

    def _enter(
        self, buffer: SRLReplayBuffer, group: Group, facts: GroupFacts, measured: Measured, now: int, change: Change
    ) -> Visit | _PendingGroup:
        """Check a group, and find or add its item."""
        key = key_of(group.prompt)
        slot = buffer.store.slot_of(key)
        refusal = self._judge(buffer, group, slot, measured, change)
        if slot is None and refusal is None and facts.size < self._settings.min_graded:
            refusal = Refusal("ungraded", train=True)
        if refusal is not None:
            visit = self._refused(buffer, group, refusal, facts.num_success / facts.size)
            if slot is None:
                return visit
        is_new = slot is None
        if slot is None:
            slot = buffer.add_item(key, group.prompt, now, change)
        return _PendingGroup(group, facts, measured, slot, refusal, is_new)

    def _visit(self, pending: _PendingGroup, num_grown: int) -> Visit:
        return Visit(
            group_id=pending.group.group_id,
            key=pending.group.prompt.key,
            pass_rate=pending.facts.num_success / pending.facts.size,
            refused=pending.refusal.reason if pending.refusal else "",
            without_loss=pending.refusal.without_loss if pending.refusal else (),
            is_new=pending.is_new,
            timing=pending.graded.timing,
            grade=pending.graded.grade,
            is_lapse=pending.graded.is_lapse,
            num_grown=num_grown,
        )

    # --- parts -----------------------------------------------------------------------------------

    def _judge(
        self, buffer: SRLReplayBuffer, group: Group, slot: int | None, measured: Measured, change: Change
    ) -> Refusal | None:
        """Return why a group is not stored, None if it is."""
        nearest = None
        # A known prompt is never a near duplicate, even if its answers have become similar to another prompt's.
        if slot is None and measured.nearest is not None and buffer.tracker is not None:
            other, similarity = measured.nearest
            if not buffer.tracker.is_gone(other):
                nearest = Nearest(buffer.store.prompt_of(other).key, similarity)
        refusal = admit(group, self._admission, nearest=nearest, decode=self._decode, is_checked=True)
        if refusal is not None:
            return refusal
        is_stored = slot is not None and any(
            np.array_equal(other.token_ids_N, group.token_ids_N)
            for other in self._lookalikes(buffer, slot, group, change)
        )
        return Refusal("duplicate", train=True) if is_stored else None

    def _lookalikes(self, buffer: SRLReplayBuffer, slot: int, group: Group, change: Change) -> Iterator[Group]:
        """Yield an item's groups with equal token count and nll; reading all payloads would cost too much."""
        facts = facts_of(group, self._settings.pass_reward)
        for at in buffer.store.groups_of(slot):
            row = buffer.store.groups[at]
            if (row["num_tokens"], row["nll"]) == (facts.num_tokens, np.float32(facts.nll)):
                seq = int(row["seq"])
                uncommitted = change.payloads.get(seq)
                yield codec.decode(uncommitted, str(seq)) if uncommitted else buffer.ledger.payloads.get(seq)

    @staticmethod
    def _measured(buffer: SRLReplayBuffer, groups: Sequence[Group], slots: Sequence[int | None]) -> list[Measured]:
        if buffer.tracker is None:
            return [Measured()] * len(groups)
        return buffer.tracker.measure(groups, [-1 if slot is None else slot for slot in slots])

    @staticmethod
    def _measure(
        buffer: SRLReplayBuffer, measured: Mapping[int, Measured], variance_N: np.ndarray, change: Change
    ) -> dict[str, Any]:
        """Store the items' vectors by slot; return the diversity fields of their rows, none without a tracker."""
        if buffer.tracker is None:
            return {}
        rows_N = rows_at(buffer.store.items, list(measured))
        known_N = np.where(rows_N["has_vector"], rows_N["novelty"], np.nan)
        new_N = np.array([np.nan if one.novelty is None else one.novelty for one in measured.values()])
        novelty_N = np.where(np.isnan(new_N), known_N, new_N)
        vectors = {slot: one.vector_D for slot, one in measured.items() if one.vector_D is not None}
        for slot, vector_D in vectors.items():
            change.vectors[slot] = vector_D
            buffer.tracker.put(slot, vector_D)
        fields: dict[str, Any] = {"diversity": diversity(variance_N, novelty_N), "novelty": np.nan_to_num(novelty_N)}
        return fields | ({"has_vector": True} if vectors else {})

    def place_vectors(self, buffer: SRLReplayBuffer, measured: Mapping[int, Measured], change: Change) -> None:
        """Write diversity measures of items whose vectors arrived after the update."""
        if measured:
            variance_N = buffer.store.items["variance"][list(measured)]
            buffer.recall.change(list(measured), **self._measure(buffer, measured, variance_N, change))

    @staticmethod
    def _note(
        buffer: SRLReplayBuffer, domain: str, facts: GroupFacts, one: Visit | _PendingGroup, is_played: bool
    ) -> None:
        """Count a group in the statistics of its domain, unless another policy played it for a known item."""
        if isinstance(one, Visit):  # it has no item
            if is_played:
                buffer.domain_statistics.note(domain, facts.reward)
        elif one.is_visit:
            one.domain_place = buffer.domain_statistics.note(domain, facts.reward)

    def _note_unstored(
        self,
        buffer: SRLReplayBuffer,
        taken: Iterable[tuple[Group, GroupFacts, Visit | _PendingGroup]],
        policy_kl: float,
    ) -> None:
        """Add groups that have no item to the histories of their prompts."""
        noted = {
            key_of(group.prompt): facts for group, facts, one in taken if isinstance(one, Visit) and facts.num_rewarded
        }
        how = (self._settings.history_by, self._settings.history_half_life, policy_kl)
        if num_dropped := buffer.unstored.note(list(noted), list(noted.values()), *how):
            buffer.counts["num_histories_dropped"] += num_dropped

    def _grade(
        self, buffer: SRLReplayBuffer, played: Sequence[_PendingGroup], now: int, change: Change, policy_kl: float
    ) -> None:
        """Grade visits and write the changed fields of their items' rows."""
        facts = [pending.facts for pending in played]
        slots = [pending.slot for pending in played]
        size_N, variance_N, *others = (
            np.array([getattr(one, name) for one in facts])
            for name in ("size", "variance", "num_success", "reward", "nll", "version")
        )
        fields = dict(zip(("num_success", "reward", "nll", "version"), others, strict=True))
        before_N = rows_at(buffer.store.items, slots)
        settings = self._settings
        fields |= after_visit(before_N, facts, settings.history_by, settings.history_half_life, policy_kl)
        fields |= self._measure(buffer, {pending.slot: pending.measured for pending in played}, variance_N, change)
        fields |= {"pass_rate": fields["num_success"] / size_N, "group_size": size_N, "variance": variance_N}
        fields["visits"] = before_N["visits"] + 1
        if self._reads_recall:
            for pending, one in zip(played, buffer.recall.visit(slots, facts, now, **fields), strict=True):
                pending.graded = one
        else:  # nothing reads grades: the item rests, and is then due at any time
            last_N = np.where(size_N >= settings.min_graded, now, before_N["last_review"])
            buffer.store.update_many(slots, last_review=last_N, due=last_N + settings.min_recall_interval, **fields)
        for pending in played:
            pending.is_visit = True

    def _store(
        self, buffer: SRLReplayBuffer, pending: _PendingGroup, now: int, change: Change, policy_kl: float
    ) -> None:
        group, facts = pending.group, pending.facts
        if self._settings.history_by != "versions":  # the row has the version, but not these
            visits = int(buffer.store.items["visits"][pending.slot])
            history_at = policy_kl if self._settings.history_by == "kl" else visits
            group = replace(group, extra={**group.extra, "history_at": history_at})
        seq = buffer.store.header.next_group_seq
        _, evicted = buffer.store.add_group(
            pending.slot,
            born=now,
            num_bytes=change.keep(seq, group),
            # Without a visit the group is no part of the history.
            history_clock=buffer.store.items["history_clock"][pending.slot] if pending.is_visit else -1.0,
            domain_place=pending.domain_place,
            **{name: getattr(facts, name) for name in OF_GROUP},
        )
        change.removed_groups += evicted
        buffer.counts["num_groups_replaced"] += len(evicted)

    def _grow(self, buffer: SRLReplayBuffer, pending: _PendingGroup, now: int, change: Change) -> int:
        """Add the new items that `on_group` makes of a stored group; known prompts are left out."""
        if pending.refusal is not None or self._on_group is None:
            return 0
        num = 0
        for prompt in self._on_group(pending.group, self._max_prompt_tokens, buffer.generators["grow"]):
            if buffer.store.slot_of(key := key_of(prompt)) is None:
                buffer.add_item(key, prompt, now, change)
                num += 1
        buffer.counts["num_grown"] += num
        return num


def _without_transformers(model_dir: Path) -> Any:
    """Return the tokenizer loaded by the library `tokenizers`, or None if the directory has tokens that it leaves out.

    Importing transformers, which imports torch, takes longer than all else that a replay buffer does at its start.
    """
    saved, configured = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
    if not saved.is_file() or not configured.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(saved))
    config = json.loads(configured.read_text(encoding="utf-8"))
    named = [value for name, value in config.items() if name.endswith("_token")]
    for several in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(several) or []
        named += listed.values() if isinstance(listed, dict) else listed
    texts = {text["content"] if isinstance(text, dict) else text for text in named} - {None, True, False}
    if any(tokenizer.token_to_id(text) is None for text in texts):
        return None
    added = config.get("added_tokens_decoder") or {}
    is_whole = all(tokenizer.id_to_token(int(number)) == token["content"] for number, token in added.items())
    return tokenizer if is_whole else None


def decoder_of(model_dir: Path) -> Callable[[Sequence[int]], str]:
    """Return the decoding function of a model's tokenizer; it keeps special tokens."""
    if (alone := _without_transformers(model_dir)) is not None:
        return partial(alone.decode, skip_special_tokens=False)
    from rllib_srl.engine.model_dir import load_tokenizer

    tokenizer = load_tokenizer(model_dir)
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:  # the wrapper takes four times as long
        return partial(fast.decode, skip_special_tokens=False)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode
