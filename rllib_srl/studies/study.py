"""Definition of a study: its question, its arms, and the primary comparison, all fixed before the first trial.

The `fingerprint` covers every field, including the settings of each arm, and each trial stores the fingerprint of its
study. Changing question, arms or primary comparison afterwards makes another study, to which no existing trial belongs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field

from rllib_srl.studies.accuracy import NEVER
from rllib_srl.studies.measures import MEASURES
from rllib_srl.studies.seeds import ALPHA

FORMAT = "rllib_srl.study/3"
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # for dataclasses that are read from JSON
PRIMARY_MEASURES = ("average_accuracy", "retention_area")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Arm:
    """One setting under comparison."""

    __pydantic_config__ = STRICT

    name: str  # letters, digits and _ . + -; also part of file names
    title: str  # title in the report: "SRL + diversity"
    description: str  # one plain sentence: the difference from other arms
    settings: dict[str, Any] = field(default_factory=dict)  # settings of this arm, by the names of docs/settings.md


@dataclass(frozen=True)
class Domain:
    """One kind of task of the stream."""

    __pydantic_config__ = STRICT

    name: str
    learned_at: int | None  # the stage after which it counts as learned; None: only evaluated, never taught


@dataclass(frozen=True)
class Primary:
    """The primary comparison: `treatment` against each of `controls` on each of `measures`.

    It holds if each of these paired differences has a 95 % interval in favour of the treatment and a p value below
    `alpha` after Holm's correction for their number. A question that k confirmations ask has an `alpha` of .05 / k.
    """

    __pydantic_config__ = STRICT

    treatment: str
    controls: tuple[str, ...]
    measures: tuple[str, ...] = PRIMARY_MEASURES
    alpha: float = ALPHA


@dataclass(frozen=True)
class Study:
    """A study, fixed before the first trial. Invariant: `errors` is empty for a study that was written or read."""

    __pydantic_config__ = STRICT

    name: str
    question: str  # in plain words, ends with "?"
    answered_by: str  # the result that would answer it, in plain words
    arms: tuple[Arm, ...]
    domains: tuple[Domain, ...]
    num_stages: Annotated[int, Field(ge=1)]
    seeds: tuple[int, ...]
    budget: Annotated[int, Field(ge=1)]  # generated tokens of a trial, which stops after the iteration that reaches it
    primary: Primary
    settings: dict[str, Any] = field(default_factory=dict)  # settings of all arms, including "stream"
    format: str = FORMAT

    def errors(self) -> list[str]:
        """Return error messages, one line each; [] if the study is valid."""
        errors = [] if self.format == FORMAT else [f"format = {self.format!r}; expected {FORMAT!r}"]
        named = {"name": [self.name], "arms": [a.name for a in self.arms], "domains": [d.name for d in self.domains]}
        for kind, names in named.items():
            errors += [f"{kind}: {n!r}; expected letters, digits and _ . + -" for n in names if not NAME.fullmatch(n)]
        for kind, entries in {**named, "seeds": self.seeds}.items():
            counts = Counter(entries).items()
            errors += [f"{kind}: {entry!r} occurs {n} times; expected once" for entry, n in counts if n > 1]
            if not entries:
                errors.append(f"{kind} is empty; expected at least one")
        for domain in self.domains:
            if domain.learned_at is not None and not 0 <= domain.learned_at < self.num_stages:
                stages = f"a stage from 0 to {self.num_stages - 1}, or null"
                errors.append(f"domain {domain.name!r}: learned_at = {domain.learned_at}; expected {stages}")
        return errors + self._errors_of_stream() + self._errors_of_primary(named["arms"])

    def _errors_of_stream(self) -> list[str]:
        stages = self.settings.get("stream")
        if stages is None:  # results can be read without it
            return []
        lengths = [stage.get("tokens") for stage in stages] if isinstance(stages, list | tuple) else []
        if len(lengths) == self.num_stages and None not in lengths and sum(lengths) == self.budget:
            return []
        expected = f"{self.num_stages} stages in tokens that sum to the budget of {self.budget}"
        return [f"stream has stages of {lengths} tokens; expected {expected}"]

    def _errors_of_primary(self, arms: Sequence[str]) -> list[str]:
        primary = self.primary
        known = f"expected one of {', '.join(arms)}"
        compared, controls = (primary.treatment, *primary.controls), list(primary.controls)
        errors = [f"primary: arm {name!r} is unknown; {known}" for name in compared if name not in arms]
        if not controls or len(set(compared)) < len(compared):
            errors.append(f"primary: controls = {controls}; expected other arms than the treatment, once each")
        comparable = [name for name, measure in MEASURES.items() if measure.better]
        unknown = [name for name in primary.measures if name not in comparable]
        if unknown or not primary.measures:
            errors.append(f"primary: measures = {list(primary.measures)}; expected some of {', '.join(comparable)}")
        if not 0 < primary.alpha <= ALPHA:
            errors.append(f"primary: alpha = {primary.alpha:g}; expected above 0 and at most {ALPHA:g}")
        return errors

    def checked(self) -> Study:
        """Return the study itself.

        Raises:
            ValueError: all errors, one per line.
        """
        if errors := self.errors():
            raise ValueError("\n".join(errors))
        return self

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all fields, 16 hex digits."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=8).hexdigest()

    def settings_of(self, arm: str, seed: int) -> dict[str, Any]:
        """Return the settings of a trial by the names of docs/settings.md; an arm's settings override the study's."""
        arm_settings = next(a.settings for a in self.arms if a.name == arm)
        return {**self.settings, **arm_settings, "seed": seed}

    def learned_at_C(self) -> np.ndarray:
        """Return the stage that taught each domain, int64 [C]; NEVER for a domain that no stage teaches."""
        return np.array([NEVER if d.learned_at is None else d.learned_at for d in self.domains], np.int64)

    def title_of(self, arm: str) -> str:
        """Return the title of an arm."""
        return next(a.title for a in self.arms if a.name == arm)
