"""Persistence of a buffer: opens, commits, snapshots and restores its journal.

    journal --load--> store, generators, counts, calibrators --calls--> transaction --commit--> journal

The content of a buffer is the journal's rows (items, groups, vectors, reviews) and its state (plain values by name).
The replay calls are in `buffer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.tracker import Variety
from rllib_srl.replay.ingest import Intake
from rllib_srl.replay.journal.journal import Stored
from rllib_srl.replay.journal.orphans import Orphans
from rllib_srl.replay.journal.transaction import Change, Ledger
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.schedule.review_log import RECENT, Reviews
from rllib_srl.replay.selection.sampler import Draws
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import MemoryStore
from rllib_srl.replay.store.records import Header

OVERFLOW = 256  # items above capacity held until the end of a call, so that new items are candidates of eviction too
STREAMS = ("revisit", "reuse", "orphan", "grow", "evict")


class PersistentBuffer:
    """Buffer state that is kept in step with a journal.

    Invariant: outside a call, memory and journal agree; a call that raises leaves both unchanged.
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
        temperature: float = 1.0,
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
            temperature: sampling temperature of the groups, written to the review log.
            kwargs: fields of `ReplaySettings`.

        Raises:
            ValueError: settings out of range, all at once.
            JournalError: the journal is in use, damaged or of another version.
        """
        self.settings = (settings or ReplaySettings(**kwargs)).checked()
        if not self.settings.is_on:
            raise ValueError("capacity = 0; expected at least 1: a buffer without room is no buffer")
        self._seed, self._model_dir, self._temperature = seed, model_dir, temperature
        self._settings_dict = self.settings.as_dict()
        self.intake = Intake(self.settings, model_dir, decode, max_prompt_tokens)
        self.ledger = Ledger(None if directory is None else Path(directory), run, self.settings.max_bytes)
        try:
            self._load(self.ledger.stored())
        except BaseException:
            self.ledger.close()
            raise

    def _load(self, stored: Stored) -> None:
        settings = self.settings
        self._seed = stored.state.get("seed", self._seed)  # a restored run keeps its seed
        own = np.array([seq not in stored.orphans for seq in stored.seqs.tolist()], bool)
        self.store = (
            MemoryStore.load(
                max(settings.capacity, len(stored.slots)) + OVERFLOW,
                int(stored.items["num_groups"].max(initial=settings.groups_per_item)),
                Header.from_json(stored.state["store"]),
                items=(stored.slots, stored.items, stored.prompts),
                groups=stored.groups[own],
            )
            if "store" in stored.state
            else MemoryStore(settings.capacity + OVERFLOW, settings.groups_per_item)
        )
        self.recall = Recall(settings, self.store)
        self.recall.rebuild()
        self.draws = Draws(settings, self.store, self.recall)
        self.orphans = Orphans(settings, stored)
        self.variety = Variety(settings, self._model_dir, self._seed)
        self.variety.load(self.ledger.journal.vectors(), stored.state.get("fitted"))
        newest = self.ledger.journal.reviews(last=RECENT)
        self.reviews = Reviews(settings.iterations_per_day, self._temperature, newest)
        self.generators = {
            name: np.random.default_rng(np.random.SeedSequence([self._seed, sum(name.encode())])) for name in STREAMS
        }
        self.counts: Counter[str] = Counter()
        self.drawn: dict[str, int] = {}  # id of each group of the last draw -> its seq
        if "store" in stored.state:
            self._set_state(stored.state)

    # --- a call ----------------------------------------------------------------------------------

    def _answered(self, request: str) -> Any | None:
        """Return the stored answer of this request, or None."""
        return self.ledger.journal.answer(request) if request else None

    @contextmanager
    def _transaction(self, request: str) -> Iterator[Change]:
        """Commit the changes made inside the context; roll back on an error."""
        before = self.ledger.agreed or self._state()
        with self.ledger.transaction(self.store, self._state, lambda: self._undo(before), request) as change:
            yield change
        self.orphans.commit()
        self.reviews.commit(change)
        self.variety.commit()

    def _undo(self, before: dict[str, Any]) -> None:
        self.orphans.rollback()
        self.variety.rollback()
        self._set_state(before)
        self.recall.rebuild()

    def _state(self) -> dict[str, Any]:
        """Return all state that is not in rows, as JSON types."""
        return {
            "store": self.store.header.to_json(),
            "generators": {name: generator.bit_generator.state for name, generator in self.generators.items()},
            "counts": dict(self.counts),
            "draws": self.draws.get_state(),
            "drawn": dict(self.drawn),
            "slots": self.recall.slots,
            "domain_recall": self.recall.domains.get_state(),
            "settings": self._settings_dict,  # so that a journal can be read without the run that wrote it
            "seed": self._seed,
            **self.variety.get_state(),
        }

    def _set_state(self, state: dict[str, Any]) -> None:
        for name, generator in self.generators.items():
            generator.bit_generator.state = state["generators"][name]
        self.counts = Counter(state["counts"])
        self.draws.set_state(state["draws"])
        self.drawn = dict(state["drawn"])
        self.recall.slots = state["slots"]
        self.recall.domains.set_state(state["domain_recall"])
        self.variety.set_state(state)

    # --- copies ----------------------------------------------------------------------------------

    def snapshot(self, path: Path) -> dict[str, Any]:
        """Write a consistent copy of the journal to `path` atomically, in bounded memory; return its position.

        Raises:
            JournalError: the disk is full, or `path` cannot be written.
        """
        position = self.ledger.journal.snapshot(path)
        return {"position": position, "num_items": len(self.store), "num_groups": self.store.num_groups}

    def restore(self, path: Path) -> int:
        """Restore a snapshot; return the number of groups committed after it, which are kept as orphans.

        Raises:
            JournalError: the snapshot cannot be read; nothing has changed.
        """
        restored = self.ledger.restore(path)
        self._load(self.ledger.stored())
        with self._transaction(""):  # writes this run's name into the journal
            self.counts["num_orphans_taken_over"] += restored.num_orphans
        return restored.num_orphans

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
        """Check every invariant: the tables and their indexes, the load, the vectors, the journal.

        Raises:
            ValueError: naming every broken invariant.
        """
        faults: list[str] = []
        for check in (self.store.check_valid, self.recall.check, lambda: self.variety.check(self.store)):
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
        rows |= {seq: row.tobytes() for seq, row in self.orphans.rows.items()}
        if {int(seq): row.tobytes() for seq, row in zip(stored.seqs, stored.groups, strict=True)} != rows:
            yield "the journal has exactly the groups of the table and the orphans"
        if missing := [seq for seq in rows if not journal.has_group(seq)]:
            yield f"every group can be read: not so for {missing[:5]}"
        if [slot for slot, _ in journal.vectors()] != slots_N[self.store.items[slots_N]["has_vector"]].tolist():
            yield "the journal has exactly the vectors of the items with has_vector"
        # Both lag behind: a fit of the index is written with the following commit, new settings with the next one.
        kept = {name: value for name, value in self._state().items() if name not in ("fitted", "settings")}
        if journal.position and (wrong := [name for name, value in kept.items() if stored.state.get(name) != value]):
            yield f"the journal has the state of memory: not so for {wrong}"
