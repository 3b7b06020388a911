"""The settings of `FixedPool`, and the choice of its prompts and wrong answers: `listed(settings)`.

    environments, rows ──first prompts of each kind──> those whose reference answer earns 1, each question once
    share of wrong answers ──smallest hashes──> prompts with WRONG in their id, and the turn that earns 1
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_srl.envs.wrappers.around import inner_world

KIND = re.compile(r"[A-Za-z0-9_.+-]+")
RIGHT, WRONG = ": ", "! "  # between kind and inner prompt id: which reference answer grades the prompt
_FULL = 0.999  # a reference answer that earns less is not right by its own grader
_MAX_NAMED = 5  # prompt ids in a warning
_MAX_UNSATISFIED = 100  # prompts of a kind in a row that no answer satisfies, before the pool is refused
_MAX_TRIED = 200  # other prompts of the kind whose answer is tried as the wrong one

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FixedPoolSettings:
    """Settings of `FixedPool`. Invariant: `faults` is empty for the settings of a built environment."""

    environments: dict[str, Any] = field(default_factory=dict)  # kind -> name, or {"env": name, "env_config": {...}}
    rows: str = ""  # a file of `question_file`; its kind is the file's name
    num_prompts_per_kind: int = 0  # of each environment; 0: by num_prompts
    num_prompts: int = 0  # of all kinds together; 0: by num_prompts_per_kind
    wrong_answers: float = 0.0  # share of the pool that is graded against a wrong answer
    seed: int = 0  # of the choice of prompts and of wrong answers

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = [
            f"{name} = {getattr(self, name)}; expected at least 0"
            for name in ("num_prompts_per_kind", "num_prompts", "seed")
            if getattr(self, name) < 0
        ]
        if not 0 <= self.wrong_answers < 1:
            faults.append(f"wrong_answers = {self.wrong_answers}; expected at least 0, below 1")
        if not self.environments and not self.rows:
            faults.append("environments = {}; expected kinds with environments, or rows = a file of questions")
        for kind, wanted in self.environments.items():
            faults += _faults_of_kind(kind, wanted)
        if self.rows and Path(self.rows).stem in self.environments:
            faults.append(f"rows = {self.rows!r} has the name of a kind of environments; expected another")
        return faults + self._faults_of_size()

    def _faults_of_size(self) -> list[str]:
        per_kind, total, num_kinds = self.num_prompts_per_kind, self.num_prompts, len(self.environments)
        if num_kinds and (per_kind > 0) == (total > 0):
            return [f"num_prompts_per_kind = {per_kind}, num_prompts = {total}; expected one of them above 0"]
        if not num_kinds and (per_kind or total):
            return ["num_prompts and num_prompts_per_kind are for environments; rows are all in the pool"]
        if num_kinds and not self.rows and max(total, per_kind * num_kinds) == 1:
            return ["the pool has 1 prompt; expected at least 2"]
        if 0 < total < num_kinds:
            return [f"num_prompts = {total}; expected at least one for each of the {num_kinds} kinds"]
        return []

    @property
    def made_of(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return kind -> name of its environment and env_config; the rows are the first kind."""
        made: dict[str, tuple[str, dict[str, Any]]] = {}
        if self.rows:
            made[Path(self.rows).stem] = ("question_file", {"path": self.rows, "num_shots": 0})
        for kind, wanted in self.environments.items():
            given: Mapping[str, Any] = {"env": wanted} if isinstance(wanted, str) else wanted
            made[kind] = (given["env"], dict(given.get("env_config") or {}))
        return made


def _faults_of_kind(kind: Any, wanted: Any) -> list[str]:
    faults = []
    if not isinstance(kind, str) or not KIND.fullmatch(kind):
        faults.append(f"environments: kind {kind!r}; expected letters, digits and _ . + -")
    given = {"env": wanted} if isinstance(wanted, str) else wanted
    is_valid = isinstance(given, Mapping) and isinstance(given.get("env"), str) and given["env"]
    if not is_valid or set(given) - {"env", "env_config"} or not isinstance(given.get("env_config") or {}, Mapping):
        form = '{"env": name, "env_config": {...}}'
        faults.append(f"environments[{kind!r}] = {wanted!r}; expected a name, or {form}")
    return faults


