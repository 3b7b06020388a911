"""Which domains fresh prompts come from as training goes on: a pure function from progress to weights.

    [{"world": "compare", "env_config": {...}, "iterations": 10}, {"world": "lookup", "tokens": 9000}]     a sequence
    {"domains": [...], "schedule": [[0, {"compare": 1}], [50, {"compare": 1, "lookup": 3}]]}     weights interpolated
    {"domains": [...], "drift": 40, "sharpness": 3, "seed": 0}                      weights drift, without boundaries

An entry names a world and its settings. Its domain is the world's own unless the entry gives one; then the
environment id is "world#domain", so that one world under two settings is two domains. A `filter`
("module:function" of a prompt id) restricts an entry to a part of its world. A stage's length is counted in
iterations or in generated tokens, and the last stage lasts as long as the run does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.worlds import environment_id

UNITS = ("iterations", "tokens")
ENTRY = ("world", "env_config", "domain", "filter")
FORMS = 'a list of stages, or {"domains": [...]} with "schedule" or "drift"'


class Progress(NamedTuple):
    """How far a run is: finished iterations, and the tokens that the policy has generated in training."""

    iterations: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Entry:
    """A domain's source: a world with settings, or a part of it. Invariant: equal `env_id` means equal entries."""

    world: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""  # "": as the world says
    filter: str = ""  # "module:function" of a prompt id; "": all prompts

    @property
    def name(self) -> str:
        """Return what weights call the entry: its domain where it has one of its own, else its world."""
        return self.domain or self.world

    @property
    def env_id(self) -> str:
        """Return the id that prompts carry."""
        return environment_id(self.world, self.domain)

    def predicate(self) -> Callable[[str], bool] | None:
        """Return what says whether a prompt id belongs to the domain, None for all.

        Raises:
            ValueError: the filter cannot be imported.
        """
        if not self.filter:
            return None
        module, _, name = self.filter.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"filter = {self.filter!r}; expected 'module:function' of a prompt id: {error}") from error
        if not callable(found):
            raise ValueError(f"filter = {self.filter!r}; expected a function, not a {type(found).__name__}")
        return found


class Stream:
    """Weights of entries over progress. Invariant: `weights` depends on its argument alone, and sums to 1."""

    def __init__(self, entries: Sequence[Entry], unit: str = "iterations") -> None:
        """Stream over `entries`, progress being counted in `unit`."""
        self.entries = {entry.env_id: entry for entry in entries}
        self._unit = unit

    def weights(self, progress: Progress) -> dict[str, float]:
        """Return environment id -> share of fresh prompts, of every entry, 0 included."""
        return dict(zip(self.entries, self._shares(self._at(progress)).tolist(), strict=True))

    def stage(self, progress: Progress) -> int | None:
        """Return the number of the stage, from 0; None for a stream without boundaries."""
        return None

    @property
    def length(self) -> Progress | None:
        """Return how far the last boundary or knot lies, in one of the two units; None without an end."""
        return None

    def _at(self, progress: Progress) -> float:
        return float(getattr(progress, self._unit))

    def _as_progress(self, amount: float) -> Progress:
        return Progress(**{self._unit: math.ceil(amount)})

    def _shares(self, at: float) -> np.ndarray:
        raise NotImplementedError


class Stages(Stream):
    """One entry after the other; an entry may come back."""

    def __init__(self, entries: Sequence[Entry], lengths: Sequence[int], unit: str) -> None:
        """Play stage i for `lengths[i]` of `unit`, and the last one for good."""
        super().__init__(entries, unit)
        self._order = [entry.env_id for entry in entries]
        self._ends = np.cumsum(lengths)

    def stage(self, progress: Progress) -> int:
        """Return the number of the stage, from 0."""
        passed = int(np.searchsorted(self._ends, self._at(progress), side="right"))
        return min(passed, len(self._order) - 1)

    def env_id_of(self, stage: int) -> str:
        """Return the environment id that a stage plays."""
        return self._order[stage]

    @property
    def length(self) -> Progress:
        """Return where the last stage ends by its own length."""
        return self._as_progress(int(self._ends[-1]))

    def _shares(self, at: float) -> np.ndarray:
        passed = min(int(np.searchsorted(self._ends, at, side="right")), len(self._order) - 1)
        return np.array([float(env_id == self._order[passed]) for env_id in self.entries])


