"""Checks after a fault: counts add up, nothing acknowledged is lost, weights are verified, no draw is repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_srl.replay.journal.codec import decode
from rllib_srl.replay.journal.journal import Journal
from rllib_srl.replay.journal.schema import FIRST_ORPHAN

CANARY = 1e-3  # mean gap of log-probs, nats; an engine with other weights always exceeds it
ANSWER_S = 120.0


@dataclass
class Page:
    """What a memory has acknowledged: the groups that it took, and how often it returned each."""

    kept: set[str] = field(default_factory=set)
    drawn: Counter[str] = field(default_factory=Counter)
    earlier: set[str] = field(default_factory=set)  # of iterations that a restore has undone

    def copy(self) -> Page:
        """Return a page that changes alone."""
        return Page(set(self.kept), Counter(self.drawn), set(self.earlier))


class Books:
    """The acknowledged operations of a run's memory; a restored snapshot brings back the page of that time.

    Invariant: the memory evicts nothing, or the journals would differ from the books.
    """

    def __init__(self, memory: Any) -> None:
        """Record every answer of `memory` from now on."""
        self.page = Page()
        self._pages: dict[Path, Page] = {}
        add, sample, snapshot, restore = memory.add, memory.sample, memory.snapshot, memory.restore

        def noted_add(groups: Any, *arguments: Any) -> Any:
            visits = add(groups, *arguments)
            self.page.kept |= {group_id for group_id, visit in visits.items() if not visit.refused}
            return visits

        def noted_sample(*arguments: Any) -> Any:
            groups = sample(*arguments)
            self.page.drawn.update(group.group_id for group in groups)
            return groups

        def noted_snapshot(directory: Path) -> None:
            snapshot(directory)
            self._pages[Path(directory).absolute()] = self.page.copy()

        def noted_restore(directory: Path) -> Any:
            num_orphans, now = restore(directory), self.page
            self.page = self._pages[Path(directory).absolute()].copy()
            self.page.earlier |= now.earlier | (now.kept - self.page.kept)
            return num_orphans

        memory.add, memory.sample = noted_add, noted_sample
        memory.snapshot, memory.restore = noted_snapshot, noted_restore
        self._copy = snapshot

    def faults(self, memory: Any, directory: Path) -> list[str]:
        """Return a message for each difference between journals and acknowledged operations."""
        self._copy(directory)
        uses: Counter[str] = Counter()
        orphans: set[str] = set()
        for index in range(memory.num_shards):
            with Journal(directory / f"shard_{index}.sqlite") as journal:
                stored = journal.load()
                for seq, row in zip(stored.seqs.tolist(), stored.groups, strict=True):
                    name = decode(journal.read_group(seq)).group_id
                    if seq >= FIRST_ORPHAN:
                        orphans.add(name)
                    elif name in uses:
                        return [f"group {name} is stored twice"]
                    else:
                        uses[name] = int(row["uses"])
        page, found = self.page, []
        if lost := page.kept - set(uses):
            found.append(f"acknowledged groups are missing: {sorted(lost)}")
        if lost := page.earlier - set(uses) - orphans:
            found.append(f"acknowledged groups of repeated iterations are missing: {sorted(lost)}")
        if extra := set(uses) - page.kept:
            found.append(f"groups that were never acknowledged: {sorted(extra)}")
        drawn = Counter({name: num for name, num in page.drawn.items() if ".orphan" not in name})
        if +uses != drawn:
            found.append(f"draws {dict(drawn - +uses)} more and uses {dict(+uses - drawn)} more than the other")
        return found


def faults_of(algo: Any, result: Mapping[str, Any]) -> list[str]:
    """Return a message for each fault after an iteration."""
    played, learnt, found = result["env_runners"], result["learners"]["default_policy"], []
    num_groups = sum(played[f"num_groups_{kind}"] for kind in ("with_signal", "without_signal", "dropped"))
    if num_groups != algo.config.num_prompts_per_batch:
        found.append(f"{num_groups:g} prompts of {algo.config.num_prompts_per_batch} are accounted for")
    if result["replay"]["num_groups_lost"]:
        found.append(f"{result['replay']['num_groups_lost']:g} groups were lost on the way to the memory")
    is_clipped = learnt.get("reuse/clip_fraction") == 1  # a group that was trained on before may be, in all tokens
    if learnt["reuse/num_tokens"] and not is_clipped and not learnt["reuse/gradient_norm"] > 0:
        found.append(
            f"reused groups have no gradient: norm {learnt['reuse/gradient_norm']}, share of clipped tokens "
            f"{learnt.get('reuse/clip_fraction')}"
        )
    return found + faults_of_weights(algo)


def faults_of_weights(algo: Any) -> list[str]:
    """Return a message if the engines do not all compute with the newest weights."""
    found = []
    prints = list(algo.runners.fingerprint(algo.runners.ids, ANSWER_S).values())
    if any(one != prints[0] for one in prints):
        found.append("the engines hold different weights")
    gap, lost = algo.weight_sync.sync(algo.version)
    if lost or gap is None or not gap.mean < CANARY:
        found.append(f"the engines do not compute with version {algo.version}: {gap}, lost {sorted(lost)}")
    elif list(algo.runners.fingerprint(algo.runners.ids, ANSWER_S).values()) != prints:
        found.append(f"the engines did not hold version {algo.version}")
    return found