@dataclass(frozen=True)
class Listing:
    """The prompts of a pool. Invariant: ids are unique; `wrong` has one entry for each id of the pool with `WRONG`."""

    ids: tuple[str, ...]  # of training, in a fixed order
    stop_strings: tuple[str, ...]  # of all kinds
    wrong: Mapping[str, str]  # id with WRONG -> the turn that earns 1
    num_repeated: int  # prompts left out because an earlier one asks the same with the same answer
    num_unsatisfied: int  # prompts left out because their own reference answer earns less than 1


_LISTINGS: dict[str, Listing] = {}  # of this process, by settings
_LOCK = threading.Lock()  # a runner makes its instances in several threads


def listed(settings: FixedPoolSettings) -> Listing:
    """Return the prompts of a pool, chosen once per process for all instances with the same settings and file.

    Raises:
        ValueError: an environment cannot be made or has too few prompts, or the pool has fewer than 2.
    """
    about = Path(settings.rows).stat() if settings.rows and Path(settings.rows).is_file() else None
    key = f"{settings!r} {about.st_mtime_ns if about else 0} {about.st_size if about else 0}"
    with _LOCK:
        if key not in _LISTINGS:
            worlds = {kind: inner_world(*made) for kind, made in settings.made_of.items()}
            try:
                _LISTINGS[key] = _Chooser(settings, worlds).listing()
            finally:
                for world in worlds.values():
                    world.close()
        return _LISTINGS[key]