class Schedule(Stream):
    """Weights given at knots and interpolated linearly between them; the outer ones hold beyond."""

    def __init__(self, entries: Sequence[Entry], knots: Sequence[tuple[float, Mapping[str, float]]], unit: str) -> None:
        """Interpolate between `knots`: progress, weights by the names of entries (a name left out weighs 0)."""
        super().__init__(entries, unit)
        rows = np.array([[weights.get(entry.name, 0.0) for entry in self.entries.values()] for _, weights in knots])
        self._at_K = np.array([at for at, _ in knots], float)
        self._share_KE = rows / rows.sum(1, keepdims=True)

    @property
    def length(self) -> Progress:
        """Return where the last knot lies."""
        return self._as_progress(float(self._at_K[-1]))

    def _shares(self, at: float) -> np.ndarray:
        return np.array([np.interp(at, self._at_K, share_K) for share_K in self._share_KE.T])


class Drift(Stream):
    """Weights that rise and fall smoothly, each entry once a period, in a seeded order.

    weight_e = exp(sharpness cos(2 pi (at / period - phase_e))), divided by the sum; phases lie one to each of E equal
    parts of a period.
    """

    def __init__(self, entries: Sequence[Entry], period: float, unit: str, sharpness: float, seed: int) -> None:
        """Drift through all entries once in `period` of `unit`; sharpness 0 weighs them equally for good."""
        super().__init__(entries, unit)
        generator = np.random.default_rng(np.random.SeedSequence([seed, sum(b"drift")]))
        num = len(self.entries)
        self._phase_E = (generator.permutation(num) + generator.uniform(0.0, 1.0, num)) / num
        self._period, self._sharpness = period, sharpness

    def _shares(self, at: float) -> np.ndarray:
        weight_E = np.exp(self._sharpness * np.cos(2 * math.pi * (at / self._period - self._phase_E)))
        return weight_E / weight_E.sum()


def make_stream(spec: Any) -> Stream:
    """Return the stream that `spec` describes; see the module for the forms.

    Raises:
        ValueError: naming all faults at once.
    """
    if faults := stream_faults(spec):
        raise ValueError("; ".join(faults))
    if not isinstance(spec, Mapping):
        unit = _unit_of(spec)
        return Stages([_entry(values) for values in spec], [values.get(unit, 1) for values in spec], unit)
    entries, unit = [_entry(values) for values in spec["domains"]], spec.get("unit", "iterations")
    if "schedule" in spec:
        return Schedule(entries, [(at, weights) for at, weights in spec["schedule"]], unit)
    return Drift(entries, spec["drift"], unit, spec.get("sharpness", 3.0), spec.get("seed", 0))


def stream_faults(spec: Any) -> list[str]:
    """Return every fault of a stream as "name = value; expected ...", [] if there is none."""
    is_sequence = isinstance(spec, Sequence) and not isinstance(spec, str)
    listed = spec.get("domains") if isinstance(spec, Mapping) else spec if is_sequence else None
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        return [f"stream = {spec!r}; expected {FORMS}"]
    faults = [line for at, values in enumerate(listed) for line in _faults_of_entry(at, values, is_sequence)]
    if faults:
        return faults
    faults += _faults_of_names([_entry(values) for values in listed], is_sequence)
    return faults + list(_faults_of_stages(listed) if is_sequence else _faults_of_form(spec))


def _entry(values: Mapping[str, Any]) -> Entry:
    return Entry(**{name: values[name] for name in ENTRY if values.get(name) is not None})


def _unit_of(stages: Sequence[Mapping[str, Any]]) -> str:
    return "tokens" if any("tokens" in values for values in stages) else "iterations"


def _faults_of_entry(at: int, values: Any, is_stage: bool) -> Iterator[str]:
    allowed = (*ENTRY, *UNITS) if is_stage else ENTRY
    if not isinstance(values, Mapping) or not isinstance(values.get("world"), str) or not values["world"]:
        yield f'stream[{at}] = {values!r}; expected {{"world": name, "env_config": {{...}}}}'
        return
    if unknown := sorted(set(values) - set(allowed), key=str):
        yield f"stream[{at}] has {unknown}; expected some of {', '.join(allowed)}"
    if not isinstance(values.get("env_config") or {}, Mapping):
        yield f"stream[{at}] env_config = {values['env_config']!r}; expected a mapping"
    for name in ("domain", "filter"):
        if not isinstance(values.get(name) or "", str):
            yield f"stream[{at}] {name} = {values[name]!r}; expected text"
            return
    try:
        _entry(values).predicate()
    except (TypeError, ValueError) as error:
        yield f"stream[{at}] {error}"


def _faults_of_names(entries: Sequence[Entry], may_return: bool) -> Iterator[str]:
    seen: dict[str, Entry] = {}
    for at, entry in enumerate(entries):
        other = seen.setdefault(entry.env_id if may_return else entry.name, entry)
        if other != entry or (not may_return and other is not entry):
            yield (
                f"stream[{at}] is another part of {entry.name!r} than an earlier entry; "
                "expected a 'domain' of its own, or the same settings"
            )


def _faults_of_stages(stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    unit = _unit_of(stages)
    for at, values in enumerate(stages):
        given = [name for name in UNITS if name in values]
        is_open = not given and at == len(stages) - 1  # the last stage needs no end
        if not is_open and (given != [unit] or not _is_count(values[unit])):
            yield f"stream[{at}] lasts {({n: values[n] for n in given})!r}; expected {unit} = an integer of at least 1"


def _faults_of_form(spec: Mapping[str, Any]) -> Iterator[str]:
    form = "schedule" if "schedule" in spec else "drift"
    if ("schedule" in spec) == ("drift" in spec):
        yield f"stream = {dict(spec)!r}; expected either schedule or drift beside domains"
        return
    allowed = {"domains", "unit", form, *(("sharpness", "seed") if form == "drift" else ())}
    if unknown := sorted(set(spec) - allowed, key=str):
        yield f"stream has {unknown}; expected some of {', '.join(sorted(allowed))}"
    if spec.get("unit", "iterations") not in UNITS:
        yield f"stream unit = {spec['unit']!r}; expected one of {', '.join(UNITS)}"
    if form == "schedule":
        yield from _faults_of_knots(spec["schedule"], [_entry(values).name for values in spec["domains"]])
        return
    if not _is_number(spec["drift"]) or spec["drift"] <= 0:
        yield f"stream drift = {spec['drift']!r}; expected the length of a period, above 0"
    if not _is_number(spec.get("sharpness", 3.0)) or not 0 <= spec.get("sharpness", 3.0) <= 100:
        yield f"stream sharpness = {spec['sharpness']!r}; expected a number from 0 to 100"
    if not _is_count(spec.get("seed", 0) + 1 if isinstance(spec.get("seed", 0), int) else None):
        yield f"stream seed = {spec['seed']!r}; expected an integer of at least 0"


def _faults_of_knots(knots: Any, names: Sequence[str]) -> Iterator[str]:
    pairs = isinstance(knots, Sequence) and not isinstance(knots, str) and len(knots) > 0
    if not pairs or any(not isinstance(k, Sequence) or len(k) != 2 or not _is_number(k[0]) for k in knots):
        yield f"stream schedule = {knots!r}; expected [[progress, {{name: weight}}], ...]"
        return
    if [at for at, _ in knots] != sorted({at for at, _ in knots}) or knots[0][0] < 0:
        yield f"stream schedule at {[at for at, _ in knots]}; expected rising progress from 0 on"
    for at, weights in knots:
        is_mapping = isinstance(weights, Mapping) and not set(weights) - set(names)
        if not is_mapping or not all(_is_number(w) and w >= 0 for w in weights.values()) or not sum(weights.values()):
            yield f"stream schedule at {at} = {weights!r}; expected weights of some of {list(names)}, not all 0"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