class _Chooser:
    """Chooses the prompts of a pool. Invariant: `_ids` and `_seen` belong together."""

    def __init__(self, settings: FixedPoolSettings, worlds: Mapping[str, Any]) -> None:
        self._settings, self._worlds = settings, worlds
        self._ids: list[str] = []
        self._seen: set[tuple[str, tuple[str, ...]]] = set()  # opening and reference answer
        self._repeated: list[str] = []
        self._unsatisfied: list[str] = []

    def listing(self) -> Listing:
        """Return the listing; warn about the prompts that were left out."""
        stops = self._common_stops()
        rows = Path(self._settings.rows).stem if self._settings.rows else ""
        num_rows_repeated = 0
        if rows:
            self._take(rows, None)
            if num_rows_repeated := self._worlds[rows].num_repeated:  # the environment itself counts them once
                name = self._settings.rows
                logger.warning("pool: %d rows of %s repeat an earlier one and count once", num_rows_repeated, name)
        for kind, num in self._sizes(len(self._ids)).items():
            self._take(kind, num)
        for left_out, why in ((self._repeated, "repeat an earlier one"), (self._unsatisfied, "reward no answer")):
            if left_out:
                named = ", ".join(map(repr, left_out[:_MAX_NAMED]))
                logger.warning("pool: %d prompts %s and are left out: %s", len(left_out), why, named)
        if len(self._ids) < 2:
            raise ValueError(f"the pool has {len(self._ids)} prompts; expected at least 2")
        wrong = self._wrong_turns(round(self._settings.wrong_answers * len(self._ids)))
        ids = tuple(_with_mark(prompt_id) if prompt_id in wrong else prompt_id for prompt_id in self._ids)
        marked = {_with_mark(prompt_id): turn for prompt_id, turn in wrong.items()}
        return Listing(ids, stops, marked, len(self._repeated) + num_rows_repeated, len(self._unsatisfied))

    def _common_stops(self) -> tuple[str, ...]:
        """Return the stop strings of all kinds, which a runner reads once for an instance."""
        first, *others = self._worlds
        stops = tuple(getattr(self._worlds[first], "stop_strings", ()))
        for kind in others:
            if (theirs := tuple(getattr(self._worlds[kind], "stop_strings", ()))) != stops:
                raise ValueError(
                    f"kinds {first!r} and {kind!r} end a turn with {stops!r} and {theirs!r}; expected the same strings"
                )
        if settling := [kind for kind, world in self._worlds.items() if hasattr(world, "settle_group")]:
            raise ValueError(f"kind {settling[0]!r} settles the rewards of groups; expected its inner environment")
        return stops

    def _sizes(self, num_rows: int) -> dict[str, int]:
        """Return kind -> number of prompts, as equal as possible, the first kinds larger."""
        kinds, per_kind = list(self._settings.environments), self._settings.num_prompts_per_kind
        if per_kind or not kinds:
            return dict.fromkeys(kinds, per_kind)
        left = self._settings.num_prompts - num_rows
        if left < len(kinds):
            raise ValueError(
                f"num_prompts = {self._settings.num_prompts}; expected at least {num_rows + len(kinds)}: {num_rows} "
                f"rows, and one of each of the {len(kinds)} environments"
            )
        return {kind: (left + len(kinds) - 1 - at) // len(kinds) for at, kind in enumerate(kinds)}

    def _take(self, kind: str, num: int | None) -> None:
        """Add `num` prompts of a kind to the pool, None for all, without those no answer satisfies or that repeat."""
        world, num_taken, num_in_a_row = self._worlds[kind], 0, 0
        for inner in world.prompt_ids("train", self._settings.seed):
            if num is not None and num_taken == num:
                return
            prompt_id, asked = f"{kind}{RIGHT}{inner}", _asked(world, inner)
            if asked is None:
                self._unsatisfied.append(prompt_id)
                if (num_in_a_row := num_in_a_row + 1) == _MAX_UNSATISFIED:
                    break
                continue
            num_in_a_row = 0
            if asked in self._seen:
                self._repeated.append(prompt_id)
                continue
            self._seen.add(asked)
            self._ids.append(prompt_id)
            num_taken += 1
        if num_in_a_row == _MAX_UNSATISFIED or (num is None and not num_taken):
            raise ValueError(f"kind {kind!r}: no answer satisfies its prompts, such as {self._unsatisfied[-1]!r}")
        if num is not None and num_taken < num:
            raise ValueError(f"kind {kind!r} has {num_taken} usable training prompts; expected {num}")

    def _wrong_turns(self, num: int) -> dict[str, str]:
        """Return prompt id -> turn that states a wrong answer, for the `num` ids with the smallest hashes."""
        found: dict[str, str] = {}
        for prompt_id in sorted(self._ids, key=lambda one: _hash(f"{self._settings.seed}:{one}")):
            if len(found) == num:
                return found
            kind, _, inner = prompt_id.partition(RIGHT)
            if (turn := _wrong_turn(self._worlds[kind], inner, self._settings.seed)) is not None:
                found[prompt_id] = turn
        if len(found) < num:
            raise ValueError(
                f"wrong_answers = {self._settings.wrong_answers}: {len(found)} of {len(self._ids)} prompts have a "
                f"wrong answer that can be stated; expected {num} (an environment needs gold_turns)"
            )
        return found


def stated(world: Any, turn: str) -> str:
    """Return the answer that a turn states, for a comparison of turns: without case, spacing and a final full stop."""
    if hasattr(world, "answer_in"):
        said = str(world.answer_in(turn))
    else:
        said = turn
        for stop in getattr(world, "stop_strings", ()):
            said = said.split(stop, 1)[0]
    return " ".join(said.casefold().split()).removesuffix(".")


def _asked(world: Any, inner: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the opening of a prompt with its reference turns, None if these do not earn the full reward."""
    opening = world.reset(options={"prompt_id": inner})[0]
    if not hasattr(world, "gold_turns"):
        return opening, (inner,)  # cannot be checked
    gold = list(world.gold_turns(inner))
    return (opening, tuple(gold)) if _earned(world, gold) >= _FULL else None


def _earned(world: Any, turns: Sequence[str]) -> float:
    """Return the reward of turns in an episode that has just begun."""
    total = 0.0
    for turn in turns:
        _, reward, terminated, truncated, _ = world.step(turn)
        total += float(reward)
        if terminated or truncated:
            break
    return total


def _wrong_turn(world: Any, inner: str, seed: int) -> str | None:
    """Return a last turn that states a wrong answer: the question's own `wrong`, else the answer of another prompt."""
    if not hasattr(world, "gold_turns"):
        return None
    *before, right = world.gold_turns(inner)
    for turn in _candidates(world, inner, bool(before), seed):
        if stated(world, turn) != stated(world, right):
            world.reset(options={"prompt_id": inner})
            if _earned(world, [*before, turn]) < _FULL:
                return turn
    return None


def _candidates(world: Any, inner: str, has_turns_before: bool, seed: int) -> Iterator[str]:
    if hasattr(world, "question") and not has_turns_before:
        yield f" {world.question(inner).wrong}{world.stop_strings[0]}"
    for _, other in zip(range(_MAX_TRIED), world.prompt_ids("train", seed)):
        yield world.gold_turns(other)[-1]


def _with_mark(prompt_id: str) -> str:
    return prompt_id.replace(RIGHT, WRONG, 1)


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
